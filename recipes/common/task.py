"""What every task is: texts, labels and scores; and the one way in which any of them is trained or
scored.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, ClassVar, cast

import numpy as np
import pandas as pd
from datasets import Dataset
from numpy.typing import NDArray
from peft import PeftModel
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
from common.arguments import RecipeTrainingArguments
from common.command import Command
from common.data import commit_of, tokenize
from common.edge import RecipeError, end_if_terminated, log, looks_like_a_path
from common.files import read_object, write_json
from common.metrics import Examples, compute_metrics, load_metrics
from common.model import Saved, adapt, find_dtype, load_model, load_saved, on_main, quiet
from common.run import (
    CONTENT,
    EVALUATION,
    RESULTS_FILE,
    Run,
    command_line,
    find_evaluated,
    hardware,
)
from common.schedule import settle_schedule
from common.scores import (
    ClassScores,
    ValueScores,
    defused,
    describe_majority,
    find_majority,
    score_classes,
)
from common.trainer import RecipeTrainer, without_times
from houlsby_peft.checkpoints.downloads import find_packaged


LIBRARIES = ("houlsby_peft", "peft", "transformers", "accelerate", "datasets", "evaluate", "torch")


@dataclass(kw_only=True)
class Task(ABC):
    """A task with its data."""

    name: str  # in results.json and in names of folders
    labels: tuple[str, ...] = ()  # the names of the classes by number, or a single one for a score
    text_columns: tuple[str, ...] = ()
    # Without "train" where a saved adapter is scored.
    splits: dict[str, Dataset] = field(default_factory=dict)
    # Of the head; None: a single label is a score, several are classes.
    problem_type: str | None = None

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
        """Return the text or pair of texts of a row."""
        return [row[column] for column in self.text_columns]

    def prepare(self, command: Command) -> tuple[Any, PreTrainedTokenizerBase]:
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

    def set_length(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        """Read texts of at most this many tokens."""
        self.max_length = max_length

    def make_trainer(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        training: RecipeTrainingArguments,
    ) -> RecipeTrainer:
        """Return a trainer with the tokens of all splits."""
        self.set_length(tokenizer, max_length)
        self.data = {}
        for name, split in self.splits.items():
            self.data[name] = self.encode(split, name, tokenizer, max_length)
            end_if_terminated()
        training = settle_schedule(training, len(self.data.get("train", ())))
        return self.trainer_class(
            model=model,
            args=training,
            train_dataset=self.data.get("train"),
            eval_dataset=self._validation(),
            processing_class=tokenizer,
            data_collator=self.collator(tokenizer),
            compute_metrics=self.score,
            describe=self.describe if self.labels else None,
            **self.trainer_options(cast(PreTrainedModel, model), training),
        )

    def _validation(self) -> Dataset | dict[str, Dataset] | None:
        """Return the tokens of the validation split, or of both that MNLI has, matched and
        mismatched.
        """
        several = {}
        for name, data in self.data.items():
            if name.startswith("validation_"):
                several[name.removeprefix("validation_")] = data
        return several or self.data.get("validation")

    def trainer_options(
        self, model: PreTrainedModel, training: RecipeTrainingArguments
    ) -> dict[str, Any]:
        """Return what the trainer's class needs beyond other trainers."""
        return {}

    def evaluate(self, trainer: RecipeTrainer) -> dict[str, float]:
        """Return the scores of the validation split."""
        return without_times(trainer.evaluate())

    def examples(self, trainer: RecipeTrainer) -> Examples:
        """Return the predictions for the validation split as metrics of `evaluate` take them."""
        _, _, output = trainer.predict_validation()
        outputs, labels = np.asarray(output.predictions), np.asarray(output.label_ids)
        if len(self.labels) == 1:
            return Examples(outputs[:, 0].tolist(), labels.tolist())
        if np.ndim(labels) == 2:
            numbers = (outputs > 0).astype(int)
            return Examples(numbers.tolist(), labels.astype(int).tolist(), average="macro")
        predicted = outputs.argmax(-1).tolist()
        if len(self.labels) == 2:
            return Examples(predicted, labels.tolist())
        return Examples(predicted, labels.tolist(), average="macro")

    def load_metrics(self, names: Sequence[str] | None) -> dict[str, Any]:
        """Load the metrics that a command line names, before anything is trained."""
        is_multi = self.problem_type == "multi_label_classification"
        return load_metrics(names or (), config="multilabel" if is_multi else None)

    def compute_metrics(self, metrics: dict[str, Any], trainer: RecipeTrainer) -> dict[str, Any]:
        """Return the entry "metrics" of results.json; none without metrics or an evaluation.

        Every process predicts, and the main one computes.
        """
        if not metrics or trainer.args.eval_strategy == "no":
            return {}
        examples = self.examples(trainer)
        if not trainer.is_world_process_zero():
            return {}
        return {"metrics": compute_metrics(metrics, examples)}

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
        if prediction.label_ids is None:
            return None
        return self.score(EvalPrediction(prediction.predictions, prediction.label_ids))

    def predicted(self, prediction: PredictionOutput) -> pd.DataFrame | None:
        """Return a table of the predictions for the test split, if they are to be written."""
        return None

    def describe_labels(self) -> dict[str, Any]:
        """Return what results.json says of the labels, if the task has some."""
        if not self.labels:
            return {}
        return {"labels": self.labels, "problem_type": self.problem_type}

    def first_example(self) -> str | list[str] | None:
        """Return the text or pair of texts that the command at the end of a run predicts."""
        for name, split in self.splits.items():
            if name.startswith("validation"):
                return self.example_of(split[0])
        return self.example_of(self.splits["train"][0])

    def address_on_hub(self, name: str, config: str | None) -> dict[str, str | None]:
        """Return the name, the configuration and the commit of a data set on the Hub."""
        first, *_ = self.splits.values()
        return {"id": name, "config": config, "revision": commit_of(first)}

    def describe_data(self, arguments: Any) -> dict[str, Any]:
        """Return what results.json says of the data: the name, the address on the Hub if they are
        there, the split that the scores are of, and the rows of all splits.
        """
        address = {}
        if not looks_like_a_path(arguments.data):
            address = self.address_on_hub(arguments.data, arguments.data_config)
        rows = {name: len(split) for name, split in self.splits.items()}
        return {
            "name": arguments.name,
            **address,
            "split": "validation",
            "rows": rows,
            "majority": find_majority(self.splits.get("validation"), self.labels),
        }


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
    model_name, training = command.arguments.model_name, command.training
    encoder = None if model_name is None else find_packaged(model_name)
    command = settle(command, encoder)
    if command.arguments.evaluate is not None:
        return evaluate(kind, load, command, encoder, labels)

    # Before anything is trained.
    push = houlsby_peft.plan_push(training, str(encoder))
    run = on_main(training, lambda: Run(command, files))
    results: dict[str, Any] | None = run.results
    if results is None:
        results = train(load, run, command)
    elif getattr(command.arguments, "predict", False) and not (run.folder / "submission").exists():
        raise RecipeError(
            f"{run.folder} is finished. Predict with --evaluate {run.folder} --predict."
        )
    if push is not None and training.process_index == 0:
        pushed = push(str(run.folder / "adapter"), results=str(run.folder / RESULTS_FILE))
        print(f"Pushed: {pushed}")
    return results


def settle(command: Command, encoder: str | None) -> Command:
    """Return the command with what it leaves open: the weights that are scored or, to train, the
    data type of the encoder, a folder or a name on the Hub. Nothing in it changes from here on.
    """
    arguments, method, adapter, training = command
    evaluated = find_evaluated(arguments.evaluate, training)
    if evaluated is not None:
        return command._replace(arguments=replace(arguments, evaluate=evaluated))
    method.check(adapter, training)
    is_ladder = method.method == "houlsby" and adapter.kind == "ladder"
    if arguments.cache_states is not None and not is_ladder:
        raise RecipeError(
            "--cache_states needs --kind ladder: other adapters change the encoder's hidden states."
        )
    if arguments.cache_states is not None and training.cuda_graphs:
        raise RecipeError(
            "--cache_states needs --cuda_graphs False: a graph cannot read states from a file."
        )
    return command._replace(method=replace(method, base_dtype=find_dtype(command, encoder)))


def load_task(
    load: Callable[[Saved | None], Task], saved: Saved | None, training: RecipeTrainingArguments
) -> tuple[Task, RecipeTrainingArguments]:
    """Return the task with its data, and the arguments of its trainer."""
    task = load(saved)
    folder = training.output_dir
    if saved is not None:
        folder = str(Path(folder, EVALUATION))
    return task, training.choosing_by(task.scores, folder)


def train(load: Callable[[Saved | None], Task], run: Run, command: Command) -> dict[str, Any]:
    """Load the data and the encoder, adapt it, train, save the best epoch, predict and report;
    return results.json's content.
    """
    task, training = load_task(load, None, command.training)
    metrics = task.load_metrics(command.arguments.metric)
    asked, chosen_by = command.training.metric_for_best_model, training.metric_for_best_model
    if asked.endswith("accuracy") and not chosen_by.endswith("accuracy"):
        log(f"{task.name} has no accuracy: {chosen_by} chooses the best epoch")
    checkpoint = on_main(training, run.start)
    set_seed(training.seed)  # before the first weights of head and adapter are drawn
    model, tokenizer = task.prepare(command)
    trainer = task.make_trainer(model, tokenizer, command.arguments.max_length, training)
    if command.arguments.cache_states is not None:
        trainer.cache_states(command.arguments.cache_states)
    trainer.train(checkpoint)
    trainer.save_trained()  # the best epoch's weights: load_best_model_at_end has restored them

    test = task.predict_test(trainer)
    predictions = trainer.describe_kept()
    results = {
        **run.describe_adapter(),
        "seed": training.seed,
        **trainer.results(),
        **task.compute_metrics(metrics, trainer),
        "versions": versions(),
        "arguments": {**run.flags, **trainer.flags()},
        "defaults": run.defaults,
        "hardware": hardware(),
        "command": command_line(sys.argv, training.hub_token),
        "method": command.method.method,
        "task": task.name,
        "model": command.arguments.model_name,
        # The commit of an encoder from the Hub, which transformers keeps there.
        "model_revision": getattr(model.config, "_commit_hash", None),
        "dataset": task.describe_data(command.arguments),
        "text_columns": task.text_columns,
        **task.describe_labels(),
        "test": test,
        "per_class": predictions and predictions.per_class,
        CONTENT: run.content,
    }
    if training.process_index == 0:
        from common.figures import report_end  # only now, as the import takes a second

        run.finish(results)
        report_end(trainer, results, predictions, task.first_example())
    return results


def evaluate(
    kind: type[Task],
    load: Callable[[Saved | None], Task],
    command: Command,
    encoder: str | None,
    labels: Sequence[str] | None,
) -> dict[str, Any]:
    """Score what a run has saved on the validation split, predict the test split, and write
    evaluation.json beside the folder of the predictions and figures.
    """
    arguments, method, _, training = command
    with quiet():
        saved = load_saved(arguments.evaluate, labels, encoder, method.base_dtype, kind.auto_class)
    max_length = saved.check_length(arguments.max_length)
    task, training = load_task(load, saved, training)
    metrics = task.load_metrics(arguments.metric)
    trainer = task.make_trainer(saved.model, saved.tokenizer, max_length, training)
    scores = task.evaluate(trainer)
    test = task.predict_test(trainer)
    predictions = trainer.describe_kept()
    evaluation = {
        "task": task.name,
        "evaluated": saved.name,
        "scores": scores,
        **task.compute_metrics(metrics, trainer),
        "per_class": predictions and predictions.per_class,
        "dataset": task.describe_data(arguments),
        "labels": task.labels,
        "test": test,
    }
    if training.process_index == 0:
        from common.figures import print_files, show_predicted

        path = Path(f"{training.output_dir}.json")
        _keep_other(path, evaluation)
        write_json(path, evaluation)
        of_validation = {**scores, **evaluation.get("metrics", {})}
        data = getattr(arguments, "data", task.name)
        for split, of_split in ((data, of_validation), ("test", test)):
            if of_split:
                shown = ", ".join(f"{name} {score:.4f}" for name, score in of_split.items())
                print(f"{saved.name}, scored on {split}: {shown}")
        if line := describe_majority(evaluation["dataset"]):
            print(line)
        figures = show_predicted(Path(training.output_dir), predictions, task.name)
        print_files({"Scores": str(path), **figures})
    return evaluation


def _keep_other(path: Path, evaluation: Mapping[str, Any]) -> None:
    """Give an evaluation on other data a name of its own, before a new one takes its place."""
    previous = (read_object(path) or {}).get("dataset", {}).get("name")
    if previous and previous != evaluation["dataset"]["name"]:
        path.replace(path.with_name(f"{path.stem}_{Path(str(previous)).name}.json"))


def versions() -> dict[str, str]:
    return {"python": python_version(), **{name: version(name) for name in LIBRARIES}}
