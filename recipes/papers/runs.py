"""Finished runs of glue.py, loaded again for an analysis of their models."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from common.data import sample
from common.edge import RecipeError
from common.glue_tasks import TASKS, GlueTask
from common.model import load_saved
from common.run import RESULTS_FILE, find_saved, read_object


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its trained model in eval mode, on the accelerator if there is one, and its validation examples
    with their tokens."""

    task: GlueTask
    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    validation: Dataset
    results: dict[str, Any]

    def batches(self, size: int, limit: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the validation examples, or a random sample of `limit`, in padded batches with "labels" on the model's
        device, short examples first."""
        chosen = sample(self.validation, limit)
        wanted = {*self.tokenizer.model_input_names, "label"}
        data = chosen.select(np.argsort(chosen["length"], kind="stable"))
        data = data.select_columns([name for name in data.column_names if name in wanted])
        for batch in DataLoader(data, size, collate_fn=DataCollatorWithPadding(self.tokenizer)):
            yield dict(batch.to(self.model.device))


def load_run(folder: str, data_dir: str | None = None) -> FinishedRun:
    """Load a run of glue.py, with the base model in the data type of the training and, unless `data_dir` has the
    task's files, the run's own data."""
    results, saved = read_object(Path(folder, RESULTS_FILE)), find_saved(Path(folder))
    if results is None or saved is None or results["task"] not in TASKS:
        raise RecipeError(f"{folder} must be the output folder of a finished run of recipes/glue.py, and is not.")
    arguments, task = results["arguments"], TASKS[results["task"]]
    loaded = load_saved(str(saved), task.labels, results["model"], "auto")
    if torch.accelerator.is_available():
        loaded.model.to(torch.accelerator.current_accelerator())
    split = task.load(data_dir or arguments["data_dir"], trains=False).splits[task.validation_splits[0]]
    return FinishedRun(
        task=task,
        model=loaded.model.eval(),
        tokenizer=loaded.tokenizer,
        validation=task.encode(split, "validation", loaded.tokenizer, arguments["max_length"]),
        results=results,
    )
