"""With `compile=True`, one graph serves the batches of all tasks, with the same results.

On a CPU, a graph is the computation itself on the graph's own inputs.
"""

from __future__ import annotations

import copy
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import get_peft_model

from answers import near
from architecture_cases import CASES
from houlsby_peft import HoulsbyConfig, TaskBank, ablate, load
from houlsby_peft.batching.slots import Slots
from houlsby_peft.method.tuner_layer import HoulsbyTunerLayer
from houlsby_peft.predict import graphs
from hub_models import WORDS, save_adapter
from tiny_models import perturb


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture
def captured(monkeypatch):
    """The devices of the graphs that are captured."""
    devices = []
    capture = graphs._repeatable

    def counted(compute, device):
        devices.append(device)
        return capture(compute, device)

    monkeypatch.setattr(graphs, "_repeatable", counted)
    return devices


@pytest.fixture
def frozen(monkeypatch):
    """A graph runs twice when it is captured, and never Python's code again, as on a GPU."""

    def capture(compute, device):
        compute()
        output = compute()
        return lambda: output

    monkeypatch.setattr(graphs, "_repeatable", capture)


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    """Adapters that differ in their weights and in the number of classes."""
    path = tmp_path_factory.mktemp("adapters")
    for seed, classes in enumerate([2, 2, 3, 5, 2]):
        head = {"id2label": dict(enumerate("abcde"[:classes]))}
        save_adapter(path / f"task {seed}", base, head=head, seed=seed)
    return {folder.name: folder for folder in sorted(path.iterdir())}


@pytest.mark.parametrize("device", DEVICES)
def test_one_graph_serves_the_batches_of_all_tasks(folders, captured, device):
    tasks = list(folders)
    plain, bank = (TaskBank(folders, device=device, compile=flag) for flag in (False, True))
    bank.warm_up()
    captured.clear()
    for first in range(5):
        requests = [(tasks[(first + row) % 5], WORDS[row]) for row in range(4)]
        assert bank.predict(requests) == near(plain.predict(requests))
    requests = [(tasks[3], text) for text in WORDS[:4]]
    assert bank.predict(requests) == near(plain.predict(requests))
    assert len(captured) == 1


def test_a_graph_is_captured_for_each_size(folders, captured):
    bank, numbers = TaskBank(folders, compile=True), []
    for rows in (1, 2, 3, 4, 5, 8, 9):
        bank.predict([("task 0", text) for text in WORDS[:rows]])
        numbers.append(len(captured))
    # Three rows are filled up to four, five to eight, and nine to sixteen.
    assert numbers == [1, 2, 3, 3, 4, 4, 5]


def test_graphs_follow_weights_that_move(folders, captured):
    """The room of the slots has doubled, or the adapter has another address."""
    tasks = list(folders)
    bank = TaskBank({task: folders[task] for task in tasks[:2]}, compile=True)
    request = [(tasks[0], WORDS[0])]
    expected = bank.predict(request)
    for task in tasks[2:]:
        bank.add(task, folders[task])
    assert bank.predict(request) == expected
    assert len(captured) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_predictor_with_graphs(folders, captured, device):
    plain, predictor = (
        load(folders["task 3"], device=device, compile=flag) for flag in (False, True)
    )
    for texts in (WORDS, WORDS[::-1]):
        assert predictor.predict(texts) == near(plain.predict(texts))
    assert len(captured) == 1
    for weight in predictor.model.parameters():
        weight.data = weight.data.clone()
    assert predictor.predict(WORDS) == near(plain.predict(WORDS))
    assert len(captured) == 2


def test_what_cannot_be_captured_runs_as_it_is(folders, captured, tmp_path_factory, base):
    """Several tasks of a text, and adapters of other sizes."""
    folder = tmp_path_factory.mktemp("small")
    save_adapter(folder, base, r=2)
    plain, bank = (TaskBank(folders | {"small": folder}, compile=flag) for flag in (False, True))
    bank.warm_up()
    captured.clear()
    answers = bank.ask(WORDS[0])
    assert list(answers.values()) == near([*plain.ask(WORDS[0]).values()])
    requests = [("small", WORDS[0]), ("task 1", WORDS[1])]
    assert bank.predict(requests) == near(plain.predict(requests))
    assert not captured


def test_what_a_graph_would_leave_out(folders, frozen):
    """Disabled adapters, what transformers collects by hooks, and autocast."""
    plain, predictor = (load(folders["task 3"], compile=flag) for flag in (False, True))
    inputs = predictor.tokenizer(WORDS[:2], padding=True, return_tensors="pt")

    def same(**options):
        outputs = []
        for predicts in (plain, predictor):
            tuner, names = predicts.model.base_model, [predicts.name] * 2
            with (
                torch.inference_mode(),
                tuner._enable_peft_forward_hooks(**inputs, adapter_names=names),
            ):
                outputs.append(predicts.base_model.bert(**inputs, **options))
        expected, computed = outputs
        assert len(computed.hidden_states or ()) == len(expected.hidden_states or ())
        return torch.equal(computed.last_hidden_state, expected.last_hidden_state)

    assert same()
    with ablate(plain.model, [0]), ablate(predictor.model, [0]):
        assert same()
    with plain.model.disable_adapter(), predictor.model.disable_adapter():
        assert same()
    with torch.autocast("cpu", torch.bfloat16):
        assert same()
    assert same(output_hidden_states=True)
    assert same(output_hidden_states=True)


def test_a_later_adapter_reads_more_than_the_first_one(folders, frozen, tmp_path, base):
    """The residual input of a sub-layer, of which the first adapter has the end alone."""
    narrow = {"layers_to_transform": [1], "positions": ["feed_forward"], "train_layer_norm": False}
    save_adapter(tmp_path / "narrow", base, **narrow)
    save_adapter(tmp_path / "pfeiffer", base, kind="pfeiffer")
    plain, bank = (TaskBank(tmp_path, compile=flag) for flag in (False, True))
    for task in ("narrow", "pfeiffer"):
        requests = [(task, text) for text in WORDS[:2]]
        assert bank.predict(requests) == near(plain.predict(requests))


def model_of(case):
    """A model of an architecture with the adapter "a", and "b" in a slot."""
    model = get_peft_model(CASES[case].model(), HoulsbyConfig(r=4), adapter_name="a")
    perturb(model)
    model.eval()
    modules = {}
    for layer in model.modules():
        if isinstance(layer, HoulsbyTunerLayer):
            modules[layer] = layer.module_of("a")
    slots, weights = Slots(modules), []
    for layer, module in modules.items():
        for name, weight in module.named_parameters():
            weights.append((slots.stacks[layer], name, weight * 2))
    slots.put("b", weights)
    layer.state.records["b"] = layer.state.records["a"]
    return model


@torch.inference_mode()
def test_rows_of_one_task_may_be_anywhere(frozen):
    """OPT has the tokens of all rows in one dimension."""
    model, inputs = model_of("opt"), CASES["opt"].batch(4)
    expected = model(**inputs, adapter_names=["b"] * 4)[0]
    graphs.use_graphs(model)
    for _ in range(2):
        torch.testing.assert_close(model(**inputs, adapter_names=["b"] * 4)[0], expected)


@torch.inference_mode()
def test_a_cache_is_not_the_next_one(frozen):
    model, inputs = model_of("gpt2"), CASES["gpt2"].batch(2)
    graphs.use_graphs(model)
    lengths = []
    for _ in range(2):
        past = model(**inputs, adapter_names=["b"] * 2).past_key_values
        lengths.append(past.get_seq_length())
        model(inputs["input_ids"][:, :1], past_key_values=past, adapter_names=["b"] * 2)
    assert lengths[0] == lengths[1]


def test_a_copy_of_a_model_captures_its_own(folders):
    predictor = load(folders["task 3"], compile=True)
    expected = predictor.predict(WORDS)
    predictor.model = copy.deepcopy(predictor.model)
    assert predictor.predict(WORDS) == expected


def test_graphs_of_two_models_take_turns(folders, monkeypatch):
    """They share their memory."""
    running, most = [], []

    def capture(compute, device):
        def replay():
            running.append(True)
            most.append(len(running))
            time.sleep(0.05)
            running.pop()
            return compute()

        return replay

    monkeypatch.setattr(graphs, "_repeatable", capture)
    predictors = [load(folders[task], compile=True) for task in ("task 0", "task 1")]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda predictor: predictor.predict(WORDS), predictors))
    assert most == [1, 1]


def test_layers_that_cannot_be_captured_run_as_they_are(folders, monkeypatch):
    """Such as those of a model that waits for the GPU."""

    def fail(compute, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    plain, predictor = (load(folders["task 3"], compile=flag) for flag in (False, True))
    monkeypatch.setattr(graphs, "_repeatable", fail)
    with pytest.warns(UserWarning, match="not permitted"):
        predictor.predict(WORDS)
    assert predictor.predict(WORDS) == near(plain.predict(WORDS))
