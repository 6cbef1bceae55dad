"""What an adapter cannot ask of a model. Each check gives the rule and the remedy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from peft.utils.other import get_pattern_key
from torch import nn

from ..checkpoints.weights import FILE_PREFIX, first_of
from ..config import HoulsbyConfig
from ..config_rules import HEADS_OF_PEFT
from ..invertible import HoulsbyEmbedding, HoulsbyOutputEmbedding
from ..layer import HoulsbyLayer, HoulsbyLayerNorm, HoulsbyTunerLayer, base_modules, is_inside, wrapped_modules
from .inference import log_once
from .place import Place
from .places import find_places


# The largest bottleneck.
_MOST_WIDTHS = 4
_MOST_FOR_ANY_WIDTH = 1024

# The parts that tuner layers and trained heads add to the names of a model's weights.
_ADDED_PARTS = (
    "base_layer",
    *HoulsbyLayer.adapter_layer_names,
    *HoulsbyLayerNorm.adapter_layer_names,
    "down_proj",
    "up_proj",
    "scaling",
    "F",
    "G",
    "original_module",
    "modules_to_save",
)


def check_is_base(model: nn.Module) -> None:
    """Refuse a model that PEFT has wrapped, as when a notebook's cell with `get_peft_model` runs again.

    The names of all modules would begin with those of the wrapper, so that the saved adapter would fit no model, and
    the task head would not be found.
    """
    if isinstance(model, PeftModel):
        raise ValueError(
            f"An adapter must be added to a model without PEFT's wrapper; got a {type(model).__name__}. Add another "
            "adapter with its add_adapter(name, config), or get the base model with its unload() and start again."
        )


def check_name(model: nn.Module, adapter_name: str) -> None:
    """Refuse an adapter's name that PEFT could not tell from other names in the model.

    Raises:
        ValueError: No module can have the name, a module or weight of the model has it, or an adapter of another
            method has it.
    """
    if not adapter_name or "." in adapter_name or hasattr(nn.ModuleDict(), adapter_name):
        raise ValueError(
            "The name of an adapter must be one that a module can have: not empty, without a dot, and no attribute of "
            f"PyTorch's ModuleDict; got {adapter_name!r}. Give another adapter_name."
        )
    parts = {*FILE_PREFIX.split("."), *_ADDED_PARTS}
    for key, base in base_modules(model):
        parts.update(key.split("."), (name for name, _ in base.named_parameters(recurse=False)))
    if adapter_name in parts:
        raise ValueError(
            "The name of an adapter must not be part of the names of the model's modules, because PEFT then leaves "
            f"out weights when it saves another adapter; got {adapter_name!r}. Give another adapter_name, such as "
            f"{'task_' + adapter_name!r}."
        )
    for module in model.modules():
        if not isinstance(module, BaseTunerLayer) or isinstance(module, HoulsbyTunerLayer):
            continue
        if adapter_name in module._get_available_adapters():
            raise ValueError(
                f"The name of an adapter must be unique among all methods; {adapter_name!r} is one of "
                f"{type(module).__module__} in this model. Give another adapter_name."
            )


def log_other_methods(model: nn.Module, places: Mapping[str, Place]) -> None:
    """Log which modules of other methods an adapter wraps, whose names PEFT then saves with `base_layer`."""
    names = dict.fromkeys(name for place in places.values() for name in (place.key, place.entry) if name is not None)
    modules = {name: model.get_submodule(name) for name in names}
    if others := [
        name
        for name, module in modules.items()
        if isinstance(module, BaseTunerLayer) and not isinstance(module, HoulsbyTunerLayer)
    ]:
        log_once(
            f"Adapters of another method are in modules that this adapter wraps ({first_of(others)}). From now on, "
            "PEFT saves them under names that no other model has. Save them before, or add this adapter first."
        )


def check_size(key: str, r: int, width: int) -> None:
    """Refuse a bottleneck that is none, or a mistyped size that would take minutes to initialize."""
    largest = max(_MOST_FOR_ANY_WIDTH, _MOST_WIDTHS * width)
    if r > largest:
        raise ValueError(
            f"A bottleneck may have up to {_MOST_WIDTHS} times the width of the hidden states, or up to "
            f"{_MOST_FOR_ANY_WIDTH} at any width; got r={r} at {key!r}, whose width is {width}. Give an r of at most "
            f"{largest}; the paper uses 8 to 256."
        )


def check_tokens(model: nn.Module, tokens: Collection[str], ends: Collection[str]) -> None:
    """Refuse to train tokens of a module that an invertible module wraps.

    PEFT would save them under a name with `base_layer`, which no other model has. Tied tokens are saved elsewhere, but
    PEFT does not find their module again once the inverse is around it.
    """
    for key, module in wrapped_modules(model):
        is_output = isinstance(module, HoulsbyOutputEmbedding) and isinstance(
            module.base_layer, TrainableTokensWrapper
        )
        if tokens and is_output:
            raise ValueError(
                "Where an adapter has tied tokens and an invertible module precedes the output embedding, no further "
                f"adapter can train tokens; both are so at {key!r}. Add the adapters with tokens before those with an "
                "invertible module, set trainable_token_indices=None, or add the adapters to two models."
            )
    for key in (*tokens, *ends):
        module = model.get_submodule(key)
        is_end = key in ends or isinstance(module, HoulsbyEmbedding)
        inner = module.base_layer if isinstance(module, HoulsbyEmbedding) else module
        is_trained = isinstance(inner, TrainableTokensWrapper) and not inner.token_adapter.tied_adapter
        if is_end and (key in tokens or (is_trained and len(inner.token_adapter.trainable_tokens_delta))):  # type: ignore[arg-type,union-attr]
            raise ValueError(
                "An invertible module cannot directly follow or precede an embedding whose tokens are trained; "
                f"{key!r} would have both, for one adapter or for two. Set trainable_token_indices=None or "
                "invertible=None, or add the adapters to two models."
            )


def check_names_match(model: nn.Module, config: HoulsbyConfig) -> None:
    """Refuse names in a new adapter's configuration that no module has: they are typing errors.

    PEFT accepts a list of names if one of them matches, and has no rule for `rank_pattern`.
    """
    if config.is_loaded:
        return
    names = [key for key, _ in base_modules(model)]
    targets, saved, ranks = config.target_modules, config.modules_to_save, config.rank_pattern
    unknown: dict[str, list[str]] = {"target_modules": [], "modules_to_save": [], "rank_pattern": []}
    if isinstance(targets, list):
        unknown["target_modules"] = [end for end in targets if not any(f".{key}".endswith(f".{end}") for key in names)]
    if saved:
        ends = set(saved).difference(*HEADS_OF_PEFT.values())
        unknown["modules_to_save"] = sorted(end for end in ends if not any(key.endswith(end) for key in names))
    if ranks:
        # Some layers of an adapter may be left out, as `prune` does.
        whole = replace(config, layers_to_transform=None, layers_pattern=None)
        places = [key for key, place in find_places(model, whole).items() if place.is_bottleneck]
        unknown["rank_pattern"] = [
            name for name in ranks if name not in places and all(get_pattern_key([name], key) == key for key in places)
        ]
    for field, ends_of_none in unknown.items():
        if ends_of_none:
            what, remedy = "modules", "print(model) shows the modules"
            if field == "rank_pattern":
                what, remedy = "places of bottlenecks", "print(houlsby_peft.placement_map(model)) shows the places"
            raise ValueError(
                f"HoulsbyConfig.{field} must name {what} in the model; {type(model).__name__} has none that match "
                f"{', '.join(map(repr, ends_of_none))}. {remedy}."
            )


def check_is_called(model: nn.Module, key: str) -> None:
    """Refuse a module inside a module of PyTorch that reads its children's weights instead of calling them."""
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
                f"path that does not call its part {key!r}. Switch it off in every process that uses the adapter: "
                "torch.backends.mha.set_fastpath_enabled(False)."
            )


def check_has_one_name(model: nn.Module, places: Mapping[str, Place]) -> None:
    """Refuse a module that several parents hold, because a tuner layer would replace it in one of them only."""
    wrapped = {model.get_submodule(key): key for key in places}
    first: dict[nn.Module, tuple[nn.Module, str]] = {}
    parents = {"": model}
    for key, module in model.named_modules(remove_duplicate=False):
        parents[key] = module
        parent, _, name = key.rpartition(".")
        if module in wrapped and first.setdefault(module, (parents[parent], name)) != (parents[parent], name):
            raise ValueError(
                f"A module that an adapter wraps must belong to one module of the model; {wrapped[module]!r} is also "
                f"{key!r}, which would stay without the adapter. Leave it out with "
                f"exclude_modules={[wrapped[module]]}, or name modules inside it in target_modules."
            )


def check_apart(model: nn.Module, heads: Collection[str], adapted: Collection[str]) -> None:
    """Refuse to train as a whole what holds a place of another adapter, or the other way round.

    A copy of the module would hold the other adapter's weights, and neither adapter could be saved.
    """
    for key, wrapper in wrapped_modules(model):
        if isinstance(wrapper, ModulesToSaveWrapper):
            clash = next(((key, name) for name in adapted if is_inside(name, key)), None)
        else:
            clash = next(((name, key) for name in heads if is_inside(key, name)), None)
        if clash:
            raise ValueError(
                "A module that one adapter trains as a whole cannot hold what another adapter of the same model "
                f"adapts; {clash[0]!r} is trained as a whole, and {clash[1]!r} is adapted. Give both adapters the "
                "same modules_to_save, or add them to two models. unload() removes what deleted adapters leave."
            )


def check_kind(module: nn.Module, place: Place, kind: type[HoulsbyTunerLayer], config: HoulsbyConfig) -> None:
    """Refuse a module that another adapter uses in another way, such as a trained norm that is to get a bottleneck."""
    if isinstance(module, HoulsbyTunerLayer) and type(module) is not kind:
        raise ValueError(
            f"A module can hold either a bottleneck or a trained norm; {place.key!r} already is a "
            f"{type(module).__name__} for another adapter. Give both adapters the same target_modules there."
        )
    if place.is_end and (
        isinstance(module, ModulesToSaveWrapper) or place.key.endswith(tuple(config.modules_to_save or ()))
    ):
        raise ValueError(
            "An embedding that an invertible module follows or precedes cannot be trained as a whole; got "
            f"{place.key!r} in modules_to_save. Leave it out there, or set invertible=None."
        )
