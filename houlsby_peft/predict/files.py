"""Predict for every row of a table in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

from ..errors import UNPRINTABLE
from ..tables import Row, Table, check_written, write_table
from .questions import Input
from .readers import Reader
from .task_bank import TaskBank


_PART_ROWS = 2048
_DIGITS = 6


def predict_file(
    bank: TaskBank,
    table: Table,
    columns: Sequence[str],
    output: Path | None = None,
    *,
    batch_size: int = 32,
    top_k: int | None = None,
) -> int:
    """Predict for every row of a table, write all of its columns and the predictions, and count
    rows without text.

    docs/hub.md describes the columns. Of a bank, the first column of each task is named after it,
    and the names of the others begin with it: `topic` and `topic_score`. A task without a name has
    the columns of a single adapter. All tasks read the given columns of the table: one of texts, or
    two for pairs. Without an output, JSON lines are printed.
    """
    is_json = output is None or check_written(output) in (".jsonl", ".json")
    readers = {task: bank.reader(task) for task in bank.tasks}
    names_of_tasks = _name_columns(readers, table.columns, top_k, is_json)
    added = [name for names in names_of_tasks.values() for name in names.values()]
    without_text = 0
    with tqdm(total=len(table.rows), unit=" rows", disable=None) as bar:
        for start in range(0, len(table.rows), _PART_ROWS):
            part = table.rows[start : start + _PART_ROWS]
            with_text: list[tuple[Row, Input]] = []
            for row in part:
                row |= dict.fromkeys(added)
                text = read_input(row, columns)
                if all(reader.has_text(text) for reader in readers.values()):
                    with_text.append((row, text))
                else:
                    without_text += 1
            _add_predictions(bank, with_text, names_of_tasks, batch_size, top_k)
            if output is None:
                print(*map(json_line, part), sep="\n")
            bar.update(len(part))
    if output is not None:
        write_table(output, table.rows, table, added)
    return without_text


def json_line(value: Any) -> str:
    """Return a value as JSON on one line, in which what would change a terminal is escaped."""
    line = json.dumps(value, ensure_ascii=False, default=str)
    return UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def _name_columns(
    readers: Mapping[str, Reader], taken: Iterable[str], top_k: int | None, is_json: bool
) -> dict[str, dict[str, str]]:
    """Return the names in the file of each task's columns, by what they are for a single adapter.

    A name that the table has already, in any case, begins with "predicted_".
    """
    taken = {column.strip().lower() for column in taken}
    names_of_tasks: dict[str, dict[str, str]] = {}
    for task, reader in readers.items():
        names: dict[str, str] = {}
        names_of_tasks[task] = names
        for column in _columns_of(reader, top_k, is_json):
            name = column
            if task and names:
                name = f"{task}_{column}"
            elif task:
                name = task
            while name.lower() in taken:
                name = f"predicted_{name}"
            taken.add(name.lower())
            names[column] = name
    return names_of_tasks


def _columns_of(reader: Reader, top_k: int | None, is_json: bool) -> list[str]:
    """Return the columns that hold a prediction of a single adapter."""
    pipeline = reader.task.pipeline
    if pipeline == "question-answering":
        return ["answer", "score", "start", "end"]
    if pipeline == "token-classification":
        return ["entities"]
    if pipeline == "feature-extraction":
        return ["embedding"]
    if reader.record.problem_type == "regression":
        return ["score"]
    if top_k is not None and is_json:
        return ["predictions"]
    if top_k is not None:
        columns = []
        for number in range(1, min(top_k, len(reader.labels)) + 1):
            columns += [f"label_{number}", f"score_{number}"]
        return columns
    if reader.record.problem_type == "multi_label_classification":
        return ["labels", "scores"]
    return ["label", "score"]


def _cells(prediction: Any, columns: Sequence[str]) -> list[Any]:
    """Return a prediction as the values of its columns. Of a list of classes, the last columns may
    stay empty.
    """
    if isinstance(prediction, dict):
        return [prediction[column] for column in columns]
    if len(columns) == 1:
        return [prediction]
    labels = [choice["label"] for choice in prediction]
    scores = [choice["score"] for choice in prediction]
    if columns == ["labels", "scores"]:
        return [labels, scores]
    cells = []
    for label, score in zip(labels, scores, strict=True):
        cells += [label, score]
    return cells


def read_input(row: Row, columns: Sequence[str]) -> Input:
    """Return the text or the pair of a row; empty where there is none."""
    texts = []
    for column in columns:
        value = row.get(column)
        texts.append("" if value is None else str(value))
    if len(texts) == 1:
        return texts[0]
    return texts[0], texts[1]


def _add_predictions(
    bank: TaskBank,
    with_text: Sequence[tuple[Row, Input]],
    names_of_tasks: Mapping[str, Mapping[str, str]],
    batch_size: int,
    top_k: int | None,
) -> None:
    """Predict the texts for all tasks, and write the predictions into their rows."""
    # Texts of like length stand together, so that little is padding.
    by_length = sorted(with_text, key=lambda pair: sum(map(len, pair[1])))
    requests = [([*names_of_tasks], text) for _, text in by_length]
    results = bank.predict(requests, batch_size, top_k)
    for (row, _), predictions in zip(by_length, results, strict=True):
        for task, prediction in predictions.items():
            names = names_of_tasks[task]
            cells = _cells(_rounded(prediction), [*names])
            row.update(zip(names.values(), cells, strict=False))


def _rounded(result: Any) -> Any:
    """Return a result with rounded scores; a vector stays as it is."""
    if isinstance(result, list):
        return [_rounded(item) for item in result]
    if isinstance(result, dict):
        return {**result, "score": round(result["score"], _DIGITS)}
    return result
