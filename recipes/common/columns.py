"""Which columns of a data set are the text, and which texts are there to learn from."""

from collections.abc import Sequence

from datasets import Dataset

from common.errors import RecipeError


# By these names, in this order; the first of which a data set has all.
TEXT_COLUMNS = (
    ("text",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "context"),
    ("question", "sentence"),
    ("sentence",),
    ("content",),
    ("review",),
)


def find_text_columns(data: Dataset, named: Sequence[str] | None) -> tuple[str, ...]:
    """The columns of one text or of a pair: those named on the command line, else by TEXT_COLUMNS.

    Raises:
        RecipeError: If more than two are named, or none is named and none found.
    """
    if named is not None:
        if not 1 <= len(named) <= 2:
            raise RecipeError(f"--text_columns must name a text or a pair of texts, got {', '.join(named)}.")
        return tuple(named)
    found = next((columns for columns in TEXT_COLUMNS if set(columns) <= set(data.column_names)), None)
    if found is None:
        raise RecipeError(
            f"No column has one of the usual names for text: there are {', '.join(data.column_names)}. Name one, or "
            "two for pairs, with --text_columns."
        )
    return found


def find_column(data: Dataset, named: str | None, usual: Sequence[str], flag: str) -> str:
    """The column named by the flag, else the first of the usual names that there is.

    Raises:
        RecipeError: If there is none.
    """
    found = next((column for column in ([named] if named else usual) if column in data.column_names), None)
    if found is None:
        wanted = repr(named) if named else f"named {' or '.join(usual)}"
        raise RecipeError(f"There is no column {wanted}, only {', '.join(data.column_names)}. Name it with {flag}.")
    return found


def leave_out_empty(data: Dataset, name: str, text_columns: Sequence[str]) -> Dataset:
    """The rows with any text in them, saying how many have none; blanks are no text.

    Raises:
        RecipeError: If no row has any.
    """
    columns = [data[column] for column in text_columns]
    rows = [row for row, texts in enumerate(zip(*columns, strict=True)) if any(map(str.strip, texts))]
    if not rows:
        raise RecipeError(f"{name} must hold text; all its {len(data):,} rows are empty.")
    if len(rows) < len(data):
        print(f"{name}: {len(data) - len(rows):,} rows without text are left out")
    return data.select(rows)
