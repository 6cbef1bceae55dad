"""Writes text from outside into Markdown, so that no name or label can change the page around it.

The functions return `Markdown`, which the card's template does not escape again.
"""

from __future__ import annotations

import re
from pprint import pformat
from urllib.parse import quote

from ..errors import shortened


# Underscores inside of a word are not markup. Many renderers turn bare addresses into links.
_SPECIAL = re.compile(r"[\\`*\[\]<~$&@]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.", re.IGNORECASE)


class Markdown(str):
    """A text that is Markdown already, so it is not escaped."""


def escape(value: object) -> Markdown:
    """Write a value as plain text on one line; `Markdown` stays as it is."""
    if isinstance(value, Markdown):
        return value
    return Markdown(_SPECIAL.sub(r"\\\g<0>", shortened(str(value))))


def cell(value: object) -> Markdown:
    return Markdown(escape(value).replace("|", "\\|"))


def code(value: object) -> Markdown:
    return Markdown("`" + shortened(str(value)).replace("`", "'") + "`")


def link(text: object, address: str) -> Markdown:
    return Markdown(f"[{escape(text)}]({quote(address, safe='/:', errors='replace')})")


def python(value: object) -> Markdown:
    """Write a value as Python's code, whose further lines are indented by eight characters."""
    return Markdown(pformat(value, width=100).replace("\n", f"\n{' ' * 8}"))


def block(text: str, language: str) -> Markdown:
    """Write a block of code between fences that are longer than any in the code."""
    ticks = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, ticks + 1)
    return Markdown(f"{fence}{language}\n{text}\n{fence}")
