"""The run without data: its settings, its test scores beside those of a linear probe, and how to run a real task."""

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from peft import PeftModel
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, Trainer

from common.arguments import MINILM
from common.minimal_pairs import PHENOMENA


# The papers' three learning rates are for far more steps. In this order both sentences of a pair are in one batch,
# where their difference shows best; shuffling or length grouping needs twice the steps.
DEFAULTS = {
    "model_name": MINILM,
    "train_pooler": False,  # the linear probe is on the [CLS] vectors before it
    "learning_rate": 1e-3,
    "num_train_epochs": 4,
    "train_sampling_strategy": "sequential",
}


def compare_with_probe(trainer: Trainer, splits: dict[str, Dataset]) -> dict[str, dict[str, float]]:
    """Return the test accuracies of the trained model and of a linear probe on the frozen encoder, as {"all" or
    phenomenon: {"adapter": accuracy, "probe": accuracy}}. Every process of a distributed run must call it."""
    test = splits["test"]
    labels, phenomena = np.asarray(test["label"]), np.asarray(test["phenomenon"])
    right = {
        "adapter": trainer.predict(test).predictions.argmax(-1) == labels,
        "probe": probe(trainer.model, splits["train"], test, trainer.data_collator) == labels,
    }
    rows = {name: phenomena == name for name in PHENOMENA} | {"all": np.full(len(test), True)}
    return {
        name: {method: float(hits[chosen].mean()) for method, hits in right.items()} for name, chosen in rows.items()
    }


@torch.no_grad()
def cls_vectors(model: PeftModel, data: Dataset, collator: DataCollatorWithPadding) -> NDArray[np.float32]:
    """Return the encoder's last hidden state at the first token, without adapters: (rows of data, hidden size)."""
    model.eval()
    encoder = model.get_base_model().base_model
    inputs = data.select_columns([name for name in collator.tokenizer.model_input_names if name in data.column_names])
    with model.disable_adapter():
        batches = [
            encoder(**batch.to(model.device)).last_hidden_state[:, 0].float().cpu()
            for batch in DataLoader(inputs, batch_size=64, collate_fn=collator)
        ]
    return torch.cat(batches).numpy()


def probe(model: PeftModel, train: Dataset, test: Dataset, collator: DataCollatorWithPadding) -> NDArray[np.int64]:
    """Fit a logistic regression on the [CLS] vectors of `train`; return its classes for the rows of `test`."""
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    classifier.fit(cls_vectors(model, train, collator), train["label"])
    return classifier.predict(cls_vectors(model, test, collator))


def explain(scores: dict[str, dict[str, float]], splits: dict[str, Dataset], trainable: int) -> str:
    """Return what the run did, its scores, and how to run a real task."""
    width = max(map(len, scores))
    table = "\n".join(
        f"  {name:<{width}}  {score['adapter']:>8.1%}  {score['probe']:>12.1%}" for name, score in scores.items()
    )
    right, wrong = splits["test"][:2]["sentence"]
    return f"""
What this run did. Without data or network, it wrote {sum(map(len, splits.values())):,} English sentences, in pairs:
  {right}
  {wrong}
It trained {trainable:,} parameters (adapters, layer norms and head) on a frozen encoder to tell right from wrong.
The test sentences share no noun, verb, adjective or adverb with the training sentences.

Test accuracy (chance: 50%). The linear probe is a logistic regression on the frozen encoder's [CLS] vectors:
  {"":<{width}}   adapter  linear probe
{table}

A real task, from the Hub, with BERT-base:  python recipes/glue.py --task mrpc
From your own files, with this encoder:     python recipes/glue.py --task mrpc --data_dir FOLDER \\
                                                --model_name minilm --train_pooler true --learning_rate 1e-3
                                            (reads FOLDER/mrpc/train.parquet, ...)"""
