"""GLUE's metrics against formulas written out by hand, and against scikit-learn and scipy."""

import warnings

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from tasks.glue import TASK_SCORES, GlueMetric


def compute(task, predictions, references):
    return GlueMetric(task, keep_in_memory=True).compute(predictions=predictions, references=references)


def counts(predictions, references):
    pairs = list(zip(predictions, references, strict=True))
    return tuple(pairs.count(pair) for pair in ((1, 1), (1, 0), (0, 1), (0, 0)))


def accuracy(predictions, references):
    return sum(p == r for p, r in zip(predictions, references, strict=True)) / len(predictions)


def f1(predictions, references):
    true_positives, false_positives, false_negatives, _ = counts(predictions, references)
    return 2 * true_positives / (2 * true_positives + false_positives + false_negatives)


def matthews(predictions, references):
    tp, fp, fn, tn = counts(predictions, references)
    return (tp * tn - fp * fn) / ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5


def pearson(x, y):
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / (sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y)) ** 0.5


def ranks(values):
    """1 for the smallest; ties share the mean of their ranks."""
    smaller = [sum(other < value for other in values) for value in values]
    equal = [sum(other == value for other in values) for value in values]
    return [below + (ties + 1) / 2 for below, ties in zip(smaller, equal, strict=True)]


def spearman(x, y):
    return pearson(ranks(x), ranks(y))


BY_HAND = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews_correlation": matthews,
    "pearson": pearson,
    "spearmanr": spearman,
}
BY_LIBRARY = {
    "accuracy": lambda p, r: metrics.accuracy_score(r, p),
    "f1": lambda p, r: metrics.f1_score(r, p),
    "matthews_correlation": lambda p, r: metrics.matthews_corrcoef(r, p),
    "pearson": lambda p, r: stats.pearsonr(p, r)[0],
    "spearmanr": lambda p, r: stats.spearmanr(p, r)[0],
}
SCORES_OF_GLUE = {
    "cola": {"matthews_correlation", "accuracy"},
    "sst2": {"accuracy"},
    "mrpc": {"f1", "accuracy"},
    "stsb": {"pearson", "spearmanr"},
    "qqp": {"f1", "accuracy"},
    "mnli": {"accuracy"},
    "qnli": {"accuracy"},
    "rte": {"accuracy"},
    "wnli": {"accuracy"},
}


@pytest.mark.parametrize("task", SCORES_OF_GLUE)
@pytest.mark.parametrize("seed", range(3))
def test_scores_equal_the_formulas_and_the_libraries(task, seed):
    rng = np.random.default_rng(seed)
    if task == "stsb":
        references = rng.uniform(0, 5, 60).round(1).tolist()  # rounded, so that there are ties
        predictions = (np.array(references) + rng.normal(0, 1, 60)).round(1).tolist()
    else:
        classes = 3 if task == "mnli" else 2
        references = rng.integers(0, classes, 60).tolist()
        predictions = np.where(rng.random(60) < 0.7, references, rng.integers(0, classes, 60)).tolist()
    scores = compute(task, predictions, references)
    assert set(scores) == SCORES_OF_GLUE[task]
    for name, score in scores.items():
        assert score == pytest.approx(BY_HAND[name](predictions, references), abs=1e-12)
        assert score == pytest.approx(BY_LIBRARY[name](predictions, references), abs=1e-12)


def test_f1_is_that_of_class_1():
    assert compute("mrpc", [1, 1, 1, 0], [1, 0, 0, 0]) == {"f1": pytest.approx(0.5), "accuracy": 0.5}
    assert compute("mrpc", [0, 0, 0, 1], [0, 1, 1, 1]) == {"f1": pytest.approx(0.5), "accuracy": 0.5}
    assert compute("mrpc", [0, 0, 0, 1], [0, 0, 1, 0]) == {"f1": 0.0, "accuracy": 0.5}


@pytest.mark.parametrize(
    ("task", "predictions", "references", "expected"),
    [
        ("cola", [1, 1, 1, 1], [1, 0, 1, 0], {"matthews_correlation": 0.0, "accuracy": 0.5}),
        ("cola", [0, 1, 0, 1], [1, 1, 1, 1], {"matthews_correlation": 0.0, "accuracy": 0.5}),
        ("cola", [1, 1], [1, 1], {"matthews_correlation": 0.0, "accuracy": 1.0}),
        ("cola", [1, 0], [0, 1], {"matthews_correlation": -1.0, "accuracy": 0.0}),
        ("mrpc", [0, 0], [0, 0], {"f1": 0.0, "accuracy": 1.0}),
        ("mrpc", [0, 0], [1, 1], {"f1": 0.0, "accuracy": 0.0}),
        ("mrpc", [1, 1], [1, 1], {"f1": 1.0, "accuracy": 1.0}),
        ("stsb", [2.5, 2.5, 2.5], [0.0, 1.0, 5.0], {"spearmanr": 0.0, "pearson": 0.0}),
        ("stsb", [0.0, 1.0, 5.0], [2.5, 2.5, 2.5], {"spearmanr": 0.0, "pearson": 0.0}),
        ("stsb", [3.0], [3.0], {"spearmanr": 0.0, "pearson": 0.0}),
        ("rte", [0], [1], {"accuracy": 0.0}),
    ],
)
def test_a_score_without_a_value_is_0_without_a_warning(task, predictions, references, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compute(task, predictions, references) == pytest.approx(expected)


def test_similarity_scores_are_not_rounded():
    references = [1.0, 1.0 + 1e-9, 1.0 + 2e-9]
    assert compute("stsb", references, references)["spearmanr"] == pytest.approx(1.0)


def test_the_first_score_is_the_papers():
    main = {task: scores[0] for task, scores in TASK_SCORES.items()}
    assert main["cola"] == "matthews_correlation"
    assert main["mrpc"] == main["qqp"] == "f1"
    assert main["stsb"] == "spearmanr"


def test_an_unknown_task_names_the_known_ones():
    with pytest.raises(ValueError, match=r"one of cola, sst2, .* got 'imdb'"):
        GlueMetric("imdb")


def test_no_predictions_are_an_error():
    with pytest.raises(ValueError, match="at least one prediction"):
        compute("rte", [], [])


def test_unequal_numbers_are_an_error():
    with pytest.raises(ValueError, match="Mismatch"):
        compute("rte", [1], [1, 0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_predictions_that_are_not_finite_are_an_error(value):
    with pytest.raises(ValueError, match="1 of 2 are not: the training has diverged"):
        compute("stsb", [value, 1.0], [1.0, 2.0])


def test_one_metric_can_score_again():
    metric = GlueMetric("rte", keep_in_memory=True)
    assert metric.compute(predictions=[1, 1], references=[1, 0]) == {"accuracy": 0.5}
    assert metric.compute(predictions=np.array([1]), references=np.array([1])) == {"accuracy": 1.0}


def test_batches_add_up():
    metric = GlueMetric("cola", keep_in_memory=True)
    metric.add_batch(predictions=[1, 0], references=[1, 0])
    metric.add(prediction=1, reference=0)
    assert metric.compute()["matthews_correlation"] == pytest.approx(matthews([1, 0, 1], [1, 0, 0]))
