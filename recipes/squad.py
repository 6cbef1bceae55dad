"""Train a Houlsby adapter, or another --method, to find the answer to a question in a text.

    # SQuAD 1.1 and BERT-base from the Hub
    accelerate launch recipes/squad.py
    # with questions that have no answer
    accelerate launch recipes/squad.py --data rajpurkar/squad_v2
    # train.parquet, validation.parquet
    accelerate launch recipes/squad.py --data squad --r 2
    accelerate launch recipes/squad.py --method full --learning_rate 3e-5 --num_train_epochs 3
    # nothing is trained
    accelerate launch recipes/squad.py --data new.jsonl --evaluate runs/squad

The columns are those of the Hub's rajpurkar/squad. `answers` may also be a list of objects, as in
SQuAD's own files, or one or more texts. Without a validation split, the questions of some contexts
are used instead. Contexts of any length are read in windows that share --stride tokens; in BERT's
own code, the windows begin --doc_stride tokens apart. The answers of the best epoch are written to
predictions.json, in the format of the official scripts, with the same scores.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from datasets import Dataset
from transformers import AutoModelForQuestionAnswering, PreTrainedModel, PreTrainedTokenizerBase

from data.data import check_fast, sample
from data.reading import files_of, load_data
from data.splits import split_to_score, with_validation
from houlsby_peft.predict.answers import QUESTION_TOKENS, Windows
from run.arguments import DataArguments
from run.command import parse_command
from run.edge import RecipeError, end_with_one_line, log
from run.files import write_json
from run.presets import with_preset
from run.run_task import run_task
from run.saved import Saved
from run.trainer import RecipeTrainer
from run.training_arguments import RecipeTrainingArguments, flag
from tasks.metrics import Examples
from tasks.questions import (
    ANSWERED,
    SCORES,
    evaluation_windows,
    find_answers,
    read_questions,
    squad_scores,
    training_windows,
)
from tasks.task import Task


NULL_THRESHOLD = 0.0


@dataclass(frozen=True, kw_only=True)
class SquadArguments(DataArguments):
    """The questions, and how answers are found."""

    _argument_group_name = "task"

    data: str = flag(
        aliases=["--train_file", "--dataset_name"],
        default="rajpurkar/squad",
        help="A folder with train and validation, one file, or a name on the Hub.",
    )
    max_length: int = flag(
        aliases=["--max_seq_length"],
        default=384,
        help="Tokens of a window, including its question.",
    )
    stride: int = flag(
        aliases=["--doc_stride"], default=128, help="Tokens that consecutive windows share."
    )
    max_answer_length: int = flag(default=30, help="Maximum number of tokens of an answer.")
    null_threshold: float = flag(
        aliases=["--null_score_diff_threshold"],
        default=NULL_THRESHOLD,
        help="Give no answer if 'no answer' scores higher than the best answer by more than this; "
        "to --evaluate, the recorded value is the default.",
    )
    max_eval_samples: int | None = flag(
        default=None, help="Score a random sample of this many questions."
    )
    preset: Literal["houlsby2019"] | None = flag(
        default=None,
        help="A paper's settings instead of the defaults; see recipes/run/presets.py.",
    )


class SquadTrainer(RecipeTrainer):
    """A trainer that scores answers to questions, each found in all windows of its context."""

    eval_dataset: Any

    def __init__(self, windows: Windows, questions: Dataset, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.windows, self.questions = windows, questions

    def answers(self) -> dict[str, str]:
        """Return the answer to each question, by its id."""
        logits: Any = self.predict(self.eval_dataset).predictions
        starts, ends = logits
        return find_answers(self.questions, self.windows, starts, ends)

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        expected = {}
        for id_, answers in zip(self.questions["id"], self.questions["answers"], strict=True):
            expected[id_] = answers["text"]
        metrics = {}
        for name, score in squad_scores(self.answers(), expected).items():
            metrics[f"{metric_key_prefix}_{name}"] = score
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


@dataclass(kw_only=True)
class SquadTask(Task):
    """Questions about contexts. With a threshold, they may have no answer."""

    arguments: SquadArguments
    threshold: float | None
    given: set[str] = field(default_factory=set)  # the answers of the kept weights
    text_columns: tuple[str, ...] = ("question", "context")
    auto_class = AutoModelForQuestionAnswering
    task_type = "QUESTION_ANS"
    trainer_class = SquadTrainer

    @property
    def scores(self) -> tuple[str, ...]:
        names = [*SCORES]
        if self.threshold is not None:
            for kind in ANSWERED:
                names += [f"{kind}_{score}" for score in SCORES]
        return tuple(names)

    @property
    def head(self) -> dict[str, Any]:
        return {"num_labels": 2}

    @property
    def recorded(self) -> dict[str, Any]:
        return {"task_type": self.task_type, "null_threshold": self.threshold, "text_columns": ()}

    def set_length(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        super().set_length(tokenizer, max_length)
        check_fast(tokenizer)
        # The first logits are then those of the window's tokens.
        tokenizer.padding_side = "right"
        stride, longest = self.arguments.stride, tokenizer.model_max_length
        shortest = stride + QUESTION_TOKENS + tokenizer.num_special_tokens_to_add(pair=True) + 1
        if not shortest <= max_length <= longest:
            raise RecipeError(
                f"--max_length must be from {shortest} (--stride {stride}, a question of "
                f"{QUESTION_TOKENS} tokens, special tokens and one of context) to the encoder's "
                f"{longest}, got {max_length}."
            )
        self.windows = Windows(
            tokenizer, max_length, stride, self.arguments.max_answer_length, self.threshold
        )

    def trainer_options(
        self, model: PreTrainedModel, training: RecipeTrainingArguments
    ) -> dict[str, Any]:
        return {"windows": self.windows, "questions": self.splits["validation"]}

    def encode(
        self, split: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> Dataset:
        if name == "train":
            encoded = training_windows(split, self.windows)
        else:
            encoded = evaluation_windows(split, self.windows)
        log(f"{name}: {len(split):,} questions in {len(encoded):,} windows")
        return encoded

    def examples(self, trainer: RecipeTrainer) -> Examples:
        """Return the answers as the metrics squad and, with questions without one, squad_v2 take
        them.
        """
        predictions, references = [], []
        answers, questions = cast(SquadTrainer, trainer).answers(), self.splits["validation"]
        for id_, expected in zip(questions["id"], questions["answers"], strict=True):
            prediction: dict[str, Any] = {"id": id_, "prediction_text": answers[id_]}
            if self.threshold is not None:
                prediction["no_answer_probability"] = 0.0 if answers[id_] else 1.0
            predictions.append(prediction)
            references.append({"id": id_, "answers": expected})
        return Examples(predictions, references)

    def find_constant(self, predictions: Any) -> str | None:
        [answer, *others] = self.given or [None, None]
        return None if others else answer

    def predict_test(self, trainer: RecipeTrainer) -> None:
        """Write the answers to predictions.json, if --do_predict asks for them."""
        if not trainer.args.do_predict:
            return
        answers = cast(SquadTrainer, trainer).answers()  # in every process
        self.given = set(answers.values())
        if trainer.args.should_save:
            write_json(Path(trainer.args.output_dir, "predictions.json"), answers)


def main() -> None:
    command = parse_command(SquadArguments, more_defaults=lambda given: with_preset(given, "squad"))
    command = command.for_task(command.arguments.name)
    arguments, training = command.arguments, command.training
    run_task(SquadTask, partial(load_task, arguments, training), command, files_of(arguments))


def load_task(
    arguments: SquadArguments, training: RecipeTrainingArguments, saved: Saved | None
) -> SquadTask:
    """Load the questions to train on or, given something saved, those to score it on."""
    data = load_data(arguments, training)
    splits: dict[str, Dataset] = {}
    for name in ("train", "validation"):
        if name in data:
            splits[name] = read_questions(data[name], arguments.title_of(name))
    if saved:
        splits = split_to_score(splits, arguments, saved.results, text_columns=["context"])
    else:
        splits = with_validation(splits, text_columns=["context"])
    threshold = None
    # The whole validation split decides, not the sample that is scored.
    if not all(answers["text"] for answers in splits["validation"]["answers"]):
        recorded = saved.recorded("null_threshold") if saved else None
        thresholds = (arguments.null_threshold, recorded, NULL_THRESHOLD)
        [threshold, *_] = [value for value in thresholds if value is not None]
    splits["validation"] = sample(splits["validation"], arguments.max_eval_samples)
    if not saved:
        splits["train"] = sample(splits["train"], arguments.max_train_samples)
    return SquadTask(name="squad", splits=splits, arguments=arguments, threshold=threshold)


if __name__ == "__main__":
    end_with_one_line(main)
