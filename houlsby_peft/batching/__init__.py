"""Rows of different adapters in one batch."""

from .batch import MixedBatch, hook_other_wrappers, prepare_pass, run_mixed_batch
from .rows import RowFinder


__all__ = ["MixedBatch", "RowFinder", "hook_other_wrappers", "prepare_pass", "run_mixed_batch"]
