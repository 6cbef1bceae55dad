"""Errors about what comes from outside: arguments, files written by others, the Hub, HTTP and the
network.
"""

from __future__ import annotations

import re


_MOST_CHARACTERS = 300
# Control characters except for tabs and line breaks, those that reverse the direction of the text
# after them, and halves of surrogate pairs.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class AdapterError(ValueError):
    """A folder or repository does not contain a usable adapter. The message gives file, rule and
    remedy.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class HubError(OSError):
    """The Hub cannot be reached or refuses a request. The message is one line with the reason and
    the remedy.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """Return a text from outside that changes nothing in a terminal."""
    return UNPRINTABLE.sub("\ufffd", text)


def shortened(text: str) -> str:
    """Return a text from outside on one line, cut to what fits into a message."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _MOST_CHARACTERS else line[:_MOST_CHARACTERS] + " ..."
