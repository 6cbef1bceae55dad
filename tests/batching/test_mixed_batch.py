"""Rows of different adapters in one batch: generation, refusals, heads, and that nothing loops over adapters."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import Counter
from contextlib import nullcontext
from threading import get_ident

import pytest
import torch
from peft import get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, OPTConfig, OPTForCausalLM

from contract_models import IDS, VOCABULARY, gpt2, llama, t5
from houlsby_peft import AdapterError, Bottleneck, HoulsbyConfig, HoulsbyLayer
from houlsby_peft.batching import MixedBatch, fix_weights, forget_batches
from tiny_models import perturb, tiny_bert


BASE = "__base__"


def add(model, name, config, seed):
    """Add an adapter with weights that are far from the identity."""
    if hasattr(model, "add_adapter") and hasattr(model, "peft_type"):
        model.add_adapter(name, config)
    else:
        model = get_peft_model(model, config, adapter_name=name)
    model.set_adapter(name)
    perturb(model, seed=seed, scale=0.4)
    return model.eval()


def opt():
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY, hidden_size=16, word_embed_proj_dim=16, ffn_dim=24, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def seeded(build):
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = build().eval()
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return model


SEARCHES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "several of each": {"num_beams": 4, "num_return_sequences": 2},
    "by generation config": {"generation_config": GenerationConfig(num_beams=2)},
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("build", [gpt2, llama, t5, opt], ids=lambda build: build.__name__)
def test_generation_for_rows_of_different_adapters(build, search):
    task = "SEQ_2_SEQ_LM" if build is t5 else "CAUSAL_LM"
    model = add(seeded(build), "one", HoulsbyConfig(task_type=task, r=4), seed=1)
    model = add(model, "two", HoulsbyConfig(task_type=task, r=2, share_layers=1, train_layer_norm=False), seed=2)
    options = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0, **SEARCHES[search]}
    names = ["one", BASE, "two", "one"]
    mixed = model.generate(input_ids=IDS[:4], adapter_names=names, **options)
    of_each = len(mixed) // 4
    alone = []
    for i, name in enumerate(names):
        if name == BASE:
            with model.disable_adapter():
                alone.append(model.generate(input_ids=IDS[i : i + 1], **options))
        else:
            model.set_adapter(name)
            alone.append(model.generate(input_ids=IDS[i : i + 1], **options))
    assert of_each == SEARCHES[search].get("num_return_sequences", 1)
    assert torch.equal(mixed, torch.cat(alone))
    with model.disable_adapter():
        assert not torch.equal(mixed, model.generate(input_ids=IDS[:4], **options))


class Counting(TorchDispatchMode):
    """Counts the operations that run."""

    def __enter__(self):
        self.calls = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_depend_on_the_number_of_adapters(token_ids):
    calls = {}
    for adapters in (2, 5):
        model = add(tiny_bert(), "task_0", HoulsbyConfig(r=4, modules_to_save=[]), seed=0)
        for i in range(1, adapters):
            model = add(model, f"task_{i}", HoulsbyConfig(r=4, modules_to_save=[]), seed=i)
        names = [f"task_{i % adapters}" for i in range(5)]
        with torch.no_grad():
            model(token_ids, adapter_names=names)
            with Counting() as counting:
                model(token_ids, adapter_names=names)
        calls[adapters] = counting.calls
        # Two products for each of the 8 places, and nothing stacked again.
        assert calls[adapters]["baddbmm"] == 16
        assert calls[adapters]["stack"] == calls[adapters]["cat"] == 0
    shared = {name: number for name, number in calls[5].items() if name not in ("index_select", "index_copy")}
    assert shared == {name: calls[2][name] for name in shared}


def test_places_that_share_a_bottleneck_share_its_stack_which_is_forgotten_in_training(token_ids):
    model = add(tiny_bert(), "task_0", HoulsbyConfig(r=4, share_layers=2, train_layer_norm=False), seed=0)
    model = add(model, "task_1", HoulsbyConfig(r=4, share_layers=2, train_layer_norm=False), seed=1)
    names = ["task_0", "task_1", "task_0", "task_1", "task_1"]
    with torch.no_grad(), Counting() as counting:
        model(token_ids, adapter_names=names)
    # 2 owners with two weights and two biases each, and not 8 places.
    assert counting.calls["stack"] == 2 * 4
    model.train()
    model(token_ids)
    for parameter in model.parameters():
        parameter.data.mul_(0.9)  # leaves no trace that autograd could count
    model.eval().set_adapter("task_1")
    with torch.no_grad():
        expected = model(token_ids).logits
        mixed = model(token_ids, adapter_names=names).logits
    torch.testing.assert_close(mixed[[1, 3, 4]], expected[[1, 3, 4]], atol=1e-5, rtol=1e-5)


def write_in_place(module):
    module.weight.mul_(1.5)


def give_other_storage(module):
    module.weight.data = 1.5 * module.weight.data


def replace_the_parameter(module):
    module.weight = torch.nn.Parameter(1.5 * module.weight)


@pytest.mark.parametrize("change", [write_in_place, give_other_storage, replace_the_parameter])
def test_a_weight_that_changes_in_evaluation_is_stacked_again(token_ids, change):
    model = add(tiny_bert(), "one", HoulsbyConfig(r=4), seed=1)
    model = add(model, "two", HoulsbyConfig(r=4), seed=2).eval()
    names = ["one", "two", "one", "two", "two"]
    with torch.no_grad():
        before = model(token_ids, adapter_names=names).logits
        for name, module in model.named_modules():
            if name.endswith("two.down_proj"):
                change(module)
        expected = model(token_ids).logits  # of "two", which is active
        mixed = model(token_ids, adapter_names=names).logits
    torch.testing.assert_close(mixed[[1, 3, 4]], expected[[1, 3, 4]], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixed[[0, 2]], before[[0, 2]], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(mixed[[1, 3, 4]], before[[1, 3, 4]], atol=1e-5, rtol=1e-5)


def test_weights_that_stay_the_same_by_their_owners_word_are_not_checked(token_ids):
    model = add(tiny_bert(), "one", HoulsbyConfig(r=4), seed=1)
    model = add(model, "two", HoulsbyConfig(r=4), seed=2).eval()
    fix_weights(model.get_base_model())
    names = ["one", "two", "one", "two", "two"]
    with torch.no_grad():
        before = model(token_ids, adapter_names=names).logits
        for name, module in model.named_modules():
            if name.endswith("two.down_proj"):
                write_in_place(module)
        assert torch.equal(model(token_ids, adapter_names=names).logits, before)
        forget_batches(model.get_base_model())
        after = model(token_ids, adapter_names=names).logits
        expected = model(token_ids).logits
    torch.testing.assert_close(after[[1, 3, 4]], expected[[1, 3, 4]], atol=1e-5, rtol=1e-5)


def test_adapters_at_places_that_the_last_batch_did_not_have(token_ids):
    model = add(tiny_bert(), "one", HoulsbyConfig(r=4, layers_to_transform=[1]), seed=1)
    model(token_ids, adapter_names=["one", BASE] * 2 + ["one"])
    model = add(model, "two", HoulsbyConfig(r=4, layers_to_transform=[3], train_layer_norm="all"), seed=2)
    expected = model(token_ids).logits
    mixed = model(token_ids, adapter_names=["two", BASE, "one", "two", "two"]).logits
    torch.testing.assert_close(mixed[[0, 3, 4]], expected[[0, 3, 4]], atol=1e-5, rtol=1e-5)


def test_an_activation_with_weights_of_its_own(token_ids):
    model = add(tiny_bert(), "one", HoulsbyConfig(r=4, activation="prelu"), seed=1)
    model = add(model, "two", HoulsbyConfig(r=4, activation="prelu"), seed=2)
    two = model(token_ids).logits
    model.set_adapter("one")
    one = model(token_ids).logits
    mixed = model(token_ids, adapter_names=["one", "two", "one", "two", "two"]).logits
    torch.testing.assert_close(mixed[::2][:2], one[::2][:2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixed[1::2], two[1::2], atol=1e-5, rtol=1e-5)


def test_what_was_stacked_in_inference_mode_is_used_where_gradients_are_recorded(token_ids):
    model = add(tiny_bert(), "one", HoulsbyConfig(r=4), seed=1)
    names = ["one", BASE, "one", BASE, "one"]
    with torch.inference_mode():
        expected = model(token_ids, adapter_names=names).logits
    model.enable_input_require_grads()
    logits = model(token_ids, adapter_names=names).logits
    torch.testing.assert_close(logits, expected.clone())
    logits.sum().backward()


def test_heads_of_unlike_tasks_are_filled_up(token_ids):
    model = add(tiny_bert(num_labels=2), "two labels", HoulsbyConfig(r=4), seed=1)
    two = model(token_ids).logits
    model.base_model.model.classifier.original_module = nn.Linear(32, 4)
    model = add(model, "four labels", HoulsbyConfig(r=4), seed=2)
    four = model(token_ids).logits
    mixed = model(token_ids, adapter_names=["two labels", "four labels"] * 2 + ["two labels"]).logits
    torch.testing.assert_close(mixed[::2, :2], two[::2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixed[1::2], four[1::2], atol=1e-5, rtol=1e-5)
    assert (mixed[::2, 2:] == float("-inf")).all()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin0 = nn.Linear(4, 4)
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        return self.rnn(self.lin0(x))[0]


def test_requests_that_would_give_wrong_rows_are_refused(token_ids):
    model = add(tiny_bert(), "one", HoulsbyConfig(r=4), seed=1)
    with pytest.raises(ValueError, match=r"non-existing adapter\(s\): three, two\. Loaded are one; .*'__base__'"):
        model(token_ids, adapter_names=["one", "two", "three", BASE, "one"])
    for names in (["one"], ["one"] * 4, ["one"] * 10):
        with pytest.raises(
            ValueError, match=f"should be the same as the number of inputs, but got {len(names)} and 5"
        ):
            model(token_ids, adapter_names=names)
        with pytest.raises(ValueError, match=f"got {len(names)} and 5"):
            model(attention_mask=torch.ones_like(token_ids), input_ids=token_ids, adapter_names=names)
    model.train()
    with pytest.raises(ValueError, match=r"training mode; call model\.eval\(\) first"):
        model(token_ids, adapter_names=["one"] * 5)


def test_models_whose_first_dimension_is_the_sequence_are_refused():
    attention = nn.TransformerDecoderLayer(8, 2, 8)
    model = get_peft_model(attention, HoulsbyConfig(r=2, target_modules=["self_attn"]), adapter_name="one").eval()
    x = torch.randn(3, 2, 8)
    assert model(x, x).shape == x.shape
    with pytest.raises(AdapterError, match=r"TransformerDecoderLayer has the sequence there.*batch_first=True"):
        model(x, x, adapter_names=["one", BASE, "one"])


def test_a_head_that_gives_no_tensor_is_refused():
    config = HoulsbyConfig(r=2, target_modules=["lin0"], modules_to_save=["rnn"])
    model = get_peft_model(Recurrent(), config, adapter_name="one").eval()
    x = torch.randn(2, 3, 4)
    assert model(x).shape == x.shape
    with pytest.raises(TypeError, match="one tensor with a row per example; GRU in modules_to_save does not"):
        model(x, adapter_names=["one", BASE])


def test_rows_that_a_layer_is_called_with_directly():
    layer = HoulsbyLayer(nn.Identity(), batches={get_ident(): MixedBatch([BASE, "some"])})
    layer.update_layer("some", Bottleneck(4, 2))
    with pytest.raises(ValueError, match="got 2 and 3"):
        layer(torch.randn(3, 4))


def test_rows_of_adapters_that_train_tokens_of_their_own_and_of_ones_that_train_none(token_ids):
    options = {"first": None, "second": [3, 5], "third": {"word_embeddings": [int(token_ids[0, 1])]}}
    model = tiny_bert()
    for seed, (name, tokens) in enumerate(options.items()):
        model = add(model, name, HoulsbyConfig(r=4, trainable_token_indices=tokens), seed=seed)
    names = ["third", "first", BASE, "second", "third"]
    for active in options:
        model.set_adapter(active)
        mixed = model(token_ids, adapter_names=names).logits
        for row, name in enumerate(names):
            with model.disable_adapter() if name == BASE else nullcontext():
                if name != BASE:
                    model.set_adapter(name)
                alone = model(token_ids[row : row + 1]).logits
            torch.testing.assert_close(mixed[row : row + 1], alone, atol=1e-5, rtol=1e-5)
    with model.disable_adapter():
        expected = model(token_ids).logits
        torch.testing.assert_close(model(token_ids, adapter_names=names).logits, expected)


@pytest.mark.parametrize("deleted", ["language", "other", "task", "further"])
def test_deleting_an_adapter_leaves_the_tokens_of_the_others_as_they_are(deleted, token_ids):
    tokens = token_ids.unique().tolist()
    model = tiny_bert()
    for seed, name in enumerate(["language", "other", "task", "further"]):
        own = tokens if name in ("language", "other") else None
        model = add(model, name, HoulsbyConfig(r=4, trainable_token_indices=own), seed=seed)
    active = ["language", "task", "further"]
    rest = [name for name in active if name != deleted]
    model.base_model.set_adapter(rest, inference_mode=True)
    # PEFT's own class forgets that another adapter than the deleted one is active if several are.
    expected = model.base_model(token_ids).logits
    model.base_model.set_adapter(active, inference_mode=True)
    model.delete_adapter(deleted)
    assert model.base_model.active_adapters == rest
    assert set(model.peft_config) == set(model.base_model.model.houlsby_records) == {*active, "other"} - {deleted}
    assert torch.equal(model.base_model(token_ids).logits, expected)
    embeddings = model.base_model.model.bert.embeddings.word_embeddings
    assert not any(weight.requires_grad for weight in embeddings.parameters())


def test_a_deleted_adapter_gives_its_memory_back_after_a_mixed_batch(token_ids):
    model = add(tiny_bert(), "one", HoulsbyConfig(r=4), seed=1)
    model = add(model, "two", HoulsbyConfig(r=4), seed=2)
    model.eval()(token_ids, adapter_names=["one", "two", "one", "two", BASE])
    weights = [weakref.ref(weight) for name, weight in model.named_parameters() if ".two." in name]
    model.set_adapter("one")
    model.delete_adapter("two")
    gc.collect()
    assert weights
    assert all(weight() is None for weight in weights)


def test_a_copy_of_a_model_does_not_carry_the_stacked_weights(token_ids):
    model = add(tiny_bert(), "one", HoulsbyConfig(r=4), seed=1)
    model = add(model, "two", HoulsbyConfig(r=4), seed=2)
    before = len(pickle.dumps(model.eval()))
    names = ["one", "two", "one", "two", BASE]
    expected = model(token_ids, adapter_names=names).logits
    assert len(pickle.dumps(model)) < 1.01 * before
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(copied(token_ids, adapter_names=names).logits, expected)


class Scaled(Bottleneck):
    """A variant whose branch is more than its two projections."""

    def branch(self, hidden):
        return 3.0 * super().branch(hidden)


def test_rows_of_a_variant_of_the_bottleneck_run_as_the_variant_does(token_ids):
    model = add(tiny_bert(), "plain", HoulsbyConfig(r=4), seed=1)
    model = add(model, "scaled", HoulsbyConfig(r=4), seed=2)
    for layer in model.modules():
        if isinstance(layer, HoulsbyLayer):
            layer.houlsby_adapter["scaled"].__class__ = Scaled
    model.eval()
    names = ["scaled", "plain", "scaled", BASE, "plain"]
    mixed = model(token_ids, adapter_names=names).logits
    for name in ("plain", "scaled"):
        model.set_adapter(name)
        rows = [row for row, other in enumerate(names) if other == name]
        torch.testing.assert_close(mixed[rows], model(token_ids[rows]).logits, atol=1e-5, rtol=1e-5)


def test_a_batch_of_one_adapter_computes_what_a_plain_batch_does_bit_for_bit(token_ids):
    model = add(tiny_bert(), "one", HoulsbyConfig(r=4), seed=1)
    model = add(model, "two", HoulsbyConfig(r=4, share_layers=3), seed=2)
    model.eval()
    for name in ("one", "two"):
        model.set_adapter("one" if name == "two" else "two")
        mixed = model(token_ids, adapter_names=[name] * 5).logits
        model.set_adapter(name)
        assert torch.equal(mixed, model(token_ids).logits)
