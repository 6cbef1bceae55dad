"""transformers' Trainer with four changes: its loss, its divergence, the order of its rows, its checkpoints."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import nn
from torch.utils.data import Dataset, Sampler
from transformers import EarlyStoppingCallback, Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PredictionOutput, TrainOutput

from training.errors import RecipeError


def check_finite(outputs: NDArray[np.float32]) -> None:
    """Raise RecipeError if a model's outputs are not all finite."""
    if not np.isfinite(outputs).all():
        raise RecipeError("The model's outputs are not finite: the training has diverged. Lower --learning_rate.")


class RecipeTrainer(Trainer):
    """A Trainer with four changes.

    - The loss is the model's own, not multiplied by the number of processes and accumulated steps.
    - A loss that becomes NaN or infinite stops the run.
    - Predictions are in the order of the rows.
    - A complete checkpoint can be told from an incomplete one, and resuming gives the same weights as no interruption.

    Attributes:
        start: The time when it was made, by time.perf_counter().
        trainable, total: Numbers of parameters of the model, as PEFT counts them, for every method.
        saved_as: The subfolder of the output folder for the kept weights: "adapter" or "model".
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start = time.perf_counter()
        self.saved_as = "adapter" if isinstance(self.model, PeftModel) else "model"
        # Counted before anything is sharded.
        self.trainable, self.total = PeftModel.get_nb_trainable_parameters(self.model)
        # BertForSequenceClassification takes **kwargs, so the Trainer expects it to divide its loss by the number of
        # items in the batch. It does not, so the loss would be multiplied by the processes and accumulated steps.
        self.model_accepts_loss_kwargs = False
        if self.args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(self.args.early_stopping_patience))

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> TrainOutput:
        """Print the number of trained parameters, then train as Trainer.train does."""
        if self.args.should_log:
            share = self.trainable / self.total
            print(f"trainable parameters: {self.trainable:,} of {self.total:,} ({share:.2%})")
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

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

    def save_trained(self) -> None:
        """Save the weights of the kept epoch and the tokenizer in the subfolder `saved_as`."""
        self.save_model(f"{self.args.output_dir}/{self.saved_as}")

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int] | None:
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            return _OrderOfEpoch(sampler, lambda: self.args.seed + int(self.state.epoch or 0))
        return sampler

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # This is the last file that all processes write. Only after all of them have, the main process writes
        # trainer_state.json and deletes older checkpoints, so that a crash at any moment leaves a complete one.
        self.accelerator.wait_for_everyone()

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Predict as Trainer.predict does, in the order of the rows, which length grouping would change."""
        strategy = self.args.train_sampling_strategy
        self.args.train_sampling_strategy = "sequential"
        try:
            return super().predict(*args, **kwargs)
        finally:
            self.args.train_sampling_strategy = strategy


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
