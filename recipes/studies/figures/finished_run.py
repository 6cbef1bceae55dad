"""Finished runs of glue.py, loaded again for an analysis of their models."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import EvalPrediction

from data.data import sample
from houlsby_peft.saved.downloads import find_packaged
from results.read import Results
from run.edge import RecipeError
from run.files import read_object
from run.run import RESULTS_FILE, find_saved
from run.saved import load_saved
from run.trainer import RecipeTrainer
from run.training_arguments import RecipeTrainingArguments
from tasks.glue_tasks import TASKS, GlueTask


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its tokenized validation examples, and a trainer that predicts with it."""

    task: GlueTask
    trainer: RecipeTrainer
    validation: Dataset
    results: Results

    def score(self, limit: int | None = None) -> dict[str, float]:
        """Return the scores on the validation examples, or a random sample of `limit`.

        For a task with classes, they always have the accuracy.
        """
        data = sample(self.validation, limit)
        # The order by length needs the least padding.
        by_length = data.select(np.argsort(data["length"], kind="stable"))
        output = self.trainer.predict(by_length, metric_key_prefix="kept")
        outputs, labels = np.asarray(output.predictions), np.asarray(output.label_ids)
        scores = self.task.score(EvalPrediction(outputs, labels))
        if len(self.task.labels) > 1:
            scores["accuracy"] = float(np.mean(outputs.argmax(-1) == labels))
        return scores


def load_run(folder: Path, data_dir: str | None, batch_size: int) -> FinishedRun:
    """Load a run of glue.py, with the base model in the data type of the training.

    The data are the run's own, unless `data_dir` has the task's files.
    """
    results, saved = read_object(folder / RESULTS_FILE), find_saved(folder)
    if results is None or saved is None or results["task"] not in TASKS:
        raise RecipeError(
            f"{folder} must be the output folder of a finished run of recipes/glue.py, and is not."
        )
    arguments = results["arguments"]
    task = TASKS[results["task"]].load(data_dir or arguments["data_dir"], trains=False)
    loaded = load_saved(str(saved), task.labels, find_packaged(results["model"]), "auto")
    training = RecipeTrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=batch_size,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = task.make_trainer(
        loaded.model.eval(), loaded.tokenizer, arguments["max_length"], training
    )
    return FinishedRun(task, trainer, task.data[task.validation_splits[0]], results)
