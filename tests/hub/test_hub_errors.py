"""Failed pushes and loads: each gives one clear line, leaves no partial upload and can be tried again."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import huggingface_hub.utils._http
import pytest
from peft import PeftModel
from transformers import AutoModel

import houlsby_peft
import houlsby_peft.cli
import houlsby_peft.hub.push
from houlsby_peft import AdapterError, HoulsbyConfig, HubError
from hub_models import BASE, make_adapter, make_base
from local_hub import Fault


def _attempt(function, *arguments, **options):
    """Return the result, or the error's class and message."""
    try:
        return ["ok", str(function(*arguments, **options))]
    except (AdapterError, HubError) as error:
        return [type(error).__name__, str(error)]


INVALID_RESULTS = {
    "name": "x",
    "results": [
        {
            "task": {"type": "text-classification"},
            "dataset": {"type": "a", "name": "b", "config": 3},
            "metrics": [{"type": "f1", "value": 1}],
        }
    ],
}


def push_and_load_wrongly(folder, other_base, linked):
    """Client without a token of its own: return the outcome of each wrong request."""
    push, load = houlsby_peft.push_to_hub, houlsby_peft.load
    return {
        "no token": _attempt(push, folder, "user/a"),
        "wrong token": _attempt(push, folder, "user/a", token="hf_wrong"),
        "token that may only read": _attempt(push, folder, "user/a", token="hf_read"),
        "no right to create": _attempt(push, folder, "other/new", token="hf_write"),
        "no right to write": _attempt(push, folder, "other/theirs", token="hf_write"),
        "impossible name": _attempt(push, folder, "user/a b", token="hf_write"),
        "reserved name": _attempt(push, folder, "user/admin", token="hf_write"),
        "private to public": _attempt(push, folder, "user/public", token="hf_write", private=True),
        "whole model": _attempt(push, folder, BASE, token="hf_write"),
        "local base": _attempt(push, folder, "user/a", token="hf_write", base_model=other_base),
        "wrong license": _attempt(push, folder, "user/a", token="hf_write", metadata={"license": "Apache 2"}),
        "license that the Hub does not know": _attempt(
            push, folder, "user/license", token="hf_write", metadata={"license": "wtf"}
        ),
        "results that the Hub refuses": _attempt(
            push, folder, "user/results", token="hf_write", metadata={"model-index": [INVALID_RESULTS]}
        ),
        "link": _attempt(push, linked, "user/a", token="hf_write"),
        "no repository": _attempt(load, "user/nothing"),
        "private": _attempt(load, "other/private", token="hf_write"),
        "private, without token": _attempt(load, "other/private"),
        "forbidden": _attempt(load, "user/forbidden", token="hf_write"),
        "no revision": _attempt(load, "user/public", revision="v9"),
        "no folder": _attempt(load, "./nothing"),
        "other base": _attempt(load, "user/public", base_model=other_base),
        "no base on the Hub": _attempt(load, "user/baseless"),
        "base from another repository": _attempt(load, "user/recorded", base_model="org/mirror"),
        "right after all that": _attempt(load, "user/public"),
    }


EXPECTED = {
    "no token": "HubError: user/a: there is no token; log in with `hf auth login` or set HF_TOKEN",
    "wrong token": "HubError: user/a: the token is invalid or has expired; log in",
    "token that may only read": "HubError: user/a: the token is read-only; create one with write access",
    "no right to create": "HubError: other/new: the token lacks the permission.*The adapter's folder is",
    "no right to write": "HubError: other/theirs: the token lacks the permission",
    "impossible name": "HubError: user/a b: the Hub does not accept this name",
    "reserved name": "HubError: user/admin: the Hub refused the request .*reserved",
    "private to public": "HubError: user/public is public, so a private push to it is refused",
    "whole model": "HubError: org/tiny-bert contains a whole model",
    "local base": "AdapterError: The base model must be on the Hub",
    "wrong license": "AdapterError: The card's license must be an identifier such as apache-2.0; got 'Apache 2'",
    "license that the Hub does not know": "HubError: user/license: the Hub refuses the card .*license",
    "results that the Hub refuses": "HubError: user/results: the Hub refuses the card .*model-index",
    "link": "AdapterError: What is uploaded must be in the adapter's folder; .*leak.png is a symbolic link to",
    "no repository": "HubError: user/nothing: the repository does not exist, or it is private",
    "private": "HubError: other/private: the repository does not exist, or it is private",
    "private, without token": "HubError: other/private: the repository does not exist, or it is private",
    "forbidden": "HubError: user/forbidden: .*access is denied; ask its owner for access(?!.*write)",
    "no revision": "HubError: user/public: it has no such revision",
    "no folder": "AdapterError: An adapter must be a folder, or a name on the Hub .* ./nothing is neither",
    "other base": "AdapterError: user/public: Adapter 'default' was trained on the base model 'org/tiny-bert' and is",
    "no base on the Hub": "HubError: The base model org/no-such-model: the repository does not exist",
    "base from another repository": "ok: ",
    "right after all that": "ok: ",
}


@pytest.fixture(scope="module")
def base(hub, tmp_path_factory):
    folder = make_base(tmp_path_factory.mktemp("base"))
    hub.add(BASE, folder)
    return folder


@pytest.fixture
def adapter(base, tmp_path):
    return make_adapter(tmp_path / "adapter", base)


def test_each_mistake_gives_one_clear_line(hub, base, adapter, tmp_path):
    hub.add("user/public", adapter)
    hub.add("other/theirs", adapter)
    hub.add("other/private", adapter, private=True)
    hub.add("user/baseless", make_adapter(tmp_path / "baseless", base, "org/no-such-model"))
    recorded = make_adapter(tmp_path / "recorded", base)
    path = recorded / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"revision": "0" * 40}))
    hub.add("user/recorded", recorded)
    hub.add("org/mirror", base)
    other = make_base(tmp_path / "other", seed=9)
    (tmp_path / "secret").write_bytes(b"a key")
    linked = make_adapter(tmp_path / "linked", base)
    (linked / "leak.png").symlink_to(tmp_path / "secret")
    hub.faults.append(Fault("GET", "user/forbidden", 403, times=9))
    folders = [str(adapter), str(other), str(linked)]
    outcomes = hub.call(push_and_load_wrongly, *folders, home=tmp_path / "home", token=None)
    hub.faults.clear()
    for case, (kind, message) in outcomes.items():
        assert re.match(EXPECTED[case], f"{kind}: {message}"), f"{case}: {kind}: {message}"
        assert "\n" not in message, case
    assert set(outcomes) == set(EXPECTED)
    # A refusal leaves no empty repository.
    assert not {"user/a", "user/license", "user/results"} & set(hub.store.repos)
    assert len(hub.store.repos["other/theirs"].commits) == 1
    assert {path.name for path in adapter.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}


FAULTS = {
    # This comes first, as the path of this request names no repository.
    "the Hub does not answer who one is": Fault("GET", "/whoami", "close"),
    "500 twice for a file": Fault("PUT", "/lfs/{repo}/", 500, times=2),
    "500 twice before": Fault("POST", "{repo}/preupload/", 500, times=2),
    "500 twice for the commit": Fault("POST", "{repo}/commit/", 500, times=2),
    "a file breaks off": Fault("PUT", "/lfs/{repo}/", "close", times=9),
    "the commit breaks off": Fault("POST", "{repo}/commit/", "close"),
    "the answer to the commit is lost": Fault("POST", "{repo}/commit/", "close", late=True),
    "someone else commits meanwhile": Fault("POST", "{repo}/commit/", "overtaken"),
}
# The client itself tries these again, so the first call succeeds.
REPAIRED = ("500 twice for a file", "500 twice before")


def push_again_and_again(folders):
    """Client: try up to three times to push each folder to its own repository; return the outcomes."""
    # Skip the client's waiting time between attempts, up to 23 seconds.
    huggingface_hub.utils._http.time.sleep = lambda seconds: None
    outcomes = []
    for number, folder in enumerate(folders):
        attempts = []
        while len(attempts) < 3 and (not attempts or attempts[-1][0] != "ok"):
            attempts.append(_attempt(houlsby_peft.push_to_hub, folder, f"user/fault-{number}"))
        outcomes.append(attempts)
    return outcomes


def test_a_broken_upload_leaves_no_half_commit_and_a_retry_succeeds(hub, base, tmp_path):
    folders = [make_adapter(tmp_path / str(n), base, seed=n) for n in range(len(FAULTS))]
    for number, fault in enumerate(FAULTS.values()):
        hub.faults.append(replace(fault, path=fault.path.format(repo=f"user/fault-{number}")))
    outcomes = hub.call(push_again_and_again, [str(folder) for folder in folders], home=tmp_path / "home")
    for number, (case, attempts) in enumerate(zip(FAULTS, outcomes, strict=True)):
        repo = hub.store.repos[f"user/fault-{number}"]
        assert attempts[-1][0] == "ok", (case, attempts)
        assert (len(attempts) == 1) == (case in REPAIRED), (case, attempts)
        for kind, message in attempts[:-1]:
            assert kind == "HubError", (case, message)
            assert f"houlsby-peft push {folders[number]} user/fault-{number}" in message, message
        messages = [commit.message for commit in repo.commits if commit.message != "someone else's"]
        assert messages == ["initial commit", "Upload Houlsby adapter"], case
        assert (
            repo.head.files["adapter_model.safetensors"]
            == (folders[number] / "adapter_model.safetensors").read_bytes()
        )


def push_until_the_server_is_back(folder):
    """Client: return the outcome of the first attempt and, after at most a minute, of the first that succeeds."""
    wait, huggingface_hub.utils._http.time.sleep = time.sleep, lambda seconds: None
    first = _attempt(houlsby_peft.push_to_hub, folder, "user/survivor")
    for _ in range(120):
        last = _attempt(houlsby_peft.push_to_hub, folder, "user/survivor")
        if last[0] == "ok":
            break
        wait(0.5)
    return [first, last]


def test_a_server_that_dies_halfway_can_be_pushed_to_when_it_is_back(hub, base, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", base, seed=99)
    hub.faults.append(Fault("PUT", "survivor", "down"))
    hub.restart_when_down(seconds=3)
    (kind, message), last = hub.call(push_until_the_server_is_back, str(adapter), home=tmp_path)
    assert kind == "HubError"
    assert re.search(rf"user/survivor: {hub.url} cannot be reached .*The adapter's folder is {adapter}", message)
    assert last[0] == "ok", last
    assert [commit.message for commit in hub.store.repos["user/survivor"].commits][1:] == ["Upload Houlsby adapter"]


RETRIES = [
    {},
    {"private": True, "base_model": "org/mirror", "message": "Retrain"},
    {"example": "A fine film.", "metadata": {"license": "mit", "language": "en", "tags": ["a b", "c"]}},
    {"example": ["A fine film.", "- and it's cheap"]},
    {"example": ("What?", "That.")},
    {"example": [("What?", "That."), ("--who", "They.")]},
    {"example": [["What?", "That."], ["--who", "They."]]},
    {"results": ["runs/1/results.json", {"seed": 2, "epochs": [{"epoch": 1.0, "accuracy": 0.5}]}]},
]


@pytest.mark.parametrize("options", RETRIES, ids=str)
def test_the_command_to_try_again_pushes_the_same(options, tmp_path, monkeypatch):
    with pytest.raises(AdapterError) as error:
        houlsby_peft.push_to_hub(tmp_path / "no adapter", "user/name", **options)
    program, *arguments = shlex.split(str(error.value).partition("To try again: ")[2])
    assert program == "houlsby-peft"
    calls = []
    monkeypatch.setattr(houlsby_peft.hub.push, "push_to_hub", lambda *args, **options: calls.append((args, options)))
    houlsby_peft.cli.main(arguments)
    [(positional, found)] = calls
    assert positional == (tmp_path / "no adapter", "user/name")
    for path in found["results"] or []:
        if path.startswith("/"):
            assert json.loads(Path(path).read_text()) == options["results"][1]
            Path(path).unlink()
    found["results"] = options.get("results") and ["runs/1/results.json", options["results"][1]]
    if isinstance(options.get("example"), list):  # pairs from JSON are lists
        options = {"example": [item if isinstance(item, str) else tuple(item) for item in options["example"]]}
    assert {name: value for name, value in found.items() if value} == options


@pytest.mark.parametrize("example", [3, [3], [("What?", 3)], {"a": "b"}, [["a", "b", "c"]]], ids=str)
def test_an_example_of_another_kind_is_refused_first(example, tmp_path):
    with pytest.raises(ValueError, match=r"^Each input must be a text or a pair of texts; got"):
        houlsby_peft.push_to_hub(tmp_path, "user/name", example=example)


def test_a_command_with_control_characters_is_one_line():
    for text in ("a\nb", "it's\t\\n", "\x1b[31m", "caf\u00e9\u2028"):
        quoted = houlsby_peft.hub.push._quote(text)
        assert quoted.isprintable()
        done = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True, env={"LC_ALL": "C.UTF-8"})
        assert done.stdout.decode() == text


def use_the_cache(name):
    """Client: damage the downloaded files one after another; return the error of each load, and the last result."""
    config, first = HoulsbyConfig.from_pretrained(name), houlsby_peft.load(name)
    found = {"r": config.r, "labels": first.labels, "damaged": []}
    snapshots = Path(huggingface_hub.constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    for file in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        blob = next(snapshots.glob(f"*/{file}")).resolve()
        blob.write_bytes(blob.read_bytes()[:-9])
        ways = [_attempt(houlsby_peft.load, name)]
        if file == "adapter_config.json":
            ways.append(_attempt(HoulsbyConfig.from_pretrained, name))
        if file == "adapter_model.safetensors":
            with pytest.raises(ValueError, match="cannot be read") as caught:
                PeftModel.from_pretrained(AutoModel.from_pretrained(BASE), name, config=config)
            ways.append(["AdapterError", str(caught.value)])
        found["damaged"].append([file, str(blob), ways])
        blob.unlink()
    return found | {"again": houlsby_peft.load(name).labels}


def read_configuration(name):
    return _attempt(HoulsbyConfig.from_pretrained, name)


def test_a_damaged_download_is_named_with_the_way_to_fetch_it_again(hub, base, adapter, tmp_path):
    files = {path.name: path.read_bytes() for path in [*base.glob("tokenizer*.json"), *adapter.iterdir()]}
    hub.add("user/cached", files)
    found = hub.call(use_the_cache, "user/cached", home=tmp_path / "home")
    for file, blob, ways in found["damaged"]:
        for kind, message in ways:
            assert kind == "AdapterError", (file, message)
            assert f"The download of {file} is damaged; to fetch it again, delete {blob}." in message
            assert "\n" not in message
    assert found["again"] == found["labels"]


def test_a_configuration_is_read_without_its_weights_and_without_a_network(hub, adapter, tmp_path):
    hub.add("user/config", adapter)
    hub.requests.clear()
    kind, settings = hub.call(read_configuration, "user/config", home=tmp_path)
    assert kind == "ok", settings
    assert not [request for request in hub.requests if "safetensors" in request]
    closed = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    for changes in ({"HF_HUB_OFFLINE": "1"}, closed):
        assert hub.call(read_configuration, "user/config", home=tmp_path, **changes) == ["ok", settings]
    kind, message = hub.call(read_configuration, "user/config", home=tmp_path / "empty", HF_HUB_OFFLINE="1")
    assert kind == "HubError"
    assert message == "user/config: it is not in the cache, and HF_HUB_OFFLINE is set, so the Hub is not asked."


def push_twice(folder):
    """Client: push a folder after its base model was downloaded, and once more."""
    houlsby_peft.load(folder)
    return [_attempt(houlsby_peft.push_to_hub, folder, "user/unchanged") for _ in range(2)]


def test_a_push_records_the_revision_in_what_is_uploaded_and_not_in_the_folder(hub, base, adapter, tmp_path):
    before = (adapter / "adapter_config.json").read_bytes()
    assert json.loads(before)["revision"] is None
    outcomes = hub.call(push_twice, str(adapter), home=tmp_path / "home")
    assert [kind for kind, _ in outcomes] == ["ok", "ok"], outcomes
    assert (adapter / "adapter_config.json").read_bytes() == before
    pushed = hub.store.repos["user/unchanged"].head.files
    revision = hub.store.repos[BASE].head.oid
    assert json.loads(pushed["adapter_config.json"])["revision"] == revision
    assert f"- **revision**: `{revision}`" in pushed["README.md"].decode()
