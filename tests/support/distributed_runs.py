"""Starts runs of the GLUE recipe on two processes, as users start them: `accelerate launch
--config_file ...`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from demo import minimal_pairs
from recipe_runs import save_tiny_encoder, write


ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "launch" / "accelerate"
WORKER = ROOT / "tests" / "support" / "distributed_worker.py"
STEPS = 12
# Labels that are hard to learn, and validation splits that divide neither by two processes nor by
# the batch size.
ROWS = {"train": 96, "validation_matched": 31, "validation_mismatched": 23}
# No two evaluations have the same score in the chosen split.
FLAGS = (
    f"--task mnli --max_steps {STEPS} --learning_rate 3e-3 --logging_steps 1 "
    "--train_sampling_strategy random --eval_strategy steps --eval_steps 4 "
    "--save_strategy steps --save_steps 4 --save_total_limit 4 "
    "--per_device_eval_batch_size 4 --disable_tqdm true --report_to none --base_dtype float32 "
    "--metric_for_best_model mismatched_accuracy"
).split()
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    # gloo would look for an address of this machine in the network.
    "GLOO_SOCKET_IFNAME": "lo",
    # A restarted run can hang on what the last one has left in a store that both share.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@dataclass(frozen=True)
class Strategy:
    """One of the configurations in recipes/launch/accelerate, and what a run under it must say it
    was.

    Args:
        config: name of the file.
        distributed_type: accelerate's, as a run on CPUs has it; FSDP is told by the wrapper.
        wrapper: the class around the model, or its beginning.
        kind: in results.json.
        splits_weights: whether a process holds only a part of the weights.
    """

    config: str
    distributed_type: str
    wrapper: str
    kind: str
    splits_weights: bool = False


STRATEGIES = {
    strategy.config: strategy
    for strategy in (
        Strategy("ddp", "MULTI_CPU", "DistributedDataParallel", "DDP"),
        Strategy("several_nodes", "MULTI_CPU", "DistributedDataParallel", "DDP"),
        Strategy("zero1", "DEEPSPEED", "DeepSpeedEngine", "ZeRO-1"),
        Strategy("zero2", "DEEPSPEED", "DeepSpeedEngine", "ZeRO-2"),
        Strategy("zero3", "DEEPSPEED", "DeepSpeedEngine", "ZeRO-3", splits_weights=True),
        Strategy("fsdp2", "FSDP", "FSDP", "FSDP2", splits_weights=True),
    )
}


@dataclass(frozen=True)
class Run:
    """A finished run: the folder with the recipe's output and the processes' records."""

    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @cached_property
    def results(self) -> dict[str, Any]:
        return json.loads((self.output / "results.json").read_text())

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank*.json"))]

    @cached_property
    def adapter(self) -> dict[str, torch.Tensor]:
        return load_file(self.output / "adapter" / "adapter_model.safetensors")

    @cached_property
    def predictions(self) -> np.ndarray:
        return np.load(self.folder / "predictions.npy")


def make_inputs(folder: Path) -> None:
    """A tiny BERT without dropout, and a task of three classes: `folder`/model and
    `folder`/data/mnli.
    """
    save_tiny_encoder(folder / "model", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    pairs = minimal_pairs()["train"]["sentence"]
    for split, rows in ROWS.items():
        texts = {"premise": pairs[:rows], "hypothesis": pairs[200 : 200 + rows]}
        write(folder / "data" / "mnli" / f"{split}.jsonl", **texts, label=np.arange(rows) % 3)


def run(inputs: Path, folder: Path, config: str | None, *flags: str, **options: Any) -> Run:
    """Runs the recipe to its end and checks that no process fails.

    Args:
        inputs: what make_inputs has made.
        folder: for the output and the records.
        config: name in STRATEGIES, on two processes; None: one process, with the batch of both.
        flags: for the recipe.
        options: `launcher`, flags for accelerate launch; the others are the worker's ORDERS.
    """
    process = start(inputs, folder, config, *flags, **options)
    output, _ = process.communicate(timeout=600)
    (folder / "log.txt").write_text(output)
    assert process.returncode == 0, output[-6000:]
    return Run(folder)


def start(
    inputs: Path,
    folder: Path,
    config: str | None,
    *flags: str,
    launcher: tuple[str, ...] = (),
    **orders: Any,
) -> subprocess.Popen[str]:
    """Starts what `run` runs."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(WORKER), "--use_cpu"]
    if config is not None:
        launch = ["-m", "accelerate.commands.launch", *launch_flags(folder, config), *launcher]
        command = [sys.executable, *launch, str(WORKER)]
    batch = 8 if config is None else 4
    command += [*FLAGS, "--per_device_train_batch_size", str(batch)]
    command += ["--model_name", str(inputs / "model"), "--data_dir", str(inputs / "data")]
    command += ["--output_dir", str(folder / "output"), *flags]
    environment = {**os.environ, **ENVIRONMENT}
    environment["WORKER_ORDERS"] = json.dumps({"record": str(folder), **orders})
    if config != "several_nodes":
        # Runs that go on at the same time must not meet on the launcher's usual port.
        environment["PET_RDZV_ENDPOINT"] = "localhost:0"
    piped = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **piped)


def launch_flags(folder: Path, config: str) -> list[str]:
    flags = ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", "2"]
    if config.startswith("zero3"):
        # All weights of a tiny model are below the sizes up to which DeepSpeed leaves weights
        # whole.
        file = ROOT / "recipes" / "launch" / "deepspeed" / f"{config}.json"
        settings = json.loads(file.read_text())
        for size in ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance"):
            settings["zero_optimization"][f"stage3_{size}"] = 0
        (folder / "deepspeed.json").write_text(json.dumps(settings))
        flags += ["--deepspeed_config_file", str(folder / "deepspeed.json")]
    if config != "several_nodes":
        flags += ["--rdzv_backend", "c10d", "--main_process_port", "0"]
    return flags
