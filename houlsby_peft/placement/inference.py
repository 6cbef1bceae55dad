"""Infer from the module tree where the sub-layers end in an architecture that is not in the table.

The rules use what transformers have in common:

- The layers are the items of the innermost list that have attention, each of them or, in a hybrid,
  some of them.
- The width of a layer is the most common input size of its linear modules (queries, keys, values,
  feed-forward). If no attention has an output of this size, the layer changes the width, and what
  its attention writes is the new width.
- A sub-layer ends in the one linear module of that output size that is not a query, key, value or
  gate: for the attention inside the module with "attention" in its name or class, for the
  feed-forward outside it.
- If several modules may end a feed-forward, it is the one that reads what another linear module
  outside the attention has written, and in a module whose projections are all square, the one that
  is not named as an input.
- A layer of a hybrid without attention has its feed-forward where the layers with attention have
  theirs.
- PyTorch's own multi-head attention and a mixture of experts count as a whole; PyTorch's own layers
  end in dropouts.

Where the rules do not select exactly one module, nothing is selected, and the list of layers is
named with the reason.

The rules find projections, never dropouts, because a module tree does not tell which dropout
follows which projection. In training the adapter then comes before the dropout; in evaluation there
is no difference.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

from torch import nn

from ..modules import is_inside
from ..record import fold_indices
from .table import SubLayer


logger = logging.getLogger(__name__)

_ATTENTION = re.compile(r"attention|attn|^(att|[sc]a|mh?s?a)$", re.IGNORECASE)
_ATTENTION_CLASS = re.compile(r"(attention|attn)(?!.*(mlp|feedforward|ffn)$)", re.IGNORECASE)
_CROSS_ATTENTION = re.compile(r"cross|enc_?dec|encoder_att|multihead_attn|^ca ", re.IGNORECASE)
_ATTENTION_INPUT = re.compile(
    r"(^|_)(w?[qkv]{1,3}|query|key|value|pos|gate|in)(_|$|\d)|^c_attn$", re.IGNORECASE
)
_FEED_FORWARD_INPUT = re.compile(r"(^|_)(gate|up|in|(fc|lin|linear|dense)_?1)(_|$)", re.IGNORECASE)

# What PyTorch's own layers call last before each skip connection.
_TORCH_LAYERS: dict[type[nn.Module], dict[str, str]] = {
    nn.TransformerEncoderLayer: {"attention": "dropout1", "feed_forward": "dropout2"},
    nn.TransformerDecoderLayer: {
        "attention": "dropout1",
        "cross_attention": "dropout2",
        "feed_forward": "dropout3",
    },
}


class _Unknown(Exception):
    """Why a list of layers cannot be inferred."""


def infer_layers(
    modules: Mapping[str, nn.Module],
    positions: Collection[str],
    is_included: Callable[[str], bool] = lambda name: True,
) -> tuple[dict[tuple[str, int], dict[str, SubLayer]], dict[str, str]]:
    """Return the sub-layers of every layer by position, and why lists with attention cannot be
    inferred.

    A layer without any module that is included is left out.
    """
    attentions = find_attentions(modules)
    around = {outer for name in attentions for outer in _outer_names(name)}
    lists = [key for key, module in modules.items() if key in around and _is_list(module)]
    found: dict[tuple[str, int], dict[str, SubLayer]] = {}
    unknown: dict[str, str] = {}
    # Lists with attention in each item come first: T5 keeps the sub-layers of each layer in a list
    # as well.
    for is_hybrid in (False, True):
        for key in sorted(lists, key=lambda key: -key.count(".")):  # the innermost first
            seen = {*(stack for stack, _ in found), *unknown}
            if any(
                is_inside(stack, key) or (is_hybrid and is_inside(key, stack)) for stack in seen
            ):
                continue
            layers = {
                index: _Layer(f"{key}.{index}", modules, is_included)
                for index in range(len(modules[key]))  # type: ignore[arg-type]
                if f"{key}.{index}"
                in modules  # an item that is in the list several times has one name
            }
            layers = {index: layer for index, layer in layers.items() if layer.is_included}
            number = sum(bool(layer.attentions) for layer in layers.values())
            if number and (number < len(layers)) == is_hybrid:
                try:
                    found |= {
                        (key, index): ends for index, ends in _infer_list(layers, positions).items()
                    }
                except _Unknown as why:
                    unknown[key] = str(why)
    for name, stack in attentions.items():
        is_asked = "cross_attention" in positions or not _is_cross(name, modules[name])
        known = [*(f"{key}.{index}" for key, index in found), *unknown]
        if is_asked and is_included(name) and not any(is_inside(name, key) for key in known):
            unknown[stack] = f"{name} is not in a layer that has a feed-forward as well"
    return found, unknown


def find_attentions(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the attentions in lists, in the model's order: the innermost modules, each with the
    name of its list.

    An attention has linear modules. What is called attention but has convolutions or weights of a
    norm is none.
    """
    holders = {
        outer for name, module in modules.items() if _sizes(module) for outer in _outer_names(name)
    }
    found: dict[str, str] = {}
    innermost = ""
    for name, module in reversed(list(modules.items())):  # what is inside a module comes after it
        if (
            name in holders
            and _is_attention(name, module)
            and not (innermost and is_inside(innermost, name))
        ):
            innermost = name
            if lists := [
                key for key in _outer_names(name) if key in modules and _is_list(modules[key])
            ]:
                found[name] = lists[-1]
    return dict(reversed(found.items()))


def log_inferred(found: Mapping[tuple[str, int], Mapping[str, SubLayer]]) -> None:
    """Log in one line which places were inferred, once for all models in which they are the same."""
    layers: dict[tuple[str, str], list[int]] = {}
    for (stack, index), sub_layers in found.items():
        ends = ", ".join(
            f"{position} after {sub_layer.output}" for position, sub_layer in sub_layers.items()
        )
        layers.setdefault((stack, ends or "none"), []).append(index)
    summary = "; ".join(
        f"{stack}.{fold_indices(indices)} {ends}" for (stack, ends), indices in layers.items()
    )
    log_once(
        "The table of architectures does not describe these layers, so the places of the adapters are inferred: "
        f"{summary}. To choose others, give target_modules."
    )


@cache
def log_once(message: str) -> None:
    """Log a warning, each message once in a process."""
    logger.warning(message)


class _Layer:
    """A layer: the ends of its attentions and of its feed-forward, of which there should be one
    each.
    """

    def __init__(
        self, key: str, modules: Mapping[str, nn.Module], may_adapt: Callable[[str], bool]
    ) -> None:
        self.key = key
        self.modules = {
            name[len(key) + 1 :]: module
            for name, module in modules.items()
            if name.startswith(f"{key}.")
        }
        self.sizes = {
            name: size for name, module in self.modules.items() if (size := _sizes(module))
        }
        self.may_adapt = lambda name: may_adapt(f"{key}.{name}")
        self.is_included = any(map(self.may_adapt, self.sizes)) or not self.sizes
        outermost: list[str] = []
        for name, module in self.modules.items():
            is_new = _is_attention(name, module) and not (
                outermost and is_inside(name, outermost[-1])
            )
            if is_new and any(is_inside(inner, name) for inner in self.sizes):
                outermost.append(name)
        width = Counter(inputs for inputs, _ in self.sizes.values()).most_common(1)
        self.projections = [
            name for name, (_, outputs) in self.sizes.items() if width and outputs == width[0][0]
        ]
        self.attentions = {
            name: self._ends_of_attention(name, self.projections) for name in outermost
        }
        if outermost and not any(self.attentions.values()):
            # In a layer that changes the width, the ends have the size of what its attention
            # writes.
            ends = {name: self._ends_of_attention(name, self.sizes) for name in outermost}
            widths = {self.sizes[end][1] for group in ends.values() for end in group}
            if len(widths) == 1:
                self.attentions = ends
                self.projections = [
                    name for name, (_, outputs) in self.sizes.items() if outputs in widths
                ]
        self.torch_ends = _TORCH_LAYERS.get(type(modules[key]))

    def sub_layers(
        self, positions: Collection[str], feed_forwards: Collection[str] = ()
    ) -> dict[str, SubLayer]:
        """Return the end of the sub-layer at each position; positions that the layer does not have
        are left out.

        In a layer without attention, only the parts `feed_forwards` may be its feed-forward.
        """
        if self.torch_ends is not None:
            return {
                at: SubLayer(end, "linear2")
                for at, end in self.torch_ends.items()
                if at in positions
            }
        has_self_attention = any(
            not _is_cross(name, self.modules[name]) for name in self.attentions
        )
        result = {}
        for position in positions:
            every = self._ends(position)
            if position == "feed_forward" and not self.attentions:
                every = [end for end in every if end.partition(".")[0] in feed_forwards]
            ends = [end for end in every if self.may_adapt(end)]
            if len(ends) == 1:
                tells_width = ends[0] in self.projections or self._is_whole(ends[0])
                result[position] = SubLayer(ends[0], None if tells_width else self.projections[0])
            elif every and not ends:
                continue
            elif (
                ends
                or position == "feed_forward"
                or (position == "attention" and has_self_attention)
            ):
                count = f"there are {len(ends)} candidates{': ' if ends else ''}{', '.join(ends)}"
                raise _Unknown(f"for the {position} of {self.key} {count}")
        return result

    def _ends_of_attention(self, attention: str, projections: Collection[str]) -> list[str]:
        """Return the modules that may be the end of an attention, among these projections."""
        ends = []
        for name in self.modules:
            parent, _, own_name = name.rpartition(".")
            parent_class: Any = type(self.modules.get(parent))
            inner_names = name.split(".")[attention.count(".") :]
            may_end = (
                name in projections
                and not any(map(_ATTENTION_INPUT.search, inner_names))
                and not self._is_whole(parent)
                and not _is_read_not_called(parent_class, own_name)
            )
            if is_inside(name, attention) and (may_end or self._is_whole(name)):
                ends.append(name)
        return ends

    def _is_whole(self, name: str) -> bool:
        """Return whether a module is PyTorch's own attention, which counts as a whole."""
        return isinstance(self.modules.get(name), nn.MultiheadAttention)

    def _ends(self, position: str) -> list[str]:
        """Return the modules that may be the end of a sub-layer."""
        if position != "feed_forward":
            is_wanted = position == "cross_attention"
            groups = [
                e
                for name, e in self.attentions.items()
                if _is_cross(name, self.modules[name]) == is_wanted
            ]
            # If one of several attentions has no end, the others are not the whole position.
            return [end for ends in groups for end in ends] if all(groups) else []
        mixtures = [name.rpartition(".")[0] for name in self.modules if name.endswith(".experts")]
        ends = [
            name for name in self.projections if not _is_in_any(name, [*self.attentions, *mixtures])
        ]
        if len(ends) > 1:
            # A norm that has linear modules computes its scales with them.
            ends = [
                name
                for name in ends
                if not any("norm" in part.lower() for part in name.split(".")[:-1])
            ]
            # A projection of the skip connection reads the layer's input, which no linear module of
            # the layer writes.
            outside = [name for name in self.sizes if not _is_in_any(name, self.attentions)]
            fed = []
            for name in ends:
                inputs, width = self.sizes[name]
                written = {self.sizes[other][1] for other in outside if other != name}
                if inputs in written or 2 * inputs in written - {
                    width
                }:  # twice as much if a gate is written with it
                    fed.append(name)
            if len(fed) > 1 and len({name.rpartition(".")[0] for name in fed}) == 1:
                fed = [
                    name for name in fed if not _FEED_FORWARD_INPUT.search(name.rpartition(".")[2])
                ] or fed
            ends = fed or ends
        return mixtures + ends


def _infer_list(
    layers: Mapping[int, _Layer], positions: Collection[str]
) -> dict[int, dict[str, SubLayer]]:
    """Return the sub-layers of each layer of a list."""
    found = {
        index: layer.sub_layers(positions) for index, layer in layers.items() if layer.attentions
    }
    parts: set[str] = set()
    if len(found) < len(layers) and "feed_forward" in positions:
        every = [
            layer.sub_layers(["feed_forward"]) for layer in layers.values() if layer.attentions
        ]
        parts = {
            sub_layer.output.partition(".")[0] for each in every for sub_layer in each.values()
        }
    for index, layer in layers.items():
        if index not in found:
            own = [
                name for name in layer.modules if name in layer.sizes or name.endswith(".experts")
            ]
            has_feed_forward = any(name.partition(".")[0] in parts for name in own)
            if parts and layer.sizes and not has_feed_forward:
                raise _Unknown(
                    f"{layer.key} has linear modules, such as {next(iter(layer.sizes))}, but neither an attention nor "
                    f"a part {' or '.join(sorted(parts))}, as the layers with attention have"
                )
            found[index] = layer.sub_layers(positions, parts) if has_feed_forward else {}
    return dict(sorted(found.items()))


def _outer_names(name: str) -> list[str]:
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]


def _is_in_any(name: str, outer_names: Collection[str]) -> bool:
    return any(is_inside(name, outer) for outer in outer_names)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _is_attention(name: str, module: nn.Module) -> bool:
    """Return whether a module is an attention by its name or class, and not the norm before or
    after one.
    """
    own_name, class_name = name.rpartition(".")[2], type(module).__name__
    is_named_so = _ATTENTION.search(own_name) or _ATTENTION_CLASS.search(class_name)
    return bool(is_named_so) and "norm" not in own_name.lower()


def _is_cross(name: str, module: nn.Module) -> bool:
    return bool(_CROSS_ATTENTION.search(f"{name.rpartition('.')[2]} {type(module).__name__}"))


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return input and output size of a linear module: PyTorch's, transformers' Conv1D, or a
    quantized one.
    """
    for names in (("in_features", "out_features"), ("nx", "nf")):
        inputs, outputs = (getattr(module, name, None) for name in names)
        if isinstance(inputs, int) and isinstance(outputs, int):
            return inputs, outputs
    return None


@cache
def _is_read_not_called(parent: Any, name: str) -> bool:
    """Return whether a module reads its child's weight instead of calling it (WavLM), judging by
    its source.
    """
    try:
        source = inspect.getsource(parent)
    except (OSError, TypeError):
        return False
    return f"self.{name}.weight" in source and f"self.{name}(" not in source
