"""Compare a service with many adapters to direct calls of `TaskBank.predict`.

    python benchmarks/serve.py --model base

The adapters have random weights. Clients send requests of several rows, each of a random task. The
figures are throughput and latencies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch
from peft import get_peft_model
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel, BertTokenizer

from houlsby_peft import HoulsbyConfig, TaskBank
from houlsby_peft.serving.local_service import start, stop
from models import SHAPES


HOST, PORT = "127.0.0.1", 8765
URL = f"http://{HOST}:{PORT}/predict"
WORDS = (
    "the",
    "adapter",
    "of",
    "this",
    "task",
    "reads",
    "these",
    "words",
    "all",
    "others",
    "go",
    "another",
    "way",
)
Row = tuple[str, str]


def make_adapters(folder: Path, shape: str, number: int) -> Path:
    """Save a base model and adapters of it, one of them a regression; return the folder of the
    adapters.
    """
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(WORDS))]
    sizes = {"vocab_size": 30522, "max_position_embeddings": 512} | SHAPES[shape]
    BertModel(BertConfig(**sizes)).save_pretrained(folder / "base")
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(
        folder / "base"
    )
    for index in range(number):
        labels = ["score"] if index == 0 else ["no", "yes", "maybe"][: 2 + index % 2]
        model = AutoModelForSequenceClassification.from_pretrained(
            folder / "base", id2label=dict(enumerate(labels)), num_labels=len(labels)
        )
        name = f"task-{index - 1}" if index else "score"
        get_peft_model(model, HoulsbyConfig(r=64)).save_pretrained(folder / "adapters" / name)
    return folder / "adapters"


def make_rows(tasks: Sequence[str], number: int, length: int, seed: int) -> list[Row]:
    """Return rows of random tasks, whose texts have about as many words as `length`."""
    chosen = random.Random(seed)
    texts = (
        " ".join(chosen.choices(WORDS, k=chosen.randint(length // 2, length * 3 // 2)))
        for _ in range(number)
    )
    return [(chosen.choice(tasks), text) for text in texts]


def body(rows: Sequence[Row]) -> str:
    """Return the body of a request."""
    return json.dumps({"inputs": [{"task": task, "text": text} for task, text in rows]})


async def send(bodies: Sequence[str], clients: int) -> tuple[float, list[tuple[int, float, Any]]]:
    """Send requests, so many at a time; return the seconds in all, and each one's status, seconds
    and answer.
    """
    found: list[tuple[int, float, Any]] = [(0, 0.0, None)] * len(bodies)
    waiting = iter(enumerate(bodies))

    async def client(session: aiohttp.ClientSession) -> None:
        for number, content in waiting:
            start = time.perf_counter()
            try:
                async with session.post(URL, data=content) as response:
                    answer = await response.json()
                    found[number] = response.status, time.perf_counter() - start, answer
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                found[number] = 0, time.perf_counter() - start, repr(error)

    connector = aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(300)
    ) as session:
        begin = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        return time.perf_counter() - begin, found


def compare(options: argparse.Namespace, bank: TaskBank) -> dict[str, Any]:
    """Predict the same rows in turns, by the bank itself and through the service."""
    rates: dict[str, list[float]] = {"TaskBank": [], "service": []}
    seconds, wrong = [], 0
    for number in range(options.rounds + 1):
        rows = make_rows(bank.tasks, options.rows, options.length, number)
        begin = time.perf_counter()
        expected = bank.predict(rows, batch_size=options.batch_size)
        direct = time.perf_counter() - begin
        size = options.rows_per_request
        bodies = [body(rows[start : start + size]) for start in range(0, len(rows), size)]
        taken, found = asyncio.run(send(bodies, options.clients))
        assert all(status == 200 for status, _, _ in found), Counter(
            status for status, _, _ in found
        )
        answers = [answer for _, _, content in found for answer in content["predictions"]]
        wrong += sum(
            answer["label"] != other["label"] or abs(answer["score"] - other["score"]) > 1e-3
            for answer, other in zip(answers, expected, strict=True)
        )
        if number:  # the first round warms both up
            rates["TaskBank"].append(len(rows) / direct)
            rates["service"].append(len(rows) / taken)
            seconds += [each for _, each, _ in found]
    ratios = [one / other for one, other in zip(rates["service"], rates["TaskBank"], strict=True)]
    return {
        "rows_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "ratios": [round(ratio, 3) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 3),
        "latency_s": {
            "p50": round(statistics.median(seconds), 3),
            "p99": round(statistics.quantiles(seconds, n=100)[-1], 3),
        },
        "other_answers": wrong,
    }


def main() -> None:
    """Run the command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", choices=list(SHAPES), default="base", help="shape of the base model"
    )
    parser.add_argument("--adapters", type=int, default=50)
    parser.add_argument("--length", type=int, default=32, help="words of a text, on average")
    parser.add_argument("--rows", type=int, default=640, help="rows of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows_per_request", type=int, default=8)
    parser.add_argument("--clients", type=int, default=12, help="requests at a time")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument(
        "--cpus", type=int, help="threads of TaskBank and of the replica; default: all cores"
    )
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    cpus = options.cpus or cores
    torch.set_num_threads(cpus)
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(Path(folder), options.model, options.adapters)
        start(
            {"adapters": str(adapters), "cpus": cpus, "batch_size": options.batch_size, "watch": 0},
            HOST,
            PORT,
        )
        try:
            bank = TaskBank({path.name: path for path in sorted(adapters.iterdir())})
            found = compare(options, bank)
        finally:
            stop()
    print(json.dumps({"cores": cores, **vars(options), **found}, indent=2))


if __name__ == "__main__":
    main()
