"""transformers' Trainer as the recipes need it."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import nn
from torch.utils.data import Dataset, Sampler
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    EvalLoopOutput,
    PredictionOutput,
    TrainOutput,
    rotate_checkpoints,
)

from training.checkpoints import find_checkpoint_damage, get_step, seal
from training.errors import RecipeError
from training.progress import Progress
from training.scores import ClassScores


TRAIN_SECONDS = "train_seconds"


def check_finite(outputs: NDArray[np.float32]) -> None:
    """Raise RecipeError if a model's outputs are not all finite."""
    if not np.isfinite(outputs).all():
        raise RecipeError("The model's outputs are not finite: the training has diverged. Lower --learning_rate.")


class RecipeTrainer(Trainer):
    """A Trainer with these changes.

    - The loss is the model's own, not multiplied by the number of processes and accumulated steps.
    - A loss that becomes NaN or infinite stops the run.
    - Predictions are in the order of the rows.
    - A complete checkpoint can be told from an incomplete or damaged one, and resuming gives the same weights as no
      interruption.
    - It is known which step's weights the model ends with, and there are scores of that step.
    - It prints a line per evaluation, and logs the time of the training steps until then.

    Args:
        args, kwargs: As for a Trainer.
        score_classes: For tasks with classes, what the scores of single classes are computed from, out of the outputs
            and the labels of a split.

    Attributes:
        start: The time when it was made, by time.perf_counter().
        trainable, total: Numbers of parameters of the model, as PEFT counts them, for every method.
        saved_as: The subfolder of the output folder for the kept weights: "adapter" or "model".
        best_step: The step of the best checkpoint, if the model has its weights after training; else None, and the
            model has those of the last step.
    """

    def __init__(
        self,
        *args: Any,
        score_classes: Callable[[NDArray[np.float32], NDArray[Any]], ClassScores] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        # In a notebook, the Trainer shows a table of its own.
        if any([self.pop_callback(ProgressCallback), self.pop_callback(PrinterCallback)]):
            self.add_callback(Progress())
        self._score_classes = score_classes
        self._of_test: ClassScores | None = None
        self._of_validation: dict[int, ClassScores] = {}  # by step: of the last evaluation and of the best
        self.start = time.perf_counter()
        self.saved_as = "adapter" if isinstance(self.model, PeftModel) else "model"
        self.best_step: int | None = None
        self._resumed_from: str | None = None
        # Counted before anything is sharded.
        self.trainable, self.total = PeftModel.get_nb_trainable_parameters(self.model)
        # BertForSequenceClassification takes **kwargs, so the Trainer expects it to divide its loss by the number of
        # items in the batch. It does not, so the loss would be multiplied by the processes and accumulated steps.
        self.model_accepts_loss_kwargs = False
        self._clock = _Clock()
        self.add_callback(self._clock)
        if self.args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(self.args.early_stopping_patience))

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> TrainOutput:
        """Print the number of trained parameters, train as Trainer.train does, and score the last step if it has the
        kept weights and was not evaluated."""
        if self.args.should_log:
            share = self.trainable / self.total
            print(f"trainable parameters: {self.trainable:,} of {self.total:,} ({share:.2%})")
            if self.args.device.type == "cuda" and self.args.world_size < torch.cuda.device_count():
                print(
                    f"{self.args.world_size} of {torch.cuda.device_count()} GPUs in use; for others, see "
                    "docs/distributed.md"
                )
        self._resumed_from = resume_from_checkpoint
        output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        if self.args.eval_strategy != "no" and not any(
            entry["step"] == self.kept_step and any(name.startswith("eval_") for name in entry)
            for entry in self.state.log_history
        ):
            self.evaluate()
        return output

    @property
    def kept_step(self) -> int:
        """The step whose weights the model has after training."""
        return self.state.global_step if self.best_step is None else self.best_step

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take a step as Trainer.training_step does.

        Raises:
            RecipeError: If the loss is NaN or infinite, from which no training recovers.
        """
        loss = super().training_step(model, inputs, *args, **kwargs)
        if not torch.isfinite(loss):
            raise RecipeError(
                f"The loss is {loss.item()} at step {self.state.global_step + 1}, with the learning rate "
                f"{self._get_learning_rate():.3g} of at most {self.args.learning_rate:g}: the training has diverged. "
                "Lower --learning_rate."
            )
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer.log does; with the scores of an evaluation, also the time of the training until then."""
        if any(name.startswith("eval_") for name in logs):
            logs = {**logs, TRAIN_SECONDS: round(self._clock.seconds, 3)}
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate or predict as Trainer.evaluation_loop does, and keep what the scores of the classes need.

        A split with labels that is predicted under the Trainer's default name, "test", is the test split.
        """
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        if self._score_classes is None or output.predictions is None or output.label_ids is None:
            return output
        if prefix == "test":
            self._of_test = self._score_classes(output.predictions, output.label_ids)
        elif prefix == "_".join(["eval", *self._chosen_split]):
            best = self.state.best_global_step
            self._of_validation = {step: kept for step, kept in self._of_validation.items() if step == best}
            self._of_validation[self.state.global_step] = self._score_classes(output.predictions, output.label_ids)
        return output

    @property
    def _chosen_split(self) -> tuple[str, ...]:
        """Of several validation splits, such as MNLI's two, the name of the one that chooses the best epoch."""
        names = self.eval_dataset if isinstance(self.eval_dataset, dict) else ()
        return tuple(name for name in names if self.args.metric_for_best_model.startswith(f"{name}_"))

    def kept_classes(self) -> tuple[str, ClassScores] | None:
        """Return what the kept weights predict for the test split or, if it was not predicted, for validation.

        Every process of a distributed run must call it.

        Returns:
            The name of the split, and the predictions; None if there are no classes or there was no evaluation.
        """
        if self._of_test is not None:
            return "test", self._of_test
        if self._score_classes is None or self.args.eval_strategy == "no":
            return None
        if self.kept_step not in self._of_validation:  # evaluated before the run was interrupted
            data = self.eval_dataset[self._chosen_split[0]] if self._chosen_split else self.eval_dataset
            output = self.predict(data, metric_key_prefix="kept")
            self._of_validation[self.kept_step] = self._score_classes(output.predictions, output.label_ids)
        name = " ".join(["validation", *(f"({split})" for split in self._chosen_split)])
        return name, self._of_validation[self.kept_step]

    def save_trained(self) -> None:
        """Save the weights of the kept epoch and the tokenizer in the subfolder `saved_as`, in place of all that an
        earlier run, or an attempt that was killed, has left there."""
        folder = Path(self.args.output_dir, self.saved_as)
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.save_model(str(folder))

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int] | None:
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            return _OrderOfEpoch(sampler, lambda: seed + int(self.state.epoch or 0))
        return sampler

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Return the epochs and steps that are over, as Trainer._init_training_state does.

        The Trainer would take another step after the last one if that was not the end of an epoch, or if early
        stopping has ended the run. It also forgets the best checkpoint if the folder has been moved.
        """
        trained = super()._init_training_state(max_steps, steps_per_epoch, epochs, checkpoint, trial)
        if checkpoint is None:
            return trained
        if self.state.best_global_step:
            best = self._find_checkpoint(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            if best.is_dir():
                self.state.best_model_checkpoint = str(best)
        is_over = self.state.global_step >= max_steps
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, EarlyStoppingCallback):
                callback.early_stopping_patience = self.args.early_stopping_patience  # not the checkpoint's
                is_over |= callback.early_stopping_patience_counter >= callback.early_stopping_patience
        return (epochs, 0) if is_over else trained

    def _find_checkpoint(self, name: str) -> Path:
        """Return the folder of a checkpoint by its name, as the run's folder may have been moved since then."""
        folders = [Path(self.args.output_dir), *([Path(self._resumed_from).parent] if self._resumed_from else [])]
        return next((path for folder in folders if (path := folder / name).is_dir()), folders[0] / name)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial))
        checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            # A damaged one of an earlier attempt, whose files must not be taken for those of this one.
            shutil.rmtree(checkpoint, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        # Only now are older checkpoints deleted, so that a crash at any moment leaves a complete one.
        if self.args.should_save:
            seal(checkpoint, resumable=not self.args.save_only_model)
            rotate_checkpoints(str(folder), limit, self.state.best_model_checkpoint, use_mtime=True)

    def _load_best_model(self) -> None:
        best = self._find_checkpoint(Path(self.state.best_model_checkpoint).name)
        damage = find_checkpoint_damage(best, resume=False)
        if damage is not None:
            raise RecipeError(
                f"The best epoch's checkpoint {best} cannot be loaded: {damage}. The same command trains again from "
                "the last checkpoint before it."
            )
        self.state.best_model_checkpoint, self.best_step = str(best), get_step(best)
        super()._load_best_model()

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Predict as Trainer.predict does, in the order of the rows, which length grouping would change."""
        strategy = self.args.train_sampling_strategy
        self.args.train_sampling_strategy = "sequential"
        try:
            return super().predict(*args, **kwargs)
        finally:
            self.args.train_sampling_strategy = strategy


class _Clock(TrainerCallback):
    """Adds up the time of all training steps, without that of evaluations and checkpoints: on a CPU the time of the
    processor, which other work on the machine does not change much, elsewhere the time that has passed."""

    seconds = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._now = time.process_time if args.device.type == "cpu" else time.perf_counter
        known = (entry[TRAIN_SECONDS] for entry in reversed(state.log_history) if TRAIN_SECONDS in entry)
        self.seconds = next(known, 0.0)  # of a run that resumes

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._start = self._now()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seconds += self._now() - self._start


class _OrderOfEpoch(Sampler[int]):
    """Length grouping in an order that depends only on seed and epoch, so that a run that resumes in the middle of an
    epoch sees exactly the remaining examples."""

    def __init__(self, sampler: LengthGroupedSampler, seed: Callable[[], int]) -> None:
        self._sampler, self._seed = sampler, seed

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        self._sampler.generator = torch.Generator().manual_seed(self._seed())
        return iter(self._sampler)
