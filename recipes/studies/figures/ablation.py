"""Which layers' adapters matter: remove those of every continuous span of layers and score the
rest, untrained.

Houlsby et al. 2019, figure 6 (left); Mohebbi and Rajaei 2020, figure 8. With --prune, also save the
adapter without the longest span whose removal costs at most that share of the score, into the
folder "pruned".
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from tqdm.auto import tqdm

from common.edge import RecipeError
from common.figures import COLUMN, RED, plt, save
from common.scores import proper_name
from figures.drawing import write_lines
from figures.finished_run import FinishedRun, load_run
from houlsby_peft import ablate, prune


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data_dir", help="Folder of the task's files; default: the run's own.")
    add(
        "--score",
        choices=("accuracy", "main"),
        default="accuracy",
        help="The paper's score, or the task's main one.",
    )
    add(
        "--norms",
        choices=("keep", "remove"),
        default="keep",
        help="Whether removed layers keep their trained norms.",
    )
    add(
        "--prune",
        type=float,
        help="Save the adapter without the longest span that costs at most this share.",
    )
    add("--max_eval_samples", type=int, help="Score on a random sample of this many examples.")
    add("--batch_size", type=int, default=64, help="Sentences per evaluation step.")


def main(folder: Path, arguments: argparse.Namespace) -> None:
    """Score every span, write the numbers and the figure, and prune if asked to."""
    run = load_run(folder, arguments.data_dir, arguments.batch_size)
    if arguments.score == "accuracy" and len(run.task.labels) == 1:
        raise RecipeError(
            f"{run.task.name} is a regression, which has no accuracy: give --score main."
        )
    rows = score_spans(run, arguments)
    write_lines(folder / "ablation.jsonl", rows)
    title = f"Adapters removed: {proper_name(run.task.name)}, {Path(run.results['model']).name}"
    save(draw(rows, run.trainer.model.config.num_hidden_layers, title), folder / "ablation")
    if arguments.prune is not None:
        prune_run(run, rows, arguments)


def score_spans(run: FinishedRun, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the scores with all adapters, then without those of each span, with the relative
    change.
    """
    model = run.trainer.model
    size = model.config.num_hidden_layers
    spans = [(first, last) for last in range(size) for first in range(last + 1)]
    score_name = (
        "accuracy"
        if arguments.score == "accuracy"
        else run.task.scores[0].rpartition("matched_")[2]
    )
    rows: list[dict[str, Any]] = [{"span": None, "scores": run.score(arguments.max_eval_samples)}]
    for first, last in tqdm(spans, unit="span"):
        with ablate(model, range(first, last + 1), keep_norms=arguments.norms == "keep"):
            rows.append({"span": (first, last), "scores": run.score(arguments.max_eval_samples)})
    full = rows[0]["scores"][score_name]
    if full <= 0:
        raise RecipeError(
            f"The changes are relative to the run's {score_name}, which is {full}: train it first."
        )
    rows[0] |= {"task": run.task.name, "model": run.results["model"], "score_name": score_name,
                "norms": arguments.norms}  # fmt: skip
    for row in rows[1:]:
        row["relative_change"] = row["scores"][score_name] / full - 1
    return rows


def draw(rows: list[dict[str, Any]], size: int, name: str) -> Figure:
    """Draw the changes in percent: first layer of the span down, last layer to the right, single
    layers framed.
    """
    changes = np.full((size, size), np.nan)
    for row in rows[1:]:
        changes[row["span"]] = 100 * row["relative_change"]
    figure, axes = plt.subplots(figsize=(COLUMN, 0.9 * COLUMN))
    # Colors range from the worst change to none; the few small gains are white, too, with their
    # number.
    image = axes.imshow(changes, cmap="cividis", vmin=min(np.nanmin(changes), -1), vmax=0)
    middle, digits = image.norm.vmin / 2, int(size <= 8 and image.norm.vmin > -10)
    for row in rows[1:]:
        first, last = row["span"]
        value = changes[first, last]
        axes.text(
            last, first, f"{round(value, digits) + 0.0:.{digits}f}", ha="center", va="center",
            fontsize=5 if size > 8 else 7, color="black" if value > middle else "white",
        )  # fmt: skip
        if first == last:
            axes.add_patch(
                Rectangle((last - 0.5, first - 0.5), 1, 1, fill=False, edgecolor=RED, linewidth=1)
            )
    axes.set(
        xlabel="last layer without adapters", ylabel="first layer without adapters", title=name,
        xticks=range(size), yticks=range(size),
    )  # fmt: skip
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    label = f"relative change of the {proper_name(rows[0]['score_name'])} (%)"
    figure.colorbar(image, ax=axes, label=label, shrink=0.8).outline.set_visible(False)
    return figure


def prune_run(run: FinishedRun, rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Save the adapter without the longest span that costs at most --prune; among equally long
    spans, without the cheapest. At least one layer keeps its adapters.
    """
    whole = (0, run.trainer.model.config.num_hidden_layers - 1)
    cheap = [
        row
        for row in rows[1:]
        if row["relative_change"] >= -arguments.prune and row["span"] != whole
    ]
    if not cheap:
        print(f"Nothing to prune: every span costs more than {arguments.prune:.1%} of the score.")
        return
    best = max(cheap, key=lambda row: (row["span"][1] - row["span"][0], row["relative_change"]))
    first, last = best["span"]
    prune(run.trainer.model, range(first, last + 1), "pruned", keep_norms=arguments.norms == "keep")
    run.trainer.model.save_pretrained(str(arguments.folder), selected_adapters=["pruned"])
    sizes = (
        Path(arguments.folder, name, SAFETENSORS_WEIGHTS_NAME).stat().st_size
        for name in ("adapter", "pruned")
    )
    before, after = (size / 1e6 for size in sizes)
    print(f"Pruned layers {first} to {last}, which changes the score by {best['relative_change']:+.1%}: "
          f"{arguments.folder}/pruned, {after:.2f} MB instead of {before:.2f}.")  # fmt: skip
