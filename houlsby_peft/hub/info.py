"""Describe an adapter, on the Hub or in a folder, without loading its base model: what `houlsby-peft info` prints."""

from __future__ import annotations

import os
from typing import Any

from peft.utils import SAFETENSORS_WEIGHTS_NAME

from ..checkpoints.untrusted import check_weights, read_config
from ..serving.load import find_folder
from .card import adapter_rows, base_rows, count_parameters, find_task, read_facts
from .markdown import one_line


# Settings of PEFT that say nothing about a saved adapter, and what is described elsewhere.
_LEFT_OUT = {
    *("auto_mapping", "base_model_name_or_path", "id2label", "inference_mode", "init_weights", "peft_type"),
    *("peft_version", "problem_type", "revision", "task_type"),
}


def describe(adapter: str | os.PathLike[str], revision: str | None = None) -> dict[str, Any]:
    """Return the facts about an adapter as values for JSON.

    Args:
        adapter: Its folder, or its name on the Hub.
        revision: A branch, tag or commit of its repository.

    Raises:
        AdapterError: It is not a usable adapter.
        HubError: The repository does not exist, is private or cannot be reached.
    """
    folder = find_folder(adapter, revision)
    config = read_config(folder)
    counts = count_parameters(check_weights(folder, config))
    record, facts, task = config.record, read_facts(config), find_task(config)
    settings = {name: value for name, value in config.to_dict().items() if name not in _LEFT_OUT}
    return {
        "adapter": str(adapter),
        "task": task.pipeline if task else None,
        "task_type": config.task_type,
        "problem_type": config.kind_of_problem,
        "labels": facts.labels,
        "max_length": record.max_length if record else None,
        "text_columns": record.text_columns if record else None,
        "base_model": {
            "name": config.base_model_name_or_path,
            "revision": config.revision,
            "config": facts.base_config,
        },
        "parameters": {**counts, "total": sum(counts.values())},
        "file_bytes": (folder / SAFETENSORS_WEIGHTS_NAME).stat().st_size,
        "settings": settings,
    }


def describe_as_text(adapter: str | os.PathLike[str], revision: str | None = None) -> list[tuple[str, str]]:
    """Return the facts about an adapter as pairs of a name and a text, each on one line; see `describe`."""
    folder = find_folder(adapter, revision)
    config = read_config(folder)
    sizes, task = check_weights(folder, config), find_task(config)
    rows = [
        *([("task", task.pipeline)] if task else []),
        *adapter_rows(config, sizes, (folder / SAFETENSORS_WEIGHTS_NAME).stat().st_size, total=None),
        *((f"base model: {name}", value) for name, value in base_rows(config, config.base_model_name_or_path or "")),
    ]
    return [(one_line(name), one_line(value)) for name, value in rows]
