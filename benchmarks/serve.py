"""Measure a service with many adapters against `TaskBank.predict` called directly, and its endurance.

    python benchmarks/serve.py --model base            # throughput of both in turns, and latencies
    python benchmarks/serve.py --requests 10000        # 1% of them malformed: losses, crashes, memory

The adapters have random weights. Clients send requests of several rows, each of a random task.
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
import psutil
import torch
from peft import get_peft_model
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel, BertTokenizer

from houlsby_peft import HoulsbyConfig, TaskBank
from houlsby_peft.serving.local_service import start, stop
from models import SHAPES


HOST, PORT = "127.0.0.1", 8765
URL = f"http://{HOST}:{PORT}/predict"
WORDS = ("the", "adapter", "of", "this", "task", "reads", "these", "words", "all", "others", "go", "another", "way")
# Requests that the service must refuse, each with its status.
MALFORMED: tuple[tuple[int, str], ...] = (
    (400, '{"inputs": ['),
    (400, '{"inputs": 3}'),
    (400, '{"inputs": [{"task": "task-0"}]}'),
    (400, '{"inputs": [{"task": "task-0", "text": "a", "top_k": 0}]}'),
    (400, '{"inputs": [{"task": "task-0", "text": "\\ud800"}]}'),
    (404, '{"inputs": [{"task": "task-0", "text": "a"}, {"task": "nothing", "text": "a"}]}'),
    (422, '{"inputs": [{"task": "task-0", "text": "a"}, {"task": "score", "text": "a", "top_k": 2}]}'),
    (413, '{"inputs": "' + "a" * 1_000_000 + '"}'),
)
Row = tuple[str, str]


def make_adapters(folder: Path, shape: str, number: int) -> Path:
    """Save a base model and adapters of it, one of them a regression; return the folder of the adapters."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(WORDS))]
    sizes = {"vocab_size": 30522, "max_position_embeddings": 512} | SHAPES[shape]
    BertModel(BertConfig(**sizes)).save_pretrained(folder / "base")
    BertTokenizer(vocab={word: index for index, word in enumerate(words)}).save_pretrained(folder / "base")
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
    texts = (" ".join(chosen.choices(WORDS, k=chosen.randint(length // 2, length * 3 // 2))) for _ in range(number))
    return [(chosen.choice(tasks), text) for text in texts]


def body(rows: Sequence[Row]) -> str:
    """Return the body of a request."""
    return json.dumps({"inputs": [{"task": task, "text": text} for task, text in rows]})


async def send(bodies: Sequence[str], clients: int) -> tuple[float, list[tuple[int, float, Any]]]:
    """Send requests, so many at a time; return the seconds in all, and each one's status, seconds and answer."""
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
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
        begin = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        return time.perf_counter() - begin, found


def same(found: Any, expected: dict[str, Any]) -> bool:
    """Return whether the service has answered as the bank."""
    return found["label"] == expected["label"] and abs(found["score"] - expected["score"]) < 1e-3


def compare(options: argparse.Namespace, bank: TaskBank) -> dict[str, Any]:
    """Predict the same rows in turns, by the bank itself and through the service."""
    ratios, direct_rates, service_rates, seconds, works, wrong = [], [], [], [], [], 0
    for number in range(options.rounds + 1):
        rows = make_rows(bank.tasks, options.rows, options.length, number)
        begin, used = time.perf_counter(), time.process_time()
        expected = bank.predict(rows, batch_size=options.batch_size)
        direct = len(rows) / (time.perf_counter() - begin)
        direct_work = (time.process_time() - used) / len(rows)
        used = service_seconds()
        size = options.rows_per_request
        taken, found = asyncio.run(
            send([body(rows[start : start + size]) for start in range(0, len(rows), size)], options.clients)
        )
        assert all(status == 200 for status, _, _ in found), Counter(status for status, _, _ in found)
        answers = [answer for _, _, content in found for answer in content["predictions"]]
        wrong += sum(not same(answer, other) for answer, other in zip(answers, expected, strict=True))
        work = {"TaskBank": direct_work, "service": (service_seconds() - used) / len(rows)}
        if number:  # the first round warms both up
            ratios.append(len(rows) / taken / direct)
            direct_rates.append(direct)
            service_rates.append(len(rows) / taken)
            works.append(work)
            seconds += [each for _, each, _ in found]
    seconds.sort()
    return {
        "rows_per_s": {"TaskBank": statistics.median(direct_rates), "service": statistics.median(service_rates)},
        "ratios": [round(ratio, 3) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 3),
        "latency_s": {
            "p50": round(statistics.median(seconds), 3),
            "p99": round(seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))], 3),
        },
        # Of all processes of the service but not of the client. Unlike the rates, it depends little on other programs.
        "cpu_ms_per_row": {
            name: round(1000 * statistics.median(work[name] for work in works), 2) for name in ("TaskBank", "service")
        },
        "other_answers": wrong,
    }


def service_processes() -> dict[str, list[psutil.Process]]:
    """Return the service's processes by kind."""
    found: dict[str, list[psutil.Process]] = {"Proxy": [], "Ingress": [], "BankReplica": []}
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        for kind, several in found.items():
            if title.startswith("ray::") and kind in title:
                several.append(process)
    return found


def service_seconds() -> float:
    """Return the seconds that the service's processes have computed."""
    return sum(sum(each.cpu_times()[:2]) for several in service_processes().values() for each in several)


def resident() -> dict[str, int]:
    """Return the memory of the service's processes, in MB."""
    return {
        kind: sum(each.memory_info().rss for each in several) // 2**20 for kind, several in service_processes().items()
    }


def endure(options: argparse.Namespace, tasks: Sequence[str]) -> dict[str, Any]:
    """Send many requests of one row, one in a hundred of them malformed; count answers and watch the memory."""
    rows = make_rows(tasks, options.requests, options.length, 0)
    expected = [
        MALFORMED[number // 100 % len(MALFORMED)] if number % 100 == 50 else None for number in range(len(rows))
    ]
    bodies = [body([row]) if other is None else other[1] for row, other in zip(rows, expected, strict=True)]
    memory, statuses, lost, seconds = [resident()], Counter[int](), 0, []
    part = max(1, len(bodies) // 10)
    for first in range(0, len(bodies), part):
        _, found = asyncio.run(send(bodies[first : first + part], options.clients))
        memory.append(resident())
        for (status, each, answer), other in zip(found, expected[first : first + part], strict=True):
            statuses[status] += 1
            seconds.append(each)
            right = len(answer.get("predictions", ())) == 1 if other is None and status == 200 else "error" in answer
            lost += status != (200 if other is None else other[0]) or not right
    seconds.sort()
    return {
        "requests": len(bodies),
        "malformed": sum(other is not None for other in expected),
        "statuses": dict(sorted(statuses.items())),
        "answered_otherwise_than_expected": lost,
        "latency_s": {"p50": seconds[len(seconds) // 2], "p99": seconds[int(len(seconds) * 0.99)]},
        "memory_mb": memory,
    }


def main() -> None:
    """Run the command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=list(SHAPES), default="base", help="shape of the base model")
    parser.add_argument("--adapters", type=int, default=50)
    parser.add_argument("--length", type=int, default=32, help="words of a text, on average")
    parser.add_argument("--rows", type=int, default=640, help="rows of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows_per_request", type=int, default=8)
    parser.add_argument("--clients", type=int, default=12, help="requests at a time")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--cpus", type=int, help="threads of TaskBank and of the replica; default: all cores")
    parser.add_argument("--requests", type=int, default=0, help="of the test of endurance; 0: compare the throughput")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    cpus = options.cpus or cores
    torch.set_num_threads(cpus)
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(Path(folder), options.model, options.adapters)
        start({"adapters": str(adapters), "cpus": cpus, "batch_size": options.batch_size, "watch": 0}, HOST, PORT)
        try:
            bank = TaskBank({path.name: path for path in sorted(adapters.iterdir())})
            found = endure(options, bank.tasks) if options.requests else compare(options, bank)
        finally:
            stop()
    result = {"cores": cores, **{key: str(value) for key, value in vars(options).items()}, **found}
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
