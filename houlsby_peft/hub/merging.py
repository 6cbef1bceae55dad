"""Keeps what people have written into a card, in its folder and on the Hub, when it is generated again.

A card in a folder that was pushed has a comment above its title with the commit that it was merged with. If the cards
in the folder and on the Hub differ, the card of that commit shows which of them people have edited since.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RevisionNotFoundError

from ..errors import AdapterError
from .markdown import one_line
from .metadata import as_list, is_of_weights
from .sections import drop_deleted, is_template, update


_COMMIT = re.compile(r"<!-- at (?P<repo_id>\S+)/commit/(?P<commit>[0-9a-f]{40}) -->\n*")


def merge_cards(card: ModelCard, old: Sequence[Path], common: Path | None = None) -> ModelCard:
    """Insert the sections and metadata that people have written into older cards into a new card.

    Args:
        card: A card from `make_card`.
        old: Files of older cards. If several contain a section or a value that was written by hand, the last one's is
            kept.
        common: File of the card that two older ones were before people edited them. What only one of them has changed
            or deleted since is taken from that one.

    Raises:
        AdapterError: An old card is not text, or its metadata are not valid YAML.
    """
    cards = [found for path in old if (found := _read_card(path))]
    first = _read_card(common) if common and len(cards) == 2 else None
    texts, written = [found.text for found in cards], [found.data.to_dict() for found in cards]
    if first:
        texts = [drop_deleted(text, first.text, other) for text, other in zip(texts, texts[::-1], strict=True)]
        known = first.data.to_dict()
        written = [
            _drop_deleted_data(values, known, other) for values, other in zip(written, written[::-1], strict=True)
        ]
    body = card.text.lstrip("\n")
    for text in texts:
        body = update(body, text)
    merged = {key: value for values in written for key, value in values.items() if not is_of_weights(key, value)}
    merged |= card.data.to_dict()
    tags = [tag for values in written for tag in as_list(values.get("tags")) if tag is not None]
    merged["tags"] = sorted({*merged["tags"], *map(str, tags)})  # YAML reads 2024 as a number
    return ModelCard(f"---\n{ModelCardData(**merged).to_yaml()}\n---\n\n{body}")


def merge_with_hub(card: ModelCard, local: Path, on_hub: Path | None, repo_id: str, token: str | None) -> ModelCard:
    """Insert what people have written into the cards of a folder and of its repository into a new card.

    Args:
        card: A card from `make_card`.
        local: File of the card in the folder, which need not exist.
        on_hub: File of the card in the repository. None: it has none.
        repo_id: The repository.
        token: Token for private repositories.
    """
    text = local.read_text(encoding="utf-8", errors="replace") if local.is_file() else ""
    found, common = _COMMIT.search(text), None
    if on_hub and found and found["repo_id"] == repo_id:
        try:
            common = Path(hf_hub_download(repo_id, local.name, revision=found["commit"], token=token))
        except LocalEntryNotFoundError:  # the Hub cannot be reached
            raise
        except (RevisionNotFoundError, EntryNotFoundError):  # the history of the repository was replaced
            common = None
    merged = merge_cards(card, [path for path in (on_hub, local) if path and path.is_file()], common)
    return ModelCard(_COMMIT.sub("", merged.content))


def _read_card(path: Path) -> ModelCard | None:
    """Return the card in a file; None if it is a template that nobody has filled in."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise AdapterError(f"{path} must be text in UTF-8: {error}. Repair or remove it.") from error
    if is_template(text):
        return None
    try:
        return ModelCard(text, ignore_metadata_errors=True)
    except Exception as error:  # the YAML parser's errors have no common public class
        reason = one_line(str(error))
        raise AdapterError(f"{path} begins with metadata that are not valid YAML: {reason}. Repair them.") from error


def _drop_deleted_data(values: dict[str, Any], common: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Remove the metadata, and the single tags, that `other` has changed or deleted since both were `common`."""
    kept = {key: value for key, value in values.items() if other.get(key) == value or common.get(key) != value}
    old_tags, other_tags = as_list(common.get("tags")), as_list(other.get("tags"))
    tags = [tag for tag in as_list(values.get("tags")) if tag in other_tags or tag not in old_tags]
    return {**kept, "tags": tags}


def save_card(card: ModelCard, path: Path, repo_id: str, commit: str | None) -> None:
    """Save a card with the commit that it has been merged with, in a comment above its title."""
    comment = f"<!-- at {repo_id}/commit/{commit} -->\n\n" if commit else ""
    ModelCard(f"---\n{card.data.to_yaml()}\n---\n\n{comment}{card.text.lstrip()}").save(path)
