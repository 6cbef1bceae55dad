"""Which layers' adapters matter: remove those of every continuous span of layers and score the rest, untrained.

    accelerate launch recipes/glue.py && python recipes/ablation.py     # generated sentences, no data needed
    python recipes/ablation.py --run runs/cola --prune 0.01

Houlsby et al. 2019, figure 6 (left); Mohebbi and Rajaei 2020, figure 8. Writes ablation.jsonl (the score with all
adapters, then one line per span), ablation.png and ablation.svg; with --prune also pruned/, the adapter without the
longest span whose removal costs at most that share of the score.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from transformers import EvalPrediction
from transformers.hf_argparser import HfArg

from analysis.runs import RUN, FinishedRun, load_run, read_run, write_lines
from analysis.spans import SpanModel
from houlsby_peft import prune
from study.papers import proper_name
from tasks.glue import TASKS
from training.arguments import RecipeParser
from training.errors import RecipeError, end_with_one_line
from training.figures import COLUMN, RED, plt, save


@dataclass
class AblationArguments:
    """What to ablate, and how to score it."""

    run: str = HfArg(default=RUN, help="Output folder of a run of recipes/glue.py.")
    data_dir: str | None = HfArg(default=None, help="Folder of the task's files; default: the run's own.")
    score: Literal["accuracy", "main"] = HfArg(
        default="accuracy", help="What the figure shows: accuracy, as in the paper, or the task's main score."
    )
    norms: Literal["keep", "remove"] = HfArg(
        default="keep", help="Whether to keep the trained norms where adapters are removed, or to use the encoder's."
    )
    prune: float | None = HfArg(
        default=None, help="Save the adapter without the longest span that costs at most this share of the score."
    )
    max_eval_samples: int | None = HfArg(default=None, help="Score on a random sample of this many examples.")
    batch_size: int = HfArg(default=64, help="Sentences per evaluation step.")
    output_dir: str | None = HfArg(default=None, help="Where to write; default: the run's folder.")
    dry_run: bool = HfArg(default=False, help="Print what would be scored, and load nothing.")


def main() -> None:
    """Read the command line, score every span, write the numbers and the figure, and prune if asked to."""
    (arguments,) = RecipeParser((AblationArguments,), usage="python recipes/ablation.py [flags]").parse()
    results, output = read_run(arguments.run), Path(arguments.output_dir or arguments.run)
    if arguments.score == "accuracy" and len(TASKS[results["task"]].labels) == 1:
        raise RecipeError(f"{results['task']} is a regression, which has no accuracy: give --score main.")
    if arguments.dry_run:
        print(f"{arguments.run}: {results['task']}, {results['model']}, each span of layers, into {output}")
        return
    run = load_run(arguments.run, arguments.data_dir)
    spans = SpanModel(run.model, keep_norms=arguments.norms == "keep")
    start = time.perf_counter()
    rows = score_spans(run, spans, arguments)
    print(f"{len(rows) - 1} spans of {len(spans.layers)} layers in {time.perf_counter() - start:.0f} s")
    write_lines(output / "ablation.jsonl", rows)
    save(draw(rows, len(spans.layers), f"Adapters removed: {run.name}"), output / "ablation")
    if arguments.prune is not None:
        prune_run(run, rows, arguments, output)


def score_spans(run: FinishedRun, spans: SpanModel, arguments: AblationArguments) -> list[dict[str, Any]]:
    """Return the scores with all adapters, then without those of each span, with the relative change."""
    score = run.task.scorer()
    labels, logits = [], []
    for batch in run.batches(arguments.batch_size, arguments.max_eval_samples):
        labels.append(batch.pop("labels"))
        logits.append(torch.stack(list(spans.outputs(batch))))
    references, outputs = torch.cat(labels).cpu().numpy(), torch.cat(logits, dim=1).float().cpu().numpy()
    score_name = "accuracy" if arguments.score == "accuracy" else run.task.main_score.rpartition("matched_")[2]
    rows: list[dict[str, Any]] = []
    for span, predictions in zip([None, *spans.spans()], outputs, strict=True):
        scores = score(EvalPrediction(predictions, references))
        if len(run.task.labels) > 1:
            scores["accuracy"] = float((predictions.argmax(-1) == references).mean())
        rows.append({"span": span, "scores": scores})
    full = rows[0]["scores"][score_name]
    if full <= 0:
        raise RecipeError(f"The changes are relative to the run's {score_name}, which is {full}: train it first.")
    rows[0] |= {"task": run.task.name, "model": run.results["model"], "examples": len(references),
                "score_name": score_name, "norms": arguments.norms}  # fmt: skip
    for row in rows[1:]:
        row["relative_change"] = row["scores"][score_name] / full - 1
    return rows


def draw(rows: list[dict[str, Any]], size: int, name: str) -> Figure:
    """Draw the changes in percent: first layer of the span down, last layer to the right, single layers framed."""
    changes = np.full((size, size), np.nan)
    for row in rows[1:]:
        changes[row["span"]] = 100 * row["relative_change"]
    figure, axes = plt.subplots(figsize=(COLUMN, 0.9 * COLUMN))
    # Colors range from the worst change to none; the few small gains are white, too, with their number.
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
            axes.add_patch(Rectangle((last - 0.5, first - 0.5), 1, 1, fill=False, edgecolor=RED, linewidth=1))
    axes.set(
        xlabel="last layer without adapters", ylabel="first layer without adapters", title=name,
        xticks=range(size), yticks=range(size),
    )  # fmt: skip
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    label = f"relative change of the {proper_name(rows[0]['score_name'])} (%)"
    figure.colorbar(image, ax=axes, label=label, shrink=0.8).outline.set_visible(False)
    return figure


def prune_run(run: FinishedRun, rows: list[dict[str, Any]], arguments: AblationArguments, output: Path) -> None:
    """Save the adapter without the longest span that costs at most --prune; among equally long spans, without the
    cheapest. At least one layer keeps its adapters."""
    whole = max(row["span"] for row in rows[1:] if row["span"][0] == 0)
    cheap = [row for row in rows[1:] if row["relative_change"] >= -arguments.prune and row["span"] != whole]
    if not cheap:
        print(f"Nothing to prune: every span costs more than {arguments.prune:.1%} of the score.")
        return
    best = max(cheap, key=lambda row: (row["span"][1] - row["span"][0], row["relative_change"]))
    first, last = best["span"]
    prune(run.model, range(first, last + 1), "pruned", keep_norms=arguments.norms == "keep")
    run.model.save_pretrained(output, selected_adapters=["pruned"])
    files = [folder / SAFETENSORS_WEIGHTS_NAME for folder in (Path(arguments.run, "adapter"), output / "pruned")]
    before, after = (file.stat().st_size / 1e6 for file in files)
    print(f"Pruned layers {first} to {last}, which changes the score by {best['relative_change']:+.1%}.")
    print(f"Adapter: {output}/pruned, {after:.2f} MB instead of {before:.2f}.")


if __name__ == "__main__":
    end_with_one_line(main)
