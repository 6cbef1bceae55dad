"""What the recipes' arguments are made of: flags with their help, and paths that exist."""

from pathlib import Path
from typing import Any

from transformers.hf_argparser import HfArg

from common.edge import RecipeError, looks_like_a_path


DATA_FILES = (".csv", ".tsv", ".jsonl", ".parquet")


def flag(**options: Any) -> Any:
    """Describe a flag of the command line: its default, help and aliases."""
    return HfArg(**options)


def check_path(name: str, value: str | None) -> None:
    """Raise RecipeError if the value of a flag can only be a path, and there is none: the Hub would
    be asked for it.
    """
    if not value or "{" in value or Path(value).expanduser().exists():
        return
    is_file = "/" not in value and Path(value).suffix in DATA_FILES
    if is_file or looks_like_a_path(value):
        raise RecipeError(
            f"--{name} must be a folder or file that exists, or a name on the Hub, got {value!r}."
        )
