"""`Rows`: which hidden states of a layer belong to which row of a batch.

Most modules keep the rows in the first dimension, but not all: FSMT has the sequence there, OPT
flattens rows and tokens, and Swin has several windows per row. A wrong guess would apply another
row's adapter. So before the first mixed batch of a kind, the base model runs on one row of it and
on two. A layer is accepted if its first dimension doubles and all others stay. In any other case,
and where images come with texts, rows with different adapters are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from ..errors import AdapterError
from ..method.modules import first_tensor
from ..method.tuner_layer import BASE, Batch, HoulsbyTunerLayer, activate
from .parts import run_adapter, select_rows


_IMAGES = "inputs beside the texts, such as images, may belong to any row"
# The state of a generation, which a run on other rows would change, and labels, which the base
# model may not know.
_LEFT_OUT = ("past_key_values", "cache_position", "cache_params", "use_cache", "labels")


class _Call(NamedTuple):
    """What has reached a module in one call."""

    shape: torch.Size
    # Over all dimensions of the hidden states but the first and the last.
    means: torch.Tensor


_Calls: TypeAlias = dict[nn.Module, list[_Call]]


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
        problem = layout.problem or self._find_problem(layout, hidden)
        if problem:
            raise AdapterError(
                "In a mixed batch, it must be known which hidden states belong to which row; got "
                f"the shape {tuple(hidden.shape)} at {layout.name} for {self.number} rows, but "
                f"{problem}. Run the rows of each adapter separately, or use adapters that leave "
                "this part out (exclude_modules)."
            )
        return hidden.shape[0] // self.number

    def _find_problem(self, layout: Layout, hidden: torch.Tensor) -> str:
        """Return why the rows of these hidden states cannot be told; empty if they can."""
        size = hidden.shape[0]
        if layout.is_one_per_row:
            if size not in (self.number, self.number * self.repeats):
                return "the model has changed the number of rows"
            return ""
        is_right = size % self.number == 0
        if hidden.dim() <= 2:
            # Rows and tokens are flattened. If padding were left out, the total could be a multiple
            # of the rows by chance.
            sizes = {self.number * length for length in (1, *self.lengths)}
            is_right = size in sizes or size / self.repeats in sizes
        if not is_right:
            return "the rows have different numbers of hidden states"
        return ""


class RowFinder:
    """Finds the rows of the batches of a model with adapters, until modules of it are replaced.

    What it has found for a kind of inputs is kept.
    """

    def __init__(self, model: nn.Module, batches: dict[int, Batch]) -> None:
        self.model = model
        self.batches = batches
        self._layouts: dict[object, dict[nn.Module, Layout]] = {}

    @cached_property
    def _changed(self) -> dict[nn.Module, str]:
        """The name of each module that adapters have changed."""
        names: dict[nn.Module, str] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)):
                names[module] = name
        return names

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def find(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows:
        """Return the rows of a forward pass or generation.

        If its inputs are of a new kind, the base model runs on rows of it first.
        """
        kind: set[tuple[object, ...]] = set()
        lengths: set[int] = set()
        for name, value in chain(enumerate(args), kwargs.items()):
            if isinstance(value, torch.Tensor):
                is_per_row = value.shape[:1] == (number,)
                # One token alone does not tell apart what is flattened from what is not.
                is_one_token = value.shape[1:2] == (1,)
                kind.add((name, value.dim(), is_per_row, is_one_token))
                lengths.update(value.shape[1:2])
        key = frozenset(kind)
        if key not in self._layouts:
            self._layouts[key] = self._find_layouts(number, args, kwargs)
        repeats = self._count_repeats(kwargs)
        return Rows(number, repeats, frozenset(lengths), self._layouts[key])

    def _count_repeats(self, kwargs: Mapping[str, Any]) -> int:
        """Return how often `generate` repeats each row."""
        config = kwargs.get("generation_config") or getattr(self.model, "generation_config", None)
        repeats = 1
        for name in ("num_beams", "num_return_sequences"):
            option = kwargs.get(name) or getattr(config, name, None)
            repeats = max(repeats, int(option or 1))
        return repeats

    def _find_layouts(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[nn.Module, Layout]:
        """Return the layout of each module that adapters have changed."""
        inputs, further_args = self._name_inputs(args, kwargs)
        if _has_images(inputs):
            return {module: Layout(name, problem=_IMAGES) for module, name in self._changed.items()}
        attempts = [inputs]
        parameters = inspect.signature(self.model.forward).parameters
        is_decoder_without_inputs = (
            "decoder_input_ids" in parameters and inputs.get("decoder_input_ids") is None
        )
        tensor = first_tensor(inputs.values())
        if is_decoder_without_inputs and tensor is not None:
            # `generate` chooses the first token itself.
            start = tensor.new_zeros((number, 1), dtype=torch.long)
            attempts.append(inputs | {"decoder_input_ids": start})
        problems = []
        for attempt in attempts:
            try:
                return self._compare(number, further_args, attempt)
            except Exception as error:
                line = (str(error).splitlines() or [""])[0][:200]
                problems.append(
                    f"the model does not run on two rows alone ({type(error).__name__}: {line})"
                )
        layouts = {}
        for module, name in self._changed.items():
            layouts[module] = Layout(name, problem=problems[0])
        return layouts

    def _name_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Return the inputs of a forward pass by name, and the arguments that have no names.

        What `generate` takes for itself, such as num_beams, is left out.
        """
        parameters = inspect.signature(self.model.forward).parameters
        names, takes_all = [], False
        for name, parameter in parameters.items():
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                names.append(name)
            elif parameter.kind is parameter.VAR_KEYWORD:
                takes_all = True
        named = dict(zip(names, args, strict=False)) | kwargs
        if "inputs" in kwargs and "inputs" not in parameters:
            # The name of the first argument of `generate`.
            named[getattr(self.model, "main_input_name", "inputs")] = kwargs["inputs"]
        inputs = {}
        for name, value in named.items():
            is_taken = name in parameters or (takes_all and isinstance(value, torch.Tensor))
            if is_taken and name not in _LEFT_OUT:
                inputs[name] = value
        return inputs, args[len(names) :]

    def _compare(
        self, number: int, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> dict[nn.Module, Layout]:
        """Return the layouts, by runs of the base model on one and on two rows of a batch."""
        single = self._try_rows(number, args, inputs, [0])
        pair = self._try_rows(number, args, inputs, [0, number - 1])
        layouts = {}
        for module, name in self._changed.items():
            if module in pair:
                layouts[module] = _find_layout(name, single.get(module, []), pair[module])
            else:
                problem = "no hidden states come here when two rows run alone"
                layouts[module] = Layout(name, problem=problem)
        return layouts

    def _try_rows(
        self, number: int, args: tuple[Any, ...], inputs: dict[str, Any], rows: Sequence[int]
    ) -> _Calls:
        """Run the base model on these of the rows, and return what reaches the changed modules."""
        trial = _Trial()
        args, inputs = select_rows((args, inputs), torch.tensor(rows), number)
        with torch.no_grad(), activate(self.batches, trial):
            self.model(*args, **inputs)
        return trial.calls


class _Trial:
    """A pass of the base model, which records what reaches the modules that adapters have
    changed.
    """

    names: Sequence[str] = ()

    def __init__(self) -> None:
        self.calls: _Calls = {}

    def apply(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record what reaches a layer, and return what the base model computes there."""
        hidden = first_tensor((*args, *kwargs.values()))
        if hidden is not None:
            width = hidden.shape[-1] if hidden.dim() > 1 else 1
            means = hidden.float().reshape(len(hidden), -1, width).mean(1)
            self.calls.setdefault(layer, []).append(_Call(hidden.shape, means))
        return run_adapter(layer, BASE, args, kwargs)


def _has_images(inputs: Mapping[str, Any]) -> bool:
    """Return whether numbers such as images come with the tokens or their embeddings."""
    has_text = has_floats = False
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            continue
        is_text = name in ("input_ids", "inputs_embeds")
        has_text = has_text or is_text
        has_floats = has_floats or (
            value.is_floating_point() and not is_text and "mask" not in name
        )
    return has_text and has_floats


def _find_layout(name: str, calls_of_single: list[_Call], calls_of_pair: list[_Call]) -> Layout:
    """Return the layout of a module from what one row and two rows have given to it."""
    doubled = [(2 * call.shape[0], *call.shape[1:]) for call in calls_of_single]
    if doubled != [tuple(call.shape) for call in calls_of_pair]:
        return Layout(
            name,
            problem=f"one row alone has {_show_shapes(calls_of_single)} there, and two rows have "
            f"{_show_shapes(calls_of_pair)}",
        )
    for single, pair in zip(calls_of_single, calls_of_pair, strict=True):
        if not _is_in_order(single.means, pair.means):
            return Layout(name, problem="they are in another order than the rows")
    return Layout(name, is_one_per_row=all(call.shape[0] == 1 for call in calls_of_single))


def _show_shapes(calls: Iterable[_Call]) -> str:
    return ", ".join(str(tuple(call.shape)) for call in calls) or "none"


def _is_in_order(single: torch.Tensor, pair: torch.Tensor) -> bool:
    """Return whether the hidden states of the row that ran alone come first among those of two, in
    the same order.

    Args:
        single: Means of the row that ran alone, of the shape `(indices, width)`.
        pair: Means of two rows, of the shape `(2 * indices, width)`.
    """
    first, second = pair.split(len(single))
    mean = single.mean(0)
    # Rounding depends on the size of a batch.
    is_first = (first.mean(0) - mean).norm() <= (second.mean(0) - mean).norm() + 0.01 * mean.norm()
    if len(single) == 1:
        return bool(is_first)
    # Compared to how different the parts of the row are.
    bound = 0.2 * (single - mean).norm() + 1e-4 * single.norm()
    return bool(is_first and (first - single).norm() <= bound)
