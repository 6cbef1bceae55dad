"""The ladder: a narrow network beside a frozen encoder, which reads its hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers.activations import ACT2FN

from ..config import HoulsbyConfig
from ..errors import AdapterError
from .bottleneck import draw, to_weight
from .tuner_layer import ModelState


# The width of an attention head, where it divides the ladder's width.
_HEAD_WIDTH = 32
# The width inside of the ladder's bottlenecks, relative to the ladder's.
_INNER = 2
# Masks that are added to the attention's scores have -10,000 or less for padding.
_LEAST_ADDED = -1_000


class LadderLayer(nn.Module):
    """One layer of a ladder: it reads hidden states, then attends, then applies a bottleneck.

    With s the state of the layer below, x the normalized hidden states and g = sigmoid(gate), which
    is one number and 0.5 at first:

        s = g s + (1 - g) read_proj(x), without the first term in the lowest layer
        s = s + attention_out(attention(attention_norm(s)))
        s = s + up_proj(activation(down_proj(bottleneck_norm(s))))

    `attention_in` computes the queries, then the keys, then the values, each of width r. There are
    r / 32 heads or, where r is no multiple of their number, the largest smaller number of heads.
    `down_proj` has 2r outputs. Norms have PyTorch's epsilon of 1e-5 and trained weights.

    Args:
        config: `activation`, and the `dropout` on both branches, are read.
        width: Size d of the hidden states.
        r: Size of the ladder's own state.
        is_lowest: Whether there is no layer below, and thus no gate.
    """

    def __init__(self, config: HoulsbyConfig, width: int, r: int, is_lowest: bool) -> None:
        super().__init__()
        heads = range(1, max(1, r // _HEAD_WIDTH) + 1)
        self.heads = max(number for number in heads if r % number == 0)
        self.read_proj = nn.Linear(width, r)
        self.gate = None if is_lowest else nn.Parameter(torch.zeros(1))
        self.attention_norm = nn.LayerNorm(r)
        self.attention_in = nn.Linear(r, 3 * r)
        self.attention_out = nn.Linear(r, r)
        self.bottleneck_norm = nn.LayerNorm(r)
        self.down_proj = nn.Linear(r, _INNER * r)
        self.activation = ACT2FN[config.activation]
        self.up_proj = nn.Linear(_INNER * r, r)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, state: torch.Tensor | None, hidden: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the ladder's next state, `(rows, tokens, r)`.

        Args:
            state: The state of the layer below; None in the lowest one.
            hidden: Normalized hidden states of the base model, `(rows, tokens, d)`.
            mask: True for each token that is no padding, `(rows, 1, 1, tokens)`.
        """
        reading = self.read_proj(hidden)
        if self.gate is not None and state is not None:
            gate = self.gate.sigmoid().to(reading.dtype)  # under autocast, another one
            reading = torch.lerp(reading, state, gate)
        state = reading
        parts = self.attention_in(self.attention_norm(state)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, mask)
        state = state + self.dropout(self.attention_out(attended.transpose(1, 2).flatten(2)))
        inner = self.activation(self.down_proj(self.bottleneck_norm(state)))
        state = state + self.dropout(self.up_proj(inner))
        return state


class Ladder(nn.Module):
    """A narrow transformer beside an encoder, whose last state is added at the encoder's end.

    Side tuning (Sung et al. 2022, arXiv 2206.06522): beside each layer of the encoder, a layer of
    width r reads the hidden states that enter the encoder's layer. They are normalized without
    weights, with an epsilon of 1e-5 and in float32 at least. No gradient flows into the encoder,
    and its hidden states do not depend on the ladder. `up_proj` takes the last state to width d.

    Args:
        config: `activation`, `dropout` inside of the ladder, `init_std` and `init_weights` of the
            projection to the hidden states are read. The other weights start as PyTorch's linear
            layers do.
        width: Size d of the hidden states.
        layers: Indices of the encoder's layers whose input is read.
        r: Size of the ladder's own state. Default: the configuration's.
    """

    def __init__(
        self, config: HoulsbyConfig, width: int, layers: Iterable[int], r: int | None = None
    ) -> None:
        super().__init__()
        r = r or config.r
        self.layers = nn.ModuleDict()
        for index in layers:
            self.layers[str(index)] = LadderLayer(config, width, r, is_lowest=not self.layers)
        self.up_proj = nn.Linear(r, width)
        if config.init_weights:
            draw(self.up_proj, config.init_std)

    def forward(self, readings: Readings) -> torch.Tensor:
        """Return what is added to the encoder's end, `(rows, tokens, d)`.

        Raises:
            AdapterError: Not all layers that the ladder reads have run.
        """
        state = None
        for index, layer in self.layers.items():
            weight: Any = layer.read_proj.weight  # type: ignore[union-attr]
            hidden = readings.states.get(int(index))
            if hidden is None:
                raise AdapterError(
                    "A ladder reads the input of the encoder's layers, so all of them must run; "
                    f"layer {index} has not. Call the model as a whole."
                )
            state = layer(state, to_weight(hidden, weight), readings.mask)
        return self.up_proj(state)  # type: ignore[no-any-return]


class Readings:
    """What ladders read in one pass.

    Attributes:
        states: By the index of a layer: what enters it, normalized, `(rows, tokens, d)`.
        mask: True for each token that is no padding, `(rows, 1, 1, tokens)`; None if all are none.
    """

    def __init__(self, states: Mapping[int, torch.Tensor], mask: torch.Tensor | None) -> None:
        self.states = states
        self.mask = mask

    def have(self, rows: int) -> bool:
        """Return whether all hidden states have this number of rows."""
        return all(len(state) == rows for state in self.states.values())

    def select(self, rows: torch.Tensor, number: int, fan_out: Any) -> Readings:
        """Return the readings of some of the rows of a mixed batch.

        Args:
            rows: The rows.
            number: How many the batch has.
            fan_out: Tells the text of each row, of which hidden states may have only one row each.
        """
        mask = None if self.mask is None else self.mask.index_select(0, rows)
        selected = {}
        for index, state in self.states.items():
            sources = rows if len(state) == number else fan_out.texts_of(rows)
            is_whole = len(state) == len(sources) == 1
            selected[index] = state if is_whole else state.index_select(0, sources)
        return Readings(selected, mask)


class Rungs:
    """What the layers of an encoder have read in a pass, for the ladders at its end, by thread.

    While there are ladders, the encoder's first layer tells the mask, and the encoder trains
    without dropout if ladders alone are active: its dropout would only blur what they read.

    Args:
        encoder: The encoder.
        first_layer: The first of its layers. It is called in every pass, whoever calls the encoder.
        end: The `HoulsbyLayer` at its end, where the ladders are.
    """

    def __init__(self, encoder: nn.Module, first_layer: nn.Module, end: Any) -> None:
        self._encoder = encoder
        self._first_layer = first_layer
        self._end = end
        self._state: ModelState = end.state
        self._hook: RemovableHandle | None = None
        self._states: dict[int, dict[int, torch.Tensor]] = {}
        self._masks: dict[int, torch.Tensor | None] = {}

    def hold(self) -> None:
        """Follow the encoder until `release`, and the adapters that are active now."""
        if self._hook is None:
            # Whether it would be in training mode without ladders.
            self._is_training = self._encoder.training
            self._encoder.train = self._train  # type: ignore[method-assign]
            self._hook = self._first_layer.register_forward_pre_hook(
                self._enter_mask, with_kwargs=True
            )
        names = self._end.active_adapters
        has_ladders_alone = names and all(name in self._end.houlsby_ladder for name in names)
        self._set_mode(self._is_training and not has_ladders_alone)

    def release(self) -> None:
        """Leave the encoder to itself."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            del self._encoder.train
            self._set_mode(self._is_training)

    def _train(self, mode: bool = True) -> nn.Module:
        """Set the training mode in place of the encoder."""
        self._is_training = mode
        type(self._encoder).train(self._encoder, mode)
        self.hold()
        return self._encoder

    def _set_mode(self, mode: bool) -> None:
        """Set whether the encoder trains, but for the ladders in it."""
        if self._encoder.training == mode:  # its parts may have modes of their own
            return
        ladders = self._end.houlsby_ladder.values()
        modes = [ladder.training for ladder in ladders]
        type(self._encoder).train(self._encoder, mode)
        for ladder, mode_of_ladder in zip(ladders, modes, strict=True):
            ladder.train(mode_of_ladder)

    def enter(self, index: int, hidden: torch.Tensor) -> None:
        """Keep what enters a layer of the encoder."""
        self._states.setdefault(self._state.thread, {})[index] = hidden.detach()

    def _enter_mask(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep which tokens are no padding: those that any token attends to in the first layer.

        Its mask is None, `(rows, tokens)`, or `(rows, heads, tokens, tokens)` with 1 in place of
        what is the same for all. What is added to the attention's scores is 0 for a token that
        counts, and other masks are 0 for one that does not.
        """
        if self._end.disable_adapters or not self._end.active_ladders():
            return
        if layer.training and getattr(layer, "gradient_checkpointing", False):
            raise AdapterError(
                "With gradient checkpointing, a ladder cannot be active together with adapters of "
                "other kinds: the backward pass computes the encoder's last layer again, without "
                "what the ladder has read. Activate one of them, or train without checkpointing."
            )
        # Where it has no name, it follows the hidden states.
        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        if mask is not None:
            is_added = mask.is_floating_point() and mask.dim() > 2
            mask = mask > _LEAST_ADDED if is_added else mask != 0
            while mask.dim() > 2:
                mask = mask.any(1)
        self._masks[self._state.thread] = mask

    def leave(self) -> Readings:
        """Return what has been read, and release it."""
        states = {}
        for index, state in self._states.pop(self._state.thread, {}).items():
            wide = state.to(torch.promote_types(state.dtype, torch.float32))
            states[index] = F.layer_norm(wide, wide.shape[-1:])
        if self._state.thread not in self._masks:
            raise AdapterError(
                "A ladder must be told which tokens are padding, by the encoder's first layer, "
                "which has not run. Call the model as a whole."
            )
        mask = self._masks.pop(self._state.thread)
        return Readings(states, None if mask is None else mask[:, None, None, :])


def add_branches(
    hidden: torch.Tensor,
    ladders: Mapping[str, nn.Module],
    names: Sequence[str],
    readings: Readings,
    fan_out: Any,
) -> torch.Tensor:
    """Add to each row of a mixed batch the branch of its ladder, if it has one.

    Args:
        hidden: The end of the encoder, `(rows, tokens, d)`.
        ladders: The ladders by the names of their adapters.
        names: The adapter of each row.
        readings: What ladders read: with a row per name, or one per text.
        fan_out: Tells the text of each row, if texts have several adapters each.
    """
    branches: list[torch.Tensor] = []
    sources: list[int] = []
    for name, ladder in ladders.items():
        rows = [row for row, name_of_row in enumerate(names) if name_of_row == name]
        index = torch.tensor(rows, device=hidden.device)
        branches.append(ladder(readings.select(index, len(names), fan_out)))
        sources += rows
    total = torch.cat(branches).to(hidden)
    return hidden.index_add(0, torch.tensor(sources, device=hidden.device), total)
