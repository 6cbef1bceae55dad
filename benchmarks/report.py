"""The report of a GPU: tables in Markdown, everything in JSON, and a chart, written anew after each measurement."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from methods import FLOOR, LORA_ALL, OURS
from mixed import BATCHED, GRAPH, UNCHECKED


Rows = list[dict[str, Any]]
TITLES = {
    "bars": "Targets",
    "steps": "Training and evaluation",
    "mixed": "Batches of several adapters",
    "prediction": "CUDA graphs and compiled prediction",
    "profile": "Where the time of the adapter goes",
    "memory": "Peak memory of training",
    "tests": "Tests that need CUDA",
}
EXPLANATIONS = {
    "steps": "Medians relative to the frozen floor, by rows x tokens. The floor's own time is in milliseconds. The "
    "ranges of the rounds are in results.json.",
    "mixed": "`median_ratio` is relative to a batch of one adapter, which is measured in turns with each line. "
    "`first_s` is the first call, which stacks the weights.",
    "prediction": "The base model is in bfloat16, the adapter in float32. `difference` is relative to the largest "
    "logit.",
    "profile": "Seconds per step of each kind of kernels; `waiting_s` is the time in which the GPU waits for "
    "launches. More than 5% of the step in `memory_s` or in `waiting_s` would be worth a fused kernel.",
    "memory": "Computed as in docs/distributed.md (`python benchmarks/memory.py`), and what PyTorch has allocated.",
}
# What must be the same in a run that continues another one.
_SAME = ("gpu", "torch", "transformers", "peft", "houlsby_peft")
# The bars of an adapter in training, and of 64 adapters in one batch.
TRAINING_BAR, MIXED_BAR = 1.10, 1.15


@dataclass
class Report:
    """What was measured, and what was not.

    Args:
        folder: Where the files are written.
        machine: The machine and the versions of the software.
        first: Rows and tokens of the cells that the chart shows.
        sections: The rows by section.
        notes: Why something was left out, by section and name.
        failures: How many of these have failed.
    """

    folder: Path
    machine: dict[str, Any]
    first: tuple[int, int]
    sections: dict[str, Rows] = field(default_factory=dict)
    notes: dict[tuple[str, str], str] = field(default_factory=dict)
    failures: int = 0

    def load(self) -> None:
        """Take over what an earlier run has written to the folder, if there is anything.

        Raises:
            SystemExit: It ran on another GPU or with other software.
        """
        path = self.folder / "results.json"
        if not path.is_file():
            return
        found = json.loads(path.read_text())
        earlier = found.pop("machine")
        for key in _SAME:
            if earlier.get(key) != self.machine.get(key):
                raise SystemExit(
                    f"Only the same machine and software can continue: {path} has {key} {earlier.get(key)}, and here "
                    f"it is {self.machine.get(key)}. Name another folder."
                )
        self.notes = {(section, name): reason for section, name, reason in found.pop("not_measured")}
        self.sections = found

    def has(self, section: str, job: str) -> bool:
        """Return whether all rows of a job are there."""
        return (section, job) not in self.notes and any(row["job"] == job for row in self.sections.get(section, []))

    def forget(self, section: str, job: str) -> None:
        """Remove what there is of a job."""
        self.notes.pop((section, job), None)
        self.sections[section] = [row for row in self.sections.get(section, []) if row["job"] != job]

    def add(self, section: str, job: str, row: dict[str, Any]) -> None:
        """Add a row of a job to a section."""
        self.sections.setdefault(section, []).append({"job": job, **row})

    def note(self, section: str, name: str, reason: str, failed: bool = False) -> None:
        """Name something that was not measured."""
        self.notes[section, name] = reason
        self.failures += failed

    def write(self, with_chart: bool = False) -> None:
        """Write the files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        notes = [(*key, reason) for key, reason in self.notes.items()]
        result = {"machine": self.machine, **self.sections, "not_measured": notes}
        (self.folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
        (self.folder / "tables.md").write_text(self.text())
        if with_chart:
            self._draw(self.folder / "chart.png")

    def text(self) -> str:
        """Return all tables in Markdown."""
        parts = [
            f"# Measurements on {self.machine.get('gpu') or 'a CPU'}",
            _table([{"": key, "value": value} for key, value in self.machine.items()]),
        ]
        for section, title in TITLES.items():
            tables = self._tables(section)
            notes = [f"- {name}: {reason}" for (own, name), reason in self.notes.items() if own == section]
            if notes:
                tables.append("Not measured:\n\n" + "\n".join(notes))
            if tables:
                parts += [f"## {title}", *filter(None, [EXPLANATIONS.get(section)]), *tables]
        return "\n\n".join(parts) + "\n"

    def _tables(self, section: str) -> list[str]:
        rows = bars(self.sections) if section == "bars" else self.sections.get(section, [])
        if section == "steps":
            return list(_tables_of_steps(rows))
        # Rows with unlike columns, such as those of steps and of kernels in a profile, belong to tables of their own.
        unlike: dict[bool, Rows] = {}
        for row in rows:
            unlike.setdefault("kernel" in row, []).append(row)
        return [_table(each) for each in unlike.values()]

    def _draw(self, path: Path) -> None:
        rows = [
            {**row, "shape": f"{row['shape']}, {row['precision']}"}
            for row in self.sections.get("steps", [])
            if (row["batch"], row["length"]) == self.first and "note" not in row
        ]
        # The chart has a panel for each phase.
        phases: dict[str, set[str]] = {}
        for row in rows:
            phases.setdefault(row["shape"], set()).add(row["phase"])
        rows = [row for row in rows if len(phases[row["shape"]]) == 2]
        if not rows:
            return
        try:
            import chart
        except ImportError as error:
            self.note("steps", "the chart", f"needs matplotlib ({error})")
        else:
            chart.draw(rows, path)


def bars(sections: dict[str, Rows]) -> Rows:
    """Return what should be reached, beside what was measured."""
    found: Rows = []

    def bar(claim: str, figure: float | None, most: float | None) -> None:
        verdict = "not measured" if figure is None or most is None else "met" if figure <= most else "missed"
        found.append({"target": claim, "at most": most, "measured": figure, "": verdict})

    # The second cell is so large that an H100 does not wait for launches.
    precisions = ("bf16 autocast", "bf16 base", "bf16 base, TF32", "bf16 base, autocast")
    for length, precision in itertools.product((128, 512), precisions):
        ratios = {
            row["method"]: row.get("median_ratio")
            for row in sections.get("steps", [])
            if (row["shape"], row["batch"], row["length"], row["phase"], row["precision"])
            == ("base", 32, length, "train", precision)
        }
        bar(f"BERT-base, 32 x {length} tokens, {precision}: training / floor", ratios.get(OURS), TRAINING_BAR)
        bar(f"the same, at most {LORA_ALL}", ratios.get(OURS), ratios.get(LORA_ALL))
    for precision in ("bf16 base", "bf16 base and adapters", "float32"):
        cells = {
            (row["way"], row["adapters"]): row
            for row in sections.get("mixed", [])
            if (row["shape"], row["rows"], row["tokens"], row["spread"], row["precision"])
            == ("base", 64, 128, "even", precision)
        }
        name = f"BERT-base, 64 x 128 tokens, {precision}: 64 adapters / one"
        bar(name, cells.get((BATCHED, 64), {}).get("median_ratio"), MIXED_BAR)
        bar("the same, weights not checked", cells.get((UNCHECKED, 64), {}).get("median_ratio"), MIXED_BAR)
        one, many = (cells.get((GRAPH, number), {}).get("median_s") for number in (1, 64))
        bar("the same, both in CUDA graphs", many / one if one and many else None, MIXED_BAR)
    return found


def _tables_of_steps(rows: Rows) -> Iterable[str]:
    """Yield a table for each shape, precision and phase, with a line for each method and a column for each cell."""
    groups: dict[tuple[str, str, str], Rows] = {}
    for row in rows:
        groups.setdefault((row["shape"], row["precision"], row["phase"]), []).append(row)
    for (shape, precision, phase), own in groups.items():
        lines: dict[str, dict[str, Any]] = {}
        for row in sorted(own, key=lambda row: (row["batch"], row["length"])):
            line = lines.setdefault(row["method"], {f"{shape}, {precision}, {phase}": row["method"]})
            if "note" in row:
                figure = row["note"]
            elif row["method"] == FLOOR:
                figure = f"1 ({_shown(1e3 * row['median_s'])} ms)"
            else:
                figure = f"{row['median_ratio']:.3f}"
            line[f"{row['batch']} x {row['length']}"] = figure
        yield _table(list(lines.values()))


def _table(rows: Rows) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "job"))
    lines = [columns, ["---"] * len(columns), *([_shown(row.get(key)) for key in columns] for row in rows)]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines)


def _shown(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        case Sequence():
            return " to ".join(map(_shown, value))
    return str(value)
