"""Compare a service with many adapters to direct calls of `TaskBank.predict`.

    python benchmarks/serve.py --model minilm --cpus 1
    python benchmarks/serve.py --model minilm --cpus 1 --ray

The adapters have random weights. Each client sends one text after the other, each for a random
task. The figures are requests per second, as a share of direct batches, and the median latency, as
a multiple of a direct prediction.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from peft import get_peft_model
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel, BertTokenizer

from houlsby_peft import HoulsbyConfig, TaskBank
from models import SHAPES


TEXT = "the adapter of this task reads these words all others go another way"
WORDS = TEXT.split()
BATCH_SIZE = 32
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
    rows = []
    for _ in range(number):
        words = chosen.choices(WORDS, k=chosen.randint(length // 2, length * 3 // 2))
        rows.append((chosen.choice(tasks), " ".join(words)))
    return rows


@contextmanager
def running_service(adapters: Path, cpus: int, on_ray: bool) -> Iterator[str]:
    """Run the service in processes of its own; yield its address when it is ready."""
    command = [sys.executable, "-m", "houlsby_peft_cli", "serve", "--adapters", str(adapters)]
    command += ["--port", "0", "--cpus", str(cpus), "--watch", "0"]
    if on_ray:
        command += ["--ray", "--replicas", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if " on http://" in line:
                yield line.partition(" on ")[2].partition(". Stop")[0]
                break
    finally:
        process.terminate()
        process.wait(60)


async def send(url: str, rows: Sequence[Row], clients: int) -> tuple[float, list[Any]]:
    """Send each row by itself, as many at a time as there are clients; return the seconds in all,
    and each one's status, seconds and answer.
    """
    answers: list[Any] = [None] * len(rows)
    waiting = iter(enumerate(rows))

    async def client(session: aiohttp.ClientSession) -> None:
        for number, (task, text) in waiting:
            start = time.perf_counter()
            body = {"inputs": [{"task": task, "text": text}]}
            async with session.post(url, json=body) as response:
                answer = await response.json()
            answers[number] = response.status, time.perf_counter() - start, answer

    connector = aiohttp.TCPConnector(limit=clients)
    timeout = aiohttp.ClientTimeout(300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        begin = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        return time.perf_counter() - begin, answers


def measure_direct(bank: TaskBank, rows: Sequence[Row]) -> tuple[float, float, list[Any]]:
    """Return rows per second in batches, the median seconds of single rows, and the results."""
    begin = time.perf_counter()
    results = bank.predict(rows, BATCH_SIZE)
    rows_per_second = len(rows) / (time.perf_counter() - begin)
    seconds = []
    for row in rows[:100]:
        start = time.perf_counter()
        bank.predict([row])
        seconds.append(time.perf_counter() - start)
    return rows_per_second, statistics.median(seconds), results


def count_wrong(answers: Sequence[Any], expected: Sequence[Any]) -> int:
    """Return how many answers differ from direct predictions."""
    wrong = 0
    for (_, _, content), result in zip(answers, expected, strict=True):
        [answer] = content["predictions"]
        is_near = abs(answer["score"] - result["score"]) < 1e-3
        wrong += answer["label"] != result["label"] or not is_near
    return wrong


def compare(options: argparse.Namespace, bank: TaskBank, url: str) -> list[dict[str, Any]]:
    """Predict the same rows in turns, directly and by the service, and take medians of rounds."""
    lines = []
    for clients in options.clients:
        shares, latencies, rates, wrong = [], [], [], 0
        for number in range(options.rounds + 1):
            rows = make_rows(bank.tasks, options.rows, options.length, number)
            direct, direct_seconds, expected = measure_direct(bank, rows)
            seconds, answers = asyncio.run(send(url, rows, clients))
            statuses = Counter(status for status, _, _ in answers)
            assert set(statuses) == {200}, statuses
            wrong += count_wrong(answers, expected)
            if number:  # the first round warms both up
                rates.append(len(rows) / seconds)
                shares.append(len(rows) / seconds / direct)
                median = statistics.median(taken for _, taken, _ in answers)
                latencies.append(median / direct_seconds)
        lines.append(
            {
                "clients": clients,
                "requests_per_s": round(statistics.median(rates), 1),
                "share_of_direct_batches": round(statistics.median(shares), 3),
                "p50_in_direct_predictions": round(statistics.median(latencies), 2),
                "other_answers": wrong,
            }
        )
    return lines


def main() -> None:
    """Run the command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", choices=list(SHAPES), default="base", help="shape of the base model"
    )
    parser.add_argument("--ray", action="store_true", help="predict in a replica on Ray")
    parser.add_argument("--adapters", type=int, default=50)
    parser.add_argument("--length", type=int, default=32, help="words of a text, on average")
    parser.add_argument("--rows", type=int, default=640, help="texts of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument(
        "--cpus", type=int, help="threads of TaskBank and of the service; default: all cores"
    )
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    cpus = options.cpus or cores
    torch.set_num_threads(cpus)
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(Path(folder), options.model, options.adapters)
        bank = TaskBank({path.name: path for path in sorted(adapters.iterdir())})
        with running_service(adapters, cpus, options.ray) as url:
            lines = compare(options, bank, url)
    print(json.dumps({"cores": cores, **vars(options), "results": lines}, indent=2))


if __name__ == "__main__":
    main()
