"""`HoulsbyConfig`: every option of the method, checked when the config is made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from peft import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME

from .config_rules import POSITIONS, PROBLEM_TYPES, check_config
from .loading import refuse_pickle
from .registration import houlsby_peft_type


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
        modules_to_save: Further modules to train and save. A task head, or a pooler below it, that the base checkpoint
            does not have is found and added by itself; an empty list prevents that, but not together with a
            `task_type` whose head PEFT always trains.
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
        if isinstance(self.modules_to_save, (list, tuple, set)):  # PEFT adds the head to the list itself
            self.modules_to_save = list(self.modules_to_save)
        self.exclude_modules = _list_or_pattern(self.exclude_modules)
        self.rank_pattern = dict(self.rank_pattern or {})
        if isinstance(self.layers_to_transform, (tuple, set, range)):
            self.layers_to_transform = sorted(self.layers_to_transform)
        # A configuration object may be used for several new adapters: what is recorded in it gives way, what the user
        # gave or a file brought does not.
        self.was_trained_elsewhere = self.base_fingerprint is not None
        self.recorded_head: dict[str, Any] = {}
        self.weights_file: Path | None = None
        if isinstance(self.id2label, dict):  # JSON turns the numbers into strings
            self.id2label = {int(key) if str(key).isdecimal() else key: name for key, name in self.id2label.items()}
        check_config(self)

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


def _names(value: Any) -> tuple[str, ...]:
    """JSON has no tuples, and a single name is often written bare."""
    return tuple(value) if isinstance(value, (list, tuple, set)) else (value,)


def _list_or_pattern(value: Iterable[str] | str | None) -> list[str] | str | None:
    """A string is a regular expression; any other collection becomes a list, sets in a stable order for the file."""
    if value is None or isinstance(value, (str, list)):
        return value
    return sorted(value)
