"""`HoulsbyConfig`: every option of the method, and how a configuration is saved and loaded."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import InitVar, asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from peft import PeftConfig
from peft.utils import CONFIG_NAME

from .bottleneck import PAPER_INIT_STD
from .checkpoints.downloads import describe_damage_in_cache, find_repo, refuse_missing_folder
from .checkpoints.record import AdapterRecord, Source, numbered
from .checkpoints.weights import DOWNLOAD_OPTIONS, find_weights, refuse_pickle, refuse_pickle_just_saved
from .config_rules import HEADS_OF_PEFT, check_values
from .errors import AdapterError, explain_hub_errors, shortened
from .registration import houlsby_peft_type


# The fields that decide which bottlenecks and norms an adapter has, and what they compute.
SHAPE_FIELDS = (
    "r", "activation", "share_layers", "train_layer_norm", "positions", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "rank_pattern", "kind", "scaling", "invertible",
    "invertible_reduction_factor",
)  # fmt: skip


@dataclass
class HoulsbyConfig(PeftConfig):
    """Configuration of Houlsby bottleneck adapters (Houlsby et al. 2019, arXiv 1902.00751).

    Args:
        r: Size of the bottleneck, from 1 to the larger of 1,024 and four times the width of the hidden states. A
            bottleneck of width d has 2rd + d + r parameters.
        activation: Non-linearity between the two projections, a key of transformers' `ACT2FN`.
        dropout: Dropout probability on the bottleneck's branch, in [0, 1). The paper uses none.
        share_layers: 0: a separate bottleneck at each position (the paper). 1: one bottleneck per layer, shared by
            its positions. k: one bottleneck per k consecutive layers; 3 is the "3-shared" variant of Mohebbi and
            Rajaei 2020.
        init_std: Standard deviation of the truncated normal initialization (section 3.6). 0 starts as the exact
            identity.
        train_layer_norm: True: train a copy of the norms of the adapted layers (section 2.1). "all": train a copy of
            every norm of the model, as the paper's code does. False: train no norm.
        init_weights: Whether to initialize the bottlenecks as the paper does. False leaves them far from the
            identity; it is meant for tests.
        positions: Sub-layers that get a bottleneck: "attention", "feed_forward" and, in encoder-decoders,
            "cross_attention". None: attention and feed-forward for the kind "houlsby" (the paper), feed-forward for
            the others, as they were published.
        target_modules: Modules whose output gets a bottleneck, as a list of name suffixes or a regular expression.
            None: the known or inferred places of the architecture, selected by `positions`.
        exclude_modules: Modules that get no bottleneck and no trained norm, as a list of name suffixes, which exclude
            what is inside these modules as well, or as a regular expression, which must match the whole name.
        layers_to_transform: Index or indices of the layers to adapt. None: all layers.
        layers_pattern: Name of the list of layers that `layers_to_transform` refers to, if there are several.
        rank_pattern: Bottleneck sizes that differ from `r`, by name suffix or regular expression of the module.
        modules_to_save: Further modules to train and save as a whole. A newly initialized task head, or a pooler
            below it, is detected and trained automatically; an empty list prevents that. Other modules that the
            checkpoint lacks, such as the head of a language model, are named in the log.
        trainable_token_indices: Tokens whose embeddings are trained and saved, as a list, or as a dict from names of
            embedding modules to lists. See PEFT's `LoraConfig`.
        kind: What the bottleneck reads; each kind adds its branch to the output h of the sub-layer, before the skip
            connection with its residual input x. "houlsby": h. "pfeiffer": LN(h + x) or, in models that normalize
            before a sub-layer, h + x (Pfeiffer et al. 2021). "parallel": x (He et al. 2022).
        scaling: Factor on the bottleneck's branch: a number, "learned" for a trained one, or "channel" for a trained
            one per channel. He et al. 2022 use 4 with parallel adapters.
        invertible: "nice": add an invertible module after the embeddings, and its inverse before the output embedding
            of a language model head (MAD-X, Pfeiffer et al. 2020). None: add none.
        invertible_reduction_factor: Reduction factor of the invertible module, at least 0.25. Its hidden layers have
            the embeddings' width / 2 / this factor units.
        id2label: Names of the classes by number, from 0 on. The adapter then has a head of its own with that many
            outputs, whatever the base model's head predicts. None: the head and the labels of the base model.
        problem_type: "regression", "single_label_classification" or "multi_label_classification", as in
            transformers. None: the base model's.
        two_layer_head: Whether the adapter's head has a hidden layer (Mohebbi and Rajaei 2020; see `TwoLayerHead`).
        recorded: The record from a saved `adapter_config.json`. Not for users to set.
        base_fingerprint: The same, as earlier versions saved it.

    Attributes:
        record: What was recorded when the adapter was added to a model or read from its file: its places, head,
            labels and base model. `dataclasses.replace` and `HoulsbyConfig(**config.to_dict())` leave it behind.

    Raises:
        ValueError: A field breaks its rule; the message names the rule, the value received and the remedy.
    """

    r: int = 64
    activation: str = "gelu"
    dropout: float = 0.0
    share_layers: int = 0
    init_std: float = PAPER_INIT_STD
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
    scaling: float | Literal["learned", "channel"] = 1.0
    invertible: Literal["nice"] | None = None
    invertible_reduction_factor: float = 2.0
    id2label: dict[int, str] | None = None
    problem_type: str | None = None
    two_layer_head: bool = False
    recorded: InitVar[dict[str, Any] | None] = None
    base_fingerprint: InitVar[dict[str, Any] | None] = None
    record: AdapterRecord | None = field(default=None, init=False, repr=False, compare=False)
    # Writes the card of the adapter in a folder. The package sets it, because cards need what builds on this module.
    write_card: ClassVar[Callable[[Path], None] | None] = None

    def __post_init__(self, recorded: dict[str, Any] | None, base_fingerprint: dict[str, Any] | None) -> None:
        super().__post_init__()
        self.peft_type = houlsby_peft_type()
        # JSON has no tuples and only text as keys, and a single name is often written bare.
        names: Any = self.positions
        if names is None:
            names = ("attention", "feed_forward") if self.kind == "houlsby" else ("feed_forward",)
        self.positions = tuple(names) if isinstance(names, (list, tuple, set)) else (names,)
        self.rank_pattern = {} if self.rank_pattern is None else copy.copy(self.rank_pattern)
        for name in ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform"):
            value = getattr(self, name)
            if isinstance(value, (tuple, set, frozenset, range)):
                setattr(self, name, list(value) if isinstance(value, tuple) else sorted(value, key=str))
        if isinstance(self.modules_to_save, list):  # which PEFT extends with the names of heads
            self.modules_to_save = list(self.modules_to_save)
        if isinstance(self.id2label, dict):
            self.id2label = numbered(self.id2label)
        check_values(self)
        if recorded is not None or base_fingerprint is not None:
            if not isinstance(recorded, (dict, type(None))):
                raise ValueError(
                    "HoulsbyConfig.recorded must be the record from an adapter's file; got "
                    f"{shortened(repr(recorded))}. Leave it out."
                )
            self._mark_as_loaded(AdapterRecord.from_dict(recorded or {"base": base_fingerprint}))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Whatever loads an adapter sets this after it has read the configuration, and nothing else does.
        if name == "inference_mode" and (record := getattr(self, "record", None)) and record.source:
            record.source.is_being_loaded = True
        # PEFT extends an empty list in place, which does not come here.
        if name == "modules_to_save":
            self._has_no_head = value == []

    def leave_out_heads_of_peft(self) -> None:
        """Take back the heads that PEFT's class for a task adds to `modules_to_save`, from an adapter without a head.

        That is one whose user gave an empty list, or one whose record has places and no heads. The class adds them to
        the configuration of every adapter of the model, whatever that adapter is for.
        """
        is_headless = self.is_loaded and self.record and self.record.places is not None and not self.record.heads
        if self.modules_to_save and (self._has_no_head or is_headless):
            empty: list[str] | None = [] if self._has_no_head else None
            names = set().union(*HEADS_OF_PEFT.values())
            self.modules_to_save = [name for name in self.modules_to_save if name not in names] or empty

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any
    ) -> HoulsbyConfig:
        """Load the configuration of a saved adapter.

        The weights are not downloaded before the adapter is added to a model.

        Args:
            pretrained_model_name_or_path: The adapter's folder, or its repository on the Hub.
            subfolder: A folder inside of it.
            kwargs: Further arguments of PEFT's method, such as `revision`, `token` and `cache_dir`.

        Raises:
            AdapterError: The folder does not exist, the file is not valid JSON, or a value breaks its rule.
            ValueError: The folder holds no configuration, or its weights are in a pickled file only.
            HubError: The repository does not exist, is private, or can neither be reached nor is in the cache.
        """
        path = Path(pretrained_model_name_or_path, subfolder or "")
        if path.is_dir():
            refuse_pickle(path)
        else:
            refuse_missing_folder(str(pretrained_model_name_or_path))
        try:
            with nullcontext() if path.is_dir() else explain_hub_errors(str(pretrained_model_name_or_path)):
                config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        except AdapterError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:  # also those of JSON
            options = {name: kwargs[name] for name in ("revision", "cache_dir") if name in kwargs}
            damage = describe_damage_in_cache(str(pretrained_model_name_or_path), CONFIG_NAME, **options)
            reason = str(error)
            if "HoulsbyConfig." not in reason:  # not from our rules, which have a remedy
                given = shortened(reason).rstrip(".")
                reason = f"{type(error).__name__}: {given}. Save or download the adapter again."
            raise AdapterError(f"{path / CONFIG_NAME} cannot be used: {reason}{damage}") from error
        if isinstance(config, cls):  # PEFT returns another class for the file of another method
            place: dict[str, Any] = {key: kwargs[key] for key in DOWNLOAD_OPTIONS if kwargs.get(key) is not None}
            find = partial(find_weights, pretrained_model_name_or_path, subfolder, place)
            config._mark_as_loaded(config.record or AdapterRecord(), find, kwargs.get("token"))
        return config  # type: ignore[no-any-return]

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save the configuration, with the adapter's record, and the card beside the weights that PEFT has saved.

        The file names the task, and the base model's repository in place of its folder, if that is known.

        Raises:
            ValueError: The weights were pickled (`safe_serialization=False`) and could not be loaded again.
        """
        folder = Path(save_directory)
        # PEFT gives this argument. transformers does not; it writes the weights after the configuration, and no card.
        has_weights = "auto_mapping_dict" in kwargs
        if has_weights:
            refuse_pickle_just_saved(folder)
        else:
            refuse_pickle(folder)
        super().save_pretrained(save_directory, **kwargs)
        fields = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        if repo := find_repo(fields["base_model_name_or_path"] or ""):
            fields["base_model_name_or_path"], fields["revision"] = repo[0], repo[1] or fields["revision"]
        if self.record is not None:
            fields["task_type"] = fields["task_type"] or self.record.task_type
            fields["recorded"] = self.record.to_dict()
        (folder / CONFIG_NAME).write_text(json.dumps(fields, indent=2, sort_keys=True), encoding="utf-8")
        if has_weights and (write_card := type(self).write_card) is not None:
            write_card(folder)

    def to_dict(self) -> dict[str, Any]:
        """Return the user's settings; the record of one adapter is not part of them."""
        fields = asdict(self)
        del fields["record"]
        return fields

    @property
    def is_loaded(self) -> bool:
        """Whether the configuration is that of a saved adapter, unchanged since it was read from the file."""
        source = None if self.record is None else self.record.source
        return source is not None and source.settings == self._shape_settings()

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
        """Return the configuration of a new adapter that is made from an existing one of this configuration.

        Like a loaded adapter, it has the recorded places, heads and labels, not those of a new adapter.

        Args:
            record: The record of the existing adapter.
            places: The new adapter's places, as in a record. None: those of the existing one.
            changes: Fields that differ.
        """
        config = replace(self, **changes)
        config._mark_as_loaded(replace(record, places=places or record.places))
        return config

    def _mark_as_loaded(
        self,
        record: AdapterRecord,
        find_weights: Callable[[bool | str | None], Path | None] | None = None,
        token: bool | str | None = None,
    ) -> None:
        record.source = Source(self._shape_settings(), find_weights, token=token)
        self.record = record

    def _shape_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SHAPE_FIELDS}
