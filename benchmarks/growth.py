"""Measure how cost grows with the size and number of adapters, and with the adapted layers."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import psutil
from peft import get_peft_model
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

from houlsby_peft import HoulsbyConfig, TaskBank
from methods import FLOOR, houlsby
from models import SHAPES, Method, floor
from report import Rows
from steps import measure
from timing import seconds


TEXT = "the adapter of this task reads these words and those of all other tasks go another way " * 2


def by_size_and_layers(cell: tuple[str, int, int], rounds: int, device: str) -> Rows:
    """Measure a training step with several bottleneck sizes, and with upper layers only."""
    depth = SHAPES[cell[0]]["num_hidden_layers"]
    methods: dict[str, Method] = {FLOOR: floor}
    methods |= {f"Houlsby r={r}": houlsby(r=r) for r in (8, 16, 32, 64, 128, 256)}
    for top in (depth // 2, depth // 3, 1):
        layers = list(range(depth - top, depth))
        methods[f"Houlsby r=64, top {top} of {depth} layers"] = houlsby(
            r=64, layers_to_transform=layers
        )
    return measure("train", methods, cell, rounds, device)


def by_adapters_held(shape: str, numbers: Iterable[int], share_layers: int = 3) -> Rows:
    """Measure the time to load one more adapter and to predict texts of 32 tasks, and the memory of
    all adapters.

    `predict_s` is for the same 32 tasks as before, and `predict_others_s` for others. `load_s` is
    the median of the last nine adapters, without a prediction.
    """
    with tempfile.TemporaryDirectory() as folder:
        base, adapter = _saved(Path(folder), shape, share_layers)
        tasks = [str(number) for number in range(max(numbers))]
        bank = TaskBank(dict.fromkeys(tasks, adapter), base_model=str(base))
        result, before, loads = [], 0, []
        for number, task in enumerate(tasks, start=1):
            loads.append(seconds(partial(bank.reader, task), "cpu"))
            if number == 1:
                bank.predict([(task, TEXT)])
                before = psutil.Process().memory_info().rss
            if number in numbers:
                choices = [
                    [(tasks[(row * number // 32 + shift) % number], TEXT) for row in range(32)]
                    for shift in range(4)
                ]
                predict_others = min(
                    seconds(partial(bank.predict, requests), "cpu") for requests in choices
                )
                predict = min(seconds(partial(bank.predict, choices[-1]), "cpu") for _ in range(3))
                held = psutil.Process().memory_info().rss - before
                result.append(
                    {
                        "shape": shape,
                        "adapters": number,
                        "load_s": statistics.median(loads[-9:]),
                        "predict_s": predict,
                        "predict_others_s": predict_others,
                        "held_bytes": held,
                    }
                )
        return result


def _saved(folder: Path, shape: str, share_layers: int) -> tuple[Path, Path]:
    """Save a base model with a tokenizer, and an adapter for it. Return both folders."""
    base, adapter = folder / "base", folder / "adapter"
    model = BertForSequenceClassification(BertConfig(**SHAPES[shape]))
    model.save_pretrained(base)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(TEXT.split()))]
    vocabulary = {word: number for number, word in enumerate(words)}
    BertTokenizer(vocab=vocabulary, model_max_length=512).save_pretrained(base)
    config = HoulsbyConfig(r=64, share_layers=share_layers, task_type="SEQ_CLS")
    get_peft_model(model, config).save_pretrained(adapter)
    return base, adapter
