"""The variants of the adapter, each against its formula written out, and their runs and figure."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from peft import get_peft_model
from torch.nn import functional as F

import houlsby_peft
from houlsby_peft import Bottleneck, HoulsbyConfig, HoulsbyLayer
from recipe_runs import run
from tiny_models import perturb, tiny_bert


pytest.importorskip(
    "matplotlib", reason="needs matplotlib, of the extra 'recipes', which is not installed"
)
import variants
from bottlenecks import VARIANTS, made_of
from common.edge import RecipeError


# The library cannot load these variants again, so the runs end with the last epoch.
NO_CHECKPOINTS = ("--save_strategy", "no", "--load_best_model_at_end", "false")


def linear(bottleneck: Bottleneck, name: str, hidden: torch.Tensor) -> torch.Tensor:
    weights = bottleneck.state_dict()
    return hidden @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def made(variant: str) -> Bottleneck:
    torch.manual_seed(0)
    bottleneck = VARIANTS[variant][1](8, 4, init_std=0.3)
    with torch.no_grad():
        for parameter in bottleneck.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return bottleneck


HIDDEN = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))


class TestFormulas:
    def test_layer_norm(self):
        bottleneck = made("layer_norm")
        inner = linear(bottleneck, "down_proj", HIDDEN)
        norm = bottleneck.state_dict()
        inner = (inner - inner.mean(-1, keepdim=True)) / (
            inner.var(-1, unbiased=False, keepdim=True) + 1e-5
        ).sqrt()
        inner = F.gelu(inner * norm["activation.0.weight"] + norm["activation.0.bias"])
        torch.testing.assert_close(
            bottleneck(HIDDEN), HIDDEN + linear(bottleneck, "up_proj", inner)
        )

    def test_batch_norm_is_over_all_tokens(self):
        bottleneck = made("batch_norm")
        inner = linear(bottleneck, "down_proj", HIDDEN)
        norm = bottleneck.state_dict()
        mean, variance = inner.mean((0, 1)), inner.var((0, 1), unbiased=False)
        inner = F.gelu(
            (inner - mean) / (variance + 1e-5).sqrt() * norm["activation.0.weight"]
            + norm["activation.0.bias"]
        )
        torch.testing.assert_close(
            bottleneck(HIDDEN), HIDDEN + linear(bottleneck, "up_proj", inner)
        )
        running = bottleneck.eval().state_dict()["activation.0.running_mean"]
        torch.testing.assert_close(running, 0.1 * mean)

    def test_two_layers(self):
        bottleneck = made("two_layers")
        inner = F.gelu(linear(bottleneck, "down_proj", HIDDEN))
        inner = F.gelu(linear(bottleneck, "activation.1", inner))
        torch.testing.assert_close(
            bottleneck(HIDDEN), HIDDEN + linear(bottleneck, "up_proj", inner)
        )

    @pytest.mark.parametrize("share_layers", [0, 2])
    def test_gated_and_parallel_to_both_sub_layers(self, token_ids, share_layers):
        """The model against its base model with hooks on what each sub-layer ends in."""
        changes, bottleneck = VARIANTS["parallel_gated"]
        config = HoulsbyConfig(r=4, train_layer_norm=False, share_layers=share_layers, **changes)
        with made_of(bottleneck):
            model = get_peft_model(tiny_bert(), config).eval()
        perturb(model)
        base = tiny_bert()
        base.classifier.load_state_dict(
            model.base_model.model.classifier.modules_to_save["default"].state_dict()
        )
        for index, layer in enumerate(base.bert.encoder.layer):
            for end in ("attention.output", "output"):
                wrapped = model.get_submodule(
                    f"base_model.model.bert.encoder.layer.{index}.{end}.dropout"
                )
                bottleneck = wrapped.bottleneck("default")

                def adapt(module, inputs, output, bottleneck=bottleneck):
                    branch = linear(
                        bottleneck, "up_proj", F.gelu(linear(bottleneck, "down_proj", inputs[1]))
                    )
                    return module.LayerNorm(module.dense(inputs[0]) * (1 + branch) + inputs[1])

                layer.get_submodule(end).register_forward_hook(adapt)
        with torch.no_grad():
            torch.testing.assert_close(
                model(input_ids=token_ids).logits, base(input_ids=token_ids).logits
            )
            assert not torch.allclose(
                model(input_ids=token_ids).logits, tiny_bert()(input_ids=token_ids).logits
            )

    def test_all_new_weights_train(self):
        for name, (changes, bottleneck) in VARIANTS.items():
            with made_of(bottleneck):
                model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, **changes))
            model(input_ids=torch.arange(5)[None]).logits.square().sum().backward()
            idle = [
                key for key, p in model.named_parameters() if "houlsby" in key and (p.grad is None)
            ]
            assert not idle, name


# Its counter of batches is no weight of an adapter, so that others cannot load what is saved.
@pytest.mark.filterwarnings("ignore:The adapter is saved, but its card is not written:UserWarning")
@pytest.mark.parametrize("variant", ["batch_norm", "attention_only", "parallel_gated"])
def test_a_run_of_the_recipe(variant, encoder, glue_data, tmp_path):
    flags = ["--task", "cola", "--data_dir", glue_data, "--model_name", encoder, "--output_dir", tmp_path, "--r", 4,
             "--max_steps", 2, "--eval_strategy", "steps", "--eval_steps", 2, "--report_to", "none",
             *NO_CHECKPOINTS]  # fmt: skip
    run(variants, "--variant", variant, *flags)
    results = json.loads((tmp_path / "results.json").read_text())
    assert -1 <= results["best_score"] <= 1
    assert results["arguments"]["variant"] == variant
    with (
        nullcontext()
        if variant == "attention_only"
        else pytest.raises(ValueError, match="must fit")
    ):
        houlsby_peft.load(tmp_path / "adapter")
    with made_of(VARIANTS[variant][1]):
        model = houlsby_peft.load(tmp_path / "adapter").model
    layers = [
        module
        for module in model.modules()
        if isinstance(module, HoulsbyLayer) and module.bottleneck("default")
    ]
    assert len(layers) == (4 if variant == "attention_only" else 8)
    with pytest.raises(RecipeError, match=f"variant was '{variant}', is 'tanh'"):
        run(variants, "--variant", "tanh", *flags)
