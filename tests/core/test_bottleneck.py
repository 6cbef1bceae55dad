"""The bottleneck against the formula of the paper, written out, and its kinds, beyond what
`test_contract.py` compares with published formulas.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from peft import PeftModel, get_peft_model
from scipy import stats
from torch import nn

from contract_models import ROWS
from houlsby_peft import Bottleneck, HoulsbyConfig
from houlsby_peft.method.coupling import InvertibleCoupling
from houlsby_peft.method.extensions import BOTTLENECKS
from houlsby_peft.method.residual import SkipConnection
from houlsby_peft.method.tuner_layer import ModelState
from model_states import trained_names
from tiny_models import perturb, tiny_bert


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 5, 16), (2, 3, 4, 16)])
def test_output_is_input_plus_up_of_activation_of_down(shape):
    module = Bottleneck(HoulsbyConfig(r=4, init_weights=False), 16).double()
    hidden = torch.randn(shape, dtype=torch.float64)
    down, up = module.down_proj, module.up_proj
    expected = hidden + gelu(hidden @ down.weight.T + down.bias) @ up.weight.T + up.bias
    torch.testing.assert_close(module(hidden), expected)


def test_initialization_is_a_normal_distribution_truncated_at_two_standard_deviations():
    module = Bottleneck(HoulsbyConfig(r=256, init_std=0.02), 1024)
    for projection in (module.down_proj, module.up_proj):
        drawn = projection.weight.detach().flatten().double()
        assert drawn.abs().max() <= 2 * 0.02 + 1e-9
        expected = stats.truncnorm(-2, 2, scale=0.02)
        assert drawn.std().item() == pytest.approx(expected.std(), rel=0.02)
        assert stats.kstest(drawn[:5000].numpy(), expected.cdf).pvalue > 1e-4
        assert not projection.bias.any()


@pytest.mark.parametrize(
    ("extension", "further"), [("norm", 2 * 16), ("deep", 4 * 4 + 4), ("gated", 16 + 1)]
)
def test_an_extension_adds_few_weights_and_starts_near_the_identity(extension, further):
    config, hidden = HoulsbyConfig(extension=extension), torch.randn(50, 16)
    module = BOTTLENECKS[extension](config, 16, 4)
    assert sum(weight.numel() for weight in module.parameters()) == 2 * 4 * 16 + 16 + 4 + further
    assert 0 < (module(hidden) - hidden).abs().max() < 0.02
    module = BOTTLENECKS[extension](replace(config, init_std=0), 16, 4)
    assert torch.equal(module(hidden), hidden)


def test_dropout_acts_on_the_branch_only_and_only_in_training():
    module = Bottleneck(HoulsbyConfig(r=8, dropout=0.5, init_weights=False), 64)
    hidden = torch.randn(50, 64)
    branch = module.eval()(hidden) - hidden
    dropped = module.train()(hidden) - hidden
    passed = dropped.abs() > 1e-6
    assert 0.4 < passed.float().mean() < 0.6
    torch.testing.assert_close(dropped[passed], 2 * branch[passed], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_further_invertible_adapter_changes_nothing_in_what_trains(
    is_trained, is_loaded, tmp_path
):
    [row, *_] = [row for row in ROWS if row.ends]
    get_peft_model(row.base(), HoulsbyConfig(**row.first)).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(
        row.base(), tmp_path, adapter_name="language", is_trainable=is_trained
    )
    names = trained_names(model)
    assert bool(names) is is_trained
    if is_loaded:
        model.load_adapter(tmp_path, "further", is_trainable=not is_trained)
    else:
        model.add_adapter("further", HoulsbyConfig(**row.first, inference_mode=is_trained))
    further = {name for name, _ in model.named_parameters() if ".further." in name}
    # PEFT trains what is loaded with is_trainable=True.
    trains_further = is_loaded and not is_trained
    assert trained_names(model) == names | (further if trains_further else set())
    model.set_adapter("further")
    assert trained_names(model) == further


@pytest.mark.parametrize("width", [16, 17])
def test_a_coupling_is_inverted_exactly(width):
    coupling = InvertibleCoupling(HoulsbyConfig(init_weights=False), width).double()
    hidden = torch.randn(3, 5, width, dtype=torch.float64)
    torch.testing.assert_close(
        coupling(coupling(hidden), inverse=True), hidden, atol=1e-10, rtol=1e-10
    )
    half = width // 2
    for network, inputs in ((coupling.F, width - half), (coupling.G, half)):
        assert network[0].weight.shape == (inputs // 2, inputs)
        assert network[2].weight.shape == (width - inputs, inputs // 2)
    near = InvertibleCoupling(HoulsbyConfig(), width)(hidden.float())
    assert 0 < (near - hidden).abs().max() < 0.05
    assert InvertibleCoupling(HoulsbyConfig(), width)(hidden.bfloat16()).dtype == torch.bfloat16


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
    skip = SkipConnection(ModelState(), post_norm, "0")
    skip.enter(hidden)
    expected = skip.read("pfeiffer", hidden, skip.leave())
    post_norm.to("cuda")
    skip.enter(hidden)
    torch.testing.assert_close(skip.read("pfeiffer", hidden, skip.leave()), expected)


@pytest.mark.parametrize(("scaling", "size"), [("learned", 1), ("channel", 16), (4, 0)])
def test_scaling_starts_at_one_and_is_counted(scaling, size):
    module = Bottleneck(HoulsbyConfig(r=4, scaling=scaling), 16)
    assert sum(weight.numel() for weight in module.parameters()) == 2 * 4 * 16 + 16 + 4 + size
    assert size == 0 or (module.scaling == 1).all()


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
