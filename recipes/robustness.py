"""How often replacing words by synonyms changes a prediction: the success rate of PWWS, for one run or several.

    accelerate launch recipes/glue.py && python recipes/robustness.py      # generated sentences, no data
    python recipes/robustness.py --run runs/sst2 runs/sst2-full --name adapters "full fine-tuning"

Han et al. 2021, figure 5, on SST-2 with and without adapters; the attack is that of Ren et al. 2019, see
analysis/pwws.py. The synonyms are WordNet's (Debian: apt install wordnet-base). Writes robustness.jsonl, with a line
per run, and robustness.png and .svg.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from analysis.pwws import Probabilities, pwws
from analysis.runs import RUN, FinishedRun, load_run, write_lines
from analysis.wordnet import WordNet, find_wordnet
from study.figures import COLORS, COLUMN, plt, save
from study.papers import proper_name
from training.arguments import RecipeParser
from training.data import sample
from training.errors import RecipeError, end_with_one_line


@dataclass
class RobustnessArguments:
    """The runs to attack, and the synonyms."""

    run: list[str] = HfArg(  # noqa: RUF009, which takes the type for a mutable default
        default_factory=lambda: [RUN], help="Output folders of runs of recipes/glue.py."
    )
    name: list[str] | None = HfArg(  # noqa: RUF009
        default=None, help="Name of each run in the figure; default: its folder's name."
    )
    data_dir: str | None = HfArg(default=None, help="Folder of the task's files; default: the run's own.")
    wordnet: str | None = HfArg(default=None, help="Folder of WordNet's files; default: Debian's, or NLTK's data.")
    max_eval_samples: int = HfArg(default=200, help="Attack a random sample of this many validation texts.")
    batch_size: int = HfArg(default=64, help="Texts per forward.")
    output_dir: str | None = HfArg(default=None, help="Where to write; default: the first run's folder.")


def main() -> None:
    """Read the command line, attack each run, write the numbers and the figure."""
    (arguments,) = RecipeParser((RobustnessArguments,), usage="python recipes/robustness.py [flags]").parse()
    names = arguments.name or [Path(folder).name for folder in arguments.run]
    if len(names) != len(arguments.run):
        raise RecipeError(f"--name must name each --run; got {len(names)} names for {len(arguments.run)} runs.")
    wordnet = WordNet(find_wordnet(arguments.wordnet))
    rows = []
    for name, folder in zip(names, arguments.run, strict=True):
        run = load_run(folder, arguments.data_dir)
        rows.append(attack(name, run, wordnet, arguments))
        print(f"{name}: {rows[-1]['successes']} of {rows[-1]['attacked']} predictions changed")
    output = Path(arguments.output_dir or arguments.run[0])
    write_lines(output / "robustness.jsonl", rows)
    save(draw(rows), output / "robustness")


def attack(name: str, run: FinishedRun, wordnet: WordNet, arguments: RobustnessArguments) -> dict[str, Any]:
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
        "run": name, "task": run.task.name, "model": run.results["model"], "examples": len(texts),
        "attacked": len(attacks), "successes": len(successes), "success_rate": rate,
        "standard_error": (rate * (1 - rate) / len(attacks)) ** 0.5,
        "accuracy": float(right.mean()), "accuracy_under_attack": (len(attacks) - len(successes)) / len(texts),
        "replaced_words": mean(one.replaced / one.words for one in successes) if successes else None,
        "queries_per_text": mean(one.queries for one in attacks), "attacks": [asdict(one) for one in attacks],
    }  # fmt: skip


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
    """Draw a bar per run, with its standard error."""
    figure, axes = plt.subplots(figsize=(COLUMN, 0.7 * COLUMN))
    rates, errors = ([100 * row[key] for row in rows] for key in ("success_rate", "standard_error"))
    bars = axes.bar(range(len(rows)), rates, 0.6, yerr=errors, capsize=3, color=COLORS[0])
    axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_xticks(range(len(rows)), [row["run"] for row in rows])
    axes.set(
        ylabel="attack success rate (%)", title=f"PWWS on {proper_name(rows[0]['task'])}, {rows[0]['examples']} texts"
    )
    axes.margins(x=0.2, y=0.15)
    return figure


if __name__ == "__main__":
    end_with_one_line(main)
