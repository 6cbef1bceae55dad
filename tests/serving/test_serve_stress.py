"""Three thousand requests while tasks are added, replaced, broken and removed."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time

import pytest

import houlsby_peft
from hub_models import WORDS, make_adapter


pytest.importorskip("uvicorn", reason="the extra serve is not installed")
from running_service import ServiceProcess


REQUESTS = 3000
CLIENTS = 8


def copy(source, target):
    """Put an adapter in place of another one, as the documentation advises."""
    new = target.with_name(f".{target.name}")
    shutil.copytree(source, new)
    if target.exists():
        target.rename(target.with_name(f".{target.name}-{time.time()}"))
    new.rename(target)


def change(adapters, sources, stopped):
    """Change tasks until the clients are done."""
    numbers = random.Random(0)
    while not stopped.wait(0.2):
        kind = numbers.choice(["replace", "add", "remove", "damage"])
        if kind == "replace":
            copy(numbers.choice(sources), adapters / "changing")
        elif kind == "add":
            copy(sources[0], adapters / "coming")
        elif kind == "remove":
            shutil.rmtree(adapters / "coming", ignore_errors=True)
        else:
            weights = adapters / "damaged" / "adapter_model.safetensors"
            content = weights.read_bytes()
            weights.write_bytes(content[:1000])
            time.sleep(0.5)
            weights.write_bytes(content)


def ask(service, number, valid, answered, wrong):
    """Ask random tasks; collect the tasks that answered rightly, and what was wrong."""
    numbers = random.Random(number)
    for _ in range(REQUESTS // CLIENTS):
        task, text = numbers.choice([*valid]), numbers.randrange(len(WORDS))
        try:
            status, content = service.predict({"task": task, "text": WORDS[text]})
        except Exception as error:
            wrong.append(error)
            continue
        if status == 404 and task == "coming":
            continue
        score = content["predictions"][0]["score"] if status == 200 else None
        if score in [pytest.approx(scores[text], abs=1e-4) for scores in valid[task]]:
            answered.append(task)
        else:
            wrong.append((task, status, content))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", "ray"])
def test_no_request_is_lost_or_answered_wrongly(engine, base, tmp_path):
    flags = ["--watch", "0.1", "--batch-size", "8"]
    if engine == "ray":
        pytest.importorskip("ray.serve", reason="the extra ray is not installed")
        flags += ["--ray", "--replicas", "1"]
    sources = []
    for seed in (1, 2):
        sources.append(make_adapter(tmp_path / str(seed), base, str(base), seed))
    adapters = tmp_path / "adapters"
    for task in ("steady", "changing", "coming", "damaged"):
        shutil.copytree(sources[0], adapters / task)
    scores = []
    for source in sources:
        results = houlsby_peft.load(source).predict(WORDS)
        scores.append([result["score"] for result in results])
    valid = {"steady": scores[:1], "changing": scores, "coming": scores[:1], "damaged": scores[:1]}
    answered: list[str] = []
    wrong: list[object] = []

    with ServiceProcess(adapters, tmp_path / "log.txt", *flags) as service:
        stopped = threading.Event()
        changer = threading.Thread(target=change, args=(adapters, sources, stopped))
        clients = [
            threading.Thread(target=ask, args=(service, number, valid, answered, wrong))
            for number in range(CLIENTS)
        ]
        for thread in (changer, *clients):
            thread.start()
        if engine == "ray":
            time.sleep(5)
            kill_replica(service)
        for client in clients:
            client.join()
        stopped.set()
        changer.join()
        assert wrong == []
        assert set(answered) == set(valid)
        assert len(answered) > 2 / 3 * REQUESTS


def kill_replica(service):
    import psutil

    replicas = []
    for process in psutil.Process(service.process.pid).children(recursive=True):
        if "ServeReplica" in " ".join(process.cmdline()):
            replicas.append(process)
    assert replicas
    replicas[0].send_signal(signal.SIGKILL)
