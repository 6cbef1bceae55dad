"""The scores of linear models on MiniLM's frozen states, beside those of docs/results.md.

    python benchmarks/linear_probe.py --data_dir glue

A text or pair is the mean of its tokens' last hidden states. On them stands a logistic regression
with standardized features, or for STS-B a ridge regression, whose penalty is chosen by
cross-validation on the training examples. Nothing is random, so one run says all. It writes
docs/runs/linear_probe.csv.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.metrics import accuracy_score, f1_score, make_scorer, matthews_corrcoef
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoModel, AutoTokenizer

from houlsby_peft.saved.downloads import find_packaged


TABLE = Path(__file__).parents[1] / "docs/runs/linear_probe.csv"
COLUMNS = {
    "cola": ["sentence"],
    "mrpc": ["sentence1", "sentence2"],
    "stsb": ["sentence1", "sentence2"],
    "rte": ["sentence1", "sentence2"],
    "sst2": ["sentence"],
}
SCORES = {
    "cola": matthews_corrcoef,
    "mrpc": f1_score,
    "rte": accuracy_score,
    "sst2": accuracy_score,
}
MOST_EXAMPLES = 10_000
PENALTIES = np.logspace(-4, 1, 6)


class Encoder:
    """MiniLM, which is not trained."""

    def __init__(self) -> None:
        folder = find_packaged("minilm")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def read(self, examples: pd.DataFrame, columns: list[str]) -> np.ndarray:
        """Return the mean state of each row's tokens, `(rows, width)`."""
        lengths = examples[columns].map(len).sum(axis=1).to_numpy()
        means = np.zeros((len(examples), self.model.config.hidden_size), np.float32)
        for rows in np.split(lengths.argsort(), range(64, len(examples), 64)):
            texts = [list(examples[column].iloc[rows]) for column in columns]
            batch = self.tokenizer(
                *texts, padding=True, truncation=True, max_length=128, return_tensors="pt"
            )
            is_token = batch["attention_mask"][:, :, None]
            states = self.model(**batch).last_hidden_state
            means[rows] = (states * is_token).sum(1) / is_token.sum(1)
        return means


def score(task: str, encoder: Encoder, data_dir: Path) -> float:
    """Return the score on validation, of a linear model of all training examples."""
    train = pd.read_parquet(data_dir / task / "train.parquet")
    validation = pd.read_parquet(data_dir / task / "validation.parquet")
    if len(train) > MOST_EXAMPLES:
        train = train.sample(MOST_EXAMPLES, random_state=0)
    columns = COLUMNS[task]
    states, targets = encoder.read(train, columns), train["label"].to_numpy()
    if task == "stsb":
        linear = make_pipeline(StandardScaler(), RidgeCV(1 / PENALTIES))
    else:
        scorer = make_scorer(SCORES[task])
        linear = make_pipeline(
            StandardScaler(), LogisticRegressionCV(Cs=PENALTIES, scoring=scorer, max_iter=1000)
        )
    predicted = linear.fit(states, targets).predict(encoder.read(validation, columns))
    expected = validation["label"].to_numpy()
    if task == "stsb":
        return float(spearmanr(expected, predicted).statistic)
    return float(SCORES[task](expected, predicted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data_dir", type=Path, default=Path("glue"))
    arguments = parser.parse_args()
    encoder = Encoder()
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["task", "score", "seconds"])
        for task in COLUMNS:
            began = time.monotonic()
            value = 100 * score(task, encoder, arguments.data_dir)
            writer.writerow([task, f"{value:.1f}", round(time.monotonic() - began)])
            print(f"{task} {value:.1f}", flush=True)


if __name__ == "__main__":
    main()
