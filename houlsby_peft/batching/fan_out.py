"""`FanOut`: one text, many tasks. Below the first layer that an adapter changes, each text of a
    batch runs once.

To the outside, the model runs on a row per pair of a text and an adapter, so heads, losses and
everything between layers see an ordinary mixed batch. Only a layer that computes the same for all
pairs of a text is narrowed to one row per text, and its output is repeated. Where that cannot be
told of a layer, it runs on all rows, to the same result; so do all layers of a model that
`torch.compile` has compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers import Cache

from ..layer import HoulsbyTunerLayer
from .rows import select_rows


# What holds the output of inner modules, which would have one row per text.
_RECORDED = ("output_attentions", "output_hidden_states", "output_router_logits")


class FanOut:
    """The pairs of texts and adapters of one call. A text without adapters has no row in the
    output.
    """

    def __init__(self, names: Sequence[Sequence[str]]) -> None:
        self.texts = len(names)
        self.names = [name for own in names for name in own]
        # The text of each pair.
        self._text = torch.tensor(
            [text for text, own in enumerate(names) for _ in own], dtype=torch.long
        )
        # Of the texts with adapters: the first pair of each, and of each pair the position of its
        # text among them.
        _, self._position, counts = self._text.unique_consecutive(
            return_inverse=True, return_counts=True
        )
        self._first = counts.cumsum(0) - counts

    def repeat(self, value: Any) -> Any:
        """Return arguments with a row per pair, from arguments with a row per text."""
        return select_rows(value, self._text, self.texts)

    @contextmanager
    def attach(
        self, model: nn.Module, is_running: Callable[[], bool], is_changed: Callable[[], bool]
    ) -> Iterator[None]:
        """Within this context, repeat the texts that a model is called with, and run its lower
        layers once per text.

        These are all layers until an adapter has changed what the pairs of a text compute.
        """
        records = False

        # PyTorch gives no kwargs to another thread's call whose hook is removed meanwhile.
        def repeat_inputs(_: nn.Module, args: Any, kwargs: Any = None) -> Any:
            nonlocal records
            if not is_running():
                return None
            if kwargs.get("past_key_values") is not None:
                raise ValueError(
                    "Several adapters for one text need a model that runs once, and not a generation. Repeat the text."
                )
            config = getattr(model, "config", None)
            given = {name: kwargs.get(name) for name in _RECORDED}
            records = any(
                getattr(config, name, False) if given[name] is None else given[name]
                for name in _RECORDED
            )
            if getattr(config, "use_cache", False):
                kwargs = {"use_cache": False, **kwargs}
            return self.repeat((args, kwargs))

        # The arguments with a row per pair of the layer that runs once per text.
        whole: tuple[Any, Any] | None = None

        def start(_: nn.Module, args: Any, kwargs: Any = None) -> Any:
            nonlocal whole
            if not is_running() or is_changed() or records or not self._repeats((args, kwargs)):
                return None
            whole = args, kwargs
            return select_rows(whole, self._first, len(self.names))

        def end(layer: nn.Module, args: Any, output: Any) -> Any:
            nonlocal whole
            if not is_running() or whole is None:
                return None
            given, whole = whole, None
            texts = len(self._first)
            if all(
                each is not None and each.shape[:1] in ((), (1,), (texts,))
                for each in _find_tensors(output)
            ):
                return select_rows(output, self._position, texts)
            return layer.forward(*given[0], **given[1])

        with ExitStack() as stack:
            hook = model.register_forward_pre_hook(repeat_inputs, with_kwargs=True, prepend=True)
            stack.callback(hook.remove)
            if len(self._first) < len(self.names):
                for layer in _find_unchanged_layers(model, set(self.names)):
                    stack.callback(layer.register_forward_pre_hook(start, with_kwargs=True).remove)
                    stack.callback(layer.register_forward_hook(end, prepend=True).remove)
            yield

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
            if tensor.dim() and tensor.shape[0] and tensor.shape[0] % pairs == 0:
                rows = tensor.unflatten(0, (pairs, -1))
                if torch.equal(rows, rows.index_select(0, order.to(tensor.device))) != is_per_pair:
                    return False
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
    """Yield the modules in lists of layers, such as an encoder's, inside which none of these
    adapters is.
    """
    for child in model.children():
        is_changed = any(
            isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper))
            and not names.isdisjoint(module._get_available_adapters())
            for module in child.modules()
        )
        if isinstance(model, nn.ModuleList) and not is_changed:
            yield child
        else:
            yield from _find_unchanged_layers(child, names)
