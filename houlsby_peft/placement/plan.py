"""`Plan`: what a configuration means in one model, found and checked before the model is changed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from peft.utils.other import get_pattern_key
from torch import nn
from transformers import PreTrainedModel

from ..bottleneck import Bottleneck
from ..checkpoints.fingerprint import compare_fingerprints, fingerprint
from ..checkpoints.record import AdapterRecord
from ..checkpoints.weights import FILE_PREFIX, check_file, check_tensors, missing_message
from ..config import HoulsbyConfig
from ..heads.find import find_head, find_left_random, find_not_loaded, find_trained_modules
from ..heads.new import needs_two_layer_head, new_heads
from ..heads.tasks import find_task_type, label_facts
from ..invertible import HoulsbyEmbedding, HoulsbyOutputEmbedding, InvertibleCoupling
from ..layer import HoulsbyLayer, HoulsbyLayerNorm, HoulsbyTunerLayer, base_module, base_modules
from ..offloading import adapter_dtype, check_base_is_loaded, device_of, dtype_of
from .checks import (
    check_apart,
    check_has_one_name,
    check_is_called,
    check_kind,
    check_names_match,
    check_size,
    check_tokens,
)
from .inference import log_once
from .place import Place, fold_places
from .places import find_places, is_included, may_be_left_out, output_width


# Convolutions have their channels before this many spatial dimensions.
_SPATIAL_DIMS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


class Plan:
    """What a configuration means in one model: places, owners of the bottlenecks, heads, and the tensors of its file.

    Making a plan changes neither the model nor the configuration.

    Args:
        model: The base model, with or without other adapters.
        config: The configuration.

    Attributes:
        places: All places by module name, in the model's order.
        bottlenecks: Those that get a bottleneck.
        ends: Those of the invertible module and its inverse: the end of the embeddings and the output embedding.
        owners: The name of the place that owns the bottleneck of each place. Shared or not, a bottleneck is
            registered only at its owner, the first place that uses it. The end of the embeddings owns the invertible
            module.
        tokens: The embedding modules of which tokens are trained, with the shapes of the trained embeddings.

    Raises:
        ValueError: There is nothing to adapt, a module would never be called or be adapted under one of its names
            only, a head cannot be made, or a token to train does not exist or could not be loaded again.
    """

    def __init__(self, model: nn.Module, config: HoulsbyConfig) -> None:
        self.config = config
        check_names_match(model, config)
        self.places = find_places(model, config)
        modules = dict(base_modules(model))
        self._references = {place.projection: modules[place.projection] for place in self.places.values()}
        self.bottlenecks = {key: place for key, place in self.places.items() if place.is_bottleneck}
        # The owner comes first: in XLM-R, the output embedding precedes the encoder.
        ends = sorted((place for place in self.places.values() if place.is_end), key=lambda place: place.position)
        self.ends = {place.key: place for place in ends}
        if not self.bottlenecks:
            fields = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")
            given = {name: value for name in fields if (value := getattr(config, name))}
            raise ValueError(
                f"An adapter needs a bottleneck somewhere; {type(model).__name__} has no place for one with "
                f"{', '.join(f'{name}={value!r}' for name, value in given.items())}. Leave out or change one of them."
            )
        self.widths = {
            key: output_width(key, self.reference(place)) for key, place in {**self.bottlenecks, **self.ends}.items()
        }
        for key, place in self.bottlenecks.items():
            check_size(key, self._size(place), self.widths[key])
        self.owners = _find_owners(self.bottlenecks, self.widths, config.share_layers)
        self.owners |= dict.fromkeys(self.ends, next(iter(self.ends), ""))
        for key, place in self.places.items():
            check_is_called(model, key)
            check_kind(model.get_submodule(key), place, _class_of(place), config)
        check_has_one_name(model, self.places)
        self._model = model
        self.tokens = _find_tokens(model, config)
        check_tokens(model, self.tokens, self.ends)
        # What PEFT's matcher reads: the places by their full names, so that it reports exclusions as usual.
        self.names = SimpleNamespace(
            target_modules=[key for key in self.places if key not in self.ends],
            exclude_modules=config.exclude_modules,
            modules_to_save=None,
        )

    @cached_property
    def base(self) -> dict[str, Any]:
        """The fingerprint of the base model.

        For a new adapter, it lacks the task head, and what the checkpoint lacks, such as an unused pooler: these are
        other ones each time that the model is loaded.
        """
        ends = list(self.bottlenecks.values())
        references = [self.reference(place) for place in ends[:1] + ends[-1:]]
        modules = list(base_modules(self._model))
        without: list[str] = []
        if not self.config.is_loaded:
            suffixes = tuple(self.config.modules_to_save or ())
            without += [name for name, _ in modules if suffixes and name.endswith(suffixes)]
            without += find_head(self._model, self.bottlenecks)
            without += find_not_loaded(self._model, self.bottlenecks)
        return fingerprint(self._model, modules, references, without)

    @cached_property
    def heads(self) -> dict[str, nn.Module | None]:
        """The modules that train as a whole, each with the adapter's own module or None for a copy of the base's."""
        names = find_trained_modules(self._model, self.config, self.bottlenecks)
        check_apart(self._model, names, [*self.places, *self.tokens])
        if not self.config.is_loaded and self.config.modules_to_save != []:
            left = [name for name in find_left_random(self._model, names) if is_included(name, self.config)]
            if left:
                log_once(
                    f"The base checkpoint has no weights for {', '.join(left)} of {type(self._model).__name__}. They "
                    "stay random, because the adapter neither trains nor saves them: name them in modules_to_save."
                )
        return new_heads(self._model, self.config, names)

    def reference(self, place: Place) -> nn.Module:
        """Return the module of the base model that determines width, device and dtype."""
        return self._references[place.projection]

    def new_layer(self, target: nn.Module, place: Place, batches: dict[int, Any]) -> HoulsbyTunerLayer:
        """Return a tuner layer that wraps a module, without any adapter yet."""
        if place.is_norm:
            return HoulsbyLayerNorm(target, batches)
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        spatial = next((n for cls, n in _SPATIAL_DIMS.items() if isinstance(base, cls)), 0)
        layer: HoulsbyTunerLayer = _class_of(place)(
            target,
            self.reference(place),
            batches,
            channel_dim=-1 - spatial,  # type: ignore[call-arg]
        )
        return layer

    def new_bottleneck(self, place: Place) -> Bottleneck | InvertibleCoupling:
        """Return a new bottleneck for its owner, on the base model's device and, unless quantized, in its dtype.

        For the end of the embeddings, it is an invertible module. It is on the meta device if that is the default
        device, as it is while PEFT adds an adapter to be loaded.
        """
        config, width = self.config, self.widths[place.key]
        bottleneck: Bottleneck | InvertibleCoupling
        if place.is_end:
            bottleneck = InvertibleCoupling(
                width, config.activation, config.invertible_reduction_factor, config.init_std, config.init_weights
            )
        else:
            bottleneck = Bottleneck(
                width,
                self._size(place),
                config.activation,
                config.dropout,
                config.init_std,
                config.init_weights,
                config.kind,
                config.scaling,
            )
        reference = self.reference(place)
        bottleneck.train(reference.training)
        if any(parameter.is_meta for parameter in bottleneck.parameters()):
            return bottleneck
        return bottleneck.to(device=device_of(reference), dtype=dtype_of(reference))

    def _size(self, place: Place) -> int:
        pattern = self.config.rank_pattern
        return pattern.get(get_pattern_key(list(pattern), place.key), self.config.r)

    @cached_property
    def optional(self) -> dict[str, list[str]]:
        """The places that a forward pass may leave out, by one of the same layer that it cannot leave out."""
        layers: dict[tuple[str, int | None], dict[bool, list[str]]] = {}
        for key, place in {**self.bottlenecks, **self.places}.items():
            if place.layer is not None:
                is_optional = may_be_left_out(self._model, place)
                layers.setdefault((place.stack, place.layer), {}).setdefault(is_optional, []).append(key)
        return {each[False][0]: each[True] for each in layers.values() if len(each) == 2}

    def new_record(self) -> AdapterRecord:
        """Return the record of an adapter that is made, not loaded, by this plan."""
        return AdapterRecord(
            places=fold_places(self.places.values()),
            heads=list(self.heads),
            base=self.base,
            two_layer_head=bool(self.heads) and needs_two_layer_head(self._model, self.config),
            task_type=find_task_type(self._model, self.heads),
            **label_facts(self.config, self._model),
        )

    def base_differences(self) -> list[str]:
        """Return how the base model differs from the one that a saved adapter was trained on; empty if it does not."""
        return compare_fingerprints(self.config.record.base if self.config.record else None, self.base)

    def check_weights(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        autocast_adapter_dtype: bool = True,
        may_map_names: bool = False,
    ) -> bool:
        """Check what will be loaded: the file that the configuration came with, and weights that are given.

        Args:
            state_dict: The given weights.
            autocast_adapter_dtype: Whether the adapter will be in float32 on a base model in half precision.
            may_map_names: Whether PEFT loads the weights, which may map names; otherwise transformers may load them.

        Returns:
            Whether the names in the file fit; see `check_file`.

        Raises:
            ValueError: They do not fit this configuration and this model, or cannot be right.
        """
        source = self.config.record.source if self.config.is_loaded and self.config.record else None
        file = source.weights if source else None
        if source is not None and file is not None and not file.is_file():
            if self.config.inference_mode or source.is_being_loaded:
                raise ValueError(missing_message(file.parent))
            file = None
        if file is None and state_dict is None:
            return True
        expected = {FILE_PREFIX + key: like for key, like in self.saved_tensors(autocast_adapter_dtype).items()}
        names_fit = True
        if file is not None:
            check_base_is_loaded(self._model)
            prefix = "" if may_map_names else getattr(self._model, "base_model_prefix", "")
            names_fit = check_file(file, expected, may_map_names, prefix)
        if state_dict is not None:
            found = {FILE_PREFIX + key.removeprefix(FILE_PREFIX): value for key, value in state_dict.items()}
            check_tensors(expected, found, "the given state_dict")
        return names_fit

    def saved_tensors(self, autocast_adapter_dtype: bool = True) -> dict[str, torch.Tensor]:
        """Return the tensors in a file of this configuration, without PEFT's prefix, on the meta device.

        Args:
            autocast_adapter_dtype: See `check_weights`.

        Returns:
            Tensors by name, with the shapes and the dtypes that they have in the model.
        """
        modules: dict[str, nn.Module] = {}
        dtypes: dict[str, torch.dtype] = {}
        for key, place in self.places.items():
            name, reference = f"{key}.{'houlsby_norm' if place.is_norm else 'houlsby_adapter'}", self.reference(place)
            if place.is_norm:
                modules[name] = reference
            elif self.owners[key] == key:
                with torch.device("meta"):
                    modules[name] = self.new_bottleneck(place)
            dtypes[name] = adapter_dtype(dtype_of(reference) or torch.float32, autocast_adapter_dtype)
        for key, own in self.heads.items():
            head = own or self._model.get_submodule(key)
            modules[key] = head.original_module if isinstance(head, AuxiliaryTrainingWrapper) else head
        tensors = {}
        for key, module in modules.items():
            for name, tensor in module.state_dict().items():
                dtype = dtypes.get(key) or adapter_dtype(tensor.dtype, autocast_adapter_dtype)
                tensors[f"{key}.{name}"] = torch.empty(tensor.shape, dtype=dtype, device="meta")
        tokens = {f"{key}.token_adapter.trainable_tokens_delta": shape for key, shape in self.tokens.items()}
        return tensors | {name: torch.empty(shape, device="meta") for name, shape in tokens.items()}


def _find_owners(places: Mapping[str, Place], widths: Mapping[str, int], share_layers: int) -> dict[str, str]:
    """Return the owner of the bottleneck of each place; an owner maps to itself.

    Houlsby et al. 2019 give each position a separate bottleneck. Mohebbi and Rajaei 2020 share one within a layer, or
    across three consecutive layers of a stack ("3-shared"), counted from the stack's layer 0 whichever layers are
    adapted. Stacks (the encoder, the decoder) never share with each other, nor do positions of different width.
    Modules outside any list of layers count as one layer.
    """
    if share_layers == 0:
        return {key: key for key in places}
    first_of_group: dict[tuple[str, int, int], str] = {}
    return {
        key: first_of_group.setdefault((place.stack, (place.layer or 0) // share_layers, widths[key]), key)
        for key, place in places.items()
    }


def _find_tokens(model: nn.Module, config: HoulsbyConfig) -> dict[str, tuple[int, int]]:
    """Return the names of the modules of which `config.trainable_token_indices` trains tokens, and the saved shapes.

    Raises:
        ValueError: A module or one of its tokens does not exist.
    """
    targets: Any = config.trainable_token_indices
    if targets is None:
        return {}
    embedding = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    modules: dict[str, Any] = {key: module for key, module in base_modules(model) if hasattr(module, "weight")}
    inputs = [key for key in modules if embedding is not None and modules[key] is base_module(embedding)]
    if not isinstance(targets, dict):
        targets = {inputs[0] if inputs else "embed_tokens": targets}
    found: dict[str, tuple[int, int]] = {}
    for target, tokens in targets.items():
        matches = [key for key in modules if key.endswith(target)]
        sizes = {tuple(modules[key].weight.shape) for key in matches}
        rows = min((size[0] for size in sizes if len(size) == 2 and size[0]), default=0)
        are_tokens = isinstance(tokens, list) and bool(tokens) and all(type(token) is int for token in tokens)
        if not are_tokens or len(set(tokens)) < len(tokens) or not 0 <= min(tokens) <= max(tokens) < rows:
            raise ValueError(
                "HoulsbyConfig.trainable_token_indices must be a list of different tokens of the model, or a dict "
                f"from names of embedding modules to such lists; got {str(tokens)[:100]} for {target[:100]!r}, which "
                f"{f'has tokens 0 to {rows - 1}' if rows else 'is not found in the model'}. "
                f"{'Use the numbers that the tokenizer gives' if rows else 'print(model) shows the modules'}."
            )
        # PEFT refuses to train a module as a whole and its tokens. Of tied modules, it saves the input embeddings.
        is_whole = target in (config.modules_to_save or ())
        if len(matches) == 1 and not is_whole and (len(targets) == 1 or matches[0] in inputs):
            found[matches[0]] = (len(tokens), modules[matches[0]].weight.shape[1])
    return found


def _class_of(place: Place) -> type[HoulsbyTunerLayer]:
    """Return the class of the tuner layer at a place."""
    ends = {"embeddings": HoulsbyEmbedding, "output_embedding": HoulsbyOutputEmbedding}
    return HoulsbyLayerNorm if place.is_norm else ends.get(place.position, HoulsbyLayer)
