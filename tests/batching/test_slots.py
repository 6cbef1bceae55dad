"""Adapters that are held for prediction alone, as numbers in tensors that all of them share."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from peft import get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel

from houlsby_peft import HoulsbyConfig
from houlsby_peft.batching.slots import Slots
from houlsby_peft.method.tuner_layer import HoulsbyTunerLayer, state_of
from tiny_models import perturb


NAMES = ("one", "two", "three", "four", "five")


def built(**options):
    """A model with all adapters as modules, and a copy without most, whose slots hold them."""
    base = BertModel(
        BertConfig(
            vocab_size=1000, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=48,
        ),
        add_pooling_layer=False,
    )  # fmt: skip
    model = get_peft_model(base, HoulsbyConfig(r=4, **options), adapter_name=NAMES[0])
    for name in NAMES[1:]:
        model.add_adapter(name, HoulsbyConfig(r=4, **options))
    for seed, name in enumerate(NAMES):
        model.set_adapter(name)
        perturb(model, seed, scale=0.4)
    model.set_adapter(NAMES[0])
    model.eval().requires_grad_(False)
    other = copy.deepcopy(model)
    modules = {}
    for layer in tuner_layers(other):
        if NAMES[0] in layer._get_available_adapters():
            modules[layer] = layer.module_of(NAMES[0])
    slots = Slots(modules)
    for name in NAMES[1:]:
        hold(other, slots, name)
        other.delete_adapter(name)
        state_of(other).records[name] = state_of(model).records[name]
    return model, other, slots


def tuner_layers(model):
    return [layer for layer in model.modules() if isinstance(layer, HoulsbyTunerLayer)]


def hold(model, slots, name):
    """Copy an adapter's own weights into a slot."""
    weights = []
    for layer in tuner_layers(model):
        if layer in slots.stacks:
            for key, weight in layer.module_of(name).named_parameters():
                weights.append((slots.stacks[layer], key, weight))
    slots.put(name, weights)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"share_layers": 3},
        {"kind": "pfeiffer"},
        {"scaling": "learned"},
        {"activation": "tanh"},
        {"scaling": "channel", "kind": "pfeiffer"},
    ],
    ids=str,
)
def test_rows_in_slots_are_those_of_modules(options, at_once, token_ids, monkeypatch):
    """With adapters in no order, one adapter alone, and one that still has modules."""
    model, held, _ = built(**options)
    if at_once:
        monkeypatch.setattr("houlsby_peft.batching.stack.is_plain_call", lambda hidden: False)
    for names in (
        ["four", "two", "four", "five", "three"],
        ["three"] * 5,
        ["two", "one", "__base__", "two", "five"],
    ):
        for row, name in enumerate(names):
            with torch.no_grad():
                mixed = held(token_ids, adapter_names=names).last_hidden_state[row]
                alone = [name] * len(token_ids)
                expected = model(token_ids, adapter_names=alone).last_hidden_state[row]
            torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)


class Counting(TorchDispatchMode):
    """Counts the operations that run."""

    def __enter__(self):
        self.calls = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_depend_on_the_number_of_adapters(token_ids, monkeypatch):
    """As on a device whose operations wait for Python."""
    monkeypatch.setattr("houlsby_peft.batching.stack.is_plain_call", lambda hidden: False)
    _, held, _ = built()
    calls = []
    for names in (["two", "three", "two", "three", "two"], ["two", "three", "four", "five", "two"]):
        with torch.no_grad():
            held(token_ids, adapter_names=names)  # which finds out where the rows are
            with Counting() as counting:
                held(token_ids, adapter_names=names)
        calls.append(counting.calls)
    assert calls[0]["baddbmm"] == 12  # two products for each of the six places
    assert calls[0] == calls[1]


def test_gradients_flow_through_rows_in_slots(token_ids):
    """Of what is read, as for the attribution of a prediction to its words."""
    model, held, _ = built(kind="pfeiffer")
    names = ["two", "three", "two", "five", "four"]
    gradients = []
    for each in (model, held):
        embeddings = each.get_input_embeddings()(token_ids).detach().requires_grad_()
        each(inputs_embeds=embeddings, adapter_names=names).last_hidden_state.pow(
            2
        ).sum().backward()
        gradients.append(embeddings.grad)
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_the_slots_of_adapters_that_go_serve_others_and_memory_goes_back(token_ids):
    model, held, slots = built()

    def check(*names):
        rows = [names[row % len(names)] for row in range(5)]
        with torch.no_grad():
            found = held(token_ids, adapter_names=rows).last_hidden_state
            expected = model(token_ids, adapter_names=rows).last_hidden_state
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    def room():
        [stack, *_] = slots.stacks.values()
        return {len(weights) for weights in stack.weights.values()}

    assert room() == {4}
    slots.drop("two")
    check("three", "four", "five")
    hold(model_with_layers_of(model, held), slots, "two")
    assert room() == {4}
    check("two", "five")
    for name in ("two", "three", "four"):
        slots.drop(name)
    check("five")
    assert room() == {1}
    slots.drop("five")
    assert room() == {0}


def model_with_layers_of(model, held):
    """The layers with slots, each with the weights of the model's modules."""
    for layer, own in zip(tuner_layers(held), tuner_layers(model), strict=True):
        for attribute in layer.adapter_layer_names:
            getattr(layer, attribute).update(getattr(own, attribute))
    return held
