"""What 8-bit integers cost: the scores of adapters in both ONNX files, in float32 and in int8.

    python benchmarks/int8_scores.py RUN/adapter ... --table glue/cola/validation.parquet \\
        --columns sentence

The table's column `label` has the numbers of the classes. A line for each adapter has both
accuracies and Matthews correlations, how many predictions differ, and the processor time of int8
relative to that of float32.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from onnxruntime import InferenceSession, SessionOptions
from sklearn.metrics import accuracy_score, matthews_corrcoef
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import houlsby_peft


BATCH = 32


class Model:
    """An ONNX file, run by one thread."""

    def __init__(self, path: Path) -> None:
        options = SessionOptions()
        options.intra_op_num_threads = 1
        self.session = InferenceSession(path, options)
        self.seconds = 0.0

    def predict(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """Return the class of each row."""
        start = time.process_time()
        [logits] = self.session.run(["logits"], batch)
        self.seconds += time.process_time() - start
        classes: np.ndarray = logits.argmax(-1)
        return classes


def predict(
    models: list[Model], tokenizer: PreTrainedTokenizerBase, texts: list[list[str]]
) -> list[np.ndarray]:
    """Return each model's classes of all texts, of which one column or two are given."""
    classes: list[list[np.ndarray]] = [[] for _ in models]
    for start in range(0, len(texts[0]), BATCH):
        parts = [column[start : start + BATCH] for column in texts]
        batch = dict(tokenizer(*parts, padding=True, truncation=True, return_tensors="np"))
        for model, predicted in zip(models, classes, strict=True):
            predicted.append(model.predict(batch))
    return [np.concatenate(predicted) for predicted in classes]


def compare(adapter: str, table: pd.DataFrame, columns: list[str]) -> dict[str, object]:
    """Return what both files of an adapter score, in points, and how often they differ."""
    with tempfile.TemporaryDirectory() as folder:
        files = houlsby_peft.export_onnx(adapter, folder, int8=True)
        models = [Model(path) for path in files]
        tokenizer = AutoTokenizer.from_pretrained(folder)
    float32, int8 = predict(models, tokenizer, [table[column].tolist() for column in columns])
    row: dict[str, object] = {"adapter": adapter}
    for name, score in (("accuracy", accuracy_score), ("matthews", matthews_corrcoef)):
        for precision, predicted in (("float32", float32), ("int8", int8)):
            row[f"{name}_{precision}"] = round(100 * score(table["label"], predicted), 1)
    row |= {"differ": int((float32 != int8).sum()), "rows": len(table)}
    row["time"] = round(models[1].seconds / models[0].seconds, 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapters", nargs="+", help="folders of adapters of one task")
    parser.add_argument("--table", required=True, help="Parquet file with labelled texts")
    parser.add_argument("--columns", nargs="+", required=True, help="one column of texts, or two")
    options = parser.parse_args()
    table = pd.read_parquet(options.table)
    rows = [compare(adapter, table, options.columns) for adapter in options.adapters]
    print(pd.DataFrame(rows).to_csv(index=False), end="")


if __name__ == "__main__":
    main()
