"""What is trained: Houlsby adapters, or one of the methods they are compared with; and what stays frozen."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.hf_argparser import HfArg
from transformers.integrations import is_deepspeed_zero3_enabled

from accelerate import PartialState
from houlsby_peft import FrozenPrefix, HoulsbyConfig, Place, find_new_modules, find_places, put_two_layer_head
from training.arguments import AdapterArguments
from training.errors import RecipeError
from training.model import POOLER, add_adapter, find_pooler, keep_in_float32, record_preprocessing


AUTO, IN_MEMORY, OFF = "auto", "memory", "off"
# Instructions of processors, x86 and ARM, that multiply matrices in bfloat16; others emulate them, slowly.
_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass
class MethodArguments:
    """The method, and the options of those that are not adapters."""

    _argument_group_name = "method"
    head: ClassVar[str] = "linear"

    method: Literal["houlsby", "full", "top_k", "layer_norm", "lora", "linear"] = HfArg(
        default="houlsby",
        help="Train adapters, all weights, the top layers, the layer norms, PEFT's LoRA, or only the head. Every "
        "method trains the head.",
    )
    base_dtype: Literal["auto", "float32", "bfloat16"] = HfArg(
        default=AUTO,
        help="Data type of the frozen weights; adapters and LoRA are trained in float32. 'auto' is bfloat16 if the "
        "processor or GPU multiplies in it, else float32. Other methods, --fp16, DeepSpeed and FSDP need float32.",
    )
    keep_prefix: str = HfArg(
        default=AUTO,
        help="Compute the frozen layers below the adapted --layers once for each text, without dropout, and keep the "
        "result: in 'memory', or in a folder, where later runs find it, or 'off'. 'auto' is 'memory' if there are "
        "such layers and they pass on nothing but hidden states.",
    )
    keep_prefix_gb: float = HfArg(
        default=4.0,
        help="Maximum size of what --keep_prefix keeps per process, in GB; 'auto': at most half of the "
        "memory that is free.",
    )
    top_k: int | None = HfArg(
        default=None,
        help="Number of layers that --method top_k trains, from the top. The embeddings stay frozen, even if this is "
        "the number of all layers; --method full trains them as well.",
    )
    lora_r: int = HfArg(default=8, help="Rank of LoRA's matrices.")
    lora_alpha: int = HfArg(default=16, help="LoRA's scale, which is divided by the rank.")
    lora_targets: list[str] | None = HfArg(  # noqa: RUF009, which takes the type for a mutable default
        default=None, help="Linear layers that LoRA adapts, by the end of their name; default: PEFT's choice."
    )

    @property
    def adds_weights(self) -> bool:
        """Whether the method freezes the encoder and adds weights, rather than training the encoder's own."""
        return self.method in ("houlsby", "lora")

    def settled(self, adapter: AdapterArguments, training: TrainingArguments) -> "MethodArguments":
        """Check the options, and return a copy in which what is 'auto' is chosen, as far as any model allows it.

        Raises:
            RecipeError: If an option does not fit the method, or the result could not be pushed to the Hub.
        """
        self._check(adapter, training)
        chosen, shards = replace(self), _launched_with(training, "deepspeed", "fsdp")
        if self.base_dtype == AUTO:
            fits = self.adds_weights and not training.fp16 and not shards
            chosen.base_dtype = "bfloat16" if fits and _multiplies_in_bfloat16(training.device.type) else "float32"
        if self.keep_prefix == AUTO and (shards or not self._can_keep_prefix(adapter)):
            chosen.keep_prefix = OFF
        return chosen

    def _can_keep_prefix(self, adapter: AdapterArguments) -> bool:
        return self.method == "houlsby" and bool(adapter.layers) and 0 not in adapter.layers

    def _check(self, adapter: AdapterArguments, training: TrainingArguments) -> None:
        if (self.head != "linear" or training.push_to_hub) and self.method != "houlsby":
            wanted = "--push_to_hub" if training.push_to_hub else f"--head {self.head}"
            raise RecipeError(f"{wanted} needs --method houlsby, got {self.method}: only adapters are loaded by name.")
        if training.example and self.method != "houlsby":
            raise RecipeError(
                f"--example needs --method houlsby, got {self.method}: only adapters get a card. Leave it out."
            )
        if adapter.init_adapter is not None and self.method != "houlsby":
            raise RecipeError(
                f"--init_adapter needs --method houlsby, got {self.method}. To start from a whole model, give its "
                "folder as --model_name."
            )
        if self.base_dtype == "bfloat16" and not self.adds_weights:
            raise RecipeError(
                f"--base_dtype {self.base_dtype} is for --method houlsby or lora, which add weights to a frozen "
                f"encoder; got {self.method}. Leave it out; for speed, give --bf16."
            )
        if self.keep_prefix not in (AUTO, OFF) and not self._can_keep_prefix(adapter):
            got = f"{self.method} and {' '.join(map(str, adapter.layers or ['no --layers']))}"
            raise RecipeError(
                f"--keep_prefix needs --method houlsby and --layers without layer 0, got {got}. Give them, or leave "
                "it out."
            )
        if (self.method == "top_k") != (self.top_k is not None):
            got, remedy = ("without it", "Add it") if self.top_k is None else ("and it", "Leave it out")
            raise RecipeError(
                "--top_k, the number of layers to train, is for --method top_k, which needs it; got --method "
                f"{self.method} {got}. {remedy}."
            )


@dataclass
class ClassifierMethodArguments(MethodArguments):
    """The method of a text classifier, whose adapter may have a larger head."""

    head: Literal["linear", "two_layer"] = HfArg(
        default="linear",
        help="One linear layer on the pooled [CLS] vector or, for adapters, a hidden layer with tanh before it.",
    )


def prepare_model(
    model: PreTrainedModel,
    method: MethodArguments,
    adapter: AdapterArguments,
    training: TrainingArguments,
    max_length: int,
    null_threshold: float | None = None,
    text_columns: Sequence[str] | None = None,
    **fields: Any,
) -> PreTrainedModel | PeftModel:
    """Apply the method to a task's model, record in an adapter how it reads, and keep the frozen prefix if asked.

    Args:
        model: The model with its new head; changed in place.
        method: What to train. Its `keep_prefix`, if it is 'auto', becomes what is done.
        adapter: The adapter's options.
        training: The training arguments.
        max_length, null_threshold, text_columns: As for record_preprocessing.
        fields: Further fields of the adapter's configuration, such as task_type.

    Raises:
        RecipeError: If the model does not have what the method trains.
    """
    config = adapter.config(two_layer_head=method.head == "two_layer", **fields)
    adapted = apply_method(model, method, config, adapter.init_adapter)
    record_preprocessing(adapted, max_length, null_threshold, text_columns)
    if method.keep_prefix == AUTO:
        method.keep_prefix_gb = min(method.keep_prefix_gb, psutil.virtual_memory().available / 2e9)
        try:
            keep_prefix(adapted, IN_MEMORY, method.keep_prefix_gb, training)
            method.keep_prefix = IN_MEMORY
        except RecipeError:  # the frozen layers pass on more than hidden states, for example
            method.keep_prefix = OFF
    elif method.keep_prefix != OFF:
        keep_prefix(adapted, method.keep_prefix, method.keep_prefix_gb, training)
    return adapted


def apply_method(
    model: PreTrainedModel, method: MethodArguments, config: HoulsbyConfig, init_adapter: str | None = None
) -> PreTrainedModel | PeftModel:
    """Make trainable what the method trains, and freeze the rest.

    Adapters and LoRA give a PeftModel, which saves only the trained weights. The other methods leave a transformers
    model, which is saved whole: from_pretrained would load a file of the trained weights alone without complaint, with
    random weights for the rest.

    Args:
        model: The model with its new head; changed in place.
        method: What to train.
        config: The configuration of the adapter, for `houlsby`; for all methods, the kind of task, whether its
            modules_to_save name the pooler, and, except for `full`, which modules are excluded.
        init_adapter: As for add_adapter.

    Raises:
        RecipeError: If the model does not have what the method trains.
    """
    if method.head == "two_layer":
        try:
            put_two_layer_head(model)
        except ValueError as error:
            raise RecipeError(str(error)) from error
    heads = find_new_modules(model)
    if POOLER in (config.modules_to_save or ()):
        heads = list(dict.fromkeys([*heads, find_pooler(model)]))
    if method.method == "houlsby":
        return add_adapter(model, config, init_adapter)
    if method.method == "lora":
        if method.base_dtype == "bfloat16":
            for name in heads:
                keep_in_float32(model.get_submodule(name))
        return _add_lora(model, method, config, heads)
    trained = [model.get_submodule(name) for name in heads]
    if method.method == "full":
        trained = [model]
    elif method.method == "top_k":
        trained += top_layers(model, method.top_k)
    elif method.method == "layer_norm":
        places = _find_places(model, "all", config.exclude_modules)
        norms = (name for name, place in places.items() if place.position == "norm")
        trained += [model.get_submodule(name) for name in norms]
    train_only(model, trained)
    return model


def _add_lora(model: PreTrainedModel, method: MethodArguments, config: HoulsbyConfig, heads: list[str]) -> PeftModel:
    lora = LoraConfig(
        task_type=config.task_type,
        r=method.lora_r,
        lora_alpha=method.lora_alpha,
        target_modules=method.lora_targets,
        exclude_modules=config.exclude_modules,
        modules_to_save=heads,
    )
    try:
        return get_peft_model(model, lora)
    except ValueError as error:
        raise RecipeError(f"LoRA finds no layers in this model: {error} Name some with --lora_targets.") from error


def top_layers(model: PreTrainedModel, k: int) -> list[nn.Module]:
    """Return the k layers of the encoder that are nearest to the head, and BERT's pooler, which is above them.

    Raises:
        RecipeError: If the encoder has fewer layers, or they cannot be found.
    """
    stacks = {place.stack for place in _find_places(model, True).values() if place.layer is not None}
    layers = model.get_submodule(stacks.pop())
    if stacks or not 1 <= k <= len(layers):
        raise RecipeError(f"--top_k must be from 1 to {len(layers)}, the layers of one encoder, got {k}.")
    pooler = getattr(model.base_model, "pooler", None)
    return [*layers[-k:], *([] if pooler is None else [pooler])]


def _find_places(
    model: PreTrainedModel, norms: bool | Literal["all"], excluded: str | list[str] | None = None
) -> dict[str, Place]:
    try:
        return find_places(model, HoulsbyConfig(train_layer_norm=norms, exclude_modules=excluded))
    except ValueError as error:
        raise RecipeError(f"The layers of {type(model).__name__} cannot be found: {error}") from error


def train_only(model: nn.Module, trained: Iterable[nn.Module]) -> None:
    """Freeze the model except for some of its modules."""
    model.requires_grad_(False)
    for module in trained:
        module.requires_grad_(True)


def keep_prefix(model: PeftModel, where: str, gigabytes: float, training: TrainingArguments) -> None:
    """Keep the outputs of the frozen layers below the first adapter, from the first epoch on, to compute them once.

    Args:
        model: A model with adapters in its upper layers only; changed in place.
        where: "memory", or a folder, which several runs may use, even at the same time.
        gigabytes: Maximum size of what this process keeps.
        training: The training arguments.

    Raises:
        RecipeError: If nothing is below the first adapter, what is below cannot be kept, or the model is sharded.
    """
    if is_deepspeed_zero3_enabled() or _launched_with(training, "fsdp"):
        raise RecipeError("--keep_prefix needs whole layers in each process; ZeRO-3 and FSDP shard them. Use DDP.")
    folder = None if where == IN_MEMORY else Path(where)
    try:
        prefix = FrozenPrefix(model, max_bytes=int(gigabytes * 1e9), folder=folder)
    except ValueError as error:
        raise RecipeError(f"--keep_prefix: {error} The flag is --layers.") from error
    if PartialState().is_main_process:
        below = "the layer" if prefix.index == 1 else f"the {prefix.index} layers"
        print(f"kept in {where}: the outputs of the embeddings and {below} below the first adapter, without dropout")


def _multiplies_in_bfloat16(device: str) -> bool:
    """Return whether this device multiplies matrices in bfloat16 without emulating it in float32."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _BFLOAT16)


def _launched_with(training: TrainingArguments, *plugins: str) -> bool:
    """Return whether a flag, or accelerate, asks for one of these plugins: "deepspeed" or "fsdp".

    transformers' own is_fsdp_enabled is about loading only.
    """
    return any(
        getattr(training, name) or os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true"
        for name in plugins
    )
