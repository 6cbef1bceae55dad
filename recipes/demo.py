"""A run without data: its settings, its test scores beside a linear probe's, and the way to a real task."""

import numpy as np
from common.linear_probe import probe
from common.model import MINILM
from datasets import Dataset
from minimal_pairs import PHENOMENA
from transformers import Trainer


# The papers' three learning rates are for far more steps. Both sentences of a pair are in one batch this way, where
# what they differ in shows best: a shuffle, or the grouping by length, needs twice the steps.
DEFAULTS = {
    "model_name": MINILM,
    "learning_rate": 1e-3,
    "num_train_epochs": 4,
    "train_sampling_strategy": "sequential",
}


def compare_with_probe(trainer: Trainer, splits: dict[str, Dataset]) -> dict[str, dict[str, float]]:
    """Test accuracies of the trained model and of a linear probe on the frozen encoder: {"all" or phenomenon:
    {"adapter": accuracy, "probe": accuracy}}. Every process of a distributed run must call it."""
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


def explain(scores: dict[str, dict[str, float]], splits: dict[str, Dataset], trainable: int) -> str:
    """What the run did, what came out, and how to run a real task."""
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

A real task, from the Hub, with BERT-base:  accelerate launch recipes/glue.py --task mrpc
From your own files, with this encoder:     accelerate launch recipes/glue.py --task mrpc --data_dir FOLDER \\
                                                --model_name minilm --train_pooler true --learning_rate 1e-3
                                            (reads FOLDER/mrpc/train.parquet, ...)
"""
