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
from unittest.mock import patch
from urllib.parse import quote

import pytest

import houlsby_peft
from answers import near
from hub_models import WORDS


pytest.importorskip("uvicorn", reason="the extra serve is not installed")
from houlsby_peft.service import server
from houlsby_peft.service.guards import Tokens, read_tokens
from running_service import ServiceInThread


TASKS = ("first", "second", "third")  # of the fixture `folder`
DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def service(folder):
    limits = {"max_rows": 5, "max_characters": 2000, "batch_size": 4}
    service = ServiceInThread(folder, hosts=["127.0.0.1"], **limits)
    yield service
    service.stop()


def test_rows_of_several_tasks_are_answered_in_their_order(service, folder):
    status, answer = service.predict(
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
    assert (status, answer["predictions"]) == (200, near(expected))


def test_the_service_says_what_it_serves_and_how_it_is(service):
    assert service.ask("/tasks") == (200, {"tasks": [*TASKS]})
    health = {"status": "ok", "tasks": 3, "in_memory": 3, "failed": {}, "list": "ok"}
    assert service.ask("/health") == (200, health)
    assert service.ask("/health/live")[0] == service.ask("/health/ready")[0] == 200
    facts = service.ask("/tasks/first")[1]
    assert facts["pipeline"] == "text-classification"
    assert facts["labels"] == ["complaint", "praise", "question"]


def test_metrics_count_predictions_by_task_and_route(service):
    service.predict({"task": "third", "text": "a"})
    metrics = service.ask("/metrics")[1]
    for line in (
        'houlsby_predictions_total{task="third"} 1.0',
        'houlsby_task_up{task="third"} 1.0',
        'route="/predict",status="200"',
        'base_model="base',
    ):
        assert line in metrics


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
    all_tasks = service.predict({"tasks": "*", "text": WORDS[0]})
    assert all_tasks == service.predict({"tasks": [*TASKS], "text": WORDS[0]})


def test_a_row_may_ask_several_tasks(service):
    status, answer = service.predict(
        {"tasks": ["first", "second"], "text": "a"}, {"task": "second", "text": "a"}
    )
    assert status == 200
    of_both, of_second = answer["predictions"]
    assert list(of_both) == ["first", "second"]
    assert of_both["second"] == near(of_second)


def test_a_body_of_many_values_is_refused_before_they_are_checked(service):
    many = json.dumps({"inputs": [{}] * 200_000}).encode()
    start = time.perf_counter()
    assert service.ask("/predict", many)[0] == 413
    assert time.perf_counter() - start < 5
    status, answer = service.predict(*[{}] * 15)
    assert (status, len(answer["detail"])) == (422, 10)


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
    names = ("chromium", "chromium-browser", "google-chrome")
    browsers = [browser for browser in map(shutil.which, names) if browser]
    if not browsers:
        pytest.skip("There is no Chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server"]
    flags += ["--virtual-time-budget=20000"]
    address = f"{service.url}/#{quote(WORDS[0])}"
    command = [browsers[0], *flags, "--dump-dom", address]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    _, answer = service.predict({"tasks": [*TASKS], "text": WORDS[0], "top_k": 3})
    cells = dict(re.findall(r"<th>(.*?)</th><td>(.*?)</td>", page))
    assert [*cells] == [*TASKS]
    for task, results in answer["predictions"][0].items():
        labels = re.findall(r"<span>[\d.]+</span><span>(\w+)</span></div>", cells[task])
        assert labels == [result["label"] for result in results]


GOOD = {"task": "first", "text": "a"}


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ([], ["inputs"]),
        ([1], ["inputs", 0]),
        ([GOOD, {"task": "first"}], ["inputs", 1]),
        ([{**GOOD, "text": 1}], ["inputs", 0, "text"]),
        ([{**GOOD, "topk": 1}], ["inputs", 0, "topk"]),
        ([{**GOOD, "top_k": 0}], ["inputs", 0, "top_k"]),
        ([{**GOOD, "text": "\ud800"}], ["inputs", 0, "text"]),
        ([{**GOOD, "question": "a", "context": "b"}], ["inputs", 0]),
        ([{**GOOD, "tasks": ["first"]}], ["inputs", 0]),
        ([{**GOOD, "task": ""}], ["inputs", 0, "task"]),
    ],
)
def test_a_row_of_another_form_is_refused_with_its_place(service, rows, where):
    status, answer = service.predict(*rows)
    assert status == 422
    assert answer["detail"][0]["loc"] == ["body", *where]


@pytest.mark.parametrize(
    ("rows", "status", "row", "word"),
    [
        ([GOOD] * 6, 413, None, "at most 5 rows"),
        ([GOOD, {**GOOD, "text": "a" * 2000}], 413, None, "2,001"),
        ([GOOD, {**GOOD, "task": "other"}], 404, 1, "got other"),
        ([GOOD, {"tasks": ["first", "other"], "text": "a"}], 404, 1, "got other"),
    ],
    ids=lambda value: "rows" if isinstance(value, list) else str(value),
)
def test_rows_that_cannot_be_answered_are_refused_with_the_rule(service, rows, status, row, word):
    answer_status, answer = service.predict(*rows)
    assert (answer_status, answer["detail"]["row"]) == (status, row)
    assert word in answer["detail"]["rule"]


def test_rows_at_the_limits_are_answered(service):
    assert service.predict({**GOOD, "text": "a" * 2000})[0] == 200
    assert service.predict({"task": "first", "question": "a", "context": ""})[0] == 200


def test_what_a_client_sends_comes_back_only_in_part(service):
    status, answer = service.predict({**GOOD, "k" * 100_000: 1})
    assert status == 422
    assert len(json.dumps(answer)) < 2000


BODY = json.dumps({"inputs": [GOOD]}).encode()
LARGE = b'"' + b"a" * 5_000_000 + b'"'


@pytest.mark.parametrize(
    ("body", "options", "status"),
    [
        (BODY, {}, 200),
        (b"{", {}, 400),
        (b"[" * 100_000, {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"[]", {}, 422),
        # Which any page in a browser may send.
        (BODY, {"kind": "text/plain"}, 415),
        (BODY, {"kind": "application/x-www-form-urlencoded"}, 415),
        (BODY, {"kind": ""}, 415),
        (BODY, {"content_encoding": "gzip"}, 415),
        (BODY, {"host": "pages.example"}, 400),
        (LARGE, {}, 413),
        (LARGE, {"kind": "text/plain"}, 415),
        (None, {"method": "GET"}, 405),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else str(value),
)
def test_bodies_of_another_form_are_refused(service, body, options, status):
    assert service.ask("/predict", body, **options)[0] == status


def test_a_path_that_there_is_not(service):
    assert service.ask("/nothing")[0] == 404


ASKS = {"authorization": "Bearer asks"}
CHANGES = {"authorization": "Bearer changes"}


class Managed(ServiceInThread):
    """A service of a list of adapters, whose tasks may be changed by requests."""

    def put(self, task, source, **headers):
        body = json.dumps({"source": source}).encode()
        return self.ask(f"/tasks/{task}", body, method="PUT", **headers)

    def delete(self, task):
        return self.ask(f"/tasks/{task}", method="DELETE", **CHANGES)[0]

    def ask_task(self, task, **headers):
        return self.post("/predict", {"inputs": [{"task": task, "text": WORDS[0]}]}, **headers)


@pytest.fixture
def managed(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "adapters")
    listed = tmp_path / "tasks.yaml"
    listed.write_text("first: adapters/first\n7: adapters/third\n")
    service = Managed(listed, Tokens(predict=("asks",), manage=("changes",)))
    yield service
    service.stop()


def test_tokens_are_asked_for(managed):
    assert managed.ask_task("first")[0] == 401
    assert managed.headers["www-authenticate"] == "Bearer"
    status, content = managed.ask_task("first", authorization="Bearer other")
    assert status == 401
    assert "none of this service's" in content["detail"]["rule"]
    assert managed.ask_task("first", **ASKS)[0] == managed.ask_task("first", **CHANGES)[0] == 200
    assert managed.put("new", "adapters/second", **ASKS)[0] == 403
    metrics = managed.ask("/metrics", **ASKS)[1]
    assert 'status="401"' in metrics
    assert 'status="403"' in metrics
    assert managed.ask("/health")[0] == 200, "no token is needed"


def test_tasks_are_added_and_removed_by_requests(managed, folder):
    assert managed.ask_task("new", **ASKS)[0] == 404
    assert managed.put("new", "adapters/second", **CHANGES)[0] == 200
    answer = managed.ask_task("new", **ASKS)[1]
    assert answer["predictions"] == near(houlsby_peft.load(folder / "second").predict(WORDS[0]))
    assert managed.delete("7") == 200
    assert managed.ask("/tasks", **ASKS)[1] == {"tasks": ["first", "new"]}
    assert "new:" in managed.adapters.read_text()
    assert 'task="new"' in managed.ask("/metrics", **ASKS)[1]
    assert [managed.delete("new"), managed.delete("new")] == [200, 404]
    assert managed.ask_task("new", **ASKS)[0] == 404
    assert 'task="new"' not in managed.ask("/metrics", **ASKS)[1]
    assert managed.delete("first") == 422, "the last one stays"
    assert managed.ask("/tasks", **ASKS)[1] == {"tasks": ["first"]}


@pytest.mark.parametrize(
    ("task", "source"),
    [("first", "adapters/lost"), ("home", "~/adapter"), ("%1b[31mred", "adapters/second")],
)
def test_an_adapter_that_cannot_be_served_is_refused_and_no_path_is_told(managed, task, source):
    status, answer = managed.put(task, source, **CHANGES)
    assert status == 422
    assert str(managed.adapters.parent) not in answer["error"]
    assert managed.ask_task("first", **ASKS)[0] == 200


def test_a_list_that_cannot_be_changed_is_answered_and_stays(managed):
    content = managed.adapters.read_text()
    managed.adapters.write_text("first: [adapters")
    status, answer = managed.put("new", "adapters/second", **CHANGES)
    assert (status, "must map each task" in answer["error"]) == (500, True)
    managed.adapters.write_text(content)
    # As in another user's folder, where nothing can be written: the task is served all the time.
    written = managed.adapters.with_name(".tasks.yaml.new")
    written.mkdir()
    with patch.object(managed.engine._bank, "remove") as remove:
        assert managed.delete("7") == 500
    remove.assert_not_called()
    written.rmdir()
    assert managed.adapters.read_text() == content
    assert managed.delete("7") == 200


def test_a_damaged_adapter_is_reported_while_the_one_before_it_stays(managed):
    folder = managed.adapters.parent
    managed.ask("/metrics", **ASKS)  # which are asked for all the time
    (folder / "adapters" / "first" / "adapter_model.safetensors").write_bytes(b"no tensors")
    _, health = managed.ask("/reload", method="POST", **CHANGES)
    assert (health["status"], list(health["failed"])) == ("degraded", ["first"])
    assert str(folder) not in json.dumps(health)
    assert managed.ask("/health")[1] == health
    assert 'houlsby_task_up{task="first"} 0.0' in managed.ask("/metrics", **ASKS)[1]
    assert managed.ask_task("first", **ASKS)[0] == 200


def test_tokens_are_read_from_a_file_or_the_environment(tmp_path, monkeypatch):
    assert read_tokens(None) == Tokens()
    monkeypatch.setenv("HOULSBY_TOKENS", "{predict: a, manage: [b, c]}")
    assert read_tokens(None) == Tokens(("a",), ("b", "c"))
    path = tmp_path / "tokens"
    path.write_text("predict: [x]")
    assert read_tokens(str(path)) == Tokens(("x",))
    assert Tokens(("a",), ("b",)).may_predict("b")
    assert not Tokens(("a",), ("b",)).may_manage("a")
    assert Tokens().may_predict("")
    assert not Tokens().may_manage("")


WRONG_TOKENS = ("secret", "", "predict: []", "read: [secret]", "predict: ['']", "predict: [1]")


@pytest.mark.parametrize("text", [*WRONG_TOKENS, "predict: secret\u00e9", f"predict: {'a' * 129}"])
def test_a_file_of_another_form_is_refused_and_no_token_is_told(text, tmp_path):
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ValueError, match="predict:") as error:
        read_tokens(str(path))
    assert "secret" not in str(error.value)


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
        status, answer = service.predict({"task": "label", "text": WORDS[0], "top_k": 3})
        assert (status, len(answer["predictions"][0])) == (200, 3)
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
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr


def test_systemd_reads_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("There is no systemd-analyze")
    unit = (DEPLOY / "houlsby-peft.service").read_text()
    (tmp_path / "houlsby-peft.service").write_text(unit.replace("/opt/houlsby-peft", sys.prefix))
    words = ["systemd-analyze", "verify", str(tmp_path / "houlsby-peft.service")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    problems = [line for line in done.stderr.splitlines() if "houlsby-peft" in line]
    assert [line for line in problems if "is not executable" not in line] == []
