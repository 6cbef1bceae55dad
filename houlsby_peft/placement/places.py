"""Find the modules of a model that get a bottleneck, a trained norm or an invertible module, in one
look at it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace

from peft import NoMatchingPeftModuleError
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import nn
from transformers import PreTrainedModel

from ..config import HoulsbyConfig
from ..heads.head import find_head
from ..modules import base_module, base_modules, is_inside
from ..record import Place, full_name, unfold_places
from .inference import find_attentions, infer_layers, log_inferred
from .table import ARCHITECTURES, EMBEDDINGS, SHARED_NORMS, SubLayer


logger = logging.getLogger(__name__)

# The sub-layers with their positions, for the name of each list of layers and each index in it.
Layers = dict[tuple[str, int], list[tuple[str, SubLayer]]]

_QUERY_KEY_NORM = re.compile(r"(^|\.)(q|k|query|key)_?(layer)?_?norm$")


class View:
    """What placement, heads and the fingerprint read from a base model.

    A view does not follow later changes of the model. A tuner layer counts as the module that it
    wraps.

    Attributes:
        modules: Its modules by name, in the model's order.
        types: The `model_type` of each model of transformers inside it, by name; the model itself is "".
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = dict(base_modules(model))
        self.types: dict[str, str] = {
            key: str(inner.config.model_type)
            for key, inner in {"": model, **self.modules}.items()
            if isinstance(inner, PreTrainedModel)
        }

    @cached_property
    def encoder(self) -> str:
        """The name of the encoder in a task model, such as "bert"; "" if the model has none or is
        one itself.
        """
        prefix = getattr(self.model, "base_model_prefix", "")
        return prefix if prefix in self.modules else ""

    @cached_property
    def head(self) -> list[str]:
        """The names of the task head's modules; see `find_head`."""
        return find_head(self.model, find_attentions(self.modules))

    @cached_property
    def output_embedding(self) -> str | None:
        """The name of the output embedding of a language model; None if there is none."""
        module = (
            self.model.get_output_embeddings() if isinstance(self.model, PreTrainedModel) else None
        )
        found = (
            key
            for key in self.modules
            if module is not None and self.modules[key] is base_module(module)
        )
        return next(found, None)

    def type_around(self, key: str) -> str:
        """Return the `model_type` of the innermost known model around a module; "" if there is
        none.
        """
        known = {outer: kind for outer, kind in self.types.items() if kind in ARCHITECTURES}
        around = [outer for outer in known if not outer or is_inside(key, outer)]
        return known[max(around, key=len)] if around else ""


def find_places(model: nn.Module | View, config: HoulsbyConfig) -> dict[str, Place]:
    """Return the places of bottlenecks, trained norms and invertible modules, by module name, in
    the model's order.

    The places of a saved adapter are those that its file records. Others come from
    `target_modules`, from the table of architectures, or by inference.

    Args:
        model: The base model, or a view of it. A module that already is a tuner layer counts as
            what it wraps.
        config: What to adapt.

    Raises:
        ValueError: The model has no place of this kind, or it cannot be told which modules the
            places are; the message gives the reason and the remedy.
    """
    view = model if isinstance(model, View) else View(model)
    if (rows := recorded_places(config)) is not None:
        places = {place.key: place for place in unfold_places(rows, view.encoder)}
        if missing := [
            name for place in places.values() for name in place.modules if name not in view.modules
        ]:
            raise ValueError(
                f"The recorded places of an adapter must be modules of the base model; {type(view.model).__name__} "
                f"has no {missing[0]!r}. Load the adapter on the base model that it was trained on."
            )
    else:
        trains = config.target_modules is not None and hasattr(view.model, "_require_grads_hook")
        if "reformer" in view.types.values() and not trains:
            raise ValueError(
                "Reformer's reversible layers compute gradients only if their input needs one, so adapters on a "
                "frozen model do not train. Call model.enable_input_require_grads() first, and name the ends of the "
                "sub-layers in target_modules, as docs/architectures.md shows."
            )
        candidates = (
            _find_candidates(view, config)
            if config.target_modules is None
            else _find_named(view, config)
        )
        places = {place.key: place for place in candidates if _is_selected(place, config)}
        for key in places:
            r = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), key), config.r)
            if r != config.r:
                places[key] = replace(places[key], r=r)
        places |= {place.key: place for place in _find_norms(view, config, places)}
        if config.invertible is not None:
            end = _find_embeddings(view, config)
            places[end.key] = end
    if not any(place.is_bottleneck for place in places.values()):
        fields = (
            "target_modules",
            "exclude_modules",
            "modules_to_save",
            "layers_to_transform",
            "layers_pattern",
        )
        given = [
            f"{name}={value!r}"
            for name in ("positions", *fields)
            if (value := getattr(config, name))
        ]
        raise NoMatchingPeftModuleError(
            "An adapter needs a sub-layer in a list of layers with attention, or a module that target_modules names; "
            f"{type(view.model).__name__}, of model_type {view.types.get('')!r}, has none with {', '.join(given)}. "
            "Change one of them; docs/architectures.md lists the architectures that are known."
        )
    ends = [place for place in places.values() if place.is_coupling]
    if ends and (output := view.output_embedding):
        if rows is None and config.modules_to_save and not is_included(output, config):
            raise ValueError(
                f"invertible needs the output embedding, {output!r}: leave it out of modules_to_save."
            )
        places[output] = Place(output, "output_embedding", "", None, ends[0].projection)
    return {key: places[key] for key in view.modules if key in places}


def recorded_places(config: HoulsbyConfig) -> list[dict[str, str]] | None:
    """Return the places that are recorded of a saved adapter; None for a new one."""
    return config.record.places if config.is_loaded and config.record else None


def look_up_layers(view: View) -> Layers:
    """Return the sub-layers of all lists of layers that the table describes."""
    found: Layers = {}
    for stack, module in view.modules.items():
        if not isinstance(module, nn.ModuleList):
            continue
        stacks = ARCHITECTURES.get(view.type_around(stack), ())
        kinds = [kind for kind in stacks if f".{stack}".endswith(f".{kind.layers}")]
        layers: Layers = {}
        for index in range(len(module)):
            names = f"{stack}.{index}."
            each = (
                kind.find(lambda name, names=names: names + name in view.modules) for kind in kinds
            )  # type: ignore[misc]
            ends = next((ends for ends in each if ends is not None), None)
            if (
                ends is None
            ):  # a layer of another version of transformers, as are the others of its list
                break
            layers[stack, index] = ends
        else:
            found |= layers
    return found


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a layer norm or an RMS norm with weights, of PyTorch or of a
    model's own class.

    MobileBERT's `NoNorm`, the scale and shift that are left of a layer norm, counts as well.
    """
    is_named_so = type(module).__name__.endswith(("LayerNorm", "RMSNorm", "NoNorm"))
    weight = getattr(module, "weight", None)
    is_one = isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or is_named_so
    return is_one and isinstance(weight, nn.Parameter) and weight.ndim == 1


def output_width(key: str, module: nn.Module) -> int:
    """Return the size of the last dimension of a module's output; of the channels, for a
    convolution.
    """
    for attribute in ("out_features", "nf", "embedding_dim", "out_channels", "embed_dim"):
        width = getattr(module, attribute, None)
        if isinstance(width, int):
            return width
    if is_norm(module):
        weight = module.get_parameter("weight")
        return int(
            getattr(weight, "ds_shape", weight.shape)[-1]
        )  # under DeepSpeed's ZeRO-3, a weight itself is empty
    raise ValueError(
        f"A bottleneck needs the width of the output that it is applied to; {key!r} is a {type(module).__name__}, "
        "which does not tell it. Name a module with weights in target_modules, such as the projection before it."
    )


def _find_candidates(view: View, config: HoulsbyConfig) -> Iterator[Place]:
    """Yield the known or inferred places of all layers.

    A composite model (two towers, an encoder and a decoder) is described by the rows of its parts.
    What no row describes, possibly because another version of transformers names its modules
    differently, is inferred.
    """
    known = look_up_layers(view)
    layers = {
        layer: [end for end in ends if end[0] in config.positions] for layer, ends in known.items()
    }
    stacks = {stack for stack, _ in layers}
    rest = {
        key: module
        for key, module in view.modules.items()
        if not any(is_inside(key, stack) for stack in stacks)
    }
    inferred, unknown = infer_layers(rest, config.positions, lambda name: is_included(name, config))
    layers |= {layer: list(ends.items()) for layer, ends in inferred.items()}
    if unknown:
        raise ValueError(_explain_unknown(unknown, layers))
    if inferred:
        log_inferred(inferred)
    for (stack, index), sub_layers in layers.items():
        for position, end in sub_layers:
            key, width = (full_name(stack, index, name) for name in (end.output, end.tells_width))
            place = Place(key, position, stack, index, width)
            if config.kind != "houlsby" and _is_selected(place, config):
                entry, norm = (
                    name and full_name(stack, index, name) for name in (end.entry, end.norm)
                )
                place = replace(place, entry=entry, norm=norm)
                if entry is None or not all(name in view.modules for name in place.modules):
                    raise ValueError(
                        "HoulsbyConfig.kind must be 'houlsby' where the table does not tell which module the residual "
                        f"input of a sub-layer enters; got {config.kind!r}, and this is not known for {key!r} of "
                        f"{type(view.model).__name__}. Leave the sub-layer out with positions, or add it to "
                        "houlsby_peft/placement/table.py."
                    )
            yield place


def _find_named(view: View, config: HoulsbyConfig) -> Iterator[Place]:
    """Yield the modules that `target_modules` names."""
    names = SimpleNamespace(
        target_modules=config.target_modules, exclude_modules=None, modules_to_save=None
    )
    known = look_up_layers(view)
    ends = {
        full_name(*layer, end.output): full_name(*layer, end.tells_width)
        for layer, found in known.items()
        for _, end in found
    }
    layers, inner = {".".join(map(str, layer)) for layer in known}, []
    for key in view.modules:
        if check_target_module_exists(names, key):
            yield Place(key, "custom", *_layer_of(key, config), ends.get(key, key))
            if key not in {*ends, *ends.values()} and any(
                is_inside(key, layer) for layer in layers
            ):
                inner.append(key)
    if inner:
        logger.warning(
            f"target_modules names {inner[0]}, which is inside a sub-layer. A Houlsby adapter follows its end, such "
            f"as {min(ends)}; without target_modules, all ends are found."
        )


def _find_embeddings(view: View, config: HoulsbyConfig) -> Place:
    """Return the end of the embeddings."""
    found = []
    for key in view.modules:
        end = EMBEDDINGS.get(view.type_around(key))
        if end and f".{key}".endswith(f".{end.output}") and is_included(key, config):
            projection = key.removesuffix(end.output) + end.tells_width
            found.append(Place(key, "embeddings", "", None, projection))
    if len(found) != 1:
        raise ValueError(
            "HoulsbyConfig.invertible must be None where the embeddings' end is unknown, left out or not one module; "
            f"got {config.invertible!r} for a {type(view.model).__name__} (found {len(found)} in model_type "
            f"{view.types.get('')!r}). Leave it out, or add the end to houlsby_peft/placement/table.py."
        )
    return found[0]


def _find_norms(
    view: View, config: HoulsbyConfig, bottlenecks: Mapping[str, Place]
) -> Iterator[Place]:
    """Yield the norms that an adapter with the given bottlenecks trains."""
    if not config.train_layer_norm:
        return
    whole = [*bottlenecks, *([] if config.modules_to_save == [] else view.head)]
    shared = tuple(f".{SHARED_NORMS[kind]}" for kind in view.types.values() if kind in SHARED_NORMS)
    # The narrowest output of a sub-layer in each adapted layer, and by layer the widths of the
    # norms in it.
    adapted: dict[tuple[str, int], int] = {}
    for place in bottlenecks.values():
        if place.layer is not None:
            width = output_width(place.key, view.modules[place.projection])
            layer = place.stack, place.layer
            adapted[layer] = min(width, adapted.get(layer, width))
    norms: dict[tuple[str, int] | None, dict[str, int]] = {}
    for key, module in view.modules.items():
        if (
            is_norm(module)
            and not f".{key}".endswith(shared)
            and not any(is_inside(key, other) for other in whole)
        ):
            around = next(
                (layer for layer in adapted if is_inside(key, full_name(*layer, ""))), None
            )
            if is_included(key, config):
                norms.setdefault(around, {})[key] = output_width(key, module)
    for around, widths in norms.items():
        for key, width in widths.items():
            # Norms of queries and keys are inside the attention, not around a sub-layer; most are
            # narrower than both the layer's other norms and the sub-layers' outputs.
            is_narrow = around is not None and width < min(adapted[around], max(widths.values()))
            is_around = around is not None and not is_narrow and not _QUERY_KEY_NORM.search(key)
            if is_around or config.train_layer_norm == "all":
                yield Place(key, "norm", *(around or _layer_of(key, config)), projection=key)


def is_included(key: str, config: HoulsbyConfig) -> bool:
    """Return False for what `exclude_modules` names, and inside `modules_to_save`, which train as a
    whole.

    A list of names excludes what is inside the named modules as well; a regular expression is
    compared with the name of each module, as in PEFT.
    """
    if not config.exclude_modules and not config.modules_to_save:
        return True
    by_name = not isinstance(config.exclude_modules, str)
    keys = [key, *(key[: dot.start()] for dot in re.finditer(r"\.", key))] if by_name else [key]
    names = SimpleNamespace(
        target_modules=keys,
        exclude_modules=config.exclude_modules,
        modules_to_save=config.modules_to_save,
    )
    return all(check_target_module_exists(names, name) for name in keys)


def _is_selected(place: Place, config: HoulsbyConfig) -> bool:
    layers, patterns = config.layers_to_transform, config.layers_pattern or [".*"]
    if layers is not None and place.layer not in ([layers] if isinstance(layers, int) else layers):
        return False
    in_named_list = any(
        re.search(rf"(^|\.){pattern}$", place.stack)
        for pattern in ([patterns] if isinstance(patterns, str) else patterns)
    )
    return in_named_list and is_included(place.key, config)


def _layer_of(key: str, config: HoulsbyConfig) -> tuple[str, int | None]:
    """Return the list of layers that contains a module and the index in it; a list inside a layer
    does not count.
    """
    patterns = config.layers_pattern or [r".*?"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = re.match(rf"^(?P<stack>(?:.*?\.)??{pattern})\.(?P<layer>\d+)\.", key)
        if found:
            return found["stack"], int(found["layer"])
    found = re.match(r"^(?P<layer>\d+)\.", key)
    return ("", int(found["layer"])) if found else ("", None)


def _explain_unknown(unknown: Mapping[str, str], known: Layers) -> str:
    """Return rule, value and remedy for lists of layers that can neither be looked up nor inferred."""
    reasons = "; ".join(
        f"in {stack or 'the model itself'}, {why}" for stack, why in unknown.items()
    )
    excluded: list[str] | str = list(unknown)
    # A name in a list is a suffix; where it would also exclude a list that is known, only a pattern
    # is exact.
    if any(f".{stack}." in f"{key}." for stack in unknown for key, _ in known):
        excluded = "|".join(rf"{re.escape(stack)}\..*" for stack in unknown)
    leave_out = f"Leave them out with exclude_modules={excluded!r}, or name" if known else "Name"
    return (
        "Every list of layers with attention must be adapted or left out on purpose. In an architecture that is not "
        "in the table, each sub-layer must end in one module that can be distinguished from the others; "
        f"{reasons}. {leave_out} the modules whose output meets the skip connection in target_modules."
    )
