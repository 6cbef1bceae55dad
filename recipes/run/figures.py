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
from scipy.stats import binomtest

from run.run import MOMENT, WHERE, is_houlsby
from tasks.scores import ValueScores, describe_majority, format_scores


MAX_CLASSES = 40  # in a confusion matrix, to be readable on a page
MAX_MISTAKES = 20
FEWEST_TO_BIN = 100  # examples, from fewer of which a share by probability says nothing
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
    """Draw the number of each prediction (columns) among the examples of a label (rows); the color
    is its share.
    """
    from sklearn.metrics import ConfusionMatrixDisplay  # only here, as the import takes a second

    totals = matrix.sum(axis=1)
    labels = [_plain(name) for name in names]
    longest = max(map(len, labels))
    are_upright = longest * len(labels) > 30
    is_small = len(names) <= 10
    width = max(0.5 if is_small else 0.27, 1.6 / len(names)) * len(names)
    height = width + 0.8
    if are_upright:
        height += 0.06 * longest
    figure: Figure
    figure, axes = plt.subplots(figsize=(width + 1 + 0.06 * longest, height))
    display = ConfusionMatrixDisplay(matrix / np.maximum(totals, 1)[:, None], display_labels=labels)
    display.plot(
        ax=axes,
        cmap="Blues",
        colorbar=False,
        im_kw={"vmin": 0, "vmax": 1},
        xticks_rotation="vertical" if are_upright else "horizontal",
        # Measuring hundreds of texts for the layout takes seconds.
        text_kw={"fontsize": 7.0 if is_small else 5.5, "in_layout": False},
    )
    for text, count in zip(display.text_.flat, matrix.flat, strict=True):
        text.set_text(f"{count:,}" if count else "")
    axes.set(xlabel="prediction", ylabel="label")
    axes.spines[:].set_visible(False)
    figure.suptitle(f"{_plain(title)}\nnumber of examples", fontsize=8)
    return figure


def draw_reliability(bins: pd.DataFrame, error: float, title: str) -> Figure:
    """Draw the share of right predictions by the model's probability, with 95 % intervals; on the
    dotted line, they are equal.
    """
    figure: Figure
    figure, axes = plt.subplots(figsize=(COLUMN, 0.9 * COLUMN))
    axes.plot([0, 1], [0, 1], color="gray", linestyle=":")
    intervals = []
    for share, count in zip(bins["right"], bins["examples"], strict=True):
        interval = binomtest(round(share * count), int(count)).proportion_ci(method="wilson")
        intervals.append([max(0, share - interval.low), max(0, interval.high - share)])
    axes.bar(
        bins["confidence"],
        bins["right"],
        0.05,
        yerr=np.transpose(intervals),
        color=SKY,
        ecolor=BLUE,
        capsize=2,
    )
    axes.set(
        xlabel="probability of the prediction",
        ylabel="share of right predictions",
        xlim=(0, 1.03),
        ylim=(0, 1.03),
    )
    axes.set_title(f"{_plain(title)}\nexpected calibration error {error:.3f}")
    return figure


def draw_values(
    expected: NDArray[np.floating[Any]], predicted: NDArray[np.floating[Any]], title: str
) -> Figure:
    """Draw the predictions against the targets; on the dotted line, they are equal."""
    figure: Figure
    figure, axes = plt.subplots(figsize=(COLUMN, 0.9 * COLUMN))
    ends = [min(expected.min(), predicted.min()), max(expected.max(), predicted.max())]
    axes.plot(ends, ends, color="gray", linestyle=":")
    axes.scatter(expected, predicted, 4, color=BLUE, alpha=0.4, linewidths=0)
    axes.set(xlabel="target", ylabel="prediction", title=_plain(title))
    return figure


def _plain(name: str) -> str:
    """Return a name of at most 24 characters, in which a dollar sign does not begin a formula."""
    name = " ".join(name.split())
    if len(name) > 24:
        name = f"{name[:14]}...{name[-7:]}"
    return name.replace("$", r"\$")


def draw_learning_curves(
    log_history: Iterable[Mapping[str, float]],
    evaluations: Iterable[Mapping[str, float]],
    chosen_by: str,
    kept: float | None,
) -> Figure:
    """Draw the losses by epoch and, beside them, the validation scores."""
    table = pd.DataFrame(evaluations).set_index("epoch")
    losses = table.filter(regex="loss$").rename(
        columns=lambda name: name.replace("loss", "validation")
    )
    scores = table.drop(columns=[*MOMENT[1:], *table.filter(regex="loss$")])
    scores = scores[sorted(scores, key=lambda name: name != chosen_by)[: len(COLORS)]]
    panels = 1 if scores.empty else 2
    figure: Figure
    figure, axes = plt.subplots(
        1, panels, figsize=((COLUMN, PAGE)[panels - 1], 0.8 * COLUMN), squeeze=False
    )
    of_loss, *of_scores = axes[0]
    logged = pd.DataFrame(log_history)
    if "loss" in logged:
        logged.dropna(subset="loss").plot("epoch", "loss", ax=of_loss, color=BLUE, label="training")
    _draw_curves(of_loss, losses, "loss", kept)
    for panel in of_scores:
        _draw_curves(panel, scores, "validation score", kept)
    return figure


def _draw_curves(axes: Any, curves: pd.DataFrame, label: str, kept: float | None) -> None:
    """Draw each column against the epoch, and mark the one whose weights are kept."""
    # Blue is the training's. Below broken lines, an equal curve shows.
    colors, lines = [*COLORS[1:], BLUE], ("-", "--", ":", "-.", "--", ":")
    for name, color, marker, line in zip(curves, colors, MARKERS, lines, strict=False):
        style = f"{marker}{line}"
        curves[name].plot(ax=axes, color=color, style=style, label=name.replace("_", " "))
    axes.set(xlabel="epoch", ylabel=label)
    if all(float(epoch).is_integer() for epoch in curves.index):
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if kept is not None:
        axes.axvline(kept, color="gray", linestyle=":", label="kept")
    axes.legend()


def report_end(
    trainer: Any, results: Mapping[str, Any], kept: Any, example: str | Sequence[str] | None
) -> None:
    """Draw the figures of a finished run; print its scores, its files and what to do next, in the
    main process.
    """
    output = Path(trainer.args.output_dir)
    saved = output / trainer.saved_as
    print(f"\n{_describe_scores(trainer, results)}")
    if line := describe_majority(results["dataset"]):
        print(line)
    duration = timedelta(seconds=round(results["seconds"]))
    size = sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    shown = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
    files = {
        trainer.saved_as.capitalize(): f"{saved} ({shown}), trained in {duration}",
        "Results": str(output / "results.json"),
        **show_predicted(output, kept, results["task"]),
    }
    curves = output / "learning_curves.png"
    curves.unlink(missing_ok=True)  # of an earlier run
    if len(results["epochs"]) > 1:
        figure = draw_learning_curves(
            trainer.state.log_history,
            results["epochs"],
            results["chosen_by"],
            trainer.kept.get("epoch"),
        )
        save_png(figure, curves)
        files["Learning curves"] = str(curves)
    if example is not None and is_houlsby(saved):
        files["Predict"] = predict_command(saved, example)
        files["In a browser"] = serve_command(saved)
    if is_houlsby(saved) and not trainer.args.push_to_hub:
        files["Share"] = push_command(saved)
    print_files(files)


def print_files(files: Mapping[str, str]) -> None:
    lines = [f"{name + ':':<18}{file}" for name, file in files.items()]
    print("\n" + "\n".join(lines), flush=True)


def show_predicted(output: Path, kept: Any, task: str) -> dict[str, str]:
    """Print the scores of each class; write the confusion matrix, the most confident mistakes and
    how reliable probabilities are, or the predictions against the targets; return what was written.
    """
    if kept is None:
        return {}
    for name in ("confusion_matrix.png", "reliability.png", "values.png", "mistakes.csv"):
        (output / name).unlink(missing_ok=True)  # of an earlier run
    title, scores = f"{task}, {kept.split}", kept.scores
    if isinstance(scores, ValueScores):
        values = output / "values.png"
        save_png(draw_values(scores.expected, scores.predicted, title), values)
        return {"Predictions": str(values)}
    print(f"\nBy class, on the {kept.split} split:\n{scores.table()}")
    written = {}
    if confusion := scores.confusion():
        matrix, names = confusion
        written["Confusion matrix"] = f"not drawn for {len(names)} classes (at most {MAX_CLASSES})"
        if len(names) <= MAX_CLASSES:
            path = output / "confusion_matrix.png"
            save_png(draw_confusion(matrix, names, title), path)
            written["Confusion matrix"] = str(path)
    if scores.confidence is not None and len(scores.confidence):
        if len(scores.confidence) >= FEWEST_TO_BIN:
            bins, error = scores.reliability()
            reliable = output / "reliability.png"
            save_png(draw_reliability(bins, error, title), reliable)
            written["Reliability"] = f"{reliable} (expected calibration error {error:.3f})"
        written |= _show_mistakes(output / "mistakes.csv", kept)
    return written


def _show_mistakes(path: Path, kept: Any) -> dict[str, str]:
    """Write the most confident mistakes, with their texts, if the examples have texts."""
    kinds = kept.data.features
    texts = [name for name in kinds if getattr(kinds[name], "dtype", None) == "string"]
    if not texts:
        return {}
    from houlsby_peft.tables import defused  # only here, as the tables of a study need no torch

    mistakes = kept.scores.mistakes(MAX_MISTAKES)
    if mistakes.empty:
        return {"Mistakes": "none"}
    rows = kept.data.select(mistakes["row"]).select_columns(texts).to_pandas()
    for name in texts:
        mistakes[name] = rows[name]
    if WHERE in mistakes:  # such as "row 12" of the user's file
        mistakes["row"] = mistakes.pop(WHERE).str.replace("^(row|line) ", "", regex=True)
    mistakes.map(defused).to_csv(path, index=False)
    wrong = int((kept.scores.expected != kept.scores.predicted).sum())
    return {"Mistakes": f"{path} (the most confident {len(mistakes)} of {wrong:,})"}


def _describe_scores(trainer: Any, results: Mapping[str, Any]) -> str:
    """Return the scores of the kept weights, for validation and any test split."""
    kept = trainer.kept
    if not kept:
        return "Not evaluated."
    which = "Last" if results["best_epoch"] is None else "Best"
    epoch = f"{kept['epoch']:.4g}"
    if float(kept["epoch"]).is_integer():
        epoch += f" of {trainer.state.num_train_epochs}"
    chosen = results["chosen_by"].removeprefix("eval_")
    # The one that chose the epoch first, the loss last.
    names = sorted(results["best_scores"], key=lambda name: (name != chosen, name == "loss"))
    scores = {name: results["best_scores"][name] for name in names}
    intervals = results["intervals"]
    shown = format_scores(scores, intervals.get("validation"))
    lines = [f"{which} epoch: {epoch}, with {shown} on validation"]
    if results.get("metrics"):
        lines.append(f"Metrics: {format_scores(results['metrics'])} on validation")
    test = results.get("test")
    if test and all(isinstance(score, float) for score in test.values()):
        lines.append(f"Test: {format_scores(test, intervals.get('test'))}")
    if results.get("baseline"):
        lines.append(describe_baseline(results))
    return "\n".join(lines)


def describe_baseline(results: Mapping[str, Any]) -> str:
    """Return the scores of the baseline, and whether what was trained is better."""
    baseline, chosen = results["baseline"], results["chosen_by"].removeprefix("eval_")
    scores = {chosen: baseline["scores"][chosen], **baseline["scores"]}
    line = (
        "Baseline: a logistic regression on the frozen encoder has "
        f"{format_scores(scores, baseline['intervals'])} on validation"
    )
    if scores[chosen] >= results["best_scores"][chosen]:
        return f"{line}. It is as good as what was trained."
    if scores[chosen] >= results["intervals"]["validation"][chosen]["low"]:
        return f"{line}. With so few examples, the difference may be chance."
    return line


def predict_command(adapter: Path, example: str | Sequence[str]) -> str:
    """Return the command that predicts for an example, which is shortened, with an adapter or a
    folder of runs.
    """
    texts = [example] if isinstance(example, str) else example
    words = [*_tool(), "predict", str(adapter)]
    for text in texts:
        printable = "".join(letter if letter.isprintable() else " " for letter in text)
        line = " ".join(printable.split()).lstrip("-")  # as a parser takes it for a flag
        if len(line) > _MAX_EXAMPLE:
            line = line[:_MAX_EXAMPLE].rpartition(" ")[0] or line[:_MAX_EXAMPLE]
        words.append(line.strip() or "text")
    if len(texts) == 2:
        words.append("--pairs")
    return shlex.join(words)


def serve_command(adapters: Path) -> str:
    """Return the command that serves an adapter, or a folder of runs."""
    return shlex.join([*_tool(), "serve", "--adapters", str(adapters)])


def push_command(adapter: Path) -> str:
    """Return the command that pushes a saved adapter and the results of its run, to a repository of
    the run's name.
    """
    from houlsby_peft import HoulsbyConfig  # only here, as the tables of a study need no torch
    from houlsby_peft.hub.card import find_base

    if find_base(HoulsbyConfig.from_pretrained(str(adapter)))[0] is None:
        return "its base model must be on the Hub, see docs/hub.md"
    words = re.findall(r"\w+(?:\.\w+)*", adapter.resolve().parent.name, re.ASCII)
    name = "-".join(words)  # as the Hub allows
    return shlex.join([*_tool(), "push", str(adapter), name or "adapter"])


def _tool() -> list[str]:
    """Return how to call `houlsby-peft`, also if its environment is not activated."""
    beside = Path(sys.executable).with_name("houlsby-peft")
    if shutil.which("houlsby-peft"):
        return ["houlsby-peft"]
    if beside.exists() and beside.is_relative_to(Path.cwd()):
        return [str(beside.relative_to(Path.cwd()))]
    return [sys.executable, "-m", "houlsby_peft_cli"]
