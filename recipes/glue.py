"""Trains a Houlsby adapter, or what it is compared with, on a task of GLUE, or on all nine.

    accelerate launch recipes/glue.py                        # no data, no network: generated minimal pairs, MiniLM
    accelerate launch recipes/glue.py --task mrpc            # BERT-base and MRPC from the Hub
    accelerate launch recipes/glue.py --task cola --data_dir glue --share_layers 3 --learning_rate 1e-3
    accelerate launch recipes/glue.py --task all --preset houlsby2019 --predict    # the paper's, and a submission
    accelerate launch recipes/glue.py --task rte --method full                     # fine-tuning
    accelerate launch recipes/glue.py --task rte --evaluate runs/rte/adapter       # nothing is trained

With --data_dir, glue/cola/train.parquet and glue/cola/validation.parquet are read (mnli: validation_matched and
validation_mismatched), and for --predict test.parquet (mnli: test_matched, test_mismatched, and ax/test.parquet);
.csv, .tsv (no quoting) and .jsonl do as well, with the columns of the Hub's nyu-mll/glue. The same command again goes
on where a run was interrupted, and trains nothing that is finished. {task} in --output_dir, --evaluate,
--init_adapter and --hub_model_id stands for the task's name.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import demo
import glue_reports
from common.arguments import BERT, ClassifierArguments, RecipeTrainingArguments
from common.data import describe_data, tokenize
from common.ending import end_with_one_line
from common.errors import RecipeError
from common.methods import MethodArguments, apply_method
from common.model import describe_head, load_classifier
from common.prefix import keep_prefix
from common.push import plan_push
from common.results import without_times
from common.runs import Run
from common.saved import load_saved
from common.scores import check_finite
from common.split import draw
from common.trainer import RecipeTrainer
from datasets import Dataset
from glue_arguments import GlueArguments, parse_arguments
from glue_metric import GlueMetric
from glue_tasks import HUB_DATASET, MINIMAL_PAIRS, Task, find_tasks, load_splits, load_test_sets
from transformers import DataCollatorWithPadding, EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, set_seed


def main() -> None:
    """Reads the command line and runs the task, or one after the other."""
    arguments, method, adapter, training = parse_arguments()
    tasks = find_tasks(arguments.task)
    method.check(training.push_to_hub)
    adapter.config()  # checks the options before anything is loaded
    if len(tasks) > 1 and "{task}" not in training.output_dir:
        training.output_dir += "/{task}"
    if len(tasks) > 1 and "{task}" not in (training.hub_model_id or "{task}"):
        raise RecipeError(f"--hub_model_id must have {{task}} in it, for each task's own: {training.hub_model_id}.")
    folder = training.output_dir
    scores = {}
    for task in tasks:
        own = copy.copy(training)
        own.output_dir = folder.replace("{task}", task.name)
        own.hub_model_id = training.hub_model_id and training.hub_model_id.replace("{task}", task.name)
        own.choose_by(task.main_score)
        if arguments.evaluate is not None:
            scores[task.name] = evaluate(task, arguments.evaluate, arguments, method, own)
        else:
            scores[task.name] = train(task, arguments, method, adapter, own)["best_scores"]
    if len(tasks) > 1 and training.process_index == 0:
        glue_reports.write_all(folder, scores, arguments.predict)


def train(
    task: Task,
    arguments: GlueArguments,
    method: MethodArguments,
    adapter: ClassifierArguments,
    training: RecipeTrainingArguments,
) -> dict[str, Any]:
    """One run: trains, keeps the best epoch, saves what was trained and results.json, and returns what is in it."""
    push = plan_push(training, arguments.model_name)
    if adapter.init_adapter is not None:
        adapter = replace(adapter, init_adapter=adapter.init_adapter.replace("{task}", task.name))
    run = Run(training, arguments, method, adapter)
    if run.results is not None:
        if arguments.predict:
            saved = "adapter" if method.method in ("houlsby", "lora") else "model"
            evaluate(task, f"{training.output_dir}/{saved}", arguments, method, training)
        push(training.output_dir)
        return run.results

    set_seed(training.seed)  # before the head and the adapter draw their first weights
    with training.main_process_first():
        splits = load_splits(task, arguments.data_dir)
    splits["train"] = draw(splits["train"], arguments.max_train_samples, training.seed)
    model, tokenizer = load_classifier(arguments.model_name, task.labels, dtype=method.base_dtype)
    head = describe_head(task.labels) | {"two_layer_head": method.head == "two_layer"}
    config = adapter.config(task_type="SEQ_CLS", **head)
    model = apply_method(model, method, config, adapter.init_adapter)
    if method.keep_prefix:
        keep_prefix(model, method.keep_prefix, method.keep_prefix_gb, training)
    if training.should_log:
        print(f"{task.name}: {len(splits['train']):,} training examples; encoder {arguments.model_name}")
    splits = tokenized(splits, task, tokenizer, arguments)
    trainer = make_trainer(task, model, tokenizer, splits, training)
    trainer.train(run.checkpoint)

    trainer.save_trained()  # the best epoch's: load_best_model_at_end has put it back
    if arguments.predict:
        predict(task, trainer, arguments)
    is_demo = task.name == MINIMAL_PAIRS
    test_scores = demo.compare_with_probe(trainer, splits) if is_demo and method.method == "houlsby" else None
    if test_scores and trainer.is_world_process_zero():
        print(demo.explain(test_scores, splits, trainer.trainable))
    source = None if arguments.data_dir or is_demo else HUB_DATASET
    results = run.finish(
        trainer,
        method=method.method,
        task=task.name,
        model=arguments.model_name,
        dataset={"language": "en"} | describe_data(task.title, source, task.name, splits, task.validation_splits[0]),
        references=glue_reports.references(task.name),
        test=test_scores,
    )
    push(training.output_dir)
    return results


def evaluate(
    task: Task, saved: str, arguments: GlueArguments, method: MethodArguments, training: RecipeTrainingArguments
) -> dict[str, float]:
    """Scores a saved adapter or model on the validation split, and predicts if asked; returns the scores."""
    saved = saved.replace("{task}", task.name)
    base = None if arguments.model_name == BERT else arguments.model_name  # an adapter names its own
    model, tokenizer = load_saved(saved, task.labels, base, method.base_dtype)
    splits = tokenized(load_splits(task, arguments.data_dir, evaluated_only=True), task, tokenizer, arguments)
    trainer = make_trainer(task, model, tokenizer, splits, training)
    scores = without_times(trainer.evaluate())
    if trainer.is_world_process_zero():
        glue_reports.write_evaluation(training.output_dir, task.name, saved, scores)
    if arguments.predict:
        predict(task, trainer, arguments)
    return scores


def tokenized(
    splits: dict[str, Dataset], task: Task, tokenizer: PreTrainedTokenizerBase, arguments: GlueArguments
) -> dict[str, Dataset]:
    """The splits with the tokens of their texts."""
    return {
        name: tokenize(split, tokenizer, task.text_columns, arguments.max_length) for name, split in splits.items()
    }


def make_trainer(
    task: Task,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    splits: dict[str, Dataset],
    training: RecipeTrainingArguments,
) -> RecipeTrainer:
    """The trainer, with all of the task's validation splits."""
    validation = {name.removeprefix("validation_"): splits[name] for name in task.validation_splits}
    return RecipeTrainer(
        model=model,
        args=training,
        train_dataset=splits.get("train"),
        eval_dataset=validation if len(validation) > 1 else validation["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=scorer(task),
    )


def scorer(task: Task) -> Callable[[EvalPrediction], dict[str, float]]:
    """The task's metric as the Trainer calls it: from logits or, in a regression, from the scores themselves."""
    metric = GlueMetric(task.name, keep_in_memory=True)

    def score(evaluation: EvalPrediction) -> dict[str, float]:
        outputs = evaluation.predictions
        check_finite(outputs)
        predictions = outputs.argmax(-1) if len(task.labels) > 1 else outputs.squeeze(-1)
        return metric.compute(predictions=predictions, references=evaluation.label_ids)

    return score


def predict(task: Task, trainer: RecipeTrainer, arguments: GlueArguments) -> None:
    """Writes the predictions of all test sets of the task into the folder "submission" of the run."""
    sets = tokenized(load_test_sets(task, arguments.data_dir), task, trainer.processing_class, arguments)
    outputs = {name: trainer.predict(data).predictions for name, data in sets.items()}
    if trainer.is_world_process_zero():
        glue_reports.write_predictions(trainer.args.output_dir, outputs)


if __name__ == "__main__":
    end_with_one_line(main)
