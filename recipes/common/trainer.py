"""transformers' Trainer, with two of its surprises taken out."""

from typing import Any

from transformers import Trainer
from transformers.trainer_utils import PredictionOutput


class RecipeTrainer(Trainer):
    """A Trainer whose loss is the model's, and whose predictions are in the order of the rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # BertForSequenceClassification takes **kwargs, so the Trainer expects it to divide its loss by the number of
        # items in the batch. It does not, and the loss would be multiplied by the processes and accumulated steps.
        self.model_accepts_loss_kwargs = False

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """As Trainer.predict, but row by row: length grouping would shuffle what is predicted, too."""
        strategy = self.args.train_sampling_strategy
        self.args.train_sampling_strategy = "sequential"
        try:
            return super().predict(*args, **kwargs)
        finally:
            self.args.train_sampling_strategy = strategy
