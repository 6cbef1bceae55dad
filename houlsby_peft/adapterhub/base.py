"""The base model of a conversion: its configuration, and a model of it without weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig

from ..errors import AdapterError, shortened
from ..serving.base_model import explain_errors


def read_base_config(name: str, token: str | None) -> PretrainedConfig:
    """Read the configuration of a base model, without its weights and without code from its repository.

    Raises:
        AdapterError: The file is not usable.
        HubError: The repository does not exist, is private or cannot be reached.
    """
    with explain_errors("base model", name, None):
        config: PretrainedConfig = AutoConfig.from_pretrained(name, token=token, trust_remote_code=False)
        return config


def make_empty(config: PretrainedConfig, auto_class: str) -> Any:
    """Return a model without weights.

    Raises:
        AdapterError: transformers has no such class for the configuration.
    """
    try:
        with torch.device("meta"):
            return getattr(transformers, auto_class).from_config(config, trust_remote_code=False)
    except ValueError as error:
        raise AdapterError(
            f"transformers must have an {auto_class} for the base model, whose type is {config.model_type}: "
            f"{shortened(str(error))}."
        ) from error
