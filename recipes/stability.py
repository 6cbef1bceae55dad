"""How much the score depends on the seed, with adapters and without, and after training on the task's own text first.

    python recipes/stability.py                                            # generated sentences, no data
    python recipes/stability.py --task rte --data_dir glue --model_name minilm --train_pooler true \
        --learning_rate 1e-3 --pretraining_steps 1000 2000

Han et al. 2021, figures 2 and 4: the distribution over ten seeds as box plots, of each run's best epoch and of its
last one, which shows runs that collapsed. With --pretraining_steps the adapters are first trained on masked words of
the task's training text for these numbers of steps (the checkpoints of one run of mlm.py); full fine-tuning has no
such start. Figure 3: the gradient's norm by layer and step. MiniLM's pooler was never pretrained, so adapters also
train it, as full fine-tuning does, unless --train_pooler false is given. With several learning rates, validation
chooses one for each task and start. Writes stability.jsonl, .png and .svg, and gradient_norms_TASK.png and .svg.
"""

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.gradients import FILE
from analysis.grid import RECIPES, GridParser, finished, make_grids, run_missing
from analysis.runs import write_lines
from study.figures import BLUE, COLUMN, ORANGE, PAGE, PINK, RED, SKY, plt, save
from study.papers import proper_name
from study.presets import parse_adapter
from study.results import Results, best_cell, in_percent, score_percent
from sweeping.runs import CHOSEN, PlannedRun
from tasks.glue import HUB_DATASET, MINIMAL_PAIRS
from tasks.minimal_pairs import minimal_pairs
from training.arguments import AdapterArguments, EncoderArguments
from training.errors import end_with_one_line
from training.model import MINILM
from training.rules import number_of


RECIPE = RECIPES / "gradient_norms.py"  # glue.py with recorded gradients
ADAPTERS, FULL = "adapters", "full fine-tuning"
RATES = {"houlsby": "1e-3", "full": "1e-4"}
OTHERS = {"classifier": RED, "pooler": PINK, "embeddings": SKY}


def main() -> None:
    """Read the command line, execute missing runs, write the numbers and the figures."""
    parser = GridParser("runs/stability", __doc__, {"seed": range(3)})
    parser.set_defaults(seed=[str(seed) for seed in range(10)])
    for name, method in (("learning_rate", "houlsby"), ("full_learning_rate", "full")):
        text = f"For {method}; default: a preset's, or {RATES[method]}."
        parser.add_argument(f"--{name}", nargs="+", type=number_of(name, float), help=text)
    text = "Numbers of steps on the task's own text."
    parser.add_argument("--pretraining_steps", nargs="*", type=pretraining_steps, default=[], help=text)
    parser.add_argument("--data_dir", help="Folder with a folder of files per task; default: the Hub.")
    parser.add_argument("--model_name", help=f"The encoder, as in glue.py; default: a preset's, or {MINILM}.")
    arguments, flags = parser.parse()
    if not arguments.draw_only:
        run_missing(list(make_all(arguments, flags)), arguments)
    if arguments.dry_run:
        return
    results = finished(arguments.output_dir)
    rows = summarize(results)
    write_lines(arguments.output_dir / "stability.jsonl", rows)
    save(draw(rows), arguments.output_dir / "stability")
    for task in {one["task"]: None for one in results}:
        starts = by_start(results, task)
        norms = {name: found for name in (FULL, ADAPTERS) if (found := read_norms(starts.get(name, ())))}
        if norms:
            save(draw_norms(norms, task), arguments.output_dir / f"gradient_norms_{task}")


def pretraining_steps(text: str) -> int:
    """Return a value of --pretraining_steps."""
    return int(number_of("pretraining_steps", int)(text))


def make_all(arguments: argparse.Namespace, flags: Sequence[str]) -> Iterator[PlannedRun]:
    """Yield runs of both methods, and of adapters from each checkpoint of a pretraining, which runs first."""
    data = ["--data_dir", arguments.data_dir] if arguments.data_dir else []
    preset = parse_adapter(flags)[0].preset
    model = arguments.model_name or (None if preset else MINILM)
    adapters, full = (
        {"method": [method], **({"learning_rate": rates} if rates else {}), "seed": arguments.seed}
        for method, given in (("houlsby", arguments.learning_rate), ("full", arguments.full_learning_rate))
        for rates in [given or ([] if preset else [RATES[method]])]
    )
    pooler = ["--train_pooler", "true"] if model == MINILM else []
    flags = [*(["--model_name", model] if model else []), *pooler, *data, *flags]
    yield from make_grids(arguments.output_dir, arguments.task, [adapters, full], flags, RECIPE)
    for task in arguments.task if arguments.pretraining_steps else ():
        pretraining = pretraining_run(task, arguments, adapter_flags(flags))
        run_missing([pretraining], arguments)
        for steps in arguments.pretraining_steps:
            folder = arguments.output_dir / f"pretrained_{steps}"
            start = ["--init_adapter", str(pretraining.folder / f"checkpoint-{steps}")]
            yield from make_grids(folder, [task], [adapters], [*flags, *start], RECIPE)


def pretraining_run(task: str, arguments: argparse.Namespace, flags: Sequence[str]) -> PlannedRun:
    """Return a run of mlm.py on the task's training text, with a checkpoint at each number of steps."""
    folder = arguments.output_dir / "pretraining" / task
    if task == MINIMAL_PAIRS:
        text = folder / "train.txt"
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text("\n".join(minimal_pairs()["train"]["sentence"]))
        data = ["--data", str(text)]
    elif arguments.data_dir:
        data = ["--data", str(Path(arguments.data_dir, task).resolve())]
    else:
        data = ["--data", HUB_DATASET, "--data_config", task]
    steps = arguments.pretraining_steps
    every = str(math.gcd(*steps))
    kept = ["--save_strategy", "steps", "--save_steps", every, "--save_total_limit", str(max(steps))]
    scored = ["--eval_strategy", "no", "--load_best_model_at_end", "false", "--max_steps", str(max(steps))]
    return PlannedRun(folder, RECIPES / "mlm.py", {}, (*data, *flags, *kept, *scored))


def adapter_flags(flags: Sequence[str]) -> list[str]:
    """Return the flags with which mlm.py has the encoder and the adapter of glue.py with `flags`."""
    encoder, adapter = parse_adapter(flags)
    found = []
    for kind, group in ((EncoderArguments, encoder), (AdapterArguments, adapter)):
        for name, default in ((field.name, field.default) for field in fields(kind)):
            value = getattr(group, name)
            if value != default:
                found += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return found


def by_start(results: Iterable[Results], task: str) -> dict[str, list[Results]]:
    """Return the runs of a task by method and steps of pretraining, in the order of the figure, at the learning rate
    that validation has chosen."""
    found: dict[tuple[bool, int], list[Results]] = defaultdict(list)
    for one in (one for one in results if one["task"] == task):
        checkpoint = re.search(r"checkpoint-(\d+)$", one["arguments"]["init_adapter"] or "")
        found[one["method"] != "full", int(checkpoint[1]) if checkpoint else 0].append(one)
    names = {key: (f"{key[1]} steps first" if key[1] else ADAPTERS if key[0] else FULL) for key in sorted(found)}
    return {name: list(best_cell(found[key], CHOSEN).seeds.values()) for key, name in names.items()}


def summarize(results: Sequence[Results]) -> list[dict[str, Any]]:
    """Return a row per task and start: the learning rate, and by seed the scores of the best and of the last epoch in
    percent. The best epoch of a run that collapsed later hides the collapse."""
    return [
        {"task": task, "start": name, "learning_rate": runs[0]["arguments"]["learning_rate"],
         "score": runs[0]["chosen_by"], "scores": {one["seed"]: score_percent(one) for one in runs},
         "last": {one["seed"]: _last(one) for one in runs}}
        for task in sorted({one["task"] for one in results})
        for name, runs in by_start(results, task).items()
    ]  # fmt: skip


def _last(one: Results) -> float:
    score = one["chosen_by"]
    return in_percent(one, score, one["epochs"][-1][score])


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw two boxes per method and start, for the best and the last epoch, with the runs as points, and a panel per
    task."""
    tasks = sorted({row["task"] for row in rows})
    width = min(PAGE, COLUMN * len(tasks))
    figure, panels = plt.subplots(1, len(tasks), figsize=(width, 0.8 * COLUMN), squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        own = [row for row in rows if row["task"] == task]
        for shift, epoch, hatch in ((-0.2, "scores", ""), (0.2, "last", "////")):
            scores = [list(row[epoch].values()) for row in own]
            positions = [number + shift for number in range(1, len(own) + 1)]
            boxes = axes.boxplot(
                scores, positions=positions, widths=0.35, showfliers=False, patch_artist=True,
                medianprops={"color": "black"},
            )  # fmt: skip
            for x, box, row, values in zip(positions, boxes["boxes"], own, scores, strict=True):
                box.set(facecolor=ORANGE if row["start"] == FULL else BLUE, alpha=0.4, hatch=hatch)
                axes.plot([x] * len(values), values, ".", color="black", markersize=3, alpha=0.6)
        axes.set_xticks(range(1, len(own) + 1), [row["start"].replace(" ", "\n", 1) for row in own])
        seeds = max(len(row["scores"]) for row in own)
        axes.set(
            title=f"{proper_name(task)}, {seeds} seed{'s' * (seeds > 1)}", ylabel=f"{proper_name(own[0]['score'])} (%)"
        )
    epochs = [Patch(facecolor="white", edgecolor="black", hatch=hatch) for hatch in ("", "////")]
    figure.legend(epochs, ["best epoch", "last epoch"], loc="outside lower center", ncols=2)
    return figure


def read_norms(runs: Iterable[Results]) -> dict[str, dict[int, float]]:
    """Return the median over the runs of the gradient's norm, by layer and step."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in runs:
        path = Path(one["arguments"]["output_dir"], FILE)
        # Runs of another command have no such file.
        for row in map(json.loads, path.read_text().splitlines() if path.is_file() else ()):
            for layer, norm in row["norms"].items():
                found[layer][row["step"]].append(norm)
    return {layer: {step: median(norms) for step, norms in steps.items()} for layer, steps in found.items()}


def draw_norms(norms: Mapping[str, dict[str, dict[int, float]]], task: str) -> Figure:
    """Draw a panel per method: layers from dark (first) to bright (last), pooler and head dashed."""
    figure, panels = plt.subplots(1, len(norms), figsize=(PAGE, 0.4 * PAGE), sharey=True, squeeze=False)
    for axes, (name, layers) in zip(panels[0], norms.items(), strict=True):
        numbered = [layer for layer in layers if layer.rpartition(".")[2].isdigit()]
        shades = dict(zip(numbered, plt.get_cmap("viridis")(np.linspace(0, 0.9, len(numbered))), strict=True))
        for layer, steps in layers.items():
            label = f"layer {layer.rpartition('.')[2]}" if layer in shades else layer.rpartition(".")[2]
            style = (
                {"color": shades[layer]}
                if layer in shades
                else {"color": OTHERS.get(label, "black"), "linestyle": "--"}
            )
            axes.plot(steps.keys(), steps.values(), label=label, marker="", **style)
        axes.set(title=f"{proper_name(task)}, {name}", xlabel="step", yscale="log")
    panels[0][0].set_ylabel("norm of the gradient")
    lines = {line.get_label(): line for axes in panels[0] for line in axes.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside right center")
    return figure


if __name__ == "__main__":
    end_with_one_line(main)
