"""The parts of a model that become ONNX files: the whole, or the encoder and each ladder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..method.ladder import Readings
from ..saved.record import Place, full_name


# What a part reads and returns, by name.
Tensors = dict[str, torch.Tensor]


class Whole(nn.Module):
    """A model with its adapter."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensors) -> Tensors:
        """Return the model's outputs."""
        return dict(self.model(**inputs))


class Encoder(Whole):
    """The encoder of a model with a ladder.

    Args:
        model: The model, which is changed.
        place: The ladder's place, by names inside the encoder.
    """

    def __init__(self, model: PreTrainedModel, place: Place) -> None:
        super().__init__(model)
        self._outputs: Tensors = {}
        _find_ladder(model, place).register_forward_hook(self._keep_readings)
        _change_sum(model, place, self._keep_sum)

    def forward(self, inputs: Tensors) -> Tensors:
        """Return what ladders read of texts: `reading_0` and so on, of each layer, and `sum`, at
        the encoder's end, to which they are added.
        """
        self.model(**inputs)
        return dict(self._outputs)

    def _keep_readings(self, _: nn.Module, args: tuple[Readings], branch: torch.Tensor) -> Any:
        for index, state in args[0].states.items():
            self._outputs[f"reading_{index}"] = state
        return torch.zeros(())

    def _keep_sum(self, total: torch.Tensor) -> torch.Tensor:
        self._outputs["sum"] = total
        return total


class LadderWithHead(Whole):
    """A ladder, and what follows it in its model: the last norm, a pooler and the head.

    Args:
        model: The model, which is changed.
        place: The ladder's place, by names inside the encoder.
    """

    def __init__(self, model: PreTrainedModel, place: Place) -> None:
        super().__init__(model)
        self.ladder = _find_ladder(model, place)
        self._rungs = place.rungs
        self._sum = torch.zeros(0)
        _change_sum(model, place, lambda _: self._sum)
        # Nothing of the layers remains in the file. DeBERTa has a convolution after the first one.
        model.base_model.get_submodule(place.key).rungs = None  # type: ignore[assignment]
        del model.base_model.get_submodule(place.stack)[1:-1]  # type: ignore[operator]

    def forward(self, inputs: Tensors) -> Tensors:
        """Return the model's outputs. Its inputs are those of the encoder and its outputs."""
        inputs = dict(inputs)
        states = {index: inputs.pop(f"reading_{index}") for index in self._rungs}
        total = inputs.pop("sum")
        mask = inputs["attention_mask"][:, None, None, :] != 0
        self._sum = total + self.ladder(Readings(states, mask))
        return super().forward(inputs)


def _find_ladder(model: PreTrainedModel, place: Place) -> nn.Module:
    """Return the only ladder of a model."""
    end: Any = model.base_model.get_submodule(place.key)
    [ladder] = end.houlsby_ladder.values()
    return ladder  # type: ignore[no-any-return]


def _change_sum(
    model: PreTrainedModel, place: Place, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Change the sum at the encoder's end, which ladders are added to: what enters the norm there
    or, without one, what the last layer returns.
    """

    def change_first(_: nn.Module, *args_and_output: Any) -> Any:
        hidden = args_and_output[-1]
        return (change(hidden[0]), *hidden[1:]) if isinstance(hidden, tuple) else change(hidden)

    if place.norm is not None:
        model.base_model.get_submodule(place.norm).register_forward_pre_hook(change_first)
    else:
        layer = model.base_model.get_submodule(full_name(place.stack, place.layer))
        layer.register_forward_hook(change_first)
