"""Errors about what comes from outside: arguments, files written by others, the Hub, HTTP and the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


_MOST_CHARACTERS = 300


class AdapterError(ValueError):
    """A folder or repository does not contain a usable adapter. The message gives file, rule and remedy."""


class HubError(OSError):
    """The Hub cannot be reached or refuses a request. The message is one line with the reason and the remedy."""


def shortened(text: str) -> str:
    """Return a text from outside on one line, cut to what fits into a message."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else line[:_MOST_CHARACTERS] + " ..."


@contextmanager
def explain_hub_errors(subject: str) -> Iterator[None]:
    """Convert errors of the Hub's client and of the network, whatever they are wrapped in, into a `HubError`.

    Args:
        subject: Repository, or another subject, that the message begins with. The client's own message follows.

    Raises:
        HubError: The block raised such an error. Other errors pass unchanged.
    """
    try:
        yield
    except Exception as error:
        from huggingface_hub import constants, errors  # which the help of the command does without

        own = (
            errors.HTTPError,  # type: ignore[attr-defined]
            errors.HFValidationError,
            errors.LocalTokenNotFoundError,
            errors.LocalEntryNotFoundError,
            errors.OfflineModeIsEnabled,
        )
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        found = [cause for cause in causes if isinstance(cause, own)]
        if not found:
            raise
        refusal = next((cause for cause in found if isinstance(cause, errors.HfHubHTTPError)), None)
        reason = str(refusal or found[-1])
        if refusal is None and isinstance(found[-1], own[0]):
            reason = f"{constants.ENDPOINT} cannot be reached ({reason}). Check the network."
        raise HubError(f"{subject}: {' '.join(reason.split())}") from error
