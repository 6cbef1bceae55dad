"""What every task is: texts, labels and scores; and the one way in which any of them is trained or
scored.
"""

import resource
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from numpy.typing import NDArray
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.trainer_utils import PredictionOutput

import houlsby_peft
from common.arguments import Command, RecipeTrainingArguments, defaults_of, merge
from common.data import tokenize
from common.edge import RecipeError, log, looks_like_a_path
from common.model import Saved, adapt, load_model, load_saved, on_main, quiet, settle
from common.run import (
    CONTENT,
    MOMENT,
    RESULTS_FILE,
    Run,
    command_line,
    find_saved,
    hardware,
    is_houlsby,
    write_json,
)
from common.scores import ClassScores, ValueScores, defused, score_classes
from common.trainer import Described, RecipeTrainer, scores_per_epoch, without_times
from houlsby_peft.checkpoints.downloads import find_packaged
from houlsby_peft.hub.card import write_card_of_saved


EVALUATION = "evaluation"  # a subfolder, so that the files of a run remain
LIBRARIES = ("houlsby_peft", "peft", "transformers", "accelerate", "datasets", "evaluate", "torch")


@dataclass(kw_only=True)
class Task(ABC):
    """A task with its data."""

    name: str  # in results.json and in names of folders
    labels: tuple[str, ...] = ()  # the names of the classes by number, or a single one for a score
    text_columns: tuple[str, ...] = ()
    splits: dict[str, Dataset] = field(
        default_factory=dict
    )  # without "train" where a saved adapter is scored
    problem_type: str | None = (
        None  # of the head; None: a single label is a score, several are classes
    )

    auto_class: ClassVar[Any] = AutoModelForSequenceClassification  # the model with the task's head
    task_type: ClassVar[str] = "SEQ_CLS"  # PEFT's name for it
    collator: ClassVar[Any] = DataCollatorWithPadding  # makes a batch of examples
    trainer_class: ClassVar[type[RecipeTrainer]] = RecipeTrainer

    @property
    @abstractmethod
    def scores(self) -> tuple[str, ...]:
        """The names of the scores of an evaluation; the first chooses the best epoch."""

    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        """Return the scores besides the loss, as the Trainer calls for them."""
        return {}

    @property
    def head(self) -> dict[str, Any]:
        """The fields that describe the head in the configurations of model and adapter."""
        default = "regression" if len(self.labels) == 1 else "single_label_classification"
        return {
            "id2label": dict(enumerate(self.labels)),
            "problem_type": self.problem_type or default,
        }

    @property
    def recorded(self) -> dict[str, Any]:
        """What the adapter's configuration and record say of the task."""
        texts = {"text_columns": self.text_columns, "null_threshold": None}
        return {"task_type": self.task_type, **texts, **self.head}

    def example_of(self, row: Mapping[str, Any]) -> str | list[str] | None:
        """Return a row's text or pair of texts, for which the end of a run shows how to predict."""
        return [row[column] for column in self.text_columns]

    def prepare(self, command: Command) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the encoder with a new head for this task, and make trainable what the method
        trains.
        """
        model, tokenizer = self.load_model(command.arguments.model_name, command.method.base_dtype)
        return adapt(model, command, **self.recorded), tokenizer

    def load_model(self, name: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the encoder with a head for this task, which is new unless the checkpoint has one of
        this size.
        """
        head = self.head
        if self.labels:
            head["label2id"] = {label: number for number, label in enumerate(self.labels)}
        model, tokenizer, _ = load_model(self.auto_class, name, dtype, **head)
        return model, tokenizer

    def encode(
        self, split: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> Dataset:
        return tokenize(split, tokenizer, self.text_columns, max_length, name)

    def describe(
        self, outputs: NDArray[np.float32], labels: NDArray[Any]
    ) -> ClassScores | ValueScores:
        """Return what a model has predicted, class by class."""
        if len(self.labels) == 1:
            return ValueScores(labels, outputs[:, 0])
        return score_classes(outputs, labels, self.labels)

    def make_trainer(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        training: RecipeTrainingArguments,
    ) -> RecipeTrainer:
        """Return a trainer with the tokens of all splits."""
        self.max_length = max_length
        self.data = {
            name: self.encode(split, name, tokenizer, max_length)
            for name, split in self.splits.items()
        }
        kind = "validation"  # MNLI has two, validation_matched and validation_mismatched
        several = {
            name.removeprefix(f"{kind}_"): split
            for name, split in self.data.items()
            if name.startswith(kind)
        }
        return self.trainer_class(
            model=model,
            args=training,
            train_dataset=self.data.get("train"),
            eval_dataset=several if len(several) > 1 else several.get(kind),
            processing_class=tokenizer,
            data_collator=self.collator(tokenizer),
            compute_metrics=self.score,
            describe=self.describe if self.labels else None,
            **self.trainer_options(model, training),
        )

    def trainer_options(
        self, model: PreTrainedModel, training: RecipeTrainingArguments
    ) -> dict[str, Any]:
        """Return what the trainer's class needs beyond other trainers."""
        return {}

    def evaluate(self, trainer: RecipeTrainer) -> dict[str, float]:
        """Return the scores of the validation split."""
        return without_times(trainer.evaluate())

    def predict_test(self, trainer: RecipeTrainer) -> dict[str, Any] | None:
        """Predict the test split, if there is one and --do_predict asks for it; return its scores
        if it has labels.
        """
        if "test" not in self.data or not trainer.args.do_predict:
            return None
        prediction = trainer.predict(self.data["test"])
        table = self.predicted(prediction)
        if table is not None and trainer.is_world_process_zero():
            path = Path(trainer.args.output_dir, "predictions.csv")
            path.parent.mkdir(parents=True, exist_ok=True)
            table.map(defused).to_csv(path, index=False)
            log(f"predictions for the test split: {path}")
        return None if prediction.label_ids is None else self.score(prediction)

    def predicted(self, prediction: PredictionOutput) -> pd.DataFrame | None:
        """Return a table of the predictions for the test split, if they are to be written."""
        return None

    def describe_data(self, arguments: Any) -> dict[str, Any]:
        """Return what results.json says of the data: the name, the address on the Hub if they are
        there, the split that the scores are of, and the rows of all splits.
        """
        on_hub = not looks_like_a_path(arguments.data)
        address = {"id": arguments.data, "config": arguments.data_config} if on_hub else {}
        rows = {name: len(split) for name, split in self.splits.items()}
        return {"name": arguments.name, **address, "split": "validation", "rows": rows}


def run_task(
    kind: type[Task],
    load: Callable[[Saved | None], Task],
    command: Command,
    files: Mapping[str, Path],
    labels: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Train a task, or resume it, or score what is saved, as the command line says; push the
    adapter if asked to.

    `load` returns the task with the data to train on or, given something saved, to score it on.
    `files` are those of the data, by their splits. A saved adapter must have the `labels`; None:
    any. Return the content of results.json, or of evaluation.json.
    """
    arguments, method, _, training = command
    name = find_evaluated(command)
    if name is not None:
        with quiet():
            saved = load_saved(
                name, labels, arguments.model_name, method.base_dtype, kind.auto_class
            )
        training.output_dir = str(Path(training.output_dir, EVALUATION))
        return evaluate(load(saved), saved, command)
    push = houlsby_peft.plan_push(
        training, find_packaged(arguments.model_name)
    )  # before anything is trained
    command = settle(command)
    run = on_main(training, lambda: Run(merge(command), files, training.world_size))
    results = run.results
    if results is None:
        results = train(load(None), run, command)
    elif getattr(arguments, "predict", False) and not (run.folder / "submission").exists():
        raise RecipeError(
            f"{run.folder} is finished. Predict with --evaluate {run.folder} --predict."
        )
    if push is not None and training.process_index == 0:
        print(
            f"Pushed: {push(str(run.folder / 'adapter'), results=str(run.folder / RESULTS_FILE))}"
        )
    return results


def train(task: Task, run: Run, command: Command) -> dict[str, Any]:
    """Load the encoder, adapt it, train, save the best epoch, predict and report; return
    results.json's content.
    """
    arguments, method, _, training = command
    asked = training.metric_for_best_model
    training.choose_by(task.scores)
    if asked.endswith("accuracy") and not training.metric_for_best_model.endswith("accuracy"):
        log(f"{task.name} has no accuracy: {training.metric_for_best_model} chooses the best epoch")
    checkpoint = on_main(training, run.start)
    set_seed(training.seed)  # before the first weights of head and adapter are drawn
    model, tokenizer = task.prepare(command)
    trainer = task.make_trainer(model, tokenizer, arguments.max_length, training)
    trainer.train(checkpoint)
    trainer.save_trained()  # the best epoch's weights: load_best_model_at_end has restored them

    test = task.predict_test(trainer)
    kept = trainer.describe_kept()
    scores = {name: score for name, score in trainer.kept.items() if name not in MOMENT}
    weights = run.folder / trainer.saved_as / SAFETENSORS_WEIGHTS_NAME
    is_adapter = training.should_save and is_houlsby(weights.parent)
    content = {
        # By which its card and a later push find these results.
        **({"adapter_crc32": zlib.crc32(weights.read_bytes())} if is_adapter else {}),
        "seed": training.seed,
        "strategy": trainer.strategy,
        "epochs": scores_per_epoch(trainer.state.log_history),
        "chosen_by": training.metric_for_best_model,
        "best_epoch": None if trainer.best_step is None else trainer.kept["epoch"],
        "best_score": scores.get(training.metric_for_best_model.removeprefix("eval_")),
        "best_scores": scores,
        "trainable_parameters": trainer.trainable,
        "total_parameters": trainer.total,
        "seconds": round(time.perf_counter() - trainer.start, 1),
        # Of the GPU, or else of this process; in bytes, as getrusage counts on macOS.
        "peak_memory": torch.cuda.max_memory_allocated()
        or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "versions": {"python": python_version(), **{name: version(name) for name in LIBRARIES}},
        "arguments": merge(command),
        "defaults": defaults_of(command),
        "hardware": hardware(),
        "command": command_line(sys.argv, training.hub_token),
        "method": method.method,
        "task": task.name,
        "model": arguments.model_name,
        "dataset": task.describe_data(arguments),
        "text_columns": task.text_columns,
        **({"labels": task.labels, "problem_type": task.problem_type} if task.labels else {}),
        "test": test,
        "per_class": describe_classes(kept),
        CONTENT: run.content,
    }
    if training.process_index == 0:
        from common.figures import report_end  # only now, as the import takes a second

        write_json(run.folder / RESULTS_FILE, content)
        if is_adapter:
            write_card_of_saved(weights.parent)
        first = next(
            (split for name, split in task.splits.items() if name.startswith("validation")), None
        )
        example = task.example_of((first or task.splits["train"])[0])
        report_end(trainer, content, kept, example)
    return content


def evaluate(task: Task, saved: Saved, command: Command) -> dict[str, Any]:
    """Score what a run has saved on the validation split, predict the test split, and write
    evaluation.json beside the folder of the predictions and figures.
    """
    arguments, _, _, training = command
    training.choose_by(task.scores)
    trainer = task.make_trainer(
        saved.model, saved.tokenizer, saved.check_length(arguments.max_length), training
    )
    scores = task.evaluate(trainer)
    test = task.predict_test(trainer)
    kept = trainer.describe_kept()
    path = Path(f"{training.output_dir}.json")
    content = {
        "task": task.name,
        "evaluated": saved.name,
        "scores": scores,
        "per_class": describe_classes(kept),
        "dataset": task.describe_data(arguments),
        "labels": task.labels,
        "test": test,
    }
    if training.process_index == 0:
        from common.figures import print_files, show_predicted

        write_json(path, content)
        for split, of_split in (("validation", scores), ("test", test)):
            if of_split:
                shown = ", ".join(f"{name} {score:.4f}" for name, score in of_split.items())
                print(f"{task.name}, {saved.name}, {split}: {shown}")
        print_files(
            {"Scores": str(path)} | show_predicted(Path(training.output_dir), kept, task.name)
        )
    return content


def describe_classes(kept: Described | None) -> dict[str, Any] | None:
    """Return the scores of each class, and the split that they are of."""
    return None if kept is None else {"split": kept.split, "scores": kept.scores.by_class()}


def find_evaluated(command: Command) -> str | None:
    """Return what to score: a folder with an adapter or a model, or an adapter's name on the Hub;
        None to train.

    The folder of a run stands for what it has saved.
    """
    arguments, _, _, training = command
    name = arguments.evaluate
    if name is None and training.do_train:
        return None
    folder = Path(name or training.output_dir).expanduser()
    saved = find_saved(folder)
    if saved is None and name is None:
        raise RecipeError(
            "Without --do_train, --do_eval and --do_predict score what the run in --output_dir has saved, and "
            f"{folder} has neither adapter nor model. Give --do_train as well, or --evaluate with a folder."
        )
    return str(saved or name)
