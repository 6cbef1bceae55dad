"""Pushes at the end of a training what is known to be pushable before it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .checks import base_on_hub, check_access
from .push import push_to_hub


if TYPE_CHECKING:
    from transformers import TrainingArguments


def plan_push(training: TrainingArguments, base_model: str) -> Callable[..., str] | None:
    """Take `--push_to_hub`, `--hub_model_id`, `--hub_private_repo` and `--hub_token` over from the Trainer.

    The Trainer would push every checkpoint, with a card of its own. Call it before the training, in every process.

    Args:
        training: the arguments; `push_to_hub` is set to False.
        base_model: the base model's name on the Hub.

    Returns:
        None if nothing is to be pushed; else `push_to_hub` with name, base model, token and privacy filled in, to be
        called by the main process with the folder of the saved adapter, and `results` and `example` if there are any.

    Raises:
        AdapterError: The base model is a folder, which others do not have.
        HubError: The name or the token is not good, or the Hub cannot be reached.
    """
    if not training.push_to_hub:
        return None
    training.push_to_hub = False
    name = training.hub_model_id or Path(training.output_dir or os.curdir).resolve().name
    base = base_on_hub(base_model)
    if training.process_index == 0:
        name = check_access(name, training.hub_token)
    private = training.hub_private_repo or None
    return partial(push_to_hub, repo_id=name, base_model=base, private=private, token=training.hub_token)
