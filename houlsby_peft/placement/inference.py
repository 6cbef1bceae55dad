"""Infer where adapters go in a model that is not in the table.

The layers are the items of the innermost list that have attention: all of them or, in a hybrid,
some of them. The rules for a layer use what transformers have in common:

- The width is the most common input size of its linear modules (queries, keys, values,
  feed-forward).
- A sub-layer ends in the one linear module of that output size that is not a query, key, value or
  gate. The attention is the module with "attention" in its name or class; the feed-forward is
  outside it.
- PyTorch's own multi-head attention counts as one linear module, and a mixture of experts as a
  whole.
- A layer of a hybrid without attention has its feed-forward where the layers with attention have
  theirs.

Where the rules do not select exactly one module, nothing is selected, and the list of layers is
reported with the reason.

The rules find projections, never dropouts, because a module tree does not tell which dropout
follows which projection. In training the adapter then comes before the dropout. In evaluation there
is no difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from statistics import mode

from torch import nn
from transformers.utils import logging

from ..method.modules import is_in_any, is_inside
from ..saved.record import fold_indices, full_name
from .table import Layers, SubLayer


logger = logging.get_logger(__name__)

_ATTENTION = re.compile(r"attention|attn|^(att|[sc]a|mh?s?a)$", re.IGNORECASE)
_ATTENTION_CLASS = re.compile(r"(attention|attn)(?!.*(mlp|feedforward|ffn)$)", re.IGNORECASE)
_CROSS_ATTENTION = re.compile(r"cross|enc_?dec|encoder_att|multihead_attn|^ca ", re.IGNORECASE)
_ATTENTION_INPUT = re.compile(
    r"(^|_)(w?[qkv]{1,3}|query|key|value|pos|gate|in)(_|$|\d)|^c_attn$", re.IGNORECASE
)


class UnknownEndError(Exception):
    """The reason why the end of a sub-layer, and so a list of layers, cannot be inferred."""


def infer_layers(
    modules: Mapping[str, nn.Module],
    positions: Collection[str],
    is_included: Callable[[str], bool],
) -> tuple[Layers, dict[str, str]]:
    """Return the sub-layers of all layers, and why lists with attention cannot be inferred.

    A layer without any included module is left out.

    Args:
        modules: The modules to look at, by name, outer ones first.
        positions: The positions of the sub-layers to find.
        is_included: Whether a module of this name may be adapted.
    """
    attentions = find_attentions(modules)
    inferred: Layers = {}
    unknown: dict[str, str] = {}
    for stack, layers in _find_lists(modules, attentions, is_included).items():
        try:
            sub_layers = _infer_list(layers, positions)
        except UnknownEndError as reason:
            unknown[stack] = str(reason)
            continue
        for index, ends in sub_layers.items():
            inferred[stack, index] = list(ends.items())
    layers_with_ends = [full_name(*layer) for layer in inferred]
    for name, stack in attentions.items():
        is_needed = "cross_attention" in positions or not _is_cross(name, modules[name])
        if is_needed and is_included(name) and not is_in_any(name, [*layers_with_ends, *unknown]):
            unknown[stack] = f"{name} is not in a layer that has a feed-forward as well"
    return inferred, unknown


def find_attentions(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the innermost attentions in lists, in the model's order, with the name of their list.

    An attention has linear modules. A module that is called attention but has convolutions, or the
    weights of a norm, does not count.
    """
    around_linear: set[str] = set()
    for name, module in modules.items():
        if _sizes_of(module):
            around_linear.update(_outer_names(name))
    attentions: dict[str, str] = {}
    innermost = ""
    # Backwards, what is inside a module comes before it.
    for name in reversed(list(modules)):
        holds_attention = innermost and is_inside(innermost, name)
        if name not in around_linear or holds_attention or not _is_attention(name, modules[name]):
            continue
        innermost = name
        for outer in _outer_names(name):
            if outer in modules and _is_list(modules[outer]):
                attentions[name] = outer
    return dict(reversed(attentions.items()))


def is_attention_input(name: str) -> bool:
    """Return whether a module is called as the queries, keys or values of an attention are."""
    return bool(_ATTENTION_INPUT.search(name.rpartition(".")[2]))


def log_inferred(inferred: Layers) -> None:
    """Log in one line which places were inferred, once for all models with the same ones."""
    indices: dict[tuple[str, str], list[int]] = {}
    for (stack, index), sub_layers in inferred.items():
        ends = [f"{position} after {end.output}" for position, end in sub_layers]
        indices.setdefault((stack, ", ".join(ends) or "none"), []).append(index)
    layers = []
    for (stack, summary), numbers in indices.items():
        layers.append(f"{stack}.{fold_indices(numbers)} {summary}")
    logger.warning_once(
        "The table of architectures does not describe these layers, so the places of the adapters "
        f"are inferred: {'; '.join(layers)}. To choose others, give target_modules."
    )


def _find_lists(
    modules: Mapping[str, nn.Module],
    attentions: Collection[str],
    is_included: Callable[[str], bool],
) -> dict[str, dict[int, _Layer]]:
    """Return the lists of layers with attention, by name, with their included layers by index.

    No list is inside another one. Inner lists are preferred, and lists with attention in each
    layer, because T5 keeps the sub-layers of each layer in a list as well.
    """
    stacks: set[str] = set()
    for attention in attentions:
        for name in _outer_names(attention):
            if name in modules and _is_list(modules[name]):
                stacks.add(name)
    complete: dict[str, dict[int, _Layer]] = {}
    hybrid: dict[str, dict[int, _Layer]] = {}
    in_order = [name for name in modules if name in stacks]
    for stack in sorted(in_order, key=lambda name: name.count("."), reverse=True):
        layers = _included_layers(stack, modules, is_included)
        have_attention = [bool(layer.attentions) for layer in layers.values()]
        if have_attention and all(have_attention):
            complete[stack] = layers
        elif any(have_attention):
            hybrid[stack] = layers
    lists: dict[str, dict[int, _Layer]] = {}
    for stack, layers in [*complete.items(), *hybrid.items()]:
        if not any(is_inside(stack, name) or is_inside(name, stack) for name in lists):
            lists[stack] = layers
    return lists


def _included_layers(
    stack: str, modules: Mapping[str, nn.Module], is_included: Callable[[str], bool]
) -> dict[int, _Layer]:
    """Return the layers of a list that have included modules, by index."""
    layers = {}
    for index in range(len(modules[stack])):  # type: ignore[arg-type]
        key = f"{stack}.{index}"
        if key in modules:  # a layer that is in the list several times has one name
            layer = _Layer(key, modules, is_included)
            if layer.is_included:
                layers[index] = layer
    return layers


def _infer_list(
    layers: Mapping[int, _Layer], positions: Collection[str]
) -> dict[int, dict[str, SubLayer]]:
    """Return the sub-layers of each layer of a list, by its index and their position."""
    sub_layers: dict[int, dict[str, SubLayer]] = {index: {} for index in layers}
    parts: set[str] = set()
    for index, layer in layers.items():
        for position in positions:
            end = layer.find_end(position) if layer.attentions else None
            if end is not None:
                sub_layers[index][position] = end
            if end is not None and position == "feed_forward":
                parts.add(end.output.partition(".")[0])
    for index, layer in layers.items():
        if parts and layer.sizes and not layer.attentions:
            end = layer.find_end("feed_forward", parts)
            if end is not None:
                sub_layers[index]["feed_forward"] = end
    return sub_layers


class _Layer:
    """A layer whose sub-layers are inferred. The names of modules are relative to the layer.

    Attributes:
        sizes: The sizes of each linear module's input and output.
        attentions: The outermost attentions, each with the modules that may be its end.
    """

    def __init__(
        self, key: str, modules: Mapping[str, nn.Module], may_adapt: Callable[[str], bool]
    ) -> None:
        self.key = key
        self._may_adapt = lambda name: may_adapt(f"{key}.{name}")
        self._modules: dict[str, nn.Module] = {}
        self.sizes: dict[str, tuple[int, int]] = {}
        mixtures: list[str] = []
        whole = None
        for full, module in modules.items():
            name = full.removeprefix(f"{key}.")
            # PyTorch's own attention reads the weights of the modules inside it.
            if name == full or (whole is not None and is_inside(name, whole)):
                continue
            self._modules[name] = module
            if isinstance(module, nn.MultiheadAttention):
                whole = name
            if sizes := _sizes_of(module):
                self.sizes[name] = sizes
            if name.endswith(".experts"):
                mixtures.append(name.rpartition(".")[0])
        self._projections: list[str] = []
        self.attentions: dict[str, list[str]] = {}
        if self.sizes:
            width = mode(inputs for inputs, _ in self.sizes.values())
            self._projections = [name for name, (_, size) in self.sizes.items() if size == width]
            self.attentions = self._find_attentions()
        elsewhere = [*self.attentions, *mixtures]
        outside = [name for name in self._projections if not is_in_any(name, elsewhere)]
        self._feed_forward = mixtures + outside

    @property
    def is_included(self) -> bool:
        """Whether any of the layer's linear modules may be adapted."""
        return not self.sizes or any(map(self._may_adapt, self.sizes))

    def find_end(self, position: str, parts: Collection[str] = ()) -> SubLayer | None:
        """Return the end of the sub-layer at a position, by default in any part of the layer; None
        if there is no such sub-layer to adapt.

        Raises:
            UnknownEndError: Several modules may be its end, or none.
        """
        if position == "feed_forward":
            of_sub_layers = [self._feed_forward]
        else:
            of_sub_layers = []
            for name, ends in self.attentions.items():
                if _is_cross(name, self._modules[name]) == (position == "cross_attention"):
                    of_sub_layers.append(ends)
        candidates = []
        if all(of_sub_layers):  # otherwise the other attentions are not the whole position
            candidates = [name for ends in of_sub_layers for name in ends]
        if parts:
            candidates = [name for name in candidates if name.partition(".")[0] in parts]
        ends = list(filter(self._may_adapt, candidates))
        if len(ends) == 1:
            return SubLayer(ends[0], None if ends[0] in self.sizes else self._projections[0])
        is_excluded = candidates and not ends
        if is_excluded or not of_sub_layers:
            return None
        names = f": {', '.join(ends)}" if ends else ""
        raise UnknownEndError(
            f"for the {position} of {self.key} there are {len(ends)} candidates{names}"
        )

    def _find_attentions(self) -> dict[str, list[str]]:
        """Return the outermost attentions, each with the projections in it that may be its end."""
        attentions: dict[str, list[str]] = {}
        attention = ""
        for name, module in self._modules.items():
            # What is inside an attention comes right after it.
            if not attention or not is_inside(name, attention):
                has_linear = any(is_inside(linear, name) for linear in self.sizes)
                if not has_linear or not _is_attention(name, module):
                    continue
                attention = name
                attentions[attention] = []
            parts = name.split(".")[attention.count(".") :]
            if name in self._projections and not any(map(_ATTENTION_INPUT.search, parts)):
                attentions[attention].append(name)
        return attentions


def _is_attention(name: str, module: nn.Module) -> bool:
    """Return whether a module is an attention by its name or class, and not a norm beside one."""
    last_part = name.rpartition(".")[2]
    is_named_so = _ATTENTION.search(last_part) or _ATTENTION_CLASS.search(type(module).__name__)
    return bool(is_named_so) and "norm" not in last_part.lower()


def _is_cross(name: str, module: nn.Module) -> bool:
    """Return whether an attention is to other hidden states than the layer's own."""
    return bool(_CROSS_ATTENTION.search(f"{name.rpartition('.')[2]} {type(module).__name__}"))


def _sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """Return the sizes of input and output of a linear module: PyTorch's, Conv1D, a quantized one
    or an attention of PyTorch.
    """
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim, module.embed_dim
    for input_name, output_name in (("in_features", "out_features"), ("nx", "nf")):
        inputs, outputs = getattr(module, input_name, None), getattr(module, output_name, None)
        if isinstance(inputs, int) and isinstance(outputs, int):
            return inputs, outputs
    return None


def _outer_names(name: str) -> list[str]:
    """Return the names of the modules around a module, the outermost first."""
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential))
