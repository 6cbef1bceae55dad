"""Every kind of adapter against its published formula, written out in float64 on the architectures that papers use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from houlsby_peft import Bottleneck, HoulsbyConfig, HoulsbyLayer
from houlsby_peft.bottleneck import InvertibleCoupling
from houlsby_peft.layer import HoulsbyEmbedding, HoulsbyOutputEmbedding, SkipConnection
from tiny_models import perturb, tiny_bert


IDS = torch.randint(3, 60, (6, 5), generator=torch.Generator().manual_seed(0))
EXACT = {"atol": 1e-10, "rtol": 1e-10}
WIDE = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
DISTIL = {"vocab_size": 60, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
GPT2 = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20}
BART = {
    "vocab_size": 60, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
}  # fmt: skip
T5 = {"vocab_size": 60, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 2}

# The feed-forward of a layer: its output h for the residual input x, and the norm of h + x in a post-LN layer.
SubLayer = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


def bert(layer: Any, x: torch.Tensor) -> SubLayer:
    return layer.output.dense(layer.intermediate(x)), layer.output.LayerNorm


def distilbert(layer: Any, x: torch.Tensor) -> SubLayer:
    return layer.ffn.lin2(layer.ffn.activation(layer.ffn.lin1(x))), layer.output_layer_norm


def bart(layer: Any, x: torch.Tensor) -> SubLayer:
    return layer.fc2.base_layer(layer.activation_fn(layer.fc1(x))), layer.final_layer_norm


def gpt2(layer: Any, x: torch.Tensor) -> SubLayer:
    return layer.mlp.c_proj(layer.mlp.act(layer.mlp.c_fc(layer.ln_2(x)))), nn.Identity()


def t5(layer: Any, x: torch.Tensor) -> SubLayer:
    return layer.layer[-1].DenseReluDense(layer.layer[-1].layer_norm(x)), nn.Identity()


# What builds each model, its lists of layers, the feed-forward, and the module whose output is the residual input x.
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str], Callable[[Any, torch.Tensor], SubLayer], str]] = {
    "bert": (lambda: BertForMaskedLM(BertConfig(**WIDE)), ["bert.encoder.layer"], bert, "attention.output.LayerNorm"),
    "xlm-roberta": (
        lambda: XLMRobertaForMaskedLM(XLMRobertaConfig(**WIDE)),
        ["roberta.encoder.layer"],
        bert,
        "attention.output.LayerNorm",
    ),
    "distilbert": (
        lambda: DistilBertForMaskedLM(DistilBertConfig(**DISTIL)),
        ["distilbert.transformer.layer"],
        distilbert,
        "sa_layer_norm",
    ),
    "bart": (
        lambda: BartForConditionalGeneration(BartConfig(**BART)),
        ["model.encoder.layers", "model.decoder.layers"],
        bart,
        "",
    ),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), ["transformer.h"], gpt2, ""),
    "t5": (lambda: T5ForConditionalGeneration(T5Config(**T5)), ["encoder.block", "decoder.block"], t5, ""),
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "own": {"scaling": 0.5},
    "inner": {"kind": "pfeiffer"},
    "second": {"kind": "pfeiffer", "scaling": "learned", "activation": "relu"},
    "beside": {"kind": "parallel", "scaling": 4.0, "activation": "relu"},
    "channels": {"kind": "parallel", "scaling": "channel"},
    "language": {"kind": "pfeiffer", "invertible": "nice"},
}


def base_of(name: str) -> nn.Module:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = MODELS[name][0]().double().eval()
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
        return model


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "decoder_input_ids": IDS.flip(0)} if name in ("bart", "t5") else {"input_ids": IDS}


def with_adapters(base: nn.Module, names: list[str], **changes: Any) -> PeftModel:
    options = {"r": 4, "train_layer_norm": False, "positions": ("feed_forward",), **changes}
    model: Any = None
    torch.manual_seed(0)
    for number, name in enumerate(names):
        config = HoulsbyConfig(**{**options, **ADAPTERS[name]})
        if model is None:
            model = get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
        model.set_adapter(name)
        perturb(model, seed=number)
    return model.eval()


def logits(model: nn.Module, name: str, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs_of(name), **kwargs).logits


def branch_of(layer: nn.Module, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function scaling * up(act(down(.))) of an adapter in a layer."""
    weights = {
        key.partition(f".{name}.")[2]: value
        for key, value in layer.named_parameters()
        if f"houlsby_adapter.{name}." in key
    }
    activation = F.relu if ADAPTERS[name].get("activation") == "relu" else F.gelu
    scaling = weights.get("scaling", ADAPTERS[name].get("scaling", 1.0))

    def branch(read: torch.Tensor) -> torch.Tensor:
        inner = activation(read @ weights["down_proj.weight"].T + weights["down_proj.bias"])
        return scaling * (inner @ weights["up_proj.weight"].T + weights["up_proj.bias"])

    return branch


def written_out(sub_layer: SubLayer, x: torch.Tensor, names: tuple[str, ...], f: Callable[[str], Any]) -> torch.Tensor:
    """The end of the layer, by the published formulas."""
    h, norm = sub_layer
    s = h + x
    match names:
        case ("own",):
            return norm(h + f("own")(h) + x)
        case ("inner",) | ("second",):
            return norm(s + f(names[0])(norm(s)))
        case ("beside",) | ("channels",):
            return norm(h + f(names[0])(x) + x)
        case ("inner", "second"):
            s1 = s + f("inner")(norm(s))
            return norm(s1 + f("second")(norm(s1)))
        case ("beside", "channels"):
            return norm(h + f("beside")(x) + f("channels")(x) + x)
        case ("own", "inner"):
            s1 = h + f("own")(h) + x
            return norm(s1 + f("inner")(norm(s1)))
        case ("inner", "own"):
            h1 = h + f("inner")(norm(s))
            return norm(h1 + f("own")(h1) + x)
    raise ValueError(names)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_kind_and_stack_is_the_published_formula(name):
    base = base_of(name)
    before = logits(base, name)
    _, stacks, sub_layer, before_x = MODELS[name]
    model = with_adapters(base, ["own", "inner", "second", "beside", "channels"])
    seen: dict[nn.Module, dict[str, torch.Tensor]] = {}
    for stack in stacks:
        for layer in base.get_submodule(stack):
            found = seen.setdefault(layer, {})
            if name == "gpt2":  # what enters the layer, and the attention's output
                layer.register_forward_pre_hook(lambda _, args, found=found: found.update(x=args[0]))
                layer.attn.register_forward_hook(lambda _, args, out, found=found: found.update(x=found["x"] + out[0]))
            elif name == "t5":
                layer.layer[-1].register_forward_pre_hook(lambda _, args, found=found: found.update(x=args[0]))
            else:
                norms = [before_x] if before_x else ["self_attn_layer_norm", "encoder_attn_layer_norm"]
                for norm in [each for each in norms if hasattr(layer, each) or "." in each]:
                    layer.get_submodule(norm).register_forward_hook(lambda _, args, x, found=found: found.update(x=x))
            layer.register_forward_hook(
                lambda _, args, out, found=found: found.update(out=out[0] if isinstance(out, tuple) else out)
            )
    single = [("own",), ("inner",), ("second",), ("beside",), ("channels",)]
    stacked = [("inner", "second"), ("beside", "channels"), ("own", "inner"), ("inner", "own")]
    for names in single + stacked:
        model.base_model.set_adapter(list(names))
        assert (logits(model, name) - before).abs().max() > 1e-3
        for layer, found in seen.items():
            x, out = found["x"], found["out"]
            expected = written_out(sub_layer(layer, x), x, names, lambda each, layer=layer: branch_of(layer, each))
            torch.testing.assert_close(out, expected, **EXACT)
    assert torch.equal(logits(model.unload(), name), before)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_every_kind_equals_its_rows_one_by_one(name):
    base = base_of(name)
    before = logits(base, name)
    model = with_adapters(base, list(ADAPTERS))
    alone = {"__base__": before}
    for each in ADAPTERS:
        model.set_adapter(each)
        alone[each] = logits(model, name)
    others = ["own", "inner", "beside"]
    for names in (
        [*ADAPTERS],
        [*ADAPTERS][::-1],
        others * 2,
        ["inner"] * 5 + ["beside"],
        ["__base__", "language"] * 3,
    ):
        expected = torch.stack([alone[each][row] for row, each in enumerate(names)])
        for _ in range(2):
            torch.testing.assert_close(logits(model, name, adapter_names=names), expected, **EXACT)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_invertible_module_of_the_first_adapter_only(name, tmp_path):
    """The coupling follows the embeddings and its inverse precedes the output embedding, for the first adapter."""
    base = base_of(name)
    before = logits(base, name)
    model = with_adapters(base, ["language", "own"])
    (start,) = (module for module in model.modules() if type(module) is HoulsbyEmbedding)
    (end,) = (module for module in model.modules() if type(module) is HoulsbyOutputEmbedding)
    seen: dict[str, torch.Tensor] = {}
    for label, layer in (("start", start), ("end", end)):
        layer.register_forward_hook(
            lambda _, args, out, label=label: seen.update({label: out, f"{label} in": args[0]})
        )
        layer.base_layer.register_forward_hook(
            lambda _, args, out, label=label: seen.update({f"{label} base": out, f"{label} base in": args[0]})
        )
    model.set_adapter("language")
    logits(model, name)
    weights = dict(start.houlsby_adapter["language"].named_parameters())
    x1, x2 = seen["start base"].split(8, -1)
    y1 = x1 + F.linear(
        F.gelu(F.linear(x2, weights["F.0.weight"], weights["F.0.bias"])), weights["F.2.weight"], weights["F.2.bias"]
    )
    y2 = x2 + F.linear(
        F.gelu(F.linear(y1, weights["G.0.weight"], weights["G.0.bias"])), weights["G.2.weight"], weights["G.2.bias"]
    )
    torch.testing.assert_close(seen["start"], torch.cat([y1, y2], -1), **EXACT)
    coupling = start.houlsby_adapter["language"]
    torch.testing.assert_close(coupling(seen["end base in"]), seen["end in"], **EXACT)
    assert not torch.allclose(seen["end base in"], seen["end in"])
    for names, is_coupled in ((["language", "own"], True), (["own", "language"], False), (["own"], False)):
        model.base_model.set_adapter(names)
        logits(model, name)
        assert torch.equal(seen["start"], seen["start base"]) is not is_coupled
        assert torch.equal(seen["end in"], seen["end base in"]) is not is_coupled
    model.set_adapter("language")
    expected = logits(model, name)
    model.save_pretrained(tmp_path, selected_adapters=["language"])
    restored = model.unload()
    assert torch.equal(logits(restored, name), before)
    loaded = PeftModel.from_pretrained(restored, tmp_path / "language", low_cpu_mem_usage=True).eval()
    assert torch.equal(logits(loaded, name), expected)


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_further_invertible_adapter_changes_nothing_in_what_trains(is_trained, is_loaded, tmp_path):
    config = {"r": 4, "invertible": "nice"}
    get_peft_model(base_of("bert"), HoulsbyConfig(**config)).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(base_of("bert"), tmp_path, adapter_name="language", is_trainable=is_trained)
    before = {name: weight.requires_grad for name, weight in model.named_parameters()}
    assert any(before.values()) is is_trained
    if is_loaded:
        model.load_adapter(tmp_path, "further", is_trainable=not is_trained)
    else:
        model.add_adapter("further", HoulsbyConfig(**config, inference_mode=is_trained))
    after = {name: weight.requires_grad for name, weight in model.named_parameters()}
    assert {name: after[name] for name in before} == before
    trained = {after[name] for name in after.keys() - before.keys()}
    assert trained == {is_loaded and not is_trained}  # PEFT trains what is loaded with is_trainable=True
    model.set_adapter("further")
    assert all(weight.requires_grad for name, weight in model.named_parameters() if ".further." in name)


@pytest.mark.parametrize("width", [16, 17])
def test_a_coupling_is_inverted_exactly(width):
    coupling = InvertibleCoupling(width, init_weights=False).double()
    hidden = torch.randn(3, 5, width, dtype=torch.float64)
    torch.testing.assert_close(coupling(coupling(hidden), inverse=True), hidden, **EXACT)
    one, rest = width // 2, width - width // 2
    sizes = [(rest // 2, rest), (one, rest // 2), (one // 2, one), (rest, one // 2)]
    assert [tuple(network[i].weight.shape) for network in (coupling.F, coupling.G) for i in (0, 2)] == sizes
    near = InvertibleCoupling(width)(hidden.float())
    assert 0 < (near - hidden).abs().max() < 0.05
    assert InvertibleCoupling(width)(hidden.bfloat16()).dtype == torch.bfloat16


def replica_of(module):
    """Return a copy as `nn.DataParallel` makes it: its weights are no parameters."""
    replica = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        setattr(replica, name, replica_of(child))
    for name, weight in module.named_parameters(recurse=False):
        setattr(replica, name, weight.clone())
    return replica


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{"kind": "pfeiffer"}, {"kind": "parallel"}, {"invertible": "nice"}], ids=str)
def test_the_copies_of_data_parallel_compute_the_same(options, dtype, token_ids):
    model = get_peft_model(tiny_bert().to(dtype), HoulsbyConfig(r=4, **options))
    perturb(model)
    assert torch.equal(replica_of(model)(token_ids).logits, model(token_ids).logits)


@pytest.mark.cuda
def test_a_copy_on_another_device_reads_through_the_norm_of_the_original():
    post_norm, hidden = nn.Sequential(nn.LayerNorm(4)), torch.randn(2, 4)
    skip = SkipConnection(post_norm, "0")
    skip.enter(hidden)
    expected = skip.read("pfeiffer", hidden, skip.leave())
    post_norm.to("cuda")
    skip.enter(hidden)
    torch.testing.assert_close(skip.read("pfeiffer", hidden, skip.leave()), expected)


def test_scaling_starts_at_one_and_is_counted():
    for scaling, size in (("learned", 1), ("channel", 16), (1.0, 0), (4, 0)):
        module = Bottleneck(16, 4, scaling=scaling)
        assert sum(weight.numel() for weight in module.parameters()) == 2 * 4 * 16 + 16 + 4 + size
        plain = Bottleneck(16, 4)
        plain.load_state_dict({key: value for key, value in module.state_dict().items() if key != "scaling"})
        hidden = torch.randn(3, 16)
        factor = 4 if scaling == 4 else 1
        torch.testing.assert_close(module(hidden) - hidden, factor * (plain(hidden) - hidden))


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.* is deprecated:FutureWarning")
def test_gradient_checkpointing_changes_no_gradient(name, use_reentrant):
    def gradients(checkpointed: bool) -> dict[str, torch.Tensor]:
        base = base_of(name)
        if checkpointed:
            base.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            base.enable_input_require_grads()
        model = with_adapters(base, ["inner", "beside"])
        model.base_model.set_adapter(["inner", "beside"])
        torch.manual_seed(0)
        model.train()(**inputs_of(name)).logits.square().mean().backward()
        assert not any(
            layer.skip._inputs for layer in model.modules() if isinstance(layer, HoulsbyLayer) and layer.skip
        )
        return {key: weight.grad for key, weight in model.named_parameters() if weight.requires_grad}

    plain, checkpointed = gradients(False), gradients(True)
    assert plain
    for key, gradient in plain.items():
        assert gradient.any(), key
        torch.testing.assert_close(checkpointed[key], gradient)


def test_threads_read_their_own_residual_inputs():
    model = with_adapters(base_of("bert"), ["inner", "beside"])
    model.base_model.set_adapter(["inner", "beside"])
    batches = [IDS[row : row + 1].repeat(row + 1, 1) for row in range(6)]
    with torch.no_grad():
        expected = [model(batch).logits for batch in batches]
    wrong: list[object] = []

    @torch.no_grad()
    def run(number: int) -> None:
        for _ in range(20):
            try:
                found = model(batches[number]).logits
                if not torch.equal(found, expected[number]):
                    wrong.append(number)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
def test_a_captured_graph_computes_the_same():
    base: Any = base_of("bert")
    base.bert.encoder.layer = base.bert.encoder.layer[:1]
    model = with_adapters(base, ["inner", "beside"])
    model.base_model.set_adapter(["inner", "beside"])
    expected = logits(model, "bert")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(compiled, "bert"), expected, **EXACT)


def test_an_adapter_of_another_kind_trains_what_it_reads_through():
    """The gradient reaches layers below through everything that a bottleneck reads."""
    model = with_adapters(base_of("bert"), ["inner"])
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    model(IDS).logits.square().sum().backward()
    for weight in weights[:2]:
        (position,) = (weight.grad.abs() == weight.grad.abs().max()).nonzero()[:1].tolist()
        values = []
        for step in (1e-6, -2e-6):
            with torch.no_grad():
                weight[tuple(position)] += step
                values.append(model(IDS).logits.square().sum())
        torch.testing.assert_close((values[0] - values[1]) / 2e-6, weight.grad[tuple(position)], rtol=1e-5, atol=1e-5)


def test_positions_depend_on_the_kind():
    assert HoulsbyConfig().positions == ("attention", "feed_forward")
    assert HoulsbyConfig(kind="pfeiffer").positions == HoulsbyConfig(kind="parallel").positions == ("feed_forward",)
    assert HoulsbyConfig(kind="pfeiffer", positions=("attention",)).positions == ("attention",)
