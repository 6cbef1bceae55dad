"""What the analyses read and write: finished runs of recipes/glue.py, and JSON lines."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.data import tokenize
from common.errors import RecipeError
from common.saved import load_saved
from common.split import draw
from datasets import Dataset
from glue_tasks import TASKS, Task, load_splits
from peft import PeftModel
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase


RUN = "runs/minimal_pairs"  # where recipes/glue.py leaves the run without data


@dataclass(frozen=True)
class Run:
    """A finished run: its trained model in eval mode, on the accelerator if there is one, and its validation examples
    with their tokens."""

    task: Task
    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    validation: Dataset
    results: dict[str, Any]

    @property
    def name(self) -> str:
        """The task and the encoder, for titles."""
        return f"{self.task.name}, {Path(self.results['model']).name}"

    def batches(self, size: int, limit: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """The validation examples, or `limit` of them, drawn at random, in padded batches on the model's device, short
        ones first; with "labels"."""
        drawn = draw(self.validation, limit, seed=0)
        wanted = {*self.tokenizer.model_input_names, "label"}
        data = drawn.select(np.argsort(drawn["length"], kind="stable"))
        data = data.select_columns([name for name in data.column_names if name in wanted])
        for batch in DataLoader(data, size, collate_fn=DataCollatorWithPadding(self.tokenizer)):
            yield dict(batch.to(self.model.device))


def load_run(folder: str, data_dir: str | None = None) -> Run:
    """Loads a run of recipes/glue.py.

    Args:
        folder: Its output folder, with results.json and adapter/ or model/.
        data_dir: Where the task's files are now; default: where the run read them.

    Raises:
        RecipeError: If the folder is none of a finished run, or its task's data are missing.
    """
    results = read_results(Path(folder))
    if results.get("task") not in TASKS:
        raise RecipeError(f"{folder} must be a run of recipes/glue.py; its task is {results.get('task')!r}.")
    arguments, task = results["arguments"], TASKS[results["task"]]
    saved = Path(folder, "model" if Path(folder, "model").is_dir() else "adapter")
    model, tokenizer = load_saved(str(saved), task.labels, results["model"])
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    split = load_splits(task, data_dir or arguments["data_dir"])[task.validation_splits[0]]
    return Run(
        task=task,
        model=model.eval(),
        tokenizer=tokenizer,
        validation=tokenize(split, tokenizer, task.text_columns, arguments["max_length"]),
        results=results,
    )


def read_results(folder: Path) -> dict[str, Any]:
    """results.json of a finished run.

    Raises:
        RecipeError: If it is missing or broken.
    """
    try:
        results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{folder} must be the output folder of a finished run: {error}. Make one: accelerate launch "
            f"recipes/glue.py --output_dir {folder}"
        ) from error
    return results


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object per line, and prints where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"Numbers: {path}")
