"""What every task is: its texts, labels and scores; and the loop that trains or scores any of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from common.arguments import AdapterArguments, DataArguments, MethodArguments, RecipeTrainingArguments
from common.data import describe_data, find_files, load_splits, tokenize, with_validation, without_known
from common.edge import log
from common.model import Saved, adapt, load_model
from common.run import Run, write_evaluation
from common.same_run import CONTENT, describe_content
from common.scores import ClassScores, ValueScores, score_classes, without_times
from common.trainer import RecipeTrainer


@dataclass(kw_only=True)
class Task(ABC):
    """A task with its data.

    Attributes:
        name: Its name, in results.json and in names of folders.
        labels: The names of the classes by number, or a single one for a score.
        text_columns: The columns of the texts.
        splits: The examples by split; "train" is missing where a saved adapter is scored.
        problem_type: The kind of the problem, for the head; None: a single label is a score, several are classes.
        auto_class: The model with the task's head.
        task_type: PEFT's name for the kind of task.
        trainer_class: The trainer.
    """

    name: str
    labels: tuple[str, ...] = ()
    text_columns: tuple[str, ...] = ()
    splits: dict[str, Dataset] = field(default_factory=dict)
    problem_type: str | None = None

    auto_class: ClassVar[Any] = AutoModelForSequenceClassification
    task_type: ClassVar[str] = "SEQ_CLS"
    trainer_class: ClassVar[type[RecipeTrainer]] = RecipeTrainer

    @property
    @abstractmethod
    def scores(self) -> tuple[str, ...]:
        """The names of the scores of an evaluation; the first chooses the best epoch."""

    @abstractmethod
    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        """Return the scores as the Trainer calls for them."""

    @property
    def head(self) -> dict[str, Any]:
        """The fields that describe the head in the configurations of model and adapter."""
        default = "regression" if len(self.labels) == 1 else "single_label_classification"
        return {"id2label": dict(enumerate(self.labels)), "problem_type": self.problem_type or default}

    @property
    def recorded(self) -> dict[str, Any]:
        """What the adapter's configuration and record say of the task."""
        return {"task_type": self.task_type, "text_columns": self.text_columns, **self.head}

    @property
    def example(self) -> str | list[str]:
        """A text or a pair of texts, for which the end of a run shows how to predict."""
        split = self.splits.get("validation", self.splits["train"])
        return [split[0][column] for column in self.text_columns]

    def load_model(self, name: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the encoder with a head for this task, which is new unless the checkpoint has one of this size."""
        head = self.head
        if self.labels:
            head["label2id"] = {label: number for number, label in enumerate(self.labels)}
        model, tokenizer, _ = load_model(self.auto_class, name, dtype, **head)
        return model, tokenizer

    def encode(self, split: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
        """Return a split with the tokens of its texts."""
        return tokenize(split, tokenizer, self.text_columns, max_length, name)

    def collator(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Return what makes a batch of examples."""
        return DataCollatorWithPadding(tokenizer)

    def describe(self, outputs: NDArray[np.float32], labels: NDArray[Any]) -> ClassScores | ValueScores:
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
        **options: Any,
    ) -> RecipeTrainer:
        """Return a trainer with the tokens of all splits. Further options are the trainer's own."""
        self.data = {name: self.encode(split, name, tokenizer, max_length) for name, split in self.splits.items()}
        return self.trainer_class(
            model=model,
            args=training,
            train_dataset=self.data.get("train"),
            eval_dataset=self.validation(self.data),
            processing_class=tokenizer,
            data_collator=self.collator(tokenizer),
            compute_metrics=self.score,
            describe=self.describe if self.labels else None,
            **options,
        )

    def validation(self, data: Mapping[str, Dataset]) -> Dataset | dict[str, Dataset] | None:
        """Return the validation split, or several by their names."""
        return data.get("validation")

    def predict_test(self, trainer: RecipeTrainer, prefix: str = "") -> dict[str, float] | None:
        """Predict the test split, if there is one and --do_predict asks for it; return its scores if it has labels."""
        if "test" not in self.data or not trainer.args.do_predict:
            return None
        return self.score(trainer.predict(self.data["test"]))


def train(
    task: Task,
    run: Run,
    arguments: DataArguments,
    method: MethodArguments,
    adapter: AdapterArguments,
    training: RecipeTrainingArguments,
    **entries: Any,
) -> dict[str, Any]:
    """Train a task as glue.py does: load the encoder, adapt it, train, save the best epoch, predict, finish the run.

    Args:
        task: The task, with its data.
        run: The run, which is not finished.
        arguments, method, adapter, training: The groups of the command line.
        entries: Further entries of results.json.

    Returns:
        The content of results.json.
    """
    set_seed(training.seed)  # before the first weights of head and adapter are drawn
    training.choose_by(task.scores)
    model, tokenizer = task.load_model(arguments.model_name, method.base_dtype)
    model = adapt(model, method, adapter, training, arguments.max_length, **task.recorded)
    trainer = task.make_trainer(model, tokenizer, arguments.max_length, training)
    trainer.train(run.checkpoint)
    trainer.save_trained()  # the best epoch's weights: load_best_model_at_end has restored them
    return run.finish(
        trainer,
        example=task.example,
        method=method.method,
        task=task.name,
        model=arguments.model_name,
        dataset=describe_data(task.name, arguments.data, arguments.data_config, task.splits),
        **({"labels": task.labels, "problem_type": task.problem_type} if task.labels else {}),
        test=task.predict_test(trainer),
        **entries,
    )


def evaluate(
    task: Task, saved: Saved, arguments: DataArguments, training: RecipeTrainingArguments, prefix: str
) -> dict[str, Any]:
    """Score what a run has saved on the task's validation split, predict the test split, and return the content of
    evaluation.json. The names of files with predictions begin with `prefix`."""
    trainer = task.make_trainer(saved.model, saved.tokenizer, saved.check_length(arguments.max_length), training)
    scores = without_times(trainer.evaluate())
    dataset = describe_data(task.name, arguments.data, arguments.data_config, task.splits)
    test = task.predict_test(trainer, prefix)
    kept = trainer.describe_kept()
    return write_evaluation(
        training, task.name, saved.name, scores, kept, prefix, dataset=dataset, labels=task.labels, test=test
    )


def files_of(arguments: DataArguments) -> dict[str, Path]:
    """Return the files of a data set, by their splits; none for data on the Hub."""
    return find_files(arguments.data, validation=arguments.validation_file, test=arguments.test_file)


def load_data(arguments: DataArguments, training: RecipeTrainingArguments) -> dict[str, Dataset]:
    """Load the splits of a data set."""
    with training.main_process_first():
        return load_splits(
            arguments.data, arguments.data_config, arguments.encoding, validation=arguments.validation_file,
            test=arguments.test_file,
        )  # fmt: skip


def split_to_score(
    splits: dict[str, Dataset],
    arguments: DataArguments,
    saved: Saved,
    labels: Sequence[Any] | None = None,
    text_columns: Sequence[str] = (),
) -> dict[str, Dataset]:
    """Return the splits with the validation split on which a saved adapter or model is scored, without "train".

    Data without a validation split are scored whole, unless the run was trained on them: then it is scored on the
    examples that it has left out of the training.

    Args:
        splits: The splits.
        arguments: Where they come from.
        saved: What is scored.
        labels: As for with_validation.
        text_columns: As for without_known, for a run that has left such examples out.
    """
    splits = dict(splits)
    if "validation" not in splits:
        before = saved.results.get("arguments", {})
        now, then = (content.get("train", {}).get("sum") for content in (
            describe_content(files_of(arguments), {}), saved.results.get(CONTENT, {})
        ))  # fmt: skip
        was_trained_on = now == then if now and then else before.get("data") == arguments.data
        was_split = "validation" in saved.results.get("dataset", {}).get("rows", {})
        if was_trained_on and was_split and not before.get("validation_file"):
            splits = with_validation(splits, labels)
            if before.get("keep_repeated") is False:
                splits = without_known(splits, text_columns)
        else:
            if was_trained_on:
                log(f"all examples of {arguments.data} were trained on: their scores say little about new ones")
            splits["validation"] = splits["train"]
    splits.pop("train")
    return splits
