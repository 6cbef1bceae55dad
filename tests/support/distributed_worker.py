"""One process of a run of the GLUE recipe: on CPUs, under any strategy, with a record of what it
saw.

`distributed_runs.py` starts it in place of `recipes/glue.py`, through `accelerate launch` and with
the same flags. The strategies for GPUs run on CPUs only with the switches of `imitate_gpus`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import DistributedType, PartialState
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, training_args


sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import glue
from run.trainer import RecipeTrainer
from tasks.glue_tasks import GlueTask


RANK = int(os.environ.get("RANK", "0"))
# Where to write: {"record": folder}; what happens to process 1 in the first life of the run:
# {"hang": step, "kill_in_save": step}.
ORDERS = json.loads(os.environ["WORKER_ORDERS"])


def imitate_gpus() -> None:
    """accelerate takes machines without GPUs for single processes; so it is told the backend and
    the device, and the recipe that there is an accelerator.
    """
    is_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    # With this type, DDP would be given the number of a GPU; without it, FSDP is not set up.
    kind = DistributedType.MULTI_GPU if is_fsdp else DistributedType.MULTI_CPU
    torch.accelerator.is_available = lambda: True
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", kind)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    # The Trainer accepts --bf16 on CPUs only together with --use_cpu, which would change the
    # strategy.
    training_args.is_torch_bf16_gpu_available = lambda: True
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed

        # It would be compiled in every fresh environment.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def is_due(fault: str, step: int) -> bool:
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    return RANK == 1 and first_life and ORDERS.get(fault) == step


class Hang(TrainerCallback):
    """Stops this process at the beginning of a step, as a deadlock would."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if is_due("hang", state.global_step):
            time.sleep(600)


class WatchedTrainer(RecipeTrainer):
    """Writes `rank0.json`, `rank1.json` and `predictions.npy` into the folder of records after
    training.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(Hang())
        self.add_callback(CountBytes(self))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        output = super().train(*args, **kwargs)
        evaluation = self.eval_dataset
        if isinstance(evaluation, dict):
            evaluation = evaluation["matched"]
        predictions = self.predict(evaluation, metric_key_prefix="again").predictions
        folder = Path(ORDERS["record"])
        if RANK == 0:
            np.save(folder / "predictions.npy", predictions)
        (folder / f"rank{RANK}.json").write_text(json.dumps(self.record()))
        return output

    def _save_rng_state(self, output_dir: str) -> None:
        if is_due("kill_in_save", self.state.global_step):
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)

    def record(self) -> dict[str, Any]:
        wrapped, log = self.model_wrapped, self.state.log_history
        if isinstance(wrapped, FSDPModule):
            wrapped.reshard()  # the outermost unit stays whole after a forward pass
        logged = [entry for entry in log if "loss" in entry]
        steps = max(1, self.state.global_step - CountBytes.first_step)
        return {
            "processes": self.accelerator.num_processes,
            "type": self.accelerator.distributed_type.value,
            "wrapper": type(wrapped).__name__,
            "find_unused_parameters": getattr(wrapped, "find_unused_parameters", None),
            "steps": [entry["step"] for entry in logged],
            "losses": [entry["loss"] for entry in logged],
            "gradient_norms": [entry["grad_norm"] for entry in logged],
            "weights": sum(map(local_bytes, self.model.parameters())),
            **optimizer_bytes(self.optimizer, self.model),
            "exchanged_per_step": CountBytes.exchanged / steps,
            "ungathered": self.save_ungathered(),
        }

    def save_ungathered(self) -> str | None:
        """The error, if there is one, of saving what this process has."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                self.accelerator.unwrap_model(self.model_wrapped).save_pretrained(folder)
            except ValueError as error:
                return str(error)
        return None


def local_bytes(tensor: torch.Tensor) -> int:
    """What this process holds of a tensor: all, FSDP2's shard or ZeRO-3's."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return getattr(tensor, "ds_tensor", tensor).nbytes


def optimizer_bytes(optimizer: Any, model: torch.nn.Module) -> dict[str, int]:
    """Of AdamW, inside of what accelerate and DeepSpeed put around it: its moments, and its own
    copies of weights.
    """
    while not isinstance(optimizer, torch.optim.AdamW):
        optimizer = optimizer.optimizer
    moments = 0
    for state in optimizer.state.values():
        moments += sum(local_bytes(value) for value in state.values() if value.dim())
    own_copies = set(optimizer.state) - set(model.parameters())
    return {"moments": moments, "masters": sum(map(local_bytes, own_copies))}


class CountBytes(TrainerCallback):
    """The bytes that DDP exchanges from the step on at which this process begins."""

    exchanged = first_step = 0

    def __init__(self, trainer: RecipeTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        CountBytes.first_step = state.global_step
        if isinstance(self.trainer.model_wrapped, DistributedDataParallel):
            self.trainer.model_wrapped.register_comm_hook(None, self.exchange)

    def exchange(self, group, bucket):  # DDP checks the annotations, if there are any
        CountBytes.exchanged += bucket.buffer().nbytes
        return allreduce_hook(group, bucket)


def main() -> None:
    # Tells the files of the processes apart: only those of process 1 are writable for the group.
    os.umask(0o002 if RANK == 1 else 0o022)
    if "LOCAL_RANK" in os.environ:
        imitate_gpus()
    GlueTask.trainer_class = WatchedTrainer
    glue.main()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        # A process of gloo that leaves while others still talk to it takes them with it.
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
