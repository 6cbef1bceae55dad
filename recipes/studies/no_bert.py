"""Classify texts without BERT: TF-IDF with linear models and gradient boosting.

    python recipes/studies/no_bert.py --data additional/sms_spam
    python recipes/studies/no_bert.py --data additional/* --n_points 50 --n_jobs 8

A baseline for the 17 classification tasks of Houlsby et al. 2019 (paper_tasks.py). Their "no BERT"
column is another search, over up to 10,000 neural networks with pretrained word embeddings for each
task. Here, scikit-learn makes for each model a random search over its settings and those of TF-IDF,
on words or on characters. Validation chooses the model and its settings by accuracy. The chosen
one, trained on the training split alone, is scored on the test split.

Data are read as by text_classification.py. Writes TASK/no_bert/results.json into the output folder,
and skips the tasks that have it; study_table.py shows them beside the runs in the same folder.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from scipy.sparse import spmatrix
from scipy.stats import loguniform
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score
from sklearn.model_selection import PredefinedSplit, RandomizedSearchCV
from sklearn.pipeline import Pipeline
from sklearn.svm import LinearSVC

import recipes_path  # noqa: F401
from data.labels import SINGLE
from run.edge import RecipeError, end_with_one_line
from run.files import read_object, write_json
from run.run import RESULTS_FILE
from run.training_arguments import RecipeTrainingArguments
from tasks.classification import ClassificationArguments, load_task


TFIDF = {"tfidf__min_df": [1, 2, 5], "tfidf__sublinear_tf": [False, True]}
NGRAMS = (
    {"tfidf__analyzer": ["word"], "tfidf__ngram_range": [(1, 1), (1, 2)]},
    {"tfidf__analyzer": ["char_wb"], "tfidf__ngram_range": [(2, 4), (2, 5)]},
)


class SemanticAnalysis(TruncatedSVD):  # type: ignore[misc]  # scikit-learn has no types
    """Latent semantic analysis, which takes all features where there are fewer than components."""

    n_components: int

    def fit_transform(self, X: spmatrix, y: object = None) -> NDArray[np.float64]:
        self.n_components = min(self.n_components, X.shape[1])
        reduced: NDArray[np.float64] = super().fit_transform(X, y)
        return reduced


LINEAR = {"model__class_weight": [None, "balanced"]}
# The steps after TF-IDF, and what is searched.
MODELS: dict[str, tuple[list[tuple[str, Any]], Mapping[str, Any]]] = {
    "logistic_regression": (
        [("model", LogisticRegression(max_iter=1000))],
        {"model__C": loguniform(1e-1, 1e3), **LINEAR},
    ),
    "linear_svm": ([("model", LinearSVC())], {"model__C": loguniform(1e-3, 1e1), **LINEAR}),
    # Gradient boosting needs dense features.
    "gradient_boosting": (
        [("svd", SemanticAnalysis()), ("model", HistGradientBoostingClassifier(max_iter=200))],
        {"svd__n_components": [50, 100], "model__learning_rate": loguniform(3e-2, 3e-1)},
    ),
}
# The flags that change the scores.
SEARCH = ("models", "n_points", "max_train_samples", "seed")


def main() -> None:
    """Read the command line, search for each task, print and write the scores."""
    arguments = make_parser().parse_args()
    for data in arguments.data:
        path = arguments.output_dir / Path(data).name / "no_bert" / RESULTS_FILE
        search = {name: getattr(arguments, name) for name in SEARCH} | {"data": data}
        results = read_object(path)
        if results is None:
            results = score_task(data, arguments) | {"arguments": search}
            write_json(path, results)
        elif results["arguments"] != search:
            raise RecipeError(
                f"{path} holds the scores of another search. Give another --output_dir."
            )
        test = f"{results['test']['accuracy']:.4f}" if results["test"] else "-"
        print(
            f"{results['task']}: {results['model']}, accuracy {results['best_score']:.4f} "
            f"(validation), {test} (test)"
        )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data", nargs="+", required=True, help="Folders of tasks, or data sets on the Hub.")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), help="Models.")
    add("--n_points", type=int, default=20, help="Settings tried for each model.")
    add("--max_train_samples", type=int, help="Train on a random sample of this many examples.")
    add("--seed", type=int, default=0, help="Seed of the search and of the models.")
    add("--n_jobs", type=int, default=1, help="Settings tried at a time.")
    add("--output_dir", type=Path, default=Path("runs/no_bert"), help="A folder per task is there.")
    return parser


@dataclass
class Split:
    """The texts of a split, and their classes; none for a test split without labels."""

    texts: list[str]
    classes: Sequence[int] | None


def score_task(data: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a task, as those of a run.

    They have the chosen model, its settings and its accuracies: on the test split, if it has
    labels, after training on the training split alone.
    """
    start = time.perf_counter()
    task = load_task(
        ClassificationArguments(
            data=data, max_train_samples=arguments.max_train_samples, keep_repeated=True
        ),
        RecipeTrainingArguments(do_eval=True, use_cpu=True),
    )
    if task.kind.problem_type != SINGLE:
        raise RecipeError(
            f"The baseline is for one class per text; {data} is a {task.kind.problem_type}."
        )
    splits = {name: read_split(split, task.text_columns) for name, split in task.splits.items()}
    searches = {model: search(model, splits, arguments) for model in arguments.models}
    scores = {model: float(of_model.best_score_) for model, of_model in searches.items()}
    best = max(scores, key=lambda model: scores[model])
    settings = searches[best].best_params_
    on_test, constant, test = None, None, splits.get("test")
    if test is not None and test.classes is not None:
        model = make_model(best, arguments.seed).set_params(**settings)
        model.fit(splits["train"].texts, splits["train"].classes)
        predicted = model.predict(test.texts)
        on_test = {"accuracy": float(accuracy_score(test.classes, predicted))}
        if len({*predicted}) == 1:
            constant = task.kind.names[predicted[0]]
    return {
        "task": Path(data).name,
        "method": "no_bert",
        "model": best,
        "settings": settings,
        "seed": arguments.seed,
        "chosen_by": "accuracy",
        "best_score": scores[best],
        "best_scores": {"accuracy": scores[best]},
        "test": on_test,
        "constant": constant,
        "epochs": [],
        "trainable_parameters": 0,
        "total_parameters": 1,
        "labels": task.kind.names,
        "models": scores,
        "dataset": {"rows": {name: len(split.texts) for name, split in splits.items()}},
        "seconds": round(time.perf_counter() - start, 1),
    }


def read_split(data: Dataset, text_columns: Sequence[str]) -> Split:
    """Return a split with the parts of a pair of texts on lines of their own."""
    rows = data.select_columns(list(text_columns)).to_pandas()
    texts = rows.agg("\n".join, axis=1).tolist()
    return Split(texts, data["label"] if "label" in data.column_names else None)


def search(
    model: str, splits: Mapping[str, Split], arguments: argparse.Namespace
) -> RandomizedSearchCV:
    """Return the finished search over a model's settings.

    Each setting is trained on the training split and scored on validation.
    """
    train, validation = splits["train"], splits["validation"]
    assert train.classes is not None
    assert validation.classes is not None
    # -1: a row that is always trained on.
    fold = PredefinedSplit(np.repeat([-1, 0], [len(train.texts), len(validation.texts)]))
    return RandomizedSearchCV(
        make_model(model, arguments.seed),
        [{**TFIDF, **MODELS[model][1], **ngrams} for ngrams in NGRAMS],
        n_iter=arguments.n_points,
        scoring="accuracy",
        cv=fold,
        refit=False,
        n_jobs=arguments.n_jobs,
        random_state=arguments.seed,
        error_score="raise",
    ).fit([*train.texts, *validation.texts], [*train.classes, *validation.classes])


def make_model(name: str, seed: int) -> Pipeline:
    """Return TF-IDF and a model with their default settings."""
    steps = Pipeline([("tfidf", TfidfVectorizer()), *MODELS[name][0]])
    seeds = [key for key in steps.get_params() if key.endswith("__random_state")]
    return steps.set_params(**dict.fromkeys(seeds, seed))


if __name__ == "__main__":
    end_with_one_line(main)
