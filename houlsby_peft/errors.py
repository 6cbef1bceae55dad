"""Errors about what comes from outside: the Hub, and files written by others."""

from __future__ import annotations


class AdapterError(ValueError):
    """A folder or repository does not contain a usable adapter. The message gives file, rule and remedy."""


class HubError(OSError):
    """The Hub cannot be reached or refuses a request. The message is one line with the reason and the remedy."""
