"""Other kinds of adapters, beyond what `test_contract.py` compares to published formulas."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn

from contract_models import ROWS
from houlsby_peft import Bottleneck, HoulsbyConfig
from houlsby_peft.method.coupling import InvertibleCoupling
from houlsby_peft.method.residual import SkipConnection
from tiny_models import perturb, tiny_bert


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_further_invertible_adapter_changes_nothing_in_what_trains(
    is_trained, is_loaded, tmp_path
):
    row = next(row for row in ROWS if row.ends)
    get_peft_model(row.base(), HoulsbyConfig(**row.first)).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(
        row.base(), tmp_path, adapter_name="language", is_trainable=is_trained
    )
    before = {name: weight.requires_grad for name, weight in model.named_parameters()}
    assert any(before.values()) is is_trained
    if is_loaded:
        model.load_adapter(tmp_path, "further", is_trainable=not is_trained)
    else:
        model.add_adapter("further", HoulsbyConfig(**row.first, inference_mode=is_trained))
    after = {name: weight.requires_grad for name, weight in model.named_parameters()}
    assert {name: after[name] for name in before} == before
    trained = {after[name] for name in after.keys() - before.keys()}
    assert trained == {
        is_loaded and not is_trained
    }  # PEFT trains what is loaded with is_trainable=True
    model.set_adapter("further")
    assert all(
        weight.requires_grad for name, weight in model.named_parameters() if ".further." in name
    )


@pytest.mark.parametrize("width", [16, 17])
def test_a_coupling_is_inverted_exactly(width):
    coupling = InvertibleCoupling(width, init_weights=False).double()
    hidden = torch.randn(3, 5, width, dtype=torch.float64)
    torch.testing.assert_close(
        coupling(coupling(hidden), inverse=True), hidden, atol=1e-10, rtol=1e-10
    )
    one, rest = width // 2, width - width // 2
    sizes = [(rest // 2, rest), (one, rest // 2), (one // 2, one), (rest, one // 2)]
    assert [
        tuple(network[i].weight.shape) for network in (coupling.F, coupling.G) for i in (0, 2)
    ] == sizes
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
@pytest.mark.parametrize(
    "options", [{"kind": "pfeiffer"}, {"kind": "parallel"}, {"invertible": "nice"}], ids=str
)
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
        plain.load_state_dict(
            {key: value for key, value in module.state_dict().items() if key != "scaling"}
        )
        hidden = torch.randn(3, 16)
        factor = 4 if scaling == 4 else 1
        torch.testing.assert_close(module(hidden) - hidden, factor * (plain(hidden) - hidden))


def test_gradients_pass_through_everything_that_a_bottleneck_reads(token_ids):
    model = get_peft_model(
        tiny_bert().double(), HoulsbyConfig(r=4, kind="pfeiffer", train_layer_norm=False)
    )
    perturb(model)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    model(token_ids).logits.square().sum().backward()
    for weight in weights[:2]:
        (position,) = (weight.grad.abs() == weight.grad.abs().max()).nonzero()[:1].tolist()
        values = []
        for step in (1e-6, -2e-6):
            with torch.no_grad():
                weight[tuple(position)] += step
                values.append(model(token_ids).logits.square().sum())
        torch.testing.assert_close(
            (values[0] - values[1]) / 2e-6, weight.grad[tuple(position)], rtol=1e-5, atol=1e-5
        )
