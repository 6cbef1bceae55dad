"""What can be known of a push before it: names, token, base model."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from ..errors import AdapterError, HubError
from ..hub_errors import TOKENS_PAGE, explained


def check_access(repo_id: str, token: str | None = None) -> str:
    """Check a repository's name and a token.

    Returns:
        The name with its user, "user/name".

    Raises:
        HubError: The name is not allowed, there is no token, it is wrong or may only read, or the Hub cannot be
            reached.
    """
    with explained(repo_id):
        validate_repo_id(repo_id)
        user = HfApi(token=token).whoami()
    if ((user.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
        raise HubError(f"{repo_id}: the token may only read; make one that may write: {TOKENS_PAGE}.")
    return repo_id if "/" in repo_id else f"{user['name']}/{repo_id}"


def base_on_hub(name: str, given: bool = False) -> str:
    """The name of a base model, if others can find it on the Hub.

    Args:
        name: as the base model was loaded, or as it was `given` for this purpose.

    Raises:
        AdapterError: It is a folder, or no name that the Hub knows.
    """
    try:
        validate_repo_id(name)
        is_folder = not given and Path(name).is_dir()
    except HFValidationError:
        is_folder = True
    if is_folder:
        raise AdapterError(
            f"The base model must be on the Hub for others to find it; this one was loaded from {name!r}. Give its "
            "name on the Hub as base_model."
        )
    return name
