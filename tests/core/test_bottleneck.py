"""The bottleneck against the formula of the paper, written out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

from houlsby_peft import Bottleneck, HoulsbyConfig
from houlsby_peft.method.extensions import BOTTLENECKS


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 5, 16), (2, 3, 4, 16)])
def test_output_is_input_plus_up_of_activation_of_down(shape):
    module = Bottleneck(16, 4, init_weights=False).double()
    hidden = torch.randn(shape, dtype=torch.float64)
    down, up = module.down_proj, module.up_proj
    expected = hidden + gelu(hidden @ down.weight.T + down.bias) @ up.weight.T + up.bias
    torch.testing.assert_close(module(hidden), expected)


def test_initialization_is_a_normal_distribution_truncated_at_two_standard_deviations():
    module = Bottleneck(1024, 256, init_std=0.02)
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
    module = BOTTLENECKS[extension].from_config(config, 16, 4)
    assert sum(weight.numel() for weight in module.parameters()) == 2 * 4 * 16 + 16 + 4 + further
    assert 0 < (module(hidden) - hidden).abs().max() < 0.02
    module = BOTTLENECKS[extension].from_config(replace(config, init_std=0), 16, 4)
    assert torch.equal(module(hidden), hidden)


def test_dropout_acts_on_the_branch_only_and_only_in_training():
    module = Bottleneck(64, 8, dropout=0.5, init_weights=False)
    hidden = torch.randn(50, 64)
    branch = module.eval()(hidden) - hidden
    dropped = module.train()(hidden) - hidden
    passed = dropped.abs() > 1e-6
    assert 0.4 < passed.float().mean() < 0.6
    torch.testing.assert_close(dropped[passed], 2 * branch[passed], atol=1e-5, rtol=1e-4)
