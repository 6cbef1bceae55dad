"""Training examples whose label is probably wrong, by confident learning (Northcutt et al. 2021,
arXiv 1911.00068).

A linear classifier on the hidden states of the frozen encoder predicts each example after training
on others. cleanlab then finds the labels that these predictions contradict.
"""

import textwrap
import warnings
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from cleanlab.filter import find_label_issues
from datasets import Dataset
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm
from transformers import (
    AutoModel,
    DataCollatorForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from data.data import sample
from data.labels import MULTI, SINGLE, Labels
from houlsby_peft.saved.downloads import find_packaged
from run.command import Command
from run.edge import log
from run.model import find_dtype, load_model, on_main
from run.saved import Saved
from tasks.scores import defused
from tasks.task import Task


FILE = "label_issues.csv"
_FOLDS = 5
# A strong penalty, as the states are standardized, and as wide as examples are few.
_INVERSE_PENALTY = 0.01
# Warnings of scikit-learn and cleanlab.
_OF_RARE_CLASSES = ("Label .* is present in all training", "May not flag all label issues")
_SHOWN, _SHOWN_TEXT = 5, 60  # issues of the log, and characters of a text

Numbers = NDArray[np.int64]
States = NDArray[np.float32]


@dataclass(frozen=True)
class FrozenEncoder:
    """An encoder that is not trained. The state of a token is its mean over all layers."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int

    @classmethod
    def load(cls, name: str, dtype: str, device: torch.device, batch_size: int) -> "FrozenEncoder":
        model, tokenizer, _ = load_model(AutoModel, name, dtype)
        if model.config.is_encoder_decoder:
            model = model.get_encoder()
        return cls(model.eval().to(device), tokenizer, batch_size)

    def read_texts(self, tokens: Dataset) -> States:
        """Return the mean state of the tokens of each text, of shape (texts, width)."""
        numbers, means = [], []
        for rows, batch, states in self._read(tokens):
            is_token = batch["attention_mask"][:, :, None]
            numbers.append(rows)
            means.append((states * is_token).sum(1) / is_token.sum(1))
        return torch.cat(means)[np.argsort(np.concatenate(numbers))].numpy()

    def read_words(self, tokens: Dataset) -> tuple[Numbers, States]:
        """Return the numbers of the words in ascending order, and their states, of shape
        (words, width).

        In the `labels` of the tokens, the first piece of a word has the word's number; other tokens
        have a negative one.
        """
        numbers, states_of_words = [], []
        for _, batch, states in self._read(tokens):
            is_word = batch["labels"] >= 0
            numbers.append(batch["labels"][is_word])
            states_of_words.append(states[is_word])
        ascending, order = torch.cat(numbers).sort()
        return ascending.numpy(), torch.cat(states_of_words)[order].numpy()

    @torch.inference_mode()
    def _read(self, tokens: Dataset) -> Iterator[tuple[Numbers, Any, torch.Tensor]]:
        """Yield batches of rows of similar lengths: their numbers, their tokens, and the states of
        these, of shape (rows, tokens, width).
        """
        inputs = set(self.tokenizer.model_input_names) & set(tokens.column_names)
        used = tokens.select_columns(sorted({*inputs, "labels"} & {*tokens.column_names}))
        collate = DataCollatorForTokenClassification(self.tokenizer)  # which pads labels as well
        by_length = np.argsort(tokens["length"])
        starts = range(0, len(tokens), self.batch_size)
        for start in tqdm(starts, desc="Reading", unit="batch", disable=None):
            rows = by_length[start : start + self.batch_size]
            batch = collate(used.select(rows).to_list())
            on_device = {name: batch[name].to(self.model.device) for name in inputs}
            layers = self.model(**on_device, output_hidden_states=True).hidden_states
            states = sum(layer.float() for layer in layers) / len(layers)
            yield rows, batch, states.cpu()


class Items(NamedTuple):
    """What has labels, texts or words: the states of the encoder, the labels as numbers, and where
    each item is, in the columns line and text and, of words, position and word.
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
    def items_to_check(self, examples: Dataset, encoder: FrozenEncoder, max_length: int) -> Items:
        """Return what is labeled in some examples."""


def check_labels(
    load: Callable[[Saved | None], LabeledTask], command: Command
) -> Callable[[Saved | None], LabeledTask] | None:
    """Write label_issues.csv if the command asks for it; return what loads the task to train on,
    or None if nothing is to be trained.
    """
    arguments, training = command.arguments, command.training
    if arguments.check_labels is None or arguments.evaluate is not None:
        return load
    task = load(None)

    def check() -> None:
        encoder = find_packaged(arguments.model_name)
        frozen = FrozenEncoder.load(
            encoder,
            find_dtype(command, encoder),
            training.device,
            training.per_device_eval_batch_size,
        )
        examples = sample(task.undivided, arguments.max_train_samples)
        items = task.items_to_check(examples, frozen, arguments.max_length)
        issues = find_issues(items.states, items.targets, items.table["text"])
        report(issues, items, task.labels, Path(training.output_dir))

    on_main(training, check)
    return None if arguments.check_labels == "only" else partial(as_loaded, task)


def as_loaded(task: LabeledTask, saved: Saved | None) -> LabeledTask:
    """Return a task that is loaded already, where `run_task` calls for it."""
    return task


@dataclass(frozen=True)
class Issues:
    """Labels that are probably wrong, the most certain first.

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


def find_issues(states: States, targets: Numbers, texts: Sequence[Hashable]) -> Issues:
    """Find the targets that predictions from the states contradict.

    Targets are numbers of classes, of shape (rows,), or a 0 or 1 for each class, of shape
    (rows, classes). Rows with the same text are never trained on to predict each other.
    """
    with warnings.catch_warnings():
        for message in _OF_RARE_CLASSES:
            warnings.filterwarnings("ignore", message, UserWarning)
        predicted = predict_out_of_fold(states, targets, texts)
        if targets.ndim == 1:
            return _compare_classes(targets, predicted)
        return _compare_flags(targets, predicted)


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
        classifier = make_pipeline(
            StandardScaler(),
            OneVsRestClassifier(LogisticRegression(C=_INVERSE_PENALTY, max_iter=1000)),
        )
        classifier.fit(states[training], targets[training])
        columns = np.ix_(held_out, classifier.classes_)
        predicted[columns] = classifier.predict_proba(states[held_out])
    return predicted


def _compare_classes(targets: Numbers, predicted: NDArray[np.float64]) -> Issues:
    """Return the issues of numbers of classes."""
    suggestions = predicted.argmax(1)
    is_right = suggestions == targets
    is_wrong = _find_wrong(targets, predicted)
    most_frequent = np.bincount(targets).max()
    return _most_certain_first(
        is_wrong, suggestions, predicted.max(1), is_right.mean(), most_frequent / len(targets)
    )


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
    """Return which targets are probably wrong: the least probable, as many as cleanlab estimates.

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


def report(issues: Issues, items: Items, names: tuple[str, ...], folder: Path) -> None:
    """Write the issues as FILE into a folder, and log the first."""
    labels = Labels((), SINGLE if items.targets.ndim == 1 else MULTI, names)
    table = items.table.iloc[issues.rows].assign(
        label=labels.decode(items.targets[issues.rows]),
        suggestion=labels.decode(issues.suggestions),
        probability=issues.probabilities.round(4),
    )
    path = folder / FILE
    folder.mkdir(parents=True, exist_ok=True)
    table.map(defused).to_csv(path, index=False)
    log(
        f"label check: predictions from other examples agree with {issues.accuracy:.1%} of the "
        f"labels; always the most frequent label would with {issues.constant_accuracy:.1%}"
    )
    if issues.accuracy <= issues.constant_accuracy:
        log("note: the frozen encoder tells these labels hardly apart: the suggestions are guesses")
    log(f"label check: {len(table):,} of {len(items.targets):,} are probably wrong: {path}")
    for row in table.head(_SHOWN).to_dict("records"):
        text = textwrap.shorten(row.get("word", row["text"]), _SHOWN_TEXT, placeholder="...")
        log(f"  {row['line']}: {text!r} -> {row['label']}, probably {row['suggestion']}")
