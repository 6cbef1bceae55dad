"""The errors for what comes from outside: the Hub, and files that others have written."""

from __future__ import annotations


class AdapterError(ValueError):
    """A folder or repository is no adapter that can be loaded. The message names the file, the rule and the remedy."""


class HubError(OSError):
    """The Hub could not be reached, or has refused. The message is one line that says why and what to do."""
