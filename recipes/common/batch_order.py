"""The order of a training's batches."""

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import LengthGroupedSampler


class OrderOfEpoch(Sampler[int]):
    """Length grouping with the batches in random order.

    The grouping itself goes from long texts to short ones, over and over, 50 batches at a time. The
    batch with the longest text stays first, so that a lack of memory shows at once. The order
    depends only on seed and epoch, so that a run that resumes in the middle of an epoch sees
    exactly the remaining examples.
    """

    def __init__(self, sampler: LengthGroupedSampler, seed: Callable[[], int]) -> None:
        self._sampler, self._seed = sampler, seed

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed())
        self._sampler.generator = generator
        first, *batches = torch.tensor(list(self._sampler)).split(self._sampler.batch_size)
        whole, last = batches[:-1], batches[-1:]
        order = torch.randperm(len(whole), generator=generator).tolist()
        yield from torch.cat([first, *(whole[number] for number in order), *last]).tolist()
