"""Make and check the zip that GLUE's server accepts.

python recipes/submission.py submission.zip                            # checks a zip
python recipes/submission.py submission.zip runs/*/submission/*.tsv    # makes one, and checks it
"""

from pathlib import Path

from tasks.submission import FILES, pack, problems
from training.errors import RecipeError, end_with_one_line
from training.rules import OneLineErrors, check_unique


def main() -> None:
    """Read the command line, pack the given files, and check the zip."""
    parser = OneLineErrors(description="Make and check the zip that GLUE's server accepts.")
    parser.add_argument("zip", type=Path)
    parser.add_argument("files", type=Path, nargs="*", help="Files to put into a new zip.")
    arguments = parser.parse_args()
    for file in arguments.files:
        if file.name not in FILES or not file.is_file():
            raise RecipeError(f"A file to pack must exist and be one of {', '.join(FILES)}; got {file}. Leave it out.")
    check_unique("files", [file.name for file in arguments.files])
    if not arguments.zip.parent.is_dir():
        raise RecipeError(f"The zip must be in a folder that exists, got {arguments.zip}. Make the folder.")
    if arguments.files:
        pack(arguments.files, arguments.zip)
    found = problems(arguments.zip)
    if found:
        raise RecipeError("\n".join([f"GLUE's server would refuse {arguments.zip}:", *found]))
    print(f"{arguments.zip} is a valid submission.")


if __name__ == "__main__":
    end_with_one_line(main)
