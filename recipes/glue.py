"""Train a Houlsby adapter, or a method it is compared with, on a task of GLUE or on all nine.

    python recipes/glue.py                                   # no data, no network: generated minimal pairs, MiniLM
    accelerate launch recipes/glue.py --task mrpc            # BERT-base and MRPC from the Hub
    accelerate launch recipes/glue.py --task cola --data_dir glue --share_layers 3 --learning_rate 1e-3
    accelerate launch recipes/glue.py --task all --preset houlsby2019 --predict    # the paper's, and a submission
    accelerate launch recipes/glue.py --task rte --method full                     # fine-tuning
    accelerate launch recipes/glue.py --task rte --evaluate runs/rte/adapter       # nothing is trained

With --data_dir, glue/cola/train.parquet and glue/cola/validation.parquet are read (mnli: validation_matched and
validation_mismatched), and for --predict test.parquet (mnli: test_matched, test_mismatched, and ax/test.parquet);
.csv, .tsv (no quoting) and .jsonl also work, with the columns of the Hub's nyu-mll/glue. The same command again
resumes an interrupted run and does not repeat a finished one. {task} in --output_dir, --model_name, --evaluate,
--init_adapter and --hub_model_id stands for the task's name.
"""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from study import reports as glue_reports
from study.papers import proper_name
from study.presets import GlueArguments, parse_arguments
from tasks import demo
from tasks.glue import HUB_DATASET, MINIMAL_PAIRS, GlueTask, find_files, find_tasks, load_splits, load_test_sets
from training.arguments import ClassifierArguments, RecipeTrainingArguments
from training.data import describe_data, sample, tokenize
from training.errors import RecipeError, end_with_one_line
from training.evaluation import EVALUATED, find_evaluated, write_evaluation
from training.methods import MethodArguments, prepare_model
from training.model import describe_head, load_classifier, load_saved, recorded_length
from training.runs import Run, card_example, plan_push
from training.scores import score_classes, without_times
from training.trainer import RecipeTrainer


def main() -> None:
    """Read the command line and run the tasks."""
    run_tasks(*parse_arguments())


def run_tasks(
    arguments: GlueArguments, method: MethodArguments, adapter: ClassifierArguments, training: RecipeTrainingArguments
) -> None:
    """Train or evaluate the tasks, one after the other, and print their scores."""
    tasks = find_tasks(arguments.task)
    if len(tasks) > 1 and "{task}" not in training.output_dir:
        training.output_dir += "/{task}"
    if len(tasks) > 1 and "{task}" not in (training.hub_model_id or "{task}"):
        raise RecipeError(
            f"--hub_model_id must contain {{task}}, as each task needs its own, got {training.hub_model_id}."
        )
    for task in tasks:
        card_example(training, len(task.text_columns))  # finds a missing text before the first training
    folder = training.output_dir
    scores = {}
    for task in tasks:
        own = copy.copy(training)
        own.output_dir = folder.replace("{task}", task.name)
        own.hub_model_id = training.hub_model_id and training.hub_model_id.replace("{task}", task.name)
        own.choose_by(task.scores)
        model_name = arguments.model_name and arguments.model_name.replace("{task}", task.name)
        saved = arguments.evaluate and arguments.evaluate.replace("{task}", task.name)
        of_task = replace(arguments, model_name=model_name, evaluate=saved)
        evaluated = find_evaluated(of_task, adapter, own)
        if evaluated is not None:
            scores[task.name] = evaluate(task, evaluated, of_task, method, own)
        else:
            scores[task.name] = train(task, of_task, replace(method), adapter, own)["best_scores"]
    if len(tasks) > 1 and training.process_index == 0:
        glue_reports.write_all(folder, scores, arguments.predict, "" if evaluated is None else EVALUATED)


def train(
    task: GlueTask,
    arguments: GlueArguments,
    method: MethodArguments,
    adapter: ClassifierArguments,
    training: RecipeTrainingArguments,
) -> dict[str, Any]:
    """Train, keep the best epoch, save the trained weights and results.json, and return the content of the latter."""
    push = plan_push(training, arguments.model_name, len(task.text_columns))
    if adapter.init_adapter is not None:
        adapter = replace(adapter, init_adapter=adapter.init_adapter.replace("{task}", task.name))
    run = Run(training, arguments, method, adapter, files=find_files(task, arguments.data_dir))
    if run.results is not None:
        if arguments.predict:
            saved = "adapter" if method.adds_weights else "model"
            evaluate(task, f"{training.output_dir}/{saved}", arguments, method, training, prefix="")
        push(training.output_dir)
        return run.results

    set_seed(training.seed)  # before the first weights of head and adapter are drawn
    with training.main_process_first():
        splits = load_splits(task, arguments.data_dir)
    splits["train"] = sample(splits["train"], arguments.max_train_samples)
    model, tokenizer = load_classifier(arguments.model_name, task.labels, dtype=method.base_dtype)
    recorded = {"text_columns": task.text_columns, "task_type": "SEQ_CLS", **describe_head(task.labels)}
    model = prepare_model(model, method, adapter, training, arguments.max_length, **recorded)
    if training.should_log:
        print(f"{task.name}: {len(splits['train']):,} training examples; encoder {arguments.model_name}")
    splits = tokenized(splits, task, tokenizer, arguments)
    trainer = make_trainer(task, model, tokenizer, splits, training)
    trainer.train(run.checkpoint)

    trainer.save_trained()  # the best epoch's weights: load_best_model_at_end has restored them
    if arguments.predict:
        predict(task, trainer, arguments)
    is_demo = task.name == MINIMAL_PAIRS
    test_scores = demo.compare_with_probe(trainer, splits) if is_demo and method.method == "houlsby" else None
    if test_scores and trainer.is_world_process_zero():
        print(demo.explain(test_scores, splits, trainer.trainable))
    source = None if arguments.data_dir or is_demo else HUB_DATASET
    title = "generated minimal pairs" if is_demo else f"GLUE {proper_name(task.name)}"
    results = run.finish(
        trainer,
        example=[splits[task.validation_splits[0]][0][column] for column in task.text_columns],
        method=method.method,
        task=task.name,
        model=arguments.model_name,
        dataset={"language": "en"} | describe_data(title, source, task.name, splits, task.validation_splits[0]),
        labels=task.labels,
        references=glue_reports.references(task.name),
        test=test_scores,
    )
    push(training.output_dir)
    return results


def evaluate(
    task: GlueTask,
    saved: str,
    arguments: GlueArguments,
    method: MethodArguments,
    training: RecipeTrainingArguments,
    prefix: str = EVALUATED,
) -> dict[str, float]:
    """Score a saved adapter or model on the validation split, and predict if asked to; return the scores."""
    # An adapter names its base model, and how long its texts were, unless the command line does.
    model, tokenizer = load_saved(saved, task.labels, arguments.model_name, method.base_dtype)
    arguments = replace(arguments, max_length=arguments.max_length or recorded_length(saved, model))
    splits = tokenized(load_splits(task, arguments.data_dir, evaluated_only=True), task, tokenizer, arguments)
    trainer = make_trainer(task, model, tokenizer, splits, training)
    scores = without_times(trainer.evaluate())
    write_evaluation(training, task.name, saved, scores)
    if arguments.predict:
        predict(task, trainer, arguments, prefix)
    return scores


def tokenized(
    splits: dict[str, Dataset], task: GlueTask, tokenizer: PreTrainedTokenizerBase, arguments: GlueArguments
) -> dict[str, Dataset]:
    """Return the splits with the tokens of their texts."""
    return {
        name: tokenize(split, tokenizer, task.text_columns, arguments.max_length, name)
        for name, split in splits.items()
    }


def make_trainer(
    task: GlueTask,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    splits: dict[str, Dataset],
    training: RecipeTrainingArguments,
) -> RecipeTrainer:
    """Return the trainer, with all of the task's validation splits."""
    validation = {name.removeprefix("validation_"): splits[name] for name in task.validation_splits}
    return RecipeTrainer(
        model=model,
        args=training,
        train_dataset=splits.get("train"),
        eval_dataset=validation if len(validation) > 1 else validation["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=task.scorer(),
        score_classes=partial(score_classes, names=task.labels) if len(task.labels) > 1 else None,
    )


def predict(task: GlueTask, trainer: RecipeTrainer, arguments: GlueArguments, prefix: str = "") -> None:
    """Write the predictions of the task's test sets into the folder "submission", whose name begins with `prefix`."""
    sets = tokenized(load_test_sets(task, arguments.data_dir), task, trainer.processing_class, arguments)
    outputs = {name: trainer.predict(data).predictions for name, data in sets.items()}
    if trainer.is_world_process_zero():
        glue_reports.write_predictions(trainer.args.output_dir, outputs, prefix)


if __name__ == "__main__":
    end_with_one_line(main)
