"""What a run has saved, loaded again to be scored."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.utils import CONFIG_NAME
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import houlsby_peft
from run.arguments import AUTO
from run.edge import RecipeError
from run.files import read_object
from run.model import active_record, keep_in_float32, load_encoder, settle_padding
from run.run import RESULTS_FILE


@dataclass
class Saved:
    """What a run has saved, loaded again, with its results.json, as far as that is there."""

    name: str
    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    results: dict[str, Any]
    labels: tuple[str, ...]
    problem_type: str | None

    def recorded(self, name: str) -> Any:
        """Return how texts were read: max_length, null_threshold or text_columns, or None if it is
        not recorded.
        """
        record = active_record(self.model)
        if record is not None:
            value = getattr(record, name)
            if value is not None:
                return value
        if name == "text_columns":
            return self.results.get(name)
        return self.results.get("arguments", {}).get(name)

    def check_length(self, length: int | None) -> int:
        """Return the number of tokens to which texts are cut: `length`, the command line's, or else
        the recorded one.
        """
        length = length or self.recorded("max_length")
        if length is None:
            raise RecipeError(
                f"{self.name} does not record to how many tokens its texts were cut. "
                "Give --max_length."
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

    The adapter names its base model, unless another is given, a folder or a name on the Hub. The
    data type "auto" is that of the training, if it is known. The labels must be those given, in
    their order; None: any.
    """
    folder = Path(name).expanduser()
    # Beside the folder of the weights, or in that of the run.
    results = read_object(folder.parent / RESULTS_FILE) or read_object(folder / RESULTS_FILE) or {}
    if dtype == AUTO:
        dtype = results.get("arguments", {}).get("base_dtype") or "float32"
    saved_labels = tuple(labels or results.get("labels") or ())
    problem_type, model, tokenizer = results.get("problem_type"), None, None
    if (folder / "config.json").is_file():  # a whole model
        model = auto_class.from_pretrained(folder, dtype=getattr(torch, dtype))
        saved_labels = tuple(model.config.id2label.values())
        problem_type = model.config.problem_type or problem_type
    elif (read_object(folder / CONFIG_NAME) or {}).get("peft_type", "HOULSBY") == "HOULSBY":
        adapter = houlsby_peft.load(name, base_model=base_model, dtype=getattr(torch, dtype))
        model, tokenizer = adapter.model, adapter.tokenizer
        saved_labels, problem_type = tuple(adapter.labels or ()), adapter.record.problem_type
    else:
        encoder = _encoder_of(folder, base_model, len(saved_labels), dtype, auto_class)
        model = PeftModel.from_pretrained(encoder, folder)
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(folder)
    settle_padding(model, tokenizer)
    saved = Saved(name, model, tokenizer, results, saved_labels, problem_type)
    if labels is not None and saved.labels != tuple(labels):
        raise RecipeError(
            f"{name} predicts {', '.join(saved.labels)}; the task has {', '.join(labels)}."
        )
    return saved


def _encoder_of(
    folder: Path, base_model: str | None, num_labels: int, dtype: str, auto_class: Any
) -> PreTrainedModel:
    """Load the base model of LoRA or IA3, with the head's size where it is known."""
    config = PeftConfig.from_pretrained(str(folder))
    source = base_model or str(config.base_model_name_or_path)
    options = {"dtype": getattr(torch, dtype)}
    if num_labels:
        options["num_labels"] = num_labels
    encoder, _ = load_encoder(auto_class, source, **options)
    heads = tuple(config.modules_to_save or ())
    if dtype != "float32" and heads:
        for key, module in encoder.named_modules():
            if key.endswith(heads):
                keep_in_float32(module)
    return encoder
