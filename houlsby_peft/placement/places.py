"""Find the modules of a model that get a bottleneck or a trained norm."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import CONFIG_NAME
from torch import nn
from transformers import PreTrainedModel

from ..config import HoulsbyConfig
from ..heads.find import find_head
from ..layer import base_module, base_modules, is_inside
from .architectures import ARCHITECTURES, UNSUPPORTED, Stack, SubLayer
from .inference import Unknown, find_attentions, infer_layers, log_inferred, log_once
from .place import Place, fold_indices, full_name, unfold_places
from .skips import EMBEDDINGS, SKIPS


_QUERY_KEY_NORM = re.compile(r"(^|\.)(q|k|query|key)_?(layer)?_?norm$")
# A decoder calls its cross-attention only with encoder states, a Q-Former this feed-forward only with queries.
_LEFT_OUT = re.compile(r"cross|enc_?dec|encoder_att|^output_query$", re.IGNORECASE)


def find_places(model: nn.Module, config: HoulsbyConfig) -> dict[str, Place]:
    """Return the places of bottlenecks, trained norms and invertible modules, by module name, in the model's order.

    The places of a saved adapter are those that its file records. Others come from `target_modules`, from the table of
    architectures, or by inference.

    Args:
        model: The base model. A module that already is a tuner layer counts as the module that it wraps.
        config: What to adapt.

    Raises:
        ValueError: No place is found, or a layer does not exist; the message gives the reason and the remedy.
    """
    modules = dict(base_modules(model))
    if config.is_loaded and config.record and config.record.places:
        try:
            recorded = {place.key: place for place in unfold_places(config.record.places)}
        except ValueError as error:
            file = config.record.source.weights if config.record.source else None
            raise ValueError(f"{f'{file.with_name(CONFIG_NAME)}: ' if file else ''}{error}") from error
        # Where a name is unknown, the adapter comes from another class of this architecture.
        if all(name in modules for place in recorded.values() for name in place.modules):
            _check_recorded(recorded.values(), modules, config)
            if config.invertible is not None:
                embeddings = next(place for place in recorded.values() if place.position == "embeddings")
                recorded |= _output_place(model, modules, embeddings)
            return {key: recorded[key] for key in modules if key in recorded}
    if config.target_modules is None:
        candidates = [
            Place(
                full_name(stack, index, end.output), position, stack, index, full_name(stack, index, end.tells_width)
            )
            for (stack, index), sub_layers in find_layers(model, modules, config).items()
            for position, end in sub_layers
        ]
    else:
        target = SimpleNamespace(target_modules=config.target_modules, exclude_modules=None, modules_to_save=None)
        candidates = [
            Place(key, "custom", *_layer_of(key, config), projection=key)
            for key in modules
            if check_target_module_exists(target, key)
        ]
    _check_layers(candidates, config)
    bottlenecks = {place.key: place for place in candidates if _is_selected(place, config)}
    _check_not_nested(model, bottlenecks)
    if config.kind != "houlsby":
        bottlenecks = {key: _with_skip(model, modules, config, place) for key, place in bottlenecks.items()}
    places = bottlenecks | {place.key: place for place in find_norms(model, modules, config, bottlenecks)}
    if config.invertible is not None:
        embeddings = _find_embeddings(model, modules, config)
        places |= {embeddings.key: embeddings} | _output_place(model, modules, embeddings)
    return {key: places[key] for key in modules if key in places}


def find_layers(
    model: nn.Module, modules: Mapping[str, nn.Module], config: HoulsbyConfig
) -> dict[tuple[str, int], list[tuple[str, SubLayer]]]:
    """Return the sub-layers of every layer of a model.

    A composite model (two towers, an encoder and a decoder) is described by the rows of its parts. What no row
    describes, possibly because another version of transformers names its modules differently, is inferred.

    Args:
        model: The base model.
        modules: Its modules by name, in order.
        config: Which sub-layers to look for, and what to leave out.

    Returns:
        The sub-layers with their positions, for each name of a list of layers and index in it.

    Raises:
        ValueError: The architecture is not supported, or has no such sub-layers; or a list of layers with attention
            can neither be looked up nor inferred, and is not left out.
    """
    types = _model_types(model, modules)
    for model_type in types.values():
        if model_type in UNSUPPORTED:
            raise ValueError(UNSUPPORTED[model_type])
    layers: dict[tuple[str, int], list[tuple[str, SubLayer]]] = {}
    for key, module in modules.items():
        kind = _innermost_type(key, types)
        if kind is not None and isinstance(module, nn.ModuleList) and (found := _describe(key, module, modules, kind)):
            layers |= {
                layer: [(position, end) for position, end in ends if position in config.positions]
                for layer, ends in found.items()
            }
            _log_missing(found)
    described = {stack for stack, _ in layers}
    rest = {key: module for key, module in modules.items() if not any(_is_in_stack(key, stack) for stack in described)}
    inferred, unknown = infer_layers(rest, config.positions, lambda name: is_included(name, config))
    layers |= {layer: list(ends.items()) for layer, ends in inferred.items()}
    if unknown:
        raise ValueError(_explain_unknown(unknown, layers, config))
    if inferred:
        log_inferred(inferred)
    _log_left_out(modules, layers, config)
    if any(layers.values()):
        return layers
    if layers:
        raise ValueError(
            f"HoulsbyConfig.positions must name a sub-layer that the model has; got {config.positions}, and a "
            f"{type(model).__name__} of this configuration has none of them. Use ('attention', 'feed_forward')."
        )
    raise ValueError(
        "An adapter follows the attention and the feed-forward of each layer, so the model must have a list of layers "
        f"with attention (of linear modules that are not excluded); got a {type(model).__name__} with model_type "
        f"{types.get('', None)!r}, in which none is found. Name the modules whose output meets the skip connection in "
        "target_modules. docs/architectures.md lists the architectures that are known."
    )


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a layer norm or an RMS norm with weights, of PyTorch or of a model's own class.

    MobileBERT's `NoNorm`, the scale and shift that are left of a layer norm, counts as well.
    """
    is_named_so = type(module).__name__.endswith(("LayerNorm", "RMSNorm", "NoNorm"))
    weight = getattr(module, "weight", None)
    return (isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or is_named_so) and weight is not None and weight.ndim == 1


def may_be_left_out(model: nn.Module, place: Place) -> bool:
    """Return whether a forward pass of the layer need not call a place, as names and classes inside of it tell."""
    parts = place.key.split(".")
    first = len(parts) - len(place.relative(place.key).split("."))
    inside = [(part, model.get_submodule(".".join(parts[: depth + 1]))) for depth, part in enumerate(parts)][first:]
    return any(_LEFT_OUT.search(part) or _LEFT_OUT.search(type(module).__name__) for part, module in inside)


def output_width(key: str, module: nn.Module) -> int:
    """Return the size of the last dimension of a module's output; of the channels, for a convolution.

    Raises:
        ValueError: The module has no attribute that tells its width.
    """
    for attribute in ("out_features", "nf", "embedding_dim", "out_channels", "embed_dim"):
        width = getattr(module, attribute, None)
        if isinstance(width, int):
            return width
    if is_norm(module):
        return module.get_parameter("weight").shape[-1]
    raise ValueError(
        f"A bottleneck needs the width of the output that it is applied to; {key!r} is a {type(module).__name__}, "
        "which does not tell it. Name a module with weights in target_modules, such as the projection before it."
    )


def _model_types(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the type of each transformers model inside a model, by its name there."""
    return {
        key: str(inner.config.model_type)
        for key, inner in {"": model, **modules}.items()
        if isinstance(inner, PreTrainedModel)
    }


def _innermost_type(key: str, types: Mapping[str, str]) -> str | None:
    """Return the type of the innermost model around a module, among those that have a row in the table."""
    around = [outer for outer, kind in types.items() if kind in ARCHITECTURES and (not outer or is_inside(key, outer))]
    return types[max(around, key=len)] if around else None


def _describe(
    key: str, layers: nn.ModuleList, modules: Mapping[str, nn.Module], model_type: str
) -> dict[tuple[str, int], list[tuple[str, SubLayer]]] | None:
    """Return the sub-layers of every layer of a list, as the table describes them; None if a layer fits no row."""
    found: dict[tuple[str, int], list[tuple[str, SubLayer]]] = {}
    for index in range(len(layers)):
        for row in ARCHITECTURES[model_type].stacks:
            stack = _name_of_stack(row, key)
            ends = row.find(partial(_is_module, modules, stack, index)) if stack is not None else None
            if ends is not None:
                found[stack, index] = ends  # type: ignore[index]
                break
        else:
            return None
    return found


def _name_of_stack(row: Stack, key: str) -> str | None:
    """Return the name of the stack of layers that a list is or stands for; None if the row is of another list."""
    if row.layers != "*":
        return key if f".{key}".endswith(f".{row.layers}") else None
    parent, _, own_name = key.rpartition(".")
    # The list of attentions stands for all lists.
    is_first = row.attention is not None and row.attention.output.startswith(f"{own_name}.")
    return f"{parent}.*".lstrip(".") if is_first else None


def _is_module(modules: Mapping[str, nn.Module], stack: str, layer: int, name: str) -> bool:
    return full_name(stack, layer, name) in modules


def _log_missing(found: Mapping[tuple[str, int], list[tuple[str, SubLayer]]]) -> None:
    """Log once which layers of a hybrid lack a sub-layer, and so an adapter."""
    lacking: dict[tuple[str, str], list[int]] = {}
    for (stack, index), ends in found.items():
        positions = {position for position, _ in ends}
        missing = [
            position.replace("_", "-") for position in ("attention", "feed_forward") if position not in positions
        ]
        if missing:
            lacking.setdefault((stack, " and no ".join(missing)), []).append(index)
    for (stack, what), indices in lacking.items():
        which = f"{stack}.{fold_indices(indices)}".lstrip(".")
        log_once(f"These layers have no {what}, and so no adapter there: {which}.")


def _with_skip(model: nn.Module, modules: Mapping[str, nn.Module], config: HoulsbyConfig, place: Place) -> Place:
    """Return a place with what its bottleneck may read beside the output of the sub-layer.

    Raises:
        ValueError: The table of skip connections does not describe the sub-layer.
    """
    kind = _innermost_type(place.key, _model_types(model, modules))
    skip = SKIPS.get(kind or "", {}).get(place.relative(place.key))
    if skip is not None:
        entry, norm = (name and full_name(place.stack, place.layer, name) for name in (skip.entry, skip.norm))
        found = replace(place, entry=entry, norm=norm)
        if all(name in modules for name in found.modules):
            return found
    raise ValueError(
        "HoulsbyConfig.kind must be 'houlsby' where it is not known which module the residual input of a sub-layer "
        f"enters; got {config.kind!r}, and this is not known for {place.key!r} of {type(model).__name__}, of "
        f"model_type {kind!r}. Leave the sub-layer out with positions, or add it to "
        "houlsby_peft/placement/skips.py."
    )


def _find_embeddings(model: nn.Module, modules: Mapping[str, nn.Module], config: HoulsbyConfig) -> Place:
    """Return the end of the embeddings.

    Raises:
        ValueError: The table does not name it, or it is left out.
    """
    types = _model_types(model, modules)
    found = [
        Place(key, "embeddings", "", None, key.removesuffix(end.output) + (end.projection or end.output))
        for key in modules
        if (end := EMBEDDINGS.get(_innermost_type(key, types) or "")) and f".{key}".endswith(f".{end.output}")
    ]
    if len(found) != 1 or not is_included(found[0].key, config):
        where = found[0].key if len(found) == 1 else f"found {len(found)} in model_type {types.get('', None)!r}"
        raise ValueError(
            "HoulsbyConfig.invertible must be None where the embeddings' end is unknown, left out or not one module; "
            f"got {config.invertible!r} for a {type(model).__name__} ({where}). Leave it out, or add the architecture "
            "to EMBEDDINGS in houlsby_peft/placement/skips.py."
        )
    return found[0]


def _output_place(model: nn.Module, modules: Mapping[str, nn.Module], embeddings: Place) -> dict[str, Place]:
    """Return the output embedding of the model's head by its name; empty if it is not a language model."""
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    names = [key for key, module in modules.items() if output is not None and module is base_module(output)]
    return {key: Place(key, "output_embedding", "", None, embeddings.projection) for key in names}


def _check_recorded(places: Iterable[Place], modules: Mapping[str, nn.Module], config: HoulsbyConfig) -> None:
    """Refuse a record whose places are not what its kind of adapter needs.

    Raises:
        ValueError: A place lacks what the bottleneck reads, or names a module that cannot be it.
    """
    places = list(places)
    for place in places:
        lacks = config.kind != "houlsby" and place.is_bottleneck and place.entry is None
        wraps = [place.entry or place.key, *([place.key] if place.is_end else [])]
        is_outer = (place.entry or place.is_end) and any(any(modules[name].children()) for name in wraps)
        if lacks or is_outer or (place.norm and not is_norm(modules[place.norm])):
            raise ValueError(
                f"The recorded places of an adapter of kind {config.kind!r} must name the modules that it reads; "
                f"{place} does not. Save or convert the adapter again."
            )
    ends = [place.position for place in places if place.is_end]
    if ends != ["embeddings"] * (config.invertible is not None):
        raise ValueError(
            f"The recorded places of an adapter with invertible={config.invertible!r} must have the end of the "
            f"embeddings {'once' if config.invertible else 'not at all'}; got {ends}. Save the adapter again."
        )


def _explain_unknown(
    unknown: Mapping[str, Unknown],
    known: Mapping[tuple[str, int], Sequence[tuple[str, SubLayer]]],
    config: HoulsbyConfig,
) -> str:
    """Return rule, value and remedy for lists of layers that can neither be looked up nor inferred."""
    reasons = "; ".join(f"in {stack or 'the model itself'}, {why.reason}" for stack, why in unknown.items())
    ends = [end.output for sub_layers in known.values() for _, end in sub_layers]
    example = list(dict.fromkeys(ends + [end for why in unknown.values() for end in why.example]))
    own = config.exclude_modules or []
    excluded: list[str] | str = [*own, *unknown]
    # A name in a list is a suffix; where it would also exclude a list that is known, only a pattern is exact.
    is_suffix = any(f".{stack}." in f"{key}." for stack in unknown for key, _ in known)
    if isinstance(own, str) or is_suffix:
        patterns = [own] if isinstance(own, str) else [rf"(.*\.)?{re.escape(name)}(\..*)?" for name in own]
        excluded = "|".join([*patterns, *(rf"{re.escape(stack)}\..*" for stack in unknown)])
    leave_out = f"Leave them out with exclude_modules={excluded!r}, or name" if known else "Name"
    return (
        "Every list of layers with attention must be adapted or left out on purpose. In an architecture that is not "
        "in the table, each sub-layer must end in one module that can be distinguished from the others; "
        f"{reasons}. {leave_out} the modules whose output meets the skip connection in target_modules"
        f"{f', for example target_modules={example}' if example else ''}."
    )


def _log_left_out(
    modules: Mapping[str, nn.Module],
    layers: Mapping[tuple[str, int], Sequence[tuple[str, SubLayer]]],
    config: HoulsbyConfig,
) -> None:
    """Log which layers with attention get no adapter because the configuration leaves them out."""
    adapted: dict[str, list[int]] = {}
    for (stack, index), ends in layers.items():
        if any(is_included(full_name(stack, index, end.output), config) for _, end in ends):
            adapted.setdefault(stack, []).append(index)
    known = [(stack, index) for stack, indices in adapted.items() for index in indices]
    left: dict[str, list[int]] = {}
    for name, stack in find_attentions(modules).items():
        if not any(_is_in_layer(name, *layer) for layer in known):
            left.setdefault(stack, []).append(int(name.removeprefix(f"{stack}.").partition(".")[0]))
    if left:
        log_once(
            f"Adapters go to the layers {_fold_layers(adapted) or 'none'}; left out, as exclude_modules, "
            f"modules_to_save or positions ask: {_fold_layers(left)}."
        )


def _fold_layers(layers: Mapping[str, Iterable[int]]) -> str:
    return ", ".join(f"{stack}.{fold_indices(sorted(set(indices)))}" for stack, indices in layers.items())


def find_norms(
    model: nn.Module, modules: Mapping[str, nn.Module], config: HoulsbyConfig, bottlenecks: Mapping[str, Place]
) -> Iterator[Place]:
    """Yield the norms that an adapter with the given bottlenecks trains, by today's rules."""
    if not config.train_layer_norm:
        return
    heads = [] if config.modules_to_save == [] else find_head(model, bottlenecks)
    rows = [ARCHITECTURES[kind] for kind in set(_model_types(model, modules).values()) if kind in ARCHITECTURES]
    frozen = tuple(f".{name}" for row in rows for name in row.frozen_norms)
    norms = {
        key: module
        for key, module in modules.items()
        if is_norm(module)
        and is_included(key, config)
        and not f".{key}".endswith(frozen)
        and not any(is_inside(key, other) for other in (*bottlenecks, *heads))
    }
    adapted: dict[tuple[str, int], int] = {}
    for place in bottlenecks.values():
        if place.layer is not None:
            width = output_width(place.key, modules[place.projection])
            where = (place.stack, place.layer)
            adapted[where] = min(width, adapted.get(where, width))
    layer_of = {key: next((layer for layer in adapted if _is_in_layer(key, *layer)), None) for key in norms}
    widest: dict[tuple[str, int] | None, int] = {}
    for key, layer in layer_of.items():
        widest[layer] = max(widest.get(layer, 0), output_width(key, norms[key]))
    for key, layer in layer_of.items():
        # Norms of queries and keys are inside the attention, not around a sub-layer; most are narrower than both the
        # layer's other norms and the sub-layers' outputs.
        width = output_width(key, norms[key])
        of_queries = (layer and width < min(widest[layer], adapted[layer])) or _QUERY_KEY_NORM.search(key)
        if config.train_layer_norm == "all" or (layer is not None and not of_queries):
            yield Place(key, "norm", *(layer or _layer_of(key, config)), projection=key)


def _is_in_stack(key: str, stack: str) -> bool:
    if not stack.endswith("*"):
        return is_inside(key, stack)
    return re.match(rf"{re.escape(stack[:-1])}[^.]+\.\d+(\.|$)", key) is not None


def _is_in_layer(key: str, stack: str, layer: int) -> bool:
    if not stack.endswith("*"):
        return is_inside(key, f"{stack}.{layer}".lstrip("."))
    return re.match(rf"{re.escape(stack[:-1])}[^.]+\.{layer}(\.|$)", key) is not None


def _layer_of(key: str, config: HoulsbyConfig) -> tuple[str, int | None]:
    """Return the list of layers that contains a module and the index in it; a list inside a layer does not count."""
    patterns = config.layers_pattern or [r".*?"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = re.match(rf"^(?P<stack>(?:.*?\.)??{pattern})\.(?P<layer>\d+)\.", key)
        if found:
            return found["stack"], int(found["layer"])
    found = re.match(r"^(?P<layer>\d+)\.", key)
    return ("", int(found["layer"])) if found else ("", None)


def _is_selected(place: Place, config: HoulsbyConfig) -> bool:
    layers, patterns = config.layers_to_transform, config.layers_pattern or [".*"]
    if layers is not None and place.layer not in ([layers] if isinstance(layers, int) else layers):
        return False
    in_named_list = any(
        re.search(rf"(^|\.){pattern}$", place.stack)
        for pattern in ([patterns] if isinstance(patterns, str) else patterns)
    )
    return in_named_list and is_included(place.key, config)


def is_included(key: str, config: HoulsbyConfig) -> bool:
    """Return False for what `exclude_modules` names, and inside `modules_to_save`, which train as a whole.

    A list of names excludes what is inside the named modules as well; a regular expression is compared with the name
    of each module, as in PEFT.
    """
    if not config.exclude_modules and not config.modules_to_save:
        return True
    by_name = not isinstance(config.exclude_modules, str)
    keys = [key, *(key[: dot.start()] for dot in re.finditer(r"\.", key))] if by_name else [key]
    names = SimpleNamespace(
        target_modules=keys, exclude_modules=config.exclude_modules, modules_to_save=config.modules_to_save
    )
    return all(check_target_module_exists(names, name) for name in keys)


def _check_layers(candidates: Iterable[Place], config: HoulsbyConfig) -> None:
    asked = config.layers_to_transform
    layers = {place.layer for place in candidates if place.layer is not None}
    if asked is None or not layers:
        return
    last = max(layers)
    if (max(asked) if isinstance(asked, list) else asked) > last:
        raise ValueError(
            f"HoulsbyConfig.layers_to_transform must be among this model's layers, 0 to {last}; got {asked!r}. Layers "
            "are counted from 0; None adapts all."
        )
    if layers.isdisjoint(asked if isinstance(asked, list) else [asked]):
        raise ValueError(
            "HoulsbyConfig.layers_to_transform must name a layer that has a sub-layer to adapt, which are "
            f"{fold_indices(sorted(layers))} here; got {asked!r}. None adapts them all."
        )


def _check_not_nested(model: nn.Module, bottlenecks: Mapping[str, Place]) -> None:
    for key in bottlenecks:
        for outer in (key[: dot.start()] for dot in re.finditer(r"\.", key)):
            if outer in bottlenecks or isinstance(model.get_submodule(outer), BaseTunerLayer):
                raise ValueError(
                    f"A bottleneck cannot be on a module inside another wrapped module; {key!r} is inside {outer!r}. "
                    "Leave one of the two out of target_modules, or name it in exclude_modules."
                )
