"""The rule that each value of a `HoulsbyConfig` must follow."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers.activations import ACT2FN

from .bottleneck import KINDS
from .errors import shortened


if TYPE_CHECKING:
    from .config import HoulsbyConfig


POSITIONS = ("attention", "feed_forward", "cross_attention")
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
# The names of heads that PEFT's model classes always add to `modules_to_save`, by task type.
HEADS_OF_PEFT = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}


def check_values(config: HoulsbyConfig) -> None:
    """Refuse a configuration with a value that breaks its rule.

    Raises:
        ValueError: The message names the rule, the value received and the remedy.
    """
    for name, (is_valid, rule, remedy) in _RULES.items():
        if not is_valid(getattr(config, name)):
            raise ValueError(_message(config, name, rule, remedy))
    for name, is_valid, rule, remedy in _JOINT_RULES:
        if not is_valid(config):
            raise ValueError(_message(config, name, rule.format(config), remedy))


def _message(config: HoulsbyConfig, name: str, rule: str, remedy: str) -> str:
    return f"HoulsbyConfig.{name} must be {rule}; got {shortened(repr(getattr(config, name)))}. {remedy}."


def _is_int(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_text(value: Any) -> bool:
    """Return whether a value is text that files and terminals accept, unlike half of a surrogate pair."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _is_pattern(value: Any) -> bool:
    try:
        return _is_name(value) and bool(re.compile(value))
    except (re.error, OverflowError, RecursionError):
        return False


def _is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_item, value))


def _are_names(value: Any) -> bool:
    return value is None or _is_list(value, _is_name) or _is_pattern(value)


def _are_tokens(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_name(name) and _is_list(tokens, _is_int) for name, tokens in value.items())
    return value is None or _is_list(value, _is_int)


def _are_labels(value: Any) -> bool:
    numbers_from_0 = isinstance(value, dict) and bool(value) and set(value) == set(range(len(value)))
    return value is None or (numbers_from_0 and all(map(_is_text, value.values())))


# Each field's check, its rule and what to do.
_RULES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "r": (lambda r: _is_int(r, 1), "a whole number of at least 1", "The paper uses 8 to 256"),
    "activation": (
        lambda name: isinstance(name, str) and name in ACT2FN,
        "a key of transformers' ACT2FN",
        f"Choose one of {', '.join(sorted(ACT2FN))}",
    ),
    "dropout": (
        lambda value: _is_number(value) and 0 <= value < 1,
        "a probability in [0, 1)",
        "The paper uses 0",
    ),
    "share_layers": (
        _is_int,
        "a whole number of at least 0",
        "0 shares nothing, 1 within a layer, k across k consecutive layers",
    ),
    "init_std": (
        lambda value: _is_number(value) and 0 <= value < 1e6,
        "a number of at least 0 and below a million",
        "The paper uses 0.01; 0 starts as the exact identity",
    ),
    "train_layer_norm": (
        lambda value: _is_bool(value) or (isinstance(value, str) and value == "all"),
        "True, False or 'all'",
        "True trains the norms of the adapted layers",
    ),
    "init_weights": (_is_bool, "True or False", "True initializes as the paper does; no other ways are known"),
    "positions": (
        lambda names: bool(names) and all(isinstance(name, str) and name in POSITIONS for name in names),
        f"one or more of {POSITIONS}",
        "The paper uses ('attention', 'feed_forward')",
    ),
    "target_modules": (
        lambda value: _are_names(value) and value != "all-linear",
        "a non-empty list of name suffixes or a regular expression",
        "An adapter follows a sub-layer, not each of its linear layers; None finds the places",
    ),
    "exclude_modules": (
        lambda value: not value or _are_names(value),
        "a list of name suffixes or a regular expression",
        "None excludes nothing",
    ),
    "layers_to_transform": (
        lambda value: value is None or _is_int(value) or _is_list(value, _is_int),
        "None, a layer's index, or a non-empty list of indices, counted from 0",
        "None adapts all layers",
    ),
    "layers_pattern": (
        lambda value: not value or _is_pattern(value) or _is_list(value, _is_pattern),
        "the name of a list of layers, or a list of such names, as regular expressions",
        "None means any list",
    ),
    "rank_pattern": (
        lambda sizes: (
            isinstance(sizes, dict) and all(map(_is_pattern, sizes)) and all(_is_int(r, 1) for r in sizes.values())
        ),
        "a dict from names or regular expressions to whole numbers of at least 1",
        "For example {'attention.output.dropout': 8}",
    ),
    "modules_to_save": (
        lambda value: value is None or value == [] or _is_list(value, _is_name),
        "None or a list of module names",
        "For example ['pooler']; None trains a newly initialized head",
    ),
    "trainable_token_indices": (
        lambda value: not value or _are_tokens(value),
        "a list of different tokens of the model, or a dict from names of embedding modules to such lists",
        "For example [100, 101]",
    ),
    "kind": (
        lambda kind: isinstance(kind, str) and kind in KINDS,
        f"one of {KINDS}",
        "The paper's adapters are 'houlsby'",
    ),
    "scaling": (
        lambda value: (
            (_is_number(value) and 0 < abs(value) < 1e6)
            or (isinstance(value, str) and value in ("learned", "channel"))
        ),
        "a number other than 0 and below a million, 'learned' or 'channel'",
        "The paper uses 1; 'learned' and 'channel' start at 1",
    ),
    "invertible": (
        lambda value: value is None or (isinstance(value, str) and value == "nice"),
        "'nice' or None",
        "Give None to leave the embeddings as they are",
    ),
    "invertible_reduction_factor": (
        lambda value: _is_number(value) and 0.25 <= value < math.inf,
        "a number of at least 0.25",
        "Give 2, as in MAD-X",
    ),
    "id2label": (
        _are_labels,
        "a dict from every number from 0 on to a name",
        "For example {0: 'negative', 1: 'positive'}",
    ),
    "problem_type": (
        lambda value: value is None or (isinstance(value, str) and value in PROBLEM_TYPES),
        f"one of {PROBLEM_TYPES}",
        "None uses the base model's configuration",
    ),
    "two_layer_head": (_is_bool, "True or False", "True gives the head a hidden layer"),
    # These are PEFT's, which does not check them.
    "base_model_name_or_path": (
        lambda value: value is None or isinstance(value, (str, os.PathLike)),
        "the name or the folder of the base model",
        "PEFT fills it in",
    ),
    "revision": (
        lambda value: value is None or isinstance(value, str),
        "a branch, tag or commit of the base model",
        "None is its newest commit",
    ),
    "inference_mode": (_is_bool, "True or False", "False trains the adapter"),
    "auto_mapping": (
        lambda value: value is None or isinstance(value, dict),
        "the dict that PEFT has saved, or None",
        "PEFT fills it in",
    ),
}
# What fields must be together: the field to name, the check, the rule (a format string), and what to do.
_JOINT_RULES: tuple[tuple[str, Callable[[HoulsbyConfig], bool], str, str], ...] = (
    (
        "target_modules",
        lambda c: c.kind == "houlsby" or c.target_modules is None,
        "None for adapters that read the input of a sub-layer, which only the table of architectures tells (here "
        "kind={0.kind!r})",
        "Select sub-layers with positions, layers_to_transform and exclude_modules",
    ),
    (
        "rank_pattern",
        lambda c: not (c.rank_pattern and c.share_layers),
        "empty where bottlenecks are shared (here share_layers={0.share_layers})",
        "Leave it out, or set share_layers=0",
    ),
    (
        "layers_pattern",
        lambda c: c.layers_to_transform is not None or not c.layers_pattern,
        "given together with layers_to_transform",
        "Add layers_to_transform, or drop layers_pattern",
    ),
    (
        "modules_to_save",
        lambda c: not (c.modules_to_save == [] and c.task_type in HEADS_OF_PEFT),
        "not empty if task_type is one whose head PEFT always trains (here {0.task_type})",
        "Leave task_type out to train no head",
    ),
)
