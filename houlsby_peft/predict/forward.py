"""What goes into a batch, and its forward pass, whose rows may be of many adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from transformers import DataCollatorWithPadding

from ..errors import AdapterError, HubError
from .questions import Row
from .readers import Reader


T = TypeVar("T")
# Shorter texts cost as much as one of these tokens.
_LEAST_TOKENS = 32


class Batcher:
    """Chooses the rows that go through a model together.

    A batch begins with the first row that waits. Further rows join it in their order if they can go
    through the same model beside it, as long as there is room, and at most half of the batch is
    padding. So a long text keeps no short ones waiting for it.

    Args:
        rows: The rows that wait.
        most_rows: The most rows of a batch.
        most_tokens: The most tokens of a batch with its padding, unless a single row has more.
    """

    def __init__(self, rows: Iterable[Row], most_rows: int, most_tokens: float = math.inf) -> None:
        self._waiting = list(rows)
        self._most_rows = most_rows
        self._most_tokens = most_tokens

    def __iter__(self) -> Iterator[list[Row]]:
        while self._waiting:
            yield self.take()

    def take(self) -> list[Row]:
        """Take the rows of a batch out of those that wait."""
        batch: list[Row] = []
        waiting: list[Row] = []
        key: object = None
        longest, tokens = 0, 0
        for row in self._waiting:
            size = max(row.tokens, _LEAST_TOKENS)
            most_tokens = min(self._most_tokens, 2 * (tokens + size))
            if not batch:
                key = _key(row)
            elif (
                len(batch) == self._most_rows
                or max(size, longest) * (len(batch) + 1) > most_tokens
                or _key(row) != key
            ):
                waiting.append(row)
                continue
            batch.append(row)
            longest, tokens = max(size, longest), tokens + size
        self._waiting = waiting
        return batch


def _key(row: Row) -> tuple[object, ...]:
    """Return what the rows of a batch must have in common."""
    reader, inputs = row.reader, row.inputs
    key: list[object] = [id(reader.model), *inputs, reader.tokenizer.padding_side]
    if "attention_mask" not in inputs:
        # The model would read the padding as text.
        key.append(("length", len(inputs["input_ids"])))
    if not reader.can_pad:
        key.append(_text_of(row))
    # For ladders on one adapter, or on none, the whole encoder runs once per text. What is held in
    # slots is no ladder.
    config: Any = reader.model.peft_config.get(reader.name)
    key.append(config is not None and config.kind == "ladder")
    key.append(reader.record.beneath and reader.record.beneath_name)
    return tuple(key)


def _text_of(row: Row) -> tuple[tuple[int, ...], ...]:
    """Return the inputs of a row, to compare them with those of others of its model."""
    return tuple(map(tuple, row.inputs.values()))


def split(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield consecutive parts of a sequence, each of which is in memory at once."""
    if size < 1:
        raise ValueError(f"batch_size must be at least 1; got {size}.")
    for start in range(0, len(items), size):
        yield items[start : start + size]


def attempt(catch: tuple[type[Exception], ...], function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, or the error that it raises if that is to be caught.

    An error that gives its reason has no traceback, whose frames would keep the adapters of other
    tasks in memory.
    """
    try:
        return function(*args)
    except catch as error:
        if isinstance(error, (AdapterError, HubError, ValueError)):
            _drop_tracebacks(error)
        return error


def _drop_tracebacks(error: BaseException | None) -> None:
    """Take the traceback off an error, and off those that have led to it."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@torch.inference_mode()
def run_batch(rows: Sequence[Row]) -> None:
    """Run a batch of a `Batcher`, and give each row its outputs, as `Reader.decode` wants them."""
    reader = rows[0].reader
    # A text that several adapters read is in the batch once. The texts of an adapter stand
    # together, whose weights then need not be gathered.
    rows_of_texts: dict[object, list[Row]] = {}
    for row in rows:
        rows_of_texts.setdefault(_text_of(row), []).append(row)
    by_adapter = sorted(rows_of_texts.values(), key=lambda same_text: same_text[0].reader.name)
    texts = [same_text[0].inputs for same_text in by_adapter]
    in_order = [row for same_text in by_adapter for row in same_text]
    adapters: list[Any]
    if len(texts) < len(rows):
        adapters = [[row.reader.name for row in same_text] for same_text in by_adapter]
    else:
        adapters = [row.reader.name for row in in_order]
        if reader.fills_up:
            missing = _fill_up(len(rows)) - len(rows)
            texts += texts[-1:] * missing
            adapters += adapters[-1:] * missing
    batch = _pad(texts, reader)
    outputs = reader.model(
        **{name: value.to(reader.model.device) for name, value in batch.items()},
        adapter_names=adapters,
    )
    for name in reader.outputs:
        # At once, as each copy from a GPU waits for it.
        values = outputs[name].float().cpu()
        for number, row in enumerate(in_order):
            row.outputs.append(_of_row(row, values[number]))


def _fill_up(rows: int) -> int:
    """Return the next one of a few sizes of a batch."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    return -(-rows // 8) * 8


def _pad(texts: list[dict[str, list[int]]], reader: Reader) -> dict[str, torch.Tensor]:
    """Return the inputs of texts as tensors `(texts, tokens)`."""
    lengths = {len(text["input_ids"]) for text in texts}
    longest = max(lengths)
    if reader.fills_up and reader.can_pad and "attention_mask" in texts[0]:
        filled = -(-longest // 32) * 32
        longest = max(longest, min(filled, reader.cut.get("max_length", filled)))
    if lengths != {longest}:
        collator = DataCollatorWithPadding(reader.tokenizer, "max_length", longest)
        return dict(collator(texts))
    # There may be no pad token.
    batch = {}
    for name in texts[0]:
        batch[name] = torch.tensor([text[name] for text in texts])
    return batch


def _of_row(row: Row, values: torch.Tensor) -> torch.Tensor:
    """Return the values of a row without what the batch has filled up.

    Args:
        row: The row.
        values: `(tokens, ...)` with padding, or the logits of as many classes as the widest head in
            the batch has: the others are -inf.
    """
    reader = row.reader
    if reader.is_per_token:
        is_left = reader.tokenizer.padding_side == "left"
        values = values[-row.tokens :] if is_left else values[: row.tokens]
    if reader.outputs == ("logits",):
        values = values[..., : len(reader.labels)]
    return values
