"""The command `houlsby-peft serve`, with each engine in processes of its own."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import threading
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest

from houlsby_peft_cli import main
from houlsby_peft_serve import ServiceOptions, add_flags, read_options
from hub_models import WORDS


pytest.importorskip("uvicorn", reason="the extra serve is not installed")
from houlsby_peft.service.server import listen
from running_service import ServiceProcess


TASKS = ("first", "second", "third")  # of the fixture `folder`


def end_under_load(service, clients):
    """Send the signal while clients connect anew for each request; count what each one got."""
    outcomes: list[object] = []

    def ask():
        while True:
            try:
                outcomes.append(service.predict({"task": "first", "text": WORDS[0]})[0])
            except urllib.error.URLError as error:
                if isinstance(error.reason, ConnectionRefusedError):
                    return
                outcomes.append(error.reason)
            except Exception as error:
                outcomes.append(error)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    until_signal = len(outcomes)
    service.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(60)
    assert service.process.wait(60) == 0
    assert len(outcomes) > until_signal > 0
    return outcomes


def test_one_process_serves_and_ends_without_dropping_a_connection(folder, tmp_path):
    import psutil

    adapters = shutil.copytree(folder, tmp_path / "adapters")
    shutil.copytree(adapters / "first", adapters / "broken")
    (adapters / "broken" / "adapter_model.safetensors").write_bytes(b"no tensors")
    flags = ["--watch", "0.3", "--log", "json", "--access-log"]
    with ServiceProcess(adapters, tmp_path / "log.txt", *flags) as service:
        assert psutil.Process(service.process.pid).children(recursive=True) == []
        row = {"inputs": [{"task": "first", "text": "a"}]}
        assert service.post("/predict", row, x_request_id="abc")[0] == 200
        assert service.predict({"task": "lost\n{", "text": "a"})[0] == 404
        check_watched_folder(service, adapters)
        with pytest.raises(SystemExit, match=f"port {service.port}"):
            main(["serve", "--adapters", str(folder), "--port", str(service.port)])
        assert set(end_under_load(service, 8)) == {200}
        check_log([json.loads(line) for line in service.log.read_text().splitlines()])


def check_watched_folder(service, adapters):
    (adapters / "second").rename(adapters / "new")
    (adapters / "third" / "adapter_model.safetensors").write_bytes(b"no tensors")
    end = time.time() + 30
    while "third" not in service.ask("/health")[1]["failed"]:
        assert time.time() < end
        time.sleep(0.1)
    assert service.predict({"task": "new", "text": "a"})[0] == 200
    assert service.predict({"task": "second", "text": "a"})[0] == 404


def check_log(lines):
    messages = [line["message"] for line in lines]
    changes = [message for message in messages if message.startswith("Task ")]
    expected = [f"Task '{task}' was added." for task in (*TASKS, "new")]
    assert sorted(changes) == sorted([*expected, "Task 'second' was removed."])
    assert sum("'third' cannot be loaded" in message for message in messages) == 1
    [start] = [message for message in messages if " on http" in message]
    assert start.startswith("3 tasks on"), "a broken adapter is no task"
    assert not any("/health" in message for message in messages)
    [line] = [line for line in lines if line.get("request_id") == "abc"]
    del line["time"], line["message"], line["seconds"]
    assert line == {
        "level": "info", "logger": "houlsby_peft.access", "method": "POST", "route": "/predict",
        "status": 200, "task": "first", "rows": 1, "request_id": "abc",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--port", "70000"], "--port"),
        (["--batch-size", "0"], "--batch-size"),
        (["--watch", "-1"], "--watch"),
        (["--cpus", "-1"], "--cpus"),
        (["--max-rows", "0"], "--max-rows"),
        (["--gpus", "99"], "--gpus"),
        (["other"], "given once"),
        (["--host", "0.0.0.0"], "--tokens"),
        (["--host", "192.0.2.77", "--open"], "--host"),
        (["--tokens", "{folder}/first/adapter_config.json"], "YAML"),
    ],
)
def test_an_address_that_cannot_be_served_is_refused(folder, flags, word):
    flags = [flag.format(folder=folder) for flag in flags]
    with pytest.raises(SystemExit, match=word):
        main(["serve", "--adapters", str(folder), *flags])


def test_options_come_from_the_command_line_and_the_environment(folder, monkeypatch):
    for name, value in {
        "ADAPTERS": str(folder),
        "BATCH_SIZE": "7",
        "HOSTS": "a.example b.example",
        "ACCESS_LOG": "1",
        "TOKENS": "predict: x",
    }.items():
        monkeypatch.setenv(f"HOULSBY_{name}", value)
    assert options_of("--batch-size", "9", "--watch", "0") == ServiceOptions(
        str(folder), batch_size=9, hosts=("a.example", "b.example"), access_log=True, watch=0.0
    )
    assert options_of("/").adapters == "/"
    assert options_of("--no-access-log").access_log is False
    monkeypatch.setenv("HOULSBY_ACCESS_LOG", "perhaps")
    with pytest.raises(ValueError, match="HOULSBY_ACCESS_LOG"):
        options_of(str(folder))


def options_of(*words):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_options(parser.parse_args(words))


def test_a_port_is_taken_from_the_moment_of_listening():
    for host in ("127.0.0.1", "::1"):
        try:
            first = listen(host, 0)
        except OSError:
            continue  # a machine without IPv6
        with first, pytest.raises(OSError, match="another --port"):
            listen(host, first.getsockname()[1])


@pytest.mark.slow
def test_replicas_follow_the_folder_and_lose_no_request(folder, tmp_path):
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    adapters = shutil.copytree(folder, tmp_path / "adapters")
    flags = ["--ray", "--watch", "0.5", "--batch-size", "4", "--max-queued", "16"]
    with ServiceProcess(adapters, tmp_path / "log.txt", *flags, "--replicas", "1") as service:
        check_replicas(service, adapters)


def check_replicas(service, adapters):
    import psutil

    row = {"task": "first", "text": WORDS[0]}
    status, content = service.predict(row)
    assert status == 200
    score = content["predictions"][0]["score"]
    shutil.copytree(adapters / "first", adapters / ".new")
    (adapters / ".new").rename(adapters / "new")
    end = time.time() + 60
    while service.predict({"task": "new", "text": "a"})[0] != 200:
        assert time.time() < end
        time.sleep(0.2)
    with ThreadPoolExecutor(8) as pool:  # no more at a time than may run and wait
        answers = [pool.submit(service.predict, row) for _ in range(200)]
        answers[0].result()
        killed = 0
        for process in psutil.Process(service.process.pid).children(recursive=True):
            if "ServeReplica" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)
                killed += 1
        assert killed == 1
        for answer in answers:
            status, content = answer.result()
            assert status == 200
            assert content["predictions"][0]["score"] == pytest.approx(score, rel=1e-4)
    with ThreadPoolExecutor(200) as pool:
        statuses = pool.map(lambda _: service.predict(row)[0], range(400))
        assert set(statuses) == {200, 503}
    children = psutil.Process(service.process.pid).children(recursive=True)
    assert set(end_under_load(service, 4)) == {200}
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


@pytest.mark.slow
def test_the_deployment_file_builds_the_service(folder, base, capsys, monkeypatch):
    ray_engine = pytest.importorskip(
        "houlsby_peft.service.ray_engine", reason="the extra ray is not installed"
    )
    yaml = pytest.importorskip("yaml")
    monkeypatch.chdir(base.parent)
    folder, _ = base.parent / "link", (base.parent / "link").symlink_to(folder)  # which may change
    flags = ["--base-model", base.name, "--cpus", "2", "--port", "9000", "--max-queued", "7"]
    main(["serve", "--adapters", str(folder), "--print-config", *flags])
    content = yaml.safe_load(capsys.readouterr().out)
    assert content["http_options"] == {"host": "127.0.0.1", "port": 9000, "request_timeout_s": 120}
    [application] = content["applications"]
    assert application["import_path"] == f"{ray_engine.__name__}:build"
    args = application["args"]
    assert (args["adapters"], args["base_model"], args["cpus"]) == (str(folder), str(base), 2)
    assert args["max_queued"] == 7
    assert ray_engine.build(args)._bound_deployment.name == "App"
