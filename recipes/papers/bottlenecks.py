"""The variants of the adapter that Houlsby et al. 2019 tried without gain (section 3.6)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from houlsby_peft import Bottleneck, HoulsbyConfig, HoulsbyLayer


class InnerBottleneck(Bottleneck):
    """A bottleneck with more than an activation between its projections: `h + up_proj(inner(down_proj(h)))`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inner = self.make_inner(self.down_proj.out_features)

    def make_inner(self, r: int) -> nn.Module:
        """Return the modules between the projections, from and to (..., r)."""
        raise NotImplementedError

    def branch(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `up_proj(inner(down_proj(hidden)))`."""
        branch: torch.Tensor = self.dropout(self.up_proj(self.inner(self.down_proj(hidden))))
        return branch


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


class GatedBottleneck(Bottleneck):
    """A parallel bottleneck whose output multiplies the sub-layer's: `h * (1 + up_proj(act(down_proj(x))))`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Saved with the weights, which alone would load as those of a parallel adapter, and predict something else.
        self.register_buffer("gated", torch.zeros(1))

    def forward(self, hidden: torch.Tensor, read: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply the hidden states."""
        read = hidden if read is None else read
        return hidden * (1 + self.branch(read.to(self.down_proj.weight.dtype)).to(hidden.dtype))


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
    "parallel": Variant({"kind": "parallel", "positions": ("attention", "feed_forward")}),
    "parallel_gated": Variant({"kind": "parallel", "positions": ("attention", "feed_forward")}, GatedBottleneck),
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
    """Replace an adapter's bottlenecks by new ones of another class, with the same sizes and initialization."""
    config = model.peft_config[adapter_name]
    for layer in model.modules():
        if isinstance(layer, HoulsbyLayer) and adapter_name in layer.houlsby_adapter:
            old = layer.houlsby_adapter[adapter_name]
            new = bottleneck(
                old.down_proj.in_features, old.down_proj.out_features, config.activation, config.dropout,
                config.init_std, config.init_weights, config.kind,
            )  # fmt: skip
            layer.update_layer(adapter_name, new.to(old.down_proj.weight))
