"""The outputs of a model without its adapters in a span of layers, for all continuous spans at once."""

from collections.abc import Iterator

import torch
from common.errors import RecipeError
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from houlsby_peft import HoulsbyConfig, ablate
from houlsby_peft.places import find_places


Span = tuple[int, int]  # first and last layer that lose their adapters, both included

# Encoders whose layers hand on their hidden states and nothing else, so that the stack can start at any layer. (In
# T5, say, the first layer makes the position bias of all; ModernBERT's layers alternate by their number.)
RESTARTABLE = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")


class SpanModel:
    """Runs a model without its adapters in one span of layers after another.

    Spans with the same first layer share the forward up to it, and further, each span goes on from where its adapters
    end: it shares the layers without adapters with the spans that are longer. For n layers this costs
    n + n(n+1)(n+2)/6 layers' forwards instead of n + n * n(n+1)/2; that is 376 instead of 948 for n = 12.

    Args:
        model: A model with an adapter in each layer, in eval mode.
        keep_norms: Whether the trained norms stay where adapters are removed.

    Raises:
        RecipeError: If its layers cannot be run from the middle on, or one has no adapter.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, keep_norms: bool = True) -> None:
        if not isinstance(model, PeftModel):
            raise RecipeError(f"Spans are taken of a model with adapters; this {type(model).__name__} has none.")
        base = model.get_base_model()
        if base.config.model_type not in RESTARTABLE:
            raise RecipeError(
                f"The spans share their forwards, which is known to be right for {', '.join(RESTARTABLE)}; got "
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
            raise RecipeError(f"Spans are taken of a model with an adapter in each layer. {error}") from error

    def spans(self) -> list[Span]:
        """All continuous spans, in the order in which `outputs` gives them."""
        return [(first, last) for last in range(len(self.layers)) for first in range(last + 1)]

    @torch.inference_mode()
    def outputs(self, batch: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        """The logits with all adapters, then those without the adapters of each span, in the order of `spans`.

        Args:
            batch: What the model is called with, without labels.
        """
        logits, inputs = self._run(batch, 0, None)
        yield logits
        # By the first layer of a span: the hidden states where the span, grown up to `last`, ends.
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
        """The logits, and the output of each layer, when the layers before `start` are skipped and `hidden` goes into
        it; None: what the embeddings give."""
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
