"""Predict for every row of a table in a file, with memory for a part of it only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

from ..errors import AdapterError
from ..tables import Row, TableReader, TableWriter, find_format
from .predictor import Predictor
from .readers import Input, Reader
from .task_bank import TaskBank


_PART_ROWS = 2048
# A class of several that may hold at once is chosen from this score on.
_THRESHOLD = 0.5
_DIGITS = 6


def predict_file(
    adapter: Predictor | TaskBank,
    table: TableReader,
    columns: Sequence[str],
    output: Path | None = None,
    *,
    batch_size: int = 32,
    top_k: int | None = None,
) -> int:
    """Predict for every row of a table, and write all of its columns and the predictions.

    The predictions are in the columns `label` and `score`; of a regression, in `score`; with `top_k`, in `label_1`,
    `score_1`, `label_2` and so on, or, in JSON lines, in the list `predictions`; of several labels per text, in the
    lists `labels` (those with a score of at least 0.5) and `scores`; of tags, in `entities`; of questions, in
    `answer`, `score`, `start` and `end`; without a head, in `embedding`. A name that the table has already gets the
    prefix `predicted_`. A row without text gets no prediction: a pair of texts needs one of them, as in the recipes'
    training, but a question needs its context.

    Of a bank, the first of these columns is named after each task, and the others begin with its name: `topic` and
    `topic_score`.

    Args:
        adapter: What `load` has returned, or a bank whose tasks all read such texts.
        table: The table.
        columns: Its column of texts, or two for pairs; for question answering, those of questions and contexts.
        output: The file to write; until it is complete, it ends in .part. None prints JSON lines.
        batch_size: Number of rows that are predicted at once.
        top_k: Number of classes per row; see `Predictor.predict`.

    Returns:
        The number of rows without text.

    Raises:
        ValueError: As for `Predictor.predict`.
    """
    is_json = output is None or find_format(output) == ".jsonl"
    readers: dict[str, Any] = {"": adapter}
    if isinstance(adapter, TaskBank):
        readers = {task: adapter.reader(task) for task in adapter.tasks}
    plans, limits = {}, []
    for task, reader in readers.items():
        own, to_row = _plan_columns(reader, top_k, is_json)
        first = next(iter(own))
        named = {name: name if not task else task if name == first else f"{task}_{name}" for name in own}
        plans[task] = ({named[name]: kind for name, kind in own.items()}, named, to_row)
        is_several = reader.config.kind_of_problem == "multi_label_classification" and top_k is None
        # With recorded thresholds, the labels are chosen by them.
        has_thresholds = bool(reader.config.record and reader.config.record.thresholds)
        limits.append(max(1, len(reader.labels)) if is_several and not has_thresholds else top_k)
    added = {name: kind for own, *_ in plans.values() for name, kind in own.items()}
    names = _rename(added, table.columns)
    columns_of_file = {names[name]: kind for name, kind in added.items()}
    needs_all = all(reader.task.pipeline == "question-answering" for reader in readers.values())

    def predict(texts: Sequence[Input]) -> list[Row]:
        """Return the values of all further columns for each text."""
        if isinstance(adapter, TaskBank):
            pairs = [(task, text) for text in texts for task in plans]
            results = iter(adapter.predict(pairs, batch_size, limits * len(texts)))
        else:
            results = iter(adapter.predict(texts, batch_size, **({} if limits[0] is None else {"top_k": limits[0]})))
        return [
            {
                names[named[name]]: value
                for _, named, to_row in plans.values()
                for name, value in to_row(next(results)).items()
            }
            for _ in texts
        ]

    empty = 0
    with (
        TableWriter(output, table, columns_of_file) if output else nullcontext() as writer,
        tqdm(total=table.count, unit=" rows", disable=None) as bar,
    ):
        for rows in table.parts(_PART_ROWS):
            inputs = [_read_input(row, columns, needs_all) for row in rows]
            # Texts of like length stand together, so that little is padding.
            order = sorted((i for i, text in enumerate(inputs) if text), key=lambda i: sum(map(len, inputs[i] or ())))
            found: list[Row] = [dict.fromkeys(names.values()) for _ in rows]
            for i, values in zip(order, predict([text for i in order if (text := inputs[i])]), strict=True):
                found[i] = values
            empty += len(rows) - len(order)
            whole = [row | more for row, more in zip(rows, found, strict=True)]
            if writer is None:
                print(*(json.dumps(row, ensure_ascii=False, default=str) for row in whole), sep="\n")
            else:
                writer.write(whole)
            bar.update(len(rows))
    return empty


def _plan_columns(
    adapter: Predictor | Reader, top_k: int | None, is_json: bool
) -> tuple[dict[str, type], Callable[[Any], Row]]:
    """Return the columns of the predictions with their types, and what turns a prediction into their values."""
    task, kind = adapter.task.pipeline, adapter.config.kind_of_problem
    if task == "question-answering":
        return {"answer": str, "score": float, "start": int, "end": int}, _rounded
    if task != "text-classification":
        name = "entities" if task == "token-classification" else "embedding"
        return {name: list}, lambda result: {name: json.loads(json.dumps(_listed(result), default=float))}
    if kind == "regression":
        return {"score": float}, lambda result: _rounded({"score": result["score"]})
    if top_k is not None and is_json:
        return {"predictions": list}, lambda result: {"predictions": [_rounded(item) for item in result]}
    if top_k is not None:
        shown = range(1, min(top_k, len(adapter.labels) or top_k) + 1)
        columns: dict[str, type] = {
            f"{name}_{i}": kind for i in shown for name, kind in (("label", str), ("score", float))
        }
        return columns, lambda result: {
            f"{name}_{i}": value for i, item in enumerate(result, 1) for name, value in _rounded(item).items()
        }
    if kind == "multi_label_classification":
        record = adapter.config.record
        least = 0.0 if record and record.thresholds else _THRESHOLD
        return {"labels": list, "scores": list}, lambda result: _choose_labels(result, least)
    return {"label": str, "score": float}, _rounded


def _choose_labels(result: Iterable[Mapping[str, Any]], least: float) -> Row:
    chosen = [item for item in map(_rounded, result) if item["score"] >= least]
    return {"labels": [item["label"] for item in chosen], "scores": [item["score"] for item in chosen]}


def _rounded(result: Mapping[str, Any]) -> Row:
    return {name: round(float(value), _DIGITS) if name == "score" else value for name, value in result.items()}


def _listed(result: Any) -> Any:
    return result.tolist() if hasattr(result, "tolist") else result


def _rename(added: Iterable[str], columns: Sequence[str]) -> dict[str, str]:
    """Return the name of each further column, which the table must not have."""
    taken = {column.strip().lower() for column in columns}
    names = {name: f"predicted_{name}" if name in taken else name for name in added}
    if again := [name for name in names.values() if name in taken]:
        raise AdapterError(f"The predictions need a column {again[0]!r}, which the file has already. Rename it there.")
    return names


def _read_input(row: Mapping[str, Any], columns: Sequence[str], needs_all: bool) -> Input | None:
    """Return the text or the pair of texts of a row; None if all of them are missing or, with `needs_all`, one is."""
    texts = []
    for column in columns:
        value = row.get(column)
        texts.append("" if value is None else str(value))
    if not (all if needs_all else any)(map(str.strip, texts)):
        return None
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])
