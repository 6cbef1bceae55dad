r"""The scores of docs/results.md: MiniLM on five tasks of GLUE, run after run, on one core.

    nice -n 19 python benchmarks/scores.py --data_dir glue --runs runs/scores  # runs what is left
    python benchmarks/scores.py --plan                                         # prints it

Finished runs are rows of docs/runs/scores.csv, which is written after each run: one row per epoch.
Started again, the queue resumes the run that was interrupted, and skips those in the file. Every
flag that shapes a result is written out here, so that no later default changes a row.
"""

import argparse
import csv
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs/runs/scores.csv"
COLUMNS = ("method", "task", "seed", "epoch", "score", "seconds")
# Epochs, and the minutes of one run of adapters on one core.
EPOCHS = {"rte": 5, "mrpc": 5, "cola": 6, "stsb": 5, "sst2": 3}
MINUTES = {"rte": 9, "mrpc": 7, "cola": 6, "stsb": 9, "sst2": 6}
LINEAR = "query key value attention.output.dense intermediate.dense output.dense"
LORA = "LoRA r=8, all linear layers"  # which takes twice as long
# The rates were searched with seed 0, in an earlier order of batches.
METHODS = {
    "adapters r=64": "--r 64 --train_pooler true --learning_rate 1e-3 --base_dtype bfloat16",
    "full fine-tuning": "--method full --bf16 true",
    LORA: "--method lora --lora_r 8 --train_pooler true --learning_rate 1e-3 --base_dtype "
    f"bfloat16 --lora_targets {LINEAR}",
    "adapters r=64, 3-shared": "--r 64 --share_layers 3 --train_pooler true --learning_rate 1e-3 "
    "--base_dtype bfloat16",
}
RATES_OF_FULL = {"cola": "5e-5", "rte": "5e-5"}
# Seeds 0 to 2 of the first two methods are in docs/runs/random_order.csv, of the same schedule.
SEEDS = {"adapters r=64": range(3, 6), "full fine-tuning": range(3, 6)}


@dataclass(frozen=True)
class Run:
    method: str
    task: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return re.sub(r"[^\w]+", "_", f"{self.method} {self.task} {self.seed}")

    def command(self, data_dir: str, folder: Path) -> list[str]:
        flags = METHODS[self.method].split()
        if self.method == "full fine-tuning":
            flags += ["--learning_rate", RATES_OF_FULL.get(self.task, "1e-4")]
        if self.task == "sst2":
            flags += ["--max_train_samples", "10000"]
        return [
            sys.executable, str(ROOT / "recipes/glue.py"), "--task", self.task, "--model_name",
            "minilm", "--seed", str(self.seed), "--num_train_epochs", str(EPOCHS[self.task]),
            "--warmup_steps", "0.1", "--max_length", "128", "--train_sampling_strategy",
            "group_by_length",
            "--data_dir", data_dir, "--use_cpu", "--output_dir", str(folder), *flags,
        ]  # fmt: skip


def plan() -> Iterator[Run]:
    """Yield all runs: a seed of each method and task before the next seed."""
    for seed in range(6):
        for method in METHODS:
            if seed in SEEDS.get(method, range(6)):
                for task in EPOCHS:
                    yield Run(method, task, seed)


def read_finished() -> set[Run]:
    if not TABLE.exists():
        return set()
    with TABLE.open(newline="") as file:
        return {Run(row["method"], row["task"], int(row["seed"])) for row in csv.DictReader(file)}


def append(run: Run, folder: Path) -> None:
    """Add the epochs of a finished run to the table, with the score that chooses the best."""
    results = json.loads((folder / "results.json").read_text())
    is_new = not TABLE.exists()
    with TABLE.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        for epoch in results["epochs"]:
            score = f"{100 * epoch[results['chosen_by']]:.2f}"
            seconds = round(epoch["seconds"])
            writer.writerow([run.method, run.task, run.seed, epoch["epoch"], score, seconds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data_dir", default="glue", help="folder with the files of GLUE")
    parser.add_argument("--runs", type=Path, default=Path("runs/scores"))
    parser.add_argument("--plan", action="store_true", help="print the runs that are left")
    arguments = parser.parse_args()
    finished = read_finished()
    left = [run for run in plan() if run not in finished]
    hours = sum(MINUTES[run.task] * (2 if run.method == LORA else 1) for run in left) / 60
    print(f"{len(left)} runs are left, some {hours:.0f} hours of one core", flush=True)
    for run in left:
        folder = arguments.runs / run.name
        command = run.command(arguments.data_dir, folder)
        print(shlex.join(command[1:]), flush=True)
        if not arguments.plan:
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            append(run, folder)


if __name__ == "__main__":
    main()
