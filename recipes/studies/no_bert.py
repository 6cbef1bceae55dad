"""Classify texts without BERT: TF-IDF with linear models and gradient boosting, searched on
    validation.

    python recipes/studies/no_bert.py --data additional/sms_spam python recipes/studies/no_bert.py --data
    additional/sms_spam additional/20_newsgroups --n_points 50 --n_jobs 8

A baseline for the 17 classification tasks of Houlsby et al. 2019 (paper_tasks.py). Their "no BERT"
column is another search, over up to 10,000 neural networks with pretrained word embeddings for each
task. Here, scikit-learn makes for each model a random search over its settings and those of TF-IDF,
on words or on characters. Validation chooses the model and its settings by accuracy; the chosen
one, trained on the training split alone, is scored on the test split. Data are read as by
text_classification.py. Writes TASK/no_bert/results.json into the output folder, and skips the tasks
that have it; study_table.py shows them beside the runs in the same folder.
"""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import loguniform
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score
from sklearn.model_selection import PredefinedSplit, RandomizedSearchCV
from sklearn.pipeline import Pipeline
from sklearn.svm import LinearSVC
from transformers import TrainingArguments

import recipes_path  # noqa: F401
from common.classification import ClassificationArguments, load_task
from common.edge import RecipeError, end_with_one_line
from common.labels import SINGLE
from common.run import RESULTS_FILE, read_object, write_json


TFIDF = {"tfidf__min_df": [1, 2, 5], "tfidf__sublinear_tf": [False, True]}
NGRAMS = (
    {"tfidf__analyzer": ["word"], "tfidf__ngram_range": [(1, 1), (1, 2)]},
    {"tfidf__analyzer": ["char_wb"], "tfidf__ngram_range": [(2, 4), (2, 5)]},
)
# Gradient boosting needs dense features, so latent semantic analysis comes before it.
MODELS: dict[str, tuple[list[tuple[str, Any]], Mapping[str, Any]]] = {
    "logistic_regression": (
        [("model", LogisticRegression(max_iter=1000))],
        {"model__C": loguniform(1e-1, 1e3), "model__class_weight": [None, "balanced"]},
    ),
    "linear_svm": (
        [("model", LinearSVC())],
        {"model__C": loguniform(1e-3, 1e1), "model__class_weight": [None, "balanced"]},
    ),
    "gradient_boosting": (
        [("svd", TruncatedSVD()), ("model", HistGradientBoostingClassifier(max_iter=200))],
        {"svd__n_components": [50, 100], "model__learning_rate": loguniform(3e-2, 3e-1)},
    ),
}


def main() -> None:
    """Read the command line, search for each task, print and write the scores."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        help="Folders of tasks, or names of data sets on the Hub.",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="Models.")
    parser.add_argument("--n_points", type=int, default=20, help="Settings tried for each model.")
    parser.add_argument(
        "--max_train_samples", type=int, help="Train on a random sample of this many examples."
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of the search and of the models.")
    parser.add_argument("--n_jobs", type=int, default=1, help="Settings tried at a time.")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/no_bert"), help="Folder of a folder per task."
    )
    arguments = parser.parse_args()
    for data in arguments.data:
        path = arguments.output_dir / Path(data).name / "no_bert" / RESULTS_FILE
        names = ("models", "n_points", "max_train_samples", "seed")
        asked = {name: getattr(arguments, name) for name in names} | {"data": data}
        results = read_object(path)
        if results is None:
            results = score_task(data, arguments) | {"arguments": asked}
            write_json(path, results)
        elif results["arguments"] != asked:
            raise RecipeError(
                f"{path} holds the scores of another search. Give another --output_dir."
            )
        test = "-" if results["test"] is None else f"{results['test']['accuracy']:.4f}"
        print(
            f"{results['task']}: {results['model']}, accuracy {results['best_score']:.4f} (validation), {test} (test)"
        )


def score_task(data: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a task, as those of a run: the chosen model, its settings and its
    accuracies.
    """
    start = time.perf_counter()
    task = load_task(
        ClassificationArguments(
            data=data, max_train_samples=arguments.max_train_samples, keep_repeated=True
        ),
        TrainingArguments(do_eval=True, use_cpu=True),
    )
    if task.kind.problem_type != SINGLE:
        raise RecipeError(
            f"The baseline is for one class per text; {data} is a {task.kind.problem_type}."
        )
    texts = {
        name: [
            "\n".join(parts)
            for parts in zip(*(split[column] for column in task.text_columns), strict=True)
        ]
        for name, split in task.splits.items()
    }
    classes = {
        name: split["label"] for name, split in task.splits.items() if "label" in split.column_names
    }
    both = [[*part["train"], *part["validation"]] for part in (texts, classes)]
    # Each setting is trained on the training split (-1: always) and scored on validation.
    fold = PredefinedSplit(np.repeat([-1, 0], [len(texts["train"]), len(texts["validation"])]))
    searches = {
        model: RandomizedSearchCV(
            make_model(model, arguments.seed), [{**TFIDF, **MODELS[model][1], **kind} for kind in NGRAMS],
            n_iter=arguments.n_points, scoring="accuracy", cv=fold, refit=False, n_jobs=arguments.n_jobs,
            random_state=arguments.seed, error_score="raise",
        ).fit(*both)
        for model in arguments.models
    }  # fmt: skip
    chosen = max(searches, key=lambda model: float(searches[model].best_score_))
    settings, best = searches[chosen].best_params_, float(searches[chosen].best_score_)
    test = None
    if "test" in classes:
        model = (
            make_model(chosen, arguments.seed)
            .set_params(**settings)
            .fit(texts["train"], classes["train"])
        )
        test = {"accuracy": float(accuracy_score(classes["test"], model.predict(texts["test"])))}
    return {
        "task": Path(data).name, "method": "no_bert", "model": chosen, "settings": settings, "seed": arguments.seed,
        "chosen_by": "accuracy", "best_score": best, "best_scores": {"accuracy": best}, "test": test, "epochs": [],
        "trainable_parameters": 0, "total_parameters": 1, "labels": task.kind.names,
        "models": {model: one.best_score_ for model, one in searches.items()},
        "dataset": {"rows": {name: len(rows) for name, rows in texts.items()}},
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def make_model(name: str, seed: int) -> Pipeline:
    """Return TF-IDF and a model with their default settings."""
    steps = Pipeline([("tfidf", TfidfVectorizer()), *MODELS[name][0]])
    return steps.set_params(
        **{key: seed for key in steps.get_params() if key.endswith("__random_state")}
    )


if __name__ == "__main__":
    end_with_one_line(main)
