"""Learns tasks one after the other on one encoder, and shows that none is forgotten (Houlsby et al. 2019, section 1).

    accelerate launch recipes/stream.py --data reviews.csv news_folder mails.jsonl --model_name minilm

Each task of classification gets an adapter and a head of its own, of whatever width. After each, all earlier tasks are
run again: their outputs must be equal to the last bit to what they were when they were new. At the end it prints the
scores, and what the model with all adapters weighs beside a fine-tuned model for each task. Data and labels are as for
text_classification.py; the last epoch's weights are kept, and an interrupted run begins anew. With --push_to_hub
--hub_model_id user/name, each task's adapter goes to a repository of its own, user/name-task.
"""

import copy
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list
from common.arguments import ClassifierArguments, RecipeParser, RecipeTrainingArguments
from common.classification import ClassificationArguments, Task, load_task, trainer_arguments
from common.ending import end_with_one_line
from common.errors import RecipeError
from common.model import add_adapter, load_classifier
from common.push import plan_push
from common.results import RESULTS_FILE, write_results, write_whole
from common.scores import MAIN_SCORE
from common.trainer import RecipeTrainer
from numpy.typing import NDArray
from peft import PeftModel
from torch import nn
from transformers import PreTrainedTokenizerBase, set_seed
from transformers.hf_argparser import HfArg

from houlsby_peft.head import HoulsbyHead


STREAM_FILE = "stream.json"
NO_SHARDING = (
    "Each task has a Trainer of its own for the same whole model, which neither DeepSpeed nor FSDP allows: launch "
    "with recipes/accelerate/ddp.yaml."
)


@dataclass(kw_only=True)
class StreamArguments(ClassificationArguments):
    """The tasks, in their order, and how to read them."""

    data: list[str] = HfArg(help="The data sets: folders, files or names on the Hub.")  # noqa: RUF009


@dataclass
class Learned:
    """A task that has been learned: its trainer, and the model's outputs on its validation split right after."""

    task: Task
    trainer: RecipeTrainer
    outputs: NDArray[np.float32]


def main() -> None:
    """Reads the command line, learns the tasks, and writes stream.json beside a folder for each task."""
    arguments, adapter, training = parse_arguments()
    adapter.config()  # checks the options before anything is loaded
    tasks = named_tasks(arguments, training)
    set_seed(training.seed)

    runs = {name: of_task(training, name) for name in tasks}
    take_folder(training, [own.output_dir for own in runs.values()])
    pushes = {name: plan_push(own, arguments.model_name) for name, own in runs.items()}
    model: PeftModel | None = None
    learned: dict[str, Learned] = {}
    rows = []
    for name, task in tasks.items():
        model, tokenizer = add_task(model, name, task, arguments.model_name, adapter)
        task = task.tokenized(tokenizer, arguments.max_length)
        own = runs[name]
        own.choose_by(MAIN_SCORE[task.labels.problem_type])
        trainer = RecipeTrainer(model=model, args=own, **trainer_arguments(task, tokenizer))
        trainer.train()
        learned[name] = Learned(task, trainer, trainer.predict(task.splits["validation"]).predictions)
        rows.append({"task": name, "trained": trainer.trainable, "total": trainer.total, **run_again(model, learned)})
        if training.should_save:
            model.save_pretrained(training.output_dir, selected_adapters=[name])
        write_results(trainer, (arguments, adapter, own), model=arguments.model_name, **rows[-1])
    for name, push in pushes.items():
        push(runs[name].output_dir, adapter=".")
    if training.should_log:
        print(explain(rows))
        write_whole(Path(training.output_dir, STREAM_FILE), json.dumps(rows, indent=2) + "\n")
    forgotten = [row["task"] for row in rows if not all(row["unchanged"].values())]
    if forgotten:
        raise RecipeError(f"Earlier tasks' outputs have changed with {', '.join(forgotten)}, which must never happen.")


def parse_arguments() -> tuple[StreamArguments, ClassifierArguments, RecipeTrainingArguments]:
    """Reads the command line; checkpoints, which would hold all adapters of the model, are off."""
    if "true" in (os.environ.get("ACCELERATE_USE_DEEPSPEED"), os.environ.get("ACCELERATE_USE_FSDP")):
        raise RecipeError(NO_SHARDING)  # before the processes meet
    groups = (StreamArguments, ClassifierArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage="accelerate launch recipes/stream.py --data DATA DATA ... [flags]")
    parser.set_defaults(load_best_model_at_end=False, save_strategy="no", output_dir="runs/stream")
    arguments, adapter, training = parser.parse()
    if training.deepspeed or training.fsdp:
        raise RecipeError(NO_SHARDING)
    if training.resume_from_checkpoint is not None:
        raise RecipeError("There are no checkpoints to go on from: leave out --resume_from_checkpoint.")
    if training.save_strategy != "no" or training.load_best_model_at_end:
        raise RecipeError(
            "The last epoch's weights are kept here: leave out --save_strategy, --load_best_model_at_end."
        )
    return arguments, adapter, training


def take_folder(training: RecipeTrainingArguments, of_tasks: Iterable[str]) -> None:
    """Raises RecipeError if the folder, or that of a task, holds results, which --overwrite_output_dir deletes."""
    files = [Path(training.output_dir, STREAM_FILE), *(Path(folder, RESULTS_FILE) for folder in of_tasks)]
    # The main process looks and tells the others, as what is there changes from here on.
    found = [[path for path in files if path.exists()] if training.process_index == 0 else None]
    held = broadcast_object_list(found)[0] or []
    if held and not training.overwrite_output_dir:
        raise RecipeError(
            f"There are results already, in {held[0]}, and a stream does not go on from them. Give another "
            "--output_dir, or --overwrite_output_dir to begin anew."
        )
    for path in held if training.process_index == 0 else ():
        path.unlink()


def of_task(training: RecipeTrainingArguments, name: str) -> RecipeTrainingArguments:
    """A task's own arguments: its folder, and its name on the Hub."""
    own = copy.copy(training)
    own.output_dir = f"{training.output_dir}/{name}"
    own.hub_model_id = f"{training.hub_model_id}-{name}" if training.hub_model_id else None
    return own


def named_tasks(arguments: StreamArguments, training: RecipeTrainingArguments) -> dict[str, Task]:
    """Loads all tasks before the first is trained, by the names of their adapters, which no two may share."""
    tasks: dict[str, Task] = {}
    for source in arguments.data:
        task = load_task(ClassificationArguments(**{**vars(arguments), "data": source}), training)
        name = re.sub(r"\W", "_", task.name)  # part of modules' names, which a dot would split
        if name in tasks:
            raise RecipeError(f"Each task needs a name of its own, but two of --data are called {name}. Rename one.")
        if hasattr(nn.ModuleDict(), name):  # such as "train", which PyTorch does not let a module be called
            raise RecipeError(f"No task can be called {name}. Rename the file or folder {source}.")
        tasks[name] = task
    return tasks


def add_task(
    model: PeftModel | None, name: str, task: Task, model_name: str, adapter: ClassifierArguments
) -> tuple[PeftModel, PreTrainedTokenizerBase]:
    """Adds an adapter with a new head for the task, or makes the model if it is the first."""
    fresh, tokenizer = load_classifier(model_name, task.labels.names, task.labels.problem_type)
    config = adapter.config(task_type="SEQ_CLS", **task.head)
    if model is not None:
        # A new head is a copy of the model's own, which may be of another width: of that model only the head is used.
        for key, module in list(model.get_base_model().named_modules()):
            if isinstance(module, HoulsbyHead):
                module.original_module = fresh.get_submodule(key).requires_grad_(False)
    model = add_adapter(fresh if model is None else model, config, adapter.init_adapter, name)
    select(model, name, task)
    return model, tokenizer


def select(model: PeftModel, name: str, task: Task) -> None:
    """Makes one task's adapter and head the active ones, and its labels those that the loss is computed with."""
    model.set_adapter(name)
    base = model.get_base_model()
    base.config.id2label, base.config.problem_type = task.head["id2label"], task.labels.problem_type
    base.num_labels = len(task.labels.names)


def run_again(model: PeftModel, learned: dict[str, Learned]) -> dict[str, dict[str, Any]]:
    """Scores of all tasks on validation, and whether the outputs are bit for bit those of the new task."""
    scores, unchanged = {}, {}
    for name, it in learned.items():
        select(model, name, it.task)
        prediction = it.trainer.predict(it.task.splits["validation"])
        scores[name] = it.task.score(prediction)
        unchanged[name] = prediction.predictions.tobytes() == it.outputs.tobytes()
    return {"scores": scores, "unchanged": unchanged}


def explain(rows: list[dict[str, Any]]) -> str:
    """The first score of every task after each task, and the sizes."""
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
            f"outputs of earlier tasks: {'unchanged to the last bit' if same else 'CHANGED'}",
            f"parameters of the model with {len(rows)} tasks: {total:,}, {total / encoder:.3f} times the encoder's "
            f"{encoder:,}; {trained / len(rows) / encoder:.2%} per task, where fine-tuning takes 100%",
        ]
    )


if __name__ == "__main__":
    end_with_one_line(main)
