"""What a configuration means in one model: places, owners of the bottlenecks, heads, and the tensors of its file."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from peft.utils.other import get_pattern_key
from torch import nn

from .bottleneck import Bottleneck
from .config import HoulsbyConfig
from .layer import HoulsbyLayer, HoulsbyLayerNorm
from .loading import FILE_PREFIX, check_file, check_shapes
from .offloading import check_weights_are_at_hand, device_of, dtype_of
from .places import Place, find_places, output_width
from .sharing import find_owners
from .tuner_layer import HoulsbyTunerLayer


# Convolutions have their channels before this many spatial dimensions.
_SPATIAL_DIMS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


class Plan:
    """What a configuration means in one model.

    Args:
        model: the base model, with or without other adapters.
        config: the configuration.

    Raises:
        ValueError: there is nothing to adapt, or a bottleneck at a place would never be called.
    """

    def __init__(self, model: nn.Module, config: HoulsbyConfig) -> None:
        self.config = config
        self.places = find_places(model, config)
        self._references = {place.projection: model.get_submodule(place.projection) for place in self.places.values()}
        self.bottlenecks = {key: place for key, place in self.places.items() if not place.is_norm}
        self.widths = {key: output_width(key, self.reference(place)) for key, place in self.bottlenecks.items()}
        self.owners = find_owners(self.bottlenecks, self.widths, config.share_layers)
        # What PEFT's matcher reads: our places by their full names, so that it reports exclusions as usual.
        self.names = SimpleNamespace(
            target_modules=list(self.places), exclude_modules=config.exclude_modules, modules_to_save=None
        )
        for key, place in self.places.items():
            _check_called(model, key)
            _check_kind(model.get_submodule(key), place)

    def reference(self, place: Place) -> nn.Module:
        """The module of the base model that determines width, device and dtype."""
        module = self._references[place.projection]
        return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module

    def new_layer(self, target: nn.Module, place: Place) -> HoulsbyTunerLayer:
        """The tuner layer that wraps a module, without any adapter yet."""
        if place.is_norm:
            return HoulsbyLayerNorm(target)
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        spatial = next((n for cls, n in _SPATIAL_DIMS.items() if isinstance(base, cls)), 0)
        return HoulsbyLayer(target, channel_dim=-1 - spatial, reference=self.reference(place))

    def new_bottleneck(self, place: Place) -> Bottleneck:
        """A fresh bottleneck for a place that owns one, on the device of the base and, unless quantized, in its dtype.

        On the meta device if that is the default device, as it is while PEFT adds an adapter to be loaded.
        """
        config = self.config
        r = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), place.key), config.r)
        bottleneck = Bottleneck(
            self.widths[place.key], r, config.activation, config.dropout, config.init_std, config.init_weights
        )
        reference = self.reference(place)
        if any(parameter.is_meta for parameter in bottleneck.parameters()):
            return bottleneck
        return bottleneck.to(device=device_of(reference), dtype=dtype_of(reference))

    def check_weights(self, model: nn.Module, state_dict: dict[str, torch.Tensor] | None) -> None:
        """Check what is going to be loaded: the file that the configuration came with, or the given weights.

        Raises:
            ValueError: it does not fit this configuration and this model.
        """
        file = self.config.weights_file
        if file is None and state_dict is None:
            return
        expected = {FILE_PREFIX + key: shape for key, shape in self.saved_shapes(model).items()}
        if file is not None:
            check_weights_are_at_hand(model)
            check_file(file, expected)
        if state_dict is not None:
            found = {FILE_PREFIX + key.removeprefix(FILE_PREFIX): value.shape for key, value in state_dict.items()}
            check_shapes(expected, found, "the given state_dict")

    def saved_shapes(self, model: nn.Module) -> dict[str, torch.Size]:
        """Names and shapes of the tensors in a file of this configuration, without PEFT's prefix.

        Args:
            model: the base model, with its heads not wrapped yet, or wrapped for other adapters.
        """
        modules: dict[str, nn.Module] = {}
        for key, place in self.places.items():
            if place.is_norm:
                modules[f"{key}.houlsby_norm"] = self.reference(place)
            elif self.owners[key] == key:
                with torch.device("meta"):
                    modules[f"{key}.houlsby_adapter"] = self.new_bottleneck(place)
        for key in modules_to_save(model, self.config):
            head = model.get_submodule(key)
            modules[key] = head.original_module if isinstance(head, AuxiliaryTrainingWrapper) else head
        return {
            f"{key}.{name}": tensor.shape
            for key, module in modules.items()
            for name, tensor in module.state_dict().items()
        }


def modules_to_save(model: nn.Module, config: HoulsbyConfig) -> list[str]:
    """Full names of the modules that `config.modules_to_save` matches, by PEFT's rule: how a name ends.

    Modules inside of a matched one, or inside of a tuner layer, are left out.
    """
    suffixes = tuple(config.modules_to_save or ())
    found: list[str] = []
    inside: tuple[str, ...] = ()
    for key, module in model.named_modules(remove_duplicate=False):
        if key.startswith(inside):
            continue
        if suffixes and key.endswith(suffixes):
            found.append(key)
            inside += (f"{key}.",)
        elif isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            inside += (f"{key}.",)
    return found


def _check_called(model: nn.Module, key: str) -> None:
    """Refuse a place inside a module of PyTorch that reads its sub-modules' weights instead of calling them."""
    parts = key.split(".")
    for depth in range(len(parts)):
        parent = model.get_submodule(".".join(parts[:depth]))
        if isinstance(parent, nn.MultiheadAttention):
            raise ValueError(
                f"An adapter must be on a module that is called; nn.MultiheadAttention never calls its part {key!r}. "
                f"Name the attention itself in target_modules: {'.'.join(parts[:depth])!r}."
            )
        if isinstance(parent, nn.TransformerEncoderLayer) and torch.backends.mha.get_fastpath_enabled():
            raise ValueError(
                f"An adapter must be on a module that is called; in evaluation, nn.TransformerEncoderLayer has a fast "
                f"path that does not call its part {key!r}. Switch it off for good, in every process that uses the "
                "adapter: torch.backends.mha.set_fastpath_enabled(False)."
            )


def _check_kind(module: nn.Module, place: Place) -> None:
    """Refuse a norm of one adapter where another has a bottleneck."""
    if isinstance(module, HoulsbyTunerLayer) and isinstance(module, HoulsbyLayerNorm) is not place.is_norm:
        raise ValueError(
            f"A module can hold either a bottleneck or a trained norm; {place.key!r} already is a "
            f"{type(module).__name__} for another adapter. Give both adapters the same target_modules there."
        )
