"""Find the modules of a model that get a bottleneck, a trained norm or an invertible module."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace

from peft import NoMatchingPeftModuleError
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import nn

from ..config import HoulsbyConfig
from ..method.modules import is_in_any
from ..saved.record import Place, fold_indices, full_name, unfold_places
from .inference import infer_layers, is_attention_input, log_inferred
from .selection import (
    check_layers,
    find_norms,
    is_included,
    is_selected,
    layer_of,
    name_layers,
)
from .table import EMBEDDINGS, READABLE, Layers, SubLayer
from .view import View, look_up_layers


logger = logging.getLogger(__name__)
_DECODER_OPTIONS = ("is_decoder", "is_encoder_decoder")
# The package in which transformers puts modules of a repository.
_FROM_REPOSITORY = "transformers_modules."


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
    if config.kind == "ladder":
        _check_unchunked(view)
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
        is_complete = config.kind == "houlsby" or place.entry is not None
        is_of_kind = place.is_ladder == (config.kind == "ladder")
        if place.is_bottleneck and not (is_complete and is_of_kind):
            raise ValueError(
                f"The recorded places of an adapter of kind {config.kind!r} must name the module "
                "that the residual input enters and, of a ladder alone, the layers that it reads; "
                f"{place.key!r} does not. Save or download the adapter again."
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
    check_layers(view, config, candidates)
    selected = [place for place in candidates if is_selected(place, config)]
    if config.kind == "ladder" and selected:
        selected = [_ladder_place(view, candidates, selected)]
    for place in selected:
        pattern = get_pattern_key(list(config.rank_pattern), place.key)
        r = config.rank_pattern.get(pattern, config.r)
        places[place.key] = place if r == config.r else replace(place, r=r)
    if not places:
        raise _nothing_to_adapt(view, config, candidates)
    places |= {norm.key: norm for norm in find_norms(view, config, places)}
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


def _ladder_place(view: View, candidates: Sequence[Place], selected: Sequence[Place]) -> Place:
    """Return the place of a ladder that reads the selected layers: the end of the last layer."""
    if len({place.stack for place in candidates}) > 1:
        raise _no_encoder(view, "it has several lists of layers")
    indices = [place.layer for place in selected if place.layer is not None]
    return replace(candidates[-1], reads=fold_indices(indices))


def _check_encoder(view: View, layers: Layers) -> None:
    """Refuse a ladder beside any model but an encoder of which it is known what a ladder reads."""
    if any(getattr(view.model.config, name, False) for name in _DECODER_OPTIONS):
        raise _no_encoder(view, "in a decoder, a token does not see those after it")
    if type(view.model).__module__.startswith(_FROM_REPOSITORY):
        raise _no_encoder(
            view,
            "its code comes from a repository, where no part is known; load it by a class of "
            "transformers, without trust_remote_code",
        )
    if not layers or {view.type_around(stack) for stack, _ in layers} - READABLE:
        raise _no_encoder(
            view, "what a ladder reads is known for the model_types " + ", ".join(sorted(READABLE))
        )


def _check_unchunked(view: View) -> None:
    """Refuse a ladder where the end of a layer runs once for each chunk of the tokens."""
    if any(getattr(module, "chunk_size_feed_forward", 0) for module in view.modules.values()):
        raise _no_encoder(
            view, "its layers end in chunks of the tokens; load it with chunk_size_feed_forward=0"
        )


def _no_encoder(view: View, reason: str) -> ValueError:
    return ValueError(
        "HoulsbyConfig.kind='ladder' needs one encoder; got a "
        f"{type(view.model).__name__} of model_type {view.types.get('')!r}: {reason}. Or use "
        "another kind."
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
    if layers := name_layers(candidates):
        choice = f"The layers to choose from are {layers}. "
    return NoMatchingPeftModuleError(
        "An adapter needs a sub-layer in a list of layers with attention, or a module that "
        f"target_modules names; {type(view.model).__name__}, of model_type "
        f"{view.types.get('')!r}, has none with {', '.join(options)}. {choice}Change one "
        "of the options; docs/architectures.md lists the architectures that are known."
    )


def _find_sub_layers(view: View, config: HoulsbyConfig) -> list[Place]:
    """Return the ends of the sub-layers of all layers, from the table or by inference."""
    layers = look_up_layers(view)
    if config.kind == "ladder":
        _check_encoder(view, layers)
    layers |= _infer_layers(view, config, layers)
    places = []
    for (stack, index), sub_layers in layers.items():
        for position, end in sub_layers:
            if position not in config.positions:
                continue
            key = full_name(stack, index, end.output)
            place = Place(key, position, stack, index, full_name(stack, index, end.tells_width))
            if config.kind == "ladder":
                # It reads what enters the layer, and ends at the last one, which it may not read.
                end = replace(end, entry=sub_layers[0][1].entry)
                place = _with_entry(view, config, place, end)
            elif config.kind != "houlsby" and is_selected(place, config):
                place = _with_entry(view, config, place, end)
            places.append(place)
    return places


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
    if unknown:
        reasons = [f"in {stack or 'the model itself'}, {why}" for stack, why in unknown.items()]
        remedy = "Name"
        if layers := known_layers | inferred:
            remedy = f"Leave them out with exclude_modules={_excluding(unknown, layers)!r}, or name"
        raise ValueError(
            "Every list of layers with attention must be adapted or left out on purpose. In an "
            "architecture that is not in the table, each sub-layer must end in one module that can "
            f"be distinguished from the others; {'; '.join(reasons)}. {remedy} the modules whose "
            "output meets the skip connection in target_modules."
        )
    if inferred:
        log_inferred(inferred)
    return inferred


def _excluding(stacks: Collection[str], layers: Layers) -> str | list[str]:
    """Return the `exclude_modules` that leaves lists of layers out, and none of these layers."""
    for name, _ in layers:
        if any(f".{stack}." in f"{name}." for stack in stacks):
            # A name in a list is a suffix, which would leave out this one as well.
            return "|".join(rf"{re.escape(stack)}\..*" for stack in stacks)
    return list(stacks)


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
            places.append(Place(key, "custom", *layer_of(key, config), projection))
            if key not in ends and is_in_any(key, layer_names):
                inside.append(key)
    as_of_lora = [key for key in inside if is_attention_input(key)]
    if config.target_modules == "all-linear" and projections:  # PEFT's own word
        as_of_lora = ["all-linear"]
    if as_of_lora:
        raise ValueError(
            f"target_modules names {as_of_lora[0]}, as LoRA needs it. A Houlsby adapter "
            f"follows the end of a sub-layer, such as {min(projections)}: leave target_modules "
            "out, and all ends are found."
        )
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
