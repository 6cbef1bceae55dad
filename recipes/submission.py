"""Make and check the zip that GLUE's server accepts.

python recipes/submission.py submission.zip                            # checks a zip
python recipes/submission.py submission.zip runs/*/submission/*.tsv    # makes one, and checks it
"""

import argparse
import sys
from pathlib import Path

from tasks.submission import pack, problems


def main() -> None:
    """Read the command line, pack the given files, and check the zip."""
    parser = argparse.ArgumentParser(description="Make and check the zip that GLUE's server accepts.")
    parser.add_argument("zip", type=Path)
    parser.add_argument("files", type=Path, nargs="*", help="Files to put into a new zip.")
    arguments = parser.parse_args()
    if arguments.files:
        pack(arguments.files, arguments.zip)
    found = problems(arguments.zip)
    if found:
        sys.exit("\n".join([f"error: GLUE's server would refuse {arguments.zip}:", *found]))
    print(f"{arguments.zip} is a valid submission.")


if __name__ == "__main__":
    main()
