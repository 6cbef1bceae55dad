r"""Find out why some runs never leave the majority class: train settings and seeds one after the
other, and record the first steps of each run.

    python recipes/studies/stuck_runs.py cells.txt docs/runs/stuck_runs.csv --task mrpc \
        --model_name mpnet --learning_rate 1e-3 --num_train_epochs 3 --data_dir glue --use_cpu \
        --output_dir runs/stuck

A line of cells.txt names a setting of SETTINGS, a seed and, to stop early, a number of steps:
`reference 1 200`. In place of the seed, `stuck` means every seed at which the reference has been
stuck so far. The other flags are those of glue.py.

Each finished run adds a line to the table, with the scores of its last evaluation, the best main
score (MRPC: F1), whether all its predictions are of one class, and the spread of [CLS] in
validation's last batch. The folder of the table's name, here docs/runs/stuck_runs/, gets one file
per run, with one line for each of the first 200 steps:

- the loss,
- `gradient_KIND`, the norm of the gradient by kind of weight, before clipping,
- `moved_KIND`, the distance of the weights from their start, after the step before,
- `spread_LAYER`, how far [CLS] differs between the texts of a batch: the mean over the features of
  the standard deviation over the batch, after this layer,
- `added_LAYER`, the norm of what the layer's last adapter adds to a token, as a share of what it
  reads: the mean over the tokens.

The same command continues after an interruption. A run that was stopped early continues from there
once the cells ask for more steps. Stop between the ends of epochs: a checkpoint at the end of an
epoch is written before its evaluation, which draws random numbers. Several processes may work on
the same cells.
"""

import argparse
import csv
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from peft import PeftModel
from torch import nn
from torch.nn.utils import get_total_norm
from transformers import (
    EvalPrediction,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

import recipes_path  # noqa: F401
from data.data import sample
from houlsby_peft import HoulsbyLayer
from run.checkpoints import last_checkpoint
from run.edge import RecipeError, end_with_one_line, log
from run.progress import scores_per_epoch
from run.run import lock
from run.schedule import settle_schedule
from run.trainer import RecipeTrainer
from tasks.glue_tasks import TASKS, GlueTask, parse_arguments


RECORDED = 200  # steps
# With a limit of 1, the Trainer may delete the last checkpoint at the end.
CHECKPOINTS = (
    *("--save_strategy", "steps", "--save_steps", "20", "--save_total_limit", "2"),
    *("--load_best_model_at_end", "false"),
)
KINDS = ("down", "up", "norm", "bias", "head")
COLUMNS = (
    *("setting", "seed", "steps", "accuracy", "score", "best_score"),
    *("loss", "stuck", "cls_spread", "seconds"),
)


@dataclass(frozen=True)
class Setting:
    """What differs from glue.py's defaults: flags, fields of the adapter's configuration, and the
    learning rate of kinds of weights as a share of the given rate.
    """

    flags: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)


REFERENCE = "reference"
SETTINGS = {
    REFERENCE: Setting(),
    "norms_frozen": Setting(("--train_layer_norm", "false")),
    "identity": Setting(("--init_std", "0")),
    "warmup_200": Setting(("--warmup_steps", "200")),
    "slow_norms": Setting(rates={"norm": 0.1, "bias": 0.1}),
    "slow_adapters": Setting(rates={"down": 0.1, "up": 0.1, "bias": 0.1}),
    "slow_up": Setting(rates={"up": 0.1}),
    "slow_down": Setting(rates={"down": 0.1}),
    "slow_head": Setting(rates={"head": 0.1}),
    "scaling_0.5": Setting(fields={"scaling": 0.5}),
    "clip_0.1": Setting(("--max_grad_norm", "0.1")),
    "beta2_0.98": Setting(("--adam_beta2", "0.98")),
}


@dataclass(frozen=True)
class Cell:
    """A run to make: a setting, a seed, and the step to stop at, or None for the whole run."""

    setting: str
    seed: int
    steps: int | None = None

    @property
    def name(self) -> str:
        return f"{self.setting}-{self.seed}"


class Table:
    """The table of the finished runs, a file to which every run adds a line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    def has(self, cell: Cell, whole: int) -> bool:
        """Return whether the cell, or a longer run of its setting and seed, is finished."""
        wanted = min(cell.steps or whole, whole)
        for row in self.rows():
            is_same = (row["setting"], row["seed"]) == (cell.setting, str(cell.seed))
            if is_same and int(row["steps"]) >= wanted:
                return True
        return False

    def stuck_seeds(self) -> list[int]:
        """Return the seeds at which a run of the reference was stuck when it was last scored."""
        is_stuck: dict[int, bool] = {}
        for row in self.rows():
            if row["setting"] == REFERENCE:
                is_stuck[int(row["seed"])] = row["stuck"] == "True"
        return [seed for seed in sorted(is_stuck) if is_stuck[seed]]

    def add(self, row: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(row)


class StopAt(TrainerCallback):
    """Save a checkpoint and stop at a step. The rate follows the schedule of the whole run."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= self._step:
            control.should_save = control.should_training_stop = True


class StudyTrainer(RecipeTrainer):
    """A trainer that records the first steps, and trains kinds of weights at rates of their own."""

    rates: Mapping[str, float] = {}
    records: "Records"

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the Trainer's optimizer with a group for each kind of weights."""
        optimizer = super().create_optimizer(model)
        kinds = {weight: kind_of(name) for name, weight in self.model.named_parameters()}
        groups = []
        for group in optimizer.param_groups:
            for kind in KINDS:
                weights = [weight for weight in group["params"] if kinds[weight] == kind]
                rate = group["lr"] * self.rates.get(kind, 1.0)
                groups.append({**group, "params": weights, "lr": rate})
        optimizer.param_groups[:] = groups
        return optimizer

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.state.global_step < RECORDED:
            self.records.add(self.state.global_step + 1, loss.item())
        return loss


class StudyTask(GlueTask):
    """A task of GLUE whose scores also say whether all predictions are of one class."""

    trainer_class = StudyTrainer

    def score(self, evaluation: EvalPrediction) -> dict[str, float]:
        classes = set(np.asarray(evaluation.predictions).argmax(-1).tolist())
        return super().score(evaluation) | {"one_class": float(len(classes) == 1)}


class Weights:
    """The trained weights of one kind, and their values at the start of the run."""

    def __init__(self) -> None:
        self._weights: list[nn.Parameter] = []
        self._start: list[torch.Tensor] = []

    def append(self, weight: nn.Parameter) -> None:
        self._weights.append(weight)
        self._start.append(weight.detach().clone())

    def gradient(self) -> float:
        """Return the norm of their gradient."""
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        return get_total_norm(gradients).item()

    def distance(self) -> float:
        """Return how far they are from their start."""
        pairs = zip(self._weights, self._start, strict=True)
        return get_total_norm([weight.detach() - start for weight, start in pairs]).item()


class Records:
    """What happens in the first steps of a run, step by step, in a file of JSON lines."""

    def __init__(self, model: PeftModel, path: Path, begun: int) -> None:
        """Continue the file after the steps of a checkpoint that the run resumes from."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        before_checkpoint = [record for record in self._read() if record["step"] <= begun]
        path.write_text("".join(map(_line, before_checkpoint)))
        self._kinds = {kind: Weights() for kind in KINDS}
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                self._kinds[kind_of(name)].append(weight)
        self._spreads: dict[int, float] = {}
        self._added: dict[int, float] = {}
        base: Any = model.get_base_model()
        layers = base.base_model.encoder.layer
        self._last = len(layers)
        for quarter in (1, 2, 3, 4):
            number = self._last * quarter // 4
            layer = layers[number - 1]
            layer.register_forward_hook(self._measure(number))
            *_, place = [part for part in layer.modules() if isinstance(part, HoulsbyLayer)]
            place.register_forward_hook(self._measure_added(number, place))

    @property
    def spread(self) -> float:
        """The spread of [CLS] after the last layer, in the last batch."""
        return self._spreads[self._last]

    def add(self, step: int, loss: float) -> None:
        record: dict[str, float] = {"step": step, "loss": loss}
        for kind, weights in self._kinds.items():
            record[f"gradient_{kind}"] = weights.gradient()
        for kind, weights in self._kinds.items():
            record[f"moved_{kind}"] = weights.distance()
        for number, spread in self._spreads.items():
            record[f"spread_{number}"] = spread
        for number, share in self._added.items():
            record[f"added_{number}"] = share
        with self._path.open("a") as file:
            file.write(_line(record))

    def export(self, path: Path) -> None:
        """Write the records as a table with three digits."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for record in self._read():
                if record["step"] == 1:
                    writer.writerow(record)
                writer.writerow(f"{value:.3g}" for value in record.values())

    def _read(self) -> list[dict[str, float]]:
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def _measure(self, number: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output  # (texts, tokens, width)
            self._spreads[number] = hidden[:, 0].detach().float().std(0).mean().item()

        return hook

    def _measure_added(self, number: int, place: HoulsbyLayer) -> Any:
        read: dict[str, torch.Tensor] = {}

        def before(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            read["hidden"] = output.detach().float()  # (texts, tokens, width)

        def after(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            hidden = read["hidden"]
            added = output.detach().float() - hidden
            self._added[number] = (added.norm(dim=-1) / hidden.norm(dim=-1)).mean().item()

        place.base_layer.register_forward_hook(before)
        return after


def _line(record: Mapping[str, float]) -> str:
    return json.dumps(record) + "\n"


def kind_of(name: str) -> str:
    """Return the kind of a trained weight by its name."""
    if "houlsby_norm" in name:
        return "norm"
    if "houlsby_adapter" not in name:
        return "head"
    if name.endswith("bias"):
        return "bias"
    if "down_proj" in name:
        return "down"
    return "up"


def read_cells(path: Path, table: Table) -> list[Cell]:
    """Return the cells of a file, in which `stuck` stands for the seeds known to be stuck."""
    cells = []
    for line in path.read_text().splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        setting, seed = words[:2]
        if setting not in SETTINGS:
            raise RecipeError(f"{path}: the setting must be one of {', '.join(SETTINGS)}: {line}")
        steps = None
        if len(words) > 2:
            steps = int(words[2])
        seeds = table.stuck_seeds() if seed == "stuck" else [int(seed)]
        cells += [Cell(setting, number, steps) for number in seeds]
    return cells


def next_cell(path: Path, table: Table, whole: int, taken: set[Cell]) -> Cell | None:
    """Return the first cell that is not finished. The file may be edited while runs train."""
    for cell in read_cells(path, table):
        if cell not in taken and not table.has(cell, whole):
            return cell
    return None


def train(cell: Cell, flags: list[str], task: StudyTask, table: Table, folder: Path) -> None:
    """Train a cell, or continue it, and add its line to the table.

    The weights and the order of the texts are those of glue.py with the same flags and seed.
    """
    setting = SETTINGS[cell.setting]
    of_run = ["--seed", str(cell.seed), "--output_dir", str(folder), *setting.flags]
    of_run += ["--metric_for_best_model", task.scores[0], "--greater_is_better", "true"]
    command = parse_arguments([*flags, *of_run, *CHECKPOINTS])
    config = command.adapter.config
    # The arguments are frozen, and some fields of the adapter have no flag.
    vars(command.adapter)["config"] = lambda **fields: replace(config(**fields), **setting.fields)
    arguments, _, _, training = command
    checkpoint = last_checkpoint(folder)
    begun = 0 if checkpoint is None else int(checkpoint.rpartition("-")[2])
    set_seed(training.seed)
    model, tokenizer = task.prepare(command)
    trainer = cast(
        StudyTrainer, task.make_trainer(model, tokenizer, arguments.max_length, training)
    )
    trainer.rates = setting.rates
    trainer.records = Records(model, folder / "steps.jsonl", begun)
    if cell.steps is not None:
        trainer.add_callback(StopAt(cell.steps))
    trainer.train(checkpoint)
    evaluations, main = scores_per_epoch(trainer.state.log_history), task.scores[0]
    last = evaluations[-1]
    row = {
        "setting": cell.setting,
        "seed": cell.seed,
        "steps": trainer.state.global_step,
        "accuracy": round(last["accuracy"], 4),
        "score": round(last[main], 4),
        "best_score": round(max(scores[main] for scores in evaluations), 4),
        "loss": round(last["loss"], 4),
        "stuck": last["one_class"] == 1,
        "cls_spread": round(trainer.records.spread, 4),
        "seconds": round(last["seconds"]),
    }
    trainer.records.export(table.path.with_suffix("") / f"{cell.name}.csv")
    table.add(row)


def load(arguments: Any) -> StudyTask:
    """Return the task with its splits, as glue.py loads it."""
    task = StudyTask(**vars(TASKS[arguments.task].load(arguments.data_dir)))
    task.splits["train"] = sample(task.splits["train"], arguments.max_train_samples)
    return task


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", type=Path, help="File of the settings and seeds.")
    parser.add_argument("table", type=Path, help="File of the results (.csv).")
    options, flags = parser.parse_known_args()
    flags = ["--base_dtype", "float32", *flags]
    arguments, _, _, training = parse_arguments(flags)
    table, task = Table(options.table), load(arguments)
    rows = len(task.splits["train"])
    epochs = settle_schedule(training, rows).num_train_epochs or 0
    whole = int(epochs * -(-rows // training.per_device_train_batch_size))
    taken: set[Cell] = set()  # by another process
    while cell := next_cell(options.cells, table, whole, taken):
        folder = Path(training.output_dir, cell.name)
        try:
            lock(folder)
        except RecipeError:
            taken.add(cell)
            continue
        if not table.has(cell, whole):  # it may have been finished before the lock was free
            start = time.perf_counter()
            log(f"{cell.name}: begins, at most {min(cell.steps or whole, whole)} steps")
            train(cell, flags, task, table, folder)
            log(f"{cell.name}: finished after {time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    end_with_one_line(main)
