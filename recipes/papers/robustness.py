"""How often replacing words by synonyms changes a prediction: the success rate of PWWS, for one run or several.

Han et al. 2021, figure 5, on SST-2 with and without adapters, by epochs of pretraining on the task's text: these are
read from the folders of mlm.py that the runs started from. The attack is that of Ren et al. 2019, without their named
entities; see pwws.py. Han et al. use OpenAttack's, which replaces none, either, but differs from this one: NLTK's
tagger chooses the synonyms by the word's part of speech, here the part of speech is the word's most frequent one;
synonyms of several words are cut to the first, here they are left out; texts are in lower case.

The synonyms are WordNet's (Debian: apt install wordnet-base).
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tqdm.auto import tqdm

from common.data import sample
from common.edge import RecipeError
from common.figures import COLORS, COLUMN, MARKERS, plt, save
from common.glue_report import proper_name
from papers.lengths import NAMES
from papers.pwws import Probabilities, pwws
from papers.runs import FinishedRun, load_run, write_lines
from papers.wordnet import WordNet, find_wordnet


DIFFERENCE = "no named entities, no tagger"  # unlike Ren et al.; OpenAttack has a tagger


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the names of the runs, the synonyms and the texts."""
    add = parser.add_argument
    add("--name", nargs="+", help="Name of each run in the figure; default: its folder's name.")
    add("--data_dir", help="Folder of the task's files; default: the run's own.")
    add("--wordnet", help="Folder of WordNet's files; default: Debian's, or NLTK's data.")
    add("--max_eval_samples", type=int, default=200, help="Attack a random sample of this many validation texts.")
    add("--batch_size", type=int, default=64, help="Texts per forward.")
    add("--output_dir", help="Where to write; default: the first run's folder.")


def main(arguments: argparse.Namespace) -> None:
    """Attack each run, write the numbers and the figure."""
    names = arguments.name or [Path(folder).name for folder in arguments.folder]
    if len(names) != len(arguments.folder):
        raise RecipeError(f"--name must name each run; got {len(names)} names for {len(arguments.folder)} runs.")
    wordnet, rows = WordNet(find_wordnet(arguments.wordnet)), []
    for name, folder in zip(names, arguments.folder, strict=True):
        rows.append(attack(name, load_run(folder, arguments.data_dir), wordnet, arguments))
        print(f"{name}: {rows[-1]['successes']} of {rows[-1]['attacked']} predictions changed")
    output = Path(arguments.output_dir or arguments.folder[0])
    write_lines(output / "robustness.jsonl", rows)
    save(draw(rows), output / "robustness")


def attack(name: str, run: FinishedRun, wordnet: WordNet, arguments: argparse.Namespace) -> dict[str, Any]:
    """Attack the validation texts that the run predicts correctly.

    Raises:
        RecipeError: If the task is not a classification of single texts, or no prediction is correct.
    """
    if len(run.task.text_columns) > 1 or len(run.task.labels) < 2:
        raise RecipeError(
            f"The attack needs a classification of single texts, such as cola or sst2; got {run.task.name}."
        )
    data = sample(run.validation, arguments.max_eval_samples)
    texts, labels = data[run.task.text_columns[0]], np.asarray(data["label"])
    probabilities = predictor(run, arguments.batch_size)
    right = probabilities(texts).argmax(-1) == labels
    if not right.any():
        raise RecipeError(f"{name} predicts none of {len(texts)} texts correctly, so there is nothing to attack.")
    attacks = [
        pwws(texts[row], labels[row], probabilities, wordnet.synonyms, run.tokenizer.unk_token)
        for row in tqdm(np.flatnonzero(right).tolist(), desc=name, unit="text")
    ]
    successes = [one for one in attacks if one.success]
    rate = len(successes) / len(attacks)
    return {
        "run": name, "method": run.results["method"], "pretraining_epochs": pretraining_epochs(run.results),
        "task": run.task.name, "model": run.results["model"], "examples": len(texts),
        "attacked": len(attacks), "successes": len(successes), "success_rate": rate,
        "standard_error": (rate * (1 - rate) / len(attacks)) ** 0.5,
        "accuracy": float(right.mean()), "accuracy_under_attack": (len(attacks) - len(successes)) / len(texts),
        "replaced_words": mean(one.replaced / one.words for one in successes) if successes else None,
        "queries_per_text": mean(one.queries for one in attacks), "attacks": [asdict(one) for one in attacks],
    }  # fmt: skip


def pretraining_epochs(results: Mapping[str, Any]) -> float | None:
    """Return for how many epochs of mlm.py the weights that a run started from were trained: 0 if it started from the
    encoder alone, None if the folder of the pretraining is no longer there."""
    adapter = results["arguments"]["init_adapter"]
    start = Path(adapter or results["model"])
    if (state := start / "trainer_state.json").is_file():  # a checkpoint
        return float(json.loads(state.read_text())["epoch"])
    if (finished := start.parent / "results.json").is_file():
        pretraining = json.loads(finished.read_text())
        if pretraining["task"] == "mlm" and pretraining["epochs"]:
            return float(pretraining["best_epoch"] or pretraining["epochs"][-1]["epoch"])
    return None if adapter else 0.0


def predictor(run: FinishedRun, batch_size: int) -> Probabilities:
    """Return a function from texts to the run's probabilities of the labels, which batches texts of similar length."""
    max_length = run.results["arguments"]["max_length"]

    @torch.inference_mode()
    def probabilities(texts: Sequence[str]) -> NDArray[np.floating]:
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        found = []
        for start in range(0, len(texts), batch_size):
            batch = [texts[row] for row in order[start : start + batch_size]]
            tokens = run.tokenizer(batch, truncation=True, max_length=max_length, padding=True, return_tensors="pt")
            found.append(run.model(**tokens.to(run.model.device)).logits.float().softmax(-1).cpu())
        return torch.cat(found).numpy()[np.argsort(order)]

    return probabilities


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw a bar per run, with its standard error. If some runs were pretrained, also draw a line per method, by
    epochs of pretraining."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["pretraining_epochs"] is not None:
            by_method.setdefault(row["method"], []).append(row)
    pretrained = any(row["pretraining_epochs"] for row in rows)
    width = max(COLUMN, 0.35 * len(rows))
    figure, panels = plt.subplots(
        1, 1 + pretrained, figsize=(width + COLUMN * pretrained, 0.9 * COLUMN), squeeze=False, sharey=True
    )
    axes = panels[0][0]
    rates, errors = _rates(rows)
    bars = axes.bar(range(len(rows)), rates, 0.6, yerr=errors, capsize=3, color=COLORS[0])
    axes.bar_label(bars, fmt="%.0f", padding=2)
    labels = [row["run"] + (f", {epochs:g} epochs" if (epochs := row["pretraining_epochs"]) else "") for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=90 if len(rows) > 4 else 0)
    axes.set(ylabel="attack success rate (%)")
    axes.margins(x=0.2 if len(rows) < 5 else 0.02, y=0.15)
    for (method, own), color, marker in zip(by_method.items() if pretrained else (), cycle(COLORS), cycle(MARKERS)):
        own = sorted(own, key=lambda row: row["pretraining_epochs"])
        epochs, (rates, errors) = [row["pretraining_epochs"] for row in own], _rates(own)
        label = NAMES.get(method, method)
        panels[0][1].errorbar(epochs, rates, errors, color=color, marker=marker, capsize=2, label=label)
    if pretrained:
        panels[0][1].set_xlabel("epochs of pretraining on the task's text")
        panels[0][1].legend()
    title = f"PWWS on {proper_name(rows[0]['task'])}: {rows[0]['examples']} texts, {DIFFERENCE}"
    figure.suptitle(fill(title, 60), fontsize=8)
    return figure


def _rates(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    rates, errors = ([100 * row[key] for row in rows] for key in ("success_rate", "standard_error"))
    return rates, errors
