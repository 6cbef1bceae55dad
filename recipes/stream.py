"""Learn tasks one after the other on one encoder, and show that none is forgotten (Houlsby et al. 2019, section 1).

    accelerate launch recipes/stream.py --data reviews.csv news_folder mails.jsonl --model_name minilm

Each classification task gets its own adapter and its own head, of any width. After each task, all earlier ones are
evaluated again: their outputs must be bit-identical to those right after their training. At the end it prints the
scores, and the size of the model with all adapters beside that of a fine-tuned model per task. Data and labels are as
for text_classification.py; the last epoch's weights are kept, and an interrupted run starts over. With --push_to_hub
--hub_model_id user/name, each task's adapter is pushed to its own repository, user/name-task. --evaluate runs/stream
scores the adapters of a finished stream on the same tasks or on other data of these names.
"""

import copy
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.hf_argparser import HfArg

import houlsby_peft
from common.arguments import OFF, ClassifierArguments, MethodArguments, RecipeParser, RecipeTrainingArguments
from common.classification import ClassificationArguments, ClassificationTask, load_task, run
from common.data import files_of
from common.edge import RecipeError, end_with_one_line
from common.model import add_adapter, hub_name, record_preprocessing
from common.run import CONTENT, RESULTS_FILE, describe_content, lock, write_json
from common.task import card_example, describe_run, share, write_adapter_card
from common.trainer import RecipeTrainer


STREAM_FILE = "stream.json"
NO_SHARDING = (
    "Each task has its own Trainer for the same model, which neither DeepSpeed nor FSDP supports: launch with "
    "recipes/launch/accelerate/ddp.yaml."
)


@dataclass(kw_only=True)
class StreamArguments(ClassificationArguments):
    """The tasks, in their order, and how to read them."""

    data: list[str] = HfArg(help="The data sets: folders, files or names on the Hub.")  # noqa: RUF009


@dataclass
class Learned:
    """A learned task: its trainer, and the outputs on its validation split right after training."""

    task: ClassificationTask
    trainer: RecipeTrainer
    outputs: NDArray[np.float32]


def main() -> None:
    """Read the command line, learn the tasks, and write stream.json beside a folder for each task."""
    arguments, adapter, training = parse_arguments()
    if arguments.evaluate is not None or not training.do_train:
        return evaluate(arguments, adapter, training)
    tasks = named_tasks(arguments, training)
    set_seed(training.seed)

    runs = {name: of_task(training, name) for name in tasks}
    for name, own in runs.items():  # a score that one of the tasks lacks is refused before results are deleted
        own.choose_by(tasks[name].scores)
    take_folder(training, [own.output_dir for own in runs.values()])
    examples = {name: card_example(own, len(tasks[name].text_columns)) for name, own in runs.items()}
    pushes = {name: houlsby_peft.plan_push(own, hub_name(arguments.model_name)) for name, own in runs.items()}
    model: PeftModel | None = None
    learned: dict[str, Learned] = {}
    rows = []
    for source, (name, task) in zip(arguments.data, tasks.items(), strict=True):
        model, tokenizer = add_task(model, name, task, arguments.model_name, adapter)
        record_preprocessing(model, arguments.max_length, text_columns=task.text_columns)
        own = runs[name]
        trainer = task.make_trainer(model, tokenizer, arguments.max_length, own)
        trainer.train()
        trainer.restore_unit()
        learned[name] = Learned(
            task, trainer, trainer.predict(task.data["validation"], metric_key_prefix="again").predictions
        )
        rows.append({"task": name, "trained": trainer.trainable, "total": trainer.total, **run_again(model, learned)})
        if training.should_save:
            model.save_pretrained(training.output_dir, selected_adapters=[name])
        trainer.saved_as = "."
        one = of_source(arguments, source)
        dataset, content = task.describe_data(one), describe_content(files_of(one), {})
        described = {"model": arguments.model_name, "dataset": dataset, "labels": task.labels, CONTENT: content}
        if training.should_save:
            results = describe_run(trainer, (arguments, adapter, own)) | described | rows[-1]
            write_json(Path(own.output_dir, RESULTS_FILE), results)
            write_adapter_card(Path(own.output_dir), examples[name])
    for name, push in pushes.items():
        share(push, runs[name], arguments.model_name, examples[name], adapter=".")
    if training.should_save:
        print(explain(rows))
        write_json(Path(training.output_dir, STREAM_FILE), rows)
    forgotten = [row["task"] for row in rows if not all(row["unchanged"].values())]
    if forgotten:
        raise RecipeError(f"Earlier tasks' outputs have changed with {', '.join(forgotten)}, which must never happen.")


def parse_arguments() -> tuple[StreamArguments, ClassifierArguments, RecipeTrainingArguments]:
    """Parse the command line; checkpoints, which would hold all adapters of the model, are off."""
    if "true" in (os.environ.get("ACCELERATE_USE_DEEPSPEED"), os.environ.get("ACCELERATE_USE_FSDP")):
        raise RecipeError(NO_SHARDING)  # before the processes meet
    groups = (StreamArguments, ClassifierArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage="accelerate launch recipes/stream.py --data DATA DATA ... [flags]")
    own = {"load_best_model_at_end": False, "save_strategy": "no", "output_dir": "runs/stream"}
    arguments, adapter, training = parser.parse(more_defaults=lambda _: own)
    if training.deepspeed or training.fsdp:
        raise RecipeError(NO_SHARDING)
    if training.do_train and not training.do_eval:
        raise RecipeError("Each task is evaluated after the next one: also give --do_eval, or leave out --do_train.")
    if training.resume_from_checkpoint is not None:
        raise RecipeError("There are no checkpoints to resume from: leave out --resume_from_checkpoint.")
    if training.save_strategy != "no" or training.load_best_model_at_end:
        raise RecipeError("The last epoch is kept: leave out --save_strategy and --load_best_model_at_end.")
    return arguments, adapter, training


def evaluate(arguments: StreamArguments, adapter: ClassifierArguments, training: RecipeTrainingArguments) -> None:
    """Score the adapter of each task in the folder of a finished stream."""
    folder = arguments.evaluate or training.output_dir
    for source in arguments.data:
        one = of_source(arguments, source)
        saved = f"{folder}/{adapter_name(one)}"
        method = MethodArguments(base_dtype="float32", keep_prefix=OFF)
        run(replace(one, evaluate=saved), method, adapter, of_task(training, adapter_name(one)))


def of_source(arguments: StreamArguments, source: str) -> ClassificationArguments:
    """Return the arguments of the task that is learned from one of the data sets."""
    return ClassificationArguments(**{**vars(arguments), "data": source})


def adapter_name(arguments: ClassificationArguments) -> str:
    """Return the name of a task's adapter. It is part of module names, which a dot would split."""
    return re.sub(r"\W", "_", arguments.name)


def take_folder(training: RecipeTrainingArguments, of_tasks: Iterable[str]) -> None:
    """Reserve the folder for this process; with --overwrite_output_dir, delete the results in it and in its tasks'."""
    if training.process_index:
        return
    lock(Path(training.output_dir))
    files = [Path(training.output_dir, STREAM_FILE), *(Path(folder, RESULTS_FILE) for folder in of_tasks)]
    held = [path for path in files if path.exists()]
    if held and not training.overwrite_output_dir:
        raise RecipeError(
            f"There are already results in {held[0]}, and a stream cannot resume. Give another --output_dir, or "
            "--overwrite_output_dir to start over."
        )
    for path in held:
        path.unlink()


def of_task(training: RecipeTrainingArguments, name: str) -> RecipeTrainingArguments:
    """Return a task's own arguments, with its folder and its name on the Hub."""
    own = copy.copy(training)
    own.output_dir = f"{training.output_dir}/{name}"
    own.hub_model_id = f"{training.hub_model_id}-{name}" if training.hub_model_id else None
    return own


def named_tasks(arguments: StreamArguments, training: RecipeTrainingArguments) -> dict[str, ClassificationTask]:
    """Load all tasks before the first is trained, by the names of their adapters, which must be distinct."""
    tasks: dict[str, ClassificationTask] = {}
    for source in arguments.data:
        task = load_task(of_source(arguments, source), training)
        name = adapter_name(of_source(arguments, source))
        if name in tasks:
            raise RecipeError(f"Each task needs its own name, but two of --data are called {name}. Rename one.")
        tasks[name] = task
    return tasks


def add_task(
    model: PeftModel | None, name: str, task: ClassificationTask, model_name: str, adapter: ClassifierArguments
) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """Add an adapter with a new head for the task; make the model for the first task."""
    fresh, tokenizer = task.load_model(model_name, "float32")
    config = adapter.config(task_type="SEQ_CLS", **task.head)
    model = add_adapter(fresh if model is None else model, config, adapter.init_adapter, name)
    select(model, name, task)
    return model, tokenizer


def select(model: PeftModel, name: str, task: ClassificationTask) -> None:
    """Activate a task's adapter and head, and compute the loss with its labels."""
    model.set_adapter(name)
    base = model.get_base_model()
    base.config.id2label, base.config.problem_type = task.head["id2label"], task.problem_type
    base.num_labels = len(task.labels)


def run_again(model: PeftModel, learned: dict[str, Learned]) -> dict[str, dict[str, Any]]:
    """Return the validation scores of all tasks, and whether their outputs are bit-identical to the first ones."""
    scores, unchanged = {}, {}
    for name, one in learned.items():
        select(model, name, one.task)
        prediction = one.trainer.predict(one.task.data["validation"], metric_key_prefix="again")
        scores[name] = one.task.score(prediction)
        unchanged[name] = prediction.predictions.tobytes() == one.outputs.tobytes()
    return {"scores": scores, "unchanged": unchanged}


def explain(rows: list[dict[str, Any]]) -> str:
    """Return the main score of every task after each task, and the sizes."""
    names = [row["task"] for row in rows]
    width = max(map(len, names))
    lines = [" " * (width + 8) + "  ".join(names)]
    for row in rows:
        scores = [f"{next(iter(score.values())):.4f}".ljust(len(name)) for name, score in row["scores"].items()]
        lines.append(f"after {row['task']:<{width}}  " + "  ".join(scores))
    trained, total = sum(row["trained"] for row in rows), rows[-1]["total"]
    encoder = total - trained
    same = all(all(row["unchanged"].values()) for row in rows)
    return "\n".join(
        [
            *lines,
            f"outputs of earlier tasks: {'bit-identical' if same else 'CHANGED'}",
            f"parameters of the model with {len(rows)} tasks: {total:,}, {total / encoder:.3f} times the encoder's "
            f"{encoder:,}; {trained / len(rows) / encoder:.2%} per task, where fine-tuning takes 100%",
        ]
    )


if __name__ == "__main__":
    end_with_one_line(main, "A stream cannot resume: the same command with --overwrite_output_dir starts over.")
