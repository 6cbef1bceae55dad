"""`View`: what is read from a base model before adapters are placed in it."""

from __future__ import annotations

from functools import cached_property

from torch import nn
from transformers import PreTrainedModel

from ..heads.finding import find_head
from ..method.modules import base_module, base_modules, is_inside
from .inference import find_attentions
from .table import ARCHITECTURES, Layers


class View:
    """What placement, heads and the fingerprint read from a base model.

    A view does not follow later changes of the model. A tuner layer counts as the module that it
    wraps.

    Attributes:
        modules: The model's modules by name, in its order. Outer modules come first.
        types: The `model_type` of each transformers model inside it, by name; "" is the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = dict(base_modules(model))
        self.types: dict[str, str] = {}
        for key, module in {"": model, **self.modules}.items():
            if isinstance(module, PreTrainedModel):
                self.types[key] = str(module.config.model_type)

    @cached_property
    def encoder(self) -> str:
        """The name of the encoder in a task model, such as "bert"; "" without one inside."""
        prefix = getattr(self.model, "base_model_prefix", "")
        return prefix if prefix in self.modules else ""

    @cached_property
    def head(self) -> list[str]:
        """The names of the task head's modules; see `find_head`."""
        return find_head(self.model, find_attentions(self.modules))

    @cached_property
    def output_embedding(self) -> str | None:
        """The name of the output embedding of a language model; None if there is none."""
        if not isinstance(self.model, PreTrainedModel):
            return None
        embedding = self.model.get_output_embeddings()
        for key, module in self.modules.items():
            if embedding is not None and module is base_module(embedding):
                return key
        return None

    def type_around(self, key: str) -> str:
        """Return the `model_type` of the innermost known model around a module; "" without one."""
        model_type = ""
        for outer, inner_type in self.types.items():
            if inner_type in ARCHITECTURES and (not outer or is_inside(key, outer)):
                model_type = inner_type
        return model_type


def look_up_layers(view: View) -> Layers:
    """Return the sub-layers of all lists of layers that the table describes.

    A list is left out if the table does not describe one of its layers, as in another version of
    transformers.
    """
    layers: Layers = {}
    for stack, module in view.modules.items():
        if not isinstance(module, nn.ModuleList):
            continue
        kinds = ARCHITECTURES.get(view.type_around(stack), ())
        kinds_in_list = [kind for kind in kinds if f".{stack}".endswith(f".{kind.layers}")]
        described: Layers = {}
        for index in range(len(module)):
            for kind in kinds_in_list:
                sub_layers = kind.find(f"{stack}.{index}", view.modules)
                if sub_layers is not None:
                    described[stack, index] = sub_layers
                    break
        if len(described) == len(module):
            layers |= described
    return layers


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a layer norm or an RMS norm with weights, of any library.

    MobileBERT's `NoNorm`, the scale and shift that are left of a layer norm, counts as well.
    """
    is_named_so = type(module).__name__.endswith(("LayerNorm", "RMSNorm", "NoNorm"))
    weight = getattr(module, "weight", None)
    is_one = isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or is_named_so
    return is_one and isinstance(weight, nn.Parameter) and weight.ndim == 1


def output_width(key: str, module: nn.Module) -> int:
    """Return the size of the last dimension of a module's output; a convolution's channels."""
    for attribute in ("out_features", "nf", "embedding_dim", "out_channels", "embed_dim"):
        width = getattr(module, attribute, None)
        if isinstance(width, int):
            return width
    if is_norm(module):
        weight = module.get_parameter("weight")
        # Under DeepSpeed's ZeRO-3, the weight itself is empty.
        return int(getattr(weight, "ds_shape", weight.shape)[-1])
    raise ValueError(
        "A bottleneck needs the width of the output that it is applied to; "
        f"{key!r} is a {type(module).__name__}, which does not tell it. Name a module with weights "
        "in target_modules, such as the projection before it."
    )
