"""GLUE's submission: a file of predictions per test set, and the zip that its server accepts.

A file is tab-separated text, with the header `index<TAB>prediction` and a line for each test example, numbered from 0.
The zip contains all eleven files and nothing else (https://gluebenchmark.com/faq; test sets as in Wang et al. 2018).
"""

import math
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


HEADER = "index\tprediction"
LOWEST, HIGHEST = 0.0, 5.0
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_MNLI = ("entailment", "neutral", "contradiction")


@dataclass(frozen=True)
class TestSet:
    """A test set: its task, its data set and split on the Hub, its rows, and the names of classes 0, 1, ... in the
    file; without classes the prediction is a score from 0 to 5."""

    task: str
    source: str
    split: str
    rows: int
    labels: tuple[str, ...]

    def lines(self, outputs: NDArray[np.floating]) -> list[str]:
        """Return the lines of the file for a model's outputs, (rows, classes) or (rows, 1)."""
        if self.labels:
            predictions = [self.labels[number] for number in outputs.argmax(-1)]
        else:
            predictions = [f"{score:.4f}" for score in np.clip(outputs[:, 0], LOWEST, HIGHEST)]
        return [HEADER, *(f"{index}\t{prediction}" for index, prediction in enumerate(predictions))]

    def problem(self, lines: Sequence[str]) -> str | None:
        """Return the first problem for which the server would refuse a file with these lines, or None."""
        if not lines or lines[0] != HEADER:
            return f"the first line must be {HEADER!r}, got {lines[0] if lines else ''!r}"
        if len(lines) - 1 != self.rows:
            return f"there must be {self.rows:,} predictions, got {len(lines) - 1:,}"
        for index, line in enumerate(lines[1:]):
            number, tab, prediction = line.partition("\t")
            if number != str(index) or not tab:
                return f"line {index + 2} must begin with {index} and a tab, got {line[:50]!r}"
            if not self._is_prediction(prediction):
                allowed = ", ".join(self.labels) or f"a number from {LOWEST:g} to {HIGHEST:g}"
                return f"line {index + 2}: the prediction must be one of {allowed}; got {prediction[:50]!r}"
        return None

    def _is_prediction(self, text: str) -> bool:
        if self.labels:
            return text in self.labels
        try:
            return LOWEST <= float(text) <= HIGHEST and math.isfinite(float(text))
        except ValueError:
            return False


TEST_SETS = {
    "CoLA": TestSet("cola", "cola", "test", 1063, _BINARY),
    "SST-2": TestSet("sst2", "sst2", "test", 1821, _BINARY),
    "MRPC": TestSet("mrpc", "mrpc", "test", 1725, _BINARY),
    "STS-B": TestSet("stsb", "stsb", "test", 1379, ()),
    "QQP": TestSet("qqp", "qqp", "test", 390_965, _BINARY),
    "MNLI-m": TestSet("mnli", "mnli", "test_matched", 9796, _MNLI),
    "MNLI-mm": TestSet("mnli", "mnli", "test_mismatched", 9847, _MNLI),
    "QNLI": TestSet("qnli", "qnli", "test", 5463, _ENTAILMENT),
    "RTE": TestSet("rte", "rte", "test", 3000, _ENTAILMENT),
    "WNLI": TestSet("wnli", "wnli", "test", 146, _BINARY),
    # The diagnostic examples, predicted by the model for MNLI.
    "AX": TestSet("mnli", "ax", "test", 1104, _MNLI),
}
FILES = {f"{name}.tsv": test_set for name, test_set in TEST_SETS.items()}


def pack(files: Iterable[Path], path: Path) -> None:
    """Write the files into a zip, without their folders."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, file.name)


def problems(path: Path) -> list[str]:
    """Return the problems for which the server would refuse a zip, at most one per file."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            repeated = sorted({name for name in names if names.count(name) > 1})
            found = [f"{name} is there more than once" for name in repeated]
            found += [f"{name} is missing" for name in FILES if name not in names]
            found += [f"{name} does not belong there" for name in dict.fromkeys(names) if name not in FILES]
            for name in FILES:
                if name in names:
                    problem = _problem(FILES[name], archive.read(name))
                    found += [f"{name}: {problem}"] if problem else []
            return found
    except (OSError, zipfile.BadZipFile) as error:
        return [f"{path} cannot be read as a zip: {error}"]


def _problem(test_set: TestSet, content: bytes) -> str | None:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"it must be UTF-8 text: {error}"
    return test_set.problem(text.removesuffix("\n").split("\n"))
