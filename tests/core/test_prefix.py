"""The cache of the frozen layers below the first adapter: equal results, computed once, in memory
and in a folder.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from accelerate import cpu_offload
from peft import get_peft_model
from torch import nn
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
)
from transformers.pytorch_utils import Conv1D

from contract_models import gpt2, llama
from houlsby_peft import FrozenPrefix, HoulsbyConfig
from houlsby_peft.prefix import Store
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


def runs_of(model, layers=range(2)):
    """Return a list that gets the number of texts each time that a frozen layer reaches its first
    linear layer.
    """
    stack = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    runs = []
    for index in layers:
        linear = next(
            each for each in stack[index].modules() if isinstance(each, (nn.Linear, Conv1D))
        )
        linear.register_forward_hook(lambda _, inputs, output: runs.append(len(inputs[0])))
    return runs


SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
         "intermediate_size": 48, "pad_token_id": 0, **NO_DROPOUT}  # fmt: skip


def mpnet():
    return MPNetForSequenceClassification(MPNetConfig(**SMALL, num_labels=3))


def deberta(**options):
    options = {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 8,
        **options,
    }
    return DebertaV2ForSequenceClassification(DebertaV2Config(**SMALL, num_labels=3, **options))


def roformer():
    return RoFormerForSequenceClassification(
        RoFormerConfig(**SMALL, embedding_size=32, num_labels=3)
    )


def bloom():
    return BloomForSequenceClassification(
        BloomConfig(
            vocab_size=99, hidden_size=32, n_layer=4, n_head=4, pad_token_id=0, num_labels=3
        )
    )


def mpt():
    return MptForSequenceClassification(
        MptConfig(
            vocab_size=99,
            d_model=32,
            n_layers=4,
            n_heads=4,
            max_seq_len=32,
            pad_token_id=0,
            num_labels=3,
        )
    )


@pytest.mark.parametrize(
    ("build", "texts", "layers"),
    [
        (lambda: tiny_bert(**NO_DROPOUT), 5, (2, 3)),
        (gpt2, 6, (1,)),  # as many texts as position ids
        (llama, 6, (1,)),
        (mpnet, 5, (2, 3)),  # its layers return tuples
        (roformer, 5, (2, 3)),  # with attention probabilities, which nothing reads
        (mpt, 4, (2, 3)),  # its biases are (heads, 1, tokens)
        (bloom, 4, (1,)),  # its biases are (texts * heads, 1, tokens)
        (deberta, 16, (2, 3)),  # its position embeddings are (2 * position_buckets, width)
        (
            partial(deberta, conv_kernel_size=3),
            5,
            (1,),
        ),  # its convolution reads the first layer's input and output
    ],
    ids=[
        "bert",
        "gpt2",
        "llama",
        "mpnet",
        "roformer",
        "mpt",
        "bloom",
        "deberta",
        "deberta with a convolution",
    ],
)
def test_every_epoch_is_that_without_the_cache(build, texts, layers, tmp_path):
    """The first one bit for bit; later batches may be padded otherwise, and hold texts that are
    new.
    """
    ids = torch.randint(3, 20, (texts, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    model = upper(
        build(), layers, task_type=None if build not in (gpt2, llama) else "CAUSAL_LM"
    ).eval()
    expected, part = step(model, ids, mask), step(model, ids[2:4, :5], mask[2:4, :5])
    runs = runs_of(model, range(layers[0]))
    prefix = FrozenPrefix(model, folder=str(tmp_path))
    assert prefix.index == layers[0]
    runs.clear()
    assert_equal(step(model, ids[2:4, :5], mask[2:4, :5]), part)
    for each in (step(model, ids, mask), expected):
        assert all(map(torch.equal, each, expected)) or len(runs) == 2 * layers[0]
    first = len(runs)
    assert first == 2 * layers[0]
    order = torch.randperm(texts, generator=torch.Generator().manual_seed(1))
    found = step(model, ids[order], mask[order])
    torch.testing.assert_close(found[0], expected[0][order], atol=1e-6, rtol=1e-5)
    assert_equal(found[1:], expected[1:])
    assert len(runs) == first, "the frozen layers do not run again"
    prefix.remove()
    assert all(map(torch.equal, step(model, ids, mask), expected))
    # A later run finds the folder.
    FrozenPrefix(model, folder=str(tmp_path))
    runs.clear()
    assert_equal(step(model, ids, mask), expected)
    # One text tells what the layers return.
    assert runs == layers[0] * [1]


@pytest.mark.parametrize("options", [{}, {"share_layers": 2, "train_layer_norm": False}], ids=str)
def test_padding_and_token_types(options, token_ids):
    model = upper(**options)
    types = (token_ids > 40).long()
    expected = step(model, token_ids, token_type_ids=types)
    outputs = {}
    for index, layer in enumerate(model.get_base_model().bert.encoder.layer):
        layer.register_forward_hook(
            lambda _, inputs, output, index=index: outputs.update({index: output})
        )
    step(model, token_ids, token_type_ids=types)
    # Nothing below the first adapter takes part in the backward pass, cached or not.
    assert [outputs[index].requires_grad for index in range(4)] == [False, False, True, True]
    FrozenPrefix(model)
    runs = runs_of(model)
    assert all(map(torch.equal, step(model, token_ids, token_type_ids=types), expected))
    assert [outputs[index].requires_grad for index in range(4)] == [False, False, True, True]
    order = torch.tensor([4, 2, 0, 1, 3])
    wider = [nn.functional.pad(each[order], (0, 2)) for each in (token_ids, MASK, types)]
    found = step(model, wider[0], wider[1], token_type_ids=wider[2])
    torch.testing.assert_close(found[0], expected[0][order], atol=1e-6, rtol=1e-5)
    assert_equal(found[1:], expected[1:])
    assert len(runs) == 2
    # The same tokens with other token types are another text, and token types are not positions.
    numbers = (torch.arange(7) % 2).expand(5, 7)
    plain = upper(**options)
    for more in (
        {},
        {"token_type_ids": numbers},
        {"position_ids": numbers},
        {"position_ids": numbers[:1]},
    ):
        assert_equal(step(model, token_ids, **more), step(plain, token_ids, **more))
    assert len(runs) == 2 + 3 * 2


def test_new_and_known_texts_in_one_batch_and_no_room_for_more(token_ids):
    model = upper()
    expected = step(model, token_ids)
    FrozenPrefix(model, max_bytes=2 * 7 * 32 * 4)  # two texts of seven tokens
    runs = runs_of(model, [0])
    with torch.no_grad():
        model(input_ids=token_ids[2:3])
    for _ in range(3):
        assert_equal(step(model, token_ids), expected)
    assert len(runs) == 4
    model(input_ids=token_ids[2:3])
    assert len(runs) == 4


def stack(seed, **options):
    """An adapter that stays as it is in all layers, and one that is trained in the upper layers."""
    options = {"r": 4, "train_layer_norm": False, "modules_to_save": [], **options}
    torch.manual_seed(0)
    model = get_peft_model(tiny_bert(**NO_DROPOUT), HoulsbyConfig(**options), adapter_name="lang")
    perturb(model, seed)
    model.add_adapter(
        "task", HoulsbyConfig(r=4, layers_to_transform=[2, 3], train_layer_norm=False)
    )
    model.base_model.set_adapter(["lang", "task"])
    model.set_requires_grad("lang", False)
    return model.train()


def test_other_frozen_weights_have_a_folder_of_their_own(token_ids, tmp_path):
    again = stack(1)
    for name, parameter in again.named_parameters():
        if ".task." in name:  # which changes in training
            parameter.data += 0.1
    models = [
        (upper(), 1), (upper(tiny_bert(seed=1, **NO_DROPOUT)), 2), (stack(1), 3), (again, 3), (stack(2), 4),
        (stack(1, scaling=3.0), 5), (stack(1, activation="relu"), 6), (stack(1, invertible="nice"), 7),
    ]  # fmt: skip
    for model, folders in models:
        expected = step(model, token_ids)
        prefix = FrozenPrefix(model, folder=tmp_path)
        assert_equal(step(model, token_ids), expected)
        assert len(list(tmp_path.iterdir())) == folders
        prefix.remove()


def test_what_is_stored(tmp_path):
    """Processes share a folder, without what a crash has left incomplete; a full store keeps what
    it has.
    """
    rows = {
        str(number): torch.randn(3, 4).to(dtype)
        for number, dtype in enumerate((torch.float32, torch.bfloat16))
    } | {"empty": torch.zeros(0, 4)}
    for folder in (None, tmp_path / "full"):
        store = Store(72, folder)
        store.put(rows)
        store.put({"more": torch.zeros(1, 4)})
        for each in (store, store if folder is None else Store(0, folder)):
            assert all(torch.equal(each.get(key), value) for key, value in rows.items())
            assert each.get("more") is None
    (file,) = folder.iterdir()
    file.rename(file.with_suffix(".part"))
    assert Store(72, folder).get("0") is None


def test_dropout_is_off_in_the_frozen_layers_only(token_ids):
    model = upper(tiny_bert(hidden_dropout_prob=0.3))
    hidden = []
    model.get_base_model().bert.encoder.layer[2].register_forward_pre_hook(
        lambda _, inputs: hidden.append(inputs[0])
    )
    prefix = FrozenPrefix(model, max_bytes=0)
    a, b = (model(input_ids=token_ids, attention_mask=MASK).logits for _ in range(2))
    assert torch.equal(hidden[-1], hidden[-2])
    assert not torch.allclose(a, b)
    assert all(module.training for module in model.modules())
    prefix.remove()
    assert not torch.allclose(*(model(input_ids=token_ids).logits for _ in range(2)))


def test_the_forward_methods_of_accelerate_are_restored(token_ids):
    """Accelerate overrides the `forward` of offloaded modules to fetch their weights."""
    base = tiny_bert(**NO_DROPOUT)
    expected = upper(base)(input_ids=token_ids).logits
    base = tiny_bert(**NO_DROPOUT)
    cpu_offload(base, execution_device=torch.device("cpu"))
    model = upper(base)
    prefix = FrozenPrefix(model)
    for _ in range(2):
        torch.testing.assert_close(
            model(input_ids=token_ids).logits, expected, atol=1e-6, rtol=1e-5
        )
    prefix.remove()
    torch.testing.assert_close(model(input_ids=token_ids).logits, expected, atol=1e-6, rtol=1e-5)


def t5():
    config = T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4, dropout_rate=0.0
    )
    return T5EncoderModel(config)


def longformer():
    return LongformerForSequenceClassification(LongformerConfig(**SMALL, attention_window=4))


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (t5, "T5Block passes on more than hidden states"),
        (longformer, r"LongformerLayer returns \(5, 8, 32\) for \(5, 7\) tokens"),
    ],
)
def test_layers_that_do_more_than_pass_on_hidden_states_are_refused(build, problem, token_ids):
    model = upper(build())
    model(input_ids=token_ids)
    FrozenPrefix(model)
    with pytest.raises(ValueError, match=problem):
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
    runs = runs_of(model)
    assert_equal(step(model, token_ids, bbox=pages[0] * MASK[..., None]), expected[0])
    assert not runs


def test_what_identifies_no_text_or_is_not_cached_is_refused(token_ids):
    model = upper()
    FrozenPrefix(model)
    for inputs, message in (
        (
            {"attention_mask": MASK[:, None, None].expand(5, 1, 7, 7)},
            r"attention_mask of the shape \(5, 1, 7, 7\)",
        ),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"output_hidden_states": True}, "output_hidden_states=True"),
        ({"input_ids": None, "inputs_embeds": torch.randn(5, 7, 32)}, "got no input_ids"),
        ({"adapter_names": ["default"] * 5}, "got adapter_names"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**{"input_ids": token_ids, **inputs})
    decoder = upper(gpt2(), (1,), task_type="CAUSAL_LM")
    FrozenPrefix(decoder)
    with pytest.raises(ValueError, match="got past_key_values of DynamicCache"):
        decoder(input_ids=torch.ones(2, 3, dtype=torch.long), past_key_values=DynamicCache())
    for options, message in (
        ({"layers": [0, 1]}, "layer 0 is"),
        ({"invertible": "nice"}, "embeddings are"),
    ):
        with pytest.raises(ValueError, match=f"{message}.*with layers_to_transform"):
            FrozenPrefix(upper(**options))


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
    model = get_peft_model(
        gpt2(), HoulsbyConfig(r=4, layers_to_transform=[1], task_type="CAUSAL_LM")
    )
    perturb(model.eval())
    with torch.no_grad():
        expected = model(**padded).logits[:, 3:]
        prefix = FrozenPrefix(model)
        assert not torch.allclose(model(**plain).logits, expected, atol=1e-3)
        for _ in range(2):
            torch.testing.assert_close(
                model(**padded).logits[:, 3:], expected, atol=1e-6, rtol=1e-5
            )
    prefix.remove()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant, token_ids):
    """Two forward passes precede each backward pass, as in contrastive losses."""
    model = upper()

    def gradients():
        model.zero_grad()
        pooled = [
            model.get_base_model().bert(each).last_hidden_state[:, 0]
            for each in (token_ids, token_ids[:, :4])
        ]
        (pooled[0] @ pooled[1].T).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    if use_reentrant:
        model.enable_input_require_grads()
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": use_reentrant})
    FrozenPrefix(model)
    for _ in range(2):
        assert_equal(gradients(), expected)


def test_the_encoder_can_be_called_alone_and_with_a_positional_mask(token_ids):
    model = upper()
    encoder = model.get_base_model().bert
    expected = [
        encoder(token_ids[:, :5], MASK[:, :5]).last_hidden_state,
        encoder(token_ids, MASK).last_hidden_state,
    ]
    FrozenPrefix(model)
    model(token_ids, MASK)
    found = [
        encoder(token_ids[:, :5], MASK[:, :5]).last_hidden_state,
        encoder(token_ids, MASK).last_hidden_state,
    ]
    for one, other, mask in zip(found, expected, (MASK[:, :5], MASK), strict=True):
        torch.testing.assert_close(one[mask.bool()], other[mask.bool()], atol=1e-6, rtol=1e-5)
