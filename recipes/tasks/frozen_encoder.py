"""Hidden states of an encoder that is not trained, and a linear classifier on them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm
from transformers import (
    AutoModel,
    DataCollatorForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from houlsby_peft.saved.downloads import find_packaged
from run.command import Command
from run.model import find_dtype, load_model


# A strong penalty, as the states are standardized, and as wide as examples are few.
_INVERSE_PENALTY = 0.01

Numbers = NDArray[np.int64]
States = NDArray[np.float32]


def make_classifier() -> Pipeline:
    """Return a logistic regression for each class on standardized states."""
    return make_pipeline(
        StandardScaler(),
        OneVsRestClassifier(LogisticRegression(C=_INVERSE_PENALTY, max_iter=1000)),
    )


def mean_states(states: torch.Tensor, is_token: torch.Tensor) -> torch.Tensor:
    """Return the mean of the states `(rows, tokens, width)` of the tokens: `(rows, width)`."""
    if states.shape[1] != is_token.shape[1]:  # Funnel's last states are fewer than the tokens
        return states.mean(1)
    weights = is_token[:, :, None]
    return (states * weights).sum(1) / weights.sum(1)


@dataclass(frozen=True)
class FrozenEncoder:
    """An encoder that is not trained. The state of a token is its mean over all layers."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int

    @classmethod
    def load(cls, command: Command) -> "FrozenEncoder":
        """Load the encoder that a command names."""
        name, training = find_packaged(command.arguments.model_name), command.training
        model, tokenizer, _ = load_model(AutoModel, name, find_dtype(command, name))
        if model.config.is_encoder_decoder:
            model = model.get_encoder()
        batch_size = training.per_device_eval_batch_size
        return cls(model.eval().to(training.device), tokenizer, batch_size)

    def read_texts(self, tokens: Dataset) -> States:
        """Return the mean state of the tokens of each text, of shape (texts, width)."""
        numbers, means = [], []
        for rows, batch, states in self._read(tokens):
            numbers.append(rows)
            means.append(mean_states(states, batch["attention_mask"]))
        return torch.cat(means)[np.argsort(np.concatenate(numbers))].numpy()

    def read_words(self, tokens: Dataset) -> tuple[Numbers, States]:
        """Return the numbers of the words in ascending order, and their states, of shape
        (words, width).

        In the `labels` of the tokens, the first piece of a word has the word's number; other tokens
        have a negative one.
        """
        numbers, states_of_words = [], []
        for _, batch, states in self._read(tokens):
            is_word = batch["labels"] >= 0
            numbers.append(batch["labels"][is_word])
            states_of_words.append(states[is_word])
        ascending, order = torch.cat(numbers).sort()
        return ascending.numpy(), torch.cat(states_of_words)[order].numpy()

    @torch.inference_mode()
    def _read(self, tokens: Dataset) -> Iterator[tuple[Numbers, Any, torch.Tensor]]:
        """Yield batches of rows of similar lengths: their numbers, their tokens, and the states of
        these, of shape (rows, tokens, width).
        """
        inputs = set(self.tokenizer.model_input_names) & set(tokens.column_names)
        used = tokens.select_columns(sorted({*inputs, "labels"} & {*tokens.column_names}))
        collate = DataCollatorForTokenClassification(self.tokenizer)  # which pads labels as well
        by_length = np.argsort(tokens["length"])
        starts = range(0, len(tokens), self.batch_size)
        for start in tqdm(starts, desc="Reading", unit="batch", disable=None):
            rows = by_length[start : start + self.batch_size]
            batch = collate(used.select(rows).to_list())
            on_device = {name: batch[name].to(self.model.device) for name in inputs}
            outputs = self.model(**on_device, output_hidden_states=True)
            shape = outputs.last_hidden_state.shape  # Funnel's middle layers have fewer tokens
            layers = [layer.float() for layer in outputs.hidden_states if layer.shape == shape]
            states = sum(layers) / len(layers)
            yield rows, batch, states.cpu()
