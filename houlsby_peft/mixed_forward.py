"""Runs a forward pass, or a generation, on rows of different adapters: checks the request, tells the layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from torch import nn

from .adapter_rows import BASE, AdapterRows, RowsCache, row_names
from .tuner_layer import HoulsbyTunerLayer


class MixedForward:
    """Tells the tuner layers and heads of a model which adapter each row of a batch uses.

    Args:
        model: the base model; after an adapter is added to it, a new object is needed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._rows = RowsCache()

    @contextmanager
    def adapters_of_rows(self, names: Sequence[str]) -> Iterator[None]:
        """For the time of this context, each tuner layer and head applies to each row its own adapter."""
        hook = partial(_pass_adapter_names, rows=self._rows.get(names, self._containers))
        handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in self._layers]
        embed = partial(_embed, rows=names)
        handles += [wrapper.register_forward_hook(embed) for wrapper in self._token_wrappers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def check(
        self, names: Sequence[str], known: Collection[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuse what would give wrong rows.

        Args:
            names: the adapter of each row, or "__base__".
            known: the adapters of the model.
            args, kwargs: what the model is called with.

        Raises:
            ValueError: the model is in training mode, an adapter is unknown, or there is not one name per row.
            TypeError: the model's hidden states do not begin with the rows.
        """
        if self._model.training:
            raise ValueError(
                "Cannot pass `adapter_names` when the model is in training mode; call model.eval() first."
            )
        unknown = sorted(set(names) - {BASE} - set(known))
        if unknown:
            raise ValueError(
                f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}. Loaded are "
                f"{', '.join(known)}; rows of the base model are named {BASE!r}."
            )
        inputs = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *kwargs.values())
        rows = next((len(value) for value in inputs if isinstance(value, torch.Tensor) and value.dim()), len(names))
        if rows != len(names):
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(names)} and {rows} respectively."
            )
        if not self._is_batch_first:
            raise TypeError(
                "Mixed batches need hidden states whose first dimension is the rows of the batch; "
                f"{type(self._model).__name__} has the sequence there. Run the rows of each adapter by themselves, or "
                "build its modules with batch_first=True."
            )

    # The model has thousands of modules when it has many adapters, so it is searched once.
    @cached_property
    def _layers(self) -> list[nn.Module]:
        kinds = (HoulsbyTunerLayer, AuxiliaryTrainingWrapper)
        found = [module for module in self._model.modules() if isinstance(module, kinds)]
        return [module for module in found if not isinstance(module, TrainableTokensWrapper)]

    @cached_property
    def _token_wrappers(self) -> list[TrainableTokensWrapper]:
        return [module for module in self._model.modules() if isinstance(module, TrainableTokensWrapper)]

    @cached_property
    def _containers(self) -> list[nn.ModuleDict]:
        layers = [layer for layer in self._layers if isinstance(layer, HoulsbyTunerLayer)]
        return [getattr(layer, name) for layer in layers for name in layer.adapter_layer_names]

    @cached_property
    def _is_batch_first(self) -> bool:
        # XLNet transposes its input, whatever its parts say.
        return getattr(getattr(self._model, "config", None), "model_type", None) != "xlnet" and all(
            getattr(module, "batch_first", True) for module in self._model.modules()
        )


def _pass_adapter_names(module: nn.Module, args: Any, kwargs: dict[str, Any], rows: AdapterRows) -> Any:
    # PEFT's own wrappers want a name for each row of their input, which beam search has repeated.
    names = rows if isinstance(module, HoulsbyTunerLayer) or not args else row_names(args[0], rows)
    return args, {**kwargs, "adapter_names": names}


def _embed(module: TrainableTokensWrapper, args: Any, output: torch.Tensor, rows: Sequence[str]) -> torch.Tensor:
    """What each row's own adapter gives. PEFT's mixed batch wants all adapters to train tokens, the active one too."""
    if module.disable_adapters:
        return output
    names = row_names(args[0], rows)
    result: torch.Tensor = module.original_module(*args)
    for name in module._get_available_adapters() & set(names):
        own = torch.tensor([row for row, other in enumerate(names) if other == name], device=result.device)
        result = result.index_copy(0, own, module.token_adapter.forward_adapters(args[0][own], [name]))
    return result
