"""Predict for every row of a table in a file, with memory for a part of it only."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

from ..tables import WRITTEN, Row, TableReader, TableWriter, find_format
from .readers import Input, Reader
from .task_bank import TaskBank


_PART_ROWS = 2048
_DIGITS = 6


def predict_file(
    bank: TaskBank,
    table: TableReader,
    columns: Sequence[str],
    output: Path | None = None,
    *,
    batch_size: int = 32,
    top_k: int | None = None,
) -> int:
    """Predict for every row of a table, write all of its columns and the predictions, and count
    rows without text.

    docs/hub.md describes the columns. Of a bank, the first column of each task is named after it,
    and the names of the others begin with it: `topic` and `topic_score`; those of a task without a
    name are as for a single adapter. All tasks read the given columns of the table: one of texts,
    or two for pairs. Until the output is complete, it ends in .part. Without one, JSON lines are
    printed.
    """
    is_json = output is None or find_format(output, WRITTEN) == ".jsonl"
    readers = {task: bank.reader(task) for task in bank.tasks}
    taken = {column.strip().lower() for column in table.columns}
    added: list[str] = []
    plans = {}
    for task, reader in readers.items():
        own, to_row = _plan_columns(reader, top_k, is_json)
        names = {}
        for number, column in enumerate(own):
            name = column if not task else task if number == 0 else f"{task}_{column}"
            while name.lower() in taken:
                name = f"predicted_{name}"
            taken.add(name.lower())
            names[column] = name
        added += names.values()
        plans[task] = (names, to_row)
    needs_all = all(reader.task.pipeline == "question-answering" for reader in readers.values())

    def predict(texts: Sequence[Input]) -> list[Row]:
        """Return the values of all further columns for each text."""
        pairs = [(task, text) for text in texts for task in plans]
        results = iter(bank.predict(pairs, batch_size, top_k))
        found = [
            [(names, to_row(_rounded(next(results)))) for names, to_row in plans.values()]
            for _ in texts
        ]
        return [
            {names[key]: value for names, own in row for key, value in own.items()} for row in found
        ]

    empty = 0
    with (
        TableWriter(output, table, added) if output else nullcontext() as writer,
        tqdm(total=table.count, unit=" rows", disable=None) as bar,
    ):
        for rows in table.parts(_PART_ROWS):
            inputs: list[Input | None] = []
            for row in rows:
                texts = ["" if row.get(column) is None else str(row[column]) for column in columns]
                is_there = (all if needs_all else any)(map(str.strip, texts))
                inputs.append(
                    None if not is_there else texts[0] if len(texts) == 1 else (texts[0], texts[1])
                )
            # Texts of like length stand together, so that little is padding.
            order = sorted(
                (i for i, text in enumerate(inputs) if text),
                key=lambda i: sum(map(len, inputs[i] or ())),
            )
            found: list[Row] = [dict.fromkeys(added) for _ in rows]
            for i, values in zip(
                order, predict([text for i in order if (text := inputs[i])]), strict=True
            ):
                found[i] = values
            empty += len(rows) - len(order)
            whole = [row | more for row, more in zip(rows, found, strict=True)]
            if writer is None:
                print(
                    *(json.dumps(row, ensure_ascii=False, default=str) for row in whole), sep="\n"
                )
            else:
                writer.write(whole)
            bar.update(len(rows))
    return empty


def _plan_columns(
    reader: Reader, top_k: int | None, is_json: bool
) -> tuple[list[str], Callable[[Any], Row]]:
    """Return the columns of the predictions, and what turns a prediction into their values."""
    task, kind, classes = reader.task.pipeline, reader.record.problem_type, len(reader.labels)
    if task == "question-answering":
        return ["answer", "score", "start", "end"], dict
    if task != "text-classification":
        name = "entities" if task == "token-classification" else "embedding"
        return [name], lambda result: {name: result}
    if kind == "regression":
        return ["score"], lambda result: {"score": result["score"]}
    if top_k is not None and is_json:
        return ["predictions"], lambda result: {"predictions": result}
    if top_k is not None:
        numbers = range(1, min(top_k, classes) + 1)
        return (
            [f"{name}_{i}" for i in numbers for name in ("label", "score")],
            lambda result: {
                f"{name}_{i}": item[name] for i, item in enumerate(result, 1) for name in item
            },
        )
    if kind == "multi_label_classification":
        return (
            ["labels", "scores"],
            lambda result: {
                f"{name}s": [item[name] for item in result] for name in ("label", "score")
            },
        )
    return ["label", "score"], dict


def _rounded(result: Any) -> Any:
    if isinstance(result, list):
        return [_rounded(item) for item in result]
    if isinstance(result, dict):
        return {
            name: round(value, _DIGITS) if name == "score" else value
            for name, value in result.items()
        }
    return result
