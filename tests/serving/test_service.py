"""The service in this process: its HTTP interface, and a bank that follows its folder or list."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from huggingface_hub import constants
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from transformers import AutoTokenizer

import houlsby_peft
from houlsby_peft import AdapterError
from houlsby_peft.cli import main
from houlsby_peft.serving.adapter_list import Listed, read_adapters
from houlsby_peft.serving.http import HttpService, Overloaded
from houlsby_peft.serving.watched_bank import Query, Refusal, WatchedBank
from hub_models import TEXTS, make_adapter, make_base


WORDS = [text for text, _ in TEXTS]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    """A folder with three adapters, which stays as it is."""
    path = tmp_path_factory.mktemp("service") / "adapters"
    for seed, task in enumerate(("first", "second", "third")):
        make_adapter(path / task, base, str(base), seed)
    return path


@pytest.fixture
def live(folder, tmp_path):
    """A copy of the folder, which may change."""
    return shutil.copytree(folder, tmp_path / "adapters")


@pytest.fixture(scope="module")
def others(base, tmp_path_factory):
    return [make_adapter(tmp_path_factory.mktemp("others") / str(seed), base, str(base), seed) for seed in (7, 8)]


def ask(service, method, path, body=b""):
    """Send a request to the service as a server would; its status and what its JSON says."""
    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "server": ("x", 1)}
    sent, parts = [], [body[i : i + 2**16] for i in range(0, len(body), 2**16)] or [b""]

    async def receive():
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    async def run():
        await (await service(Request({**scope, "scheme": "http"}, receive)))(scope, receive, send)

    asyncio.run(run())
    content = b"".join(message.get("body", b"") for message in sent[1:])
    is_json = (b"content-type", b"application/json") in sent[0]["headers"]
    return sent[0]["status"], json.loads(content) if is_json else content.decode()


@pytest.fixture(scope="module")
def service(folder):
    bank = WatchedBank(str(folder))

    async def predict(rows):
        return bank.answer([rows])[0]

    async def status():
        return {**bank.status(), "names": list(bank.tasks)}

    return HttpService(predict, status, max_rows=4)


def read_metrics(service):
    """Return the values of the metrics by name and label."""
    families = text_string_to_metric_families(ask(service, "GET", "/metrics")[1])
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_rows_of_several_tasks_are_answered_in_their_order(service, folder):
    rows = [
        {"task": "second", "text": WORDS[0]},
        {"task": "first", "text": WORDS[1], "text_pair": WORDS[2]},
        {"task": "second", "text": WORDS[3], "top_k": 2},
    ]
    before = read_metrics(service)
    status, found = ask(service, "POST", "/predict", json.dumps({"inputs": rows}).encode())
    first, second = houlsby_peft.load(folder / "first"), houlsby_peft.load(folder / "second")
    expected = [
        second.predict(WORDS[0])[0],
        first.predict((WORDS[1], WORDS[2]))[0],
        second.predict(WORDS[3], top_k=2)[0],
    ]
    assert status == 200
    assert [part["label"] for part in (*found["predictions"][:2], *found["predictions"][2])] == [
        part["label"] for part in (*expected[:2], *expected[2])
    ]
    assert found["predictions"][0]["score"] == pytest.approx(expected[0]["score"], rel=1e-4)
    assert ask(service, "GET", "/tasks") == (200, {"tasks": ["first", "second", "third"]})
    health = {"status": "ok", "tasks": 3, "in_memory": 3, "failed": {}, "list": "ok"}
    assert ask(service, "GET", "/health") == (200, health)
    assert ask(service, "POST", "/predict", b"{")[0] == 400
    after = read_metrics(service)
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert grown["houlsby_predictions_total", "second"] == 2
    assert grown["houlsby_requests_total", "200"] == grown["houlsby_requests_total", "400"] == 1
    assert grown["houlsby_request_seconds_count",] == 2


def row(**fields):
    return json.dumps({"inputs": [{"task": "first", "text": "a"}, fields]}).encode()


@pytest.mark.parametrize(
    ("body", "status", "rule", "number"),
    [
        (b"", 400, "The body must be JSON", None),
        (b'{"inputs"', 400, "The body must be JSON", None),
        (b"\xff\xfe", 400, "The body must be JSON", None),
        (b"[" * 100_000, 400, "The body must be JSON", None),
        (b"[]", 400, r"must have inputs, a list of 1 to 4 rows.*got \[\]", None),
        (b'{"inputs": []}', 400, "must have inputs", None),
        (b'{"inputs": [1], "more": 1}', 400, "must have inputs", None),
        (b'{"inputs": [1, 2, 3, 4, 5]}', 400, r"got '?5 rows", None),
        (b'{"inputs": [1]}', 400, "A row must have task and either text", 0),
        (row(), 400, "A row must have task", 1),
        (row(task="first"), 400, "A row must have task", 1),
        (row(task="first", text=1), 400, "must be text; got", 1),
        (row(task="first", text="a", context="b"), 400, "A row must have task", 1),
        (row(task="first", text="a", topk=1), 400, "A row must have task", 1),
        (row(task="first", text="a", top_k=0), 400, "top_k must be a whole number of at least 1", 1),
        (row(task="first", text="a", top_k=True), 400, "top_k must be a whole number of at least 1", 1),
        (row(task="first", text="\ud800"), 400, "valid UTF-8", 1),
        (row(task="other", text="a"), 404, r"task must be one of GET /tasks; got 'other'", 1),
        (b'{"inputs": "' + b"a" * 1_000_000 + b'"}', 413, "at most 1,000,000 bytes", None),
    ],
)
def test_a_bad_request_is_refused_with_the_rule(service, body, status, rule, number):
    found = ask(service, "POST", "/predict", body)
    assert found[0] == status
    assert list(found[1]) == ["error"]
    assert found[1]["error"].get("row") == number
    assert re.search(rule, found[1]["error"]["rule"])
    assert "\n" not in found[1]["error"]["rule"]
    assert len(found[1]["error"]["rule"]) < 700


def test_other_paths_and_methods(service):
    assert ask(service, "GET", "/nothing")[0] == 404
    status, found = ask(service, "GET", "/predict")
    assert (status, found["error"]["rule"]) == (405, "/predict must be requested by POST; got GET.")


def test_an_overloaded_service_says_so_and_stays_healthy():
    async def refuse(*_):
        raise Overloaded

    service = HttpService(refuse, refuse)
    body = json.dumps({"inputs": [{"task": "first", "text": "a"}]}).encode()
    message = {"error": {"rule": "Too many requests are waiting. Try again later."}}
    assert ask(service, "POST", "/predict", body) == (503, message)
    assert ask(service, "GET", "/tasks") == (503, message)
    assert ask(service, "GET", "/health") == (200, {"status": "ok", "busy": True})


def test_a_wrong_request_spoils_no_other_of_its_batch(live, base):
    make_adapter(live / "score", base, str(base))
    config = json.loads((live / "score" / "adapter_config.json").read_text())
    (live / "score" / "adapter_config.json").write_text(json.dumps(config | {"problem_type": "regression"}))
    make_adapter(live / "damaged", base, str(base))
    (live / "damaged" / "adapter_model.safetensors").write_bytes(b"no tensors")
    bank = WatchedBank(str(live))
    good = [Query("first", WORDS[0]), Query("second", WORDS[1])]
    [expected] = bank.answer([good])
    requests = [
        good,
        [Query("nothing", "a")],
        [Query("first", "a"), Query("score", "a", top_k=2)],
        good,
        [Query("damaged", "a")],
        [Query("third", "a")],
    ]
    found = bank.answer(requests)
    for answer in (found[0], found[3]):
        assert [item["label"] for item in answer] == [item["label"] for item in expected]
        assert [item["score"] for item in answer] == pytest.approx([item["score"] for item in expected], rel=1e-4)
    assert [(each.status, each.row) for each in found if isinstance(each, Refusal)] == [(404, 0), (422, 1), (500, 0)]
    assert "top_k is for text classification" in found[2].rule
    assert found[4].rule == "The adapter of task 'damaged' cannot be loaded; GET /health says why."
    assert "not a valid safetensors file" in bank.status()["failed"]["damaged"]
    assert len(found[5]) == 1


def test_a_bank_follows_its_folder(live, others):
    bank = WatchedBank(str(live))

    def label(task):
        [found] = bank.answer([[Query(task, WORDS[0], 3)]])
        return (
            found.status if isinstance(found, Refusal) else pytest.approx({i["label"]: i["score"] for i in found[0]})
        )

    new = [{i["label"]: i["score"] for i in houlsby_peft.load(each).predict(WORDS[0], top_k=3)[0]} for each in others]
    before = {task: label(task).expected for task in bank.tasks}
    bank.refresh()
    assert {task: label(task) for task in bank.tasks} == before
    # Added under a name that is not an adapter's, then renamed.
    shutil.copytree(others[0], live / ".new")
    bank.refresh()
    assert bank.tasks == ("first", "second", "third")
    (live / ".new").rename(live / "added")
    for file in others[1].iterdir():
        shutil.copy(file, live / "second")
    shutil.rmtree(live / "third")
    bank.refresh()
    assert bank.tasks == ("added", "first", "second")
    assert (label("added"), label("second"), label("third")) == (new[0], new[1], 404)
    assert label("first") == before["first"]
    # Half of a copy: the old adapter stays, until the files are whole.
    whole = (others[0] / "adapter_model.safetensors").read_bytes()
    (live / "second" / "adapter_model.safetensors").write_bytes(whole[:1000])
    bank.refresh()
    assert "not a valid safetensors file" in bank.status()["failed"]["second"]
    assert label("second") == new[1]
    (live / "second" / "adapter_model.safetensors").write_bytes(whole)
    bank.refresh()
    assert bank.status()["failed"] == {}
    assert label("second") == new[0]
    shutil.rmtree(live)
    bank.refresh()
    assert "must be in a folder of adapters" in bank.status()["list"]
    assert label("first") == before["first"]


def test_a_bank_follows_its_list(live, others, tmp_path):
    path = tmp_path / "tasks.yaml"
    path.write_text("one: adapters/first\n")
    bank = WatchedBank(str(path))
    assert bank.tasks == ("one",)
    path.write_text(f"one: {{source: adapters/first, threshold: 1.0}}\ntwo: {others[0]}\n")
    bank.refresh()
    assert bank.tasks == ("one", "two")
    one, two = bank.answer([[Query("one", WORDS[0])], [Query("two", WORDS[0])]])
    assert one[0]["label"] is None
    assert two[0]["label"] is not None
    path.write_text("one: [")
    bank.refresh()
    assert "must be valid JSON or YAML" in bank.status()["list"]
    assert bank.tasks == ("one", "two")


@pytest.mark.parametrize("is_on_hub", [False, True])
def test_an_adapter_that_a_list_changes_to_is_loaded_once_it_is_there(is_on_hub, base, others, tmp_path, monkeypatch):
    """A folder that is still being copied, or a commit on the Hub while the network is away."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    old, new = (tmp_path / "models--user--reviews" / "snapshots" / (digit * 40) for digit in "12")
    entries = [{"source": "user/reviews", "revision": at.name} if is_on_hub else str(at) for at in (old, new)]
    tokenizer = AutoTokenizer.from_pretrained(base)
    shutil.copytree(others[0], old)
    tokenizer.save_pretrained(old)  # without it, load could not tell whether the cache lacks one
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"one": entries[0]}))
    bank = WatchedBank(str(path), base_model=str(base))
    before = bank.answer([[Query("one", WORDS[0])]])
    path.write_text(json.dumps({"one": entries[1]}))
    if not is_on_hub:
        shutil.copytree(others[1], new)
        (new / "adapter_model.safetensors").unlink()
    bank.refresh()
    assert list(bank.status()["failed"]) == ["one"]
    assert bank.answer([[Query("one", WORDS[0])]]) == before
    shutil.copytree(others[1], new, dirs_exist_ok=True)
    tokenizer.save_pretrained(new)
    bank.refresh()
    assert bank.status()["failed"] == {}
    [[found]] = bank.answer([[Query("one", WORDS[0])]])
    [expected] = houlsby_peft.load(others[1]).predict(WORDS[0])
    assert found == {"label": expected["label"], "score": pytest.approx(expected["score"], rel=1e-4)}
    assert [found] != before[0]


def test_lists_of_adapters(live, tmp_path):
    assert read_adapters(live)["first"] == Listed(str(live / "first"))
    path = tmp_path / "list.json"
    path.write_text(json.dumps({"a": "adapters/first", "b": {"source": "user/b", "revision": "v2", "threshold": 0.5}}))
    assert read_adapters(path) == {"a": Listed(str(live / "first")), "b": Listed("user/b", "v2", 0.5)}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must map the names of tasks to adapters; got None"),
        ("{}", "needs at least one adapter"),
        ("a: 3", "an adapter must be a folder, a name on the Hub, or a mapping .*; got 3 for 'a'"),
        ("a: {revision: v1}", "must be a folder"),
        ("a: {source: x, sorce: y}", "must be a folder"),
        (
            "a: {source: x, threshold: 50}",
            "list.yaml: A threshold must be between 0 and 1; got 50 for 'a'. Correct it",
        ),
        ("1: x", "must map the names of tasks"),
        ("a: !!python/object/apply:os.system [ls]", "must be valid JSON or YAML"),
    ],
)
def test_a_list_that_breaks_a_rule_is_refused(tmp_path, text, rule):
    (tmp_path / "list.yaml").write_text(text)
    with pytest.raises(AdapterError, match=rule):
        read_adapters(tmp_path / "list.yaml")


def test_an_adapter_in_place_of_a_folder_of_adapters_is_named(folder):
    with pytest.raises(AdapterError, match="It is an adapter itself: copy it into a folder of adapters"):
        read_adapters(folder / "first")
    with pytest.raises(AdapterError, match="must be in a folder of adapters, or in a JSON or YAML list"):
        read_adapters(folder / "nothing")


def test_the_deployment_file_builds_the_service(folder, base, capsys, monkeypatch):
    pytest.importorskip("ray.serve", reason="Ray Serve, the engine of the service, is not installed")
    yaml = pytest.importorskip("yaml")
    monkeypatch.chdir(base.parent)
    flags = ["--base-model", base.name, "--cpus", "2", "--port", "9000", "--max-queued", "7"]
    main(["serve", "--adapters", str(folder), "--print-config", *flags])
    content = yaml.safe_load(capsys.readouterr().out)
    assert content["http_options"] == {"host": "127.0.0.1", "port": 9000, "request_timeout_s": 120}
    [application] = content["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, name) == ("houlsby_peft.serving.service", "build")
    args = application["args"]
    assert (args["adapters"], args["base_model"], args["cpus"]) == (str(folder), str(base), 2)
    assert args["max_queued"] == 7
    for flag, rule in (("--cpus", "--cpus must be a whole number"), ("--max-replicas", "max_replicas must be")):
        with pytest.raises(SystemExit, match=f"error: {rule}.* of at least 1; got 0"):
            main(["serve", "--adapters", str(folder), "--print-config", flag, "0"])
    service = __import__(module, fromlist=[name])
    assert service.build(args)._bound_deployment.name == "Ingress"
    for wrong, rule in (
        ({**args, "cpus": 0}, "cpus must be a whole number of at least 1; got 0"),
        ({**args, "watch": -1}, "watch must be a number of at least 0; got -1"),
        ({**args, "max_replicas": 1, "min_replicas": 2}, "max_replicas must be a whole number of at least 2"),
        ({**args, "size": 0}, "The options of a service are adapters, .*; got size"),
        ({}, "A service needs the option adapters"),
        ({**args, "adapters": "/nowhere"}, "must be in a folder of adapters"),
    ):
        with pytest.raises(ValueError, match=rule):
            service.build(wrong)


@pytest.mark.slow
def test_a_service_on_ray_loses_no_request_when_a_replica_is_killed(live, others, tmp_path):
    """End to end, in a process of its own: answers, refusals, a new adapter, an overload and a killed replica."""
    pytest.importorskip("ray.serve", reason="Ray Serve, the engine of the service, is not installed")
    command = [sys.executable, str(tmp_path / "client.py"), str(live), str(others[0]), str(tmp_path / "found.json")]
    (tmp_path / "client.py").write_text(CLIENT)
    path = os.pathsep.join(filter(None, [str(houlsby_peft.__path__[0] + "/.."), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["token"] == 64
    assert found["health"]["tasks"] == 3
    assert found["labels"] == [
        houlsby_peft.load(live / task).predict(WORDS[0])[0]["label"] for task in ("first", "second", "third")
    ]
    assert found["statuses of wrong requests"] == [400, 404]
    assert found["status of the new task"] == 200
    assert found["killed"] == {"200": 200}
    assert set(found["overload"]) == {"200", "503"}
    assert found["afterwards"] == 200


CLIENT = """
import asyncio, collections, json, os, shutil, signal, socket, sys, time
import aiohttp, psutil
from houlsby_peft.serving.local_service import start, stop

adapters, other, output = sys.argv[1:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
url = f"http://127.0.0.1:{port}"
options = {"adapters": adapters, "watch": 0.5, "max_queued": 16, "batch_size": 4}


async def use():
    found = {"token": len(os.environ["RAY_AUTH_TOKEN"])}
    text = "The parcel came two weeks late and the box was torn."
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:
        async def post(*tasks):
            rows = [{"task": task, "text": text} for task in tasks]
            async with session.post(url + "/predict", json={"inputs": rows}) as response:
                return response.status, await response.json()

        async def many(number, at_once):
            limit = asyncio.Semaphore(at_once)
            async def one():
                async with limit:
                    return (await post("first"))[0]
            return [asyncio.create_task(one()) for _ in range(number)]

        async with session.get(url + "/health") as response:
            found["health"] = await response.json()
        found["labels"] = [item["label"] for item in (await post("first", "second", "third"))[1]["predictions"]]
        found["statuses of wrong requests"] = [(await post())[0], (await post("nothing"))[0]]
        shutil.copytree(other, adapters + "/.new")
        os.rename(adapters + "/.new", adapters + "/new")
        end = time.time() + 60
        while (status := (await post("new"))[0]) != 200 and time.time() < end:
            await asyncio.sleep(0.2)
        found["status of the new task"] = status
        # No more at a time than may run and wait, so that all of them are accepted.
        tasks = await many(200, 8)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for process in psutil.Process().children(recursive=True):
            if "BankReplica" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)
        found["killed"] = collections.Counter(await asyncio.gather(*tasks))
        found["overload"] = collections.Counter(await asyncio.gather(*await many(400, 400)))
        found["afterwards"] = (await post("first"))[0]
    return found


start(options, "127.0.0.1", port)
try:
    with open(output, "w") as file:
        json.dump(asyncio.run(use()), file)
finally:
    stop()
"""
