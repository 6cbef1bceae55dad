"""AdapterDrop: train one adapter that also works without those of its lowest layers."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..derive.layers import ablate, find_adapted_layers


class AdapterDrop(TrainerCallback):
    """A callback for transformers' Trainer: robust AdapterDrop (Rücklé et al. 2021, section 3.2).

        trainer = Trainer(model, args, callbacks=[houlsby_peft.AdapterDrop()], ...)
        trainer.train()
        houlsby_peft.prune(model, layers=range(3), adapter_name="upper", keep_norms=False)

    In each training step, the lowest n adapted layers compute what they compute in the base model,
    without their bottlenecks and their trained norms. n is uniform from 0 to one less than the
    number of adapted layers, so the topmost layer always runs. Evaluations run all layers, also
    after an interrupt. After the training, `prune` may cut the adapter at any depth. The layers
    below it then run once for all tasks of a text (see `TaskBank.ask`).

    n depends only on the seed and the step. So all processes use the same n, and a resumed run
    uses the same ones as an uninterrupted run. With DDP, set `ddp_find_unused_parameters=True`,
    because a step leaves weights without gradients.

    Raises:
        ValueError: The model has no Houlsby adapter.
    """

    def __init__(self) -> None:
        self._step = ExitStack()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Skip the adapters of the lowest layers until the step ends."""
        model: nn.Module = kwargs["model"]
        layers = find_adapted_layers(model)
        if not layers:
            raise ValueError(
                "AdapterDrop needs a model with Houlsby adapters in numbered layers; this has none."
            )
        dropped = random.Random(f"{args.seed} {state.global_step}").randrange(len(layers))
        self._step.enter_context(ablate(model, layers[:dropped], keep_norms=False))
        hook = model.register_forward_pre_hook(self._end_before_evaluation)
        self._step.callback(hook.remove)

    def _end_before_evaluation(self, model: nn.Module, _: Any) -> None:
        """End a step that an interrupt has kept from its end."""
        if not model.training:
            self._step.close()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Run all adapters again."""
        self._step.close()

    on_train_end = on_step_end
