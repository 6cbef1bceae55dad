"""What the tests of the recipes share: a tiny encoder on disk, and a run of a recipe in this
process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertTokenizer

from demo import minimal_pairs
from run.training_arguments import RecipeTrainingArguments
from tasks.classification import ClassificationArguments, ClassificationTask, load_task
from tiny_models import tiny_bert


def save_tiny_encoder(
    folder: Path, seed: int = 0, words: list[str] | None = None, **changes: object
) -> Path:
    """Save a tiny random BERT and a tokenizer with the given words, or the minimal pairs' words."""
    folder.mkdir(parents=True, exist_ok=True)
    if words is None:
        sentences = [sentence for rows in minimal_pairs().values() for sentence in rows["sentence"]]
        words = sorted(
            {word for sentence in sentences for word in sentence.lower().rstrip(".").split()}
        )
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]
    tiny_bert(
        seed, vocab_size=len(vocabulary), initializer_range=0.2, **changes
    ).bert.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def start(recipe: ModuleType, *words: object) -> None:
    """Start a recipe as from the command line."""
    with patch.object(sys, "argv", [f"{recipe.__name__}.py", *map(str, words)]):
        recipe.main()


def run(recipe: ModuleType, **flags: object) -> None:
    """Run a recipe on the CPU with flags; the items of a list are words of their own."""
    words: list[object] = ["--use_cpu"]
    for name, value in flags.items():
        words.append(f"--{name}")
        words += value if isinstance(value, list | tuple) else [value]
    start(recipe, *words)


def load_texts(data: object, **options: object) -> ClassificationTask:
    """The task that text_classification.py makes of texts with labels."""
    arguments = ClassificationArguments(data=str(data), **options)
    return load_task(arguments, RecipeTrainingArguments(use_cpu=True))


def labels_of(task: ClassificationTask) -> list[str]:
    """The labels of the training and validation examples, in the order of their texts."""
    examples = []
    for split in ("train", "validation"):
        rows = task.splits[split]
        texts = zip(*(rows[name] for name in task.text_columns), strict=True)
        examples += zip(texts, task.kind.decode(rows["label"]), strict=True)
    return [label for _, label in sorted(examples)]


def results_of(folder: Path) -> dict:
    """The content of a run's results.json."""
    return json.loads((folder / "results.json").read_text())


def logits_of(
    encoder: Path, adapter: Path, num_labels: int, *texts: Iterable[str]
) -> NDArray[np.float32]:
    """Outputs of a saved classifier's adapter on freshly loaded base weights, in plain PyTorch."""
    model = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=num_labels)
    model = PeftModel.from_pretrained(model, adapter).eval()
    batch = AutoTokenizer.from_pretrained(adapter)(
        *map(list, texts), padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        return model(**batch).logits.numpy()


def write(path: Path, **columns: object) -> Path:
    """Writes a table in the format of the path's extension, and its folder."""
    frame = pd.DataFrame(columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False)
    return path
