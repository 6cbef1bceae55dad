"""The rules of `HoulsbyConfig`: what each value must be, and what to do if it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.activations import ACT2FN


if TYPE_CHECKING:
    from .config import HoulsbyConfig


POSITIONS = ("attention", "feed_forward", "cross_attention")
# The task types of PEFT whose model classes add the head to the modules to save.
_TRAINED_HEADS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


def check_config(config: HoulsbyConfig) -> None:
    """Check all values of a configuration.

    Raises:
        ValueError: a value breaks its rule; the error says which, the value, and a remedy.
    """
    _check_bottleneck(config)
    _check_places(config)
    _check_head(config)


def _check_bottleneck(config: HoulsbyConfig) -> None:
    _require(
        _is_int(config.r) and config.r >= 1, "r", config.r, "a whole number of at least 1", "The paper uses 8 to 256"
    )
    _require(
        isinstance(config.activation, str) and config.activation in ACT2FN, "activation", config.activation,
        "a key of transformers' ACT2FN", f"Choose one of {', '.join(sorted(ACT2FN))}",
    )  # fmt: skip
    _require(
        _is_number(config.dropout) and 0 <= config.dropout < 1, "dropout", config.dropout, "a probability in [0, 1)",
        "The paper uses 0",
    )  # fmt: skip
    _require(
        _is_number(config.init_std) and config.init_std >= 0, "init_std", config.init_std, "a number of at least 0",
        "The paper uses 0.01; 0 starts at the exact identity",
    )  # fmt: skip
    _require(
        config.train_layer_norm in (True, False, "all") and not _is_int(config.train_layer_norm),
        "train_layer_norm", config.train_layer_norm, "True, False or 'all'",
        "True trains the norms of the adapted layers",
    )  # fmt: skip


def _check_places(config: HoulsbyConfig) -> None:
    _require(
        _is_int(config.share_layers) and config.share_layers >= 0, "share_layers", config.share_layers,
        "a whole number of at least 0", "0 shares nothing, 1 within a layer, k across k consecutive layers",
    )  # fmt: skip
    _require(
        bool(config.positions) and set(config.positions) <= set(POSITIONS), "positions", config.positions,
        f"one or more of {POSITIONS}", "The paper uses ('attention', 'feed_forward')",
    )  # fmt: skip
    _require(
        config.target_modules != "all-linear", "target_modules", config.target_modules,
        "a list of name suffixes or a regular expression",
        "An adapter goes after a sub-layer, not after each of its linear layers; None finds the places",
    )  # fmt: skip
    _require(
        all(_is_int(size) and size >= 1 for size in config.rank_pattern.values()), "rank_pattern", config.rank_pattern,
        "a dict from names to whole numbers of at least 1", "For example {'attention.output.dropout': 8}",
    )  # fmt: skip
    _require(
        not (config.rank_pattern and config.share_layers), "rank_pattern", config.rank_pattern,
        f"empty where places share one bottleneck (here share_layers={config.share_layers})",
        "Set share_layers=0 to give places different sizes, or drop rank_pattern",
    )  # fmt: skip
    layers = config.layers_to_transform
    _require(
        layers is None or _is_index(layers)
        or (isinstance(layers, list) and bool(layers) and all(_is_index(layer) for layer in layers)),
        "layers_to_transform", layers, "None, a layer's index, or a non-empty list of indices, counted from 0",
        "None adapts all layers",
    )  # fmt: skip
    _require(
        layers is not None or not config.layers_pattern, "layers_pattern", config.layers_pattern,
        "given together with layers_to_transform", "Add layers_to_transform, or drop layers_pattern",
    )  # fmt: skip


def _check_head(config: HoulsbyConfig) -> None:
    _require(
        config.modules_to_save != [] or config.task_type not in _TRAINED_HEADS, "modules_to_save",
        config.modules_to_save, f"None or name modules where task_type is {config.task_type}, whose head PEFT always "
        "trains", "Leave task_type out to train no head",
    )  # fmt: skip
    _require(
        config.id2label is None or _are_labels(config.id2label), "id2label", config.id2label,
        "a dict from every number from 0 on to a name", "For example {0: 'negative', 1: 'positive'}",
    )  # fmt: skip
    _require(
        config.problem_type in (None, *PROBLEM_TYPES), "problem_type", config.problem_type, f"one of {PROBLEM_TYPES}",
        "None leaves it to the base model's configuration",
    )  # fmt: skip
    _require(
        isinstance(config.two_layer_head, bool), "two_layer_head", config.two_layer_head, "True or False",
        "True for a model that put_two_layer_head has changed",
    )  # fmt: skip


def _require(holds: bool, name: str, value: object, rule: str, remedy: str) -> None:
    if not holds:
        raise ValueError(f"HoulsbyConfig.{name} must be {rule}; got {value!r}. {remedy}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_index(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _are_labels(value: Any) -> bool:
    numbered = isinstance(value, dict) and set(value) == set(range(len(value)))
    return numbered and bool(value) and all(isinstance(name, str) for name in value.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
