"""`HoulsbyConfig`: every option of the method, its rules, and how a configuration is saved and
loaded.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from inspect import get_annotations
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from huggingface_hub.dataclasses import type_validator
from peft import PeftConfig
from peft.utils import CONFIG_NAME
from transformers.activations import ACT2FN

from .errors import shortened
from .record import AdapterRecord, numbered
from .registration import houlsby_peft_type
from .weights import read_json, read_shapes


# The kinds of adapters, which differ in what their bottlenecks read; see `SkipConnection.read`.
KINDS = ("houlsby", "pfeiffer", "parallel")
POSITIONS = ("attention", "feed_forward", "cross_attention")
# Houlsby et al. 2019, section 3.6. With init_std=0, `down_proj` still starts with this standard
# deviation.
PAPER_INIT_STD = 1e-2
# The names of heads that PEFT's model classes always add to `modules_to_save`, by task type.
HEADS_OF_PEFT = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
# Options that neither decide which bottlenecks and norms an adapter has, nor what they compute.
_WITHOUT_SHAPE = {"dropout", "init_std", "init_weights", "modules_to_save", "trainable_token_indices"} | {
    "id2label", "problem_type", "two_layer_head"
}  # fmt: skip


@dataclass
class HoulsbyConfig(PeftConfig):
    """Configuration of Houlsby bottleneck adapters (Houlsby et al. 2019, arXiv 1902.00751).

    Args:
        r: Size of the bottleneck, at least 1. A bottleneck of width d has 2rd + d + r parameters.
        activation: Non-linearity between the two projections, a key of transformers' `ACT2FN`.
        dropout: Dropout probability on the bottleneck's branch, in [0, 1). The paper uses none.
        share_layers: 0: a separate bottleneck at each position (the paper). 1: one bottleneck per
            layer, shared by its positions. k: one bottleneck per k consecutive layers; 3 is the
            "3-shared" variant of Mohebbi and Rajaei 2020.
        init_std: Standard deviation of the truncated normal initialization (section 3.6). 0 starts
            as the identity.
        train_layer_norm: True: train a copy of the norms of the adapted layers (section 2.1).
            "all": train a copy of every norm of the model, as the paper's code does. False: train
            no norm.
        init_weights: Whether to initialize the bottlenecks as the paper does. False leaves them far
            from the identity; it is meant for tests.
        positions: Sub-layers that get a bottleneck: "attention", "feed_forward" and, in
            encoder-decoders, "cross_attention". None: attention and feed-forward for the kind
            "houlsby" (the paper), feed-forward for the others, as they were published.
        target_modules: Modules whose output gets a bottleneck, as a list of name suffixes or a
            regular expression. None: the known or inferred places of the architecture, selected by
            `positions`.
        exclude_modules: Modules that get no bottleneck and no trained norm, as a list of name
            suffixes, which exclude what is inside these modules as well, or as a regular
            expression, which must match the whole name.
        layers_to_transform: Index or indices of the layers to adapt. None: all layers.
        layers_pattern: Name of the list of layers to adapt, if there are several; a regular expression, or several.
        rank_pattern: Bottleneck sizes that differ from `r`, by name suffix or regular expression of the module.
        modules_to_save: Further modules to train and save as a whole. A newly initialized task
            head, or a pooler below it, is detected and trained automatically; an empty list
            prevents that. Other modules that the checkpoint lacks, such as the head of a language
            model, are named in the log.
        trainable_token_indices: Tokens whose embeddings are trained and saved, as a list, or as a
            dict from names of embedding modules to lists. See PEFT's `LoraConfig`.
        kind: What the bottleneck reads; each kind adds its branch to the output h of the sub-layer,
            before the skip connection with its residual input x. "houlsby": h. "pfeiffer": LN(h +
            x) or, in models that normalize before a sub-layer, h + x (Pfeiffer et al. 2021).
            "parallel": x (He et al. 2022).
        scaling: Factor on the bottleneck's branch: a number, "learned" for a trained one, or
            "channel" for a trained one per channel. He et al. 2022 use 4 with parallel adapters.
        invertible: "nice": add an invertible module after the embeddings, and its inverse before
            the output embedding of a language model head (MAD-X, Pfeiffer et al. 2020). None: add
            none.
        invertible_reduction_factor: Reduction factor of the invertible module, at least 0.25. Its
            hidden layers have the embeddings' width / 2 / this factor units.
        id2label: Names of the classes by number, from 0 on. The adapter then has a head of its own
            with that many outputs, whatever the base model's head predicts. None: the head and the
            labels of the base model.
        problem_type: "regression", "single_label_classification" or "multi_label_classification",
            as in transformers. None: the base model's.
        two_layer_head: Whether the adapter's head has a hidden layer (Mohebbi and Rajaei 2020; see
            `TwoLayerHead`).
        recorded: The record from a saved `adapter_config.json`. Not for users to set.

    Attributes:
        record: What was recorded when the adapter was added to a model or read from its file: its
            places, head, labels and base model. `dataclasses.replace` and
            `HoulsbyConfig(**config.to_dict())` leave it behind. If one configuration is given for
            several adapters, the later ones get copies with records of their own.

    Raises:
        TypeError: A field has a value of another type.
        ValueError: A value is out of its range, or does not go with another field; the message gives field and rule.
    """

    r: int = 64
    activation: str = "gelu"
    dropout: float | int = 0.0
    share_layers: int = 0
    init_std: float | int = PAPER_INIT_STD
    train_layer_norm: bool | Literal["all"] = True
    init_weights: bool = True
    # Never None after initialization.
    positions: Sequence[str] = None  # type: ignore[assignment]
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, int] = field(default_factory=dict)
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    kind: Literal["houlsby", "pfeiffer", "parallel"] = "houlsby"
    scaling: float | int | Literal["learned", "channel"] = 1.0
    invertible: Literal["nice"] | None = None
    invertible_reduction_factor: float | int = 2.0
    id2label: dict[int, str] | None = None
    problem_type: (
        Literal["regression", "single_label_classification", "multi_label_classification"] | None
    ) = None
    two_layer_head: bool = False
    recorded: InitVar[dict[str, Any] | None] = None
    # Writes the card of the adapter in a folder. The package sets it, because cards need what
    # builds on this module.
    write_card: ClassVar[Callable[[Path], None] | None] = None

    def __post_init__(self, recorded: dict[str, Any] | None) -> None:
        super().__post_init__()
        self.peft_type = houlsby_peft_type()
        self.record: AdapterRecord | None = None
        # The settings of a loaded adapter, as they were in its file.
        self._loaded_settings: dict[str, Any] | None = None
        # The shapes of the tensors in the file of a loaded adapter, by name, if they are known.
        self.shapes_in_file: dict[str, torch.Size] | None = None
        self._is_used = False
        # Whether the adapter has been added to a model, but not yet its saved weights.
        self.awaits_weights = False
        for option in fields(self):
            if option.name in OPTIONS:
                setattr(
                    self,
                    option.name,
                    _plain(getattr(self, option.name), is_count=option.type == "int"),
                )
        names: Any = self.positions
        if names is None:
            names = ("attention", "feed_forward") if self.kind == "houlsby" else ("feed_forward",)
        names = names if isinstance(names, (list, tuple)) else [names]
        unknown = [name for name in names if name not in POSITIONS]
        self.positions = (*(name for name in POSITIONS if name in names), *unknown)
        self.rank_pattern = {} if self.rank_pattern is None else self.rank_pattern
        if isinstance(self.id2label, dict):
            self.id2label = numbered(self.id2label)
        self._check()
        # PEFT extends an empty list in place.
        self._has_no_head = self.modules_to_save == []
        if recorded is not None:
            self._load_record(AdapterRecord.from_dict(recorded))

    def _check(self) -> None:
        for name in OPTIONS:
            type_validator(f"HoulsbyConfig.{name}", getattr(self, name), _TYPES[name])
        rules = {
            "r": (self.r >= 1, "at least 1"),
            "activation": (self.activation in ACT2FN, f"one of {', '.join(sorted(ACT2FN))}"),
            "dropout": (0 <= self.dropout < 1, "a probability in [0, 1)"),
            "share_layers": (
                self.share_layers >= 0,
                "at least 0, where 0 shares nothing, 1 within a layer, and k across k consecutive layers",
            ),
            "init_std": (
                0 <= self.init_std < 1e6,
                "at least 0, which starts as the identity, and below a million",
            ),
            "positions": (
                self.positions and set(self.positions) <= {*POSITIONS},
                f"one or more of {POSITIONS}",
            ),
            "target_modules": (
                self.kind == "houlsby" or self.target_modules is None,
                f"None with kind={self.kind!r}, because only the table of architectures tells which module the input "
                "of a sub-layer enters: select sub-layers with positions, layers_to_transform and exclude_modules",
            ),
            "rank_pattern": (
                all(r >= 1 for r in self.rank_pattern.values())
                and not (self.rank_pattern and self.share_layers),
                "sizes of at least 1, and empty where bottlenecks are shared, unlike with share_layers=0",
            ),
            "modules_to_save": (
                self.modules_to_save != [] or self.task_type not in HEADS_OF_PEFT,
                f"not empty with task_type={self.task_type}, whose head PEFT always trains: leave task_type out",
            ),
            "scaling": (
                isinstance(self.scaling, str) or 0 < abs(self.scaling) < 1e6,
                "a number other than 0 and below a million, 'learned' or 'channel'",
            ),
            "invertible_reduction_factor": (
                0.25 <= self.invertible_reduction_factor < math.inf,
                "a number of at least 0.25",
            ),
            "id2label": (
                self.id2label is None
                or (self.id2label and set(self.id2label) == set(range(len(self.id2label)))),
                "a dict from every number from 0 on to a name",
            ),
        }
        for name, (is_valid, words) in rules.items():
            if not is_valid:
                raise ValueError(
                    f"HoulsbyConfig.{name} must be {words}; got {shortened(repr(getattr(self, name)))}."
                )

    def leave_out_heads_of_peft(self) -> None:
        """Take back the heads that PEFT's class for a task adds to `modules_to_save`, from an
        adapter without a head.

        That is one whose user gave an empty list, or a loaded one whose record has no heads. The
        class adds them to the configuration of every adapter of the model, whatever that adapter is
        for.
        """
        is_headless = self.is_loaded and self.record is not None and not self.record.heads
        if self.modules_to_save and (self._has_no_head or is_headless):
            empty: list[str] | None = [] if self._has_no_head else None
            names = set().union(*HEADS_OF_PEFT.values())
            self.modules_to_save = [
                name for name in self.modules_to_save if name not in names
            ] or empty

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any
    ) -> HoulsbyConfig:
        """Load the configuration of a saved adapter.

        Args:
            pretrained_model_name_or_path: The adapter's folder, or its repository on the Hub.
            subfolder: A folder inside of it.
            kwargs: Further arguments of PEFT's method, such as `revision`, `token` and `cache_dir`.

        Raises:
            ValueError: There is no configuration, one of its values breaks its rule, or the
                folder's weights are in a pickled file only.
            SafetensorError: The folder's weights are cut off or damaged.
        """
        shapes = read_shapes(Path(pretrained_model_name_or_path, subfolder or ""))
        config: HoulsbyConfig = super().from_pretrained(
            pretrained_model_name_or_path, subfolder=subfolder, **kwargs
        )
        config.shapes_in_file = shapes
        return config

    @classmethod
    def from_json_file(cls, path_json_file: str, **kwargs: Any) -> dict[str, Any]:
        """Read the file, whatever the locale and whoever has written it."""
        return read_json(Path(path_json_file))

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the configuration with the adapter's record and, beside the weights that PEFT has
        saved, the card.
        """
        saved = self.to_dict()
        if kwargs.get("auto_mapping_dict") is not None:
            saved["auto_mapping"] = kwargs["auto_mapping_dict"]
        if self.record is not None:
            saved["task_type"] = saved["task_type"] or self.record.task_type
            saved["recorded"] = self.record.to_dict()
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(saved, indent=2, sort_keys=True, ensure_ascii=False)
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
        # PEFT gives this argument. transformers does not; it writes the weights after the
        # configuration, and no card.
        if "auto_mapping_dict" in kwargs and (write_card := type(self).write_card) is not None:
            write_card(folder)

    @property
    def is_loaded(self) -> bool:
        """Whether the configuration is that of a saved or derived adapter, whose recorded places
        are used.

        A loaded configuration whose options have been changed is that of a new adapter.
        """
        return self._loaded_settings is not None and self._loaded_settings == self._settings()

    @property
    def labels(self) -> dict[int, str] | None:
        """Names of the classes by number: the user's or the recorded ones; None if there are none."""
        return self.id2label or (self.record.id2label if self.record else None)

    @property
    def kind_of_problem(self) -> str | None:
        """The problem type: the user's or the recorded one; None if neither is known."""
        return self.problem_type or (self.record.problem_type if self.record else None)

    def derived(
        self, record: AdapterRecord, places: list[dict[str, str]] | None = None, **changes: Any
    ) -> HoulsbyConfig:
        """Return the configuration of a new adapter that is made from an existing one of this
        configuration.

        Like a loaded adapter, it has the heads and labels of a record and, unless others are given,
        its places.
        """
        config = replace(self, **changes)
        config._load_record(replace(record, places=places or record.places))
        return config

    def for_adapter(self) -> HoulsbyConfig:
        """Return this configuration for an adapter that is added, or a copy if it already is
        another adapter's.
        """
        config = self
        if self._is_used:
            config = copy.copy(self)
            config.modules_to_save = copy.copy(self.modules_to_save)
            config.record = self.record if self.is_loaded else None
        config._is_used, config.awaits_weights = True, config.is_loaded
        return config

    def _load_record(self, record: AdapterRecord) -> None:
        self.record, self._loaded_settings = record, self._settings()

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SHAPE_OPTIONS}


# The options that PEFT's own configurations do not have, and those that decide what bottlenecks and
# norms compute.
OPTIONS = {option.name for option in fields(HoulsbyConfig)} - {
    option.name for option in fields(PeftConfig)
}
SHAPE_OPTIONS = sorted(OPTIONS - _WITHOUT_SHAPE)
_TYPES = get_annotations(HoulsbyConfig, eval_str=True)


def _plain(value: Any, is_count: bool = False) -> Any:
    """Return a value as JSON holds it, with NumPy's numbers as Python's, and sets in an order."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        value = float(value)
        return int(value) if is_count and value.is_integer() else value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple, range)) else value
