"""`InferredLayer`: where the sub-layers of one layer end, by its modules alone.

The rules use what transformers have in common:

- The width of a layer is the most common input size of its linear modules (queries, keys, values,
  feed-forward).
- A sub-layer ends in the one linear module of that output size that is not a query, key, value or
  gate. The attention is the module with "attention" in its name or class; the feed-forward is
  outside it.
- If several modules may end a feed-forward, it is the one that reads what another linear module
  outside the attention writes. In a module whose projections are all square, it is the one that is
  not named as an input.
- A layer of a hybrid without attention has its feed-forward where the layers with attention have
  theirs.
- PyTorch's own multi-head attention and a mixture of experts count as a whole. PyTorch's own layers
  end in dropouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import mode

from torch import nn

from ..method.modules import is_in_any, is_inside
from .table import SubLayer


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


class UnknownEndError(Exception):
    """The reason why the end of a sub-layer, and so a list of layers, cannot be inferred."""


class InferredLayer:
    """A layer whose sub-layers are inferred. The names of modules are relative to the layer.

    Attributes:
        key: The full name of the layer.
        modules: All modules in it, by name.
        input_sizes: The size of each linear module's input.
        output_sizes: The size of each linear module's output.
        mixtures: The mixtures of experts.
        projections: The linear modules that write the layer's width.
        attentions: The outermost attentions, each with the modules that may be its end.
    """

    def __init__(
        self, key: str, modules: Mapping[str, nn.Module], may_adapt: Callable[[str], bool]
    ) -> None:
        self.key = key
        self.modules: dict[str, nn.Module] = {}
        self.input_sizes: dict[str, int] = {}
        self.output_sizes: dict[str, int] = {}
        self.mixtures: list[str] = []
        for name, module in modules.items():
            if name.startswith(f"{key}."):
                self._add_module(name.removeprefix(f"{key}."), module)
        self._may_adapt = lambda name: may_adapt(f"{key}.{name}")
        self._torch_ends = _TORCH_LAYERS.get(type(modules[key]))
        self.projections: list[str] = []
        self.attentions: dict[str, list[str]] = {}
        if self.input_sizes:
            self._find_projections()

    @property
    def is_included(self) -> bool:
        """Whether any of the layer's linear modules may be adapted."""
        return not self.input_sizes or any(map(self._may_adapt, self.input_sizes))

    def sub_layers(self, positions: Collection[str]) -> dict[str, SubLayer]:
        """Return the sub-layers at these positions, without those that the layer does not have."""
        sub_layers = {}
        for position in positions:
            if self._torch_ends is None:
                end = self._select_end(position, self._candidates(position))
            elif position in self._torch_ends:
                end = SubLayer(self._torch_ends[position], "linear2")
            else:
                end = None
            if end is not None:
                sub_layers[position] = end
        return sub_layers

    def feed_forward_in(self, parts: Collection[str]) -> dict[str, SubLayer]:
        """Return the feed-forward of a layer without attention, by its position.

        It is in one of these parts of the layer, as in the layers with attention.
        """
        parts_of_layer = set(map(first_part, [*self.input_sizes, *self.mixtures]))
        if parts_of_layer.isdisjoint(parts):
            if parts and self.input_sizes:
                example, *_ = self.input_sizes
                raise UnknownEndError(
                    f"{self.key} has linear modules, such as {example}, but neither an attention "
                    f"nor a part {' or '.join(sorted(parts))}, as the layers with attention have"
                )
            return {}
        candidates = [name for name in self._feed_forward_ends() if first_part(name) in parts]
        end = self._select_end("feed_forward", candidates)
        return {} if end is None else {"feed_forward": end}

    def _add_module(self, name: str, module: nn.Module) -> None:
        self.modules[name] = module
        if sizes := sizes_of(module):
            self.input_sizes[name], self.output_sizes[name] = sizes
        if name.endswith(".experts"):
            self.mixtures.append(_parent(name))

    def _find_projections(self) -> None:
        """Set the projections, and the attentions with their ends among these."""
        self.projections = self._writers(mode(self.input_sizes.values()))
        self.attentions = self._find_attentions(self.projections)

    def _writers(self, width: int) -> list[str]:
        """Return the linear modules whose outputs have this size."""
        return [name for name, size in self.output_sizes.items() if size == width]

    def _find_attentions(self, projections: Collection[str]) -> dict[str, list[str]]:
        """Return the outermost attentions, each with the projections in it that may be its end."""
        attentions: dict[str, list[str]] = {}
        attention = ""
        for name in self.modules:
            # What is inside an attention comes right after it.
            if not attention or not is_inside(name, attention):
                if not self._is_attention(name):
                    continue
                attention = name
                attentions[attention] = []
            parts = name.split(".")[attention.count(".") :]
            is_input = any(map(_ATTENTION_INPUT.search, parts))
            is_output = name in projections and not is_input and self._is_called(name)
            if is_output or self._is_whole(name):
                attentions[attention].append(name)
        return attentions

    def _is_attention(self, name: str) -> bool:
        """Return whether a module is an attention that is or has a linear module."""
        has_linear = any(is_inside(linear, name) for linear in self.input_sizes)
        return has_linear and is_attention(name, self.modules[name])

    def _is_whole(self, name: str) -> bool:
        """Return whether a module is PyTorch's own attention, which counts as a whole."""
        return isinstance(self.modules.get(name), nn.MultiheadAttention)

    def _is_called(self, name: str) -> bool:
        """Return whether a module's parent calls it, instead of only reading its weight."""
        return not self._is_whole(_parent(name))

    def _select_end(self, position: str, candidates: Sequence[str]) -> SubLayer | None:
        """Return the candidate that may be adapted; None if there is no such sub-layer to adapt.

        Raises:
            UnknownEndError: There are several, or none for a sub-layer that every layer has.
        """
        ends = list(filter(self._may_adapt, candidates))
        if len(ends) == 1:
            tells_width = ends[0] in self.projections or self._is_whole(ends[0])
            return SubLayer(ends[0], None if tells_width else self.projections[0])
        is_excluded = candidates and not ends
        is_absent = not candidates and not self._must_have(position)
        if is_excluded or is_absent:
            return None
        names = f": {', '.join(ends)}" if ends else ""
        raise UnknownEndError(
            f"for the {position} of {self.key} there are {len(ends)} candidates{names}"
        )

    def _must_have(self, position: str) -> bool:
        """Return whether the layer must have a sub-layer at a position."""
        has_self_attention = bool(self._attentions_at("attention"))
        return position == "feed_forward" or (position == "attention" and has_self_attention)

    def _candidates(self, position: str) -> list[str]:
        """Return the modules that may be the end of the sub-layer at a position."""
        if position == "feed_forward":
            return self._feed_forward_ends()
        candidates = []
        for name in self._attentions_at(position):
            if not self.attentions[name]:
                return []  # the ends of the other attentions are not the whole position
            candidates += self.attentions[name]
        return candidates

    def _attentions_at(self, position: str) -> list[str]:
        """Return the attentions to other hidden states or, elsewhere, to the layer's own."""
        attentions = []
        for name in self.attentions:
            if is_cross(name, self.modules[name]) == (position == "cross_attention"):
                attentions.append(name)
        return attentions

    def _feed_forward_ends(self) -> list[str]:
        """Return the modules that may be the end of the feed-forward."""
        elsewhere = [*self.attentions, *self.mixtures]
        ends = [name for name in self.projections if not is_in_any(name, elsewhere)]
        if len(ends) > 1:
            ends = self._last_in_feed_forward(ends)
        return self.mixtures + ends

    def _last_in_feed_forward(self, projections: Sequence[str]) -> list[str]:
        """Return the last projections in a feed-forward, as far as they can be told apart."""
        # A norm that has linear modules computes its scales with them.
        projections = [name for name in projections if "norm" not in _parent(name).lower()]
        # A projection of the skip connection reads the layer's input instead.
        fed = list(filter(self._reads_linear, projections))
        if len(fed) > 1 and len(set(map(_parent, fed))) == 1:
            outputs = [name for name in fed if not _FEED_FORWARD_INPUT.search(_last_part(name))]
            return outputs or fed
        return fed or projections

    def _reads_linear(self, name: str) -> bool:
        """Return whether a module reads what another one outside the attentions writes."""
        written = set()
        for writer, size in self.output_sizes.items():
            if writer != name and not is_in_any(writer, self.attentions):
                written.add(size)
        # A module that also writes a gate writes twice as much.
        with_gate = 2 * self.input_sizes[name]
        is_after_gate = with_gate in written and with_gate != self.output_sizes[name]
        return self.input_sizes[name] in written or is_after_gate


def first_part(name: str) -> str:
    return name.partition(".")[0]


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def is_attention(name: str, module: nn.Module) -> bool:
    """Return whether a module is an attention by its name or class, and not a norm beside one."""
    last_part = _last_part(name)
    is_named_so = _ATTENTION.search(last_part) or _ATTENTION_CLASS.search(type(module).__name__)
    return bool(is_named_so) and "norm" not in last_part.lower()


def is_attention_input(name: str) -> bool:
    """Return whether a module is called as the queries, keys or values of an attention are."""
    return bool(_ATTENTION_INPUT.search(_last_part(name)))


def is_cross(name: str, module: nn.Module) -> bool:
    return bool(_CROSS_ATTENTION.search(f"{_last_part(name)} {type(module).__name__}"))


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """Return input and output size of a linear module: PyTorch's, Conv1D or a quantized one."""
    for input_name, output_name in (("in_features", "out_features"), ("nx", "nf")):
        inputs, outputs = getattr(module, input_name, None), getattr(module, output_name, None)
        if isinstance(inputs, int) and isinstance(outputs, int):
            return inputs, outputs
    return None
