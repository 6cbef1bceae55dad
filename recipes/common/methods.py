"""What of the encoder is trained: Houlsby adapters, or one of the methods that they are compared with."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from common.errors import RecipeError
from common.model import POOLER, add_adapter, find_pooler
from common.names import ADDING
from houlsby_peft import HoulsbyConfig
from houlsby_peft.heads.find import find_head, find_new
from houlsby_peft.heads.new import put_two_layer_head
from houlsby_peft.layer import base_modules
from houlsby_peft.placement.places import find_places, is_norm


@dataclass
class MethodArguments:
    """The method, and the options of those that are not adapters."""

    _argument_group_name = "method"

    method: Literal["houlsby", "full", "top_k", "layer_norm", "lora", "linear"] = HfArg(
        default="houlsby",
        help="Train adapters, everything, the top layers, the layer norms, PEFT's LoRA, or nothing but the head, "
        "which every method trains.",
    )
    head: Literal["linear", "two_layer"] = HfArg(
        default="linear",
        help="One layer on the pooled [CLS] vector, or for adapters a second one with tanh before it.",
    )
    base_dtype: Literal["float32", "bfloat16"] = HfArg(
        default="float32", help="Of the weights that stay frozen; what adapters and LoRA train is in float32."
    )
    keep_prefix: str | None = HfArg(
        default=None,
        help="Compute what lies below the adapted --layers once for each text, without dropout, and keep it: in "
        "'memory', or in a folder, for later runs, too.",
    )
    keep_prefix_gb: float = HfArg(default=4.0, help="So much is kept at most, in each process.")
    top_k: int | None = HfArg(default=None, help="Layers that --method top_k trains, counted from the top.")
    lora_r: int = HfArg(default=8, help="Rank of LoRA's matrices.")
    lora_alpha: int = HfArg(default=16, help="LoRA's scale, divided by the rank.")
    lora_targets: list[str] | None = HfArg(  # noqa: RUF009, which takes the type for a mutable default
        default=None, help="Linear layers that LoRA adapts, by the end of their name; default: PEFT's for the encoder."
    )

    def check(self, pushed: bool = False) -> None:
        """Raises RecipeError if an option does not go with the method, or what it trains cannot be pushed to the Hub.

        Args:
            pushed: Whether it is to be.
        """
        if (self.head != "linear" or pushed) and self.method != "houlsby":
            wanted = "--push_to_hub" if pushed else f"--head {self.head}"
            raise RecipeError(f"{wanted} needs --method houlsby, got {self.method}: only adapters are loaded by name.")
        if self.base_dtype != "float32" and self.method not in ADDING:
            raise RecipeError(
                f"--base_dtype {self.base_dtype} is for weights that stay frozen (--method {' or '.join(ADDING)}); "
                f"{self.method} trains some of them, which needs float32. For speed, give --bf16."
            )
        if self.keep_prefix and self.method != "houlsby":
            raise RecipeError(f"--keep_prefix needs --method houlsby and --layers, got {self.method}.")
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
        config: Of the adapter, for `houlsby`; for all methods, whether its modules to save have the pooler.
        init_adapter: As for add_adapter.

    Raises:
        RecipeError: If the model does not have what the method trains.
    """
    heads = _prepare_heads(model, method, train_pooler=POOLER in (config.modules_to_save or ()))
    if method.method == "houlsby":
        return add_adapter(model, config, init_adapter)
    if method.method == "lora":
        return _add_lora(model, method, heads)
    trained = [model.get_submodule(name) for name in heads]
    if method.method == "full":
        trained = [model]
    elif method.method == "top_k":
        trained += top_layers(model, method.top_k)
    elif method.method == "layer_norm":
        trained += [module for _, module in base_modules(model) if is_norm(module)]
    train_only(model, trained)
    return model


def _prepare_heads(model: PreTrainedModel, method: MethodArguments, train_pooler: bool) -> list[str]:
    """Gives the model the head that is asked for, and names it, and the pooler if that is to be trained."""
    if method.head == "two_layer":
        try:
            put_two_layer_head(model)
        except ValueError as error:
            raise RecipeError(str(error)) from error
    heads = find_head(model, ())
    heads += find_new(model, heads, ())
    if train_pooler:
        heads = list(dict.fromkeys([*heads, find_pooler(model)]))
    if method.base_dtype != "float32":
        for name in heads:
            keep_in_float32(model.get_submodule(name))
    return heads


def _add_lora(model: PreTrainedModel, method: MethodArguments, heads: list[str]) -> PeftModel:
    config = LoraConfig(
        task_type="SEQ_CLS",
        r=method.lora_r,
        lora_alpha=method.lora_alpha,
        target_modules=method.lora_targets,
        modules_to_save=heads,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise RecipeError(f"LoRA finds no place in this model: {error} Name some with --lora_targets.") from error


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


def keep_in_float32(module: nn.Module) -> None:
    """Makes a module compute in float32, whatever its inputs and the model around it are in."""

    def convert(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value.float() if isinstance(value, torch.Tensor) else value for value in inputs)

    module.float().register_forward_pre_hook(convert)


def train_only(model: nn.Module, trained: Iterable[nn.Module]) -> None:
    """Freezes the model but for some of its modules."""
    model.requires_grad_(False)
    for module in trained:
        module.requires_grad_(True)
