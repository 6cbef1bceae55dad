"""`HoulsbyConfig`: every option of the method, its rules, and how a configuration is saved."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from inspect import get_annotations
from pathlib import Path
from typing import Any, ClassVar, Literal

from huggingface_hub.dataclasses import type_validator
from peft import PeftConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from transformers.activations import ACT2FN

from .errors import shortened
from .registration import houlsby_peft_type
from .saved.fingerprint import check_fingerprint
from .saved.record import AdapterRecord, SavedState, numbered
from .saved.weights import read_json, read_shapes


# The kinds of adapters, which differ in what their branch is computed from; see `residual.py` and
# `ladder.py`.
KINDS = ("houlsby", "pfeiffer", "parallel", "ladder")
# The sub-layers that may get a bottleneck, in their order in a layer.
POSITIONS = ("attention", "feed_forward", "cross_attention")
# Houlsby et al. 2019, section 3.6. With init_std=0, `down_proj` starts with it nevertheless.
PAPER_INIT_STD = 1e-2
# The names of heads that PEFT's model classes add to `modules_to_save`, by task type.
HEADS_OF_PEFT = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
# What other methods and libraries call an option, and what to use here.
_OTHER_NAMES = {
    "adapter_dropout": "use dropout",
    "adapter_size": "use r",
    "bias": "leave it out, as a bottleneck always trains its biases",
    "bottleneck_dim": "use r",
    "bottleneck_size": "use r",
    "layers": "use layers_to_transform",
    "leave_out": "use layers_to_transform, which names the layers to adapt",
    "ln_after": "use train_layer_norm",
    "ln_before": "use train_layer_norm",
    "lora_alpha": "use scaling, which is the factor itself and not divided by r",
    "lora_dropout": "use dropout",
    "non_linearity": "use activation",
    "rank": "use r",
    "reduction_factor": "use r, which is the model's width divided by this factor",
}
# These options change neither an adapter's bottlenecks and norms nor what they compute.
_WITHOUT_SHAPE = {
    "beneath",
    "dropout",
    "id2label",
    "init_std",
    "init_weights",
    "modules_to_save",
    "problem_type",
    "trainable_token_indices",
    "two_layer_head",
}


@dataclass
class HoulsbyConfig(PeftConfig):
    """Configuration of Houlsby bottleneck adapters (Houlsby et al. 2019, arXiv 1902.00751).

    Example:
        >>> from peft import get_peft_model
        >>> from transformers import AutoModelForSequenceClassification
        >>> from houlsby_peft import HoulsbyConfig
        >>> name = "google-bert/bert-base-uncased"
        >>> model = AutoModelForSequenceClassification.from_pretrained(name)
        >>> model = get_peft_model(model, HoulsbyConfig(r=64))
        >>> shared = HoulsbyConfig(r=64, share_layers=3)  # one bottleneck per three layers
        >>> upper = HoulsbyConfig(r=64, layers_to_transform=range(6, 12))  # the upper half

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
        exclude_modules: Modules to leave out: a list of name suffixes (with everything inside), or
            a regular expression for the whole name.
        layers_to_transform: Index or indices of the layers to adapt, from 0. None: all layers.
        layers_pattern: Name of the list of layers to adapt, if there are several: a regular
            expression, or a list of them.
        rank_pattern: Bottleneck sizes that differ from `r`, by name suffix or regular expression
            of the module.
        modules_to_save: Further modules to train and save as a whole. A newly initialized task
            head, or a pooler below it, is detected automatically; an empty list prevents that.
            Other modules that the checkpoint lacks, such as the head of a language model, are named
            in the log.
        trainable_token_indices: Tokens whose embeddings are trained and saved, as a list, or as a
            dict from names of embedding modules to lists. See PEFT's `LoraConfig`.
        kind: What the branch is computed from. Every kind adds it to the sub-layer's output h,
            before the skip connection with the residual input x. "houlsby": h. "pfeiffer":
            LN(h + x) or, in models that normalize before a sub-layer, h + x (Pfeiffer et al. 2021).
            "parallel": x (He et al. 2022). "ladder": a narrow network of width `r` beside the
            encoder, which `layers_to_transform` lets read some layers only. The encoder itself
            computes the same for all such adapters, and needs no backward pass. The norm after its
            last layer is trained, if there is one in the layer. See `Ladder`.
        beneath: For a ladder: the folder, or name on the Hub, of a saved adapter of kind "houlsby"
            that lies beneath it. The adapter is frozen, and active whenever the ladder is. A new
            ladder's norm, and pooler if it trains one, begin as this adapter's. The file records
            its name, commit and fingerprint, not its weights. None: the base model alone.
        scaling: Factor on the branch: a number, "learned" for a trained one, or "channel" for a
            trained one per channel. He et al. 2022 use 4 with parallel adapters.
        extension: An extension that section 3.6 of the paper tried and found not to help. "norm": a
            layer norm before the down projection. "deep": a second hidden layer of size r. "gated":
            the branch is multiplied with a sigmoid gate of what it reads. None: the bottleneck of
            section 2.1.
        invertible: "nice": add an invertible module after the embeddings, and its inverse before
            the output embedding of a language model head (MAD-X, Pfeiffer et al. 2020). None: add
            none.
        invertible_reduction_factor: Reduction factor of the invertible module, at least 0.25. Its
            hidden layers have (embeddings' width / 2 / this factor) units.
        id2label: Names of the classes by number, from 0 on. The adapter then has a head of its own
            with as many outputs, whatever the base model's head predicts. None: the base model's
            head and labels.
        problem_type: "regression", "single_label_classification" or "multi_label_classification",
            as in transformers. None: the base model's.
        two_layer_head: Whether the adapter's head has a hidden layer (Mohebbi and Rajaei 2020; see
            `TwoLayerHead`).
        recorded: The record from a saved `adapter_config.json`. Not for users to set.

    Attributes:
        saved: What is known of the saved adapter that the configuration was read from, or saved
            with. `dataclasses.replace` and `HoulsbyConfig(**config.to_dict())` leave it behind.

    Raises:
        TypeError: A field is unknown, or has a value of another type.
        ValueError: A value is out of its range or contradicts another field. The message gives the
            field and its rule.
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
    kind: Literal["houlsby", "pfeiffer", "parallel", "ladder"] = "houlsby"
    beneath: str | None = None
    scaling: float | int | Literal["learned", "channel"] = 1.0
    extension: Literal["norm", "deep", "gated"] | None = None
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
    write_card: ClassVar[Callable[[Path, Sequence[str]], None] | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> HoulsbyConfig:
        for name in kwargs:
            if name in _OTHER_NAMES:  # for which Python's own error has no remedy
                raise TypeError(f"HoulsbyConfig has no option {name!r}: {_OTHER_NAMES[name]}.")
        return super().__new__(cls)

    def __post_init__(self, recorded: dict[str, Any] | None) -> None:
        super().__post_init__()
        self.peft_type = houlsby_peft_type()
        self.saved: SavedState | None = None
        # The adapter beneath a ladder, opened with a token before it is added to a model.
        self.opened_beneath: Any = None
        # Of the base model, for the card.
        self.tags: Sequence[str] = ()
        for name in OPTIONS:
            setattr(self, name, _plain(getattr(self, name)))
        for name in ("r", "share_layers"):
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():  # as of a search, or of JSON
                setattr(self, name, int(value))
        self.positions = _in_order(self.positions, self.kind)
        if self.rank_pattern is None:
            self.rank_pattern = {}
        if isinstance(self.id2label, dict):
            self.id2label = numbered(self.id2label)
        self._check()
        if self.modules_to_save == []:
            self.modules_to_save = _NoModules()
        if recorded is not None:
            record = AdapterRecord.from_dict(recorded)
            if record.base is not None:
                check_fingerprint(record.base)
            record = replace(
                record,
                id2label=self.id2label or record.id2label,
                problem_type=self.problem_type or record.problem_type,
            )
            self.saved = SavedState(record, self.shape_options())

    def _check(self) -> None:
        for name in sorted(OPTIONS):
            type_validator(f"HoulsbyConfig.{name}", getattr(self, name), _TYPES[name])
        for name, (is_valid, rule) in _RULES.items():
            if not is_valid(self):
                value = shortened(repr(getattr(self, name)))
                rule = rule.format(kind=self.kind, task_type=self.task_type)
                raise ValueError(f"HoulsbyConfig.{name} must be {rule}; got {value}.")
        # The others would have no effect, or change what the ladders of all tasks read.
        for name, values in _OF_LADDERS.items() if self.kind == "ladder" else ():
            if (value := getattr(self, name)) not in values:
                raise ValueError(
                    f"HoulsbyConfig.{name} must be {' or '.join(map(repr, values))} with "
                    f"kind='ladder', which leaves the encoder as it is; got {value!r}."
                )

    def shape_options(self) -> dict[str, Any]:
        """Return a copy of the options that shape the adapter's weights or its computation."""
        return copy.deepcopy({name: getattr(self, name) for name in SHAPE_OPTIONS})

    @property
    def loaded(self) -> SavedState | None:
        """What is known of the saved adapter that the configuration was read from.

        None: there is none, or the options have been changed since, for a new adapter.
        """
        if self.saved is None or self.saved.settings != self.shape_options():
            return None
        return self.saved

    def leave_out_heads_of_peft(self) -> None:
        """Take back the heads that PEFT's class for a task adds to a saved adapter without one.

        The class adds them to the configuration of every adapter of the model.
        """
        if self.loaded is None or self.loaded.record.heads or not self.modules_to_save:
            return
        heads = set().union(*HEADS_OF_PEFT.values())
        self.modules_to_save = [name for name in self.modules_to_save if name not in heads] or None

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any
    ) -> HoulsbyConfig:
        """Load the configuration of a saved adapter.

        Args:
            pretrained_model_name_or_path: The adapter's folder, or its repository on the Hub.
            subfolder: A folder inside of it.
            kwargs: Further arguments of PEFT's method, such as `revision`, `token`, `cache_dir`.

        Raises:
            ValueError: There is no configuration, one of its values breaks its rule, or the
                folder's weights are in a pickled file only.
            SafetensorError: The folder's weights are truncated or damaged.
        """
        shapes = read_shapes(Path(pretrained_model_name_or_path, subfolder or ""))
        config: HoulsbyConfig = super().from_pretrained(
            pretrained_model_name_or_path, subfolder=subfolder, **kwargs
        )
        if isinstance(config, HoulsbyConfig):  # PEFT also reads those of other methods
            saved = config.saved or SavedState(AdapterRecord())
            config.saved = replace(saved, shapes=shapes)
        return config

    @classmethod
    def from_json_file(cls, path_json_file: str, **kwargs: Any) -> dict[str, Any]:
        """Read the file, whatever the locale and whoever has written it."""
        return read_json(Path(path_json_file))

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the configuration with the adapter's record and, if PEFT saves, the card."""
        fields_of_file = self.to_dict()
        if kwargs.get("auto_mapping_dict") is not None:
            fields_of_file["auto_mapping"] = kwargs["auto_mapping_dict"]
        if self.saved is not None:
            fields_of_file["task_type"] = self.task_type or self.saved.record.task_type
            fields_of_file["recorded"] = self.saved.record.to_dict()
            if self.id2label:
                fields_of_file["recorded"].pop("id2label", None)
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        # Half of a surrogate pair, which is no text, is a ValueError.
        json.dumps(fields_of_file, ensure_ascii=False).encode()
        # In ASCII, because PEFT reads the file in the encoding of the system.
        text = json.dumps(fields_of_file, indent=2, sort_keys=True)
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
        weights = folder / SAFETENSORS_WEIGHTS_NAME
        if weights.is_file():  # safetensors gives no other user the right to read it
            shutil.copymode(folder / CONFIG_NAME, weights)
        # PEFT passes this argument, after it has saved the weights. transformers never does: it
        # saves the weights afterwards, and no card.
        if "auto_mapping_dict" in kwargs and (write_card := type(self).write_card) is not None:
            write_card(folder, self.tags)

    def derived(self, record: AdapterRecord, **changes: Any) -> HoulsbyConfig:
        """Return the configuration of a new adapter that is made from an existing one.

        Like a loaded adapter, it has the heads, labels and places of a record.

        Args:
            record: The record of the existing adapter.
            changes: Options that differ.
        """
        config = replace(self, **changes)
        config.saved = SavedState(record, config.shape_options())
        return config


class _NoModules(list[str]):
    """An empty list that stays empty: PEFT's class for a task adds its heads in place."""

    def extend(self, names: Iterable[str]) -> None:
        pass


def _plain(value: Any) -> Any:
    """Return a value as JSON holds it: of NumPy's numbers and arrays, Python's; of sets, lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    if isinstance(value, (list, tuple, range)):
        return [_plain(item) for item in value]
    return value


def _in_order(positions: Any, kind: str) -> Any:
    """Return positions in their order in a layer; by default, those of the kind's publication."""
    if positions is None:
        return ["attention", "feed_forward"] if kind == "houlsby" else ["feed_forward"]
    if not isinstance(positions, list):
        positions = [positions]
    unknown = [name for name in positions if name not in POSITIONS]
    return [*(name for name in POSITIONS if name in positions), *unknown]


# By field: whether its value is valid, and what it must be.
_RULES: dict[str, tuple[Callable[[HoulsbyConfig], object], str]] = {
    "r": (lambda config: 1 <= config.r < 1_000_000, "at least 1, and below a million"),
    "activation": (lambda config: config.activation in ACT2FN, f"one of {sorted(ACT2FN)}"),
    "dropout": (lambda config: 0 <= config.dropout < 1, "a probability in [0, 1)"),
    "share_layers": (
        lambda config: config.share_layers >= 0,
        "at least 0, where 0 shares nothing, 1 within a layer, and k across k consecutive layers",
    ),
    "init_std": (
        lambda config: 0 <= config.init_std < 1e6,
        "at least 0, which starts as the identity, and below a million",
    ),
    "positions": (
        lambda config: config.positions and set(config.positions) <= {*POSITIONS},
        f"one or more of {POSITIONS}",
    ),
    "target_modules": (
        lambda config: config.kind == "houlsby" or config.target_modules is None,
        "None with kind={kind!r}, because only the table of architectures tells which module the "
        "input of a sub-layer enters: select sub-layers with positions, layers_to_transform and "
        "exclude_modules",
    ),
    "rank_pattern": (
        lambda config: (
            not (config.rank_pattern and config.share_layers)
            and all(r >= 1 for r in config.rank_pattern.values())
        ),
        "sizes of at least 1, and empty where bottlenecks are shared, unlike with share_layers=0",
    ),
    "modules_to_save": (
        lambda config: config.modules_to_save != [] or config.task_type not in HEADS_OF_PEFT,
        "not empty with task_type={task_type}, whose head PEFT always trains: leave task_type out",
    ),
    "beneath": (
        lambda config: config.beneath is None or config.kind == "ladder",
        "None with kind={kind!r}, because only a ladder has an adapter beneath it",
    ),
    "scaling": (
        lambda config: isinstance(config.scaling, str) or 0 < abs(config.scaling) < 1e6,
        "a number other than 0 and below a million, 'learned' or 'channel'",
    ),
    "invertible_reduction_factor": (
        lambda config: 0.25 <= config.invertible_reduction_factor < math.inf,
        "a number of at least 0.25",
    ),
    "id2label": (
        lambda config: (
            config.id2label is None
            or (config.id2label and set(config.id2label) == set(range(len(config.id2label))))
        ),
        "a dict from every number from 0 on to a name",
    ),
}
# The values that options may have beside kind="ladder".
_OF_LADDERS: dict[str, tuple[object, ...]] = {
    "extension": (None,),
    "invertible": (None,),
    "positions": (["feed_forward"],),
    "scaling": (1,),
    "share_layers": (0,),
    "trainable_token_indices": (None,),
    "train_layer_norm": (True, False),
}
# The options that PEFT's own configurations do not have, and those that shape the weights.
_OF_PEFT = {option.name for option in fields(PeftConfig)}
OPTIONS = {option.name for option in fields(HoulsbyConfig)} - _OF_PEFT
SHAPE_OPTIONS = sorted(OPTIONS - _WITHOUT_SHAPE)
_TYPES = get_annotations(HoulsbyConfig, eval_str=True)
