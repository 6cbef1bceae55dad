"""What every task is: texts, labels and scores."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
)
from transformers.trainer_utils import PredictionOutput

from data.data import commit_of, tokenize
from houlsby_peft.tables import defused
from run.command import Command
from run.edge import end_if_terminated, log, looks_like_a_path
from run.model import adapt, load_model
from run.progress import without_times
from run.schedule import settle_schedule
from run.trainer import RecipeTrainer
from run.training_arguments import RecipeTrainingArguments
from tasks.metrics import Examples, compute_metrics, load_metrics
from tasks.scores import (
    ClassScores,
    ValueScores,
    find_intervals,
    find_majority,
    score_classes,
)


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
    def has_one_class(self) -> bool:
        """Whether each text or word has one of several classes."""
        is_single = self.problem_type in (None, "single_label_classification")
        return is_single and len(self.labels) > 1

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
        # Both that MNLI has, matched and mismatched.
        several = {}
        for name, data in self.data.items():
            if name.startswith("validation_"):
                several[name.removeprefix("validation_")] = data
        validation = [*several.values()] or [self.data.get("validation", ())]
        rows, validation_rows = len(self.data.get("train", ())), sum(map(len, validation))
        training = settle_schedule(training, rows, validation_rows)
        return self.trainer_class(
            model=model,
            args=training,
            train_dataset=self.data.get("train"),
            eval_dataset=several or self.data.get("validation"),
            processing_class=tokenizer,
            data_collator=self.collator(tokenizer),
            compute_metrics=self.score,
            describe=self.describe if self.labels else None,
            **self.trainer_options(cast(PreTrainedModel, model), training),
        )

    def trainer_options(
        self, model: PreTrainedModel, training: RecipeTrainingArguments
    ) -> dict[str, Any]:
        """Return what the trainer's class needs beyond other trainers."""
        return {}

    def find_intervals(self, trainer: RecipeTrainer) -> dict[str, Any]:
        """Return the 95 % intervals of the scores of each split of a classification.

        Every process predicts.
        """
        if len(self.labels) < 2 or self.task_type != "SEQ_CLS":
            return {}
        outputs = dict(trainer.predicted)
        if trainer.args.eval_strategy != "no":
            name, _, outputs["validation"] = trainer.predict_validation()
        intervals = {}
        for split, output in outputs.items():
            found = find_intervals(
                lambda *arrays: self.score(EvalPrediction(*arrays)),
                np.asarray(output.predictions),
                np.asarray(output.label_ids),
            )
            if split == "validation" and "(" in name:  # of MNLI's two, whose scores have a prefix
                prefix = name.partition("(")[2].rstrip(")")
                found = {f"{prefix}_{score}": interval for score, interval in found.items()}
            intervals[split] = found
        return intervals

    def find_constant(self, predictions: Any) -> str | None:
        """Return the one answer that the kept weights give for all examples; None if there are
        several.
        """
        return None if predictions is None else cast(str | None, predictions.scores.constant)

    def examine(self, trainer: RecipeTrainer, command: Command) -> dict[str, Any]:
        """Return what results.json says beyond the scores, such as those of a baseline."""
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
            # Scores of a regression are of float32: 4.2, not 4.199999809265137.
            table.map(defused).to_csv(path, index=False, float_format=lambda x: str(np.float32(x)))
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
