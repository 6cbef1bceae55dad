"""The cache of the frozen layers below the first adapter: equal results, computed once, in memory and in a folder."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from peft import get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BloomConfig,
    BloomForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DynamicCache,
    LayoutLMConfig,
    LayoutLMForSequenceClassification,
    LongformerConfig,
    LongformerForSequenceClassification,
    MPNetConfig,
    MPNetForSequenceClassification,
    MptConfig,
    MptForSequenceClassification,
    RoFormerConfig,
    RoFormerForSequenceClassification,
    T5Config,
    T5EncoderModel,
    Trainer,
    TrainingArguments,
)

import houlsby_peft.frozen_prefix
from accelerate import cpu_offload
from contract_models import gpt2, llama
from houlsby_peft import FrozenPrefix, HoulsbyConfig
from houlsby_peft.prefix_store import FolderStore, MemoryStore
from tiny_models import perturb, tiny_bert


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MASK = torch.ones(5, 7, dtype=torch.long)
MASK[1, 5:] = MASK[3, 2:] = 0


def upper(base=None, layers=(2, 3), **options):
    base = tiny_bert(**NO_DROPOUT) if base is None else base
    torch.manual_seed(0)
    model = get_peft_model(base, HoulsbyConfig(r=4, layers_to_transform=list(layers), **options))
    perturb(model)
    return model.train()


def step(model, ids, mask=MASK, **more):
    """Logits and gradients of a training step."""
    model.zero_grad()
    inputs = {"input_ids": ids, "attention_mask": mask, **more}
    output = model(**inputs)
    output.logits[mask[:, 0].bool()].square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [output.logits.detach(), *gradients]


def assert_equal(found, expected):
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def calls_of(modules):
    """Return a list that gets an entry for each call of a module that reaches its first linear layer."""
    calls = []
    for module in modules:
        linear = next(each for each in module.modules() if isinstance(each, nn.Linear))
        linear.register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_nothing_below_the_first_adapter_takes_part_in_the_backward_pass(token_ids):
    model = upper()
    outputs = {}
    for index, layer in enumerate(model.get_base_model().bert.encoder.layer):
        layer.register_forward_hook(lambda _, inputs, output, index=index: outputs.update({index: output}))
    step(model, token_ids)
    assert [outputs[index].requires_grad for index in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize("options", [{}, {"share_layers": 2, "train_layer_norm": False}], ids=str)
def test_later_epochs_are_equal_without_running_the_frozen_layers(options, in_folder, token_ids, tmp_path):
    model = upper(**options)
    types = (token_ids > 40).long()
    expected = step(model, token_ids, token_type_ids=types)
    layers = model.get_base_model().bert.encoder.layer
    prefix = FrozenPrefix(model, folder=tmp_path if in_folder else None)
    calls = calls_of([*layers[:2], layers[2].attention])
    assert_equal(step(model, token_ids, token_type_ids=types), expected)
    first = len(calls)
    assert first >= 3
    # In another order, with other padding, and in evaluation mode.
    order = torch.tensor([4, 2, 0, 1, 3])
    wider = [nn.functional.pad(each[order], (0, 2)) for each in (token_ids, MASK, types)]
    found = step(model, wider[0], wider[1], token_type_ids=wider[2])
    torch.testing.assert_close(found[0], expected[0][order], atol=1e-6, rtol=1e-5)
    assert_equal(found[1:], expected[1:])
    with torch.no_grad():
        logits = model.eval()(input_ids=token_ids, attention_mask=MASK, token_type_ids=types).logits
    torch.testing.assert_close(logits, expected[0], atol=1e-6, rtol=1e-5)
    assert len(calls) == first
    # The same tokens with other token types are another text.
    assert not torch.allclose(model(input_ids=token_ids, attention_mask=MASK).logits, expected[0])
    assert len(calls) == first + 3
    prefix.remove()
    model.train()
    assert_equal(step(model, token_ids, token_type_ids=types), expected)
    assert len(calls) == first + 6


def test_new_and_known_texts_in_one_batch_and_no_room_for_more(token_ids):
    model = upper()
    expected = step(model, token_ids)
    # Room for two texts of seven tokens, whose hidden states and attention output are cached.
    FrozenPrefix(model, max_bytes=2 * 2 * 7 * 32 * 4)
    calls = calls_of(model.get_base_model().bert.encoder.layer[:1])
    with torch.no_grad():
        model(input_ids=token_ids[2:3])
    for _ in range(3):
        assert_equal(step(model, token_ids), expected)
    assert len(calls) == 4
    model(input_ids=token_ids[2:3])
    assert len(calls) == 4


def test_later_runs_reuse_a_folder_and_other_weights_have_their_own(token_ids, tmp_path):
    model = upper()
    expected = step(model, token_ids)
    FrozenPrefix(model, folder=tmp_path)
    step(model, token_ids)
    again = upper()
    FrozenPrefix(again, folder=tmp_path)
    calls = calls_of(again.get_base_model().bert.encoder.layer[:2])
    assert_equal(step(again, token_ids), expected)
    assert not calls
    other = upper(tiny_bert(seed=1, **NO_DROPOUT))
    expected = step(other, token_ids)
    FrozenPrefix(other, folder=tmp_path)
    assert_equal(step(other, token_ids), expected)
    assert len(list(tmp_path.iterdir())) == 2


def stack(seed, name="lang", **options):
    """An adapter that stays as it is in all layers, and one that is trained in the upper layers."""
    options = {"r": 4, "train_layer_norm": False, "modules_to_save": [], **options}
    torch.manual_seed(0)
    model = get_peft_model(tiny_bert(**NO_DROPOUT), HoulsbyConfig(**options), adapter_name=name)
    perturb(model, seed)
    model.add_adapter("task", HoulsbyConfig(r=4, layers_to_transform=[2, 3], train_layer_norm=False))
    model.base_model.set_adapter([name, "task"])
    model.set_requires_grad(name, False)
    return model.train()


@pytest.mark.parametrize(
    "options", [{}, {"invertible": "nice"}, {"train_layer_norm": True}, {"share_layers": 3}, {"scaling": 2.0}], ids=str
)
def test_other_frozen_adapters_have_a_folder_of_their_own(options, token_ids, tmp_path):
    first = stack(1, **options)
    expected = step(first, token_ids)
    FrozenPrefix(first, folder=tmp_path)
    assert_equal(step(first, token_ids), expected)
    # With the weights of the first one, the trained adapter excepted, which changes during training.
    again = stack(1, **options)
    for name, parameter in again.named_parameters():
        if ".task." in name:
            parameter.data += 0.1
    expected = step(again, token_ids)
    FrozenPrefix(again, folder=tmp_path)
    assert_equal(step(again, token_ids), expected)
    assert len(list(tmp_path.iterdir())) == 1
    others = [stack(2, **options)]
    if "scaling" in options or not options:
        others.append(stack(1, **{**options, "scaling": 3.0}))
        others.append(stack(1, **{**options, "activation": "relu"}))
    for number, other in enumerate(others):
        expected = step(other, token_ids)
        FrozenPrefix(other, folder=tmp_path)
        assert_equal(step(other, token_ids), expected)
        assert len(list(tmp_path.iterdir())) == number + 2


# The second record has a header of 25 bytes and activations of 24 bytes.
@pytest.mark.parametrize("lost_bytes", [1, 24, 25, 48, 49])
def test_a_record_that_a_crash_has_truncated_is_ignored(tmp_path, lost_bytes):
    rows = {
        bytes([number]) * 16: torch.randn(3, 4).to(dtype)
        for number, dtype in enumerate((torch.float32, torch.bfloat16))
    }
    store = FolderStore(tmp_path, 10**6)
    for key, value in rows.items():
        store.put(key, value)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-lost_bytes])
    (first, kept), (second, lost) = rows.items()
    full = FolderStore(tmp_path, file.stat().st_size + 48)
    assert torch.equal(full.get(first), kept)
    assert full.get(second) is None
    full.put(second, lost)
    assert full.get(second) is None, "49 bytes do not fit into 48"
    again = FolderStore(tmp_path, file.stat().st_size + 49)
    again.put(second, lost)
    third = FolderStore(tmp_path, 0)
    for key, value in rows.items():
        assert torch.equal(again.get(key), value)
        assert torch.equal(third.get(key), value)


def test_a_text_without_tokens_can_be_stored(tmp_path):
    for store in (MemoryStore(100), FolderStore(tmp_path, 100)):
        store.put(b"a" * 16, torch.zeros(0, 4))
        assert store.get(b"a" * 16).shape == (0, 4)


def test_processes_share_a_folder(tmp_path):
    rows = torch.randn(2, 2, 3)
    stores = [FolderStore(tmp_path, 10**6) for _ in rows]
    for number, (store, value) in enumerate(zip(stores, rows, strict=True)):
        store.put(b"s" * 16, value)
        store.put(bytes([number]) * 16, value)
    assert stores[0].get(bytes([1]) * 16) is None
    again = FolderStore(tmp_path, 10**6)
    assert all(torch.equal(again.get(bytes([number]) * 16), value) for number, value in enumerate(rows))
    assert any(torch.equal(again.get(b"s" * 16), value) for value in rows)


@pytest.mark.parametrize("store", [MemoryStore(100), None])
def test_a_full_store_keeps_what_it_has(store, tmp_path):
    store = store or FolderStore(tmp_path, 125)
    a, b = torch.randn(4, 5), torch.randn(2, 3)
    store.put(b"a" * 16, a)
    store.put(b"b" * 16, b)
    assert torch.equal(store.get(b"a" * 16), a)
    assert store.get(b"b" * 16) is None


def test_dropout_is_off_in_the_frozen_layers_only(token_ids):
    model = upper(tiny_bert(hidden_dropout_prob=0.3))
    layers = model.get_base_model().bert.encoder.layer
    prefix = FrozenPrefix(model)
    model.train()
    hidden = []
    layers[2].register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    a, b = (model(input_ids=token_ids, attention_mask=MASK).logits for _ in range(2))
    assert torch.equal(hidden[-1], hidden[-2])
    assert not torch.allclose(a, b)
    assert not layers[0].training
    assert layers[3].training
    prefix.remove()
    model.train()
    assert all(module.training for module in model.modules())
    assert not torch.allclose(*(model(input_ids=token_ids).logits for _ in range(2)))


def test_the_forward_methods_of_accelerate_are_restored(token_ids, tmp_path):
    """Accelerate overrides the `forward` of offloaded modules to fetch their weights."""
    base = tiny_bert(**NO_DROPOUT)
    expected = upper(base)(input_ids=token_ids).logits
    base = tiny_bert(**NO_DROPOUT)
    cpu_offload(base, execution_device=torch.device("cpu"))
    model = upper(base)
    with pytest.raises(ValueError, match=r"word_embeddings\.weight of a BertEmbeddings is offloaded.*folder=None"):
        FrozenPrefix(model, folder=tmp_path)
    prefix = FrozenPrefix(model)
    for _ in range(2):
        torch.testing.assert_close(model(input_ids=token_ids).logits, expected, atol=1e-6, rtol=1e-5)
    prefix.remove()
    torch.testing.assert_close(model(input_ids=token_ids).logits, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("build", [gpt2, llama], ids=lambda build: build.__name__)
def test_as_many_texts_as_tokens_of_which_some_are_cached(build):
    """Arguments with one row per token, such as position ids, must not lose rows."""
    ids = torch.randint(3, 20, (6, 6), generator=torch.Generator().manual_seed(0))
    model = get_peft_model(build(), HoulsbyConfig(r=4, layers_to_transform=[1], task_type="CAUSAL_LM")).eval()
    perturb(model)
    expected = step(model, ids, torch.ones_like(ids))
    FrozenPrefix(model)
    model(input_ids=ids[2:4])
    assert_equal(step(model, ids, torch.ones_like(ids)), expected)


@pytest.mark.parametrize("build", [gpt2, llama], ids=lambda build: build.__name__)
def test_decoders(build):
    ids = torch.randint(3, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    base = build()
    model = get_peft_model(base, HoulsbyConfig(r=4, layers_to_transform=[1], task_type="CAUSAL_LM")).eval()
    perturb(model)
    expected = step(model, ids, mask)
    FrozenPrefix(model)
    for _ in range(2):
        assert_equal(step(model, ids, mask), expected)
    with FlopCounterMode(display=False) as kept:
        model(input_ids=ids, attention_mask=mask)
    with FlopCounterMode(display=False) as new:
        model(input_ids=ids + 1, attention_mask=mask)
    assert kept.get_total_flops() < new.get_total_flops()


SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
         "intermediate_size": 48, "pad_token_id": 0, **NO_DROPOUT}  # fmt: skip


def mpnet(**options):
    return MPNetForSequenceClassification(MPNetConfig(**SMALL, num_labels=3, **options))


def deberta(**options):
    options = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, **options}
    return DebertaV2ForSequenceClassification(DebertaV2Config(**SMALL, num_labels=3, **options))


def roformer():
    return RoFormerForSequenceClassification(RoFormerConfig(**SMALL, embedding_size=32, num_labels=3))


@contextmanager
def on_the_wrong_device(model):
    """Let the model's layers fail, as an attention that needs a GPU does."""
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layers[0]), "forward", lambda *_, **__: 1 / 0)
        yield


@pytest.mark.parametrize("runs_at_first", [True, False])
@pytest.mark.parametrize("build", [mpnet, deberta, roformer], ids=lambda build: build.__name__)
def test_layers_that_return_tuples(build, runs_at_first, token_ids, tmp_path):
    """RoFormer's hold attention probabilities, which nothing reads."""
    model = upper(build())
    expected = step(model, token_ids)
    other = step(model, token_ids[:, :5], MASK[:, :5])
    with nullcontext() if runs_at_first else on_the_wrong_device(model):
        prefix = FrozenPrefix(model, folder=tmp_path)
    with torch.no_grad():
        model(input_ids=token_ids[2:4], attention_mask=MASK[2:4])
    for _ in range(2):
        assert_equal(step(model, token_ids), expected)
        assert_equal(step(model, token_ids[:, :5], MASK[:, :5]), other)
    prefix.remove()
    FrozenPrefix(model, folder=tmp_path)
    linear = next(each for name, each in model.named_modules() if name.endswith("layer.1.output.dense"))
    calls = []
    linear.register_forward_hook(lambda *_: calls.append(1))
    assert_equal(step(model, token_ids), expected)
    assert not calls
    with pytest.raises(ValueError, match=r"got output_attentions=True\. Leave it out"):
        model(input_ids=token_ids, output_attentions=True)


def bloom():
    return BloomForSequenceClassification(
        BloomConfig(vocab_size=99, hidden_size=32, n_layer=4, n_head=4, pad_token_id=0, num_labels=3)
    )


def mpt():
    return MptForSequenceClassification(
        MptConfig(vocab_size=99, d_model=32, n_layers=4, n_heads=4, max_seq_len=32, pad_token_id=0, num_labels=3)
    )


@pytest.mark.parametrize(
    ("build", "texts"),
    [
        (mpt, 4),  # its biases are (heads, 1, tokens)
        (bloom, 4),  # its biases are (texts * heads, 1, tokens)
        (deberta, 16),  # its position embeddings are (2 * position_buckets, width)
        (partial(deberta, conv_kernel_size=3), 5),  # its convolution reads the first layer's input and output
    ],
)
def test_what_the_model_gives_to_its_layers_has_no_row_per_text(build, texts):
    """Even if it has as many rows as there are texts, of which some are cached."""
    ids = torch.randint(3, 99, (texts, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for layers in ([2, 3], [1]):
        model = upper(build(), layers)
        expected = step(model, ids, mask)
        FrozenPrefix(model)
        with torch.no_grad():
            model(input_ids=ids[1:], attention_mask=mask[1:])
        for _ in range(2):
            assert_equal(step(model, ids, mask), expected)


def t5():
    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4, dropout_rate=0.0)
    return T5EncoderModel(config)


def bert_with_a_norm_over_the_batch():
    model = tiny_bert(**NO_DROPOUT)
    model.bert.encoder.layer[0].register_forward_hook(lambda _, inputs, output: output - output.mean(0))
    return model


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (t5, "got T5Block, where the model uses more of what they return than the hidden states"),
        (
            lambda: LongformerForSequenceClassification(LongformerConfig(**SMALL, attention_window=4)),
            r"the last one returns \(2, 4, 32\) for \(2, 3\) tokens\. Train this model without FrozenPrefix",
        ),
        (bert_with_a_norm_over_the_batch, "got BertLayer, where a text has other hidden states if it runs alone"),
    ],
    ids=["t5", "longformer", "batch norm"],
)
def test_layers_that_do_more_than_pass_on_hidden_states_are_refused(build, problem, token_ids):
    model = upper(build())
    with pytest.raises(ValueError, match=problem):
        FrozenPrefix(model)
    assert all(module.training for module in model.modules())
    with on_the_wrong_device(model):
        FrozenPrefix(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=problem.replace("2, 4", "5, 8").replace("2, 3", "5, 7")):
            model(input_ids=token_ids)


def test_other_inputs_are_part_of_a_text(token_ids):
    """LayoutLM reads where each token is on the page."""
    model = upper(LayoutLMForSequenceClassification(LayoutLMConfig(**SMALL, num_labels=3)))
    pages = [torch.full((5, 7, 4), place) for place in (10, 300)]
    expected = [step(model, token_ids, bbox=page) for page in pages]
    assert not torch.allclose(expected[0][0], expected[1][0])
    FrozenPrefix(model)
    for _ in range(2):
        for page, each in zip(pages, expected, strict=True):
            assert_equal(step(model, token_ids, bbox=page), each)
    # What is at padding is not part of a text.
    calls = calls_of(model.get_base_model().layoutlm.encoder.layer[:1])
    assert_equal(step(model, token_ids, bbox=pages[0] * MASK[..., None]), expected[0])
    assert not calls


def test_token_types_and_positions_are_not_confused(token_ids):
    model = upper()
    numbers = (torch.arange(7) % 2).expand(5, 7)
    expected = [step(model, token_ids, **{name: numbers}) for name in ("token_type_ids", "position_ids")]
    FrozenPrefix(model)
    assert_equal(step(model, token_ids, token_type_ids=numbers), expected[0])
    assert_equal(step(model, token_ids, position_ids=numbers), expected[1])
    assert_equal(step(model, token_ids, position_ids=numbers[:1]), expected[1])


def test_inputs_that_identify_no_text_are_refused(token_ids):
    model = upper()
    FrozenPrefix(model)
    with pytest.raises(
        ValueError, match=r"input_ids, \(5, 7\); got attention_mask of the shape \(5, 1, 7, 7\)\. Leave"
    ):
        model(input_ids=token_ids, attention_mask=MASK[:, None, None].expand(5, 1, 7, 7))
    model = get_peft_model(gpt2(), HoulsbyConfig(r=4, layers_to_transform=[1], task_type="CAUSAL_LM"))
    FrozenPrefix(model)
    with pytest.raises(ValueError, match=r"got past_key_values of DynamicCache\. Leave it out, or call remove\(\)"):
        model(input_ids=torch.ones(2, 3, dtype=torch.long), past_key_values=DynamicCache())


def test_rows_of_named_adapters_are_refused(token_ids):
    model = upper()
    model.add_adapter("all", HoulsbyConfig(r=4))
    perturb(model)
    model.eval()
    inputs = {"input_ids": token_ids, "attention_mask": MASK}
    names = ["default", "all", "all", "default", "__base__"]
    with torch.no_grad():
        expected = model(**inputs, adapter_names=names).logits
        prefix = FrozenPrefix(model)
        alone = model(**inputs).logits
        for given in (names, ["all"] * 5):
            with pytest.raises(ValueError, match=r"got adapter_names=\[.*\]\. Leave adapter_names out, or call the"):
                model(**inputs, adapter_names=given)
        assert torch.equal(model(**inputs).logits, alone)
        prefix.remove()
        assert torch.equal(model(**inputs, adapter_names=names).logits, expected)


def test_padding_on_the_left_changes_the_positions():
    """GPT-2 counts them from the padding on: the same text has other activations behind it."""
    ids = torch.randint(3, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    plain, padded = [
        {
            "input_ids": nn.functional.pad(ids, (left, 0)),
            "attention_mask": nn.functional.pad(ids > 0, (left, 0)).long(),
        }
        for left in (0, 3)
    ]
    model = get_peft_model(gpt2(), HoulsbyConfig(r=4, layers_to_transform=[1], task_type="CAUSAL_LM"))
    perturb(model.eval())
    with torch.no_grad():
        expected = model(**padded).logits[:, 3:]
        prefix = FrozenPrefix(model)
        assert not torch.allclose(model(**plain).logits, expected, atol=1e-3)
        for _ in range(2):
            torch.testing.assert_close(model(**padded).logits[:, 3:], expected, atol=1e-6, rtol=1e-5)
    model.train()
    prefix.remove()
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant, token_ids):
    """Two forward passes precede each backward pass, as in contrastive losses."""
    model = upper()

    def gradients():
        model.zero_grad()
        pooled = [model.get_base_model().bert(each).last_hidden_state[:, 0] for each in (token_ids, token_ids[:, :4])]
        (pooled[0] @ pooled[1].T).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    if use_reentrant:
        model.enable_input_require_grads()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    FrozenPrefix(model)
    for _ in range(2):
        assert_equal(gradients(), expected)


def test_two_epochs_of_the_trainer_give_the_same_adapter(token_ids, tmp_path):
    data = [{"input_ids": row[: 7 - number % 3], "labels": int(row[0] % 3)} for number, row in enumerate(token_ids)]

    def collate(rows):
        ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
        return {
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "labels": torch.tensor([r["labels"] for r in rows]),
        }

    trained = []
    for with_prefix in (False, True):
        model = upper()
        if with_prefix:
            FrozenPrefix(model)
        calls = calls_of(model.get_base_model().bert.encoder.layer[:1])
        arguments = TrainingArguments(
            tmp_path / str(with_prefix), num_train_epochs=3, per_device_train_batch_size=2, learning_rate=1e-2,
            eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, use_cpu=True, report_to="none",
            disable_tqdm=True,
        )  # fmt: skip
        Trainer(model, arguments, data_collator=collate, train_dataset=data, eval_dataset=data).train()
        trained.append(get_peft_model_state_dict(model))
        assert len(calls) == (3 if with_prefix else 3 * (3 + 1))
    assert trained[0].keys() == trained[1].keys()
    for name, weight in trained[0].items():
        torch.testing.assert_close(trained[1][name], weight, atol=1e-5, rtol=1e-4)


def test_the_encoder_can_be_called_alone_and_with_a_positional_mask(token_ids):
    model = upper()
    encoder = model.get_base_model().bert
    expected = [encoder(token_ids[:, :5], MASK[:, :5]).last_hidden_state, encoder(token_ids, MASK).last_hidden_state]
    FrozenPrefix(model)
    model(token_ids, MASK)
    found = [encoder(token_ids[:, :5], MASK[:, :5]).last_hidden_state, encoder(token_ids, MASK).last_hidden_state]
    for one, other, mask in zip(found, expected, (MASK[:, :5], MASK), strict=True):
        torch.testing.assert_close(one[mask.bool()], other[mask.bool()], atol=1e-6, rtol=1e-5)


def test_its_first_module_still_exports_it():
    assert houlsby_peft.frozen_prefix.FrozenPrefix is FrozenPrefix


def test_a_model_without_frozen_layers_is_refused():
    with pytest.raises(ValueError, match=r"bert\.encoder\.layer\.0 is trained\. Adapt upper layers only"):
        FrozenPrefix(upper(layers=[0, 1]))
    with pytest.raises(ValueError, match="the embeddings are trained"):
        FrozenPrefix(upper(train_layer_norm="all"))
    model = upper()
    FrozenPrefix(model)
    with pytest.raises(ValueError, match="recognizes texts by their input_ids; got none"):
        model(inputs_embeds=torch.randn(2, 3, 32))
