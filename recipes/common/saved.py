"""Trained adapters and models, loaded again to be evaluated."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import houlsby_peft
from common.errors import RecipeError
from common.model import find_model
from houlsby_peft.inference.adapter_files import CONFIG_FILE


def load_saved(
    name: str, labels: Sequence[str], base_model: str | None = None, dtype: str = "float32"
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """Loads what a recipe has saved, and the tokenizer.

    Args:
        name: Folder of an adapter of any method or of a whole model, or an adapter of houlsby_peft on the Hub.
        labels: Of the task, in their order.
        base_model: As in find_model, in place of the one that a Houlsby adapter names.
        dtype: Of the base model's weights.

    Raises:
        RecipeError: If it cannot be loaded, or has other labels.
        AdapterError: If it is no usable adapter.
        HubError: If the Hub does not have it, or cannot be reached.
    """
    folder, kind = Path(name).expanduser(), getattr(torch, dtype)
    if (folder / "config.json").is_file() or _is_of_another_method(folder / CONFIG_FILE):
        auto_class = AutoModelForSequenceClassification
        arguments = {}
        if (folder / CONFIG_FILE).is_file():
            auto_class, arguments = AutoPeftModelForSequenceClassification, {"num_labels": len(labels)}
        try:
            model = auto_class.from_pretrained(folder, dtype=kind, **arguments)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, RuntimeError) as error:
            raise RecipeError(f"Cannot load {name}: {str(error).splitlines()[0]}") from error
        found = None if arguments else tuple(model.config.id2label.values())
    else:
        base = None if base_model is None else find_model(base_model)
        adapter = houlsby_peft.load(name, base_model=base, dtype=kind)
        model, tokenizer, found = adapter.model, adapter.tokenizer, adapter.labels
    if found is not None and found != tuple(labels):
        raise RecipeError(f"{name} predicts {', '.join(found)}; the task has {', '.join(labels)}. Give its own task.")
    return model, tokenizer


def _is_of_another_method(path: Path) -> bool:
    """Whether it is the configuration of an adapter that PEFT itself can load."""
    return path.is_file() and json.loads(path.read_text()).get("peft_type") not in (None, "HOULSBY")
