"""Errors about what comes from outside: arguments, files written by others, the Hub, HTTP and the
network.
"""

from __future__ import annotations


_MOST_CHARACTERS = 300


class AdapterError(ValueError):
    """A folder or repository does not contain a usable adapter. The message gives file, rule and
    remedy.
    """


class HubError(OSError):
    """The Hub cannot be reached or refuses a request. The message is one line with the reason and
    the remedy.
    """


def shortened(text: str) -> str:
    """Return a text from outside on one line, cut to what fits into a message."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else line[:_MOST_CHARACTERS] + " ..."
