"""The check of a tokenizer that others have written: its size, and what it makes of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import AdapterError, shortened


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
# How many special tokens a text and a pair of texts may get.
_MOST_ADDED = 64


def check_tokenizer_files(folder: Path, name: str) -> None:
    """Refuse the files of a tokenizer that would fill the memory, or leave no room for a text.

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
    length = _read(folder / TOKENIZER_FILES[1]).get("model_max_length", 1)
    if not isinstance(length, (int, float)) or not length >= 1:
        raise AdapterError(
            f"{name}: model_max_length in {TOKENIZER_FILES[1]} must be a number of at least 1; got "
            f"{shortened(repr(length))}. Save the tokenizer again."
        )
    path = folder / TOKENIZER_FILES[0]
    content = _read(path)
    try:
        growth = _growth(content.get("normalizer")) * _growth(content.get("pre_tokenizer"))
        added = _count_added(content.get("post_processor"))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return
    if added > _MOST_ADDED:
        raise AdapterError(
            f"{name}: {path.name} may add at most {_MOST_ADDED} special tokens to a text; it adds "
            f"{added:,}. Use the base model's tokenizer."
        )
    if growth > _MOST_GROWTH:
        raise AdapterError(
            f"{name}: the rules of {path.name} may make a text at most {_MOST_GROWTH} times "
            f"longer; they make it up to {growth:.3g} times longer. Use the base model's tokenizer."
        )


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty without one."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _count_added(rule: Any) -> int:
    """Return how many special tokens the rules of a tokenizer add to a text or a pair."""
    if not rule:
        return 0
    count = sum(map(_count_added, rule.get("processors", ())))
    for template in ("single", "pair"):
        for item in rule.get(template, ()):
            if "SpecialToken" in item:
                count += len(rule["special_tokens"][item["SpecialToken"]["id"]]["ids"])
    return count


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
