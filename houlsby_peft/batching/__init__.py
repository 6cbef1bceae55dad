"""Rows of different adapters in one batch."""

from .batch import BASE, MixedBatch, select_rows
from .forward import forget_batches, hook_other_wrappers, run_mixed_batch


__all__ = ["BASE", "MixedBatch", "forget_batches", "hook_other_wrappers", "run_mixed_batch", "select_rows"]
