"""Writes text from outside into Markdown, so that no name or label can change the page around it.

The functions return `Markdown`, which the card's template does not escape again.
"""

from __future__ import annotations

import re
from urllib.parse import quote


# Underscores inside of a word are not markup.
_SPECIAL = re.compile(r"[\\`*\[\]<~$&]|(?<![^\W_])_|_(?![^\W_])")


class Markdown(str):
    """A text that is Markdown already, so it is not escaped."""


def escape(value: object) -> Markdown:
    """Write a value as plain text on one line; `Markdown` stays as it is."""
    if isinstance(value, Markdown):
        return value
    return Markdown(_SPECIAL.sub(r"\\\g<0>", " ".join(str(value).split())))


def cell(value: object) -> Markdown:
    """Write a value into a cell of a table."""
    return Markdown(str(escape(value)).replace("|", "\\|"))


def code(value: object) -> Markdown:
    """Write a value as code within a line."""
    return Markdown("`" + " ".join(str(value).split()).replace("`", "'") + "`")


def link(text: object, address: str) -> Markdown:
    """Write a link, whose text is plain."""
    return Markdown(f"[{escape(text)}]({quote(address, safe='/:')})")


def block(text: str, language: str) -> Markdown:
    """Write a block of code between fences that are longer than any in the code."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return Markdown(f"{fence}{language}\n{text}\n{fence}")
