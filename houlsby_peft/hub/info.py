"""Describe a saved adapter without loading its base model: what `houlsby-peft info` prints."""

from __future__ import annotations

from typing import Any

from ..checkpoints.saved import SavedAdapter
from .card import adapter_rows, base_facts, base_rows, changed_options, count_parameters, find_task
from .markdown import one_line


def describe(saved: SavedAdapter) -> dict[str, Any]:
    """Return the facts about an adapter as values for JSON. `settings` are those that differ from
    their defaults.
    """
    config, record, task = saved.config, saved.record, find_task(saved)
    counts = count_parameters(saved)
    return {
        "adapter": saved.name,
        "task": task.pipeline if task else None,
        "task_type": config.task_type,
        "problem_type": record.problem_type,
        "labels": list((record.id2label or {}).values()),
        "max_length": record.max_length if record else None,
        "text_columns": record.text_columns if record else None,
        "base_model": {
            "name": config.base_model_name_or_path,
            "revision": config.revision,
            "config": base_facts(record),
        },
        "parameters": {**counts, "total": sum(counts.values())},
        "file_bytes": saved.weights_file.stat().st_size,
        "settings": changed_options(config),
    }


def describe_as_text(saved: SavedAdapter) -> list[tuple[str, str]]:
    """Return the facts about an adapter as pairs of a name and a text, each on one line."""
    config, task = saved.config, find_task(saved)
    base = [
        ("base model", config.base_model_name_or_path or ""),
        *base_rows(saved.record, config.revision),
    ]
    rows = [*([("task", task.pipeline)] if task else []), *adapter_rows(saved), *base]
    return [(name, one_line(text)) for name, text in rows]
