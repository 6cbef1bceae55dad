"""What the end of a run shows: scores, figures and files, and the commands to type next; the style
    of all figures.

The sizes are for a paper, the colors for color-blind readers. The import of Matplotlib takes a
second: do it late.
"""

import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from numpy.typing import NDArray

from common.run import MOMENT, WHERE, is_houlsby
from common.scores import ValueScores, defused, format_scores


MAX_CLASSES = 40  # in a confusion matrix, to be readable on a page
MAX_MISTAKES = 20
_MAX_EXAMPLE = 80  # characters of a text in a command

COLUMN, PAGE = 3.3, 6.8  # width of one column and of a page, in inches

# The palette of Okabe and Ito 2008, without black, and without yellow, which is faint on white.
BLUE, ORANGE, GREEN, PINK, SKY, RED = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
)
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
MARKERS = ("o", "s", "^", "D", "v", "P")  # for prints in gray

matplotlib.use("Agg")
plt.rcParams.update(
    {
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "legend.fontsize": 7,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "lines.linewidth": 1.2,
        "lines.markersize": 3.5,
        "figure.constrained_layout.use": True,
        "svg.hashsalt": "houlsby",  # the same figure is the same file
    }
)


def save(figure: Figure, path: Path) -> None:
    """Write a figure to `path`.png (300 dots per inch) and `path`.svg, and print the paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".png"), dpi=300)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)
    print(f"Figure: {path.with_suffix('.png')} and .svg")


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure to `path`. Characters that the font lacks are drawn as boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        figure.savefig(path, dpi=200)
    plt.close(figure)


def draw_confusion(matrix: NDArray[np.int64], names: Sequence[str], title: str) -> Figure:
    """Draw the share of each prediction (columns) among the examples of a label (rows)."""
    from sklearn.metrics import ConfusionMatrixDisplay  # only here, as the import takes a second

    totals = matrix.sum(axis=1)
    shares = matrix / np.maximum(totals, 1)[:, None]
    short, few = [_plain(name) for name in names], len(names) <= 10
    longest = max(map(len, short))
    upright = longest * len(short) > 30
    side = max(0.5 if few else 0.27, 1.6 / len(names)) * len(names)
    figure, axes = plt.subplots(
        figsize=(side + 1 + 0.06 * longest, side + 0.8 + 0.06 * longest * upright)
    )
    ConfusionMatrixDisplay(shares if few else 100 * shares, display_labels=short).plot(
        ax=axes,
        cmap="Blues",
        colorbar=False,
        values_format=".0%" if few else ".0f",
        xticks_rotation="vertical" if upright else "horizontal",
        text_kw={
            "fontsize": 7 if few else 5.5,
            "in_layout": False,
        },  # measuring hundreds of texts takes seconds
    )
    axes.set_yticks(
        range(len(names)),
        [f"{name} ({total:,})" for name, total in zip(short, totals, strict=True)],
    )
    axes.set(xlabel="prediction", ylabel="label (examples)")
    axes.spines[:].set_visible(False)
    figure.suptitle(
        f"{_plain(title)}\n{'share' if few else 'percent'} of the label's examples", fontsize=8
    )
    return figure


def draw_reliability(bins: pd.DataFrame, error: float, title: str) -> Figure:
    """Draw the share of right predictions against the model's probabilities; on the dotted line,
    they are equal.
    """
    figure, axes = plt.subplots(figsize=(COLUMN, 0.9 * COLUMN))
    axes.plot([0, 1], [0, 1], color="gray", linestyle=":")
    axes.plot(bins["confidence"], bins["right"], color=BLUE)
    sizes = 10 + 200 * bins["examples"] / bins["examples"].sum()
    axes.scatter(bins["confidence"], bins["right"], sizes, color=BLUE, clip_on=False)
    axes.set(
        xlabel="probability of the prediction",
        ylabel="share of right predictions",
        xlim=(0, 1.03),
        ylim=(0, 1.03),
    )
    axes.set_title(f"{_plain(title)}\nexpected calibration error {error:.3f}")
    return figure


def draw_values(
    expected: NDArray[np.float64], predicted: NDArray[np.float64], title: str
) -> Figure:
    """Draw the predictions against the targets; on the dotted line, they are equal."""
    figure, axes = plt.subplots(figsize=(COLUMN, 0.9 * COLUMN))
    ends = [min(expected.min(), predicted.min()), max(expected.max(), predicted.max())]
    axes.plot(ends, ends, color="gray", linestyle=":")
    axes.scatter(expected, predicted, 4, color=BLUE, alpha=0.4, linewidths=0)
    axes.set(xlabel="target", ylabel="prediction", title=_plain(title))
    return figure


def _plain(name: str) -> str:
    """Return a name of at most 24 characters, in which a dollar sign does not begin a formula."""
    name = " ".join(name.split())
    return (name if len(name) <= 24 else f"{name[:14]}...{name[-7:]}").replace("$", r"\$")


def draw_learning_curves(
    log_history: Iterable[Mapping[str, float]], evaluations: Iterable[Mapping[str, float]], chosen_by: str,
    kept: float | None,
) -> Figure:  # fmt: skip
    """Draw the losses by epoch and, beside them, the validation scores."""
    table = pd.DataFrame(evaluations).set_index("epoch")
    losses = table.filter(regex="loss$").rename(
        columns=lambda name: name.replace("loss", "validation")
    )
    scores = table.drop(columns=[*MOMENT[1:], *table.filter(regex="loss$")])
    scores = scores[sorted(scores, key=lambda name: name != chosen_by)[: len(COLORS)]]
    count = 1 if scores.empty else 2
    figure, panels = plt.subplots(
        1, count, figsize=(COLUMN if count == 1 else PAGE, 0.8 * COLUMN), squeeze=False
    )
    logged = pd.DataFrame(log_history)
    if "loss" in logged:
        logged.dropna(subset="loss").plot(
            "epoch", "loss", ax=panels[0, 0], color=BLUE, label="training"
        )
    # Below broken lines, an equal curve shows.
    styles = [
        f"{marker}{line}"
        for marker, line in zip(MARKERS, ("-", "--", ":", "-.", "--", ":"), strict=True)
    ]
    for axes, drawn, label in zip(
        panels[0], (losses, scores), ("loss", "validation score"), strict=False
    ):
        for name, color, style in zip(
            drawn, [*COLORS[1:], BLUE], styles, strict=False
        ):  # BLUE is the training's
            drawn[name].plot(ax=axes, color=color, style=style, label=name.replace("_", " "))
        axes.set(xlabel="epoch", ylabel=label)
        if all(float(epoch).is_integer() for epoch in table.index):
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if kept is not None:
            axes.axvline(kept, color="gray", linestyle=":", label="kept")
        axes.legend()
    return figure


def report_end(
    trainer: Any, results: Mapping[str, Any], kept: Any, example: str | Sequence[str] | None
) -> None:
    """Draw the figures of a finished run; print its scores, its files and what to do next, in the
    main process.
    """
    output, saved = Path(trainer.args.output_dir), Path(trainer.args.output_dir, trainer.saved_as)
    print(f"\n{_describe_scores(trainer, results)}")
    size = sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    shown = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
    rows = {
        trainer.saved_as.capitalize(): f"{saved} ({shown}), trained in {timedelta(seconds=round(results['seconds']))}",
        "Results": str(output / "results.json"),
    }
    rows |= show_predicted(output, kept, results["task"])
    curves = output / "learning_curves.png"
    curves.unlink(missing_ok=True)  # of an earlier run
    if len(results["epochs"]) > 1:
        own = (results["epochs"], results["chosen_by"], trainer.kept.get("epoch"))
        save_png(draw_learning_curves(trainer.state.log_history, *own), curves)
        rows["Learning curves"] = str(curves)
    if example is not None and is_houlsby(saved):
        rows["Predict"] = predict_command(saved, example)
        rows["In a browser"] = shlex.join([*_tool(), "serve", "--adapters", str(saved)])
    if is_houlsby(saved) and not trainer.args.push_to_hub:
        rows["Share"] = push_command(saved)
    print_files(rows)


def print_files(rows: Mapping[str, str]) -> None:
    print("\n" + "\n".join(f"{name + ':':<18}{value}" for name, value in rows.items()), flush=True)


def show_predicted(output: Path, kept: Any, task: str) -> dict[str, str]:
    """Print the scores of each class; write the confusion matrix, the most confident mistakes and
    how reliable probabilities are, or the predictions against the targets; return what was written.
    """
    if kept is None:
        return {}
    names = ("confusion_matrix.png", "reliability.png", "values.png", "mistakes.csv")
    confused, reliable, values, mistaken = files = [output / name for name in names]
    for file in files:
        file.unlink(missing_ok=True)  # of an earlier run
    title, scores, written = f"{task}, {kept.split}", kept.scores, {}
    if isinstance(scores, ValueScores):
        save_png(draw_values(scores.expected, scores.predicted, title), values)
        return {"Predictions": str(values)}
    print(f"\nBy class, on the {kept.split} split:\n{scores.table()}")
    confusion = scores.confusion()
    if confusion is not None and len(confusion[1]) <= MAX_CLASSES:
        save_png(draw_confusion(*confusion, title), confused)
        written["Confusion matrix"] = str(confused)
    elif confusion is not None:
        written["Confusion matrix"] = (
            f"not drawn for {len(confusion[1])} classes (at most {MAX_CLASSES})"
        )
    if scores.confidence is not None and len(scores.confidence):
        bins, error = scores.reliability()
        save_png(draw_reliability(bins, error, title), reliable)
        written["Reliability"] = f"{reliable} (expected calibration error {error:.3f})"
        mistakes = scores.mistakes(MAX_MISTAKES)
        texts = [
            name
            for name, kind in kept.data.features.items()
            if getattr(kind, "dtype", None) == "string"
        ]
        if len(mistakes) and texts:
            rows = kept.data.select(mistakes["row"]).select_columns(texts).to_pandas()
            table = mistakes.assign(**{name: rows[name] for name in texts})
            if WHERE in table:  # such as "line 12" of the user's file
                table["row"] = table.pop(WHERE)
            table.map(defused).to_csv(mistaken, index=False)
            wrong = int((scores.expected != scores.predicted).sum())
            written["Mistakes"] = f"{mistaken} (the most confident {len(mistakes)} of {wrong:,})"
        elif texts:
            written["Mistakes"] = "none"
    return written


def _describe_scores(trainer: Any, results: Mapping[str, Any]) -> str:
    """Return the scores of the kept weights, for validation and, if there is one, the test split."""
    kept = trainer.kept
    if not kept:
        return "Not evaluated."
    which = "Last" if results["best_epoch"] is None else "Best"
    of = f" of {trainer.state.num_train_epochs}" if float(kept["epoch"]).is_integer() else ""
    chosen = results["chosen_by"].removeprefix("eval_")
    scores = dict(
        sorted(
            results["best_scores"].items(), key=lambda item: (item[0] != chosen, item[0] == "loss")
        )
    )
    lines = [f"{which} epoch: {kept['epoch']:.4g}{of}, with {format_scores(scores)} on validation"]
    if results.get("metrics"):
        lines.append(f"Metrics: {format_scores(results['metrics'])} on validation")
    test = results.get("test")
    if test and all(isinstance(score, float) for score in test.values()):
        lines.append(f"Test: {format_scores(test)}")
    return "\n".join(lines)


def predict_command(adapter: Path, example: str | Sequence[str]) -> str:
    """Return the command that predicts for an example, which is shortened."""
    texts = [_shorten(text) for text in ([example] if isinstance(example, str) else example)]
    return shlex.join(
        [*_tool(), "predict", str(adapter), *texts, *(["--pairs"] if len(texts) == 2 else [])]
    )


def push_command(adapter: Path) -> str:
    """Return the command that pushes a saved adapter and the results of its run, to a repository of
    the run's name.
    """
    from houlsby_peft import HoulsbyConfig  # only here, as the tables of a study need no torch
    from houlsby_peft.hub.card import find_base

    if find_base(HoulsbyConfig.from_pretrained(adapter))[0] is None:
        return "its base model must be on the Hub, see docs/hub.md"
    name = "-".join(
        re.findall(r"\w+(?:\.\w+)*", adapter.resolve().parent.name, re.ASCII)
    )  # as the Hub allows
    return shlex.join([*_tool(), "push", str(adapter), name or "adapter"])


def _tool() -> list[str]:
    """Return how to call `houlsby-peft`, also if its environment is not activated."""
    beside = Path(sys.executable).with_name("houlsby-peft")
    if shutil.which("houlsby-peft"):
        return ["houlsby-peft"]
    if beside.exists() and beside.is_relative_to(Path.cwd()):
        return [str(beside.relative_to(Path.cwd()))]
    return [sys.executable, "-m", "houlsby_peft_cli"]


def _shorten(text: str) -> str:
    """Return the beginning of a text on one line, which a parser of arguments does not take for a
    flag.
    """
    line = " ".join(
        "".join(letter if letter.isprintable() else " " for letter in text).split()
    ).lstrip("-")
    if len(line) > _MAX_EXAMPLE:
        line = line[:_MAX_EXAMPLE].rpartition(" ")[0] or line[:_MAX_EXAMPLE]
    return line.strip() or "text"
