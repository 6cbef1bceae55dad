"""How much the score depends on the seed and on the lengths of pretraining and fine-tuning, with adapters and without.

    python recipes/stability.py                                            # generated sentences, no data
    python recipes/stability.py --task rte --data_dir glue --model_name minilm --train_pooler true \
        --learning_rate 1e-3 --pretraining_steps 1000 2000

Han et al. 2021. Figure 2 and the appendix's on MNLI: the distribution over the seeds as box plots, of each run's best
epoch and of its last one, which shows runs that collapsed. Figure 3: the gradient's norm by layer and step. With
--pretraining_steps, adapters and full fine-tuning also start from checkpoints of one run of mlm.py each, on the task's
training text (--method full without adapters), and there are figures 4, 9, 10 (analysis/lengths.py), 1 and 13.

In figures 9 and 10, each number of epochs is a run of its own in the paper. With several --num_train_epochs, so it is
here. With one, the epochs of that run are drawn: they share one learning rate schedule, so that only the last one is
what a separate run would give, unless the rate is constant (--lr_scheduler_type constant --warmup_steps 0).

MiniLM's pooler was never pretrained, so adapters also train it, as full fine-tuning does, unless --train_pooler false
is given. With several learning rates, validation chooses one for each task and start. Writes stability.jsonl, .png and
.svg, and for each task gradient_norms_TASK, pretraining_TASK, epochs_TASK and learning_curves_TASK as .png and .svg.
"""

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.gradients import FILE
from analysis.grid import RECIPES, GridParser, finished, make_grids, run_missing
from analysis.lengths import COLOR_OF, NAMES, draw_boxes, draw_curves, draw_epochs, draw_lengths
from analysis.runs import write_lines
from study.papers import proper_name
from study.presets import parse_adapter
from study.results import Results, best_cell, in_percent, score_percent
from sweeping.runs import CHOSEN, PlannedRun
from tasks.glue import HUB_DATASET, MINIMAL_PAIRS
from tasks.minimal_pairs import minimal_pairs
from training.arguments import AdapterArguments, EncoderArguments
from training.errors import end_with_one_line
from training.figures import COLUMN, PAGE, PINK, RED, SKY, plt, save
from training.model import MINILM
from training.rules import number_of


RECIPE = RECIPES / "gradient_norms.py"  # glue.py with recorded gradients
RATES = {"houlsby": "1e-3", "full": "1e-4"}
PRETRAINING_RATES = {"houlsby": None, "full": "5e-5"}  # the rate of mlm.py would ruin the encoder
PRECISIONS = {"float32": (), "bf16": ("--bf16", "true"), "fp16": ("--fp16", "true")}
Start = tuple[str, int]  # method, steps of pretraining
OTHERS = {"classifier": RED, "pooler": PINK, "embeddings": SKY}


def main() -> None:
    """Read the command line, execute missing runs, write the numbers and the figures."""
    parser = GridParser("runs/stability", __doc__, {"seed": range(3)})
    parser.set_defaults(seed=[str(seed) for seed in range(10)])
    for name, method in (("learning_rate", "houlsby"), ("full_learning_rate", "full")):
        text = f"For {method}; default: a preset's, or {RATES[method]}."
        parser.add_argument(f"--{name}", nargs="+", type=number_of(name, float), help=text)
    text = "Epochs of fine-tuning, each as a run of its own; default: the recipe's or the preset's."
    parser.add_argument("--num_train_epochs", nargs="+", type=number_of("num_train_epochs", float), help=text)
    text = "Numbers of steps on the task's own text."
    parser.add_argument("--pretraining_steps", nargs="*", type=pretraining_steps, default=[], help=text)
    for name, method in (("pretraining_learning_rate", "houlsby"), ("full_pretraining_learning_rate", "full")):
        text = f"Of the pretraining with {method}; default: {PRETRAINING_RATES[method] or 'of mlm.py'}."
        parser.add_argument(f"--{name}", type=number_of("learning_rate", float), help=text)
    parser.add_argument("--pretraining_seed", type=number_of("seed", int), help="Default: of mlm.py.")
    parser.add_argument(
        "--pretraining_precision", choices=PRECISIONS, default="float32", help="Of the pretraining's computations."
    )
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
    for task in sorted({one["task"] for one in results}):
        starts = by_start(results, task)
        norms = {NAMES[method]: found for method in NAMES if (found := read_norms(starts.get((method, 0), ())))}
        own = [row for row in rows if row["task"] == task]
        figures = {
            "gradient_norms": draw_norms(norms, task) if norms else None,
            "pretraining": draw_lengths(own),
            "epochs": draw_epochs(own),
            "learning_curves": draw_curves(own),
        }
        for name, figure in figures.items():
            if figure is not None:
                save(figure, arguments.output_dir / f"{name}_{task}")


def pretraining_steps(text: str) -> int:
    """Return a value of --pretraining_steps."""
    return int(number_of("pretraining_steps", int)(text))


def make_all(arguments: argparse.Namespace, flags: Sequence[str]) -> Iterator[PlannedRun]:
    """Yield runs of both methods, and of each from the checkpoints of its pretraining, which runs first."""
    data = ["--data_dir", arguments.data_dir] if arguments.data_dir else []
    preset = parse_adapter(flags)[0].preset
    model = arguments.model_name or (None if preset else MINILM)
    axes = {
        method: {
            "method": [method],
            **({"learning_rate": rates} if rates else {}),
            **({"num_train_epochs": arguments.num_train_epochs} if arguments.num_train_epochs else {}),
            "seed": arguments.seed,
        }
        for method, given in (("houlsby", arguments.learning_rate), ("full", arguments.full_learning_rate))
        for rates in [given or ([] if preset else [RATES[method]])]
    }
    pooler = ["--train_pooler", "true"] if model == MINILM else []
    encoder = ["--model_name", model] if model else []
    passed = [*pooler, *data, *flags]
    yield from make_grids(arguments.output_dir, arguments.task, axes.values(), [*encoder, *passed], RECIPE)
    if not arguments.pretraining_steps:
        return
    pretrainings = {
        (task, method): pretraining_run(task, method, arguments, [*encoder, *flags])
        for task in arguments.task
        for method in axes
    }
    run_missing([*pretrainings.values()], arguments)
    for (task, method), pretraining in pretrainings.items():
        for steps in arguments.pretraining_steps:
            folder = arguments.output_dir / f"pretrained_{steps}"
            checkpoint = str(pretraining.folder / f"checkpoint-{steps}")
            start = ["--model_name", checkpoint] if method == "full" else [*encoder, "--init_adapter", checkpoint]
            yield from make_grids(folder, [task], [axes[method]], [*start, *passed], RECIPE)


def pretraining_run(task: str, method: str, arguments: argparse.Namespace, flags: Sequence[str]) -> PlannedRun:
    """Return a run of mlm.py on the task's training text, with a checkpoint at each number of steps, of the adapter or
    of the whole encoder that glue.py has with these flags."""
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
    given = arguments.full_pretraining_learning_rate if method == "full" else arguments.pretraining_learning_rate
    how = [
        *([] if (rate := given or PRETRAINING_RATES[method]) is None else ["--learning_rate", rate]),
        *([] if arguments.pretraining_seed is None else ["--seed", arguments.pretraining_seed]),
        *PRECISIONS[arguments.pretraining_precision],
        *("--base_dtype", "float32"),  # as the presets, whatever the processor multiplies in
        *(["--use_cpu"] if "--use_cpu" in flags else []),
    ]
    steps = arguments.pretraining_steps
    every = str(math.gcd(*steps))
    kept = ["--save_strategy", "steps", "--save_steps", every, "--save_total_limit", str(max(steps))]
    scored = ["--eval_strategy", "no", "--load_best_model_at_end", "false", "--max_steps", str(max(steps))]
    flags = [*data, *adapter_flags(flags, method), *how, *kept, *scored]
    axes = {} if method == "houlsby" else {"method": [method]}
    return make_grids(folder, ["mlm"], [axes], flags, RECIPES / "mlm.py")[0]


def adapter_flags(flags: Sequence[str], method: str) -> list[str]:
    """Return the flags with which mlm.py has the encoder of glue.py with `flags`, and its adapter if there is one."""
    encoder, adapter = parse_adapter(flags, method)
    found = []
    for kind, group in ((EncoderArguments, encoder), *([(AdapterArguments, adapter)] if method == "houlsby" else [])):
        for name, default in ((field.name, field.default) for field in fields(kind)):
            value = getattr(group, name)
            if value != default:
                found += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return found


def by_start(results: Iterable[Results], task: str) -> dict[Start, list[Results]]:
    """Return the runs of a task by method and steps of pretraining, in the order of the figure, at the learning rate
    that validation has chosen."""
    found: dict[Start, list[Results]] = defaultdict(list)
    for one in (one for one in results if one["task"] == task):
        checkpoint = re.search(r"checkpoint-(\d+)$", one["arguments"]["init_adapter"] or one["model"])
        method = "full" if one["method"] == "full" else "houlsby"
        found[method, int(checkpoint[1]) if checkpoint else 0].append(one)
    order = sorted(found, key=lambda start: (start[1], [*NAMES].index(start[0])))
    return {start: _at_chosen_rate(found[start]) for start in order}


def _at_chosen_rate(runs: Sequence[Results]) -> list[Results]:
    chosen = next(iter(best_cell(runs, CHOSEN).seeds.values()))
    rate = chosen["arguments"]["learning_rate"]
    return [one for one in runs if one["arguments"]["learning_rate"] == rate]


def summarize(results: Sequence[Results]) -> list[dict[str, Any]]:
    """Return a row per task and start: the chosen rate, the scores by seed of the best and of the last epoch in
    percent, and the mean score by number of epochs. The best epoch of a run hides a later collapse."""
    rows = []
    for task in sorted({one["task"] for one in results}):
        for (method, steps), runs in by_start(results, task).items():
            chosen = best_cell(runs, CHOSEN).seeds
            first = next(iter(chosen.values()))
            rows.append({
                "task": task, "start": NAMES[method] + (f", {steps} steps first" if steps else ""),
                "method": method, "pretraining_steps": steps, "score": first["chosen_by"],
                **{name: first["arguments"].get(name) for name in CHOSEN},
                "scores": {seed: score_percent(one) for seed, one in chosen.items()},
                "last": {seed: _last(one) for seed, one in chosen.items()},
                "by_epochs": by_epochs(runs),
            })  # fmt: skip
    return rows


def by_epochs(runs: Sequence[Results]) -> dict[float, float]:
    """Return the mean score over the seeds, in percent, by number of epochs: after the last epoch if there are runs
    with several numbers of epochs, otherwise after each epoch that all runs have."""
    scores: dict[float, list[float]] = defaultdict(list)
    separate = len({one["arguments"].get("num_train_epochs") for one in runs}) > 1
    for one in runs:
        for entry in one["epochs"][-1:] if separate else one["epochs"]:
            scores[entry["epoch"]].append(in_percent(one, one["chosen_by"], entry[one["chosen_by"]]))
    return {at: mean(own) for at, own in sorted(scores.items()) if separate or len(own) == len(runs)}


def _last(one: Results) -> float:
    score = one["chosen_by"]
    return in_percent(one, score, one["epochs"][-1][score])


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw two boxes per method and start, for the best and the last epoch, with the runs as points, and a panel per
    task."""
    tasks = sorted({row["task"] for row in rows})
    starts = max(sum(row["task"] == task for row in rows) for task in tasks)
    width = max(min(PAGE, COLUMN * len(tasks)), 0.4 * starts * len(tasks))
    figure, panels = plt.subplots(1, len(tasks), figsize=(width, 0.8 * COLUMN), squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        own = [row for row in rows if row["task"] == task]
        for shift, epoch, hatch in ((-0.2, "scores", ""), (0.2, "last", "////")):
            draw_boxes(
                axes,
                [number + shift for number in range(1, len(own) + 1)],
                [list(row[epoch].values()) for row in own],
                [COLOR_OF[row["method"]] for row in own],
                hatch,
            )
        labels = [row["start"].replace(", ", "\n") for row in own]
        axes.set_xticks(range(1, len(own) + 1), labels, rotation=90 if starts > 4 else 0)
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
