"""--metric: metrics of the library evaluate, from a script, for every kind of task."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import f1_score

import mlm
import squad
import text_classification
import token_classification
from data.labels import MULTI, REGRESSION, Labels
from demo import minimal_pairs
from recipe_runs import logits_of, results_of, run, save_tiny_encoder, write
from run.edge import RecipeError
from tasks.classification import ClassificationTask
from tasks.metrics import list_numbers


RECIPES = Path(__file__).parents[2] / "recipes"
SENTENCES = minimal_pairs()["train"]["sentence"][:60]
SCRIPT = """
import datasets
import evaluate

class Counted(evaluate.Metric):
    def _info(self):
        features = datasets.Features({{"predictions": {feature}, "references": {feature}}})
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=features
        )

    def _compute(self, predictions, references{options}):
        {body}
"""
NUMBER = 'datasets.Value("int32")'
TAGS = 'datasets.Sequence(datasets.Value("string"))'
SHARE = """right = sum(map(lambda a, b: a == b, predictions, references))
        inner = {"rows": len(references)}
        return {"share": right / len(references), "inner": inner, "text": "a"}"""


def script(folder, name, feature, body=SHARE, options=""):
    path = folder / f"{name}.py"
    path.write_text(SCRIPT.format(feature=feature, body=body, options=options))
    return path


def script_of_the_page():
    """The metric that docs/recipes.md shows."""
    section = (RECIPES.parent / "docs" / "recipes.md").read_text().partition("### Further metrics")
    return section[2].partition("```python\n")[2].partition("```")[0]


def test_several_values_of_a_classifier(encoder, tmp_path, capsys):
    """Those of a run, and of an evaluation of what it has saved."""
    labels = ["a", "b", "c"] * 20
    write(tmp_path / "train.csv", text=SENTENCES, label=labels)
    write(tmp_path / "validation.csv", text=SENTENCES[:31], label=labels[:31])
    counted = script(tmp_path, "counted", NUMBER)
    by_average = """from sklearn.metrics import f1_score
        return {"f1": f1_score(references, predictions, average=average)}"""
    f1 = script(tmp_path, "f1", NUMBER, by_average, options=', average="binary"')
    broken = script(tmp_path, "broken", NUMBER, "raise KeyError('no such thing')")
    documented = tmp_path / "my_metric.py"
    documented.write_text(script_of_the_page())
    flags = {"data": tmp_path, "metric": [counted, f1, broken, documented]}
    run(text_classification, **flags, model_name=encoder, output_dir=tmp_path / "run", max_steps=2)
    assert "--metric broken is left out: 'no such thing'" in capsys.readouterr().out
    outputs = logits_of(encoder, tmp_path / "run" / "adapter", 3, SENTENCES[:31])
    predicted = np.array(["a", "b", "c"])[outputs.argmax(-1)]
    share = np.mean(predicted == labels[:31])
    expected = {
        "counted.share": pytest.approx(share),
        "counted.inner.rows": 31.0,
        "my_metric.agreement": pytest.approx(share),
        "f1": pytest.approx(f1_score(labels[:31], predicted, average="macro")),
    }
    assert results_of(tmp_path / "run")["metrics"] == expected
    run(text_classification, **flags, evaluate=tmp_path / "run", output_dir=tmp_path / "again")
    evaluation = json.loads((tmp_path / "again" / "evaluation.json").read_text())
    assert evaluation["metrics"] == expected


@pytest.mark.parametrize(
    ("problem_type", "outputs", "labels", "predictions", "references"),
    [
        (MULTI, [[-1, 2], [0.5, -3]], [[1.0, 1], [0, 0]], [[0, 1], [1, 0]], [[1, 1], [0, 0]]),
        (REGRESSION, [[1.5], [-2]], [1.0, 0.5], [1.5, -2], [1, 0.5]),
    ],
)
def test_what_metrics_get(problem_type, outputs, labels, predictions, references):
    output = SimpleNamespace(predictions=np.array(outputs), label_ids=np.array(labels))
    trainer = SimpleNamespace(predict_validation=lambda: ("validation", None, output))
    names = ("x", "y") if problem_type == MULTI else ("x",)
    task = ClassificationTask(name="a", kind=Labels(("label",), problem_type, names))
    examples = task.examples(trainer)
    assert (examples.predictions, examples.references) == (predictions, references)
    assert type(examples.predictions[0]) is (list if problem_type == MULTI else float)


def test_tags_are_lists_of_names(tmp_path):
    encoder = save_tiny_encoder(tmp_path / "encoder", words=["ada", "is", "in", "oslo"])
    words, tags = ["ada", "is", "in", "oslo"], ["B-PER", "O", "O", "B-LOC"]
    for split in ("train", "validation"):
        write(tmp_path / f"{split}.jsonl", tokens=[words, words[:2]] * 8, tags=[tags, tags[:2]] * 8)
    listed = (
        "return {'tags': sum(map(len, references)), 'named': references[0][3] == 'B-LOC',"
        " 'sizes': 1.0 * ([*map(len, predictions)] == [*map(len, references)])}"
    )
    run(token_classification, data=tmp_path, model_name=encoder, max_steps=1,
        output_dir=tmp_path / "run", metric=script(tmp_path, "listed", TAGS, listed))  # fmt: skip
    assert results_of(tmp_path / "run")["metrics"] == {"listed.tags": 48, "listed.sizes": 1}


def test_answers_are_squads_dictionaries(tmp_path):
    encoder = save_tiny_encoder(tmp_path / "encoder", max_position_embeddings=128)
    sentence = SENTENCES[0].rstrip(".")
    answer = {"text": [sentence.split()[1]], "answer_start": [sentence.index(sentence.split()[1])]}
    rows = {
        "id": [str(number) for number in range(6)],
        "question": SENTENCES[1:7],
        "context": [sentence] * 6,
        "answers": [answer] * 6,
    }
    for split in ("train", "validation"):
        write(tmp_path / f"{split}.jsonl", **rows)
    in_squad = """
        pairs = [*zip(predictions, references, strict=True)]
        assert all(p["id"] == r["id"] for p, r in pairs)
        right = [p["prediction_text"] in r["answers"]["text"] for p, r in pairs]
        return {"exact_match": 100.0 * sum(right) / len(right)}"""
    path = script(tmp_path, "in_squad", "FEATURE", in_squad)
    text = path.read_text()
    prediction = '{"id": datasets.Value("string"), "prediction_text": datasets.Value("string")}'
    reference = """{"id": datasets.Value("string"), "answers": datasets.features.Sequence(
        {"text": datasets.Value("string"), "answer_start": datasets.Value("int32")})}"""
    path.write_text(text.replace("FEATURE", prediction, 1).replace("FEATURE", reference, 1))
    run(squad, data=tmp_path, model_name=encoder, max_steps=1, max_length=80, stride=4,
        output_dir=tmp_path / "run", metric=path)  # fmt: skip
    results = results_of(tmp_path / "run")
    assert results["metrics"]["in_squad.exact_match"] == results["best_scores"]["exact_match"]


def test_a_name_on_the_hub_without_a_network(encoder, tmp_path, monkeypatch):
    """The run ends before it has begun."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = write(tmp_path / "train.csv", text=SENTENCES, label=["a", "b"] * 30)
    with pytest.raises(RecipeError, match="Give the path of a script"):
        run(text_classification, data=data, model_name=encoder, output_dir=tmp_path / "run",
            metric="f1")  # fmt: skip
    assert not (tmp_path / "run" / "arguments.json").exists()


def test_masked_words_have_no_predictions(encoder, tmp_path):
    with pytest.raises(RecipeError, match="--metric needs predictions"):
        run(mlm, data=tmp_path, model_name=encoder, metric="f1")


def test_numbers_of_a_result():
    per_class = {"f1": 1, "none": float("nan")}
    nested = {"f1": np.float32(0.5), "per": per_class, "list": [1], "is": True}
    assert list_numbers("f1", nested) == {"f1": 0.5, "f1.per.f1": 1.0}
    assert list_numbers("r2", 0.25) == {"r2": 0.25}
