"""A bank that follows a folder or a list of adapters, as that of the service does."""

from __future__ import annotations

import json
import shutil

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

import houlsby_peft
from houlsby_peft import AdapterError, TaskBank, TaskSource
from houlsby_peft.predict.adapter_list import read_adapters
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


def test_a_list_that_would_fill_the_memory_is_refused(tmp_path):
    lines = ["a0: &a0 {x: y}"]
    for number in range(1, 30):
        lines.append(f"a{number}: &a{number} {{<<: [*a{number - 1}, *a{number - 1}]}}")
    path = tmp_path / "tasks.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(AdapterError, match="aliases"):
        read_adapters(path)
