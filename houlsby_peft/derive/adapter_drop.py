"""AdapterDrop: train one adapter that also works without those of its lowest layers."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .layers import ablate, find_adapted_layers


class AdapterDrop(TrainerCallback):
    """A callback for transformers' Trainer: robust AdapterDrop (Rücklé et al. 2021, section 3.2).

        trainer = Trainer(model, args, callbacks=[houlsby_peft.AdapterDrop()], ...)
        trainer.train()
        houlsby_peft.prune(model, layers=range(3), adapter_name="upper", keep_norms=False)

    In each training step, the lowest n of the adapted layers compute what they compute in the base
    model, without their bottlenecks and their trained norms. n is uniform from 0 to one less than
    the number of adapted layers, so the topmost always runs. Evaluations run all layers, also after
    an interrupt. After the training, `prune` may cut the adapter at any depth: what is below it
    then runs once for all tasks of a text (see `TaskBank.ask`).

    n depends only on the seed and the step, so all processes draw the same one, and a resumed run
    those of a run that was not interrupted. With DDP, set `ddp_find_unused_parameters=True`: a step
    leaves weights without gradients.

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
        # Where an interrupt has kept the step from its end.
        hook = model.register_forward_pre_hook(
            lambda model, _: None if model.training else self._step.close()
        )
        self._step.callback(hook.remove)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Run all adapters again."""
        self._step.close()

    on_train_end = on_step_end
