r"""Few examples: adapters beside full fine-tuning, a logistic regression and SetFit, with MiniLM.

    nice -n 19 python benchmarks/small_data.py --data_dir additional --runs runs/small_data
    python benchmarks/small_data.py --figure docs/figures/small_data.png

Each run reads 100 or 500 examples that are drawn from a public data set, and is scored on test
rows. The recipe holds a fifth of the examples back, to score itself, unless --do_train is its only
task; the logistic regression and SetFit train on all of them. Finished runs are rows of
docs/runs/small_data.csv; started again, the script does what is left. SetFit is of the package
`setfit`, with 20 pairs of each kind per example, as in its paper (Tunstall et al. 2022): its
default, all pairs, takes hours for 500 examples.
"""

import argparse
import csv
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import houlsby_peft
from houlsby_peft.saved.downloads import find_packaged


ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs/runs/small_data.csv"
# The data sets of Houlsby et al. 2019, table 2.
TITLES = {
    "crowdflower_airline": "airline tweets",
    "news_aggregator": "news headlines",
    "crowdflower_corporate_messaging": "corporate messages",
}
TASKS = tuple(TITLES)
ROWS = (100, 500)
# Both compute in bfloat16; the weights that full fine-tuning trains are float32. Their rates are
# those of benchmarks/scores.py.
RATE_OF_ADAPTERS = 1e-3
ADAPTERS = ["--base_dtype", "bfloat16", "--learning_rate", str(RATE_OF_ADAPTERS)]
FULL = ["--method", "full", "--base_dtype", "float32", "--bf16", "true", "--learning_rate", "1e-4"]
WITHOUT_PAIRS = ["--contrastive_weight", "0"]  # the default with 500
FLAGS = {
    "adapters": ADAPTERS,
    "full fine-tuning": FULL,
    "adapters, one loss": ADAPTERS + WITHOUT_PAIRS,
    "full fine-tuning, one loss": FULL + WITHOUT_PAIRS,
    "adapters, all examples": [*ADAPTERS, "--do_train", "true", "--max_steps", "300"],
}
SETFIT, SETFIT_ON_ADAPTERS = "SetFit", "SetFit, adapters"
METHODS = ("logistic regression", *FLAGS, SETFIT, SETFIT_ON_ADAPTERS)
MOST_TEST_ROWS = 1000


class Run(NamedTuple):
    draw: int
    rows: int
    task: str
    method: str


class Score(NamedTuple):
    accuracy: float
    test_rows: int
    seconds: float


def draw(run: Run, data_dir: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the examples of a run and the test texts, with columns `text` and `label_text`."""
    splits = [
        pd.read_parquet(data_dir / run.task / f"{name}.parquet") for name in ("train", "test")
    ]
    train, test = (split[["text", "label_text"]] for split in splits)
    test = test.sample(min(len(test), MOST_TEST_ROWS), random_state=0)
    return train.sample(run.rows, random_state=run.draw), test


def train_by_recipe(
    run: Run, train: pd.DataFrame, test: pd.DataFrame, folder: Path, flags: list[str]
) -> np.ndarray:
    """Train with the recipe's defaults, and return the class of each test text."""
    folder.mkdir(parents=True, exist_ok=True)
    file, output = folder / "train.csv", folder / "run"
    train.to_csv(file, index=False)
    command = [
        sys.executable, str(ROOT / "recipes/text_classification.py"), "--data", str(file),
        "--model_name", "minilm", "--text_columns", "text", "--label_columns", "label_text",
        "--seed", str(run.draw), "--baseline", "false", "--use_cpu",
        "--output_dir", str(output), *flags,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    if "full" not in flags:
        predictions = houlsby_peft.load(output).predict(list(test["text"]))
        return np.array([prediction["label"] for prediction in predictions])
    return classify_with_whole_model(output / "model", list(test["text"]))


def classify_with_whole_model(folder: Path, texts: list[str]) -> np.ndarray:
    from transformers import pipeline

    classify = pipeline("text-classification", str(folder), batch_size=32)
    predictions = classify(texts, truncation=True)
    return np.array([prediction["label"] for prediction in predictions])


def fit_logistic_regression(train: pd.DataFrame, test: pd.DataFrame) -> np.ndarray:
    """Fit the mean of MiniLM's last states, and return the class of each test text."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    words = Transformer(find_packaged("minilm"), max_seq_length=128)
    encoder = SentenceTransformer(modules=[words, Pooling(words.get_word_embedding_dimension())])
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    classifier.fit(encoder.encode(list(train["text"])), train["label_text"])
    return classifier.predict(encoder.encode(list(test["text"])))


def train_setfit(run: Run, train: pd.DataFrame, test: pd.DataFrame, folder: Path) -> np.ndarray:
    """Train the encoder to tell pairs of classes apart, then a head; return the classes."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    model = SetFitModel.from_pretrained(find_packaged("minilm"))
    arguments = TrainingArguments(
        output_dir=str(folder), num_iterations=20, seed=run.draw, report_to="none"
    )
    if run.method == SETFIT_ON_ADAPTERS:
        config = houlsby_peft.HoulsbyConfig(task_type="FEATURE_EXTRACTION", r=64)
        model.model_body.add_adapter(config)
        arguments.body_learning_rate = (RATE_OF_ADAPTERS, RATE_OF_ADAPTERS)
    names = {"text": "text", "label_text": "label"}
    examples = Dataset.from_pandas(train.rename(columns=names), preserve_index=False)
    Trainer(model=model, args=arguments, train_dataset=examples).train()
    return np.array(model.predict(list(test["text"])))


def measure(run: Run, arguments: argparse.Namespace) -> Score:
    train, test = draw(run, arguments.data_dir)
    folder = arguments.runs / "_".join(map(str, run)).replace(" ", "_")
    began = time.monotonic()
    if run.method in FLAGS:
        predicted = train_by_recipe(run, train, test, folder, FLAGS[run.method])
    elif run.method in (SETFIT, SETFIT_ON_ADAPTERS):
        predicted = train_setfit(run, train, test, folder)
    else:
        predicted = fit_logistic_regression(train, test)
    accuracy = float((predicted == test["label_text"].to_numpy()).mean())
    return Score(accuracy, len(test), time.monotonic() - began)


def read_finished() -> set[Run]:
    if not TABLE.exists():
        return set()
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {Run(int(row["draw"]), int(row["rows"]), row["task"], row["method"]) for row in rows}


def append(run: Run, score: Score) -> None:
    is_new = not TABLE.exists()
    with TABLE.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow([*Run._fields, *Score._fields])
        writer.writerow([*run, f"{score.accuracy:.4f}", score.test_rows, round(score.seconds)])


def draw_figure(path: Path) -> None:
    """Draw the accuracy of each method by the number of examples: a panel for each data set, the
    mean of the draws as a dash or a line, and each draw as a point.
    """
    scores = pd.read_csv(TABLE)
    scores = scores[scores.rows.isin(ROWS)]
    figure, panels = plt.subplots(
        1, len(TASKS), figsize=(7, 2.9), sharey=True, layout="constrained"
    )
    for panel, task in zip(panels, TASKS, strict=True):
        of_task = scores[scores.task == task]
        for number, (method, of_method) in enumerate(of_task.groupby("method", sort=False)):
            color, means = f"C{number}", of_method.groupby("rows").accuracy.mean()
            # Beside each other, so that no point hides another.
            shift = 0.06 * (number - len(METHODS) / 2)
            panel.plot(
                [ROWS.index(rows) + shift for rows in means.index],
                means,
                color=color,
                label=method,
                marker="_",
                markersize=9,
                linewidth=1,
            )
            places = of_method.rows.map(ROWS.index) + shift
            panel.scatter(places, of_method.accuracy, color=color, s=7)
        panel.set(title=TITLES[task], xlabel="training examples")
        panel.set_xticks(range(len(ROWS)), map(str, ROWS))
    panels[0].set_ylabel("accuracy on test texts")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data_dir", type=Path, default=Path("additional"))
    parser.add_argument("--runs", type=Path, default=Path("runs/small_data"))
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--figure", type=Path, help="draw what is measured into this file")
    arguments = parser.parse_args()
    if arguments.figure is not None:
        draw_figure(arguments.figure)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    finished = read_finished()
    for cell in itertools.product(range(3), arguments.rows, TASKS, arguments.methods):
        run = Run(*cell)
        is_default = run.rows == 500 and run.method.endswith("one loss")
        if run not in finished and not is_default:
            score = measure(run, arguments)
            print(*run, f"{score.accuracy:.3f}", f"{score.seconds:.0f} s", flush=True)
            append(run, score)


if __name__ == "__main__":
    main()
