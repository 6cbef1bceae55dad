"""Rows of different adapters in one batch."""

from .batch import BASE, MixedBatch
from .forward import find_rows, fix_weights, forget_batches, hook_other_wrappers, run_mixed_batch


__all__ = [
    "BASE",
    "MixedBatch",
    "find_rows",
    "fix_weights",
    "forget_batches",
    "hook_other_wrappers",
    "run_mixed_batch",
]
