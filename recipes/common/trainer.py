"""transformers' Trainer, with some of its surprises taken out."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.utils.data import Dataset, Sampler
from transformers import EarlyStoppingCallback, Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PredictionOutput, TrainOutput

from common.errors import RecipeError


class RecipeTrainer(Trainer):
    """A Trainer whose loss is the model's and stays a number, whose predictions are in the order of the rows, and
    whose checkpoints tell whether they are whole, and lead to the same weights as if nothing had happened.

    Attributes:
        start: When it was made, by time.perf_counter().
        trainable, total: Parameters of the model, as PEFT counts them, whatever the method.
        saved_as: "adapter" or "model": the folder for the kept weights, in the output folder.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.start = time.perf_counter()
        self.saved_as = "adapter" if isinstance(self.model, PeftModel) else "model"
        # Counted before anything is sharded.
        self.trainable, self.total = PeftModel.get_nb_trainable_parameters(self.model)
        # BertForSequenceClassification takes **kwargs, so the Trainer expects it to divide its loss by the number of
        # items in the batch. It does not, and the loss would be multiplied by the processes and accumulated steps.
        self.model_accepts_loss_kwargs = False
        if self.args.early_stopping_patience is not None:
            self.add_callback(EarlyStoppingCallback(self.args.early_stopping_patience))

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> TrainOutput:
        """As Trainer.train, after a word on what is trained."""
        if self.args.should_log:
            share = self.trainable / self.total
            print(f"trainable parameters: {self.trainable:,} of {self.total:,} ({share:.2%})")
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """As Trainer.training_step.

        Raises:
            RecipeError: If the loss is no number, from which no training recovers.
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
        """Saves the kept epoch's weights and the tokenizer in the folder "adapter" or, of a whole model, "model"."""
        self.save_model(f"{self.args.output_dir}/{self.saved_as}")

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int] | None:
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            return _OrderOfEpoch(sampler, lambda: self.args.seed + int(self.state.epoch or 0))
        return sampler

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # It is the last that all processes write. Only when they have, the main one writes trainer_state.json and
        # deletes older checkpoints, so that a crash at any moment leaves a whole one.
        self.accelerator.wait_for_everyone()

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """As Trainer.predict, but row by row: length grouping would shuffle what is predicted, too."""
        strategy = self.args.train_sampling_strategy
        self.args.train_sampling_strategy = "sequential"
        try:
            return super().predict(*args, **kwargs)
        finally:
            self.args.train_sampling_strategy = strategy


class _OrderOfEpoch(Sampler[int]):
    """Length grouping in an order that depends on seed and epoch alone, so that a run that goes on from the middle of
    an epoch meets the examples that are left of it, not others."""

    def __init__(self, sampler: LengthGroupedSampler, seed: Callable[[], int]) -> None:
        self._sampler, self._seed = sampler, seed

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        self._sampler.generator = torch.Generator().manual_seed(self._seed())
        return iter(self._sampler)
