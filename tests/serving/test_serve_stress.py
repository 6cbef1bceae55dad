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


def put(source, target):
    """Put an adapter at a path, also in place of another one, in one step."""
    link = target.with_name(f".{target.name}")
    link.symlink_to(source, target_is_directory=True)
    link.replace(target)


def change(adapters, sources, stopped, may_change):
    """Change tasks until the clients are done."""
    numbers = random.Random(0)
    while not stopped.wait(0.2):
        kind = numbers.choice(["replace", "add", "remove", "damage"])
        with may_change:
            if kind == "replace":
                put(numbers.choice(sources), adapters / "changing")
            elif kind == "add":
                put(sources[0], adapters / "coming")
            elif kind == "remove":
                (adapters / "coming").unlink(missing_ok=True)
            else:
                weights = adapters / "damaged" / "adapter_model.safetensors"
                content = weights.read_bytes()
                weights.write_bytes(content[:1000])
                time.sleep(0.5)  # the service looks each 0.1 seconds
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
        if task == "coming" and _is_gone(status, content):
            continue
        score = content["predictions"][0]["score"] if status == 200 else None
        if score in [pytest.approx(scores[text], abs=1e-4) for scores in valid[task]]:
            answered.append(task)
        else:
            wrong.append((task, status, content))


def _is_gone(status, content):
    """Return whether a task is not served, or was removed while it was loaded."""
    return status == 404 or (status == 500 and "cannot be loaded" in str(content))


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
    for task in ("steady", "damaged"):
        shutil.copytree(sources[0], adapters / task)
    for task in ("changing", "coming"):
        put(sources[0], adapters / task)
    scores = []
    for source in sources:
        results = houlsby_peft.load(source).predict(WORDS)
        scores.append([result["score"] for result in results])
    valid = {"steady": scores[:1], "changing": scores, "coming": scores[:1], "damaged": scores[:1]}
    answered: list[str] = []
    wrong: list[object] = []

    with ServiceProcess(adapters, tmp_path / "log.txt", *flags) as service:
        stopped, may_change = threading.Event(), threading.Lock()
        changer = threading.Thread(target=change, args=(adapters, sources, stopped, may_change))
        clients = [
            threading.Thread(target=ask, args=(service, number, valid, answered, wrong))
            for number in range(CLIENTS)
        ]
        for thread in (changer, *clients):
            thread.start()
        if engine == "ray":
            while len(answered) + len(wrong) < REQUESTS // 10:
                time.sleep(0.1)
            with may_change:
                kill_replica(service)
        for client in clients:
            client.join()
        stopped.set()
        changer.join()
        assert wrong == []
        assert set(answered) == set(valid)
        assert len(answered) > 2 / 3 * REQUESTS


def kill_replica(service):
    """Kill the replica, and wait for the next one.

    That one has no earlier adapter to keep in place of a damaged one.
    """
    import psutil

    replicas = []
    for process in psutil.Process(service.process.pid).children(recursive=True):
        if "ServeReplica" in " ".join(process.cmdline()):
            replicas.append(process)
    assert replicas
    replicas[0].send_signal(signal.SIGKILL)
    replicas[0].wait(60)
    status, _ = service.ask("/tasks")
    assert status == 200
