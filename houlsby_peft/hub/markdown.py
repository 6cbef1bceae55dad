"""Writes text from outside into Markdown, so that no name or label can change the page around it.

The functions return `Markdown`, which the card's template does not escape again.
"""

from __future__ import annotations

import re
from urllib.parse import quote

from ..errors import shortened


# Underscores inside of a word are not markup. Many renderers turn bare addresses into links.
_SPECIAL = re.compile(r"[\\`*\[\]<~$&@]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.", re.IGNORECASE)
# Control characters, those that reverse the direction of the text after them, and halves of
# surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Markdown(str):
    """A text that is Markdown already, so it is not escaped."""


def one_line(value: object) -> str:
    """Return a value as plain text on one line, which is not too long and changes nothing in a
    terminal.
    """
    return _UNPRINTABLE.sub("\ufffd", shortened(str(value)))


def escape(value: object) -> Markdown:
    """Write a value as plain text on one line; `Markdown` stays as it is."""
    return (
        value
        if isinstance(value, Markdown)
        else Markdown(_SPECIAL.sub(r"\\\g<0>", one_line(value)))
    )


def cell(value: object) -> Markdown:
    return Markdown(escape(value).replace("|", "\\|"))


def code(value: object) -> Markdown:
    return Markdown("`" + one_line(value).replace("`", "'") + "`")


def link(text: object, address: str) -> Markdown:
    return Markdown(f"[{escape(text)}]({quote(address, safe='/:', errors='replace')})")


def block(text: str, language: str) -> Markdown:
    """Write a block of code between fences that are longer than any in the code."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return Markdown(f"{fence}{language}\n{text}\n{fence}")
