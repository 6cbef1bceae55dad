"""`HoulsbyConfig`: every option of the method, checked when the config is made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from peft import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from transformers.activations import ACT2FN

from .loading import refuse_pickle
from .registration import houlsby_peft_type


POSITIONS = ("attention", "feed_forward", "cross_attention")
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


@dataclass
class HoulsbyConfig(PeftConfig):
    """Configuration of Houlsby bottleneck adapters (Houlsby et al. 2019, "Parameter-Efficient Transfer Learning").

    Args:
        r: Bottleneck size, at least 1. A bottleneck of width d has 2rd + d + r parameters.
        activation: Non-linearity between the two projections, any key of transformers' `ACT2FN`.
        dropout: Dropout probability on the bottleneck's branch, in [0, 1). The paper uses none.
        share_layers: 0: every position has its own bottleneck (the paper). 1: the positions of a layer share one.
            k: the positions of k consecutive layers share one; 3 is the "3-shared" variant of Mohebbi and Rajaei 2020.
        init_std: Standard deviation of the truncated normal initialization (paper, section 3.6). 0 starts at the
            exact identity.
        train_layer_norm: True: train a copy of the norms of the adapted layers (paper, section 2.1). "all": train
            every norm of the model, also the embedding's and the final one, as the paper's code does. False: none.
        init_weights: False skips the paper's initialization; the adapter is then far from the identity. For tests.
        positions: Sub-layers that get a bottleneck: "attention", "feed_forward" and, in encoder-decoders,
            "cross_attention".
        target_modules: Modules whose output gets a bottleneck, as a list of name suffixes or a regular expression.
            None: the places of the architecture, which `positions` selects from.
        exclude_modules: Modules to leave alone, as a list of name suffixes or a regular expression.
        layers_to_transform: Index or indices of the layers to adapt. None: all.
        layers_pattern: Name of the list of layers that `layers_to_transform` counts in, if there are several.
        rank_pattern: Bottleneck sizes that differ from `r`, by name suffix or regular expression of the place.
        modules_to_save: Further modules to train and save. A task head that the base checkpoint does not have is
            found and added by itself; an empty list prevents that.
        trainable_token_indices: Tokens whose embeddings to train and save, such as ones added to the vocabulary, as a
            list, or as a dict from names of embedding modules to lists. See PEFT's `LoraConfig`.
        base_fingerprint: What tells the base model from others, recorded when the adapter is made and compared when
            it is loaded. Not for users to set.
        id2label: Names of the classes by number, from 0 on. None: recorded from the model when the adapter is pushed
            to the Hub, so that whoever loads it gets the right head and the names.
        problem_type: As in transformers: "regression", "single_label_classification" or "multi_label_classification".
            None: recorded like `id2label`.
        two_layer_head: Whether the model was given a head with a hidden layer (see `two_layer_head.py`), so that
            `houlsby_peft.load` gives the base model one, too.

    Raises:
        ValueError: A field breaks its rule; the message gives the rule, the value and the remedy.
    """

    r: int = field(default=64, metadata={"help": "Bottleneck size."})
    activation: str = field(default="gelu", metadata={"help": "Non-linearity, a key of transformers' ACT2FN."})
    dropout: float = field(default=0.0, metadata={"help": "Dropout probability on the bottleneck's branch."})
    share_layers: int = field(
        default=0, metadata={"help": "0: nothing shared; k: one bottleneck for each k consecutive layers."}
    )
    init_std: float = field(default=0.01, metadata={"help": "Std of the truncated normal initialization."})
    train_layer_norm: bool | Literal["all"] = field(
        default=True, metadata={"help": "Train the norms of the adapted layers (True), all norms ('all') or none."}
    )
    init_weights: bool = field(default=True, metadata={"help": "Whether to initialize the weights as the paper does."})
    positions: tuple[str, ...] = field(
        default=("attention", "feed_forward"), metadata={"help": f"Which of {POSITIONS} get a bottleneck."}
    )
    target_modules: list[str] | str | None = field(
        default=None, metadata={"help": "Modules whose output gets a bottleneck; None: the architecture's places."}
    )
    exclude_modules: list[str] | str | None = field(default=None, metadata={"help": "Modules to leave alone."})
    layers_to_transform: list[int] | int | None = field(default=None, metadata={"help": "Layers to adapt."})
    layers_pattern: list[str] | str | None = field(
        default=None, metadata={"help": "Name of the list of layers that layers_to_transform counts in."}
    )
    rank_pattern: dict[str, int] = field(
        default_factory=dict, metadata={"help": "Bottleneck sizes by name suffix or regular expression."}
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Further modules to train and save; the task head is found by itself."}
    )
    trainable_token_indices: list[int] | dict[str, list[int]] | None = field(
        default=None, metadata={"help": "Tokens whose embeddings are trained too."}
    )
    base_fingerprint: dict[str, Any] | None = field(
        default=None, metadata={"help": "What tells the base model from others; recorded by itself."}
    )
    id2label: dict[int, str] | None = field(default=None, metadata={"help": "Names of the classes by number."})
    problem_type: str | None = field(default=None, metadata={"help": f"Kind of task of the head: {PROBLEM_TYPES}."})
    two_layer_head: bool = field(
        default=False, metadata={"help": "Whether the model was given a head with a hidden layer."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = houlsby_peft_type()
        self.positions = _names(self.positions)
        self.target_modules = _list_or_pattern(self.target_modules)
        self.exclude_modules = _list_or_pattern(self.exclude_modules)
        self.rank_pattern = dict(self.rank_pattern or {})
        if isinstance(self.layers_to_transform, (tuple, set, range)):
            self.layers_to_transform = sorted(self.layers_to_transform)
        # A configuration object may be used for several new adapters: what is recorded in it gives way, what the user
        # gave or a file brought does not.
        self.was_trained_elsewhere = self.base_fingerprint is not None
        self.recorded_head: dict[str, Any] = {}
        self.weights_file: Path | None = None
        self._check_bottleneck()
        self._check_places()
        self._check_labels()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any
    ) -> HoulsbyConfig:
        """Load the configuration of a saved adapter, and remember its file of weights if that is in a folder here.

        Args:
            pretrained_model_name_or_path: the adapter's folder, or its repository on the Hub.
            subfolder: folder inside of it.
            kwargs: as for PEFT: `revision`, `token`, `cache_dir`, ...

        Raises:
            ValueError: a value breaks its rule, or the adapter has its weights in a pickled file only.
        """
        refuse_pickle(pretrained_model_name_or_path, subfolder, kwargs.get("revision"), kwargs.get("token"))
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        file = Path(pretrained_model_name_or_path, subfolder or "", SAFETENSORS_WEIGHTS_NAME)
        config.weights_file = file if file.is_file() else None
        return config  # type: ignore[no-any-return]

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the configuration beside the adapter's weights, which PEFT has written.

        Raises:
            ValueError: the weights were pickled (`safe_serialization=False`), so that they could not be loaded again.
        """
        if Path(save_directory).is_dir():
            refuse_pickle(save_directory)
        super().save_pretrained(save_directory, **kwargs)

    def _check_bottleneck(self) -> None:
        _require(
            _is_int(self.r) and self.r >= 1, "r", self.r, "a whole number of at least 1", "The paper uses 8 to 256"
        )
        _require(
            isinstance(self.activation, str) and self.activation in ACT2FN, "activation", self.activation,
            "a key of transformers' ACT2FN", f"Choose one of {', '.join(sorted(ACT2FN))}",
        )  # fmt: skip
        _require(
            _is_number(self.dropout) and 0 <= self.dropout < 1, "dropout", self.dropout, "a probability in [0, 1)",
            "The paper uses 0",
        )  # fmt: skip
        _require(
            _is_number(self.init_std) and self.init_std >= 0, "init_std", self.init_std, "a number of at least 0",
            "The paper uses 0.01; 0 starts at the exact identity",
        )  # fmt: skip
        _require(
            self.train_layer_norm in (True, False, "all") and not _is_int(self.train_layer_norm),
            "train_layer_norm", self.train_layer_norm, "True, False or 'all'",
            "True trains the norms of the adapted layers",
        )  # fmt: skip

    def _check_places(self) -> None:
        _require(
            _is_int(self.share_layers) and self.share_layers >= 0, "share_layers", self.share_layers,
            "a whole number of at least 0", "0 shares nothing, 1 within a layer, k across k consecutive layers",
        )  # fmt: skip
        _require(
            bool(self.positions) and set(self.positions) <= set(POSITIONS), "positions", self.positions,
            f"one or more of {POSITIONS}", "The paper uses ('attention', 'feed_forward')",
        )  # fmt: skip
        _require(
            self.target_modules != "all-linear", "target_modules", self.target_modules,
            "a list of name suffixes or a regular expression",
            "An adapter goes after a sub-layer, not after each of its linear layers; None finds the places",
        )  # fmt: skip
        _require(
            all(_is_int(size) and size >= 1 for size in self.rank_pattern.values()), "rank_pattern", self.rank_pattern,
            "a dict from names to whole numbers of at least 1", "For example {'attention.output.dropout': 8}",
        )  # fmt: skip
        _require(
            not (self.rank_pattern and self.share_layers), "rank_pattern", self.rank_pattern,
            f"empty where places share one bottleneck (here share_layers={self.share_layers})",
            "Set share_layers=0 to give places different sizes, or drop rank_pattern",
        )  # fmt: skip
        layers = self.layers_to_transform
        _require(
            layers is None or _is_index(layers)
            or (isinstance(layers, list) and bool(layers) and all(_is_index(layer) for layer in layers)),
            "layers_to_transform", layers, "None, a layer's index, or a non-empty list of indices, counted from 0",
            "None adapts all layers",
        )  # fmt: skip
        _require(
            layers is not None or not self.layers_pattern, "layers_pattern", self.layers_pattern,
            "given together with layers_to_transform", "Add layers_to_transform, or drop layers_pattern",
        )  # fmt: skip

    def _check_labels(self) -> None:
        if isinstance(self.id2label, dict):  # JSON turns the numbers into strings
            self.id2label = {int(key) if str(key).isdecimal() else key: name for key, name in self.id2label.items()}
        _require(
            self.id2label is None or _are_labels(self.id2label), "id2label", self.id2label,
            "a dict from every number from 0 on to a name", "For example {0: 'negative', 1: 'positive'}",
        )  # fmt: skip
        _require(
            self.problem_type in (None, *PROBLEM_TYPES), "problem_type", self.problem_type, f"one of {PROBLEM_TYPES}",
            "None leaves it to the base model's configuration",
        )  # fmt: skip
        _require(
            isinstance(self.two_layer_head, bool), "two_layer_head", self.two_layer_head, "True or False",
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


def _names(value: Any) -> tuple[str, ...]:
    """JSON has no tuples, and a single name is often written bare."""
    return tuple(value) if isinstance(value, (list, tuple, set)) else (value,)


def _list_or_pattern(value: Iterable[str] | str | None) -> list[str] | str | None:
    """A string is a regular expression; any other collection becomes a list, sets in a stable order for the file."""
    if value is None or isinstance(value, (str, list)):
        return value
    return sorted(value)
