"""Writes text from outside into Markdown, so that no name or label can change the page around it.

The functions return `Markup`, a string that the card's template does not escape again.
"""

from __future__ import annotations

import re
from urllib.parse import quote

from markupsafe import Markup


# Underscores inside of a word are not markup.
_SPECIAL = re.compile(r"[\\`*\[\]<~$&]|(?<![^\W_])_|_(?![^\W_])")


def escape(value: object) -> Markup:
    """Write a value as plain text on one line; `Markup` stays as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(_SPECIAL.sub(r"\\\g<0>", " ".join(str(value).split())))


def cell(value: object) -> Markup:
    """Write a value into a cell of a table."""
    return Markup(str(escape(value)).replace("|", "\\|"))


def code(value: object) -> Markup:
    """Write a value as code within a line."""
    return Markup("`" + " ".join(str(value).split()).replace("`", "'") + "`")


def link(text: object, address: str) -> Markup:
    """Write a link, whose text is plain."""
    return Markup(f"[{escape(text)}]({quote(address, safe='/:')})")


def block(text: str, language: str) -> Markup:
    """Write a block of code between fences that are longer than any in the code."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return Markup(f"{fence}{language}\n{text}\n{fence}")
