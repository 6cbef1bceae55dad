"""The variants of the adapter that Houlsby et al. 2019 tried without gain (section 3.6)."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from houlsby_peft import Bottleneck, HoulsbyConfig, HoulsbyLayer
from training.errors import RecipeError


class InnerBottleneck(Bottleneck):
    """A bottleneck with more than an activation between its projections: `h + up_proj(inner(down_proj(h)))`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inner = self.make_inner(self.down_proj.out_features)

    def make_inner(self, r: int) -> nn.Module:
        """Return the modules between the projections, from and to (..., r)."""
        raise NotImplementedError

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        branch = self.down_proj(hidden.to(self.down_proj.weight.dtype))
        return hidden + self.dropout(self.up_proj(self.inner(branch))).to(hidden.dtype)


class LayerNormBottleneck(InnerBottleneck):
    """A layer norm before the activation."""

    def make_inner(self, r: int) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(r), self.activation)


class BatchNormBottleneck(InnerBottleneck):
    """A batch norm before the activation, over all tokens of a batch, including padding."""

    def make_inner(self, r: int) -> nn.Module:
        return nn.Sequential(_TokenBatchNorm(r), self.activation)


class _TokenBatchNorm(nn.BatchNorm1d):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.flatten(0, -2)).view_as(hidden)


class TwoLayerBottleneck(InnerBottleneck):
    """A second layer of the bottleneck's width, with its own activation."""

    def make_inner(self, r: int) -> nn.Module:
        hidden_layer = nn.Linear(r, r)  # PyTorch's initialization: the outer projections keep the branch small
        return nn.Sequential(self.activation, hidden_layer, self.activation)


class ParallelBottleneck(Bottleneck):
    """A bottleneck on the input x of the sub-layer, not on its output h: `h + up_proj(act(down_proj(x)))`.

    Attributes:
        skip: The input x of the skip connection; set before each call.
    """

    skip: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Saved with the weights, which alone would load as those of the paper's adapter, and predict something else.
        self.register_buffer(type(self).__name__, torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        branch = self.down_proj(self.skip.to(self.down_proj.weight.dtype))
        branch = self.dropout(self.up_proj(self.activation(branch)))
        return self.combine(hidden, branch.to(hidden.dtype))

    def combine(self, hidden: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Combine the output of the sub-layer with the branch."""
        return hidden + branch


class GatedBottleneck(ParallelBottleneck):
    """A parallel bottleneck whose output multiplies the sub-layer's: `h * (1 + up_proj(act(down_proj(x))))`."""

    def combine(self, hidden: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + branch)


@dataclass(frozen=True)
class Variant:
    """Fields of the configuration, and the class of the bottlenecks."""

    config: Mapping[str, Any] = field(default_factory=dict)
    bottleneck: type[Bottleneck] = Bottleneck


VARIANTS = {
    "paper": Variant(),
    "layer_norm": Variant(bottleneck=LayerNormBottleneck),
    "batch_norm": Variant(bottleneck=BatchNormBottleneck),
    "two_layers": Variant(bottleneck=TwoLayerBottleneck),
    "tanh": Variant({"activation": "tanh"}),
    "relu": Variant({"activation": "relu"}),
    "swish": Variant({"activation": "swish"}),
    "attention_only": Variant({"positions": ("attention",)}),
    "parallel": Variant(bottleneck=ParallelBottleneck),
    "parallel_gated": Variant(bottleneck=GatedBottleneck),
}


def with_variant(variant: Variant, apply_method: Callable[..., PeftModel]) -> Callable[..., PeftModel]:
    """Return apply_method with the variant's configuration and bottlenecks."""

    def apply(model: PreTrainedModel, method: Any, config: HoulsbyConfig, *args: Any) -> PeftModel:
        adapted = apply_method(model, method, replace(config, **variant.config), *args)
        if variant.bottleneck is not Bottleneck:
            replace_bottlenecks(adapted, variant.bottleneck)
        return adapted

    return apply


def replace_bottlenecks(model: PeftModel, bottleneck: type[Bottleneck], adapter_name: str = "default") -> None:
    """Replace an adapter's bottlenecks by new ones of another class, with the same sizes and initialization.

    Raises:
        RecipeError: If the bottlenecks are parallel and the model's sub-layers do not pass on their input.
    """
    config = model.peft_config[adapter_name]
    for name, layer in model.named_modules():
        if not isinstance(layer, HoulsbyLayer):
            continue
        if adapter_name in layer.houlsby_adapter:
            old = layer.houlsby_adapter[adapter_name]
            new = bottleneck(
                old.down_proj.in_features, old.down_proj.out_features, config.activation, config.dropout,
                config.init_std, config.init_weights,
            )  # fmt: skip
            layer.update_layer(adapter_name, new.to(old.down_proj.weight))
        if issubclass(bottleneck, ParallelBottleneck):
            _pass_input(model.get_submodule(name.rpartition(".")[0]), layer.bottleneck(adapter_name))


def _pass_input(end: nn.Module, bottleneck: ParallelBottleneck) -> None:
    """Give a bottleneck the input of its sub-layer, which BERT adds to the output at the sub-layer's end."""
    if list(inspect.signature(end.forward).parameters) != ["hidden_states", "input_tensor"]:
        raise RecipeError(f"Parallel adapters are for encoders built as BERT, RoBERTa and ELECTRA; got {type(end)}.")

    def pass_input(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        bottleneck.skip = inputs[1]

    end.register_forward_pre_hook(pass_input)
