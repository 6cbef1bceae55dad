"""How often replacing words by synonyms changes a prediction: the success rate of PWWS.

Han et al. 2021, figure 5, on SST-2 with and without adapters, for one run or several, by epochs of
pretraining on the task's text. These are read from the folders of mlm.py that the runs started
from. docs/papers.md says how the attack, that of Ren et al. 2019 in pwws.py, differs from theirs.
The synonyms are WordNet's (Debian: apt install wordnet-base).
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

import numpy as np
from datasets import Dataset
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.special import softmax
from tqdm.auto import tqdm

from data.data import sample
from figures import drawing, flags
from figures.drawing import Point, Points
from figures.finished_run import FinishedRun, load_run
from figures.pwws import Probabilities, pwws
from figures.stability import NAMES
from figures.wordnet import WordNet
from run.edge import RecipeError, looks_like_a_path
from run.figures import COLORS, COLUMN, save
from tasks.scores import proper_name


RATE = "attack success rate (%)"


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_evaluation(parser, sample=200)
    wordnet = Path("/usr/share/wordnet")
    parser.add_argument("--wordnet", type=Path, default=wordnet, help="Files of wordnet-base.")
    parser.add_argument("--output_dir", help="Where to write; default: the first run's folder.")


def main(folders: Sequence[Path], arguments: argparse.Namespace) -> None:
    """Attack each run, write the numbers and the figure."""
    wordnet = WordNet(arguments.wordnet)
    points = []
    for folder in folders:
        run = load_run(folder, arguments.data_dir, arguments.batch_size)
        point = attack(folder.name, run, wordnet, arguments)
        print(f"{folder}: {point['successes']} of {point['attacked']} predictions changed")
        points.append(point)
    output = Path(arguments.output_dir or folders[0])
    drawing.write_points(output / "robustness.jsonl", points)
    save(draw(points), output / "robustness")


def attack(name: str, run: FinishedRun, wordnet: WordNet, arguments: argparse.Namespace) -> Point:
    """Attack the validation texts that the run predicts correctly; return the point to draw."""
    if len(run.task.text_columns) > 1 or len(run.task.labels) < 2:
        raise RecipeError(
            "The attack needs a classification of single texts, such as cola or sst2; got "
            f"{run.task.name}."
        )
    data = sample(run.validation, arguments.max_eval_samples)
    texts, labels = data[run.task.text_columns[0]], np.asarray(data["label"])
    probabilities = predictor(run)
    right = probabilities(texts).argmax(-1) == labels
    if not right.any():
        raise RecipeError(
            f"{name} predicts none of {len(texts)} texts correctly, so there is nothing to attack."
        )
    unknown = run.trainer.processing_class.unk_token
    attacks = []
    for row in tqdm(np.flatnonzero(right).tolist(), desc=name, unit="text"):
        text, label = texts[row], labels[row]
        attacks.append(pwws(text, label, probabilities, wordnet.synonyms, unknown))
    replaced = [attack.replaced / attack.words for attack in attacks if attack.success]
    attacked, successes = len(attacks), len(replaced)
    rate = successes / attacked
    results = run.results
    return {
        "run": name,
        "method": results["method"],
        "pretraining_epochs": pretraining_epochs(results),
        "task": run.task.name,
        "model": results["model"],
        "examples": len(texts),
        "accuracy": float(right.mean()),
        "attacked": attacked,
        "successes": successes,
        "success_rate": rate,
        "standard_error": (rate * (1 - rate) / attacked) ** 0.5,
        "accuracy_under_attack": (attacked - successes) / len(texts),
        "replaced_words": mean(replaced) if replaced else None,
        "queries_per_text": mean(attack.queries for attack in attacks),
        "attacks": [asdict(attack) for attack in attacks],
    }


def pretraining_epochs(results: Mapping[str, Any]) -> float | None:
    """Return for how many epochs of mlm.py the weights that a run started from were trained.

    It is 0 if the run started from the encoder alone, and None if the folder that it started from
    is no longer there.
    """
    adapter = results["arguments"]["init_adapter"]
    name = adapter or results["model"]
    start = Path(name)
    state, pretraining = start / "trainer_state.json", start.parent / "results.json"
    if state.is_file():  # a checkpoint
        return float(json.loads(state.read_text())["epoch"])
    if pretraining.is_file():
        run = json.loads(pretraining.read_text())
        if run["task"] == "mlm" and run["epochs"]:
            return float(run["best_epoch"] or run["epochs"][-1]["epoch"])
    is_lost = looks_like_a_path(name) and not start.exists()
    if is_lost or adapter:
        return None
    return 0.0


def predictor(run: FinishedRun) -> Probabilities:
    """Return a function from texts to the probabilities of the labels, [texts, labels]."""

    def probabilities(texts: Sequence[str]) -> NDArray[np.floating]:
        tokenizer, max_length = run.trainer.processing_class, run.task.max_length
        tokens = tokenizer(list(texts), truncation=True, max_length=max_length)
        rows = Dataset.from_dict(dict(tokens))
        output = run.trainer.predict(rows, metric_key_prefix="attacked")
        of_labels: NDArray[np.floating] = softmax(output.predictions, -1)
        return of_labels

    return probabilities


def draw(points: Points) -> Figure:
    """Draw a bar per run, with its standard error.

    If some runs were pretrained, also draw a curve per method, by epochs of pretraining.
    """
    is_pretrained = any(drawing.values_of(points, "pretraining_epochs"))
    height = max(0.8 * COLUMN, 0.7 + 0.17 * len(points))
    figure, (axes, *others) = drawing.panels(1 + is_pretrained, height)
    names = []
    for point in points:
        epochs = point["pretraining_epochs"]
        of_start = f", pretrained for {epochs:g} epochs" if epochs else ""
        names.append(f"{point['run']}{of_start}")
    rates = 100 * np.array(drawing.values_of(points, "success_rate"))
    errors = 100 * np.array(drawing.values_of(points, "standard_error"))
    bars = axes.barh(range(len(points)), rates, 0.6, xerr=errors, capsize=2, color=COLORS[0])
    axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
    axes.set(yticks=range(len(points)), yticklabels=names, ylim=(len(points) - 0.5, -0.5))
    axes.set_xlabel(RATE)
    axes.margins(x=0.15)
    for of_pretraining in others:
        _draw_pretraining(of_pretraining, points)
    # Ren et al. replace named entities and use a tagger; OpenAttack has a tagger.
    title = (
        f"PWWS on {proper_name(points[0]['task'])}: {points[0]['examples']} texts, no named "
        "entities, no tagger"
    )
    figure.suptitle(fill(title, 60), fontsize=8)
    return figure


def _draw_pretraining(axes: Axes, points: Points) -> None:
    """Draw the rates by epochs of pretraining; the last run counts where several have the same."""
    by_method: dict[str, dict[float, Point]] = {}
    for point in points:
        epochs = point["pretraining_epochs"]
        if epochs is not None:
            rate, error = 100 * point["success_rate"], 100 * point["standard_error"]
            height = {"x": epochs, "low": rate - error, "middle": rate, "high": rate + error}
            by_method.setdefault(point["method"], {})[epochs] = height
    style = drawing.styles(by_method)
    for method, heights in by_method.items():
        name = NAMES.get(method, method)
        drawing.draw_curve(axes, [*heights.values()], "x", label=name, **style[method])
    axes.set(xlabel="epochs of pretraining", ylabel=RATE)
    axes.legend()
