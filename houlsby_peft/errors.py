"""Errors about what comes from outside: arguments, files written by others, the Hub, HTTP and the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError


_MOST_CHARACTERS = 300
TOKENS_PAGE = "https://huggingface.co/settings/tokens"
_LOG_IN = f"log in with `hf auth login` or set HF_TOKEN ({TOKENS_PAGE})"
_BY_STATUS = {
    401: f"the token is invalid or has expired; {_LOG_IN}",
    402: "the account's plan does not include this",
    403: "the token lacks the permission; use a token with write access to it, or another repository name",
    409: "it exists already, or another upload to it is in progress; try again in a minute",
    412: "it has changed since this upload began; try again, which keeps the changes of others",
    413: "a file is larger than the Hub accepts",
    429: "too many requests; try again in a few minutes",
}


class AdapterError(ValueError):
    """A folder or repository does not contain a usable adapter. The message gives file, rule and remedy."""


class HubError(OSError):
    """The Hub cannot be reached or refuses a request. The message is one line with the reason and the remedy."""


def shortened(text: str) -> str:
    """Return a text from outside on one line, cut to what fits into a message."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else line[:_MOST_CHARACTERS] + " ..."


def check_count(name: str, value: object, least: int = 1) -> None:
    """Check an argument that counts something.

    Raises:
        ValueError: It is not a whole number, or below the least.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}; got {shortened(repr(value))}.")


def check_bytes(name: str, value: object) -> None:
    """Check an argument that is a size in bytes.

    Raises:
        ValueError: It is not a number of at least 0.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
        raise ValueError(f"{name} must be a number of bytes, at least 0; got {shortened(repr(value))}.")


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], rule: str) -> None:
    """Check the type of an argument.

    Args:
        name: Its name.
        value: Its value.
        kinds: The types that it may have.
        rule: These types in words, and how to get one.

    Raises:
        TypeError: It has another type.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {rule}; got {shortened(repr(value))}.")


@contextmanager
def explain_hub_errors(repo_id: str) -> Iterator[None]:
    """Convert errors of huggingface_hub, of HTTP and of the network into a `HubError` with a message of one line.

    Args:
        repo_id: Repository, or another subject, that the message begins with.

    Raises:
        HubError: The block raised such an error. Other errors pass unchanged.
    """
    try:
        yield
    except Exception as error:
        reason = next(filter(None, map(_find_reason, _follow_causes(error))), None)
        if reason is None:
            raise
        raise HubError(f"{repo_id}: {' '.join(reason.split())}.") from error


def _follow_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes: upload threads and transformers wrap the Hub's errors in their own."""
    while error is not None:
        yield error
        error = error.__cause__


def _find_reason(error: BaseException | None) -> str | None:
    """Return the explanation of an error, or None if the error does not come from the Hub."""
    from huggingface_hub import constants, errors  # which the help of the command does without

    match error:
        case errors.LocalTokenNotFoundError():
            return f"there is no token; {_LOG_IN}"
        case errors.HFValidationError():
            return f"the Hub does not accept this name ({_first_line(error)})"
        case errors.GatedRepoError():
            return f"its authors grant access on request; ask for access on its page, then {_LOG_IN}"
        case errors.RepositoryNotFoundError():
            return f"the repository does not exist, or it is private and the token has no access to it; {_LOG_IN}"
        case errors.RevisionNotFoundError():
            return "it has no such revision (a branch, a tag or the full hash of a commit)"
        case errors.LocalEntryNotFoundError():
            return f"it is not in the cache, and {_find_reason(error.__cause__) or 'the Hub was not asked'}"
        case errors.OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, so the Hub is not asked"
        case errors.HfHubHTTPError():
            return _explain_status(error)
        case errors.HTTPError():  # type: ignore[attr-defined]
            return f"{constants.ENDPOINT} cannot be reached ({_first_line(error)}); check the network"
    return None


def _explain_status(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status >= 500:
        return f"the Hub returned a server error (status {status}); try again later"
    reason = _BY_STATUS.get(status, "the Hub refused the request")
    if status == 403 and error.response.request.method in ("GET", "HEAD"):
        reason = f"access is denied; ask its owner for access, or {_LOG_IN} with a token that can read it"
    return f"{reason} (status {status}: {error.server_message or _first_line(error)})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
