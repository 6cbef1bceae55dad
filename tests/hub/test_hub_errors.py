"""Failed pushes and loads: each gives one clear line, leaves no partial upload and can be tried
again.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from unittest import mock

import huggingface_hub.utils._http
import pytest
from huggingface_hub import snapshot_download
from peft import get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import houlsby_peft
from edited_json import edited_json
from houlsby_peft import HoulsbyConfig, HubError
from hub_models import BASE, make_adapter, make_base
from local_hub import Fault


# The client waits between its own attempts, up to 23 seconds.
NO_WAITING = mock.patch.object(huggingface_hub.utils._http.time, "sleep", return_value=None)


def _attempt(function, *arguments, **options):
    """Return the result, or the error's class and message."""
    try:
        return ["ok", str(function(*arguments, **options))]
    except (ValueError, HubError) as error:
        return [type(error).__name__, str(error)]


def push_and_load_wrongly(folder, other_base):
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
        "license that the Hub does not know": _attempt(
            push, folder, "user/license", token="hf_write", metadata={"license": "wtf"}
        ),
        "no repository": _attempt(load, "user/nothing"),
        "private": _attempt(load, "other/private", token="hf_write"),
        "private, without token": _attempt(load, "other/private"),
        "forbidden": _attempt(load, "user/forbidden", token="hf_write"),
        "no revision": _attempt(load, "user/public", revision="v9"),
        "no folder": _attempt(load, "./nothing"),
        "file": _attempt(load, f"{folder}/adapter_config.json"),
        "other base": _attempt(load, "user/public", base_model=other_base),
        "no base on the Hub": _attempt(load, "user/baseless"),
        "base from another repository": _attempt(load, "user/recorded", base_model="org/mirror"),
        "right after all that": _attempt(load, "user/public"),
    }


# The class of each error, what it is about, and a word of the rule or of the client's reason.
EXPECTED = {
    "no token": "HubError: user/a: .*token",
    "wrong token": "HubError: user/a: .*token",
    "token that may only read": "HubError: user/a: .*read-only",
    "no right to create": "HubError: other/new: .*403",
    "no right to write": "HubError: other/theirs: .*403",
    "impossible name": "HubError: user/a b: .*Repo id",
    "reserved name": "HubError: user/admin: .*reserved",
    "private to public": "HubError: user/public .*public",
    "whole model": "HubError: org/tiny-bert .*whole model",
    "local base": "AdapterError: base_model",
    "license that the Hub does not know": "ValueError: .*license",
    "no repository": "HubError: user/nothing .*Not Found",
    "private": "HubError: other/private .*Not Found",
    "private, without token": "HubError: other/private .*Not Found",
    "forbidden": "HubError: user/forbidden .*403",
    "no revision": "HubError: user/public .*Revision",
    "no folder": "HubError: ./nothing .*Repo id",
    "file": "HubError: .* is a file",
    "other base": "AdapterError: .*org/tiny-bert",
    "no base on the Hub": "HubError: .*org/no-such-model: .*Not Found",
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


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of a client that most tests share."""
    return tmp_path_factory.mktemp("home")


def test_each_mistake_gives_one_clear_line(hub, base, adapter, tmp_path):
    hub.add("user/public", adapter)
    hub.add("other/theirs", adapter)
    hub.add("other/private", adapter, private=True)
    hub.add("user/baseless", make_adapter(tmp_path / "baseless", base, "org/no-such-model"))
    recorded = make_adapter(tmp_path / "recorded", base)
    with edited_json(recorded / "adapter_config.json") as config:
        config["revision"] = "0" * 40
    hub.add("user/recorded", recorded)
    hub.add("org/mirror", base)
    other_base = make_base(tmp_path / "other", seed=9)
    hub.faults.append(Fault("GET", "user/forbidden", 403, times=9))
    folders = [str(adapter), str(other_base)]
    outcomes = hub.call(push_and_load_wrongly, *folders, home=tmp_path / "home", token=None)
    hub.faults.clear()
    assert outcomes.keys() == EXPECTED.keys()
    for case, (kind, message) in outcomes.items():
        assert re.fullmatch(f"{EXPECTED[case]}[^\n]*", f"{kind}: {message}"), message
    # A refusal leaves no empty repository.
    assert not {"user/a", "user/license"} & set(hub.store.repos)
    assert len(hub.store.repos["other/theirs"].commits) == 1
    assert {path.name for path in adapter.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


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
    """Client: try up to three times to push each folder to its repository; return the outcomes."""
    outcomes = []
    with NO_WAITING:
        for number, folder in enumerate(folders):
            attempts = []
            while len(attempts) < 3 and (not attempts or attempts[-1][0] != "ok"):
                attempts.append(_attempt(houlsby_peft.push_to_hub, folder, f"user/fault-{number}"))
            outcomes.append(attempts)
    return outcomes


def test_a_broken_upload_leaves_no_half_commit_and_a_retry_succeeds(hub, base, home, tmp_path):
    folders = [make_adapter(tmp_path / str(n), base, seed=n) for n in range(len(FAULTS))]
    for number, fault in enumerate(FAULTS.values()):
        hub.faults.append(replace(fault, path=fault.path.format(repo=f"user/fault-{number}")))
    outcomes = hub.call(push_again_and_again, [str(folder) for folder in folders], home=home)
    for number, (case, attempts) in enumerate(zip(FAULTS, outcomes, strict=True)):
        repo = hub.store.repos[f"user/fault-{number}"]
        assert attempts[-1][0] == "ok", (case, attempts)
        assert (len(attempts) == 1) == (case in REPAIRED), (case, attempts)
        for kind, message in attempts[:-1]:
            assert kind == "HubError", (case, message)
        messages = [commit.message for commit in repo.commits if commit.message != "someone else's"]
        assert messages == ["initial commit", "Upload Houlsby adapter"], case
        weights = folders[number] / "adapter_model.safetensors"
        assert repo.head.files[weights.name] == weights.read_bytes()


def push_model_without_a_right(base):
    """Client: push a model to a repository of others; return the error, and the predictions of the
    folder it names.
    """
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=3)
    model = get_peft_model(model, HoulsbyConfig(r=4))
    kind, message = _attempt(houlsby_peft.push_to_hub, model, "other/new", tokenizer=tokenizer)
    folder = re.search(r"The adapter is saved in (\S+);", message)[1]
    return [kind, message, houlsby_peft.load(folder).predict("a")]


def test_a_model_whose_push_fails_is_saved(hub, base, home):
    kind, message, predicted = hub.call(push_model_without_a_right, str(base), home=home)
    assert kind == "HubError"
    assert re.match("other/new: .*403.*rights", message)
    assert len(predicted) == 1


def push_links(cached, linked):
    """Client: push a snapshot in the Hub's cache, and a folder of links."""
    snapshot = _attempt(houlsby_peft.push_to_hub, snapshot_download(cached), "user/again")
    return [snapshot, _attempt(houlsby_peft.push_to_hub, linked, "user/dvc")]


def test_links_to_files_are_followed_in_the_folder_that_the_user_names(
    hub, base, adapter, home, tmp_path
):
    hub.add("user/first", adapter)
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in adapter.iterdir():
        (linked / path.name).symlink_to(path)
    outcomes = hub.call(push_links, "user/first", str(linked), home=home)
    assert [kind for kind, _ in outcomes] == ["ok", "ok"], outcomes
    weights = adapter / "adapter_model.safetensors"
    for name in ("user/again", "user/dvc"):
        assert hub.store.repos[name].head.files[weights.name] == weights.read_bytes()


def read_configuration(name):
    return _attempt(HoulsbyConfig.from_pretrained, name)


def test_a_configuration_is_read_without_its_weights_and_without_a_network(hub, adapter, home):
    hub.add("user/config", adapter)
    hub.requests.clear()
    kind, settings = hub.call(read_configuration, "user/config", home=home)
    assert kind == "ok", settings
    assert not [request for request in hub.requests if "safetensors" in request]
    closed = hub.call(
        read_configuration, "user/config", home=home, HF_ENDPOINT="http://127.0.0.1:9"
    )
    assert closed == ["ok", settings]


def push_with_a_cached_base(folder, older):
    """Client: push with one commit of the base model in the cache, then with an older one beside
    it.
    """
    houlsby_peft.load(folder)
    only = _attempt(houlsby_peft.push_to_hub, folder, "user/only")
    base = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=3, revision=older)
    get_peft_model(base, HoulsbyConfig(r=4), revision=older).save_pretrained("given")
    with_revision = _attempt(houlsby_peft.push_to_hub, "given", "user/given")
    return [only, _attempt(houlsby_peft.push_to_hub, folder, "user/unknown"), with_revision]


def test_a_push_records_the_commit_of_the_base_model_only_if_it_is_known(
    hub, base, adapter, tmp_path
):
    older = hub.store.repos[BASE].head.oid
    newest = hub.store.repos[BASE].commit("newer", {"notes.md": b"A note."}).oid
    config = (adapter / "adapter_config.json").read_bytes()
    outcomes = hub.call(push_with_a_cached_base, str(adapter), older, home=tmp_path / "home")
    assert [kind for kind, _ in outcomes] == ["ok"] * 3, outcomes
    assert (adapter / "adapter_config.json").read_bytes() == config
    for name, commit in (("only", newest), ("unknown", None), ("given", older)):
        pushed = hub.store.repos[f"user/{name}"].head.files
        assert json.loads(pushed["adapter_config.json"])["revision"] == commit
        is_on_page = f"- **revision**: `{commit}`" in pushed["README.md"].decode()
        assert is_on_page == (commit is not None)
