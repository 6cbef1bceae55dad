"""The service: a bank that follows its folder or list, and the HTTP interface on Ray."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

import houlsby_peft
from houlsby_peft import AdapterError, TaskBank, TaskSource
from houlsby_peft.serving.adapter_list import read_adapters
from houlsby_peft_cli import main
from hub_models import WORDS, make_adapter


TASKS = ("first", "second", "third")


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    """A folder with three adapters, which stays as it is."""
    path = tmp_path_factory.mktemp("service") / "adapters"
    for seed, task in enumerate(TASKS):
        make_adapter(path / task, base, str(base), seed)
    return path


@pytest.fixture
def live(folder, tmp_path):
    """A copy of the folder, which may change."""
    return shutil.copytree(folder, tmp_path / "adapters")


@pytest.fixture(scope="module")
def others(base, tmp_path_factory):
    return [
        make_adapter(tmp_path_factory.mktemp("others") / str(seed), base, str(base), seed)
        for seed in (7, 8)
    ]


def scores(result):
    return pytest.approx({item["label"]: item["score"] for item in result}, rel=1e-4)


def alone(folder):
    return scores(houlsby_peft.load(folder).predict(WORDS[0], top_k=3)[0]).expected


def of_bank(bank, task):
    return scores(bank.predict([(task, WORDS[0])], top_k=3)[0])


def test_a_bank_follows_a_folder(live, others):
    bank = TaskBank({})

    def refresh():
        return bank.serve(read_adapters(live))

    assert refresh() == {}
    assert bank.tasks == bank.held == TASKS
    before = {task: of_bank(bank, task).expected for task in TASKS}
    loaded = bank._held._loaded
    refresh()
    assert bank._held._loaded == loaded, "something was loaded again"
    # Added under a name that is not an adapter's, then renamed.
    shutil.copytree(others[0], live / ".new")
    refresh()
    assert bank.tasks == TASKS
    (live / ".new").rename(live / "added")
    for file in others[1].iterdir():
        shutil.copy(file, live / "second")
    shutil.rmtree(live / "third")
    refresh()
    assert bank.tasks == ("added", "first", "second")
    assert "third" not in bank.held
    assert of_bank(bank, "added") == alone(others[0])
    assert of_bank(bank, "second") == alone(others[1])
    assert of_bank(bank, "first") == before["first"]
    # Half of a copy: the old adapter stays, until the files are whole.
    whole = (others[0] / "adapter_model.safetensors").read_bytes()
    (live / "second" / "adapter_model.safetensors").write_bytes(whole[:1000])
    shutil.copytree(live / "second", live / "new and damaged")
    assert set(refresh()) == {"second", "new and damaged"}
    assert of_bank(bank, "second") == alone(others[1])
    assert "new and damaged" not in bank.tasks
    (live / "second" / "adapter_model.safetensors").write_bytes(whole)
    assert set(refresh()) == {"new and damaged"}
    assert of_bank(bank, "second") == alone(others[0])
    for adapter in others:  # a recipe's run, and the same run once more
        shutil.copytree(adapter, live / "run" / "adapter", dirs_exist_ok=True)
        (live / "run" / "results.json").touch()
        assert bank.serve({**read_adapters(live), "twice": live / "run"}).keys() == {
            "new and damaged"
        }
        assert of_bank(bank, "run") == alone(adapter) == of_bank(bank, "twice")


def test_tasks_beyond_the_memory_are_loaded_on_request(folder):
    bank = TaskBank({}, max_bytes=0)
    bank.serve(read_adapters(folder) | {"fourth": TaskSource(str(folder / "first"))})
    assert bank.tasks == (*TASKS, "fourth")
    assert len(bank.held) < 4
    assert of_bank(bank, "fourth") == alone(folder / "first")


@pytest.mark.parametrize("is_on_hub", [False, True])
def test_an_adapter_that_a_list_changes_to_is_loaded_once_it_is_there(
    is_on_hub, base, others, tmp_path, monkeypatch
):
    """A folder that is still being copied, or a commit on the Hub while the network is away."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    old, new = (tmp_path / "models--user--reviews" / "snapshots" / (digit * 40) for digit in "12")
    entries = [
        {"source": "user/reviews", "revision": at.name} if is_on_hub else str(at)
        for at in (old, new)
    ]
    tokenizer = AutoTokenizer.from_pretrained(base)
    shutil.copytree(others[0], old)
    tokenizer.save_pretrained(old)
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"one": entries[0]}))
    bank = TaskBank({}, base_model=str(base))
    bank.serve(read_adapters(path))
    before = of_bank(bank, "one").expected
    path.write_text(json.dumps({"one": entries[1]}))
    if not is_on_hub:
        shutil.copytree(others[1], new)
        (new / "adapter_model.safetensors").unlink()
    assert list(bank.serve(read_adapters(path))) == ["one"]
    assert of_bank(bank, "one") == before
    shutil.copytree(others[1], new, dirs_exist_ok=True)
    tokenizer.save_pretrained(new)
    assert bank.serve(read_adapters(path)) == {}
    assert of_bank(bank, "one") == alone(others[1]) != before


def test_requests_that_cannot_be_answered_spoil_no_others(live, base):
    make_adapter(live / "damaged", base, str(base))
    (live / "damaged" / "adapter_model.safetensors").write_bytes(b"no tensors")
    bank = TaskBank({task: live / task for task in (*TASKS, "damaged")})
    requests = [
        ("first", WORDS[0]),
        ("damaged", "a"),
        ("nothing", "a"),
        ("first", 5),
        ("second", WORDS[1]),
    ]
    found = bank.predict(requests, return_errors=True)
    assert [isinstance(result, Exception) for result in found] == [False, True, True, True, False]
    assert [found[0], found[4]] == bank.predict([requests[0], requests[4]])
    assert "damaged" in str(found[1])
    for request, error in zip(requests[1:4], found[1:4], strict=True):
        with pytest.raises(type(error)):
            bank.predict([request])


def test_lists_of_adapters(live, tmp_path):
    assert read_adapters(live)["first"] == TaskSource(str(live / "first"))
    path = tmp_path / "list.json"
    path.write_text(
        json.dumps(
            {"a": "adapters/first", "b": {"source": "user/b", "revision": "v2", "threshold": 0.5}}
        )
    )
    assert read_adapters(path) == {
        "a": TaskSource(str(live / "first")),
        "b": TaskSource("user/b", "v2", 0.5),
    }
    for text in (
        "{}",
        "a: 3",
        "a: {revision: v1}",
        "a: {source: x, sorce: y}",
        "a: {source: x, threshold: 50}",
        "[",
        "a: !!python/object/apply:os.system [ls]",
    ):
        path.write_text(text)
        with pytest.raises(AdapterError, match=r"list\.json"):
            read_adapters(path)
    assert read_adapters(live / "first") == {"first": TaskSource(str(live / "first"))}
    (live / "first").rename(live / "adapter")
    assert read_adapters(live / "adapter") == {live.name: TaskSource(str(live / "adapter"))}
    (live / "results.json").touch()  # a recipe's run, whose checkpoints are no tasks
    assert read_adapters(live) == {live.name: TaskSource(str(live / "adapter"))}
    path.write_text("1: user/x")
    assert read_adapters(path) == {"1": TaskSource("user/x")}
    with pytest.raises(FileNotFoundError, match="nothing"):
        read_adapters(live / "nothing")


def test_the_deployment_file_builds_the_service(folder, base, capsys, monkeypatch):
    service = pytest.importorskip(
        "houlsby_peft.serving.service", reason="Ray Serve is not installed"
    )
    yaml = pytest.importorskip("yaml")
    monkeypatch.chdir(base.parent)
    folder, _ = base.parent / "link", (base.parent / "link").symlink_to(folder)  # which may change
    flags = ["--base-model", base.name, "--cpus", "2", "--port", "9000", "--max-queued", "7"]
    main(["serve", "--adapters", str(folder), "--print-config", *flags])
    content = yaml.safe_load(capsys.readouterr().out)
    assert content["http_options"] == {"host": "127.0.0.1", "port": 9000, "request_timeout_s": 120}
    [application] = content["applications"]
    assert application["import_path"] == f"{service.__name__}:build"
    args = application["args"]
    assert (args["adapters"], args["base_model"], args["cpus"]) == (str(folder), str(base), 2)
    assert args["max_queued"] == 7
    assert service.build(args)._bound_deployment.name == "Ingress"


class Service:
    """A service in a process of its own."""

    def __init__(self, adapters: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.adapters = adapters
        path = os.pathsep.join(
            filter(
                None, [str(Path(houlsby_peft.__file__).parents[1]), os.environ.get("PYTHONPATH")]
            )
        )
        flags = [
            "--cpus",
            "1",
            "--watch",
            "0.5",
            "--batch-size",
            "4",
            "--max-queued",
            "16",
            "--max-replicas",
            "1",
        ]
        self.command = [
            sys.executable,
            "-m",
            "houlsby_peft_cli",
            "serve",
            "--adapters",
            str(adapters),
            *flags,
        ]
        self.command += ["--port", str(self.port)]
        self.environment = {**os.environ, "PYTHONPATH": path}
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=output, env=self.environment
            )
        end = time.time() + 500
        while "tasks on" not in log.read_text():
            assert self.process.poll() is None, log.read_text()
            assert time.time() < end, log.read_text()
            time.sleep(0.2)

    def ask(
        self, path: str, body: bytes | None = None, kind: str = "application/json", **headers: str
    ):
        """Send a request; its status and what its JSON says."""
        headers = {"content-type": kind, **headers}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                request, timeout=120
            ) as response:
                status, content = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read().decode()
        return status, json.loads(content) if content.startswith("{") else content

    def predict(self, *rows: object):
        return self.ask("/predict", json.dumps({"inputs": rows}).encode())


@pytest.fixture(scope="module")
def service(folder, tmp_path_factory):
    pytest.importorskip(
        "ray.serve", reason="Ray Serve, the engine of the service, is not installed"
    )
    parent = tmp_path_factory.mktemp("live")
    service = Service(shutil.copytree(folder, parent / "adapters"), parent / "log.txt")
    yield service
    service.process.send_signal(signal.SIGTERM)
    service.process.wait(60)


def test_rows_of_several_tasks_are_answered_in_their_order(service, folder):
    status, found = service.predict(
        {"task": "second", "text": WORDS[0]},
        {"task": "first", "text": WORDS[1], "text_pair": WORDS[2]},
        {"task": "second", "text": WORDS[3], "top_k": 2},
    )
    first, second = houlsby_peft.load(folder / "first"), houlsby_peft.load(folder / "second")
    expected = [
        *second.predict(WORDS[0]),
        *first.predict((WORDS[1], WORDS[2])),
        *second.predict(WORDS[3], top_k=2),
    ]
    assert status == 200
    for result, other in zip(found["predictions"], expected, strict=True):
        several, others = ([each] if isinstance(each, dict) else each for each in (result, other))
        assert [item["label"] for item in several] == [item["label"] for item in others]
        assert scores(several) == scores(others).expected
    assert service.ask("/tasks") == (200, {"tasks": [*TASKS]})
    health = {"status": "ok", "tasks": 3, "in_memory": 3, "failed": {}, "list": "ok"}
    assert service.ask("/health") == (200, health)
    status, metrics = service.ask("/metrics")
    assert 'houlsby_predictions_total{task="second"} 2.0' in metrics


def test_the_page_shows_the_answers_of_all_tasks_in_a_browser(service):
    browser = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser is None:
        pytest.skip("There is no Chromium")
    page = f"http://127.0.0.1:{service.port}/"
    assert not re.findall(r"(?:src|href)=|url\(|@import", service.ask("/")[1]), (
        "nothing is loaded from elsewhere"
    )
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-proxy-server",
        "--virtual-time-budget=20000",
    ]
    command = [browser, *flags, "--dump-dom", f"{page}#{quote(WORDS[0])}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    _, found = service.predict({"tasks": [*TASKS], "text": WORDS[0], "top_k": 3})
    rows = re.findall(r"<th>(.*?)</th><td>(.*?)</td>", shown)
    assert [task for task, _ in rows] == [*TASKS]
    for task, cell in rows:
        labels = re.findall(r"</span></span>(\w+) [\d.]+</div>", cell)
        assert labels == [item["label"] for item in found["predictions"][0][task]]


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ([], ["inputs"]),
        ([1], ["inputs", 0]),
        ([{"task": "first", "text": "a"}, {"task": "first"}], ["inputs", 1]),
        ([{"task": "first", "text": 1}], ["inputs", 0, "text"]),
        ([{"task": "first", "text": "a", "topk": 1}], ["inputs", 0, "topk"]),
        ([{"task": "first", "text": "a", "top_k": 0}], ["inputs", 0, "top_k"]),
        ([{"task": "first", "text": "\ud800"}], ["inputs", 0]),
        ([{"task": "first", "question": "a", "context": "b", "text": "c"}], ["inputs", 0]),
        ([{"tasks": ["first"], "task": "first", "text": "a"}], ["inputs", 0]),
        ([{"text": "a"}], ["inputs", 0]),
    ],
)
def test_a_wrong_request_is_refused_with_the_place(service, rows, where):
    status, found = service.predict(*rows)
    assert status == 422
    assert found["detail"][0]["loc"] == ["body", *where]


def test_requests_that_cannot_be_answered_and_bodies_of_another_form_are_refused(service):
    good = {"task": "first", "text": "a"}
    status, found = service.predict(*[good] * 5)
    assert (status, found["detail"]["row"]) == (400, None)
    assert "at most 4 rows, counted once per task; got 5" in found["detail"]["rule"]
    status, found = service.predict(good, {"task": "other", "text": "a"})
    assert (status, found["detail"]["row"]) == (404, 1)
    assert "GET /tasks; got 'other'" in found["detail"]["rule"]
    assert service.predict({"task": "first", "question": "a", "context": ""})[0] == 200
    both = {"tasks": ["first", "second"], "text": "a"}
    status, found = service.predict(both, {"task": "second", "text": "a"})
    assert status == 200
    assert list(found["predictions"][0]) == both["tasks"]
    assert found["predictions"][0]["second"]["label"] == found["predictions"][1]["label"]
    assert (
        service.predict({**both, "tasks": ["first", *"abcd"]})[0] == 404
    )  # not 400, beyond a batch
    row = json.dumps({"inputs": [good]}).encode()
    assert service.ask("/predict", row)[0] == 200
    for body in (b"{", b"[]", b"[" * 100_000, b"\xff\xfe"):
        assert service.ask("/predict", body)[0] in (400, 422)
    assert (
        service.ask("/predict", row, "text/plain")[0] == 422
    )  # which any page in a browser may send
    assert service.ask("/predict", row, host="pages.example")[0] == 400
    assert service.ask("/predict", b'"' + b"a" * 1_000_000 + b'"')[0] == 413
    assert service.ask("/nothing")[0] == 404
    assert service.ask("/predict") == (405, {"detail": "Method Not Allowed"})


def test_the_service_follows_its_folder(service, others):
    shutil.copytree(others[0], service.adapters / ".new")
    (service.adapters / ".new").rename(service.adapters / "new")
    end = time.time() + 60
    while service.predict({"task": "new", "text": "a"})[0] != 200:
        assert time.time() < end
        time.sleep(0.2)
    (service.adapters / "new" / "adapter_model.safetensors").write_bytes(b"no tensors")
    while "new" not in (health := service.ask("/health")[1])["failed"]:
        assert time.time() < end
        time.sleep(0.2)
    assert str(service.adapters) not in json.dumps(health)
    answer = service.predict({"task": "new", "text": "a"})
    assert answer[0] == 200, answer


def test_a_port_that_is_taken_is_refused_at_once(service):
    done = subprocess.run(
        service.command, capture_output=True, text=True, env=service.environment, timeout=60
    )
    assert done.returncode != 0
    assert f"('127.0.0.1', {service.port})" in done.stderr
    assert service.ask("/tasks")[0] == 200


@pytest.mark.slow
def test_no_request_is_lost_when_a_replica_is_killed_or_too_many_wait(service):
    psutil = pytest.importorskip("psutil")
    row = {"task": "first", "text": WORDS[0]}
    with ThreadPoolExecutor(8) as pool:  # no more at a time than may run and wait
        answers = [pool.submit(service.predict, row) for _ in range(200)]
        answers[0].result()
        for process in psutil.Process(service.process.pid).children(recursive=True):
            if "BankReplica" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)
        assert {answer.result()[0] for answer in answers} == {200}
    with ThreadPoolExecutor(200) as pool:
        assert {status for status, _ in pool.map(lambda _: service.predict(row), range(400))} == {
            200,
            503,
        }
    assert service.predict(row)[0] == 200


def test_the_signal_to_end_lets_running_requests_finish(service):
    """The last test, as it ends the service."""
    import psutil

    printed = service.log.read_text()
    children = psutil.Process(service.process.pid).children(recursive=True)
    rows = [{"task": "first", "text": " ".join(WORDS)}] * 4
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(service.predict, *rows) for _ in range(8)]
        answers[0].result()
        service.process.send_signal(signal.SIGTERM)
        assert {answer.result()[0] for answer in answers[:4]} == {200}
    assert service.process.wait(60) == 0
    _, left = psutil.wait_procs(children, timeout=10)
    assert left == []
    assert service.log.read_text() == printed
