"""How often replacing words by synonyms changes a prediction: the success rate of PWWS, for one run
    or several.

Han et al. 2021, figure 5, on SST-2 with and without adapters, by epochs of pretraining on the
task's text, which are read from the folders of mlm.py that the runs started from. docs/papers.md
says how the attack, that of Ren et al. 2019 in pwws.py, differs from theirs. The synonyms are
WordNet's (Debian: apt install wordnet-base).
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
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.special import softmax
from tqdm.auto import tqdm

from common.arguments import looks_like_a_path
from common.data import sample
from common.edge import RecipeError
from common.figures import COLORS, COLUMN, save
from common.scores import proper_name
from figures.drawing import draw_line, panels, styles, write_lines
from figures.finished_run import FinishedRun, load_run
from figures.pwws import Probabilities, pwws
from figures.stability import NAMES
from figures.wordnet import WordNet


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data_dir", help="Folder of the task's files; default: the run's own.")
    add(
        "--wordnet",
        type=Path,
        default=Path("/usr/share/wordnet"),
        help="WordNet's files, as of wordnet-base.",
    )
    add(
        "--max_eval_samples",
        type=int,
        default=200,
        help="Attack a random sample of this many validation texts.",
    )
    add("--batch_size", type=int, default=64, help="Texts per forward.")
    add("--output_dir", help="Where to write; default: the first run's folder.")


def main(folders: Sequence[Path], arguments: argparse.Namespace) -> None:
    """Attack each run, write the numbers and the figure."""
    wordnet, rows = WordNet(arguments.wordnet), []
    for folder in folders:
        run = load_run(folder, arguments.data_dir, arguments.batch_size)
        rows.append(attack(folder.name, run, wordnet, arguments))
        print(f"{folder}: {rows[-1]['successes']} of {rows[-1]['attacked']} predictions changed")
    output = Path(arguments.output_dir or folders[0])
    write_lines(output / "robustness.jsonl", rows)
    save(draw(rows), output / "robustness")


def attack(
    name: str, run: FinishedRun, wordnet: WordNet, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Attack the validation texts that the run predicts correctly."""
    if len(run.task.text_columns) > 1 or len(run.task.labels) < 2:
        raise RecipeError(
            f"The attack needs a classification of single texts, such as cola or sst2; got {run.task.name}."
        )
    data = sample(run.validation, arguments.max_eval_samples)
    texts, labels = data[run.task.text_columns[0]], np.asarray(data["label"])
    probabilities = predictor(run)
    right = probabilities(texts).argmax(-1) == labels
    if not right.any():
        raise RecipeError(
            f"{name} predicts none of {len(texts)} texts correctly, so there is nothing to attack."
        )
    attacks = [
        pwws(
            texts[row],
            labels[row],
            probabilities,
            wordnet.synonyms,
            run.trainer.processing_class.unk_token,
        )
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
    """Return for how many epochs of mlm.py the weights that a run started from were trained: 0 if
    it started from the encoder alone, None if the folder that it started from is no longer there.
    """
    name = results["arguments"]["init_adapter"] or results["model"]
    start = Path(name)
    if (state := start / "trainer_state.json").is_file():  # a checkpoint
        return float(json.loads(state.read_text())["epoch"])
    if (finished := start.parent / "results.json").is_file():
        pretraining = json.loads(finished.read_text())
        if pretraining["task"] == "mlm" and pretraining["epochs"]:
            return float(pretraining["best_epoch"] or pretraining["epochs"][-1]["epoch"])
    is_lost = looks_like_a_path(name) and not start.exists()
    return None if is_lost or results["arguments"]["init_adapter"] else 0.0


def predictor(run: FinishedRun) -> Probabilities:

    def probabilities(texts: Sequence[str]) -> NDArray[np.floating]:
        tokens = run.trainer.processing_class(
            list(texts), truncation=True, max_length=run.task.max_length
        )
        rows = [dict(zip(tokens, row, strict=True)) for row in zip(*tokens.values(), strict=True)]
        return softmax(run.trainer.predict(rows, metric_key_prefix="attacked").predictions, -1)

    return probabilities


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw a bar per run, with its standard error. If some runs were pretrained, also draw a line
    per method, by epochs of pretraining.
    """
    pretrained = any(row["pretraining_epochs"] for row in rows)
    figure, (axes, *others) = panels(1 + pretrained, max(0.8 * COLUMN, 0.7 + 0.17 * len(rows)))
    label = "attack success rate (%)"
    rates, errors = ([100 * row[key] for row in rows] for key in ("success_rate", "standard_error"))
    bars = axes.barh(range(len(rows)), rates, 0.6, xerr=errors, capsize=2, color=COLORS[0])
    axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
    names = [
        row["run"] + (f", {epochs:g} epochs" if (epochs := row["pretraining_epochs"]) else "")
        for row in rows
    ]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(label)
    axes.margins(x=0.15)
    for lines in others:
        known = [row for row in rows if row["pretraining_epochs"] is not None]
        for method, style in styles(row["method"] for row in known).items():
            rates = {row["pretraining_epochs"]: (100 * row["success_rate"], 100 * row["standard_error"])
                     for row in known if row["method"] == method}  # fmt: skip
            points = [{"x": at, "low": rate - error, "middle": rate, "high": rate + error}
                      for at, (rate, error) in rates.items()]  # fmt: skip
            draw_line(lines, points, "x", label=NAMES.get(method, method), **style)
        lines.set(xlabel="epochs of pretraining on the task's text", ylabel=label)
        lines.legend()
    # Ren et al. replace named entities and use a tagger; OpenAttack has a tagger.
    title = f"PWWS on {proper_name(rows[0]['task'])}: {rows[0]['examples']} texts, no named entities, no tagger"
    figure.suptitle(fill(title, 60), fontsize=8)
    return figure
