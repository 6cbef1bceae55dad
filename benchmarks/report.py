"""Tables of measured rows, as text and in Markdown."""

from __future__ import annotations

from typing import Any


Rows = list[dict[str, Any]]


def table(rows: Rows, separator: str = "  ") -> str:
    """Return rows as a table with aligned columns; with the separator " | ", it is one of Markdown."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, *([_shown(row.get(key)) for key in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if separator == " | ":
        lines.insert(1, ["-" * width for width in widths])
    texts = [separator.join(map(str.ljust, line, widths)) for line in lines]
    return "\n".join(f"| {text} |" if separator == " | " else text.rstrip() for text in texts)


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " to ".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if type(value) is int else str("" if value is None else value)
