"""Rows of different adapters in one batch: generation, refusals and heads."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import GenerationConfig, OPTConfig, OPTForCausalLM

from contract_models import IDS, VOCABULARY, gpt2, llama, seeded, t5
from houlsby_peft import HoulsbyConfig
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


@contextmanager
def alone(model, name):
    """Within this context, an adapter is the active one, or none is."""
    if name != BASE:
        model.set_adapter(name)
    with model.disable_adapter() if name == BASE else nullcontext():
        yield


def opt():
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY, hidden_size=16, word_embed_proj_dim=16, ffn_dim=24,
            num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (llama, {}),
        (llama, {"use_cache": False}),
        (gpt2, {"num_beams": 3}),
        (gpt2, {"guidance_scale": 3.0}),
        (t5, {"num_beams": 4, "num_return_sequences": 2}),
        (opt, {"generation_config": GenerationConfig(num_beams=2)}),
    ],
    ids=["greedy", "no cache", "beams", "guided", "several of each", "by generation config"],
)
def test_generation_for_rows_of_different_adapters(build, options):
    """Prompts of different lengths are padded on the left in the batch, and not padded alone."""
    task = "SEQ_2_SEQ_LM" if build is t5 else "CAUSAL_LM"
    model = add(seeded(build), "one", HoulsbyConfig(task_type=task, r=4), seed=1)
    fields = {"r": 2, "share_layers": 1, "train_layer_norm": False}
    model = add(model, "two", HoulsbyConfig(task_type=task, **fields), seed=2)
    options = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, **options}
    options["pad_token_id"] = 0
    names, padding = ["one", BASE, "two", "one"], [0, 2, 1, 0] if build is llama else [0] * 4
    mask = torch.stack([(torch.arange(IDS.shape[1]) >= length).long() for length in padding])
    inputs = {"input_ids": IDS[:4], "attention_mask": mask}
    mixed = model.generate(**inputs, adapter_names=names, **options)[:, -5:]
    assert len(mixed) == 4 * options.get("num_return_sequences", 1)
    expected = []
    for row, name in enumerate(names):
        with alone(model, name):
            alone_inputs = {}
            for key, value in inputs.items():
                alone_inputs[key] = value[row : row + 1, padding[row] :]
            expected.append(model.generate(**alone_inputs, **options)[:, -5:])
    assert torch.equal(mixed, torch.cat(expected))
    with alone(model, BASE):
        assert not torch.equal(mixed, model.generate(**inputs, **options)[:, -5:])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin0 = nn.Linear(4, 4)
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        return self.rnn(self.lin0(x))[0]


@pytest.mark.parametrize("task_type", [None, "SEQ_CLS"])
def test_requests_that_would_give_wrong_rows_are_refused(task_type, token_ids):
    model = add(tiny_bert(), "one", HoulsbyConfig(r=4, task_type=task_type), seed=1)
    with pytest.raises(ValueError, match="three, two"):
        model(token_ids, adapter_names=["one", "two", "three", BASE, "one"])
    batch = {"attention_mask": torch.ones_like(token_ids), "input_ids": token_ids}
    for names in (["one"], ["one"] * 10, ["one", BASE] * 5):
        with pytest.raises(ValueError, match=f"{len(names)} and 5"):
            model(**batch, adapter_names=names)
    model.train()
    with pytest.raises(ValueError, match="training mode"):
        model(token_ids, adapter_names=["one"] * 5)


def test_a_head_that_gives_no_tensor_is_refused():
    config = HoulsbyConfig(r=2, target_modules=["lin0"], modules_to_save=["rnn"])
    model = get_peft_model(Recurrent(), config, adapter_name="one").eval()
    x = torch.randn(2, 3, 4)
    assert model(x).shape == x.shape
    with pytest.raises(TypeError, match="GRU"):
        model(x, adapter_names=["one", BASE])


def test_rows_of_adapters_that_train_tokens_of_their_own_and_of_ones_that_train_none(token_ids):
    by_name = {"word_embeddings": [int(token_ids[0, 1])]}
    tokens = {"first": None, "second": [3, 5], "third": by_name}
    model = tiny_bert()
    for seed, (name, indices) in enumerate(tokens.items()):
        model = add(model, name, HoulsbyConfig(r=4, trainable_token_indices=indices), seed=seed)
    names = ["third", "first", BASE, "second", "third"]
    for active in tokens:
        model.set_adapter(active)
        mixed = model(token_ids, adapter_names=names).logits
        for row, name in enumerate(names):
            with alone(model, name):
                expected = model(token_ids[row : row + 1]).logits
            torch.testing.assert_close(mixed[row : row + 1], expected, atol=1e-5, rtol=1e-5)
    with model.disable_adapter():
        expected = model(token_ids).logits
        torch.testing.assert_close(model(token_ids, adapter_names=names).logits, expected)


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


def test_an_activation_with_a_weight(token_ids):
    """Beside a plain adapter."""
    model = add(tiny_bert(), "plain", HoulsbyConfig(r=4, scaling=2.0), seed=1)
    for seed, name in enumerate(("one", "two")):
        model = add(model, name, HoulsbyConfig(r=4, activation="prelu"), seed=seed + 2)
    names = ["two", "plain", "one", BASE, BASE]
    mixed = model(token_ids, adapter_names=names).logits
    for row, name in enumerate(names[:3]):
        model.set_adapter(name)
        expected = model(token_ids).logits[row]
        torch.testing.assert_close(mixed[row], expected, atol=1e-5, rtol=1e-5)


def test_the_gradients_of_a_mixed_batch_are_those_of_its_rows():
    model = add(tiny_bert(), "one", HoulsbyConfig(r=4), seed=1)
    model = add(model, "two", HoulsbyConfig(r=4), seed=2)
    names, inputs = ["one"] * 2 + ["two"] * 3, torch.rand(5, 6, 32, requires_grad=True)
    logits = model(inputs_embeds=inputs, adapter_names=names).logits
    [mixed] = torch.autograd.grad(logits.sum(), inputs)
    for name, rows in (("one", slice(2)), ("two", slice(2, 5))):
        model.set_adapter(name)
        [expected] = torch.autograd.grad(model(inputs_embeds=inputs).logits[rows].sum(), inputs)
        torch.testing.assert_close(mixed[rows], expected[rows])


@pytest.mark.slow  # ten seconds of tracing
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Dynamo")
def test_a_compiled_model_takes_texts_of_any_length(token_ids):
    torch._dynamo.reset()
    kinds = {"first": "houlsby", "second": "parallel", "third": "ladder"}
    model = get_peft_model(tiny_bert(num_hidden_layers=1), HoulsbyConfig(r=4), "first")
    for name in ("second", "third"):
        model.add_adapter(name, HoulsbyConfig(r=4, kind=kinds[name]))
    perturb(model.eval())
    compiled = torch.compile(model, backend="eager")
    for length in (5, 4):
        batch = {"input_ids": token_ids[:3, :length], "adapter_names": [*kinds]}
        torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits)


def test_threads_get_the_answers_of_their_own_texts_and_adapters(token_ids):
    """Also a bottleneck that reads the residual input, which is kept for it."""
    model = add(tiny_bert(), "one", HoulsbyConfig(r=4), seed=1)
    model = add(model, "two", HoulsbyConfig(r=4, kind="pfeiffer"), seed=2)
    batches = (["one", "two"] * 2, ["two", BASE, "one", "one"], ["two"] * 4)
    options = [{"adapter_names": names} for names in batches] + [{}]

    def run(number):
        ids = token_ids[:4].roll(number % 5, 0)
        with torch.no_grad():
            return model(ids, **options[number % 4]).logits

    expected = [run(number) for number in range(20)]
    with ThreadPoolExecutor(8) as threads:
        for number, logits in enumerate(threads.map(run, [*range(20)] * 4)):
            assert torch.equal(logits, expected[number % 20])
