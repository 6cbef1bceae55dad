"""The outputs of a model without the adapters of a span of layers, for all continuous spans at once."""

from collections.abc import Iterator

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from houlsby_peft import HoulsbyConfig, ablate, find_places
from training.errors import RecipeError


Span = tuple[int, int]  # first and last layer without adapters, inclusive

# Encoders whose layers pass on their hidden states and nothing else, so that a forward can start at any layer. (In T5
# the first layer computes the position bias of all layers; ModernBERT's layers differ by their index.)
RESTARTABLE = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")


class SpanModel:
    """Run a model without the adapters of one span of layers after another.

    Spans with the same first layer share the forward up to it, and a span shares its layers without adapters with all
    longer ones. For n layers this costs the forwards of n + n(n+1)(n+2)/6 layers instead of n + n * n(n+1)/2; for n =
    12 these are 376 instead of 948.

    Args:
        model: A model with an adapter in each layer, in eval mode.
        keep_norms: Whether to keep the trained norms where adapters are removed.

    Raises:
        RecipeError: If a forward cannot start at any layer, or a layer has no adapter.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, keep_norms: bool = True) -> None:
        if not isinstance(model, PeftModel):
            raise RecipeError(f"The analysis needs a model with adapters; this {type(model).__name__} has none.")
        base = model.get_base_model()
        if base.config.model_type not in RESTARTABLE:
            raise RecipeError(
                f"The spans share their forwards, which is known to be correct for {', '.join(RESTARTABLE)}; got "
                f"{base.config.model_type!r}. Evaluate it span by span inside houlsby_peft.ablate()."
            )
        place = next(iter(find_places(base, HoulsbyConfig()).values()))
        parent, _, self.name = place.stack.rpartition(".")
        self.parent = base.get_submodule(parent)
        self.layers: nn.ModuleList = getattr(self.parent, self.name)
        self.model, self.keep_norms = model, keep_norms
        try:
            with ablate(model, range(len(self.layers))):
                pass
        except ValueError as error:
            raise RecipeError(f"The analysis needs a model with an adapter in each layer. {error}") from error

    def spans(self) -> list[Span]:
        """Return all continuous spans, in the order of `outputs`."""
        return [(first, last) for last in range(len(self.layers)) for first in range(last + 1)]

    @torch.inference_mode()
    def outputs(self, batch: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the logits with all adapters, then without the adapters of each span, in the order of `spans`.

        Args:
            batch: The model's inputs, without labels.
        """
        logits, inputs = self._run(batch, 0, None)
        yield logits
        # For each first layer of a span that ends at `last`: the hidden states after the span.
        after: list[torch.Tensor] = []
        for last in range(len(self.layers)):
            with ablate(self.model, [last], self.keep_norms):
                for first, hidden in enumerate([*after, inputs[last - 1] if last else None]):
                    logits, outputs = self._run(batch, last, hidden)
                    after[first : first + 1] = outputs[:1]
                    yield logits

    def _run(
        self, batch: dict[str, torch.Tensor], start: int, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the logits, and the outputs of the layers from `start` on, whose input is `hidden`; None: the
        embeddings."""
        outputs: list[torch.Tensor] = []
        layers = self.layers[start:]
        hooks = [layer.register_forward_hook(lambda _, __, output: outputs.append(output)) for layer in layers]
        if hidden is not None:
            hooks.append(layers[0].register_forward_pre_hook(lambda _, inputs: (hidden, *inputs[1:])))
        setattr(self.parent, self.name, layers)
        try:
            return self.model(**batch).logits, outputs
        finally:
            setattr(self.parent, self.name, self.layers)
            for hook in hooks:
                hook.remove()
