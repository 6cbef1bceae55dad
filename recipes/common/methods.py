"""What of the encoder is trained: Houlsby adapters, or one of the methods that they are compared with."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from common.errors import RecipeError
from common.model import add_adapter
from houlsby_peft import HoulsbyConfig
from houlsby_peft.base_modules import base_modules
from houlsby_peft.head import find_head
from houlsby_peft.places import find_places, is_norm


@dataclass
class MethodArguments:
    """The method, and the options of those that are not adapters."""

    _argument_group_name = "method"

    method: Literal["houlsby", "full", "top_k", "layer_norm", "lora", "linear"] = HfArg(
        default="houlsby",
        help="Train adapters, everything, the top layers, the layer norms, PEFT's LoRA, or nothing but the head, "
        "which every method trains.",
    )
    top_k: int | None = HfArg(default=None, help="Layers that --method top_k trains, counted from the top.")
    lora_r: int = HfArg(default=8, help="Rank of LoRA's matrices.")
    lora_alpha: int = HfArg(default=16, help="LoRA's scale, divided by the rank.")
    lora_targets: list[str] | None = HfArg(  # noqa: RUF009, which takes the type for a mutable default
        default=None, help="Linear layers that LoRA adapts, by the end of their name; default: PEFT's for the encoder."
    )

    def check(self) -> None:
        """Raises RecipeError if --top_k is missing, or given to another method."""
        if (self.method == "top_k") != (self.top_k is not None):
            raise RecipeError("--method top_k needs --top_k, the number of layers to train; no other method has it.")


def apply_method(
    model: PreTrainedModel, method: MethodArguments, config: HoulsbyConfig, init_adapter: str | None = None
) -> PreTrainedModel | PeftModel:
    """Makes trainable what the method trains, and freezes the rest.

    Adapters and LoRA give a PeftModel, which is saved as a file of what was trained. The other methods leave a model
    of transformers, saved whole: it is loaded by from_pretrained and by nothing else, and a file of the trained
    weights alone would load just so, with random ones for the rest.

    Args:
        model: The model with its new head; changed in place.
        method: What to train.
        config: Of the adapter, for `houlsby`.
        init_adapter: As for add_adapter.

    Raises:
        RecipeError: If the model does not have what the method trains.
    """
    if method.method == "houlsby":
        return add_adapter(model, config, init_adapter)
    heads = find_head(model, ())
    if method.method == "lora":
        lora = LoraConfig(
            task_type="SEQ_CLS",
            r=method.lora_r,
            lora_alpha=method.lora_alpha,
            target_modules=method.lora_targets,
            modules_to_save=heads,
        )
        try:
            return get_peft_model(model, lora)
        except ValueError as error:
            raise RecipeError(f"LoRA finds no place in this model: {error} Name some with --lora_targets.") from error
    trained = [model.get_submodule(name) for name in heads]
    if method.method == "full":
        trained = [model]
    elif method.method == "top_k":
        trained += top_layers(model, method.top_k)
    elif method.method == "layer_norm":
        trained += [module for _, module in base_modules(model) if is_norm(module)]
    train_only(model, trained)
    return model


def top_layers(model: PreTrainedModel, k: int) -> list[nn.Module]:
    """The k layers of the encoder that are nearest to the head, and BERT's pooler, which is above them.

    Raises:
        RecipeError: If there are not so many.
    """
    try:
        stacks = {place.stack for place in find_places(model, HoulsbyConfig()).values() if place.layer is not None}
    except ValueError as error:
        raise RecipeError(f"The layers of {type(model).__name__} cannot be told: {error}") from error
    layers = model.get_submodule(stacks.pop())
    if stacks or not 1 <= k <= len(layers):
        raise RecipeError(f"--top_k must be from 1 to {len(layers)}, the layers of one encoder, got {k}.")
    pooler = getattr(model.base_model, "pooler", None)
    return [*layers[-k:], *([] if pooler is None else [pooler])]


def train_only(model: nn.Module, trained: Iterable[nn.Module]) -> None:
    """Freezes the model but for some of its modules."""
    model.requires_grad_(False)
    for module in trained:
        module.requires_grad_(True)
