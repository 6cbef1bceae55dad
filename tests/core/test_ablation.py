"""Removing bottlenecks of some layers: temporarily (ablate) and in a new adapter (prune)."""

from __future__ import annotations

import re

import pytest
import torch
from peft import PeftModel, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file
from torch import nn

import houlsby_peft
from contract_models import ROWS, Row, output
from houlsby_peft import HoulsbyConfig, HoulsbyLayer, HoulsbyLayerNorm
from tiny_models import perturb, tiny_bert


TRANSFORMERS = [row for row in ROWS if row.name.startswith(("bert", "roberta", "gpt2", "llama", "t5"))]
LAYERS = {1}  # every model of the table adapts this layer


def adapted(row: Row) -> PeftModel:
    model = get_peft_model(row.base(), HoulsbyConfig(**row.first)).eval()
    perturb(model)
    return model


def bypassed_by_hand(model: PeftModel, layers: set[int], keep_norms: bool) -> PeftModel:
    """Remove the wrappers of some layers from the module tree and return the model."""
    wrappers = (HoulsbyLayer,) if keep_norms else (HoulsbyLayer, HoulsbyLayerNorm)
    for name, module in list(model.named_modules()):
        index = re.search(r"\.(\d+)\.", name)
        if isinstance(module, wrappers) and index and int(index[1]) in layers:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.base_layer)
    return model


@pytest.mark.parametrize("keep_norms", [True, False])
@pytest.mark.parametrize("row", TRANSFORMERS, ids=lambda row: row.name)
class TestEveryModel:
    def test_ablated_is_bypassed_by_hand(self, row, keep_norms):
        model = adapted(row)
        before = output(model, row)
        with houlsby_peft.ablate(model, LAYERS, keep_norms):
            ablated = output(model, row)
        assert torch.equal(output(model, row), before)
        assert not torch.allclose(ablated, before, atol=1e-3)
        assert torch.equal(ablated, output(bypassed_by_hand(model, LAYERS, keep_norms), row))

    def test_a_pruned_adapter_computes_what_an_ablated_one_does(self, row, keep_norms, tmp_path):
        model = adapted(row)
        with houlsby_peft.ablate(model, LAYERS, keep_norms):
            ablated = output(model, row)
        houlsby_peft.prune(model, LAYERS, "small", keep_norms=keep_norms)
        model.save_pretrained(tmp_path, selected_adapters=["small"])

        loaded = PeftModel.from_pretrained(row.base(), tmp_path / "small").eval()
        assert torch.equal(output(loaded, row), ablated)
        wrapped = [name for name, module in loaded.named_modules() if isinstance(module, HoulsbyLayer)]
        layers = [int(found[1]) for name in wrapped if (found := re.search(r"\.(\d+)\.", name))]
        assert layers
        assert not LAYERS & set(layers)


def forwards(model: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=token_ids).logits


@pytest.fixture
def model() -> PeftModel:
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=8)).eval()
    perturb(model)
    return model


class TestAblate:
    def test_without_any_layer_or_norm_the_base_model_and_the_trained_head_remain(self, model, token_ids):
        base = tiny_bert()
        base.classifier.load_state_dict(model.base_model.model.classifier.modules_to_save["default"].state_dict())
        with houlsby_peft.ablate(model, range(4), keep_norms=False):
            assert torch.equal(forwards(model, token_ids), forwards(base, token_ids))

    def test_the_model_is_restored_after_an_error(self, model, token_ids):
        before = forwards(model, token_ids)
        with pytest.raises(KeyError), houlsby_peft.ablate(model, [0]):
            raise KeyError
        assert torch.equal(forwards(model, token_ids), before)

    def test_blocks_nest(self, model, token_ids):
        with houlsby_peft.ablate(model, [0, 1]):
            both = forwards(model, token_ids)
        with houlsby_peft.ablate(model, [1]):
            one = forwards(model, token_ids)
            with houlsby_peft.ablate(model, [0, 1]):
                assert torch.equal(forwards(model, token_ids), both)
            assert torch.equal(forwards(model, token_ids), one)

    def test_disabled_adapters_stay_disabled(self, model, token_ids):
        with model.disable_adapter():
            before = forwards(model, token_ids)
            with houlsby_peft.ablate(model, [0], keep_norms=False):
                assert torch.equal(forwards(model, token_ids), before)
            assert torch.equal(forwards(model, token_ids), before)

    def test_weights_keep_their_gradients(self, model, token_ids):
        trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        with houlsby_peft.ablate(model, [0, 2], keep_norms=False):
            model(input_ids=token_ids).logits.sum().backward()
            assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trainable
        without = {int(name.split(".layer.")[1][0]) for name, p in model.named_parameters() if p.requires_grad
                   and ".layer." in name and p.grad is None}  # fmt: skip
        assert without == {0, 2}

    def test_the_layers_are_bypassed_for_all_adapters_and_in_a_mixed_batch(self, model, token_ids):
        model.add_adapter("other", HoulsbyConfig(r=4, layers_to_transform=[2]))
        model.set_adapter("other")
        perturb(model, seed=5)
        names = ["default", "other", "__base__", "other", "default"]
        with houlsby_peft.ablate(model, [2]), torch.no_grad():
            mixed = model(input_ids=token_ids, adapter_names=names).logits
            for name in ("default", "other"):
                model.set_adapter(name)
                rows = [row for row, other in enumerate(names) if other == name]
                torch.testing.assert_close(mixed[rows], forwards(model, token_ids)[rows], atol=1e-5, rtol=1e-5)

    def test_every_wrapper_of_the_model_is_accepted(self, model, token_ids):
        injected = inject_adapter_in_model(HoulsbyConfig(r=8), tiny_bert()).eval()
        injected.load_state_dict(model.base_model.model.state_dict())
        with houlsby_peft.ablate(model, [1]):
            expected = forwards(model, token_ids)
        for other in (model.base_model, model.get_base_model(), injected):
            with houlsby_peft.ablate(other, [1]):
                assert torch.equal(forwards(other, token_ids), expected)

    @pytest.mark.parametrize("layers", [[4], [-1], [0, 9], range(2, 6)])
    def test_a_layer_that_does_not_exist(self, model, layers):
        with (
            pytest.raises(ValueError, match=rf"here \[0, 1, 2, 3\]; got {re.escape(str(list(layers)))}"),
            houlsby_peft.ablate(model, layers),
        ):
            pass

    def test_a_layer_without_an_adapter(self):
        model = get_peft_model(tiny_bert(), HoulsbyConfig(r=8, layers_to_transform=[2, 3]))
        with pytest.raises(ValueError, match=r"here \[2, 3\]; got \[1\]"), houlsby_peft.ablate(model, [1]):
            pass

    def test_a_model_without_an_adapter(self):
        with pytest.raises(ValueError, match="here none"), houlsby_peft.ablate(tiny_bert(), [0]):
            pass


class TestPrune:
    @pytest.mark.parametrize(
        ("keep_norms", "norms"),
        [(False, 3 * 2), (True, -1)],  # the embeddings' norm is added
    )
    def test_the_file_has_no_bottlenecks_of_these_layers(self, model, tmp_path, keep_norms, norms):
        houlsby_peft.prune(model, range(3), "small", keep_norms=keep_norms)
        model.save_pretrained(tmp_path, selected_adapters=["default", "small"])
        whole, small = (
            sum(weight.numel() for weight in load_file(folder / "adapter_model.safetensors").values())
            for folder in (tmp_path, tmp_path / "small")
        )
        d, r = 32, 8
        assert whole - small == 3 * 2 * (2 * r * d + d + r) + norms * 2 * d

    def test_the_source_stays_active_and_unchanged(self, model, token_ids):
        before = forwards(model, token_ids)
        houlsby_peft.prune(model, [0], "small")
        assert model.active_adapters == ["default"]
        assert torch.equal(forwards(model, token_ids), before)

    def test_a_pruned_adapter_can_be_pruned_again(self, model, token_ids):
        with houlsby_peft.ablate(model, [0, 3]):
            expected = forwards(model, token_ids)
        houlsby_peft.prune(model, [3], "small")
        houlsby_peft.prune(model, [0], "smaller", source="small")
        model.set_adapter("smaller")
        assert torch.equal(forwards(model, token_ids), expected)

    def test_a_pruned_adapter_of_a_model_in_evaluation_mode_has_no_dropout(self, token_ids):
        model = get_peft_model(tiny_bert(), HoulsbyConfig(r=8, dropout=0.5)).eval()
        perturb(model)
        with houlsby_peft.ablate(model, [0]):
            expected = forwards(model, token_ids)
        houlsby_peft.prune(model, [0], "small")
        model.set_adapter("small")
        assert torch.equal(forwards(model, token_ids), expected)

    @pytest.mark.parametrize("autocast", [True, False])
    def test_on_a_base_in_half_precision_it_has_the_dtype_of_the_source(self, autocast, token_ids):
        base = tiny_bert().to(torch.bfloat16)
        model = get_peft_model(base, HoulsbyConfig(r=8), autocast_adapter_dtype=autocast).eval()
        perturb(model)
        with houlsby_peft.ablate(model, [1]):
            expected = forwards(model, token_ids)
        houlsby_peft.prune(model, [1], "small")
        dtypes = {weight.dtype for key, weight in model.state_dict().items() if ".small." in key}
        assert dtypes == {torch.float32 if autocast else torch.bfloat16}
        model.set_adapter("small")
        assert torch.equal(forwards(model, token_ids), expected)

    def test_the_trained_norm_of_the_embeddings_is_kept(self, token_ids):
        model = get_peft_model(tiny_bert(), HoulsbyConfig(r=8, train_layer_norm="all")).eval()
        perturb(model)
        with houlsby_peft.ablate(model, [1], keep_norms=False):
            expected = forwards(model, token_ids)
        houlsby_peft.prune(model, [1], "small", keep_norms=False)
        model.set_adapter("small")
        assert torch.equal(forwards(model, token_ids), expected)

    @pytest.mark.parametrize(
        ("layers", "adapter_name", "source", "message"),
        [
            ([0], "default", "default", "the new name 'default'"),
            ([0], "small", "unknown", "the source 'unknown'"),
            ([7], "small", "default", r"here \[0, 1, 2, 3\]; got \[7\]"),
            (range(4), "small", "default", "has none. Remove fewer layers"),
        ],
    )
    def test_what_cannot_be_pruned(self, model, layers, adapter_name, source, message):
        with pytest.raises(ValueError, match=message):
            houlsby_peft.prune(model, layers, adapter_name, source)
        assert set(model.peft_config) == {"default"}

    def test_nothing_is_left_of_a_pruned_adapter_that_cannot_be_filled(self, model):
        with torch.no_grad():
            model.get_base_model().classifier.modules_to_save["default"].bias.fill_(torch.nan)
        with pytest.raises(ValueError, match=r"classifier\.modules_to_save\.small\.bias"):
            houlsby_peft.prune(model, [0], "small")
        assert set(model.peft_config) == {"default"}
        assert not any(".small." in key for key in model.state_dict())
