"""Separated values, read by pandas."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

from ..errors import AdapterError, shortened
from .table import SEPARATED, Cells, Table


_QUOTED = re.compile(r'(^|\t)"[^\t]*""[^\t]*"(\t|$)')
_SAMPLED = 200_000  # characters by which the separator is found


def read_separated(table: Table, text: str) -> Cells:
    """Return the fields of each line, of empty ones as well."""
    import pandas as pd

    lines = [line for line in text[:_SAMPLED].splitlines() if line]
    table.separator = _find_separator(lines, SEPARATED[table.format])
    names = lines[0].split(table.separator)[1:] if lines else []
    options: dict[str, Any] = {
        "sep": table.separator,
        "header": None,
        "dtype": object,
        "na_filter": False,
        "skip_blank_lines": False,
        # As in "id, text, label".
        "skipinitialspace": bool(names) and all(name.startswith(" ") for name in names),
    }
    if table.separator == "\t" and not _has_quotes(lines):
        options["quoting"] = csv.QUOTE_NONE
    try:
        try:
            frame = pd.read_csv(io.StringIO(text), **options)
        except pd.errors.ParserError:
            if '\\"' not in text:
                raise
            frame = pd.read_csv(io.StringIO(text), **options, escapechar="\\", doublequote=False)
    except pd.errors.EmptyDataError:
        return []
    except pd.errors.ParserError as error:
        reason = str(error).strip().removeprefix("Error tokenizing data. C error: ")
        # pandas counts these rows from 0 on.
        reason = re.sub(r"(?<=at row )\d+", lambda row: str(int(row[0]) + 1), reason)
        raise AdapterError(
            f"{table.path}: {shortened(reason)}. Put a field that holds {table.separator!r} or "
            "quotation marks between quotation marks, and write those inside it twice."
        ) from error
    cells: Cells = frame.to_numpy().tolist()
    _note_swallowed_rows(table, cells)
    return cells


def _find_separator(lines: Sequence[str], usual: str) -> str:
    """Return what divides most lines into as many fields as the first; of equals, the usual one."""
    plain = re.sub(r'"(?:[^"]|"")*"', "", "\n".join(lines)).splitlines()
    shares: dict[str, float] = {}
    for separator in (usual, ",", ";", "\t", "|"):
        counts = [line.count(separator) for line in plain]
        if counts and counts[0]:
            shares.setdefault(separator, counts.count(counts[0]) / len(counts))
    return max(shares, key=shares.__getitem__, default=usual)


def _has_quotes(lines: Sequence[str]) -> bool:
    """Return whether quotation marks quote fields of a table that is separated by tabs.

    In many such tables, as in GLUE's own, a quotation mark is part of the text.
    """
    if lines[:1] and lines[0].startswith('"'):
        return True
    return any(
        line.count("\t") != lines[0].count("\t") or _QUOTED.search(line.rstrip()) for line in lines
    )


def _note_swallowed_rows(table: Table, cells: Cells) -> None:
    """Note a field of several lines which look like rows, as after a lone quotation mark."""
    for number, fields in enumerate(cells, start=1):
        for position, value in enumerate(fields):
            separators = [line.count(table.separator) for line in value.split("\n")]
            separators[0] += position
            separators[-1] += len(fields) - 1 - position
            if len(separators) > 1 and len(fields) > 1 and {*separators} == {len(fields) - 1}:
                table.notes.append(
                    f"row {number} is {len(separators)} lines, as quotation marks enclose them. If "
                    "they are several rows, write each quotation mark twice"
                )
