"""Count the answers that 8-bit integers change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..predict.predictor import Predictor
from ..predict.questions import Input, Question
from ..predict.readers import Reader
from ..predict.task_bank import TaskBank
from .onnx_files import ENCODER_FILE, MODEL_FILE, quantized


Arrays = dict[str, Any]  # of NumPy, as onnxruntime reads and returns them


def count_changed(
    exported: Predictor | TaskBank, folder: Path, inputs: Iterable[Input]
) -> dict[str, int]:
    """Return how many inputs get other classes, tags or answers in 8-bit integers than in float32,
    by task; that of a single adapter has no name.

    Tasks whose answers are values or vectors, which always change, are left out.
    """
    if isinstance(exported, TaskBank):
        readers = {task: exported.reader(task) for task in exported.tasks}
    else:
        readers = {"": exported.reader()}
    in_float32 = _Files(folder, readers, is_quantized=False)
    in_int8 = _Files(folder, readers, is_quantized=True)
    changed = {task: 0 for task, reader in readers.items() if _has_choices(reader)}
    for text in inputs:
        for task in changed:
            changed[task] += in_float32.answer(task, text) != in_int8.answer(task, text)
    return changed


def _has_choices(reader: Reader) -> bool:
    is_value = reader.record.problem_type == "regression"
    return not is_value and reader.task.pipeline != "feature-extraction"


class _Files:
    """What an export has written in one precision."""

    def __init__(self, folder: Path, readers: Mapping[str, Reader], is_quantized: bool) -> None:
        from onnxruntime import InferenceSession

        self._readers = readers
        is_whole = "" in readers
        file = folder / (MODEL_FILE if is_whole else ENCODER_FILE)
        session = InferenceSession(quantized(file) if is_quantized else file)
        self._encoder = None if is_whole else session
        self._models = {"": session}
        if not is_whole:
            self._models = {task: InferenceSession(folder / f"{task}.onnx") for task in readers}
        self._read: Input | None = None
        # Of the text that was read last, by its tokens.
        self._readings: dict[bytes, Arrays] = {}

    def answer(self, task: str, text: Input) -> Any:
        """Return the answer of a task to a text, without its scores."""
        if text != self._read:
            self._read, self._readings = text, {}
        question = Question(text)
        reader = self._readers[task]
        reader.read(question)
        model = self._models[task]
        for row in question.rows:
            values = {name: torch.tensor([ids]).numpy() for name, ids in row.inputs.items()}
            if self._encoder is not None:
                values |= self._encode(values)
            outputs = _run(model, values)
            row.outputs += [torch.from_numpy(outputs[name][0]) for name in reader.outputs]
        return _without_scores(reader.answer(question))

    def _encode(self, values: Arrays) -> Arrays:
        """Return what ladders read of a text, for which the encoder runs once for all tasks."""
        key = values["input_ids"].tobytes()
        if key not in self._readings:
            self._readings[key] = _run(self._encoder, values)
        return self._readings[key]


def _run(session: Any, values: Arrays) -> Arrays:
    read = {item.name: values[item.name] for item in session.get_inputs()}
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, read), strict=True))


def _without_scores(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_without_scores(part) for part in answer]
    return {name: value for name, value in answer.items() if name != "score"}
