"""Make and check the zip that GLUE's server accepts.

python recipes/submission.py submission.zip                            # checks a zip
python recipes/submission.py submission.zip runs/*/submission/*.tsv    # makes one, and checks it
"""

import argparse
from pathlib import Path

from common.edge import end_with_one_line
from common.glue_tasks import check_submission, pack


def main() -> None:
    """Read the command line, pack the given files, and check the zip."""
    parser = argparse.ArgumentParser(description="Make and check the zip that GLUE's server accepts.")
    parser.add_argument("zip", type=Path)
    parser.add_argument("files", type=Path, nargs="*", help="Files to put into a new zip.")
    arguments = parser.parse_args()
    if arguments.files:
        pack(arguments.files, arguments.zip)
    else:
        check_submission(arguments.zip)


if __name__ == "__main__":
    end_with_one_line(main)
