"""transformers' Trainer, with some of its surprises taken out."""

import time
from typing import Any

from peft import PeftModel
from transformers import Trainer
from transformers.trainer_utils import PredictionOutput, TrainOutput

from common.checkpoints import LAST, last_checkpoint


class RecipeTrainer(Trainer):
    """A Trainer whose loss is the model's, whose predictions are in the order of the rows, and whose checkpoints tell
    whether they are whole.

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
        if self.args.should_log:
            share = self.trainable / self.total
            print(f"trainable parameters: {self.trainable:,} of {self.total:,} ({share:.2%})")
        # BertForSequenceClassification takes **kwargs, so the Trainer expects it to divide its loss by the number of
        # items in the batch. It does not, and the loss would be multiplied by the processes and accumulated steps.
        self.model_accepts_loss_kwargs = False

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """As Trainer.train; "last" goes on from the last whole checkpoint in the output folder, if there is one."""
        if resume_from_checkpoint == LAST:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def save_trained(self) -> None:
        """Saves the kept epoch's weights and the tokenizer in the folder "adapter" or, of a whole model, "model"."""
        self.save_model(f"{self.args.output_dir}/{self.saved_as}")

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
