"""Pretrained encoders with a task head: loaded, adapted, and loaded again with what a run has trained."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from peft.utils import CONFIG_NAME
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import is_deepspeed_zero3_enabled

import houlsby_peft
from houlsby_peft import HoulsbyConfig
from houlsby_peft.checkpoints.downloads import find_packaged
from training.data import looks_like_a_path
from training.errors import RecipeError
from training.files import read_object
from training.packaged import PACKAGED
from training.quiet import hold_load_report


MINILM = "minilm"
# BERT's layer between the encoder and the head of a classifier.
POOLER = "pooler"
# Options in which an adapter and the one of --init_adapter must agree, with their flags.
_SAME_OPTIONS = {
    "r": "--r",
    "share_layers": "--share_layers",
    "train_layer_norm": "--train_layer_norm",
    "layers_to_transform": "--layers",
    "activation": "--activation",
    "kind": "--kind",
}


def find_model(name: str) -> str:
    """Return what from_pretrained can load: a folder, or a name on the Hub.

    Args:
        name: A folder, a name on the Hub, or the short name of a model from PyPI.

    Raises:
        RecipeError: If that model is not there, or `name` is a path without a model.
    """
    if name in PACKAGED:
        return str(PACKAGED[name].find())
    if looks_like_a_path(name) and not (Path(name) / "config.json").is_file():
        raise RecipeError(f"--model_name must name a folder with a model, but {name} has no config.json.")
    return find_packaged(name)


def load_model(
    auto_class: Any, name: str, dtype: str = "float32", **config_fields: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, set[str]]:
    """Load the encoder with the head of one of transformers' Auto classes.

    Args:
        auto_class: The class, such as AutoModelForMaskedLM.
        name: The model, as in find_model.
        dtype: The data type of the weights.
        config_fields: Fields of the model's configuration that the head needs.

    Returns:
        The model, its tokenizer, and the names of the weights that the checkpoint lacks, which are new.

    Raises:
        RecipeError: If the model exists neither here nor on the Hub.
    """
    found = find_model(name)
    try:
        config = AutoConfig.from_pretrained(found, **config_fields)
        tokenizer = AutoTokenizer.from_pretrained(found)
        # The head is trained from scratch, so a checkpoint's head of another task and size does not matter.
        model, loading = _load_pretrained(auto_class, found, config=config, dtype=dtype, ignore_mismatched_sizes=True)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"Cannot load the model {name!r}: {str(error).splitlines()[0]} Give a folder, a name on the Hub (which "
            f"needs a network or a filled cache), or --model_name {MINILM}, which needs neither."
        ) from error
    # Some tokenizers do not know how many tokens the encoder reads.
    positions = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    return model, tokenizer, loading["missing_keys"]


def _load_pretrained(auto_class: Any, name: str, **options: Any) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Return a model whose head is new or comes with an adapter, and what its checkpoint lacks or has besides.

    transformers reports these weights only if some of them are the encoder's.
    """
    with hold_load_report() as report:
        model, loading = auto_class.from_pretrained(name, output_loading_info=True, **options)
        if not _lacks_encoder_weights(model, loading):
            report.clear()
    return model, loading


def _lacks_encoder_weights(model: PreTrainedModel, loading: Mapping[str, Any]) -> bool:
    """Return whether weights of the encoder differ from the checkpoint's, apart from a pooler above it.

    The head of another task, in the model or in the checkpoint, is what a recipe expects.
    """
    layers = dict(model.base_model.named_children()).keys() - {POOLER}
    resized = (key for key, *_ in loading["mismatched_keys"])
    differing = {*loading["missing_keys"], *loading["unexpected_keys"], *resized}
    return any(key.removeprefix(f"{model.base_model_prefix}.").partition(".")[0] in layers for key in differing)


def load_classifier(
    name: str, labels: Sequence[str], problem_type: str | None = None, dtype: str = "float32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the encoder with a head for these labels, which is new unless the checkpoint has one of this size, and its
    tokenizer; see load_model and describe_head."""
    head = describe_head(labels, problem_type)
    label2id = {label: number for number, label in enumerate(labels)}
    model, tokenizer, _ = load_model(AutoModelForSequenceClassification, name, dtype, label2id=label2id, **head)
    return model, tokenizer


def describe_head(labels: Sequence[str], problem_type: str | None = None) -> dict[str, Any]:
    """Return the fields that describe a head in the configurations of model and adapter.

    If `problem_type` is None, one label is a regression and several are classes.
    """
    default = "regression" if len(labels) == 1 else "single_label_classification"
    return {"id2label": dict(enumerate(labels)), "problem_type": problem_type or default}


def find_pooler(model: PreTrainedModel) -> str:
    """Return the full name of BERT's pooler.

    Raises:
        RecipeError: If the model has none.
    """
    if getattr(model.base_model, POOLER, None) is None:
        raise RecipeError(f"--train_pooler needs an encoder with a pooler; {type(model).__name__} has none.")
    return f"{model.base_model_prefix}.{POOLER}"


def add_adapter(
    model: PreTrainedModel | PeftModel, config: HoulsbyConfig, init_adapter: str | None = None, name: str = "default"
) -> PeftModel:
    """Freeze the model and add an adapter, which becomes the only active and trained one.

    Args:
        model: The model with its head, or a model with other adapters.
        config: The adapter's options.
        init_adapter: Folder, or name on the Hub, of an adapter with the same options on the same encoder, whose
            bottlenecks and norms this one starts from. Its head is not used.
        name: The adapter's name.

    Raises:
        RecipeError: If the model has no position for an adapter, or `init_adapter` is missing or does not fit.
    """
    # PEFT keeps adapters in float32; ZeRO-3 needs one dtype for all trained weights, and keeps float32 copies itself.
    autocast = not is_deepspeed_zero3_enabled()
    try:
        if isinstance(model, PeftModel):
            model.add_adapter(name, config, autocast_adapter_dtype=autocast)
            model.set_adapter(name)
        else:
            if POOLER in (config.modules_to_save or ()):
                find_pooler(model)
            model = get_peft_model(model, config, adapter_name=name, autocast_adapter_dtype=autocast)
        if init_adapter is not None:
            _check_same_options(model.peft_config[name], init_adapter)
            houlsby_peft.init_from(model, init_adapter, name)
    except (OSError, ValueError) as error:
        raise RecipeError(str(error)) from error
    return model


def record_preprocessing(
    model: nn.Module,
    max_length: int,
    null_threshold: float | None = None,
    text_columns: Sequence[str] | None = None,
) -> None:
    """Record in the active Houlsby adapter how its texts are read, so that predictions treat texts alike.

    Args:
        model: The model; one without a Houlsby adapter is left as it is.
        max_length: The number of tokens to which texts are cut.
        null_threshold: For question answering with unanswerable questions; see `AdapterRecord`.
        text_columns: For text classification, the columns of the texts.
    """
    config = model.peft_config[model.active_adapter] if isinstance(model, PeftModel) else None
    if isinstance(config, HoulsbyConfig):
        config.record.max_length, config.record.null_threshold = max_length, null_threshold
        config.record.text_columns = None if text_columns is None else list(text_columns)


def recorded_length(saved: str, model: nn.Module) -> int:
    """Return the number of tokens to which a run has cut its texts.

    Args:
        saved: What the run has saved, as for load_saved.
        model: The loaded model.

    Raises:
        RecipeError: If that is not recorded, neither in the adapter nor in the run's results.json.
    """
    config = model.peft_config[model.active_adapter] if isinstance(model, PeftModel) else None
    record = config.record if isinstance(config, HoulsbyConfig) else None
    if record is not None and record.max_length is not None:
        return record.max_length
    try:
        return int(read_results(saved)["arguments"]["max_length"])
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(
            f"{saved} does not record to how many tokens its texts were cut, nor does results.json beside it. Give "
            "--max_length."
        ) from error


def recorded_text_columns(saved: str, model: nn.Module) -> Sequence[str] | None:
    """Return the columns of the texts that a run was trained on: those in the adapter or else, if they were named on
    the command line, in the run's results.json. None: they are in neither.

    Args:
        saved: What the run has saved, as for load_saved.
        model: The loaded model.
    """
    config = model.peft_config[model.active_adapter] if isinstance(model, PeftModel) else None
    record = config.record if isinstance(config, HoulsbyConfig) else None
    if record is not None and record.text_columns is not None:
        return record.text_columns
    return read_results(saved).get("arguments", {}).get("text_columns")


def read_results(saved: str) -> dict[str, Any]:
    """Return the results of the run that has saved an adapter or a model; empty if they are neither beside nor in its
    folder."""
    folder = Path(saved).expanduser()
    return read_object(folder.parent / "results.json") or read_object(folder / "results.json") or {}


def recorded_labels(saved: str, model: nn.Module) -> tuple[tuple[str, ...], str | None]:
    """Return the labels of what a run has saved, in their order, and the kind of its problem.

    Raises:
        RecipeError: If they are recorded neither in it nor in the run's results.json.
    """
    config = model.peft_config[model.active_adapter] if isinstance(model, PeftModel) else model.config
    if isinstance(config, HoulsbyConfig):
        return tuple(name for _, name in sorted((config.labels or {}).items())), config.kind_of_problem
    results = read_results(saved)
    if "labels" in results:
        return tuple(results["labels"]), results.get("problem_type")
    if isinstance(model, PeftModel):
        raise RecipeError(f"{saved} does not record its labels. Keep the results.json of its run beside its folder.")
    return tuple(config.id2label.values()), config.problem_type


def recorded_null_threshold(saved: str, model: nn.Module) -> float | None:
    """Return the threshold for giving no answer with which a run was scored, or None if it is not recorded.

    Args:
        saved: What the run has saved, as for load_saved.
        model: The loaded model.
    """
    config = model.peft_config[model.active_adapter] if isinstance(model, PeftModel) else None
    if isinstance(config, HoulsbyConfig) and config.record.null_threshold is not None:
        return config.record.null_threshold
    threshold = read_results(saved).get("arguments", {}).get("null_threshold")
    return threshold if isinstance(threshold, (int, float)) else None


def _check_same_options(config: HoulsbyConfig, path: str) -> None:
    """Raise RecipeError if the saved adapter has other options; the message names the recipe's flags."""
    source = HoulsbyConfig.from_pretrained(path)
    for option, flag in _SAME_OPTIONS.items():
        here, there = getattr(config, option), getattr(source, option)
        if here != there:
            raise RecipeError(
                f"--init_adapter needs the adapter's own options: {path} has {option} {there}, this run {here}. "
                f"Give {_as_flag(flag, there)} here, or {_as_flag(flag, here)} where that adapter is trained."
            )


def _as_flag(flag: str, value: object) -> str:
    if value is None:
        return f"no {flag}"
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else str(value).lower()}"


def load_saved(
    name: str,
    labels: Sequence[str] | None = None,
    base_model: str | None = None,
    dtype: str = "float32",
    auto_class: Any = AutoModelForSequenceClassification,
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """Load what a recipe has saved, and the tokenizer.

    Args:
        name: Folder of an adapter of any method or of a whole model, or a Houlsby adapter on the Hub.
        labels: The task's labels, in their order; default: any.
        base_model: The base model, as in find_model; default: the one that the adapter names. A whole model has none.
        dtype: The data type of the base model's weights. "auto": that of the training, if its results.json is there,
            and otherwise float32.
        auto_class: The class of the base model with its head.

    Raises:
        RecipeError: If it cannot be loaded, or has other labels.
        AdapterError: If it is not a usable adapter.
        HubError: If the Hub does not have it, or cannot be reached.
    """
    folder, results = Path(name).expanduser(), read_results(name)
    if dtype == "auto":
        dtype = results.get("arguments", {}).get("base_dtype") or "float32"
    weights_dtype = getattr(torch, dtype)
    base = None if base_model is None else find_model(base_model)
    config_file = folder / CONFIG_NAME
    is_adapter = config_file.is_file()
    try:
        fields = json.loads(config_file.read_text()) if is_adapter else {}
        is_houlsby = is_adapter and fields.get("peft_type") in (None, "HOULSBY")
    except (ValueError, AttributeError):
        is_houlsby = True  # houlsby_peft.load says what is wrong with the file
    if (folder / "config.json").is_file() or (is_adapter and not is_houlsby):
        try:
            if is_adapter:
                of_head = labels or results.get("labels")
                encoder, _ = _load_pretrained(
                    auto_class,
                    base or find_model(fields["base_model_name_or_path"]),
                    dtype=weights_dtype,
                    **({"num_labels": len(of_head)} if of_head else {}),
                )
                if dtype != "float32":
                    saved = tuple(fields.get("modules_to_save") or ())
                    for head in [module for key, module in encoder.named_modules() if saved and key.endswith(saved)]:
                        keep_in_float32(head)
                model = PeftModel.from_pretrained(encoder, folder)
            else:
                model = auto_class.from_pretrained(folder, dtype=weights_dtype)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, RuntimeError) as error:
            raise RecipeError(f"Cannot load {name}: {str(error).splitlines()[0]}") from error
        found = None if is_adapter else tuple(model.config.id2label.values())
    else:
        adapter = houlsby_peft.load(name, base_model=base, dtype=weights_dtype)
        model, tokenizer, found = adapter.model, adapter.tokenizer, adapter.labels
    if labels is not None and found is not None and found != tuple(labels):
        raise RecipeError(f"{name} predicts {', '.join(found)}; the task has {', '.join(labels)}. Give its own task.")
    return model, tokenizer


def keep_in_float32(module: nn.Module) -> None:
    """Make a module compute in float32, whatever the data type of its inputs and of the model around it."""

    def convert(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value.float() if isinstance(value, torch.Tensor) else value for value in inputs)

    module.float().register_forward_pre_hook(convert)
