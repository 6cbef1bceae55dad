"""Compare the variants of the adapter that Houlsby et al. 2019 found no better (section 3.6).

    python recipes/extensions.py                                           # generated sentences, no data
    python recipes/extensions.py --task cola mrpc --data_dir glue --model_name minilm

Layer or batch norm inside the adapter, two layers, other activations, attention only, and parallel to the sub-layer
with and without a multiplicative gate; see variants.py. Writes extensions.jsonl, .png and .svg: differences to the
paper's adapter at the best epoch of each run, as means over the seeds with one standard error, paired by seed.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from analysis.grid import RECIPES, GridParser, make_grids, run_missing
from analysis.runs import write_lines
from analysis.variants import VARIANTS
from study.papers import proper_name
from study.results import Results, in_percent, mean_and_error
from study.table import difference
from sweeping.runs import PlannedRun
from training.errors import RecipeError, end_with_one_line
from training.figures import COLORS, COLUMN, MARKERS, plt, save


PAPER = "paper"
# The library cannot load these variants again, so the runs end with the last epoch.
NO_CHECKPOINTS = ("--save_strategy", "no", "--load_best_model_at_end", "false")


def main() -> None:
    """Read the command line, execute missing runs, write the numbers and the figure."""
    parser = GridParser("runs/extensions", __doc__, {"seed": [0]})
    parser.add_values("variant", VARIANTS, help="Variants.", choices=VARIANTS)
    arguments, flags = parser.parse()
    if PAPER not in arguments.variant:
        raise RecipeError(f"Variants are compared with --variant {PAPER}, got {' '.join(arguments.variant)}. Add it.")
    axes = {"variant": arguments.variant, "seed": arguments.seed}
    recipe = RECIPES / "variants.py"
    runs = make_grids(arguments.output_dir, arguments.task, [axes], [*flags, *NO_CHECKPOINTS], recipe)
    if not arguments.draw_only:
        run_missing(runs, arguments)
    if arguments.dry_run:
        return
    rows = summarize(runs)
    write_lines(arguments.output_dir / "extensions.jsonl", rows)
    save(draw(rows), arguments.output_dir / "extensions")


def best_score(results: Results) -> float:
    """Return the score of a run's best epoch in percent; the weights of the last one are kept."""
    name = results["chosen_by"]
    scores = [in_percent(results, name, epoch[name]) for epoch in results["epochs"]]
    return min(scores) if name.endswith("loss") else max(scores)


def summarize(runs: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """Return a row per task and variant: scores in percent, and their mean minus that of the paper's adapter.

    Raises:
        RecipeError: If a task has no run of the paper's adapter.
    """
    found: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        if results := run.results:
            variants = found.setdefault(results["task"], {})
            variants.setdefault(run.point["variant"], {})[results["seed"]] = best_score(results)
    missing = [task for task, variants in found.items() if PAPER not in variants]
    if missing or not found:
        raise RecipeError(
            f"Variants are compared with --variant {PAPER}, which has no run on {missing or 'any task'}."
        )
    return [
        {
            "task": task, "variant": variant, "mean": mean_and_error([*scores.values()])[0], "change": change,
            "error": error, "scores": scores,
        }
        for task, variants in found.items()
        for variant, scores in variants.items()
        for change, error in [difference(scores, variants[PAPER])]
    ]  # fmt: skip


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw a row per variant, with a marker per task."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(figsize=(COLUMN, 0.9 + 0.22 * len(variants)))
    axes.axvline(0, color="black", linewidth=0.8, linestyle="--")
    for number, (task, color, marker) in enumerate(zip(tasks, COLORS, MARKERS, strict=False)):
        own = [row for row in rows if row["task"] == task]
        heights = [variants.index(row["variant"]) + 0.15 * (number - (len(tasks) - 1) / 2) for row in own]
        changes, errors = [row["change"] for row in own], [row["error"] or 0 for row in own]
        axes.errorbar(changes, heights, xerr=errors, fmt=marker, color=color, label=proper_name(task), linewidth=1)
    axes.set_yticks(range(len(variants)), [variant.replace("_", " ") for variant in variants])
    axes.invert_yaxis()
    seeds = max(len(row["scores"]) for row in rows)
    title = f"Variants of the adapter, {seeds} seeds" if seeds > 1 else "Variants of the adapter, one seed"
    axes.set(xlabel="score - the paper's adapter's (points)", title=title)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(3, len(tasks)))
    return figure


if __name__ == "__main__":
    end_with_one_line(main)
