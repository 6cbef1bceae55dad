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
from typing import Any

from transformers import set_seed

from common import demo, glue_report
from common.arguments import ClassifierArguments, MethodArguments, RecipeTrainingArguments
from common.data import describe_data, sample
from common.edge import RecipeError, end_with_one_line, log
from common.glue_arguments import GlueArguments, parse_arguments
from common.glue_report import proper_name
from common.glue_tasks import HUB_DATASET, MINIMAL_PAIRS, GlueTask, find_tasks
from common.model import adapt, load_saved, settle
from common.run import EVALUATED, Run, find_evaluated, plan_push, write_evaluation
from common.scores import without_times
from common.trainer import RecipeTrainer


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
        raise RecipeError("--hub_model_id must contain {task}, as each task needs its own repository.")
    folder, scores, prefix = training.output_dir, {}, ""
    for task in tasks:
        own, of_task, of_adapter = (for_task(group, task.name) for group in (training, arguments, adapter))
        own.choose_by(task.scores)
        saved = find_evaluated(of_task, of_adapter, own)
        if saved is not None:
            prefix = EVALUATED
            scores[task.name] = evaluate(task, saved, of_task, method, own, prefix)
        else:
            scores[task.name] = train(task, of_task, method, of_adapter, own)["best_scores"]
    if len(tasks) > 1 and training.process_index == 0:
        glue_report.write_all(folder, scores, arguments.predict, prefix)


def for_task(group: Any, name: str) -> Any:
    """Return a copy of a group of arguments with the task's name in place of {task}."""
    own = copy.copy(group)
    for argument in ("output_dir", "model_name", "evaluate", "init_adapter", "hub_model_id"):
        if isinstance(value := getattr(own, argument, None), str):
            setattr(own, argument, value.replace("{task}", name))
    return own


def train(
    task: GlueTask,
    arguments: GlueArguments,
    method: MethodArguments,
    adapter: ClassifierArguments,
    training: RecipeTrainingArguments,
) -> dict[str, Any]:
    """Train, keep the best epoch, save the trained weights and results.json, and return the content of the latter."""
    push = plan_push(training, arguments.model_name, len(task.text_columns))
    method = settle(method, adapter, training, arguments.model_name)
    run = Run(training, arguments, method, adapter, files=task.files(arguments.data_dir))
    if run.results is not None:
        if arguments.predict:
            evaluate(task, run.saved, arguments, method, training)
        push(training.output_dir)
        return run.results

    set_seed(training.seed)  # before the first weights of head and adapter are drawn
    with training.main_process_first():
        task = task.load(arguments.data_dir)
    task.splits["train"] = sample(task.splits["train"], arguments.max_train_samples)
    log(f"{task.name}: {len(task.splits['train']):,} training examples; encoder {arguments.model_name}")

    # get_peft_model(model, HoulsbyConfig(...)), or what another --method trains
    model, tokenizer = task.load_model(arguments.model_name, method.base_dtype)
    model = adapt(model, method, adapter, training, arguments.max_length, **task.recorded)
    data = {name: task.encode(split, name, tokenizer, arguments.max_length) for name, split in task.splits.items()}
    trainer = RecipeTrainer(
        model=model,
        args=training,
        train_dataset=data["train"],
        eval_dataset=task.validation(data),
        processing_class=tokenizer,
        data_collator=task.collator(tokenizer),
        compute_metrics=task.score,
        describe=task.describe,
    )
    trainer.train(run.checkpoint)
    trainer.save_trained()  # the best epoch's weights: load_best_model_at_end has restored them

    if arguments.predict:
        predict(task, trainer, arguments)
    is_demo = task.name == MINIMAL_PAIRS
    test = demo.compare_with_probe(trainer, data) if is_demo and method.method == "houlsby" else None
    if test:
        log(demo.explain(test, data, trainer.trainable))
    title = "generated minimal pairs" if is_demo else f"GLUE {proper_name(task.name)}"
    source = None if arguments.data_dir or is_demo else HUB_DATASET
    results = run.finish(
        trainer,
        example=task.example,
        method=method.method,
        task=task.name,
        model=arguments.model_name,
        dataset={"language": "en"} | describe_data(title, source, task.name, task.splits, task.validation_splits[0]),
        labels=task.labels,
        references=glue_report.references(task.name),
        test=test,
    )
    push(training.output_dir)
    return results


def evaluate(
    task: GlueTask,
    name: str,
    arguments: GlueArguments,
    method: MethodArguments,
    training: RecipeTrainingArguments,
    prefix: str = "",
) -> dict[str, float]:
    """Score a saved adapter or model on the validation split, and predict if asked to; return the scores."""
    # An adapter names its base model, and how long its texts were, unless the command line does.
    saved = load_saved(name, task.labels, arguments.model_name, method.base_dtype)
    task = task.load(arguments.data_dir, trains=False)
    arguments = replace(arguments, max_length=saved.check_length(arguments.max_length))
    trainer = task.make_trainer(saved.model, saved.tokenizer, arguments.max_length, training)
    scores = without_times(trainer.evaluate())
    write_evaluation(training, task.name, name, scores)
    if arguments.predict:
        predict(task, trainer, arguments, prefix)
    return scores


def predict(task: GlueTask, trainer: RecipeTrainer, arguments: GlueArguments, prefix: str = "") -> None:
    """Write the predictions of the task's test sets into the folder "submission", whose name begins with `prefix`."""
    outputs = task.predict(trainer, arguments.data_dir, arguments.max_length)
    if trainer.is_world_process_zero():
        glue_report.write_predictions(trainer.args.output_dir, outputs, prefix)


if __name__ == "__main__":
    end_with_one_line(main)
