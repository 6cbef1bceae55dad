"""With `compile=True`, one graph serves the batches of all tasks, with the same results.

On a CPU, a graph is the computation itself on the graph's own inputs.
"""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForSequenceClassification

from houlsby_peft import HoulsbyConfig, TaskBank, load
from houlsby_peft.serving import graphs
from hub_models import WORDS
from tiny_models import perturb


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture
def recorded(monkeypatch):
    """The devices of the graphs that are recorded."""
    devices = []
    record = graphs._record

    def counted(compute, device):
        devices.append(device)
        return record(compute, device)

    monkeypatch.setattr(graphs, "_record", counted)
    return devices


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    """Adapters that differ in their weights and in the number of classes."""
    folders = {}
    for seed, classes in enumerate([2, 2, 3, 5, 2]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=classes)
        labels = dict(enumerate("abcde"[:classes]))
        model = get_peft_model(model, HoulsbyConfig(task_type="SEQ_CLS", r=4, id2label=labels))
        perturb(model, seed)
        folders[f"task {seed}"] = tmp_path_factory.mktemp("adapters") / str(seed)
        model.save_pretrained(folders[f"task {seed}"])
    return folders


def near(results):
    return [(result["label"], pytest.approx(result["score"], abs=1e-4)) for result in results]


def seen(results):
    return [(result["label"], result["score"]) for result in results]


@pytest.mark.parametrize("device", DEVICES)
def test_one_graph_serves_the_batches_of_all_tasks(folders, recorded, device):
    tasks = list(folders)
    plain, bank = (TaskBank(folders, device=device, compile=flag) for flag in (False, True))
    bank.warm_up()
    recorded.clear()
    for first in range(5):
        requests = [(tasks[(first + row) % 5], WORDS[row]) for row in range(4)]
        assert seen(bank.predict(requests)) == near(plain.predict(requests))
    assert len(recorded) == 1


def test_a_graph_is_recorded_for_each_size(folders, recorded):
    bank, numbers = TaskBank(folders, compile=True), []
    for rows in (1, 2, 3, 4, 5, 8, 9):
        bank.predict([("task 0", text) for text in WORDS[:rows]])
        numbers.append(len(recorded))
    # Three rows are filled up to four, five to eight, and nine to sixteen.
    assert numbers == [1, 2, 3, 3, 4, 4, 5]


def test_graphs_follow_weights_that_move(folders, recorded):
    """The room of the slots has doubled, or the adapter has another address."""
    tasks = list(folders)
    bank = TaskBank({task: folders[task] for task in tasks[:2]}, compile=True)
    request = [(tasks[0], WORDS[0])]
    before = bank.predict(request)
    for task in tasks[2:]:
        bank.add(task, folders[task])
    assert bank.predict(request) == before
    assert len(recorded) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_predictor_with_graphs(folders, recorded, device):
    plain, predictor = (
        load(folders["task 3"], device=device, compile=flag) for flag in (False, True)
    )
    for texts in (WORDS, WORDS[::-1]):
        assert seen(predictor.predict(texts)) == near(plain.predict(texts))
    assert len(recorded) == 1
    for weight in predictor.model.parameters():
        weight.data = weight.data.clone()
    assert seen(predictor.predict(WORDS)) == near(plain.predict(WORDS))
    assert len(recorded) == 2


def test_what_cannot_be_recorded_runs_as_it_is(folders, recorded, tmp_path_factory, base):
    """Several tasks of a text, and adapters of other sizes."""
    model = AutoModelForSequenceClassification.from_pretrained(base)
    model = get_peft_model(model, HoulsbyConfig(task_type="SEQ_CLS", r=2))
    folder = tmp_path_factory.mktemp("wide")
    model.save_pretrained(folder)
    plain, bank = (TaskBank(folders | {"other": folder}, compile=flag) for flag in (False, True))
    bank.warm_up()
    recorded.clear()
    answers = bank.ask(WORDS[0])
    assert seen(answers.values()) == near(plain.ask(WORDS[0]).values())
    requests = [("other", WORDS[0]), ("task 1", WORDS[1])]
    assert seen(bank.predict(requests)) == near(plain.predict(requests))
    assert not recorded
