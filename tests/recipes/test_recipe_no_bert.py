"""The baseline without BERT: validation chooses, the test split is scored by a model of the training split alone."""

from __future__ import annotations

import json
import random
import shutil

import pytest
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

import no_bert
from recipe_runs import run
from training.errors import RecipeError


WORDS = {"cat": ["meow", "purr", "claw", "whiskers"], "dog": ["bark", "bone", "leash", "fetch"]}


def make_rows(count: int, seed: int) -> list[tuple[str, str]]:
    """Texts of words of their class and, in a quarter of the words, of the other one."""
    drawn = random.Random(seed)
    rows = []
    for number in range(count):
        own, other = ("cat", "dog") if number % 2 else ("dog", "cat")
        words = [drawn.choice(WORDS[other if drawn.random() < 0.25 else own]) for _ in range(5)]
        rows.append((" ".join(words), own))
    return rows


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "pets"
    folder.mkdir()
    for seed, (split, count) in enumerate({"train": 60, "validation": 20, "test": 20}.items()):
        rows = [*make_rows(count, seed), ("a row without a label, which is left out", None)]
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


def test_scores_are_those_of_the_chosen_model(data, tmp_path, capsys):
    arguments = ("--data", data, "--models", "logistic_regression", "linear_svm", "--output_dir", tmp_path / "out")
    run(no_bert, *arguments, "--n_points", 2)
    path = tmp_path / "out" / "pets.json"
    results = json.loads(path.read_text())
    assert results["validation"] == max(results["models"].values()) == results["models"][results["model"]]

    (train, classes), (validation, expected), (test, tested) = (
        zip(*make_rows(count, seed), strict=True) for seed, count in enumerate((60, 20, 20))
    )
    settings = {key.partition("__")[2]: value for key, value in results["settings"].items()}
    tfidf = {key: settings.pop(key) for key in ("analyzer", "ngram_range", "min_df", "sublinear_tf")}
    words = TfidfVectorizer(**{**tfidf, "ngram_range": tuple(tfidf["ngram_range"])})
    kind = {"logistic_regression": LogisticRegression, "linear_svm": LinearSVC}[results["model"]]
    model = kind(random_state=0, **settings).fit(words.fit_transform(train), classes)
    assert model.score(words.transform(validation), expected) == pytest.approx(results["validation"])
    assert model.score(words.transform(test), tested) == pytest.approx(results["test"])
    assert 0.6 < results["test"] <= 1

    written = path.stat().st_mtime_ns
    run(no_bert, *arguments, "--n_points", 2)
    for flags, change in (
        (("--n_points", 3), "n_points was 2, is 3"),
        (("--n_points", 2, "--seed", 1), "seed was 0, is 1"),
        (("--n_points", 2, "--max_train_samples", 50), "max_train_samples was None, is 50"),
        (("--n_points", 2, "--models", "linear_svm"), r"models was \['linear_svm', 'logistic_regression'\], is"),
    ):
        with pytest.raises(RecipeError, match=rf"pets.json holds the scores of another search: {change}.* Give the"):
            run(no_bert, *arguments, *flags)
    other = shutil.copytree(data, tmp_path / "others" / "pets")
    with pytest.raises(RecipeError, match=r"two of --data are called pets\. Rename one\."):
        run(no_bert, *arguments, "--n_points", 2, "--data", data, other)
    (other / "test.jsonl").write_text(json.dumps({"text": "purr", "label": "cat"}))
    with pytest.raises(RecipeError, match=r"another search: data of test have changed: test\.jsonl had"):
        run(no_bert, *arguments, "--n_points", 2, "--data", other)
    assert path.stat().st_mtime_ns == written, "a finished task is trained again"
    assert capsys.readouterr().out.count(f"pets: {results['model']}, accuracy") == 2


def test_gradient_boosting_runs(data, tmp_path, monkeypatch):
    steps, _ = no_bert.MODELS["gradient_boosting"]
    small = {"svd__n_components": [4], "model__max_iter": [5]}
    monkeypatch.setitem(no_bert.MODELS, "gradient_boosting", (steps, small))
    run(no_bert, "--data", data, "--models", "gradient_boosting", "--n_points", 1, "--output_dir", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "pets.json").read_text())["validation"] > 0.5


def test_what_it_does_not_do(data, tmp_path):
    with pytest.raises(RecipeError, match="--n_points must be a whole number of at least 1, got 0"):
        run(no_bert, "--data", data, "--n_points", 0)
    scores = "\n".join(json.dumps({"text": "a", "label": label}) for label in (0.5, 1.5))
    (tmp_path / "scores.jsonl").write_text(scores)
    with pytest.raises(RecipeError, match=r"one class per text; .*scores.jsonl is a regression"):
        run(no_bert, "--data", tmp_path / "scores.jsonl", "--output_dir", tmp_path / "out")
