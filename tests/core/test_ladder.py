"""Ladders: what they compute, beside which encoders, and that these stay as they are."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model
from torch.nn import functional as F

from architecture_cases import CASES, OF_LADDERS
from houlsby_peft import AdapterError, HoulsbyConfig, ablate
from model_states import assert_same_tensors
from tiny_models import adapted, perturb, perturb_adapter, tiny_bert


IDS = torch.randint(5, 50, (3, 8), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 5:] = 0
BATCH = {"input_ids": IDS * MASK, "attention_mask": MASK}


def encoder(name):
    """An encoder of three layers."""
    return CASES[name].model(**dict.fromkeys(("num_hidden_layers", "n_layers"), 3))


def with_ladder(base, **options):
    return adapted(base, kind="ladder", r=8, **options)


def climb(weights, states, mask, heads):
    """The branch of a ladder, written out from the weights of its file."""

    def linear(name, inputs):
        return inputs @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name, inputs):
        inputs = F.layer_norm(inputs, inputs.shape[-1:])
        return inputs * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    state = None
    for index, hidden in states.items():
        layer = f"layers.{index}"
        reading = linear(f"{layer}.read_proj", F.layer_norm(hidden, hidden.shape[-1:]))
        if state is not None:
            gate = weights[f"{layer}.gate"].sigmoid()
            reading = gate * state + (1 - gate) * reading
        state = reading
        parts = linear(f"{layer}.attention_in", norm(f"{layer}.attention_norm", state))
        outputs = []
        by_head = [part.chunk(heads, -1) for part in parts.chunk(3, -1)]
        for query, key, value in zip(*by_head, strict=True):
            scores = query @ key.mT / query.shape[-1] ** 0.5
            scores = scores.masked_fill(mask[:, None, :] == 0, -torch.inf)
            outputs.append(scores.softmax(-1) @ value)
        state = state + linear(f"{layer}.attention_out", torch.cat(outputs, -1))
        inner = F.gelu(linear(f"{layer}.down_proj", norm(f"{layer}.bottleneck_norm", state)))
        state = state + linear(f"{layer}.up_proj", inner)
    return linear("up_proj", state)


@torch.no_grad()
@pytest.mark.parametrize("read", [None, [0, 2]], ids=str)
@pytest.mark.parametrize("r", [8, 64, 66])
def test_the_last_hidden_states_by_hand(read, r):
    base = tiny_bert()
    sums = []
    last_norm = base.bert.encoder.layer[-1].output.LayerNorm
    hook = last_norm.register_forward_pre_hook(lambda _, args: sums.append(args[0]))
    states = base.bert(**BATCH, output_hidden_states=True).hidden_states
    hook.remove()
    config = HoulsbyConfig(kind="ladder", r=r, layers_to_transform=read)
    model = get_peft_model(copy.deepcopy(base), config)
    perturb(model)
    layer = model.base_model.model.bert.encoder.layer[-1].output
    weights = layer.dropout.houlsby_ladder["default"].state_dict()
    norm = layer.LayerNorm.houlsby_norm["default"]
    readings = {index: states[index] for index in read or range(4)}
    heads = {8: 1, 64: 2, 66: 2}[r]
    expected = norm(sums[0] + climb(weights, readings, MASK, heads))
    computed = model.eval().base_model.model.bert(**BATCH).last_hidden_state
    torch.testing.assert_close(computed[MASK == 1], expected[MASK == 1], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", OF_LADDERS)
def test_beside_every_encoder_nothing_below_the_end_changes(name):
    base = encoder(name)
    weights = copy.deepcopy(base.state_dict())
    with torch.no_grad():
        expected = base(**BATCH, output_hidden_states=True)
    model = with_ladder(base)
    with torch.no_grad():
        adapted = model(**BATCH, output_hidden_states=True)
        alone = model(input_ids=IDS[1:2, :5], attention_mask=MASK[1:2, :5]).last_hidden_state
    for hidden, hidden_of_base in zip(
        adapted.hidden_states[:-1], expected.hidden_states[:-1], strict=True
    ):
        assert torch.equal(hidden, hidden_of_base)
    assert not torch.allclose(adapted.last_hidden_state, expected.last_hidden_state)
    torch.testing.assert_close(alone, adapted.last_hidden_state[1:2, :5], atol=1e-5, rtol=1e-4)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(**BATCH).last_hidden_state, expected.last_hidden_state)
    unloaded = model.unload()
    assert torch.equal(unloaded(**BATCH).last_hidden_state, expected.last_hidden_state)
    assert_same_tensors(unloaded.state_dict(), weights)
    assert not any(module._forward_pre_hooks for module in unloaded.modules())


@pytest.mark.parametrize("name", OF_LADDERS)
def test_a_backward_pass_reaches_the_ladder_alone(name):
    model = with_ladder(encoder(name)).train()
    entering = []

    def record(_, args, kwargs):
        entering.extend(filter(torch.is_tensor, (*args, *kwargs.values())))

    stacks = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    [layers] = [stack for stack in stacks if len(stack) == 3]
    for layer in layers:
        layer.register_forward_pre_hook(record, with_kwargs=True)
    model(**BATCH).last_hidden_state.square().sum().backward()
    assert len(entering) >= 3
    assert not any(hidden.requires_grad for hidden in entering)
    for key, weight in model.named_parameters():
        assert (weight.grad is not None) is ("houlsby_" in key), key


@pytest.mark.parametrize(
    "head",
    [
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMaskedLM",
        "Model",
    ],
)
@torch.no_grad()
def test_every_head_sees_it_and_a_saved_one_is_loaded(head, tmp_path):
    config = tiny_bert(num_labels=2).config

    def base():
        torch.manual_seed(0)
        return getattr(transformers, f"Bert{head}")(config).eval()

    model = with_ladder(base())
    expected = model(**BATCH)[0]
    assert not torch.allclose(expected, base()(**BATCH)[0], atol=1e-3)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(), tmp_path, adapter_name="other")
    assert torch.equal(loaded.eval()(**BATCH)[0], expected)
    injected = base()
    injected.load_adapter(str(tmp_path))
    assert torch.equal(injected.eval()(**BATCH)[0], expected)
    assert torch.equal(copy.deepcopy(loaded)(**BATCH)[0], expected)


def several():
    """Three ladders of two widths, and two other adapters, all far from the base model."""
    model = get_peft_model(tiny_bert(), HoulsbyConfig(kind="ladder", r=8), "one")
    model.add_adapter("two", HoulsbyConfig(kind="ladder", r=8))
    model.add_adapter("upper", HoulsbyConfig(kind="ladder", r=6, layers_to_transform=[2, 3]))
    model.add_adapter("bottlenecks", HoulsbyConfig(r=4))
    model.add_adapter("parallel", HoulsbyConfig(r=4, kind="parallel"))
    for seed, name in enumerate(model.peft_config):
        perturb_adapter(model, name, seed)
    return model.eval()


ONE_EACH = [["one", "two", "parallel"], ["upper", "bottlenecks", "__base__"], ["two"]]
LADDERS = [["one", "two", "upper"], ["two"], ["upper", "one"]]


@torch.no_grad()
@pytest.mark.parametrize("texts", [1, 3])
@pytest.mark.parametrize("names", [ONE_EACH, LADDERS, [["one", "one"], ["one"], []]], ids=str)
def test_many_tasks_of_a_text_give_what_each_gives_alone(names, texts):
    model = several()
    expected = []
    for text, names_of_text in enumerate(names[:texts]):
        for name in names_of_text:
            row = {key: value[text : text + 1] for key, value in BATCH.items()}
            expected.append(model(**row, adapter_names=[name]).logits)
    batch = {key: value[:texts] for key, value in BATCH.items()}
    nested = model(**batch, adapter_names=names[:texts]).logits
    torch.testing.assert_close(nested, torch.cat(expected), atol=1e-5, rtol=1e-5)
    rows = [text for text, of_text in enumerate(names[:texts]) for _ in of_text]
    repeated = {key: value[rows] for key, value in BATCH.items()}
    flat = [name for names_of_text in names[:texts] for name in names_of_text]
    mixed = model(**repeated, adapter_names=flat).logits
    torch.testing.assert_close(mixed, torch.cat(expected), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_whole_encoder_runs_once_for_all_ladders_of_a_text():
    model = several()
    rows = {}

    def count(key, module):
        forward = module.forward
        module.forward = lambda hidden: rows.update({key: len(hidden)}) or forward(hidden)

    for index, layer in enumerate(model.base_model.model.bert.encoder.layer):
        count(f"{index} query", layer.attention.self.query)
        count(f"{index} inner", layer.intermediate.dense)
        count(f"{index} outer", layer.output.dense)
    model(**BATCH, adapter_names=LADDERS)
    assert len(rows) == 12
    assert set(rows.values()) == {3}
    model(**{key: value[:1] for key, value in BATCH.items()}, adapter_names=[["one", "two"]])
    assert set(rows.values()) == {1}


@torch.no_grad()
def test_ladders_come_and_go_beside_other_adapters():
    model = several()
    alone = {}
    for name in list(model.peft_config):
        model.set_adapter(name)
        alone[name] = model(**BATCH).logits
    model.delete_adapter("two")
    for name in ("one", "upper", "bottlenecks", "parallel"):
        model.set_adapter(name)
        assert torch.equal(model(**BATCH).logits, alone[name])
    model.add_adapter("two", HoulsbyConfig(kind="ladder", r=8))
    model.base_model.add_weighted_adapter(["one", "two"], [1.0, 0.0], "copy")
    model.set_adapter("copy")
    assert torch.allclose(model(**BATCH).logits, alone["one"], atol=1e-6)
    with ablate(model, [3], keep_norms=False):
        ablated = model(**BATCH).logits
    assert not torch.allclose(ablated, alone["one"])


def test_a_ladder_needs_an_encoder_that_it_can_read():
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 60}
    decoder = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    with pytest.raises(ValueError, match="needs one encoder"):
        get_peft_model(decoder, HoulsbyConfig(kind="ladder"))
    causal = tiny_bert(is_decoder=True)
    with pytest.raises(ValueError, match="does not see those after it"):
        get_peft_model(causal, HoulsbyConfig(kind="ladder"))
    from_repository = type(
        "TheirModel", (transformers.BertModel,), {"__module__": "transformers_modules.org.code"}
    )
    theirs = from_repository(tiny_bert().config)
    with pytest.raises(ValueError, match="without trust_remote_code"):
        get_peft_model(theirs, HoulsbyConfig(kind="ladder"))
    with pytest.raises(ValueError, match="chunk_size_feed_forward=0"):
        get_peft_model(tiny_bert(chunk_size_feed_forward=2), HoulsbyConfig(kind="ladder"))
    with pytest.raises(ValueError, match="is known for the model_types"):
        get_peft_model(CASES["albert"].model(), HoulsbyConfig(kind="ladder"))


def test_parts_of_the_model_are_refused():
    model = with_ladder(tiny_bert())
    layer = model.base_model.model.bert.encoder.layer[-1]
    with pytest.raises(AdapterError, match="which tokens are padding"):
        layer(torch.randn(2, 4, 32))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", OF_LADDERS)
def test_the_mask_is_heard_however_the_encoder_is_called(name, attention):
    """sentence-transformers calls `forward`, and gives it no mask if there is no padding."""
    if (name, attention) == ("splinter", "sdpa"):
        pytest.skip("transformers has no such attention for it")
    model = encoder(name)
    model.set_attn_implementation(attention)
    model.add_adapter(HoulsbyConfig(kind="ladder", r=8))
    perturb(model)
    model.eval()
    expected = model(**BATCH).last_hidden_state
    assert torch.equal(model.forward(**BATCH).last_hidden_state, expected)
    alone = model.forward(IDS[1:2, :5]).last_hidden_state
    torch.testing.assert_close(alone, expected[1:2, :5], atol=1e-5, rtol=1e-4)
    unpadded = model.forward(IDS).last_hidden_state
    assert not torch.allclose(unpadded[1, :5], expected[1, :5], atol=1e-3)


@torch.no_grad()
def test_a_mask_of_pairs_of_tokens():
    """Of each pair of tokens, whether the first one sees the second one, as in packed texts."""
    model = with_ladder(tiny_bert())
    pairs = MASK[:, None, None, :].bool().expand(3, 1, 8, 8)
    expected = model(**BATCH).logits
    added = torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
    for mask in (pairs, added):
        found = model(input_ids=BATCH["input_ids"], attention_mask=mask).logits
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("is_peft_model", [True, False])
def test_the_trainer_with_gradient_checkpointing(is_peft_model, tmp_path):
    """And without dropout in the encoder, as the trainer sets the training mode itself."""
    losses = []
    for is_enabled in (False, True):
        torch.manual_seed(0)
        model = tiny_bert(hidden_dropout_prob=0.5, classifier_dropout=0.0)
        config = HoulsbyConfig(kind="ladder", r=8)
        if is_peft_model:
            model = get_peft_model(model, config)
        else:
            model.add_adapter(config)
        rows = [{"input_ids": ids, "labels": torch.tensor(1)} for ids in IDS]
        arguments = transformers.TrainingArguments(
            tmp_path / str(is_enabled),
            max_steps=2,
            gradient_checkpointing=is_enabled,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        perturb(model)
        losses.append(transformers.Trainer(model, arguments, train_dataset=rows).train()[1])
        dropouts = [part for part in model.modules() if isinstance(part, torch.nn.Dropout)]
        assert sum(part.training for part in dropouts) == 4 + 1  # of the ladder and the head
        assert len(dropouts) > 10
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_beside_a_ladder_that_is_not_active(use_reentrant):
    """And one that was refused, deleted, or active together with another adapter."""
    sizes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = get_peft_model(tiny_bert(**sizes), HoulsbyConfig(r=4), "other")
    model.add_adapter("ladder", HoulsbyConfig(kind="ladder", r=8))
    perturb_adapter(model, "other", 1)
    batch = {**BATCH, "labels": torch.tensor([0, 1, 2])}

    def gradients():
        model.zero_grad()
        model.train()(**batch).loss.backward()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        return [weight.grad for weight in weights]

    expected = gradients()
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})
    torch.testing.assert_close(gradients(), expected)
    model.base_model.set_adapter(["other", "ladder"])
    with pytest.raises(AdapterError, match="cannot be active together"):
        model(**batch)
    model.set_adapter("other")
    model.delete_adapter("ladder")
    torch.testing.assert_close(gradients(), expected)


@torch.no_grad()
def test_the_norm_is_left_alone_if_it_is_not_to_be_trained():
    model = with_ladder(tiny_bert(), train_layer_norm=False)
    keys = [key for key in model.state_dict() if "houlsby" in key]
    assert keys
    assert all("houlsby_ladder" in key for key in keys)


@torch.no_grad()
def test_in_half_precision_the_ladder_stays_in_full():
    model = with_ladder(tiny_bert().bfloat16())
    ladder = model.base_model.model.bert.encoder.layer[-1].output.dropout.houlsby_ladder
    assert {weight.dtype for weight in ladder.parameters()} == {torch.float32}
    assert model(**BATCH).logits.isfinite().all()


@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert"])
def test_autocast_computes_the_same_in_half_precision(name):
    model = with_ladder(encoder(name))
    gradients = []
    for is_half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            loss = model(**BATCH).last_hidden_state.square().mean()
        loss.backward()
        weights = [weight for weight in model.parameters() if weight.grad is not None]
        gradients.append(torch.cat([weight.grad.flatten() for weight in weights]))
        model.zero_grad()
    difference = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert 0 < difference < 0.1


def test_the_encoder_has_no_dropout_while_ladders_train():
    model = with_ladder(tiny_bert(hidden_dropout_prob=0.5, classifier_dropout=0.0))
    expected = model(**BATCH).logits
    torch.testing.assert_close(model.train()(**BATCH).logits, expected)
    assert model.base_model.model.dropout.training, "the head has its own"
    model.add_adapter("other", HoulsbyConfig(r=4))

    def has_dropout():
        return not torch.allclose(model(**BATCH).logits, model(**BATCH).logits)

    # Whenever which one is activated.
    for name in ("other", "default", "other"):
        model.set_adapter(name)
        assert has_dropout() is (name == "other")
    model.set_adapter("default")
    model.add_adapter("second", HoulsbyConfig(kind="ladder", r=4))
    model.train().set_adapter("second")
    assert not has_dropout()
    model.set_adapter("other")
    model.delete_adapter("second")
    assert has_dropout()
    assert not torch.allclose(model.train()(**BATCH).logits, model.eval()(**BATCH).logits)
    model.set_adapter("default")
    assert not model.base_model.model.bert.training
    # The ladder's own dropout stays.
    dropped = with_ladder(tiny_bert(), dropout=0.5)
    dropped.base_model.model.dropout.p = 0.0
    assert not torch.allclose(dropped.train()(**BATCH).logits, dropped.eval()(**BATCH).logits)
