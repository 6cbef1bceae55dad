"""What an adapter gives for the example of its card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from ..checkpoints.untrusted import read_config
from ..heads.tasks import task_of_config
from ..serving.base_model import load_tokenizer
from ..serving.load import load
from ..serving.predictor import Input, Predictor


def answer_of_folder(
    folder: Path, example: Input | Sequence[Input], base_model: str | None, token: str | None = None
) -> list[Any]:
    """What a saved adapter gives for the example of its card, on the base model in the folder that it records or, if
    that is gone, on `base_model`."""
    recorded = Path(read_config(folder).base_model_name_or_path or "").is_dir()
    return load(folder, base_model=None if recorded else base_model, token=token).predict(example)


def answer_of_model(
    adapter: PeftModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    example: Input | Sequence[Input],
    token: str | None,
) -> list[Any]:
    """What the adapter gives for the example of the card; a model that is being trained is used as it is."""
    config, training = read_config(folder), adapter.training
    tokenizer = tokenizer or load_tokenizer(folder, config, None, token)
    try:
        return Predictor(adapter.eval(), adapter.active_adapters[0], task_of_config(config), tokenizer).predict(
            example
        )
    finally:
        adapter.train(training)
