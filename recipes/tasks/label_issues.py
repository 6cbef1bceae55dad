"""Training examples whose label is doubtful, by confident learning (Northcutt et al. 2021, arXiv
1911.00068).

A linear classifier on the hidden states of the frozen encoder predicts each example after training
on others. cleanlab then finds the labels that these predictions contradict.
"""

import textwrap
import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from cleanlab.filter import find_label_issues
from datasets import Dataset
from numpy.typing import NDArray
from sklearn.model_selection import GroupKFold
from tqdm import tqdm
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from data.data import sample
from data.exports import read_export
from data.labels import MULTI, SINGLE, Labels
from houlsby_peft.tables import (
    OTHER_NAMES,
    READ,
    WRITTEN,
    Table,
    defused,
    read_table,
    suffix_of,
    write_table,
)
from run.checkpoints import checkpoints
from run.command import Command
from run.edge import log
from run.files import write_json
from run.model import on_main
from run.run import (
    ARGUMENTS_FILE,
    LABEL_ISSUES,
    LABEL_ISSUES_LIST,
    RESULTS_FILE,
    WHERE,
    flags_of,
)
from run.saved import Saved
from run.trainer import RecipeTrainer
from tasks.frozen_encoder import Numbers, States, make_classifier
from tasks.scores import NO_CLASS
from tasks.task import Task


ADDED = ("suggestion", "probability")  # to the columns of a table
MOST_ROWS = 10_000  # for the check after training and the baseline, which then take little time
_FOLDS = 5
# Warnings of scikit-learn and cleanlab.
_OF_RARE_CLASSES = ("Label .* is present in all training", "May not flag all label issues")
_SHOWN, _SHOWN_TEXT = 5, 60  # issues of the log, and characters of a text


class Items(NamedTuple):
    """What has labels, texts or words: the states of the encoder; the labels as numbers; and where
    each item is, in the columns row and text and, of words, position and word.
    """

    states: States
    targets: Numbers
    table: pd.DataFrame


@dataclass(kw_only=True)
class LabeledTask(Task):
    """A task whose labels can be checked. `undivided` are the training examples before any are
    taken from them for validation.
    """

    undivided: Dataset | None = None

    @abstractmethod
    def items_to_check(self, examples: Dataset, command: Command) -> Items:
        """Return what is labeled in some examples."""

    def score_baseline(self, command: Command) -> dict[str, Any]:
        """Return the entry "baseline" of results.json, if the task has one."""
        return {}

    def examine(self, trainer: RecipeTrainer, command: Command) -> dict[str, Any]:
        """Write which labels are doubtful, and score the baseline; neither for many rows, a
        regression, or a run without validation.
        """
        are_many = sum(map(len, self.splits.values())) > MOST_ROWS
        is_evaluated = trainer.args.eval_strategy != "no"
        if are_many or self.problem_type == "regression" or not is_evaluated:
            return {}
        if is_deepspeed_zero3_enabled():  # which loads a model in all processes
            return {}

        def work() -> dict[str, Any]:
            if command.arguments.check_labels == "last":
                self.write_doubtful(command)
            return self.score_baseline(command)

        return dict(on_main(trainer.args, work))

    def write_doubtful(self, command: Command) -> None:
        """Write which labels of training examples are doubtful, unless all would be guesses."""
        examples = sample(self.undivided, command.arguments.max_train_samples)
        items = self.items_to_check(examples, command)
        if items.table["text"].nunique() < _FOLDS:
            log(f"label check: fewer than {_FOLDS} different texts are not checked")
            return
        issues = find_issues(items.states, items.targets, items.table["text"])
        log(
            f"label check: predictions from other examples agree with {issues.accuracy:.1%} of the "
            f"labels; always the most frequent label would with {issues.constant_accuracy:.1%}"
        )
        if issues.accuracy <= issues.constant_accuracy:
            log("label check: the frozen encoder tells these labels hardly apart: none is listed")
            issues = issues.none()
        write_issues(issues, items.table, items.targets, self.labels, command)


def check_labels(
    load: Callable[[Saved | None], LabeledTask], command: Command
) -> Callable[[Saved | None], LabeledTask] | None:
    """Write the label issues if the command asks for it before it trains; return what loads the
    task to train on, or None if nothing is to be trained.
    """
    arguments, training = command.arguments, command.training
    if arguments.check_labels not in ("first", "only") or arguments.evaluate is not None:
        return load
    task = load(None)

    def check() -> None:
        task.write_doubtful(command)
        folder = Path(training.output_dir)
        if not (checkpoints(folder) or (folder / RESULTS_FILE).exists()):
            # So that the corrected table is read as this one; see `read_as_before`.
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / ARGUMENTS_FILE, flags_of([arguments]))

    if task.problem_type == "regression":
        log("label check: scores are not checked, as only classes are")
    else:
        on_main(training, check)
    return None if arguments.check_labels == "only" else partial(as_loaded, task)


def as_loaded(task: LabeledTask, saved: Saved | None) -> LabeledTask:
    """Return a task that is loaded already, where `run_task` calls for it."""
    return task


@dataclass(frozen=True)
class Issues:
    """Labels that are doubtful, the most certainly wrong first.

    Attributes:
        rows: The numbers of the items.
        suggestions: What their targets should be.
        probabilities: How probable each suggestion is.
        accuracy: The share of all targets that are predicted.
        constant_accuracy: The share that always predicting the most frequent target would have.
    """

    rows: Numbers
    suggestions: Numbers
    probabilities: NDArray[np.float64]
    accuracy: float
    constant_accuracy: float

    def none(self) -> "Issues":
        """Return these issues without any row."""
        return replace(
            self,
            rows=self.rows[:0],
            suggestions=self.suggestions[:0],
            probabilities=self.probabilities[:0],
        )


def find_issues(states: States, targets: Numbers, texts: Sequence[Hashable]) -> Issues:
    """Find the targets that predictions from the states contradict.

    Targets are numbers of classes, of shape (rows,), or a 0 or 1 for each class, of shape
    (rows, classes). Rows with the same text are never trained on to predict each other.
    """
    with warnings.catch_warnings():
        for message in _OF_RARE_CLASSES:
            warnings.filterwarnings("ignore", message, UserWarning)
        predicted = predict_out_of_fold(states, targets, texts)
        if targets.ndim == 2:
            return _compare_flags(targets, predicted)
        suggestions, most_frequent = predicted.argmax(1), np.bincount(targets).max()
        return _most_certain_first(
            _find_wrong(targets, predicted),
            suggestions,
            predicted.max(1),
            (suggestions == targets).mean(),
            most_frequent / len(targets),
        )


def predict_out_of_fold(
    states: States, targets: Numbers, texts: Sequence[Hashable]
) -> NDArray[np.float64]:
    """Return the probabilities of the classes, of shape (rows, classes), each row predicted by a
    classifier that was trained on none of its text.
    """
    count = targets.max() + 1 if targets.ndim == 1 else targets.shape[1]
    predicted = np.zeros((len(targets), count))
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    # In a random order, as the classes of a file may recur in a pattern.
    shuffled = np.random.default_rng(0).permutation(len(numbers))
    groups = shuffled[[numbers[text] for text in texts]]
    folds = GroupKFold(_FOLDS).split(states, groups=groups)
    for training, held_out in tqdm(folds, "Predicting", _FOLDS, unit="fold", disable=None):
        if targets.ndim == 1 and np.ptp(targets[training]) == 0:  # the only class that others have
            predicted[held_out, targets[training[0]]] = 1
            continue
        classifier = make_classifier()
        classifier.fit(states[training], targets[training])
        columns = np.ix_(held_out, classifier.classes_)
        predicted[columns] = classifier.predict_proba(states[held_out])
    return predicted


def _compare_flags(targets: Numbers, predicted: NDArray[np.float64]) -> Issues:
    """Return the issues of flags, a 0 or 1 for each class; each is one of two classes."""
    is_wrong = np.zeros(targets.shape, dtype=bool)
    for number, probabilities in enumerate(predicted.T):
        flags = targets[:, number]
        if flags.min() < flags.max():
            of_flags = np.stack([1 - probabilities, probabilities], axis=1)
            is_wrong[:, number] = _find_wrong(flags, of_flags)
    suggestions = np.where(is_wrong, 1 - targets, targets)
    of_opposite = np.where(targets, 1 - predicted, predicted)
    certainty = np.where(is_wrong, of_opposite, 0).max(1)
    is_right = (predicted > 0.5) == targets
    shares = targets.mean(0)
    most_frequent = np.maximum(shares, 1 - shares)
    return _most_certain_first(
        is_wrong.any(1), suggestions, certainty, is_right.mean(), most_frequent.mean()
    )


def _find_wrong(targets: Numbers, predicted: NDArray[np.float64]) -> Any:
    """Return which targets are doubtful: the least probable, as many as cleanlab estimates.

    cleanlab's default chooses for each pair of classes. Where classes are hard to tell apart, more
    of what it finds is right.
    """
    is_least_probable = find_label_issues(
        targets, predicted, filter_by="low_self_confidence", n_jobs=1
    )
    is_contradicted = predicted.argmax(1) != targets
    return is_least_probable & is_contradicted


def _most_certain_first(
    is_wrong: Any, suggestions: Any, probabilities: Any, accuracy: float, constant_accuracy: float
) -> Issues:
    rows = np.flatnonzero(is_wrong)
    rows = rows[np.argsort(-probabilities[rows], kind="stable")]
    return Issues(
        rows, suggestions[rows], probabilities[rows], float(accuracy), float(constant_accuracy)
    )


def write_issues(
    issues: Issues,
    table: pd.DataFrame,
    targets: Numbers,
    names: tuple[str, ...],
    command: Command,
) -> None:
    """Write the issues beside the run, and log the first, with what was found of these labels.

    If the data are one table, this is a copy of it, with all of its rows, and with `suggestion` and
    `probability` where a label is doubtful. Else it is a list of the doubtful ones.
    """
    labels = Labels((), SINGLE if targets.ndim == 1 else MULTI, names)
    found = table.iloc[issues.rows].assign(
        label=labels.decode(targets[issues.rows]),
        suggestion=[name or NO_CLASS for name in labels.decode(issues.suggestions)],
        probability=issues.probabilities.round(3),
    )
    folder = Path(command.training.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    own = table_of(command)
    path = folder / LABEL_ISSUES_LIST
    if own is not None:
        path = folder / f"{LABEL_ISSUES}{own.format if own.format in WRITTEN else '.xlsx'}"
        keep_corrected(path, own)
        added = added_to(own, command)
        by_row = {row["row"]: row for row in found.to_dict("records")}
        for number, row in zip(own.numbers, own.rows, strict=True):
            issue = by_row.get(str(number), {})
            row |= {column: issue.get(name) for name, column in added.items()}
        write_table(path, own.rows, own, [*added.values()])
    else:
        found.map(defused).to_csv(path, index=False)
    for older in (folder / LABEL_ISSUES_LIST, *folder.glob(f"{LABEL_ISSUES}.*")):
        if older.stem in (LABEL_ISSUES, Path(LABEL_ISSUES_LIST).stem) and older != path:
            older.unlink(missing_ok=True)
    log(f"label check: {len(found):,} of {len(targets):,} labels are doubtful: {path}")
    for row in found.head(_SHOWN).to_dict("records"):
        text = textwrap.shorten(row.get("word", row["text"]), _SHOWN_TEXT, placeholder="...")
        log(f"  {row['row']}: {text!r} -> {row['label']}, probably {row['suggestion']}")


def added_to(own: Table, command: Command) -> dict[str, str]:
    """Return the columns that are added to the user's table, by what they hold. Those of an
    earlier check are replaced, but not columns of the user's own.
    """
    are_free = command.arguments.is_corrected or not {*ADDED} & {*own.columns}
    return {name: name if are_free else f"{LABEL_ISSUES}_{name}" for name in ADDED}


def keep_corrected(path: Path, own: Table) -> None:
    """Give an earlier table another name if its rows are not the user's, as after corrections."""
    if not path.exists():
        return
    earlier = [[row.get(name) for name in own.columns] for row in read_table(path).rows]
    if earlier == [[row.get(name) for name in own.columns] for row in own.rows]:
        return
    number = 1
    while (kept := path.with_name(f"{LABEL_ISSUES}.{number}{path.suffix}")).exists():
        number += 1
    path.replace(kept)
    log(f"note: {path} differs from {own.path} in more than suggestions, and is now {kept.name}")


def gather_issues(commands: Mapping[str, Command]) -> Path | None:
    """Log how many issues each of several tasks has, and write those on one table into a copy of it
    beside their folders; return its path, or None if the data are no single table.
    """
    whole, added, counts, path = None, [], [], None
    for task, command in commands.items():
        folder = Path(command.training.output_dir)
        whole = whole or table_of(command)
        for of_task in folder.glob(f"{LABEL_ISSUES}.*"):
            if whole is None or of_task.stem != LABEL_ISSUES:
                continue
            columns = added_to(whole, command)
            suggested = read_table(of_task).rows
            if len(suggested) != len(whole.rows):
                continue
            for row, issue in zip(whole.rows, suggested, strict=True):
                row |= {f"{task}_{name}": issue[column] for name, column in columns.items()}
            doubtful = sum(bool(issue[columns["suggestion"]]) for issue in suggested)
            counts.append(f"{task} {doubtful:,}")
            added += [f"{task}_{name}" for name in ADDED]
            path = folder.parent / of_task.name
    if whole is not None and path is not None:
        keep_corrected(path, whole)
        write_table(path, whole.rows, whole, added)
        log(f"doubtful labels: {', '.join(counts)}")
    return path


def table_of(command: Command) -> Table | None:
    """Return the user's table, if the data are a single one, in which each row is an example."""
    arguments = command.arguments
    path = Path(arguments.data).expanduser()
    others = (arguments.more_data, arguments.validation_file, arguments.test_file)
    if any(others) or not path.is_file() or getattr(arguments, "word_column", None):
        return None
    if suffix_of(path) not in (*READ, *OTHER_NAMES) or suffix_of(path) == ".txt":
        return None
    table = read_table(path, arguments.encoding, arguments.read_options.has_header)
    rows = [
        {**row, WHERE: str(number)} for row, number in zip(table.rows, table.numbers, strict=True)
    ]
    is_table = not arguments.read_options.has_words and read_export(rows) is None
    return table if is_table else None
