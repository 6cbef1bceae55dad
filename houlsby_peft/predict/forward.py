"""The forward passes of encoded texts, whose rows may be of many adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from transformers import DataCollatorWithPadding

from ..errors import AdapterError, HubError
from .readers import EncodedInput, Reader, Row


T = TypeVar("T")


def predict_inputs(inputs: Sequence[EncodedInput], batch_size: int) -> list[Any]:
    """Return the result of each input. At most `batch_size` rows go through a model at once."""
    rows_of_inputs = [encoded.rows() for encoded in inputs]
    run_rows(chain.from_iterable(rows_of_inputs), batch_size)
    results = []
    for encoded, rows in zip(inputs, rows_of_inputs, strict=True):
        results.append(encoded.decode([row.outputs for row in rows]))
    return results


def run_rows(rows: Iterable[Row], batch_size: int) -> None:
    """Give rows their outputs; at most `batch_size` of them go through a model at once."""
    for group in _group(rows):
        for batch in split_batches(group, batch_size):
            _forward(batch)


def split_batches(items: Sequence[T], batch_size: int) -> Iterator[Sequence[T]]:
    """Yield consecutive parts of a sequence, of `batch_size` items each."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}.")
    for start in range(0, len(items), batch_size):
        yield items[start : start + batch_size]


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


def _group(rows: Iterable[Row]) -> list[list[Row]]:
    """Return rows in groups, each of which can go through a model together.

    The rows of one text stand together, because the layers below the adapters then run once for
    them. The texts of an adapter stand together, whose weights then need not be gathered.
    """
    rows_of_texts: dict[object, list[Row]] = {}
    for row in rows:
        inputs = ((name, *values) for name, values in row.part.inputs.items())
        rows_of_texts.setdefault((id(row.reader.model), *inputs), []).append(row)
    by_adapter = sorted(rows_of_texts.values(), key=lambda same_text: same_text[0].reader.name)
    groups: dict[object, list[Row]] = {}
    for number, same_text in enumerate(by_adapter):
        for row in same_text:
            groups.setdefault(_group_key(row, number), []).append(row)
    return list(groups.values())


def _group_key(row: Row, number_of_text: int) -> tuple[object, ...]:
    """Return what the rows of a batch must have in common."""
    reader, inputs = row.reader, row.part.inputs
    key: list[object] = [id(reader.model), *inputs, reader.tokenizer.padding_side]
    if "attention_mask" not in inputs:
        # The model would read the padding as text.
        key.append(("length", len(inputs["input_ids"])))
    if not reader.can_pad:
        key.append(("text", number_of_text))
    # With ladders alone, the whole encoder runs once per text. What is held in slots is no ladder.
    config: Any = reader.model.peft_config.get(reader.name)
    key.append(config is not None and config.kind == "ladder")
    return tuple(key)


@torch.inference_mode()
def _forward(rows: Sequence[Row]) -> None:
    """Run a batch, and give each row its outputs, as `Reader.decode` wants them."""
    reader = rows[0].reader
    # A text that several adapters read is in the batch once.
    texts: list[dict[str, list[int]]] = []
    adapters_of_texts: list[list[str]] = []
    for row in rows:
        if not texts or row.part.inputs != texts[-1]:
            texts.append(row.part.inputs)
            adapters_of_texts.append([])
        adapters_of_texts[-1].append(row.reader.name)
    adapters: list[Any] = adapters_of_texts
    if len(texts) == len(rows):
        adapters = [row.reader.name for row in rows]
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
        for number, row in enumerate(rows):
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
        tokens = len(row.part.inputs["input_ids"])
        is_left = reader.tokenizer.padding_side == "left"
        values = values[-tokens:] if is_left else values[:tokens]
    if reader.outputs == ("logits",):
        values = values[..., : len(reader.labels)]
    return values
