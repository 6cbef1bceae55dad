"""transformers' TrainingArguments with the defaults of the paper. After they were read, the Trainer
alone writes into its own copy.
"""

import copy
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import TrainingArguments
from transformers.hf_argparser import HfArg

from run.edge import RecipeError, log
from run.run import lower_is_better


MAIN_METRIC = "main"


def flag(**options: Any) -> Any:
    """Describe a flag of the command line: its default, help and aliases."""
    return HfArg(**options)


@dataclass
class RecipeTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments with the defaults of Houlsby et al. 2019: Adam (AdamW without
    decay), batches of 32, linear warm-up and linear decay to zero, best epoch by the validation
    score.
    """

    _argument_group_name = "training (arguments of transformers' TrainingArguments)"

    output_dir: str = flag(
        default="runs/{task}", help="Folder of checkpoints, adapter and results.json."
    )
    learning_rate: float = flag(
        default=3e-4,
        help="Peak learning rate, reached after the warm-up; to classify with minilm and "
        "adapters: 1e-3.",
    )
    # None is settled by run/schedule.py, once the number of rows is known.
    num_train_epochs: float | None = flag(  # type: ignore[assignment]
        default=None,
        help="Number of passes over the training data; default: 10, or enough for 1,000 steps; "
        "with fewer than 100 validation examples, enough for 300.",
    )
    per_device_train_batch_size: int = flag(
        default=32, help="Examples per training step on each device."
    )
    per_device_eval_batch_size: int = flag(
        default=64, help="Examples per evaluation step on each device."
    )
    warmup_steps: float | None = flag(  # type: ignore[assignment]
        default=None,
        help="Steps of linear warm-up; below 1: share of all steps; default: a tenth of them, at "
        "least 100, at most half.",
    )
    lr_scheduler_type: str = flag(
        default="linear", help="Learning rate after the warm-up: linear, cosine, constant ..."
    )
    train_sampling_strategy: str = flag(
        default="group_by_length",
        help="'group_by_length', which needs the least padding, or 'random'.",
    )
    eval_strategy: str = flag(
        default="epoch",
        help="When to evaluate: 'epoch', 'steps' or 'no'; without --num_train_epochs, at most 20 "
        "times.",
    )
    save_strategy: str = flag(
        default="epoch", help="When to save a checkpoint: 'epoch', 'steps', 'best' or 'no'."
    )
    save_total_limit: int | None = flag(
        default=2, help="Number of checkpoints to keep besides the best."
    )
    # Without an accelerator, every run would warn about pinned memory.
    dataloader_pin_memory: bool = flag(
        default=torch.accelerator.is_available(), help="Pin batches in memory."
    )
    # Every step uses all trained weights, and the buffers of a frozen encoder never change.
    ddp_find_unused_parameters: bool = flag(
        default=False, help="Let DDP search for unused parameters."
    )
    ddp_broadcast_buffers: bool | None = flag(
        default=False, help="Let DDP send the buffers before every step."
    )
    logging_steps: float = flag(default=50, help="Steps between two reports of the loss.")
    load_best_model_at_end: bool | None = flag(  # type: ignore[assignment]
        default=None,
        help="End with the weights of the best epoch, not the last; default: true, unless "
        "fewer than 100 validation examples would choose it and nothing says how long to train.",
    )
    metric_for_best_model: str = flag(
        default=MAIN_METRIC, help="Score that chooses the best epoch; 'main' is the task's own."
    )
    early_stopping_patience: int | None = flag(
        default=None,
        help="Stop after this many evaluations without a better one; 0: never; default: a quarter "
        "of those planned, if the best epoch is kept and nothing says how long to train.",
    )
    adapter_drop: bool = flag(
        default=False,
        help="In each step, skip the adapters of the lowest layers, a random number of them, so "
        "that the trained adapter also works without them (AdapterDrop).",
    )
    cuda_graphs: bool = flag(
        default=False,
        help="Start all operations of a training step at once, on one NVIDIA GPU. With short texts "
        "in half precision, a step then takes a fraction of the time.",
    )
    # Early stopping must go on counting after a crash.
    restore_callback_states_from_checkpoint: bool = flag(
        default=True, help="Also restore the state of the callbacks when resuming."
    )
    overwrite_output_dir: bool = flag(
        default=False,
        help="Start over in a folder that holds another run, and delete its checkpoints and "
        "results.",
    )
    resume_from_checkpoint: Literal["last"] | None = flag(
        default=None,
        help="Resume from the last complete checkpoint in output_dir with other arguments, for "
        "example more epochs; default: only with the same arguments.",
    )
    hub_private_repo: bool = flag(
        aliases=["--hub_private"], default=False, help="Make a new repository on the Hub private."
    )
    do_train: bool = flag(
        default=False, help="Train. Without all three of these flags, a recipe does all of it."
    )

    def __post_init__(self) -> None:
        if not (self.do_train or self.do_eval or self.do_predict):
            self.do_train = self.do_eval = self.do_predict = True
        if not self.do_eval:
            self.eval_strategy, self.load_best_model_at_end = "no", False
        if self.early_stopping_patience and self.eval_strategy == "no":
            raise RecipeError(
                "--early_stopping_patience counts evaluations. Leave it out, or give "
                "--eval_strategy epoch."
            )
        if self.disable_tqdm is None:
            self.disable_tqdm = not sys.stderr.isatty()
        self.ddp_find_unused_parameters |= self.adapter_drop
        if not torch.accelerator.is_available():
            self._prepare_processors()
        warmup_steps, self.warmup_steps = self.warmup_steps, self.warmup_steps or 0.0
        keeps_best, self.load_best_model_at_end = (
            self.load_best_model_at_end,
            self.load_best_model_at_end is not False,
        )
        super().__post_init__()
        self.warmup_steps, self.load_best_model_at_end = warmup_steps, keeps_best
        self._check_processes()
        if self.cuda_graphs:
            self._check_cuda_graphs()
        if self.n_gpu > 1:
            # The Trainer would copy the model to all of them in every step, on threads.
            self._n_gpu = 1

    def is_sharded_by(self, plugin: Literal["deepspeed", "fsdp"]) -> bool:
        """Return whether a flag or accelerate asks for DeepSpeed or FSDP."""
        by_accelerate = os.environ.get(f"ACCELERATE_USE_{plugin.upper()}", "").lower() == "true"
        return bool(getattr(self, plugin)) or by_accelerate

    def _prepare_processors(self) -> None:
        """Let several processes without an accelerator find each other.

        By default, accelerate takes each of them for the only one.
        """
        if self.is_sharded_by("fsdp"):  # accelerate would run DDP
            raise RecipeError(
                "FSDP needs GPUs. Without one, use recipes/launch/accelerate/ddp.yaml or "
                "zero3.yaml, which also shards."
            )
        if self.is_sharded_by("deepspeed"):
            import deepspeed

            self.ddp_backend = "gloo"
            # DeepSpeed would compile it, which takes minutes and a compiler.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        else:
            self.use_cpu = True

    def _check_processes(self) -> None:
        """Refuse to be one of several processes that know nothing of each other."""
        started = int(os.environ.get("WORLD_SIZE", self.world_size))
        if started != self.world_size:
            raise RecipeError(
                f"{started} processes were started, and each takes itself for one of "
                f"{self.world_size}. To compute on processors, give --use_cpu."
            )
        is_asked_for_more = {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= os.environ.keys()
        if self.world_size == 1 and is_asked_for_more:
            log(
                "warning: this is one process. To start several without a GPU, give accelerate "
                "launch --config_file recipes/launch/accelerate/ddp.yaml"
            )

    def _check_cuda_graphs(self) -> None:
        """Refuse what a graph would silently leave out."""
        for name, value in (("gradient_accumulation_steps", 1), ("adapter_drop", False)):
            if getattr(self, name) != value:
                raise RecipeError(f"--cuda_graphs needs --{name} {value}.")
        if self.device.type != "cuda" or self.world_size > 1:
            raise RecipeError("--cuda_graphs needs one process and an NVIDIA GPU.")

    def choosing_by(self, scores: Sequence[str], output_dir: str) -> "RecipeTrainingArguments":
        """Return a copy for a folder, in which the first of a task's scores chooses the best epoch,
        unless the command line names another.
        """
        named = self.metric_for_best_model.removeprefix("eval_")
        if named == "accuracy":  # of which MNLI has two, and STS-B none
            accuracies = [name for name in scores if name.endswith("accuracy")]
            named = (accuracies or [MAIN_METRIC])[0]
        if named not in (MAIN_METRIC, *scores):
            raise RecipeError(
                f"--metric_for_best_model must be one of {', '.join([MAIN_METRIC, *scores])}, "
                f"got {named!r}."
            )
        training = copy.copy(self)
        training.output_dir = output_dir
        training.metric_for_best_model = scores[0] if named == MAIN_METRIC else named
        training.greater_is_better = not lower_is_better(training.metric_for_best_model)
        return training
