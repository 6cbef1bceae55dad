"""Find the modules of a model that get a bottleneck, a trained norm or an invertible module."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace

from peft import NoMatchingPeftModuleError
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import nn
from transformers import PreTrainedModel

from ..config import HoulsbyConfig
from ..errors import shortened
from ..heads.head import find_head
from ..modules import base_module, base_modules, is_in_any, is_inside
from ..record import Place, fold_indices, full_name, unfold_places
from .inference import find_attentions, infer_layers, log_inferred
from .table import ARCHITECTURES, EMBEDDINGS, SHARED_NORMS, Stack, SubLayer


logger = logging.getLogger(__name__)

# The name of a list of layers, and the index of a layer in it.
Layer = tuple[str, int]
# The sub-layers of each layer, with their positions.
Layers = dict[Layer, list[tuple[str, SubLayer]]]

_QUERY_KEY_NORM = re.compile(r"(^|\.)(q|k|query|key)_?(layer)?_?norm$")


class View:
    """What placement, heads and the fingerprint read from a base model.

    A view does not follow later changes of the model. A tuner layer counts as the module that it
    wraps.

    Attributes:
        modules: The model's modules by name, in its order. Outer modules come first.
        types: The `model_type` of each transformers model inside it, by name; "" is the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = dict(base_modules(model))
        self.types: dict[str, str] = {}
        for key, module in {"": model, **self.modules}.items():
            if isinstance(module, PreTrainedModel):
                self.types[key] = str(module.config.model_type)

    @cached_property
    def encoder(self) -> str:
        """The name of the encoder in a task model, such as "bert"; "" without one inside."""
        prefix = getattr(self.model, "base_model_prefix", "")
        return prefix if prefix in self.modules else ""

    @cached_property
    def head(self) -> list[str]:
        """The names of the task head's modules; see `find_head`."""
        return find_head(self.model, find_attentions(self.modules))

    @cached_property
    def output_embedding(self) -> str | None:
        """The name of the output embedding of a language model; None if there is none."""
        if not isinstance(self.model, PreTrainedModel):
            return None
        embedding = self.model.get_output_embeddings()
        for key, module in self.modules.items():
            if embedding is not None and module is base_module(embedding):
                return key
        return None

    def type_around(self, key: str) -> str:
        """Return the `model_type` of the innermost known model around a module; "" without one."""
        model_type = ""
        for outer, inner_type in self.types.items():
            if inner_type in ARCHITECTURES and (not outer or is_inside(key, outer)):
                model_type = inner_type
        return model_type


def find_places(model: nn.Module | View, config: HoulsbyConfig) -> dict[str, Place]:
    """Return the places of bottlenecks, trained norms and invertible modules by module name.

    They are in the model's order. The places of a saved adapter are those that its file records.
    Others come from `target_modules`, from the table of architectures, or by inference.

    Args:
        model: The base model, or a view of it. A module that already is a tuner layer counts as
            what it wraps.
        config: What to adapt.

    Raises:
        ValueError: The model has no place of this kind, or it cannot be told which modules the
            places are. The message gives the reason and the remedy.
    """
    view = model if isinstance(model, View) else View(model)
    _check_patterns(config)
    recorded = recorded_places(config)
    if recorded is None:
        places = _choose_places(view, config)
    else:
        places = _restore_places(view, config, recorded)
    couplings = [place for place in places.values() if place.is_coupling]
    output = view.output_embedding
    if couplings and output is not None:
        places[output] = Place(output, "output_embedding", "", None, couplings[0].projection)
    return {key: places[key] for key in view.modules if key in places}


def recorded_places(config: HoulsbyConfig) -> list[dict[str, str]] | None:
    """Return the places that are recorded of a saved adapter; None for a new one."""
    return config.loaded.record.places if config.loaded else None


def look_up_layers(view: View) -> Layers:
    """Return the sub-layers of all lists of layers that the table describes."""
    layers: Layers = {}
    for stack, module in view.modules.items():
        if isinstance(module, nn.ModuleList):
            stacks = ARCHITECTURES.get(view.type_around(stack), ())
            kinds = [kind for kind in stacks if f".{stack}".endswith(f".{kind.layers}")]
            layers |= _look_up_list(stack, len(module), kinds, view.modules)
    return layers


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a layer norm or an RMS norm with weights, of any library.

    MobileBERT's `NoNorm`, the scale and shift that are left of a layer norm, counts as well.
    """
    is_named_so = type(module).__name__.endswith(("LayerNorm", "RMSNorm", "NoNorm"))
    weight = getattr(module, "weight", None)
    is_one = isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or is_named_so
    return is_one and isinstance(weight, nn.Parameter) and weight.ndim == 1


def output_width(key: str, module: nn.Module) -> int:
    """Return the size of the last dimension of a module's output; a convolution's channels."""
    for attribute in ("out_features", "nf", "embedding_dim", "out_channels", "embed_dim"):
        width = getattr(module, attribute, None)
        if isinstance(width, int):
            return width
    if is_norm(module):
        weight = module.get_parameter("weight")
        # Under DeepSpeed's ZeRO-3, the weight itself is empty.
        return int(getattr(weight, "ds_shape", weight.shape)[-1])
    raise ValueError(
        "A bottleneck needs the width of the output that it is applied to; "
        f"{key!r} is a {type(module).__name__}, which does not tell it. Name a module with weights "
        "in target_modules, such as the projection before it."
    )


def is_included(key: str, config: HoulsbyConfig) -> bool:
    """Return False for what `exclude_modules` names, and for what is inside `modules_to_save`.

    A list of names also excludes what is inside the named modules. A regular expression is compared
    with the name of each module, as in PEFT. What `modules_to_save` names trains as a whole.
    """
    if not config.exclude_modules and not config.modules_to_save:
        return True
    keys = [key]
    if not isinstance(config.exclude_modules, str):
        keys += [key[: dot.start()] for dot in re.finditer(r"\.", key)]
    rules = SimpleNamespace(
        target_modules=keys,
        exclude_modules=config.exclude_modules,
        modules_to_save=config.modules_to_save,
    )
    return all(check_target_module_exists(rules, name) for name in keys)


def _check_patterns(config: HoulsbyConfig) -> None:
    """Refuse patterns that are not regular expressions, before they are matched."""
    for name in ("target_modules", "exclude_modules"):
        pattern = getattr(config, name)
        if isinstance(pattern, str):
            _check_pattern(name, pattern)
    # These are put into larger expressions, in which flags may only stand at the beginning.
    for pattern in _layer_patterns(config):
        _check_pattern("layers_pattern", pattern, "^")
    for pattern in config.rank_pattern:
        _check_pattern("rank_pattern", pattern, "^")


def _check_pattern(name: str, pattern: str, prefix: str = "") -> None:
    """Refuse a pattern that is not a regular expression, or not one after a prefix."""
    try:
        re.compile(prefix + pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"HoulsbyConfig.{name} must be a regular expression; got {shortened(repr(pattern))}: "
            f"{error}. Escape special characters with a backslash."
        ) from error


def _restore_places(
    view: View, config: HoulsbyConfig, recorded: Iterable[Mapping[str, str]]
) -> dict[str, Place]:
    """Return the recorded places of an adapter, which must be modules of the model."""
    places = {}
    for place in unfold_places(recorded, view.encoder):
        for name in place.modules:
            if name not in view.modules:
                raise ValueError(
                    "The recorded places of an adapter must be modules of the base model; "
                    f"{type(view.model).__name__} has no {name!r}. Load the adapter on the base "
                    "model that it was trained on."
                )
        if config.kind != "houlsby" and place.is_bottleneck and place.entry is None:
            raise ValueError(
                f"The recorded places of an adapter of kind {config.kind!r} must name the module "
                f"that the residual input enters; {place.key!r} has none. Save or download the "
                "adapter again."
            )
        places[place.key] = place
    if not any(place.is_bottleneck for place in places.values()):
        raise _nothing_to_adapt(view, config, [])
    return places


def _choose_places(view: View, config: HoulsbyConfig) -> dict[str, Place]:
    """Return the places of a new adapter."""
    _check_reversible(view, config)
    if config.target_modules is None:
        candidates = _find_sub_layers(view, config)
    else:
        candidates = _find_named(view, config)
    places = {}
    for place in candidates:
        if _is_selected(place, config):
            pattern = get_pattern_key(list(config.rank_pattern), place.key)
            r = config.rank_pattern.get(pattern, config.r)
            if r != config.r:
                place = replace(place, r=r)
            places[place.key] = place
    if not places:
        raise _nothing_to_adapt(view, config, candidates)
    _check_layers(view, config, candidates)
    places |= {norm.key: norm for norm in _find_norms(view, config, places)}
    if config.invertible is not None:
        embeddings = _find_embeddings(view, config)
        places[embeddings.key] = embeddings
    return places


def _check_reversible(view: View, config: HoulsbyConfig) -> None:
    """Refuse a Reformer that would compute no gradients."""
    trains = config.target_modules is not None and hasattr(view.model, "_require_grads_hook")
    if "reformer" in view.types.values() and not trains:
        raise ValueError(
            "Reformer's reversible layers compute gradients only if their input needs one, so "
            "adapters on a frozen model do not train. Call model.enable_input_require_grads() "
            "first, and name the ends of the sub-layers in target_modules, as "
            "docs/architectures.md shows."
        )


def _nothing_to_adapt(
    view: View, config: HoulsbyConfig, candidates: Iterable[Place]
) -> NoMatchingPeftModuleError:
    """Return the error for a configuration that selects none of the candidates."""
    options = []
    for name in (
        "positions",
        "target_modules",
        "exclude_modules",
        "modules_to_save",
        "layers_to_transform",
        "layers_pattern",
    ):
        if value := getattr(config, name):
            options.append(f"{name}={value!r}")
    choice = ""
    if layers := _name_layers(candidates):
        choice = f"The layers to choose from are {layers}. "
    return NoMatchingPeftModuleError(
        "An adapter needs a sub-layer in a list of layers with attention, or a module that "
        f"target_modules names; {type(view.model).__name__}, of model_type "
        f"{view.types.get('')!r}, has none with {', '.join(options)}. {choice}Change one "
        "of the options; docs/architectures.md lists the architectures that are known."
    )


def _check_layers(view: View, config: HoulsbyConfig, candidates: Collection[Place]) -> None:
    """Refuse the index of a layer that the model lacks: the adapter would silently be smaller.

    A layer without a sub-layer to adapt, as in a hybrid model, is there all the same.
    """
    stacks = {place.stack for place in candidates if place.layer is not None}
    unknown = []
    for index in _layer_indices(config):
        if not any(full_name(stack, index) in view.modules for stack in stacks):
            unknown.append(index)
    if unknown:
        raise ValueError(
            "HoulsbyConfig.layers_to_transform must name layers of the model, counted from 0; got "
            f"{unknown}. The layers to choose from are {_name_layers(candidates)}."
        )


def _name_layers(candidates: Iterable[Place]) -> str:
    """Return the layers of some places: `encoder.layer.0-11`."""
    indices: dict[str, set[int]] = {}
    for place in candidates:
        if place.layer is not None:
            indices.setdefault(place.stack, set()).add(place.layer)
    layers = []
    for stack, numbers in indices.items():
        layers.append(f"{stack}.{fold_indices(sorted(numbers))}".lstrip("."))
    return ", ".join(layers)


def _find_sub_layers(view: View, config: HoulsbyConfig) -> list[Place]:
    """Return the ends of the sub-layers of all layers, from the table or by inference."""
    layers = look_up_layers(view)
    layers |= _infer_layers(view, config, layers)
    places = []
    for (stack, index), sub_layers in layers.items():
        for position, end in sub_layers:
            if position in config.positions:
                key = full_name(stack, index, end.output)
                width = full_name(stack, index, end.tells_width)
                place = Place(key, position, stack, index, width)
                if config.kind != "houlsby" and _is_selected(place, config):
                    place = _with_entry(view, config, place, end)
                places.append(place)
    return places


def _look_up_list(
    stack: str, length: int, kinds: Sequence[Stack], modules: Collection[str]
) -> Layers:
    """Return the sub-layers of a list's layers.

    Return nothing if the table does not describe one of them, as in another version of
    transformers.
    """
    layers: Layers = {}
    for index in range(length):
        sub_layers = _look_up_layer(f"{stack}.{index}", kinds, modules)
        if sub_layers is None:
            return {}
        layers[stack, index] = sub_layers
    return layers


def _look_up_layer(
    layer: str, kinds: Sequence[Stack], modules: Collection[str]
) -> list[tuple[str, SubLayer]] | None:
    """Return the sub-layers of a layer by the first kind that fits it; None if none does."""
    for kind in kinds:
        sub_layers = kind.find(lambda name: f"{layer}.{name}" in modules)
        if sub_layers is not None:
            return sub_layers
    return None


def _infer_layers(view: View, config: HoulsbyConfig, known_layers: Layers) -> Layers:
    """Infer the sub-layers of the lists of layers that the table does not describe.

    These are parts of a composite model, or lists in which another version of transformers names
    modules differently.

    Raises:
        ValueError: They cannot be inferred.
    """
    stacks = {stack for stack, _ in known_layers}
    modules = {}
    for key, module in view.modules.items():
        if not is_in_any(key, stacks):
            modules[key] = module
    inferred, unknown = infer_layers(
        modules, config.positions, lambda name: is_included(name, config)
    )
    layers: Layers = {layer: list(ends.items()) for layer, ends in inferred.items()}
    if unknown:
        raise ValueError(_explain_unknown(unknown, known_layers | layers))
    if inferred:
        log_inferred(inferred)
    return layers


def _explain_unknown(unknown: Mapping[str, str], known_layers: Layers) -> str:
    """Return rule, value and remedy for lists of layers that cannot be inferred."""
    reasons, patterns = [], []
    is_ambiguous = False
    for stack, reason in unknown.items():
        reasons.append(f"in {stack or 'the model itself'}, {reason}")
        patterns.append(rf"{re.escape(stack)}\..*")
        # A name in a list is a suffix, and could exclude a list that is known.
        is_ambiguous |= any(f".{stack}." in f"{name}." for name, _ in known_layers)
    remedy = "Name"
    if known_layers:
        excluded = "|".join(patterns) if is_ambiguous else list(unknown)
        remedy = f"Leave them out with exclude_modules={excluded!r}, or name"
    return (
        "Every list of layers with attention must be adapted or left out on purpose. In an "
        "architecture that is not in the table, each sub-layer must end in one module that can be "
        f"distinguished from the others; {'; '.join(reasons)}. {remedy} the modules whose output "
        "meets the skip connection in target_modules."
    )


def _with_entry(view: View, config: HoulsbyConfig, place: Place, end: SubLayer) -> Place:
    """Return a place with the modules that bottlenecks of other kinds than Houlsby's read."""
    if end.entry is not None:
        norm = end.norm and full_name(place.stack, place.layer, end.norm)
        entry = full_name(place.stack, place.layer, end.entry)
        place = replace(place, entry=entry, norm=norm)
    if place.entry is None or not view.modules.keys() >= set(place.modules):
        raise ValueError(
            "HoulsbyConfig.kind must be 'houlsby' where the table does not tell which module the "
            f"residual input of a sub-layer enters; got {config.kind!r}, and this is not known for "
            f"{place.key!r} of {type(view.model).__name__}. Leave the sub-layer out with "
            "positions, or add it to houlsby_peft/placement/table.py."
        )
    return place


def _find_named(view: View, config: HoulsbyConfig) -> list[Place]:
    """Return the modules that `target_modules` names."""
    rules = SimpleNamespace(
        target_modules=config.target_modules, exclude_modules=None, modules_to_save=None
    )
    layers = look_up_layers(view)
    projections, layer_names = {}, []
    for layer, sub_layers in layers.items():
        layer_names.append(full_name(*layer))
        for _, end in sub_layers:
            projections[full_name(*layer, end.output)] = full_name(*layer, end.tells_width)
    ends = {*projections, *projections.values()}
    places, inside = [], []
    for key in view.modules:
        if check_target_module_exists(rules, key):
            projection = projections.get(key, key)
            places.append(Place(key, "custom", *_layer_of(key, config), projection))
            if key not in ends and is_in_any(key, layer_names):
                inside.append(key)
    if inside:
        logger.warning(
            f"target_modules names {inside[0]}, which is inside a sub-layer. A Houlsby adapter "
            f"follows its end, such as {min(projections)}; without target_modules, all ends are "
            "found."
        )
    return places


def _find_embeddings(view: View, config: HoulsbyConfig) -> Place:
    """Return the end of the embeddings, for an invertible module."""
    places = []
    for key in view.modules:
        end = EMBEDDINGS.get(view.type_around(key))
        if end and f".{key}".endswith(f".{end.output}") and is_included(key, config):
            projection = key.removesuffix(end.output) + end.tells_width
            places.append(Place(key, "embeddings", "", None, projection))
    if len(places) != 1:
        raise ValueError(
            "HoulsbyConfig.invertible must be None where the embeddings' end is unknown, left out "
            f"or not one module; got {config.invertible!r} for a {type(view.model).__name__} "
            f"(found {len(places)} in model_type {view.types.get('')!r}). Leave it out, or add the "
            "end to houlsby_peft/placement/table.py."
        )
    output = view.output_embedding
    if output is not None and config.modules_to_save and not is_included(output, config):
        raise ValueError(
            f"invertible needs the output embedding, {output!r}: leave it out of modules_to_save."
        )
    return places[0]


def _find_norms(
    view: View, config: HoulsbyConfig, bottlenecks: Mapping[str, Place]
) -> Iterator[Place]:
    """Yield the norms that an adapter with these bottlenecks trains."""
    if not config.train_layer_norm:
        return
    output_widths = _narrowest_outputs(view, bottlenecks)
    norms: dict[Layer | None, dict[str, int]] = {}
    for key in _separate_norms(view, config, bottlenecks):
        layer = _layer_around(key, output_widths)
        norms.setdefault(layer, {})[key] = output_width(key, view.modules[key])
    for layer, widths in norms.items():
        for key, width in widths.items():
            # Norms of queries and keys are inside the attention, not around a sub-layer. Most are
            # narrower than both the layer's other norms and the sub-layers' outputs.
            is_around = False
            if layer is not None and not _QUERY_KEY_NORM.search(key):
                is_around = width >= min(output_widths[layer], max(widths.values()))
            if is_around or config.train_layer_norm == "all":
                stack, index = layer or _layer_of(key, config)
                yield Place(key, "norm", stack, index, projection=key)


def _narrowest_outputs(view: View, bottlenecks: Mapping[str, Place]) -> dict[Layer, int]:
    """Return the width of the narrowest adapted sub-layer output in each adapted layer."""
    widths: dict[Layer, int] = {}
    for place in bottlenecks.values():
        if place.layer is not None:
            width = output_width(place.key, view.modules[place.projection])
            layer = place.stack, place.layer
            widths[layer] = min(width, widths.get(layer, width))
    return widths


def _separate_norms(
    view: View, config: HoulsbyConfig, bottlenecks: Collection[str]
) -> Iterator[str]:
    """Yield the norms that may train by themselves, outside of adapted modules and heads."""
    wholes = list(bottlenecks)
    if config.modules_to_save != []:
        wholes += view.head
    shared = tuple(f".{SHARED_NORMS[kind]}" for kind in view.types.values() if kind in SHARED_NORMS)
    for key, module in view.modules.items():
        is_shared = f".{key}".endswith(shared)
        if not is_norm(module) or is_shared or is_in_any(key, wholes):
            continue
        if is_included(key, config):
            yield key


def _layer_around(key: str, layers: Iterable[Layer]) -> Layer | None:
    """Return the first layer that a module is in; None if it is in none."""
    for layer in layers:
        if is_inside(key, full_name(*layer)):
            return layer
    return None


def _is_selected(place: Place, config: HoulsbyConfig) -> bool:
    """Return whether a place is in the layers to adapt, and not excluded."""
    if config.layers_to_transform is not None and place.layer not in _layer_indices(config):
        return False
    patterns = _layer_patterns(config) or [".*"]
    is_in_list = any(re.search(rf"(^|\.)(?:{pattern})$", place.stack) for pattern in patterns)
    return is_in_list and is_included(place.key, config)


def _layer_indices(config: HoulsbyConfig) -> list[int]:
    """Return the indices that `layers_to_transform` names; none if it is left out."""
    if isinstance(config.layers_to_transform, int):
        return [config.layers_to_transform]
    return config.layers_to_transform or []


def _layer_patterns(config: HoulsbyConfig) -> list[str]:
    """Return the patterns for the name of the list of layers; none allow every list."""
    if isinstance(config.layers_pattern, str):
        return [config.layers_pattern]
    return config.layers_pattern or []


def _layer_of(key: str, config: HoulsbyConfig) -> tuple[str, int | None]:
    """Return the list of layers that contains a module, and the index in it.

    A list inside a layer does not count.
    """
    for pattern in _layer_patterns(config) or [r".*?"]:
        match = re.match(rf"^(?P<stack>(?:.*?\.)??(?:{pattern}))\.(?P<layer>\d+)\.", key)
        if match:
            return match["stack"], int(match["layer"])
    match = re.match(r"^(?P<layer>\d+)\.", key)
    if match:
        return "", int(match["layer"])
    return "", None
