"""The check of a tokenizer that others have written: its size, and what it makes of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import AdapterError


# What transformers writes for a tokenizer that needs no other format; `tokenizer.json` alone holds
# the vocabulary.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# The largest vocabularies take some 35 MB.
_MOST_BYTES = 200_000_000
# How many times longer a text may become before it is cut into tokens.
_MOST_GROWTH = 64


def check_tokenizer_files(folder: Path, name: str) -> None:
    """Refuse the files of a tokenizer that would fill the memory.

    A few rules that replace each letter by many make terabytes of one text. Files that are not
    valid JSON are left to the library that reads them.

    Args:
        folder: The folder of the files.
        name: The adapter's name in the message.
    """
    for file_name in TOKENIZER_FILES:
        path = folder / file_name
        if path.is_file() and path.stat().st_size > _MOST_BYTES:
            raise AdapterError(
                f"{name}: {file_name} must have at most {_MOST_BYTES:,} bytes; it has "
                f"{path.stat().st_size:,}. Save the tokenizer again."
            )
    path = folder / TOKENIZER_FILES[0]
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
        growth = _growth(content.get("normalizer")) * _growth(content.get("pre_tokenizer"))
    except (AttributeError, TypeError, ValueError, RecursionError):
        return
    if growth > _MOST_GROWTH:
        raise AdapterError(
            f"{name}: the rules of {path.name} may make a text at most {_MOST_GROWTH} times "
            f"longer; they make it up to {growth:.3g} times longer. Use the base model's tokenizer."
        )


def _growth(rule: Any) -> float:
    """Return how many times longer the rules of a tokenizer may make a text."""
    if not rule:
        return 1.0
    growth = 1.0
    for part in (*rule.get("normalizers", ()), *rule.get("pretokenizers", ())):
        growth *= _growth(part)
    if rule.get("type") == "Replace":
        # A regular expression may match a single letter, or the empty text before each.
        replaced = len(rule["pattern"].get("String", ""))
        growth *= max(1.0, (len(rule["content"]) + (not replaced)) / max(1, replaced))
    return growth
