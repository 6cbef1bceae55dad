"""From texts to results: each kind of task encodes its inputs as rows of tokens, and decodes the
    model's outputs.

`predict_requests` pads the rows and runs the forward passes, which may hold rows of many adapters.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import torch
from peft import PeftModel
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import LARGE_INTEGER

from ..errors import AdapterError, shortened
from ..heads.tasks import TaskKind
from ..layer import record_of
from ..record import AdapterRecord
from ..tables import check_number_of_texts
from .answers import Windows
from .base_model import count_positions, count_tokens
from .results import AnswerPrediction, ClassPrediction, EntityPrediction
from .tagging import Piece, read_tags


# A text, a pair of texts or, for question answering, a question and the text that answers it.
Input = str | tuple[str, str]
# A fast tokenizer keeps how it cuts texts until a call asks for another way, and threads may share
# it.
_TOKENIZING = threading.Lock()


@dataclass
class Row:
    """Inputs of the model without padding, and what the result needs to know of their tokens."""

    inputs: dict[str, list[int]]
    more: Any = None


@dataclass
class Request:
    """A checked input of a reader with its rows; made by `Reader.request`."""

    reader: Reader
    text: Input
    rows: list[Row]
    top_k: int | None
    threshold: float | None

    def decode(self, values: Sequence[Sequence[torch.Tensor]]) -> Any:
        """Return the result, from the model's outputs for each row, which must be finite (see
        `Reader.decode`).
        """
        if not all(value.isfinite().all() for row in values for value in row):
            raise AdapterError(
                f"The outputs of an adapter must be finite; those of {self.reader.called!r} are NaN or infinite on a "
                f"base model in {self.reader.model.dtype}. Load it with dtype=torch.float32, or train it again."
            )
        return self.reader.decode(self, values)


class Reader(ABC):
    """Encodes the inputs of one adapter, and decodes the model's outputs for them.

    Attributes:
        called: The name of the adapter in errors.
        outputs: The names of the model's outputs that results are computed from.
        is_per_token: Whether these have a value per token.
        needs_spans: Whether the tokenizer must tell where each token is in the text.
        kinds: The kinds of inputs that the task reads, and what they are.
        example: An input of one of these kinds.
        can_pad: Whether texts may be padded. Decoders, whose head is called `score`, classify a
            text by its last token other than the pad token in their configuration.
    """

    outputs: ClassVar[tuple[str, ...]] = ("logits",)
    is_per_token: ClassVar[bool] = False
    needs_spans: ClassVar[bool] = False
    kinds: ClassVar[dict[type, str]] = {str: "a text", tuple: "a pair of texts"}
    example: Input = "An example."

    def __init__(
        self,
        model: PeftModel,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        task: TaskKind,
        called: str | None = None,
    ) -> None:
        self.model = model
        self.name = name
        self.tokenizer = tokenizer
        self.task = task
        self.called = called or name
        self.record = record_of(model, name)
        self.labels: dict[int, str] = self.record.id2label or model.config.id2label
        self._trained_on = self.record.text_columns
        if self._trained_on and len(self._trained_on) == 2:
            self.example = "An example.", "Another one."
        self.cut = cut_arguments(tokenizer, model, self.record)
        pad, known = (
            tokenizer.pad_token_id,
            getattr(model.config.get_text_config(), "pad_token_id", None),
        )
        self.can_pad = pad is not None and (pad == known or not hasattr(model, "score"))
        self._tokens = count_tokens(model.get_base_model())  # type: ignore[arg-type]

    def request(
        self, text: Input, top_k: int | None = None, threshold: float | None = None
    ) -> Request:
        """Check an input and what is asked for, and encode the input."""
        is_pair = (
            isinstance(text, (tuple, list))
            and len(text) == 2
            and all(isinstance(part, str) for part in text)
        )
        if not (is_pair and tuple in self.kinds) and not (
            isinstance(text, str) and str in self.kinds
        ):
            rule = " or ".join(self.kinds.values())
            raise ValueError(f"Each input must be {rule}; got {shortened(repr(text))}.")
        given = ["a text", "a second text"][: 1 + is_pair]
        check_number_of_texts(
            given, self._trained_on, "--pairs or text_pair", f"The adapter {self.called!r}"
        )
        kind = self.record.problem_type or self.task.pipeline
        has_classes = self.task.pipeline == "text-classification" and kind != "regression"
        for name, value in (("top_k", top_k), ("A threshold", threshold)):
            if value is not None and not has_classes:
                raise ValueError(
                    f"{name} is for text classification; the task of {self.called!r} is {kind}. Leave it out."
                )
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be a number of classes, at least 1; got {top_k}.")
        with _TOKENIZING:
            rows = self.encode(text)
        for row in rows:
            ids = row.inputs["input_ids"]
            if not ids:
                raise ValueError(
                    f"Each text must have at least one token; the tokenizer of {self.called!r} found none. Leave out "
                    "empty texts."
                )
            if self._tokens is not None and max(ids) >= self._tokens:
                raise AdapterError(
                    f"The tokenizer of {self.called!r} must fit the base model, which knows {self._tokens:,} tokens; "
                    f"it gave the number {max(ids):,}. Use the tokenizer that the adapter was trained with."
                )
        return Request(self, text, rows, top_k, threshold)

    def encode(self, text: Input) -> list[Row]:
        """Return an input as rows of the model. One thread at a time may use a tokenizer."""
        # As a batch of one, because tokenizers take a single pair whose second text is empty for
        # one text.
        encoded = self.tokenizer(
            *([part] for part in ((text,) if isinstance(text, str) else text)), **self.cut
        )
        return [Row({name: values[0] for name, values in encoded.items()})]

    @abstractmethod
    def decode(self, request: Request, values: Sequence[Sequence[torch.Tensor]]) -> Any:
        """Return the result for an input, as `Predictor.predict` describes it.

        For each row, there are the model's outputs that `outputs` names, finite and in float32 on
        the CPU. If they are per token, padding has been removed.
        """


class ClassReader(Reader):
    """Text classification and regression."""

    def decode(
        self, request: Request, values: Sequence[Sequence[torch.Tensor]]
    ) -> ClassPrediction | list[ClassPrediction]:
        """Return the best class or, for `top_k` or several labels per text, a list of classes, the
        best first.
        """
        logits = values[0][0]
        is_multi_label = self.record.problem_type == "multi_label_classification"
        if self.record.problem_type == "regression":
            scores = logits
        elif is_multi_label or len(self.labels) == 1:
            scores = logits.sigmoid()
        else:
            scores = logits.softmax(-1)
        top_k, threshold = request.top_k, request.threshold
        least = dict.fromkeys(self.labels, -torch.inf if threshold is None else threshold)
        if is_multi_label and threshold is None and top_k is None:
            recorded = self.record.thresholds
            least = dict(enumerate(recorded or [0.5] * len(self.labels)))
        elif top_k is None and not is_multi_label:
            best = int(scores.argmax())
            score = scores[best].item()
            return {"label": self.labels[best] if score >= least[best] else None, "score": score}
        best_first = scores.argsort(descending=True, stable=True)[:top_k].tolist()
        found = [(number, scores[number].item()) for number in best_first]
        return [
            {"label": self.labels[number], "score": score}
            for number, score in found
            if score >= least[number]
        ]


class TokenReader(Reader):
    """Token classification: texts are read in parts of the length of training, so that every word
    gets a tag.
    """

    is_per_token = True
    needs_spans = True
    kinds: ClassVar[dict[type, str]] = {str: "a text"}

    def encode(self, text: Input) -> list[Row]:
        """Return a text as one row for each part of it."""
        encoded = self.tokenizer(
            [text],
            return_special_tokens_mask=True,
            return_offsets_mapping=True,
            return_overflowing_tokens=True,
            **self.cut,
        )
        names = [name for name in self.tokenizer.model_input_names if name in encoded]
        rows = []
        columns = ("input_ids", "special_tokens_mask", "offset_mapping")
        for number, (ids, special, spans) in enumerate(
            zip(*(encoded[name] for name in columns), strict=True)
        ):
            tokens = self.tokenizer.convert_ids_to_tokens(ids)
            pieces = [
                None if is_special else Piece(token, span)
                for token, span, is_special in zip(tokens, spans, special, strict=True)
            ]
            rows.append(Row({name: encoded[name][number] for name in names}, pieces))
        return rows

    def decode(
        self, request: Request, values: Sequence[Sequence[torch.Tensor]]
    ) -> list[EntityPrediction]:
        """Return the entities, or the words with their tags."""
        parts = []
        for row, (logits,) in zip(request.rows, values, strict=True):
            scores, classes = logits.softmax(-1).max(-1)
            found = zip(row.more, classes.tolist(), scores.tolist(), strict=True)
            parts.append(
                [
                    (piece, self.labels[number], score)
                    for piece, number, score in found
                    if piece is not None
                ]
            )
        return read_tags(str(request.text), parts, self.tokenizer, self.labels.values())


class AnswerReader(Reader):
    """Extractive question answering; `Predictor.predict` describes the options.

    A window has 384 tokens unless the training has recorded a number.
    """

    outputs = ("start_logits", "end_logits")
    is_per_token = True
    needs_spans = True
    kinds: ClassVar[dict[type, str]] = {tuple: "a pair (question, context)"}
    example = ("What is it?", "It is an example.")

    def __init__(
        self,
        *args: Any,
        max_length: int | None = None,
        null_threshold: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args)
        record = self.record
        longest = max_length or record.max_length or 384
        longest = int(
            min(longest, count_positions(self.model) or 384, self.tokenizer.model_max_length)
        )
        if null_threshold is None:
            null_threshold = record.null_threshold
        self._windows = Windows(self.tokenizer, longest, null_threshold=null_threshold, **options)

    def encode(self, text: Input) -> list[Row]:
        """Return a question and its context as one row for each window of the context."""
        return [Row(window.inputs, window) for window in self._windows.split(*text)]

    def decode(
        self, request: Request, values: Sequence[Sequence[torch.Tensor]]
    ) -> AnswerPrediction:
        """Return the best answer in any window."""
        return self._windows.find_answer(
            request.text[1], [row.more for row in request.rows], values
        )


class VectorReader(Reader):
    """Embeddings: the mean of a text's last hidden states, as sentence-transformers computes it by
        default.

    Reimers & Gurevych 2019 (arXiv 1908.10084), section 3, found the mean better than the vector of
    [CLS] and than the maximum. The vectors are not normalized: compare them by their cosine.
    """

    outputs = ("last_hidden_state",)
    is_per_token = True

    def decode(self, request: Request, values: Sequence[Sequence[torch.Tensor]]) -> list[float]:
        """Return the mean of the tokens' hidden states."""
        return values[0][0].mean(0).tolist()


# By the name of the task's pipeline.
READERS: dict[str, type[Reader]] = {
    "text-classification": ClassReader,
    "token-classification": TokenReader,
    "question-answering": AnswerReader,
    "feature-extraction": VectorReader,
}


def predict_requests(
    requests: Sequence[Request], batch_size: int, catch: tuple[type[Exception], ...] = ()
) -> list[Any]:
    """Return the result of each request, of which `batch_size` rows at most go through a model at
    once.

    Rows of different adapters of one model go through it together. Errors of a request that are to
    be caught are returned in place of its result.
    """
    rows = [(request.reader, row) for request in requests for row in request.rows]
    texts = [
        (id(reader.model), *((name, *values) for name, values in row.inputs.items()))
        for reader, row in rows
    ]
    first = {text: number for number, text in reversed(list(enumerate(texts)))}
    same = [first[text] for text in texts]
    # Rows of a text stand together, which runs once below the adapters; and else those of an
    # adapter, which then need not be gathered.
    groups: dict[object, list[int]] = {}
    for number in sorted(
        range(len(rows)), key=lambda number: (rows[same[number]][0].name, same[number])
    ):
        reader, row = rows[number]
        alone = None if reader.can_pad else same[number]
        # Without a mask, the model would read the padding as text.
        length = None if "attention_mask" in row.inputs else len(row.inputs["input_ids"])
        key = (id(reader.model), tuple(row.inputs), reader.tokenizer.padding_side, alone, length)
        groups.setdefault(key, []).append(number)
    values: dict[int, list[torch.Tensor]] = {}
    for group in groups.values():
        for start in range(0, len(group), batch_size):
            chunk = group[start : start + batch_size]
            values.update(zip(chunk, _forward([rows[number] for number in chunk]), strict=True))
    in_order = iter([values[number] for number in range(len(rows))])
    return [
        attempt(catch, request.decode, [next(in_order) for _ in request.rows])
        for request in requests
    ]


def attempt(catch: tuple[type[Exception], ...], function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, or the error that it raises if that is to be caught."""
    try:
        return function(*args)
    except catch as error:
        return error


@torch.inference_mode()
def _forward(rows: Sequence[tuple[Reader, Row]]) -> list[list[torch.Tensor]]:
    """Return the outputs for each row of one batch, as `Reader.decode` wants them."""
    first = rows[0][0]
    texts = [list(pairs) for _, pairs in groupby(rows, lambda pair: pair[1].inputs)]
    inputs = [pairs[0][1].inputs for pairs in texts]
    if len({len(row["input_ids"]) for row in inputs}) == 1:  # there may be no pad token
        batch = {name: torch.tensor([row[name] for row in inputs]) for name in inputs[0]}
    else:
        batch = dict(DataCollatorWithPadding(first.tokenizer)(inputs))
    batch = {name: value.to(first.model.device) for name, value in batch.items()}
    names = [[reader.name for reader, _ in pairs] for pairs in texts]
    is_plain = len(texts) == len(rows)
    outputs = first.model(**batch, adapter_names=[name for [name] in names] if is_plain else names)
    found = [
        [outputs[name][number].float().cpu() for name in first.outputs]
        for number in range(len(rows))
    ]
    if first.is_per_token and "attention_mask" in batch:
        masks = [
            mask
            for mask, pairs in zip(batch["attention_mask"].bool().cpu(), texts, strict=True)
            for _ in pairs
        ]
        found = [[value[mask] for value in own] for own, mask in zip(found, masks, strict=True)]
    if first.outputs == (
        "logits",
    ):  # those of heads narrower than the widest in the batch are filled up with -inf
        found = [
            [own[0][..., : len(reader.labels)]]
            for own, (reader, _) in zip(found, rows, strict=True)
        ]
    return found


def cut_arguments(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PeftModel, record: AdapterRecord
) -> dict[str, Any]:
    """Return the tokenizer's arguments that cut texts to the adapter's length; empty if no length
    is known.
    """
    lengths = (record.max_length, tokenizer.model_max_length, count_positions(model))
    known = [int(length) for length in lengths if length and length < LARGE_INTEGER]
    return {"truncation": True, "max_length": min(known)} if known else {}
