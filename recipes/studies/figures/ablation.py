"""Which layers' adapters matter: remove those of every continuous span of layers, score the rest.

Houlsby et al. 2019, figure 6 (left); Mohebbi and Rajaei 2020, figure 8. Nothing is trained. With
--prune, also save the adapter without the longest span whose removal costs at most that share of
the score, into the folder "pruned".
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from tqdm.auto import tqdm

from figures import drawing, flags
from figures.drawing import Point
from figures.finished_run import FinishedRun, load_run
from houlsby_peft import ablate, prune
from results.numbers import LARGEST_DROP, WITHOUT_ADAPTERS
from results.table import CONSTANT
from run.edge import RecipeError
from run.figures import COLUMN, RED, save
from tasks.scores import describe_constant, proper_name


Span = tuple[int, int]  # the first and the last layer


@dataclass(frozen=True)
class Removal:
    """The scores without the adapters of a span of layers."""

    span: Span
    scores: dict[str, float]
    relative_change: float  # of the shown score

    @property
    def length(self) -> int:
        first, last = self.span
        return last - first + 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_score(parser, default="accuracy")
    flags.add_evaluation(parser)
    parser.add_argument(
        "--norms",
        choices=("keep", "remove"),
        default="keep",
        help="Whether removed layers keep their trained norms.",
    )
    parser.add_argument(
        "--prune",
        type=float,
        help="Save the adapter without the longest span that costs at most this share.",
    )


def main(folder: Path, arguments: argparse.Namespace) -> None:
    """Score every span, write the numbers and the figure, and prune if asked to."""
    run = load_run(folder, arguments.data_dir, arguments.batch_size)
    if arguments.score == "accuracy" and len(run.task.labels) == 1:
        raise RecipeError(
            f"{run.task.name} is a regression, which has no accuracy: give --score main."
        )
    name, model = run.task.name, run.results["model"]
    score_name = "accuracy"
    if arguments.score == "main":
        score_name = run.task.scores[0].rpartition("matched_")[2]
    whole = run.score(arguments.max_eval_samples)
    removals = score_spans(run, whole[score_name], score_name, arguments)
    constant = run.results.get("constant")
    facts: Point = {"task": name, "model": model, "score_name": score_name, "constant": constant}
    first: Point = {"span": None, "scores": whole, **facts, "norms": arguments.norms}
    drawing.write_points(folder / "ablation.jsonl", [first, *map(vars, removals)])
    if score_name == "accuracy":
        print_beside_paper(run, removals)
    title = f"Adapters removed: {proper_name(name)}, {Path(model).name}"
    if constant is not None:
        print(describe_constant(constant))
        title += f" {CONSTANT}"
    size = run.trainer.model.config.num_hidden_layers
    save(draw(removals, size, proper_name(score_name), title), folder / "ablation")
    if arguments.prune is not None:
        prune_run(run, removals, arguments)


def score_spans(
    run: FinishedRun, whole_score: float, score_name: str, arguments: argparse.Namespace
) -> list[Removal]:
    """Return the scores without the adapters of each span, and the change relative to the whole."""
    if whole_score <= 0:
        raise RecipeError(
            f"The changes are relative to the run's {score_name}, which is {whole_score}: train it "
            "first."
        )
    model = run.trainer.model
    size = model.config.num_hidden_layers
    spans = [(first, last) for last in range(size) for first in range(last + 1)]
    removals = []
    for first, last in tqdm(spans, unit="span"):
        with ablate(model, range(first, last + 1), keep_norms=arguments.norms == "keep"):
            scores = run.score(arguments.max_eval_samples)
        removals.append(Removal((first, last), scores, scores[score_name] / whole_score - 1))
    return removals


def print_beside_paper(run: FinishedRun, removals: Sequence[Removal]) -> None:
    """Print what section 3.5 of Houlsby et al. 2019 says of figure 6, and the run's own numbers."""
    paper = "Houlsby et al. 2019, BERT-base:"
    everything = max(removals, key=lambda removal: removal.length)
    labels = np.bincount(run.validation["label"])
    text = f"without any adapter: accuracy {100 * everything.scores['accuracy']:.1f}"
    text += f", the majority class {100 * labels.max() / labels.sum():.1f}"
    if run.task.name in WITHOUT_ADAPTERS:
        text += f"; {paper} {WITHOUT_ADAPTERS[run.task.name]}, the majority class"
    print(text)
    drops = [-100 * removal.relative_change for removal in removals if removal.length == 1]
    print(f"without one layer's: at most {max(drops) + 0.0:.1f}% less; {paper} {LARGEST_DROP}%")
    for removal in removals:
        if removal.span == (0, 4):
            text = f"without layers 0 to 4: {100 * removal.relative_change:+.1f}%"
            print(f"{text}; {paper} hardly any change on MNLI")


def draw(removals: Sequence[Removal], size: int, score: str, title: str) -> Figure:
    """Draw the changes in percent: first layer of the span down, last layer to the right.

    Single layers are framed.
    """
    changes = np.full((size, size), np.nan)
    for removal in removals:
        changes[removal.span] = 100 * removal.relative_change
    figure, [axes] = drawing.panels(1, 0.9 * COLUMN)
    # Colors range from the worst change to none. The few small gains are white, with their number.
    worst = min(float(np.nanmin(changes)), -1.0)
    image = axes.imshow(changes, cmap="cividis", vmin=worst, vmax=0)
    # The changes on their squares: smaller and without digits where there are many.
    is_large = size > 8
    digits = 0 if is_large or worst <= -10 else 1
    for removal in removals:
        first, last = removal.span
        change = changes[first, last]
        axes.text(
            last,
            first,
            f"{round(change, digits) + 0.0:.{digits}f}",  # no -0
            ha="center",
            va="center",
            fontsize=5 if is_large else 7,
            color="black" if change > worst / 2 else "white",
        )
    for layer in range(size):
        corner = (layer - 0.5, layer - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=RED, linewidth=1))
    axes.set(
        xlabel="last layer without adapters",
        ylabel="first layer without adapters",
        title=title,
        xticks=range(size),
        yticks=range(size),
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    label = f"relative change of the {score} (%)"
    figure.colorbar(image, ax=axes, label=label, shrink=0.8).outline.set_visible(False)
    return figure


def prune_run(run: FinishedRun, removals: Sequence[Removal], arguments: argparse.Namespace) -> None:
    """Save the adapter without the longest span that costs at most --prune.

    Among equally long spans, it is the cheapest. At least one layer keeps its adapters.
    """
    size = run.trainer.model.config.num_hidden_layers
    partial = [removal for removal in removals if removal.length < size]
    cheap = [removal for removal in partial if removal.relative_change >= -arguments.prune]
    if not cheap:
        print(f"Nothing to prune: every span costs more than {arguments.prune:.1%} of the score.")
        return
    removal = max(cheap, key=lambda removal: (removal.length, removal.relative_change))
    first, last = removal.span
    prune(run.trainer.model, range(first, last + 1), "pruned", keep_norms=arguments.norms == "keep")
    folder = arguments.folder
    run.trainer.model.save_pretrained(str(folder), selected_adapters=["pruned"])
    pruned, adapter = _megabytes(folder / "pruned"), _megabytes(folder / "adapter")
    print(
        f"Pruned layers {first} to {last}, which changes the score by "
        f"{removal.relative_change:+.1%}: {folder}/pruned, {pruned:.2f} MB instead of "
        f"{adapter:.2f}."
    )


def _megabytes(adapter: Path) -> float:
    return (adapter / SAFETENSORS_WEIGHTS_NAME).stat().st_size / 1e6
