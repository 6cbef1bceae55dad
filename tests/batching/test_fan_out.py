"""One text, many tasks: what the model gives for several adapters of a text, and what runs once for
them.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from peft import get_peft_model
from peft.utils.error import NoMatchingPeftModuleError
from torch import nn

from architecture_cases import CASES
from contract_models import IDS, gpt2
from houlsby_peft import AdapterError, HoulsbyConfig
from houlsby_peft.placement.table import ARCHITECTURES
from tiny_models import perturb, tiny_bert


BASE = "__base__"
NAMES = [["one", BASE, "two"], ["two"], [], ["two", "one", "one"]]
# A case of each distinct layer with more than one layer in a list.
LAYERS = {ARCHITECTURES[name.partition(":")[0]]: name for name in reversed(CASES)}.values()
# Bloom's layers read a bias with several rows for each text; the other adapts the parts of one
# layer by their names.
ALL_ROWS = ("bloom", "timesformer:places")


def adapted(base, first=None, layers=(1,), **second):
    """A model with the adapters "one" and "two", which are far from the identity."""
    layers = {"layers_to_transform": [*layers]}
    model = get_peft_model(base, HoulsbyConfig(r=4, **layers, **(first or {})), "one")
    model.add_adapter("two", HoulsbyConfig(**{"r": 2, **layers, **second}))
    for seed, name in enumerate(("one", "two")):
        model.set_adapter(name)
        perturb(model, seed=seed, scale=0.3)
    return model.eval()


def tensors(result):
    return {name: value for name, value in result.items() if torch.is_tensor(value) and value.dim()}


@contextmanager
def counted_rows(model):
    """Within this context, the number of rows of each layer in a list is counted."""
    sizes = {}

    def count(name, _, args, kwargs, output):
        first, *_ = filter(torch.is_tensor, (*args, *kwargs.values()))
        sizes[name] = len(first)

    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    handles = []
    for name, layer in model.named_modules():
        if name.rpartition(".")[0] in lists:
            # After the forward pass, as rows may be widened before it.
            hook = partial(count, name)
            handles.append(layer.register_forward_hook(hook, with_kwargs=True))
    yield sizes
    for handle in handles:
        handle.remove()


@torch.no_grad()
def check(model, batch, names=NAMES):
    """Compare with the batch of repeated rows; return the number of rows of each layer, and whether
    all bits agree.
    """
    rows, flat = [], []
    for row, names_of_row in enumerate(names):
        rows += [row] * len(names_of_row)
        flat += names_of_row
    repeated = {name: value[rows] for name, value in batch.items()}
    expected = tensors(model(**repeated, adapter_names=flat))
    with counted_rows(model) as sizes:
        computed = tensors(model(**batch, adapter_names=names))
    assert computed.keys() == expected.keys()
    is_equal = True
    for name, value in expected.items():
        # A matrix product may round otherwise for another number of rows.
        atol = 1e-6 * float(value.abs().max())
        torch.testing.assert_close(computed[name], value, rtol=1e-6, atol=atol)
        is_equal &= torch.equal(computed[name], value)
    return sizes, is_equal


@pytest.mark.filterwarnings("ignore")
def test_it_equals_the_repeated_batch_for_every_layer():
    equal = []
    for name in LAYERS:
        case = CASES[name]
        try:
            model = adapted(case.model())
        except NoMatchingPeftModuleError:  # a single layer, or layers without a number
            continue
        try:
            sizes, is_equal = check(model, case.batch(rows=len(NAMES)))
        except AdapterError:
            continue
        # Three of the four texts have adapters, and seven pairs.
        assert (3 in sizes.values()) is (name not in ALL_ROWS), (name, sizes)
        if is_equal:
            equal.append(name)
    assert len(equal) >= 12, equal


def test_layers_below_the_lowest_adapter_of_the_batch_run_once_for_a_text_and_others_for_each_pair(
    token_ids,
):
    batch, layer = {"input_ids": token_ids[:4]}, "base_model.model.bert.encoder.layer"
    sizes, _ = check(adapted(tiny_bert(), layers=(3,)), batch)
    assert [sizes[f"{layer}.{number}"] for number in range(4)] == [3, 3, 3, 7]
    sizes, _ = check(adapted(tiny_bert(), {"train_layer_norm": "all"}, layers=(3,)), batch)
    assert set(sizes.values()) == {7}, "the norm of the embeddings differs"


def test_the_lowest_adapter_is_that_of_the_batch(token_ids):
    model = adapted(tiny_bert(), layers=(3,), layers_to_transform=[1])
    batch, layer = {"input_ids": token_ids[:2]}, "base_model.model.bert.encoder.layer.1"
    assert check(model, batch, [["one", BASE], ["one"]])[0][layer] == 2
    assert check(model, batch, [["one", "two"], ["one"]])[0][layer] == 3


@pytest.mark.parametrize("length", [1, 3, 5, 7])
def test_texts_as_long_as_there_are_texts_or_pairs(length, token_ids):
    ids = token_ids[:, :1].repeat(1, length)[:4]
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(length).expand(4, -1),
    }
    check(adapted(tiny_bert(), layers=(2, 3)), batch)


def test_heads_of_unlike_widths_and_what_is_recorded_of_all_layers(token_ids):
    model = tiny_bert(num_labels=2)
    model = adapted(model, layers=(3,))
    head = model.base_model.model.classifier.modules_to_save["two"]
    model.base_model.model.classifier.modules_to_save["two"] = nn.Linear(head.in_features, 5)
    pairs = [["one", "two"], ["two"], ["one"]]
    logits = model(token_ids[:3], adapter_names=pairs).logits
    flat = model(token_ids[[0, 0, 1, 2]], adapter_names=["one", "two", "two", "one"]).logits
    assert torch.equal(logits, flat)
    assert logits.shape == (4, 5)
    hidden = model(token_ids[:3], adapter_names=pairs, output_hidden_states=True).hidden_states
    assert {len(states) for states in hidden} == {4}


@pytest.mark.parametrize("options", [{}, {"task_type": "CAUSAL_LM"}], ids=str)
def test_prompts_of_a_decoder_and_not_its_generation(options):
    """Names may be in tuples, also in PEFT's own class of decoders."""
    model = adapted(gpt2(), options, layers=(3,), **options)
    sizes, _ = check(model, {"input_ids": IDS[:4]}, [tuple(names) for names in NAMES])
    assert sizes["base_model.model.transformer.h.0"] == 3
    names = [("one", "two"), ("one",)]
    with pytest.raises(ValueError, match="generation"):
        model.generate(input_ids=IDS[:2], adapter_names=names, max_new_tokens=2)


def test_what_does_not_fit_the_batch(token_ids):
    model = adapted(tiny_bert(), layers=(3,))
    with pytest.raises(ValueError, match="2 and 5"):
        model(token_ids, adapter_names=[["one"], ["two"]])
    with pytest.raises(ValueError, match="three"):
        model(token_ids[:2], adapter_names=[["one"], ["three"]])
