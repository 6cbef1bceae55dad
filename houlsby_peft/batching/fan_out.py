"""`FanOut`: one text, many tasks. Below the first layer that an adapter changes, each text of a
batch runs once.

To the outside, the model runs on a row per pair of a text and an adapter, so heads, losses and
everything between layers see an ordinary mixed batch. Only a layer that computes the same for all
pairs of a text is narrowed to one row per text, and its output is repeated. Where that cannot be
told of a layer, it runs on all rows, to the same result; so do all layers of a model that
`torch.compile` has compiled.

Ladders change nothing below the end of the encoder. If all adapters are ladders on one adapter
beneath them, or on none, every layer runs once per text, and the last one in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from weakref import ReferenceType, ref

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers import Cache

from ..heads.head import HoulsbyHead
from ..method.layer import HoulsbyLayer
from ..method.tuner_layer import Batch, HoulsbyTunerLayer, batch_of
from .parts import common_adapter, select_rows


# What holds the output of inner modules, which would have one row per text.
_COLLECTED = ("output_attentions", "output_hidden_states", "output_router_logits")


class FanOut:
    """The pairs of texts and adapters of one call. A text without adapters has no row in the
    output.
    """

    def __init__(self, names: Sequence[Sequence[str]]) -> None:
        self.texts = len(names)
        # The adapter and the text of each pair.
        self.names: list[str] = []
        texts: list[int] = []
        for text, names_of_text in enumerate(names):
            self.names += names_of_text
            texts += [text] * len(names_of_text)
        self._text = torch.tensor(texts, dtype=torch.long)
        # Of the texts with adapters: the first pair of each, and of each pair the position of its
        # text among them.
        _, self._position, counts = self._text.unique_consecutive(
            return_inverse=True, return_counts=True
        )
        self._first = counts.cumsum(0) - counts
        # Whether the model collects the outputs of its layers.
        self._is_collected = False
        # The tensors that repeat a row of each text, by their numbers.
        self._repeated: dict[int, ReferenceType[torch.Tensor]] = {}
        # Whether a row that is repeated may be a view of one, which must not change in place.
        self._may_expand = False
        # The arguments with a row per pair of the layer that runs once per text.
        self._arguments: tuple[Any, Any] | None = None

    def texts_of(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return the position of the text of each of these pairs, among the texts with adapters."""
        positions: torch.Tensor = self._position.to(pairs.device)
        return positions[pairs]

    def repeat(self, value: Any) -> Any:
        """Return arguments with a row per pair, from arguments with a row per text."""
        return select_rows(value, self._text, self.texts)

    @contextmanager
    def attach(self, model: nn.Module, batch: Any, batches: Mapping[int, Batch]) -> Iterator[None]:
        """Within this context, repeat the texts that a model is called with, and run its lower
        layers once per text.

        These are all layers until an adapter has changed what the pairs of a text compute. `batch`
        has the pairs. The hooks of other threads' calls do nothing.
        """

        # PyTorch gives no kwargs to another thread's call whose hook is removed meanwhile.
        def repeat_inputs(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
            if is_running():
                return self._repeat_inputs(module, args, kwargs)
            return None

        def start(_: nn.Module, args: Any, kwargs: Any = None) -> Any:
            if not is_running() or batch.is_changed or self._is_collected:
                return None
            return self._narrow(args, kwargs)

        def end(layer: nn.Module, _: Any, output: Any) -> Any:
            if is_running():
                return self._widen(layer, output)
            return None

        def is_running() -> bool:
            return batch_of(batches) is batch

        with ExitStack() as stack:
            hook = model.register_forward_pre_hook(repeat_inputs, with_kwargs=True, prepend=True)
            stack.callback(hook.remove)
            if len(self._first) < len(self.names):
                names = set(self.names)
                layers = [*_find_unchanged_layers(model, names)]
                if ends := [*_find_ends(model, names)]:
                    self._may_expand = True
                    layers += _find_unchanged_parts(ends, names)
                for layer in layers:
                    stack.callback(layer.register_forward_pre_hook(start, with_kwargs=True).remove)
                    stack.callback(layer.register_forward_hook(end, prepend=True).remove)
            yield

    def _repeat_inputs(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the model with a row per pair."""
        if kwargs.get("past_key_values") is not None:
            self.refuse_generation()
        config = getattr(model, "config", None)
        self._is_collected = False
        for name in _COLLECTED:
            option = kwargs.get(name)
            if option or (option is None and getattr(config, name, False)):
                self._is_collected = True
        if getattr(config, "use_cache", False):
            kwargs = {"use_cache": False, **kwargs}
        return self.repeat((args, kwargs))

    def refuse_generation(self) -> NoReturn:
        """Refuse to generate for several adapters of one text."""
        raise ValueError(
            "Several adapters for one text need a model that runs once, and not a generation. "
            "Repeat the text."
        )

    def _narrow(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a layer with a row per text; None if it runs on all rows."""
        if not self._repeats((args, kwargs)):
            return None
        self._arguments = args, kwargs
        return select_rows(self._arguments, self._first, len(self.names))

    def _widen(self, layer: nn.Module, output: Any) -> Any:
        """Return the output of a layer with a row per pair; None if it has run on all rows."""
        if self._arguments is None:
            return None
        (args, kwargs), self._arguments = self._arguments, None
        texts = len(self._first)
        for tensor in _find_tensors(output):
            if tensor is None or tensor.shape[:1] not in ((), (1,), (texts,)):
                return layer.forward(*args, **kwargs)
        if self._may_expand and texts == 1 and isinstance(output, torch.Tensor):
            widened: Any = output.expand(len(self.names), *output.shape[1:])
        else:
            widened = select_rows(output, self._position, texts)
        for tensor in _find_tensors(widened):
            self._note(tensor)
        return widened

    def _note(self, tensor: torch.Tensor | None) -> None:
        """Remember a tensor that repeats a row of each text."""
        if tensor is not None:
            self._repeated[id(tensor)] = ref(tensor)

    def _is_noted(self, tensor: torch.Tensor) -> bool:
        noted = self._repeated.get(id(tensor))
        return noted is not None and noted() is tensor

    def _repeats(self, value: Any) -> bool:
        """Return whether a layer's arguments have a row per pair, and the same for all pairs of a
        text.
        """
        pairs, order = len(self.names), self._first[self._position]
        is_first = True
        for tensor in _find_tensors(value):
            if tensor is None:
                return False
            is_per_pair = tensor.shape[:1] == (pairs,)
            if is_first and not is_per_pair:
                return False
            is_first = False
            # What has several rows for each pair, such as one for each head of the attention,
            # cannot be narrowed.
            is_several = tensor.dim() and tensor.shape[0] and tensor.shape[0] % pairs == 0
            if is_several and not self._is_noted(tensor):
                rows = tensor.unflatten(0, (pairs, -1))
                if torch.equal(rows, rows.index_select(0, order.to(tensor.device))) != is_per_pair:
                    return False
                if is_per_pair:
                    self._note(tensor)
        return not is_first


def _find_tensors(value: Any) -> Iterator[torch.Tensor | None]:
    """Yield the tensors inside arguments; None for the cache of a generation, which would get rows
    of both kinds.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Cache):
        yield None
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _find_tensors(item)
    elif isinstance(value, dict):
        yield from _find_tensors(tuple(value.values()))


def _find_unchanged_layers(model: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    """Yield the modules in lists of layers, such as an encoder's, which compute the same for all of
    these adapters.
    """
    for child in _children(model):
        if isinstance(model, nn.ModuleList) and not _is_changed(child, names):
            yield child
        else:
            yield from _find_unchanged_layers(child, names)


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module, without heads: each has as many modules as there are
    adapters, and no list of layers.
    """
    for child in module.children():
        if not isinstance(child, HoulsbyHead):
            yield child


def _find_ends(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    """Yield the layers with the ends of encoders, if all of these adapters are ladders."""
    for child in _children(module):
        if isinstance(module, nn.ModuleList):
            for part in child.modules():
                if isinstance(part, HoulsbyLayer) and names <= part.houlsby_ladder.keys():
                    yield child
        yield from _find_ends(child, names)


def _find_unchanged_parts(modules: Iterable[nn.Module], names: set[str]) -> Iterator[nn.Module]:
    """Yield the largest parts of modules which compute the same for all of these adapters."""
    for module in modules:
        if not _is_changed(module, names):
            yield module
        elif not isinstance(module, HoulsbyTunerLayer):
            yield from _find_unchanged_parts(module.children(), names)


def _is_changed(layer: nn.Module, names: set[str]) -> bool:
    for module in layer.modules():
        if isinstance(module, HoulsbyLayer) and not names.isdisjoint(module.houlsby_ladder):
            return True
        is_tuned = isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper))
        if is_tuned and common_adapter(module, names) is None:
            return True
    return False
