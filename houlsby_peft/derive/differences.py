"""How two adapters differ, in words."""

from __future__ import annotations

from collections.abc import Iterable

from ..config import HoulsbyConfig
from ..saved.record import AdapterRecord


def find_differences(
    config: HoulsbyConfig,
    record: AdapterRecord,
    other_config: HoulsbyConfig,
    other_record: AdapterRecord,
    options: Iterable[str],
) -> list[str]:
    """Return how two adapters differ in some options, and in what lies beneath them."""
    differences = []
    for name in options:
        value, other_value = getattr(config, name), getattr(other_config, name)
        if value != other_value:
            differences.append(f"{name} is {value!r} and {other_value!r}")
    if record.beneath_name != other_record.beneath_name:
        differences.append("other adapters lie beneath them")
    return differences
