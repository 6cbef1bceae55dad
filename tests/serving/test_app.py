"""The service's own routes, on uvicorn in a thread."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest

import houlsby_peft
from hub_models import WORDS, make_adapter


pytest.importorskip("uvicorn", reason="the extra serve is not installed")
from houlsby_peft.service import server
from houlsby_peft.service.guards import Tokens, read_tokens
from running_service import ServiceInThread


TASKS = ("first", "second", "third")
DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    """A folder with three adapters, which stays as it is."""
    path = tmp_path_factory.mktemp("service") / "adapters"
    for seed, task in enumerate(TASKS):
        make_adapter(path / task, base, str(base), seed)
    return path


@pytest.fixture(scope="module")
def service(folder):
    limits = {"max_rows": 5, "max_characters": 2000, "batch_size": 4}
    service = ServiceInThread(folder, hosts=["127.0.0.1"], **limits)
    yield service
    service.stop()


def scores(result):
    several = [result] if isinstance(result, dict) else result
    return pytest.approx({item["label"]: item["score"] for item in several}, rel=1e-4)


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
        assert scores(result) == scores(other).expected
    assert service.ask("/tasks") == (200, {"tasks": [*TASKS]})
    health = {"status": "ok", "tasks": 3, "in_memory": 3, "failed": {}, "list": "ok"}
    assert service.ask("/health") == (200, health)
    assert service.ask("/health/live")[0] == service.ask("/health/ready")[0] == 200
    status, facts = service.ask("/tasks/first")
    assert (facts["pipeline"], facts["labels"]) == (
        "text-classification",
        ["complaint", "praise", "question"],
    )
    status, metrics = service.ask("/metrics")
    assert 'houlsby_predictions_total{task="second"} 2.0' in metrics
    assert 'houlsby_task_up{task="third"} 1.0' in metrics
    assert service.headers["x-request-id"] != "abc 1"
    assert 'route="/predict",status="200"' in metrics
    assert 'base_model="base' in metrics


def test_head_is_answered_wherever_get_is(service):
    for path in ("/", "/health", "/health/live", "/tasks", "/tasks/first", "/metrics", "/info"):
        expected, _ = service.ask(path)
        length = service.headers.get("content-length")
        status, nothing = service.ask(path, method="HEAD")
        assert (status, nothing) == (expected, ""), path
        if path != "/metrics":  # which change
            assert service.headers.get("content-length") == length, path


def test_a_request_has_an_id_and_an_answer_the_fingerprint_of_its_adapter(service, folder):
    row = {"inputs": [{"task": "first", "text": "a"}]}
    service.post("/predict", row, x_request_id="abc-1")
    assert service.headers["x-request-id"] == "abc-1"
    adapters = service.headers["x-adapters"]
    service.post("/predict", row, x_request_id="x" * 200)
    assert len(service.headers["x-request-id"]) == 32
    facts = service.ask("/tasks/first")[1]
    assert adapters == f"first={facts['fingerprint']}"
    assert facts["fingerprint"] != service.ask("/tasks/second")[1]["fingerprint"]


def test_all_tasks_are_asked_at_once(service):
    _, found = service.predict({"tasks": "*", "text": WORDS[0]})
    _, named = service.predict({"tasks": [*TASKS], "text": WORDS[0]})
    assert found == named


def test_a_body_of_many_values_is_refused_before_they_are_checked(service):
    many = json.dumps({"inputs": [{}] * 200_000}).encode()
    start = time.perf_counter()
    assert service.ask("/predict", many)[0] == 413
    assert time.perf_counter() - start < 5
    status, found = service.predict(*[{}] * 15)
    assert (status, len(found["detail"])) == (422, 10)


def send_raw(service, *lines):
    """Send lines as they are; return the status of the answer, or 0 if the connection ends."""
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        with suppress(ConnectionError):
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
        with suppress(ConnectionError):
            return int((connection.recv(1000) or b"_ 0").split()[1])
    return 0


def test_what_comes_before_a_body_is_limited(service):
    assert send_raw(service, "GET /tasks HTTP/1.1", "Host: 127.0.0.1") == 200
    two_hosts = ("Host: 127.0.0.1", "Host: pages.example")
    assert send_raw(service, "GET /tasks HTTP/1.1", *two_hosts) == 400
    assert send_raw(service, "GET /tasks HTTP/1.1", *["a: b"] * 200_000) in (0, 400)
    assert send_raw(service, f"GET /{'a' * 1_000_000} HTTP/1.1") in (0, 400)


def test_a_silent_connection_is_closed(service, monkeypatch):
    monkeypatch.setattr(server, "_REQUEST_SECONDS", 0.5)
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"GET /tasks HTTP/1.1\r\nHost: ")
        assert connection.recv(1000) == b""


def test_the_page_shows_the_answers_of_all_tasks_in_a_browser(service):
    assert not re.findall(r'(?:src|href)=(?!"data:)|url\(|@import', service.ask("/")[1]), (
        "nothing is loaded from elsewhere"
    )
    policy = service.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    found = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    browser = next(filter(None, found), None)
    if browser is None:
        pytest.skip("There is no Chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server"]
    flags += ["--virtual-time-budget=20000"]
    page = f"{service.url}/#{quote(WORDS[0])}"
    command = [browser, *flags, "--dump-dom", page]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    _, found = service.predict({"tasks": [*TASKS], "text": WORDS[0], "top_k": 3})
    rows = re.findall(r"<th>(.*?)</th><td>(.*?)</td>", shown)
    assert [task for task, _ in rows] == [*TASKS]
    for task, cell in rows:
        labels = re.findall(r"<span>[\d.]+</span><span>(\w+)</span></div>", cell)
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
        ([{"task": "first", "text": "\ud800"}], ["inputs", 0, "text"]),
        ([{"task": "first", "question": "a", "context": "b", "text": "c"}], ["inputs", 0]),
        ([{"tasks": ["first"], "task": "first", "text": "a"}], ["inputs", 0]),
        ([{"task": "", "text": "a"}], ["inputs", 0, "task"]),
    ],
)
def test_a_wrong_request_is_refused_with_the_place(service, rows, where):
    status, found = service.predict(*rows)
    assert status == 422
    assert found["detail"][0]["loc"] == ["body", *where]


def test_what_a_client_sends_comes_back_only_in_part(service):
    status, found = service.predict({"task": "first", "text": "a", "k" * 100_000: 1})
    assert status == 422
    assert len(json.dumps(found)) < 2000


def test_requests_that_cannot_be_answered_and_bodies_of_another_form_are_refused(service):
    good = {"task": "first", "text": "a"}
    status, found = service.predict(*[good] * 6)
    assert (status, found["detail"]["row"]) == (413, None)
    assert "at most 5 rows, counted once per task; got 6" in found["detail"]["rule"]
    assert service.predict({"task": "first", "text": "a" * 2000})[0] == 200
    status, found = service.predict(good, {"task": "first", "text": "a" * 2000})
    assert (status, found["error"]) == (413, found["detail"]["rule"])
    assert "at most 2,000 characters; got 2,001" in found["error"]
    status, found = service.predict(good, {"task": "other", "text": "a"})
    assert (status, found["detail"]["row"]) == (404, 1)
    assert "'third']; got other" in found["detail"]["rule"]
    assert service.predict({"task": "first", "question": "a", "context": ""})[0] == 200
    both = {"tasks": ["first", "second"], "text": "a"}
    status, found = service.predict(both, {"task": "second", "text": "a"})
    assert status == 200
    assert list(found["predictions"][0]) == both["tasks"]
    assert found["predictions"][0]["second"]["label"] == found["predictions"][1]["label"]
    assert service.predict(both, {**both, "tasks": ["first", "other"]})[1]["detail"]["row"] == 1
    row = json.dumps({"inputs": [good]}).encode()
    assert service.ask("/predict", row)[0] == 200
    for body in (b"{", b"[" * 100_000, b"\xff\xfe"):
        assert service.ask("/predict", body)[0] == 400
    assert service.ask("/predict", b"[]")[0] == 422
    # Which any page in a browser may send.
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert service.ask("/predict", row, kind)[0] == 415
    assert service.ask("/predict", row, content_encoding="gzip")[0] == 415
    assert service.ask("/predict", row, host="pages.example")[0] == 400
    large = b'"' + b"a" * 5_000_000 + b'"'
    assert service.ask("/predict", large)[0] == 413
    assert service.ask("/predict", large, "text/plain")[0] == 415
    assert service.ask("/nothing")[0] == 404
    assert service.ask("/predict", method="GET")[1]["error"] == "Method Not Allowed"


def test_tasks_are_added_replaced_and_removed_by_requests(folder, base, tmp_path):
    shutil.copytree(folder, tmp_path / "adapters")
    listed = tmp_path / "tasks.yaml"
    listed.write_text("first: adapters/first\n7: adapters/third\n")
    tokens = Tokens(predict=("asks",), manage=("changes",))
    service = ServiceInThread(listed, tokens)
    try:
        asks = {"authorization": "Bearer asks"}
        changes = {"authorization": "Bearer changes"}
        row = {"inputs": [{"task": "new", "text": WORDS[0]}]}
        assert service.post("/predict", row)[0] == 401
        assert service.headers["www-authenticate"] == "Bearer"
        assert service.post("/predict", row, authorization="Bearer other")[0] == 401
        assert service.post("/predict", row, **asks)[0] == 404
        source = json.dumps({"source": "adapters/second"}).encode()
        assert service.ask("/tasks/new", source, method="PUT", **asks)[0] == 403
        assert service.ask("/tasks/new", source, method="PUT", **changes)[0] == 200
        status, found = service.post("/predict", row, **changes)
        expected = houlsby_peft.load(folder / "second").predict(WORDS[0])
        assert scores(found["predictions"][0]) == scores(expected[0]).expected
        assert service.ask("/tasks/7", method="DELETE", **changes)[0] == 200
        assert service.ask("/tasks", **asks)[1] == {"tasks": ["first", "new"]}
        assert "new:" in listed.read_text()
        for path, wrong in {
            "/tasks/new": "adapters/lost",
            "/tasks/home": "~/adapter",
            "/tasks/%1b[31mred": "adapters/second",
        }.items():
            source = json.dumps({"source": wrong}).encode()
            status, found = service.ask(path, source, method="PUT", **changes)
            assert status == 422
            assert str(tmp_path) not in found["error"]
        assert service.post("/predict", row, **asks)[0] == 200
        assert 'task="new"' in service.ask("/metrics", **asks)[1]
        assert service.ask("/tasks/new", method="DELETE", **changes)[0] == 200
        assert service.ask("/tasks/new", method="DELETE", **changes)[0] == 404
        assert service.post("/predict", row, **asks)[0] == 404
        assert 'task="new"' not in service.ask("/metrics", **asks)[1]
        assert service.ask("/tasks/first", method="DELETE", **changes)[0] == 422
        assert service.ask("/tasks", **asks)[1] == {"tasks": ["first"]}
        # An adapter that is damaged, while the one before it stays.
        weights = tmp_path / "adapters" / "first" / "adapter_model.safetensors"
        weights.write_bytes(b"no tensors")
        status, health = service.ask("/reload", method="POST", **changes)
        assert (health["status"], list(health["failed"])) == ("degraded", ["first"])
        assert str(tmp_path) not in json.dumps(health)
        assert service.ask("/health")[1] == health, "no token is needed"
        metrics = service.ask("/metrics", **asks)[1]
        assert 'houlsby_task_up{task="first"} 0.0' in metrics
        for status in (401, 403):
            assert f'status="{status}"' in metrics
        row["inputs"][0]["task"] = "first"
        assert service.post("/predict", row, **asks)[0] == 200
    finally:
        service.stop()


def test_tokens_are_read_from_a_file_or_the_environment(tmp_path, monkeypatch):
    assert read_tokens(None) == Tokens()
    monkeypatch.setenv("HOULSBY_TOKENS", "{predict: a, manage: [b, c]}")
    assert read_tokens(None) == Tokens(("a",), ("b", "c"))
    path = tmp_path / "tokens"
    path.write_text("predict: [x]")
    assert read_tokens(str(path)) == Tokens(("x",))
    wrong = ("secret", "", "predict: []", "read: [secret]", "predict: ['']", "predict: [1]")
    for text in (*wrong, "predict: secret\u00e9", f"predict: {'a' * 129}"):
        path.write_text(text)
        with pytest.raises(ValueError, match="predict:") as caught:
            read_tokens(str(path))
        assert "secret" not in str(caught.value)
    assert Tokens(("a",), ("b",)).may_predict("b")
    assert not Tokens(("a",), ("b",)).may_manage("a")
    assert Tokens().may_predict("")
    assert not Tokens().may_manage("")


def test_names_that_are_no_utf_8_are_answered(folder, tmp_path):
    live = tmp_path / "adapters"
    shutil.copytree(folder / "first", live / "caf\udce9")  # safetensors cannot open it
    shutil.copytree(folder / "first", live / "label")
    config = live / "label" / "adapter_config.json"
    config.write_text(config.read_text().replace("praise", r"\ud800"))
    service = ServiceInThread(live)
    try:
        assert service.ask("/tasks")[1] == {"tasks": ["label"]}
        assert list(service.ask("/health")[1]["failed"]) == ["caf\ufffd"]
        assert service.predict({"task": "caf\ufffd", "text": "a"})[0] == 500
        status, found = service.predict({"task": "label", "text": WORDS[0], "top_k": 3})
        assert (status, len(found["predictions"][0])) == (200, 3)
        assert service.ask("/metrics")[0] == 200
    finally:
        service.stop()


def test_the_dashboard_and_the_alerts_name_metrics_that_are_exported(service):
    service.predict({"task": "first", "text": "a"})
    metrics = service.ask("/metrics")[1]
    exported = set(re.findall(r"^(?:# HELP )?(\w+)", metrics, re.MULTILINE))
    for name in ("dashboard.json", "alerts.yaml"):
        text = (DEPLOY / name).read_text()
        used = set(re.findall(r"(?:houlsby|process)_\w+", text)) - {"houlsby_peft"}
        assert len(used) > 2
        assert used <= exported, name
    json.loads((DEPLOY / "dashboard.json").read_text())


@pytest.mark.parametrize(
    "command",
    [
        "promtool check rules {deploy}/alerts.yaml",
        "promtool check config {deploy}/prometheus.yaml",
        "caddy validate --adapter caddyfile --config {deploy}/Caddyfile",
    ],
)
def test_the_tools_of_operators_read_their_files(command, tmp_path):
    words = command.format(deploy=DEPLOY).split()
    if shutil.which(words[0]) is None:
        pytest.skip(f"There is no {words[0]}")
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(words, check=True, capture_output=True, timeout=60, env=environment)


def test_systemd_reads_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("There is no systemd-analyze")
    unit = (DEPLOY / "houlsby-peft.service").read_text()
    (tmp_path / "houlsby-peft.service").write_text(unit.replace("/opt/houlsby-peft", sys.prefix))
    words = ["systemd-analyze", "verify", str(tmp_path / "houlsby-peft.service")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    problems = [line for line in done.stderr.splitlines() if "houlsby-peft" in line]
    assert [line for line in problems if "is not executable" not in line] == []
