"""Infer from the module tree where the sub-layers end in an architecture that is not in the table.

The rules use what transformers have in common:

- The layers are the innermost list of equal modules with attention in each.
- The width of a layer is the most common input size of its linear modules (queries, keys, values, feed-forward).
- A sub-layer ends in the one linear module of that output size that is not a query, key, value or gate: for the
  attention inside the module with "attention" in its name or class, for the feed-forward outside it.
- PyTorch's own multi-head attention and a mixture of experts count as a whole; PyTorch's own layers end in dropouts.

The rules find projections, never dropouts, because a module tree does not tell which dropout follows which projection.
In training the adapter then comes before the dropout; in evaluation there is no difference.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache

from torch import nn

from ..layer import is_inside
from .architectures import SubLayer


logger = logging.getLogger(__name__)

_ATTENTION = re.compile(r"attention|attn|^(att|[sc]a|mh?s?a)$", re.IGNORECASE)
_CROSS_ATTENTION = re.compile(r"cross|enc_?dec|encoder_att|multihead_attn|^ca ", re.IGNORECASE)
_ATTENTION_INPUT = re.compile(r"(^|_)(w?[qkv]{1,3}|query|key|value|pos|gate|in)(_|$|\d)|^c_attn$", re.IGNORECASE)

# What PyTorch's own layers call last before each skip connection.
_TORCH_LAYERS: dict[type[nn.Module], dict[str, str]] = {
    nn.TransformerEncoderLayer: {"attention": "dropout1", "feed_forward": "dropout2"},
    nn.TransformerDecoderLayer: {"attention": "dropout1", "cross_attention": "dropout2", "feed_forward": "dropout3"},
}


def infer_layers(
    modules: Mapping[str, nn.Module], positions: Collection[str]
) -> dict[tuple[str, int], dict[str, SubLayer]]:
    """Return the sub-layers of every layer in a module tree, and log once in one line what was chosen.

    Args:
        modules: The modules by name, in the model's order.
        positions: Which of "attention", "feed_forward" and "cross_attention" to look for.

    Returns:
        The sub-layers by position, for each name of a list of layers and index in it; empty if no list of equal
        modules has attention in each.

    Raises:
        ValueError: A layer has no candidate or several candidates for a position; the message names them.
    """
    found: dict[tuple[str, int], dict[str, SubLayer]] = {}
    for key, size in sorted(_equal_lists(modules), key=lambda pair: -pair[0].count(".")):
        if not any(is_inside(stack, key) for stack, _ in found):
            layers = [_Layer(f"{key}.{index}", modules) for index in range(size)]
            if all(layer.attentions for layer in layers):
                found |= {(key, index): layer.sub_layers(positions) for index, layer in enumerate(layers)}
    if found:
        _log_once(_summary(found))
    return found


def fold_indices(indices: Iterable[int]) -> str:
    """Return ascending indices with consecutive ones folded: `0-3,5`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], index]
        else:
            runs.append([index])
    return ",".join("-".join(map(str, run)) for run in runs)


class _Layer:
    """A layer: the ends of its attentions and of its feed-forward, of which there should be one each."""

    def __init__(self, key: str, modules: Mapping[str, nn.Module]) -> None:
        self.key = key
        self.modules = {name[len(key) + 1 :]: module for name, module in modules.items() if name.startswith(f"{key}.")}
        sizes = {name: size for name, module in self.modules.items() if (size := _sizes(module))}
        width = Counter(inputs for inputs, _ in sizes.values()).most_common(1)
        self.projections = [name for name, (_, outputs) in sizes.items() if width and outputs == width[0][0]]
        self.attentions = dict(self._attentions())
        self.torch_ends = _TORCH_LAYERS.get(type(modules[key]))

    def sub_layers(self, positions: Collection[str]) -> dict[str, SubLayer]:
        """Return the end of the sub-layer at each position; cross-attention is left out if there is none."""
        if self.torch_ends is not None:
            return {at: SubLayer(end, "linear2") for at, end in self.torch_ends.items() if at in positions}
        result = {}
        for position in positions:
            ends = self._ends(position)
            if len(ends) == 1:
                tells_width = ends[0] in self.projections or self._is_torch_attention(ends[0])
                result[position] = SubLayer(ends[0], None if tells_width else self.projections[0])
            elif ends or position != "cross_attention":
                raise ValueError(self._ambiguous(position, ends))
        return result

    def _attentions(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the outermost module of each attention, with the modules that may be its end."""
        outermost = ""
        for name, module in self.modules.items():
            own_name = name.rpartition(".")[2]
            is_named_so = _ATTENTION.search(own_name) or re.search(
                "attention|attn", type(module).__name__, re.IGNORECASE
            )
            if is_named_so and not (outermost and is_inside(name, outermost)):
                inside = [inner for inner in self.modules if is_inside(inner, name)]
                if any(inner in self.projections for inner in inside):
                    outermost = name
                    yield name, [inner for inner in inside if self._may_end_attention(inner, name.count("."))]

    def _may_end_attention(self, name: str, depth: int) -> bool:
        if self._is_torch_attention(name):
            return True
        parent, _, own_name = name.rpartition(".")
        return (
            name in self.projections
            and not any(_ATTENTION_INPUT.search(part) for part in name.split(".")[depth:])
            and not self._is_torch_attention(parent)
            and not (parent and _is_read_not_called(self.modules[parent], own_name))
        )

    def _is_torch_attention(self, name: str) -> bool:
        return isinstance(self.modules.get(name), nn.MultiheadAttention)

    def _ends(self, position: str) -> list[str]:
        if position != "feed_forward":
            wanted = position == "cross_attention"
            return [end for name, ends in self.attentions.items() if self._is_cross(name) == wanted for end in ends]
        mixtures = [name.rpartition(".")[0] for name in self.modules if name.endswith(".experts")]
        elsewhere = [*self.attentions, *mixtures]
        return mixtures + [name for name in self.projections if not any(is_inside(name, outer) for outer in elsewhere)]

    def _is_cross(self, name: str) -> bool:
        return bool(_CROSS_ATTENTION.search(f"{name.rpartition('.')[2]} {type(self.modules[name]).__name__}"))

    def _ambiguous(self, position: str, ends: list[str]) -> str:
        example = [found[0] for other in ("attention", "feed_forward") if (found := self._ends(other))]
        return (
            "In an architecture that is not in the table, each sub-layer must end in one module that can be "
            f"distinguished from the others; for the {position} of {self.key} there are {len(ends)} candidates"
            f"{': ' if ends else ''}{', '.join(ends)}. Name the modules whose output meets the skip connection, for "
            f"example target_modules={example}."
        )


def _equal_lists(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, int]]:
    for key, module in modules.items():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len({type(layer) for layer in module}) == 1:
            yield key, len(module)


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return input and output size of a linear module: PyTorch's, transformers' Conv1D, or a quantized one."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        inputs, outputs = (getattr(module, name, None) for name in names)
        if isinstance(inputs, int) and isinstance(outputs, int):
            return inputs, outputs
    return None


def _is_read_not_called(parent: nn.Module, name: str) -> bool:
    """Return whether a module reads its child's weight instead of calling it (WavLM), judging by its source."""
    try:
        source = inspect.getsource(type(parent))
    except (OSError, TypeError):
        return False
    return f"self.{name}.weight" in source and f"self.{name}(" not in source


def _summary(found: Mapping[tuple[str, int], Mapping[str, SubLayer]]) -> str:
    layers: dict[tuple[str, str], list[int]] = {}
    for (stack, index), sub_layers in found.items():
        ends = ", ".join(f"{position} after {sub_layer.output}" for position, sub_layer in sub_layers.items())
        layers.setdefault((stack, ends), []).append(index)
    return "; ".join(f"{stack}.{fold_indices(indices)} {ends}" for (stack, ends), indices in layers.items())


@cache
def _log_once(summary: str) -> None:
    logger.warning(
        "The table of architectures does not describe these layers, so the places of the adapters are inferred: %s. "
        "To choose others, give target_modules.",
        summary,
    )
