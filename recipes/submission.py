"""Make and check the zip that GLUE's server accepts.

python recipes/submission.py submission.zip                            # checks a zip
python recipes/submission.py submission.zip runs/*/submission/*.tsv    # makes one, and checks it
"""

import argparse
from pathlib import Path

from common.edge import RecipeError, end_with_one_line
from common.submission import FILES, pack, problems


def main() -> None:
    """Read the command line, pack the given files, and check the zip."""
    parser = argparse.ArgumentParser(description="Make and check the zip that GLUE's server accepts.")
    parser.add_argument("zip", type=Path)
    parser.add_argument("files", type=Path, nargs="*", help="Files to put into a new zip.")
    arguments = parser.parse_args()
    for file in arguments.files:
        if file.name not in FILES or not file.is_file():
            raise RecipeError(f"A file to pack must exist and be one of {', '.join(FILES)}; got {file}. Leave it out.")
    if arguments.files:
        pack(arguments.files, arguments.zip)
    found = problems(arguments.zip)
    if found:
        raise RecipeError("\n".join([f"GLUE's server would refuse {arguments.zip}:", *found]))
    print(f"{arguments.zip} is a valid submission.")


if __name__ == "__main__":
    end_with_one_line(main)
