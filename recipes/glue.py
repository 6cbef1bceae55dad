"""Trains a Houlsby adapter on a task of GLUE.

    accelerate launch recipes/glue.py                        # no data, no network: generated minimal pairs, MiniLM
    accelerate launch recipes/glue.py --task mrpc            # BERT-base and MRPC from the Hub
    accelerate launch recipes/glue.py --task cola --data_dir glue --share_layers 3 --learning_rate 1e-3

With --data_dir, glue/cola/train.parquet and glue/cola/validation.parquet are read (mnli: validation_matched and
validation_mismatched); .csv, .tsv (no quoting) and .jsonl do as well, with the columns of the Hub's nyu-mll/glue.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import demo
from common.arguments import AdapterArguments, EncoderArguments, RecipeParser, RecipeTrainingArguments
from common.data import tokenize
from common.errors import RecipeError
from common.methods import MethodArguments, apply_method
from common.model import describe_head, load_classifier
from common.results import write_results
from common.scores import check_finite
from common.trainer import RecipeTrainer
from glue_metric import GlueMetric
from glue_tasks import MINIMAL_PAIRS, Task, find_task, load_splits
from transformers import DataCollatorWithPadding, EvalPrediction, set_seed
from transformers.hf_argparser import HfArg


@dataclass
class GlueArguments(EncoderArguments):
    """What to train on, and which encoder."""

    _argument_group_name = "task"

    task: str = HfArg(
        default=MINIMAL_PAIRS,
        help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, or the generated pairs.",
    )
    data_dir: str | None = HfArg(default=None, help="Folder with a folder of files per task; default: the Hub.")


def main() -> None:
    """Reads the command line, trains, keeps the best epoch, saves the adapter and results.json."""
    arguments, method, adapter, training = parse_arguments()
    method.check()
    task = find_task(arguments.task)
    config = adapter.config(task_type="SEQ_CLS", **describe_head(task.labels))
    training.output_dir = training.output_dir.replace("{task}", task.name)
    training.choose_by(task.main_score)

    set_seed(training.seed)  # before the head and the adapter draw their first weights
    with training.main_process_first():
        splits = load_splits(task, arguments.data_dir)
    model, tokenizer = load_classifier(arguments.model_name, task.labels)
    splits = {
        name: tokenize(split, tokenizer, task.text_columns, arguments.max_length) for name, split in splits.items()
    }
    model = apply_method(model, method, config, adapter.init_adapter)
    if training.should_log:
        print(f"{task.name}: {len(splits['train']):,} training examples; encoder {arguments.model_name}")

    validation = {name.removeprefix("validation_"): splits[name] for name in task.validation_splits}
    trainer = RecipeTrainer(
        model=model,
        args=training,
        train_dataset=splits["train"],
        eval_dataset=validation if len(validation) > 1 else validation["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=scorer(task),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)

    trainer.save_trained()  # the best epoch's: load_best_model_at_end has put it back
    is_demo = task.name == MINIMAL_PAIRS and method.method == "houlsby"
    test_scores = demo.compare_with_probe(trainer, splits) if is_demo else None
    if test_scores and trainer.is_world_process_zero():
        print(demo.explain(test_scores, splits, trainer.trainable))
    write_results(
        trainer,
        (arguments, method, adapter, training),
        method=method.method,
        task=task.name,
        model=arguments.model_name,
        test=test_scores,
    )


def parse_arguments() -> tuple[GlueArguments, MethodArguments, AdapterArguments, RecipeTrainingArguments]:
    """Reads the command line; a run without data has defaults of its own, which flags overrule like any other."""
    groups = (GlueArguments, MethodArguments, AdapterArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage="accelerate launch recipes/glue.py [flags]")
    parsed = parser.parse()
    if parsed[0].task == MINIMAL_PAIRS:
        parser.set_defaults(**demo.DEFAULTS)
        parsed = parser.parse()
    return parsed


def scorer(task: Task) -> Callable[[EvalPrediction], dict[str, float]]:
    """The task's metric as the Trainer calls it: from logits or, in a regression, from the scores themselves."""
    metric = GlueMetric(task.name, keep_in_memory=True)

    def score(evaluation: EvalPrediction) -> dict[str, float]:
        outputs = evaluation.predictions
        check_finite(outputs)
        predictions = outputs.argmax(-1) if len(task.labels) > 1 else outputs.squeeze(-1)
        return metric.compute(predictions=predictions, references=evaluation.label_ids)

    return score


if __name__ == "__main__":
    try:
        main()
    except RecipeError as error:
        sys.exit(f"error: {error}")
