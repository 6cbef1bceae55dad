"""Turn the report of `pip install --dry-run --report` (stdin) into a constraints file (stdout)."""

import json
import sys


# CUDA's packages: torch itself names their versions, and a machine without a GPU needs none of
# them.
CUDA = ("cuda-", "nvidia-", "triton")


def main() -> None:
    found = [
        item for item in json.load(sys.stdin)["install"] if "dir_info" not in item["download_info"]
    ]
    # "2.13.0" also admits the builds "2.13.0+cpu" and "2.13.0+cu130".
    versions = {
        item["metadata"]["name"].lower(): item["metadata"]["version"].split("+")[0]
        for item in found
    }
    for name in sorted(versions):
        if not name.startswith(CUDA):
            print(f"{name}=={versions[name]}")


if __name__ == "__main__":
    main()
