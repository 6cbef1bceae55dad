"""A table of results as text: how cells look, and how tables are printed and written."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from results.means import MeanAndError


MISSING = "-"
CONSTANT = "(one class for all)"  # beside a score of a run whose predictions are all the same
MAX_WIDTH = 140  # characters of a printed line
Pages = dict[str, tuple[pd.DataFrame, str]]  # tables by their headings, each with a note


def with_error(
    value: MeanAndError | None, sign: str = "", digits: int = 2, constant: bool = False
) -> str:
    """Return a mean with its standard error as text, marked if a run tells nothing apart."""
    if value is None:
        return MISSING
    mean, error = value
    text = f"{mean:{sign}.{digits}f}"
    if error is not None:
        text += f" ± {error:.{digits}f}"
    return f"{text} {CONSTANT}" if constant else text


def table_of(
    lines: Mapping[str, Mapping[str, Any]], names: Iterable[str] | None = None
) -> pd.DataFrame:
    """Return a table of lines by label, with all columns or those named.

    A dash stands for what is missing.
    """
    table = pd.DataFrame([*lines.values()], [*lines], dtype=object)
    if names is not None:
        table = table.reindex(columns=[*dict.fromkeys(names)], fill_value=MISSING)
    return table.fillna(MISSING)


def show(pages: Pages, path: Path) -> None:
    """Print tables at most 140 characters wide, and write them in Markdown."""
    for heading, (table, note) in pages.items():
        # A wide table is turned, and columns that are too many for a line continue below.
        turned = table.T if len(table) < len(table.columns) > 6 else table
        text = turned.to_string(line_width=MAX_WIDTH)
        print(f"\n{heading}\n\n{text}\n\n{note}".rstrip())
    parts = []
    for heading, (table, note) in pages.items():
        markdown = table.to_markdown(tablefmt="github", disable_numparse=True)
        parts.append(f"## {heading}\n\n{markdown}\n\n{note}".rstrip())
    path.write_text("\n\n".join(parts) + "\n")
