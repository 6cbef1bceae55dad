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

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.hf_argparser import HfArg

from tasks.squad import ANSWERED, QUESTION_TOKENS, SCORES, Windows, check_questions, squad_scores
from training.arguments import AdapterArguments, DataArguments, RecipeParser, RecipeTrainingArguments
from training.data import describe_data, sample
from training.errors import RecipeError, end_with_one_line
from training.evaluation import EVALUATED, find_evaluated, write_evaluation
from training.methods import MethodArguments, prepare_model
from training.model import load_model, load_saved, recorded_length, recorded_null_threshold
from training.results import without_times
from training.runs import Run, plan_push
from training.tables import log
from training.trainer import RecipeTrainer


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

    def windows(self, tokenizer: PreTrainedTokenizerBase, may_be_none: bool) -> Windows:
        """Return how the questions are split into windows, and whether they may have no answer."""
        tokenizer.padding_side = "right"  # so that the first logits are those of the window's tokens
        null_threshold = self.null_threshold if may_be_none else None
        return Windows(tokenizer, self.max_length, self.stride, self.n_best, self.max_answer_length, null_threshold)


def main() -> None:
    """Read the command line, train, keep the best epoch, save the trained weights, the answers and results.json."""
    groups = (SquadArguments, MethodArguments, AdapterArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage="accelerate launch recipes/squad.py [flags]")
    arguments, method, adapter, training = parser.parse()
    if training.label_smoothing_factor:
        raise RecipeError("--label_smoothing_factor has no effect on answers. Leave it out.")
    training.output_dir = training.output_dir.replace("{task}", "squad")
    saved = find_evaluated(arguments, adapter, training)
    if saved is not None:
        return evaluate(saved, arguments, method, training)
    method = method.settled(adapter, training)
    least = arguments.stride + QUESTION_TOKENS + 4  # BERT's special tokens, and one of context
    if arguments.max_length < least:
        raise RecipeError(
            f"--max_length must be at least {least}, for --stride {arguments.stride}, a question of {QUESTION_TOKENS} "
            f"tokens, special tokens and one of context, got {arguments.max_length}. Raise it, or lower --stride."
        )
    push = plan_push(training, arguments.model_name, texts=2)
    run = Run(training, arguments, method, adapter, files=arguments.find_files())
    if run.results is not None:
        if training.do_predict and not Path(training.output_dir, ANSWERS).exists():
            saved = f"{training.output_dir}/{'adapter' if method.adds_weights else 'model'}"
            evaluate(saved, arguments, method, training, ANSWERS)
        return push(training.output_dir)

    set_seed(training.seed)  # before the first weights of head and adapter are drawn
    with training.main_process_first():
        splits = arguments.load_splits()
    if "validation" not in splits:
        raise RecipeError(
            f"{arguments.data} must have a split 'validation'; a part of train would share its texts with the rest."
        )
    for name in ("train", "validation"):
        check_questions(splits[name], name)
    may_be_none = has_unanswered(splits["validation"])
    training.choose_by([*SCORES, *(f"{kind}_{score}" for kind in ANSWERED if may_be_none for score in SCORES)])
    splits["train"] = sample(splits["train"], arguments.max_train_samples)
    splits["validation"] = sample(splits["validation"], arguments.max_eval_samples)
    model, tokenizer, _ = load_model(
        AutoModelForQuestionAnswering, arguments.model_name, method.base_dtype, num_labels=2
    )  # start, end
    windows = arguments.windows(tokenizer, may_be_none)
    model = prepare_model(
        model, method, adapter, training, arguments.max_length, windows.null_threshold, task_type="QUESTION_ANS"
    )
    trainer = SquadTrainer(windows, splits, model=model, args=training)
    log(f"{len(trainer.train_dataset):,} training windows; {len(splits['validation']):,} questions to score")
    trainer.train(run.checkpoint)
    trainer.save_trained()  # the best epoch's weights: load_best_model_at_end has restored them
    write_answers(trainer, ANSWERS)
    dataset = describe_data("SQuAD", arguments.data, arguments.data_config, splits)
    run.finish(
        trainer,
        example=(splits["validation"][0]["question"], splits["validation"][0]["context"]),
        method=method.method,
        task="squad",
        model=arguments.model_name,
        dataset=dataset,
    )
    push(training.output_dir)


def evaluate(
    saved: str,
    arguments: SquadArguments,
    method: MethodArguments,
    training: RecipeTrainingArguments,
    file: str = EVALUATED + ANSWERS,
) -> None:
    """Score a saved adapter or model on the validation questions, or those of a single file, and write the answers to
    `file` in the output folder."""
    splits = arguments.load_splits()
    name = "validation" if "validation" in splits else "train"
    check_questions(splits[name], name)
    questions = sample(splits[name], arguments.max_eval_samples)
    model, tokenizer = load_saved(saved, None, arguments.model_name, method.base_dtype, AutoModelForQuestionAnswering)
    threshold = arguments.null_threshold
    if threshold is None:
        threshold = recorded_null_threshold(saved, model)
    arguments = replace(
        arguments,
        max_length=arguments.max_length or recorded_length(saved, model),
        null_threshold=NULL_THRESHOLD if threshold is None else threshold,
    )
    windows = arguments.windows(tokenizer, has_unanswered(splits[name]))
    trainer = SquadTrainer(windows, {"validation": questions}, model=model, args=training)
    log(f"{len(questions):,} questions to score")
    write_evaluation(training, "squad", saved, without_times(trainer.evaluate()))
    write_answers(trainer, file)


def has_unanswered(questions: Dataset) -> bool:
    """Return whether there are questions without an answer, as in SQuAD 2.0."""
    return not all(answers["text"] for answers in questions["answers"])


def write_answers(trainer: "SquadTrainer", file: str) -> None:
    """Write the answers to the validation questions to `file` in the output folder, if --do_predict asks for them."""
    if trainer.args.do_predict:
        answers = trainer.answers()
        if trainer.args.should_save:
            Path(trainer.args.output_dir, file).write_text(json.dumps(answers, indent=2) + "\n")


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
        golds = dict(
            zip(self.questions["id"], (answers["text"] for answers in self.questions["answers"]), strict=True)
        )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in squad_scores(self.answers(), golds).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


if __name__ == "__main__":
    end_with_one_line(main)
