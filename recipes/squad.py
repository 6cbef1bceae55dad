"""Train a Houlsby adapter, or another --method, to find the answer to a question in a text: SQuAD 1.1 and 2.0.

    accelerate launch recipes/squad.py                                          # SQuAD 1.1 and BERT-base from the Hub
    accelerate launch recipes/squad.py --data rajpurkar/squad_v2                # with questions that have no answer
    accelerate launch recipes/squad.py --data squad --r 2 --learning_rate 1e-3  # train.parquet, validation.parquet
    accelerate launch recipes/squad.py --method full --learning_rate 3e-5 --num_train_epochs 3
    accelerate launch recipes/squad.py --data new.jsonl --evaluate runs/squad           # nothing is trained

Houlsby et al. 2019 try sizes 2 to 256, learning rates 3e-5, 1e-4, 3e-4 and 1e-3 and 3, 10 and 20 epochs; for
fine-tuning 3e-5, 5e-5 and 1e-4 and 2, 3 and 5 epochs. The columns are those of the Hub's rajpurkar/squad. Contexts of
any length are read in windows that share --stride tokens; in BERT's own code, the windows begin --doc_stride tokens
apart. The answers of the best epoch are written to predictions.json, in the format of the official scripts, with the
same scores; those of --evaluate to evaluation_predictions.json.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.hf_argparser import HfArg

from common.arguments import AdapterArguments, DataArguments, MethodArguments, RecipeParser, RecipeTrainingArguments
from common.data import sample
from common.edge import RecipeError, end_with_one_line, log
from common.model import load_saved, settle
from common.presets import with_preset
from common.questions import ANSWERED, SCORES, Windows, check_questions, squad_scores
from common.run import EVALUATED, Run, find_evaluated, plan_push
from common.same_run import write_json
from common.task import Task, evaluate, files_of, load_data, train
from common.trainer import RecipeTrainer


ANSWERS = "predictions.json"
NULL_THRESHOLD = 0.0


@dataclass(kw_only=True)
class SquadArguments(DataArguments):
    """The questions, and how answers are found."""

    _argument_group_name = "task"

    data: str = HfArg(
        aliases=["--train_file", "--dataset_name"],
        default="rajpurkar/squad",
        help="A folder with train and validation, one file, or a name on the Hub.",
    )
    max_length: int = HfArg(
        aliases=["--max_seq_length"], default=384, help="Tokens of a window, including its question."
    )
    stride: int = HfArg(aliases=["--doc_stride"], default=128, help="Tokens that consecutive windows share.")
    n_best: int = HfArg(aliases=["--n_best_size"], default=20, help="Starts and ends that are tried in each window.")
    max_answer_length: int = HfArg(default=30, help="Maximum number of tokens of an answer.")
    null_threshold: float = HfArg(
        aliases=["--null_score_diff_threshold"],
        default=NULL_THRESHOLD,
        help="Give no answer if 'no answer' scores higher than the best answer by more than this; to --evaluate, the "
        "recorded value is the default.",
    )
    max_eval_samples: int | None = HfArg(default=None, help="Score a random sample of this many questions.")
    preset: Literal["houlsby2019"] | None = HfArg(
        default=None, help="A paper's settings instead of the defaults; see recipes/common/presets.py."
    )


class SquadTrainer(RecipeTrainer):
    """A trainer that scores answers, each found in all windows of its question.

    Args:
        windows: How the questions are split into windows.
        splits: The questions to score, as "validation", and those to train on, if any.
        kwargs: As for a Trainer.
    """

    def __init__(self, windows: Windows, splits: dict[str, Dataset], **kwargs: Any) -> None:
        super().__init__(
            train_dataset=windows.training(splits["train"]) if "train" in splits else None,
            eval_dataset=windows.evaluation(splits["validation"]),
            processing_class=windows.tokenizer,
            data_collator=DataCollatorWithPadding(windows.tokenizer),
            **kwargs,
        )
        self.windows, self.questions = windows, splits["validation"]

    def answers(self) -> dict[str, str]:
        """Return the answer to each question, by its id."""
        start, end = self.predict(self.eval_dataset).predictions
        return self.windows.answers(self.questions, self.eval_dataset, start, end)

    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Return SQuAD's scores of the questions."""
        golds = {
            name: answers["text"]
            for name, answers in zip(self.questions["id"], self.questions["answers"], strict=True)
        }
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in squad_scores(self.answers(), golds).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


@dataclass(kw_only=True)
class SquadTask(Task):
    """Questions about contexts. With a threshold, they may have no answer."""

    arguments: SquadArguments
    threshold: float | None
    auto_class = AutoModelForQuestionAnswering
    task_type = "QUESTION_ANS"

    @property
    def scores(self) -> tuple[str, ...]:
        """The scores of an evaluation; the first chooses the best epoch."""
        kinds = ANSWERED if self.threshold is not None else ()
        return (*SCORES, *(f"{kind}_{score}" for kind in kinds for score in SCORES))

    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        """Not called: SquadTrainer scores answers, not outputs."""
        raise NotImplementedError

    @property
    def head(self) -> dict[str, Any]:
        """The fields that describe the head: the start and the end of an answer."""
        return {"num_labels": 2}

    @property
    def recorded(self) -> dict[str, Any]:
        """What the adapter records."""
        return {"task_type": self.task_type, "null_threshold": self.threshold}

    @property
    def example(self) -> list[str]:
        """The first question of the validation split, and its context."""
        return [self.splits["validation"][0][column] for column in ("question", "context")]

    def make_trainer(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int,
        training: RecipeTrainingArguments, **options: Any,
    ) -> SquadTrainer:  # fmt: skip
        """Return a trainer with the windows of all splits."""
        tokenizer.padding_side = "right"  # so that the first logits are those of the window's tokens
        own = self.arguments
        windows = Windows(tokenizer, max_length, own.stride, own.n_best, own.max_answer_length, self.threshold)
        trainer = SquadTrainer(windows, self.splits, model=model, args=training)
        count = f"{len(trainer.train_dataset):,} training windows; " if trainer.train_dataset else ""
        log(f"{count}{len(self.splits['validation']):,} questions to score")
        return trainer

    def predict_test(self, trainer: SquadTrainer, prefix: str = "") -> None:
        """Write the answers to `prefix`predictions.json in the output folder, if --do_predict asks for them."""
        answers = trainer.answers() if trainer.args.do_predict else None
        if answers is not None and trainer.args.should_save:
            write_json(Path(trainer.args.output_dir, prefix + ANSWERS), answers)


def main() -> None:
    """Read the command line and train, or score what a run has saved."""
    groups = (SquadArguments, MethodArguments, AdapterArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage="accelerate launch recipes/squad.py [flags]")
    arguments, method, adapter, training = parser.parse(more_defaults=lambda given: with_preset(given, "squad"))
    if training.label_smoothing_factor:
        raise RecipeError("--label_smoothing_factor has no effect on answers. Leave it out.")
    training.output_dir = training.output_dir.replace("{task}", "squad")
    name = find_evaluated(arguments, adapter, training)
    if name is not None:
        return score(name, arguments, method, training, EVALUATED)
    method = settle(method, adapter, training, arguments.model_name)
    push = plan_push(training, arguments.model_name, texts=2)
    run = Run(training, arguments, method, adapter, files=files_of(arguments))
    if run.results is None:
        splits = load_data(arguments, training)
        if "validation" not in splits:
            raise RecipeError(
                f"{arguments.data} must have a split 'validation'; a part of train would share its texts with the "
                "rest."
            )
        check_questions(splits["train"], "train")
        splits["train"] = sample(splits["train"], arguments.max_train_samples)
        train(load_task(arguments, splits), run, arguments, method, adapter, training)
    elif training.do_predict and not (run.folder / ANSWERS).exists():
        score(run.saved, arguments, method, training)
    return push(training.output_dir)


def load_task(arguments: SquadArguments, splits: dict[str, Dataset], threshold: float | None = None) -> SquadTask:
    """Return the task with these splits. Its threshold, if there are questions without an answer, is that of the
    command line, else this one."""
    questions = splits["validation"]
    check_questions(questions, "validation")
    given = arguments.null_threshold if arguments.null_threshold is not None else threshold
    threshold = (NULL_THRESHOLD if given is None else given) if has_unanswered(questions) else None
    splits = {**splits, "validation": sample(questions, arguments.max_eval_samples)}
    return SquadTask(name="squad", splits=splits, arguments=arguments, threshold=threshold)


def score(
    name: str, arguments: SquadArguments, method: MethodArguments, training: RecipeTrainingArguments, prefix: str = ""
) -> None:
    """Score a saved adapter or model on the validation questions, or those of a single file, and write the answers."""
    saved = load_saved(name, None, arguments.model_name, method.base_dtype, SquadTask.auto_class)
    splits = load_data(arguments, training)
    task = load_task(arguments, {"validation": splits.get("validation", splits["train"])}, saved.null_threshold)
    evaluate(task, saved, arguments, training, prefix)


def has_unanswered(questions: Dataset) -> bool:
    """Return whether there are questions without an answer, as in SQuAD 2.0."""
    return not all(answers["text"] for answers in questions["answers"])


if __name__ == "__main__":
    end_with_one_line(main)
