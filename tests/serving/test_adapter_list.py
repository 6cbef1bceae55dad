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


TASKS = ("first", "second", "third")  # of the fixture `folder`


@pytest.fixture
def live(folder, tmp_path):
    """A copy of the folder, which may change."""
    return shutil.copytree(folder, tmp_path / "adapters")


@pytest.fixture(scope="module")
def others(base, tmp_path_factory):
    path = tmp_path_factory.mktemp("others")
    return [make_adapter(path / str(seed), base, str(base), seed) for seed in (7, 8)]


def scores(results):
    return {result["label"]: round(result["score"], 4) for result in results}


def alone(folder):
    return scores(houlsby_peft.load(folder).predict(WORDS[0], top_k=3)[0])


def of_bank(bank, task):
    return scores(bank.predict([(task, WORDS[0])], top_k=3)[0])


@pytest.fixture
def bank(live):
    """A bank of the adapters of the folder."""
    bank = TaskBank({})
    assert refresh(bank, live) == {}
    return bank


def refresh(bank, live):
    return bank.serve(read_adapters(live))


def test_what_has_not_changed_is_not_loaded_again(bank, live):
    assert bank.tasks == bank.held == TASKS
    loaded = bank._held._loaded
    refresh(bank, live)
    assert bank._held._loaded == loaded


def test_a_bank_follows_a_folder(bank, live, others, folder):
    # Added under a name that is not an adapter's, then renamed.
    shutil.copytree(others[0], live / ".new")
    refresh(bank, live)
    assert bank.tasks == TASKS
    (live / ".new").rename(live / "added")
    shutil.copytree(others[1], live / "second", dirs_exist_ok=True)
    shutil.rmtree(live / "third")
    refresh(bank, live)
    assert bank.tasks == ("added", "first", "second")
    assert "third" not in bank.held
    assert of_bank(bank, "added") == alone(others[0])
    assert of_bank(bank, "second") == alone(others[1])
    assert of_bank(bank, "first") == alone(folder / "first")


def test_half_of_a_copy_leaves_the_old_adapter_until_the_files_are_whole(
    bank, live, others, folder
):
    weights = live / "second" / "adapter_model.safetensors"
    whole = (others[0] / weights.name).read_bytes()
    weights.write_bytes(whole[:1000])
    shutil.copytree(live / "second", live / "new and damaged")
    assert set(refresh(bank, live)) == {"second", "new and damaged"}
    assert of_bank(bank, "second") == alone(folder / "second")
    assert "new and damaged" not in bank.tasks
    weights.write_bytes(whole)
    assert set(refresh(bank, live)) == {"new and damaged"}
    assert of_bank(bank, "second") == alone(others[0])


def test_a_recipes_run_that_is_done_once_more(bank, live, others):
    for adapter in others:
        shutil.copytree(adapter, live / "run" / "adapter", dirs_exist_ok=True)
        (live / "run" / "results.json").touch()
        assert bank.serve({**read_adapters(live), "twice": live / "run"}) == {}
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
    snapshots = tmp_path / "models--user--reviews" / "snapshots"
    commits = [snapshots / ("1" * 40), snapshots / ("2" * 40)]
    tokenizer = AutoTokenizer.from_pretrained(base)
    path = tmp_path / "tasks.json"

    def put(number):
        shutil.copytree(others[number], commits[number], dirs_exist_ok=True)
        tokenizer.save_pretrained(commits[number])

    def serve(number):
        commit = commits[number]
        on_hub = {"source": "user/reviews", "revision": commit.name}
        path.write_text(json.dumps({"one": on_hub if is_on_hub else str(commit)}))
        return list(bank.serve(read_adapters(path)))

    bank = TaskBank({}, base_model=str(base))
    put(0)
    assert serve(0) == []
    if not is_on_hub:
        put(1)
        (commits[1] / "adapter_model.safetensors").unlink()
    assert serve(1) == ["one"]
    assert of_bank(bank, "one") == alone(others[0])
    put(1)
    assert serve(1) == []
    assert of_bank(bank, "one") == alone(others[1])


def test_a_file_lists_sources_with_revisions_and_thresholds(live, tmp_path):
    path = tmp_path / "list.json"
    of_hub = {"source": "user/b", "revision": "v2", "threshold": 0.5}
    path.write_text(json.dumps({"a": "adapters/first", "b": of_hub}))
    assert read_adapters(path) == {
        "a": TaskSource(str(live / "first")),
        "b": TaskSource("user/b", "v2", 0.5),
    }
    path.write_text("1: user/x")
    assert read_adapters(path) == {"1": TaskSource("user/x")}


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "a: 3",
        "a: {revision: v1}",
        "a: {source: x, sorce: y}",
        "a: {source: x, threshold: 50}",
        "[",
        "a: !!python/object/apply:os.system [ls]",
    ],
)
def test_a_list_of_another_form_is_refused(text, tmp_path):
    path = tmp_path / "list.json"
    path.write_text(text)
    with pytest.raises(AdapterError, match=r"list\.json"):
        read_adapters(path)


def test_the_folder_of_one_adapter_and_that_of_a_run(live):
    assert read_adapters(live / "first") == {"first": TaskSource(str(live / "first"))}
    (live / "first").rename(live / "adapter")
    of_run = {live.name: TaskSource(str(live / "adapter"))}
    assert read_adapters(live / "adapter") == of_run
    (live / "results.json").touch()  # a recipe's run, whose checkpoints are no tasks
    assert read_adapters(live) == of_run
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
