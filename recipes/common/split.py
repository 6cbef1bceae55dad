"""A validation split where a data set brings none, and samples; the same rows in every run."""

from collections.abc import Hashable, Sequence

import numpy as np
from datasets import Dataset

from common.errors import RecipeError


VALIDATION_SHARE = 0.1


def with_validation(splits: dict[str, Dataset], labels: Sequence[Hashable] | None = None) -> dict[str, Dataset]:
    """The splits, with a tenth of train, drawn at random, as validation if there is none.

    The draw does not depend on the seed of the run, so that runs with several seeds are scored on the same rows.

    Args:
        splits: With a split "train" of two rows at least, if there is no "validation".
        labels: The label of each row of train. One row of each stays in train, so that a label that is seen once is
            never one that is only scored.

    Raises:
        RecipeError: If that leaves no row to take.
    """
    if "validation" in splits:
        return splits
    train = splits["train"]
    order = np.random.default_rng(0).permutation(len(train))
    wanted = max(1, round(VALIDATION_SHARE * len(train)))
    seen: set[Hashable] = set()
    free = []
    for row in order:
        label = None if labels is None else labels[row]
        if label in seen:
            free.append(row)
        seen.add(label)
    chosen = free[:wanted]
    if not chosen:
        raise RecipeError(
            f"No validation split can be made of {len(train):,} training examples, as one of each label must stay in "
            "training. Give one, as validation.csv."
        )
    print(f"no validation split: {len(chosen):,} of the {len(train):,} training examples are taken for it")
    kept = np.setdiff1d(np.arange(len(train)), chosen)
    return {**splits, "train": train.select(kept), "validation": train.select(sorted(chosen))}


def draw(data: Dataset, size: int | None, seed: int) -> Dataset:
    """`size` rows at random, in their order; all rows for None or if there are no more."""
    if size is None or size >= len(data):
        return data
    return data.select(sorted(np.random.default_rng(seed).permutation(len(data))[:size]))
