"""Bearer tokens: who may ask for predictions, and who may change tasks."""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Tokens:
    """The tokens of clients. One for managing is good for predictions as well.

    Args:
        predict: Those for predictions, and all else that changes nothing. Without any, of either
            kind, no token is needed for this.
        manage: Those for changing tasks. Without any, nobody may.
    """

    predict: tuple[str, ...] = ()
    manage: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.predict or self.manage)

    def may_manage(self, token: str) -> bool:
        """Return whether a client may change tasks."""
        return _is_among(token, self.manage)

    def may_predict(self, token: str) -> bool:
        """Return whether a client may ask for predictions."""
        return not self or _is_among(token, self.predict + self.manage)


def _is_among(token: str, tokens: tuple[str, ...]) -> bool:
    # All are compared, in the same time, so that nothing can be learned of a token by guessing.
    is_among = False
    for valid in tokens:
        is_among |= hmac.compare_digest(token.encode(), valid.encode())
    return is_among


def read_tokens(path: str | None) -> Tokens:
    """Return the tokens of a file or, without one, of the environment variable HOULSBY_TOKENS.

    Both hold YAML: a mapping from `predict` and `manage` to a token or a list of tokens.

    Raises:
        OSError: There is no such file.
        ValueError: It is not such a mapping.
    """
    text = os.environ.get("HOULSBY_TOKENS", "")
    source = "HOULSBY_TOKENS"
    if path is not None:
        text, source = Path(path).expanduser().read_text(encoding="utf-8"), path
    try:
        tokens: dict[str, tuple[str, ...]] = {}
        for name, value in (yaml.safe_load(text) or {}).items():
            listed = [value] if isinstance(value, str) else value
            tokens[name] = tuple(map(str.strip, listed))
            if "" in tokens[name]:
                raise ValueError("a token is empty")
        if path is not None and not any(tokens.values()):
            raise ValueError("there is no token")
        return Tokens(**tokens)
    except (ValueError, TypeError, AttributeError, yaml.YAMLError):
        # Without the text, whose tokens are secret.
        raise ValueError(
            f"{source} must be YAML, as in `predict: [one, another]` and `manage: [third]`, with a "
            "token or a list of tokens for each."
        ) from None
