"""Says in one line what went wrong between here and the Hub, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, errors

from .errors import HubError


TOKENS_PAGE = "https://huggingface.co/settings/tokens"
_LOG_IN = f"log in with `hf auth login` or set HF_TOKEN ({TOKENS_PAGE})"
_BY_STATUS = {
    401: f"the token is wrong or has expired; {_LOG_IN}",
    402: "the account's plan does not allow it",
    403: "the token has no right to do it; use a token that may write there, or another repository name",
    409: "another upload to it is under way; try again in a minute",
    412: "it has changed since this upload began; try again, which keeps what others have written",
    413: "a file is larger than the Hub takes",
    429: "too many requests; try again in a few minutes",
}


@contextmanager
def explained(repo_id: str) -> Iterator[None]:
    """Turn what huggingface_hub, HTTP and the network raise inside into a `HubError` of one line.

    Args:
        repo_id: the repository, for the message.
    """
    try:
        yield
    except Exception as error:
        reason = next(filter(None, map(_reason, _causes(error))), None)
        if reason is None:
            raise
        raise HubError(f"{repo_id}: {' '.join(reason.split())}.") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from: upload threads and transformers wrap those of the Hub in their own."""
    while error is not None:
        yield error
        error = error.__cause__


def _reason(error: BaseException | None) -> str | None:
    """The words for an error; None for one that has nothing to do with the Hub."""
    match error:
        case errors.LocalTokenNotFoundError():
            return f"there is no token; {_LOG_IN}"
        case errors.HFValidationError():
            return f"the Hub takes no such name ({_first_line(error)})"
        case errors.GatedRepoError():
            return f"its authors grant access one by one; ask for it on its page, then {_LOG_IN}"
        case errors.RepositoryNotFoundError():
            return f"there is no such repository, or it is private and the token, if any, may not see it; {_LOG_IN}"
        case errors.RevisionNotFoundError():
            return "it has no such revision (a branch, a tag or the full hash of a commit)"
        case errors.LocalEntryNotFoundError():
            why = _reason(error.__cause__) or "the Hub was not asked"
            return f"it is not in the cache, and {why}"
        case errors.OfflineModeIsEnabled():
            return "the Hub may not be asked, as HF_HUB_OFFLINE is set"
        case errors.HfHubHTTPError():
            return _by_status(error)
        case errors.HTTPError():  # type: ignore[attr-defined]
            return f"{constants.ENDPOINT} cannot be reached ({_first_line(error)}); check the network"
        case ValueError() if "README.md" in str(error):
            return f"the Hub refuses the card ({' '.join(str(error).split())})"
    return None


def _by_status(error: errors.HfHubHTTPError) -> str:
    status = error.response.status_code
    if status >= 500:
        return f"the Hub has a problem of its own (status {status}); try again later"
    said = error.server_message or _first_line(error)
    return f"{_BY_STATUS.get(status, 'the Hub refuses')} (status {status}: {said})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
