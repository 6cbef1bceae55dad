"""`Rows`: which hidden states of a layer belong to which row of a batch.

Most modules keep the rows in the first dimension, but not all: FSMT has the sequence there, OPT
flattens rows and tokens, Swin has several windows per row, and the images of a vision-language
model may belong to any row. A wrong guess would apply another row's adapter. So before the first
mixed batch of a kind, the base model runs on one row of it and on two. A layer is accepted if its
first dimension doubles and all others stay. In any other case, rows with different adapters in this
layer are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from threading import get_ident
from typing import Any, TypeAlias

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers.utils.generic import ModelOutput

from ..errors import AdapterError
from ..heads.head import HoulsbyHead
from ..layer import BASE, Batch, HoulsbyTunerLayer
from ..modules import is_inside


_FOREIGN = "this part reads inputs, such as images, that may belong to any row"
# The state of a generation, which a run on other rows would change, and labels, which the base
# model may not know.
_LEFT_OUT = ("past_key_values", "cache_position", "cache_params", "use_cache", "labels")
# Of each call of a module: the shape, and the means over all dimensions but the first and the last.
_Calls: TypeAlias = list[tuple[torch.Size, torch.Tensor]]


@dataclass(frozen=True)
class Layout:
    """How a module keeps rows in the first dimension of the hidden states that reach it."""

    name: str
    # Otherwise each row has several indices in succession.
    is_one_per_row: bool = False
    # Why the rows are unknown, if they are.
    problem: str = ""


@dataclass(frozen=True)
class Rows:
    """The rows of one forward pass or generation."""

    number: int
    # How often a generation repeats each row, for beams or several returned sequences.
    repeats: int
    # The sizes of the inputs' second dimension, such as the number of tokens.
    lengths: frozenset[int]
    # Of each module that adapters have changed.
    layouts: Mapping[nn.Module, Layout]

    def times(self, module: nn.Module, hidden: torch.Tensor) -> int:
        """Return how many successive indices of the first dimension belong to each row."""
        layout = self.layouts[module]
        size, problem = hidden.shape[0], layout.problem
        if layout.is_one_per_row:
            if size not in (self.number, self.number * self.repeats):
                problem = "the model has changed the number of rows"
        elif not problem:
            is_right = size % self.number == 0
            if hidden.dim() <= 2:
                # Flattened. If padding were left out, the total could be a multiple of the rows by
                # chance.
                per_row = {
                    length * times for length in (1, *self.lengths) for times in (1, self.repeats)
                }
                is_right = size in {self.number * each for each in per_row}
            if not is_right:
                problem = "the rows have different numbers of hidden states"
        if problem:
            raise AdapterError(
                "In a mixed batch, it must be known which hidden states belong to which row; got the shape "
                f"{tuple(hidden.shape)} at {layout.name} for {self.number} rows, but {problem}. Run the rows of each "
                "adapter separately, or use adapters that leave this part out (exclude_modules)."
            )
        return size // self.number


class RowFinder:
    """Finds the rows of the batches of a model with adapters, until modules of it are replaced.

    What it has found for a kind of inputs is kept.
    """

    def __init__(self, model: nn.Module, batches: dict[int, Batch]) -> None:
        self.model = model
        self.batches = batches
        self._found: dict[object, dict[nn.Module, Layout]] = {}

    @cached_property
    def _changed(self) -> dict[nn.Module, tuple[str, str]]:
        """The name of each module that adapters have changed, and of the outermost list of layers
        that it is in.
        """
        modules = dict(self.model.named_modules())
        lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList)]
        return {
            module: (
                name,
                min((outer for outer in lists if is_inside(name, outer)), key=len, default=name),
            )
            for name, module in modules.items()
            if isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper))
        }

    @contextmanager
    def activate(self, batch: Batch) -> Iterator[None]:
        """Within this context, let the layers compute a batch in this thread."""
        thread = get_ident()
        before = self.batches.get(thread)
        self.batches[thread] = batch
        try:
            yield
        finally:
            if before is None:
                del self.batches[thread]
            else:
                self.batches[thread] = before

    def find(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows:
        """Return the rows of a forward pass or generation; if its inputs are of a new kind, run
        rows alone first.
        """
        tensors = {
            name: value
            for name, value in chain(enumerate(args), kwargs.items())
            if isinstance(value, torch.Tensor)
        }
        # One token alone does not tell apart what is flattened from what is not.
        kind = frozenset(
            (name, value.dim(), value.shape[:1] == (number,), value.shape[1:2] == (1,))
            for name, value in tensors.items()
        )
        if kind not in self._found:
            self._found[kind] = self._find_layouts(number, args, kwargs)
        lengths = frozenset(value.shape[1] for value in tensors.values() if value.dim() > 1)
        # How often `generate` repeats each row.
        config = kwargs.get("generation_config") or getattr(self.model, "generation_config", None)
        options = (
            kwargs.get(name) or getattr(config, name, None)
            for name in ("num_beams", "num_return_sequences")
        )
        repeats = max((int(option) for option in options if option), default=1)
        return Rows(number, repeats, lengths, self._found[kind])

    def _find_layouts(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[nn.Module, Layout]:
        """Return the layout of each module that adapters have changed."""
        parameters = inspect.signature(self.model.forward).parameters
        if (
            "inputs" in kwargs.keys() - parameters.keys()
        ):  # the name of the first argument of `generate`
            kwargs = kwargs | {getattr(self.model, "main_input_name", "inputs"): kwargs["inputs"]}
        names = [
            name
            for name, parameter in parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        takes_all = any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        )
        # What `generate` takes for itself, such as num_beams, is left out.
        inputs = {
            name: value
            for name, value in (dict(zip(names, args, strict=False)) | kwargs).items()
            if name not in _LEFT_OUT
            and (name in parameters or (takes_all and isinstance(value, torch.Tensor)))
        }
        tries = [inputs]
        if "decoder_input_ids" in parameters and inputs.get("decoder_input_ids") is None:
            # `generate` chooses the first token itself.
            device = next(
                (value.device for value in inputs.values() if isinstance(value, torch.Tensor)), None
            )
            tries.append(
                inputs
                | {"decoder_input_ids": torch.zeros(number, 1, dtype=torch.long, device=device)}
            )
        problems = []
        for each in tries:
            try:
                return self._compare(number, args[len(names) :], each)
            except Exception as error:
                line = (str(error).splitlines() or [""])[0][:200]
                problems.append(
                    f"the model does not run on two rows alone ({type(error).__name__}: {line})"
                )
        return {
            module: Layout(name, problem=problems[0]) for module, (name, _) in self._changed.items()
        }

    def _compare(
        self, number: int, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> dict[nn.Module, Layout]:
        """Compare runs of the base model on one and on two rows of a batch."""

        def try_rows(inputs: dict[str, Any], *rows: int) -> dict[nn.Module, _Calls]:
            trial = _Trial()
            own_args, own_inputs = select_rows((args, inputs), torch.tensor(rows), number)
            with torch.no_grad(), self.activate(trial):
                self.model(*own_args, **own_inputs)
            return trial.calls

        others = _find_others(inputs)
        text = {name: value for name, value in inputs.items() if name not in others}
        own_lists: set[str] | None = None
        if others:
            # Where images are optional, each may belong to any row of the text. If they are needed,
            # each row has one.
            with suppress(Exception):
                own_lists = {self._changed[module][1] for module in try_rows(text, 0)}
        problem = "no hidden states come here when two rows run alone"
        try:
            one, two = try_rows(inputs, 0), try_rows(inputs, 0, number - 1)
        except Exception:
            if own_lists is None:
                raise
            # Images of all rows may be packed into one tensor.
            one, two = try_rows(text, 0), try_rows(text, 0, number - 1)
            problem = _FOREIGN
        layouts = {}
        for module, (name, outer) in self._changed.items():
            if module not in two:
                layouts[module] = Layout(name, problem=problem)
            elif own_lists is not None and outer not in own_lists:
                layouts[module] = Layout(name, problem=_FOREIGN)
            else:
                layouts[module] = _find_layout(name, one.get(module, []), two[module])
        return layouts


def run_adapter(
    layer: Any, adapter_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a tuner layer, a head or a wrapper of PEFT's as one adapter does, or as the base model
    does for `BASE`.
    """
    if isinstance(layer, (HoulsbyTunerLayer, HoulsbyHead)):
        return layer.run_adapter(adapter_name, *args, **kwargs)
    if adapter_name in layer._get_available_adapters():
        return layer._forward_wrapped_mixed_batch(args[0], adapter_name, *args[1:], **kwargs)
    return layer.original_module(*args, **kwargs)


def select_rows(value: Any, index: torch.Tensor, rows: int) -> Any:
    """Return the given rows of every tensor that has a row per example, inside arguments of any
    kind.
    """
    if isinstance(value, torch.Tensor):
        is_per_row = value.dim() and value.shape[0] == rows
        return value.index_select(0, index.to(value.device)) if is_per_row else value
    if isinstance(value, tuple):
        return tuple(select_rows(item, index, rows) for item in value)
    if isinstance(value, dict):
        selected = {key: select_rows(item, index, rows) for key, item in value.items()}
        return type(value)(**selected) if isinstance(value, ModelOutput) else selected
    return value


def first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    """Return the first tensor with a dimension."""
    return next(
        (value for value in values if isinstance(value, torch.Tensor) and value.dim()), None
    )


class _Trial:
    """A run of the base model on a few rows, which records what reaches the modules that adapters
    have changed.
    """

    def __init__(self) -> None:
        self.calls: dict[nn.Module, _Calls] = {}

    def apply(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record what reaches a layer, and return what the base model computes there."""
        hidden = first_tensor((*args, *kwargs.values()))
        if hidden is not None:
            means = (
                hidden.float()
                .reshape(len(hidden), -1, hidden.shape[-1] if hidden.dim() > 1 else 1)
                .mean(1)
            )
            self.calls.setdefault(layer, []).append((hidden.shape, means))
        return run_adapter(layer, BASE, args, kwargs)


def _find_others(inputs: dict[str, Any]) -> set[str]:
    """Return the inputs that come with the tokens or their embeddings, such as images; none if
    there are no tokens.
    """
    tensors = {
        name: value
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    floats = {
        name for name, value in tensors.items() if value.is_floating_point() and "mask" not in name
    }
    text = {name for name in tensors if "input_ids" in name or "inputs_embeds" in name}
    text = text or {
        name for name, value in tensors.items() if name not in floats and value.dim() == 2
    }
    if not text or not floats - text:
        return set()
    # Sizes of images are integers, but there is not one for each token.
    shapes = {tensors[name].shape[:2] for name in text}
    known = {
        name
        for name in tensors.keys() - floats
        if "mask" in name or tensors[name].shape[:2] in shapes
    }
    return tensors.keys() - text - known


def _find_layout(name: str, one: _Calls, two: _Calls) -> Layout:
    """Return the layout of a module from what one row and two rows have given to it."""
    if [(2 * shape[0], *shape[1:]) for shape, _ in one] != [tuple(shape) for shape, _ in two]:
        shown = [
            ", ".join(str(tuple(shape)) for shape, _ in calls) or "none" for calls in (one, two)
        ]
        return Layout(
            name, problem=f"one row alone has {shown[0]} there, and two rows have {shown[1]}"
        )
    if not all(_is_in_order(alone, both) for (_, alone), (_, both) in zip(one, two, strict=True)):
        return Layout(name, problem="they are in another order than the rows")
    return Layout(name, is_one_per_row=all(shape[0] == 1 for shape, _ in one))


def _is_in_order(alone: torch.Tensor, both: torch.Tensor) -> bool:
    """Return whether the hidden states of the row that ran alone come first among those of two, in
    the same order.
    """
    first, second = both.split(len(alone))
    mean = alone.mean(0)
    # Rounding depends on the size of a batch.
    is_first = (first.mean(0) - mean).norm() <= (second.mean(0) - mean).norm() + 0.01 * mean.norm()
    if len(alone) == 1:
        return bool(is_first)
    # Compared to how different the parts of the row are.
    return bool(
        is_first and (first - alone).norm() <= 0.2 * (alone - mean).norm() + 1e-4 * alone.norm()
    )
