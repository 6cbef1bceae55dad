"""Tables of measured rows, as text and in Markdown."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate


Rows = list[dict[str, Any]]


def table(rows: Rows, style: str = "plain") -> str:
    """Return rows as a table with aligned columns; in the style "github", it is one of Markdown."""
    shown = [{key: _shown(value) for key, value in row.items()} for row in rows]
    return str(tabulate(shown, headers="keys", tablefmt=style, disable_numparse=True))


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " to ".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if type(value) is int else str("" if value is None else value)
