"""Measure how much of a batch is padding, in random order and in the recipes' batches of similar lengths.

This is the most that packing several texts into a row could save.

    python benchmarks/padding.py TOKENIZER FILE.parquet [FILE.parquet ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoTokenizer
from transformers.trainer_pt_utils import LengthGroupedSampler


BATCH = 32
LONGEST = 128


def padding(lengths: Sequence[int], order: Sequence[int], batch: int = BATCH) -> float:
    """Return the fraction of padding among the tokens of all batches, each as long as its longest text."""
    batches = [[lengths[row] for row in order[start : start + batch]] for start in range(0, len(order), batch)]
    return 1 - sum(map(sum, batches)) / sum(max(texts) * len(texts) for texts in batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="Name on the Hub, or folder.")
    parser.add_argument(
        "files", nargs="+", type=Path, help="Files of texts or pairs of texts; all columns of strings are used."
    )
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    print(f"{'file':<40}  texts  tokens  random  similar lengths")
    for file in args.files:
        columns = [list(column) for _, column in pd.read_parquet(file).select_dtypes(["object", "string"]).items()]
        lengths = [len(ids) for ids in tokenizer(*columns, truncation=True, max_length=LONGEST)["input_ids"]]
        generator = torch.Generator().manual_seed(0)
        grouped = list(LengthGroupedSampler(BATCH, lengths=lengths, generator=generator))
        shares = [padding(lengths, order) for order in (torch.randperm(len(lengths)).tolist(), grouped)]
        mean = sum(lengths) / len(lengths)
        print(f"{str(file)[-40:]:<40}  {len(lengths):>5}  {mean:>6.1f}  {shares[0]:>6.1%}  {shares[1]:>15.1%}")


if __name__ == "__main__":
    main()
