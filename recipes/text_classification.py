"""Trains a Houlsby adapter to classify texts, or pairs of texts, of your own or of any data set on the Hub.

    accelerate launch recipes/text_classification.py --data reviews.csv
    accelerate launch recipes/text_classification.py --data fancyzhx/ag_news --r 16 --learning_rate 1e-3
    accelerate launch recipes/text_classification.py --data folder --text_columns title body --label_columns topic
    accelerate launch recipes/text_classification.py --data folder --sweep_r 2 4 8 16 32 64 \
        --sweep_learning_rate 1e-5 3e-5 1e-4 3e-3            # the grid of Houlsby et al. 2019

Labels may be texts or numbers, one per row or several (a list, or one 0/1 column per class), or scores. Without a
validation split a tenth of the training examples is taken, always the same; one of each label stays in training. A
test split, if there is one, is scored with the best epoch's weights, never to choose anything. Training examples
without text are left out, texts are cut to --max_length, and a label that the training examples lack is an error.
"""

import copy
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.arguments import ClassifierArguments, RecipeParser, RecipeTrainingArguments
from common.classification import ClassificationArguments, Task, load_task, trainer_arguments
from common.data import describe_data
from common.ending import end_with_one_line
from common.errors import RecipeError
from common.model import add_adapter, load_classifier
from common.push import plan_push
from common.runs import Run
from common.scores import MAIN_SCORE
from common.trainer import RecipeTrainer
from sweep_runs import choose
from transformers import set_seed
from transformers.hf_argparser import HfArg


@dataclass
class SweepArguments:
    """A run for each combination of what is listed; validation chooses among them."""

    _argument_group_name = "sweep"

    sweep_r: list[int] | None = HfArg(default=None, help="Widths of the bottleneck.")  # noqa: RUF009
    sweep_learning_rate: list[float] | None = HfArg(default=None, help="Learning rates.")  # noqa: RUF009


def main() -> None:
    """Reads the command line and runs."""
    groups = (ClassificationArguments, SweepArguments, ClassifierArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage="accelerate launch recipes/text_classification.py --data DATA [flags]")
    run(*parser.parse())


def run(
    arguments: ClassificationArguments,
    sweep: SweepArguments,
    adapter: ClassifierArguments,
    training: RecipeTrainingArguments,
) -> dict[str, Any]:
    """Trains for each point of the sweep, keeps the best epoch of each, and returns the results of the best point."""
    adapter.config()  # checks the options before anything is loaded
    task = load_task(arguments, training)
    training.output_dir = training.output_dir.replace("{task}", task.name)
    training.choose_by(MAIN_SCORE[task.labels.problem_type])
    push = plan_push(training, arguments.model_name)
    options = list(sweep_points(sweep, adapter, training))
    if len(options) > 1 and training.eval_strategy == "no":
        raise RecipeError("--sweep_r and --sweep_learning_rate choose on validation: leave out --eval_strategy no.")
    points = [train(task, arguments, *point) for point in options]
    best = best_of(points, training) if len(points) > 1 else points[0]
    push(best["arguments"]["output_dir"])
    return best


def best_of(points: Sequence[dict[str, Any]], training: RecipeTrainingArguments) -> dict[str, Any]:
    """The results that are best on validation; all are printed, and written to sweep.json."""
    scores = {number: [point["best_score"]] for number, point in enumerate(points)}
    best = points[choose(scores, lower_is_better=not training.greater_is_better)]
    if training.should_log:
        rows = [{name: point[name] for name in ("r", "learning_rate", "best_score", "test")} for point in points]
        for row in rows:
            print(f"r {row['r']:>4}  learning rate {row['learning_rate']:g}  {best['chosen_by']} {row['best_score']}")
        print(f"chosen on validation: r {best['r']}, learning rate {best['learning_rate']:g}; test: {best['test']}")
        Path(training.output_dir, "sweep.json").write_text(json.dumps(rows, indent=2) + "\n")
    return best


def sweep_points(
    sweep: SweepArguments, adapter: ClassifierArguments, training: RecipeTrainingArguments
) -> Iterator[tuple[ClassifierArguments, RecipeTrainingArguments]]:
    """The options of each run, with an output folder of its own if there are several."""
    sizes, rates = sweep.sweep_r or [adapter.r], sweep.sweep_learning_rate or [training.learning_rate]
    for r, rate in itertools.product(sizes, rates):
        point = copy.copy(training)
        point.learning_rate = rate
        if len(sizes) * len(rates) > 1:
            point.output_dir = f"{training.output_dir}/r{r}-lr{rate:g}"
        yield replace(adapter, r=r), point


def train(
    task: Task, arguments: ClassificationArguments, adapter: ClassifierArguments, training: RecipeTrainingArguments
) -> dict[str, Any]:
    """One run: trains, keeps the best epoch, saves the adapter and results.json, and scores the test split; a run that
    is finished already is left as it is."""
    run = Run(training, arguments, adapter)
    if run.results is not None:
        return run.results
    set_seed(training.seed)  # before the head and the adapter draw their first weights
    model, tokenizer = load_classifier(arguments.model_name, task.labels.names, task.labels.problem_type)
    model = add_adapter(model, adapter.config(task_type="SEQ_CLS", **task.head), adapter.init_adapter)
    task = task.tokenized(tokenizer, arguments.max_length)
    trainer = RecipeTrainer(model=model, args=training, **trainer_arguments(task, tokenizer))
    trainer.train(run.checkpoint)
    trainer.save_trained()  # the best epoch's: load_best_model_at_end has put it back
    test = task.score(trainer.predict(task.splits["test"])) if "test" in task.splits else None
    return run.finish(
        trainer,
        task=task.name,
        model=arguments.model_name,
        dataset=describe_data(task.name, arguments.data, arguments.data_config, task.splits),
        labels=task.labels.names,
        r=adapter.r,
        learning_rate=training.learning_rate,
        test=test,
    )


if __name__ == "__main__":
    end_with_one_line(main)
