"""Places that cannot hold an adapter, and which modules `modules_to_save` means."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    FalconMambaConfig,
    FalconMambaModel,
)

from houlsby_peft import HoulsbyConfig, HoulsbyLayer, HoulsbyLayerNorm
from houlsby_peft.heads.head import HoulsbyHead
from model_states import state_of
from tiny_models import perturb, tiny_bert


@pytest.fixture
def without_fast_path():
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("places", [["linear2"], ["self_attn"]], ids=str)
def test_an_encoder_layer_that_would_not_call_the_place_is_refused(places):
    base = encoder()
    with pytest.raises(ValueError, match="fast path"):
        get_peft_model(base, HoulsbyConfig(r=2, target_modules=places))
    assert not any(isinstance(module, HoulsbyLayer) for module in base.modules())


@pytest.mark.parametrize("norms", [False, "all"])
@pytest.mark.parametrize("places", [["linear2"], ["self_attn"]], ids=str)
def test_an_encoder_layer_without_its_fast_path(places, norms, without_fast_path):
    config = HoulsbyConfig(r=2, target_modules=places, train_layer_norm=norms)
    model = get_peft_model(encoder(), config)
    perturb(model)
    x = torch.randn(2, 3, 8)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    training = model.train()(x, src_key_padding_mask=padding)
    with torch.no_grad():
        inference = model.eval()(x, src_key_padding_mask=padding)
        with model.disable_adapter():
            base = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(inference, training)
    assert not torch.allclose(inference, base, atol=1e-3)


def test_a_part_of_an_attention_that_is_never_called_is_refused():
    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
    with pytest.raises(ValueError, match="never calls"):
        get_peft_model(attention, HoulsbyConfig(r=2, target_modules=["out_proj"]))


def test_a_norm_and_a_bottleneck_cannot_be_at_one_place():
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=2), adapter_name="one")
    untouched = state_of(model)
    at_norms = HoulsbyConfig(r=2, target_modules=["output.LayerNorm"], train_layer_norm=False)
    with pytest.raises(ValueError, match="HoulsbyLayerNorm"):
        model.add_adapter("two", at_norms)
    assert state_of(model) == untouched


@pytest.mark.parametrize("is_whole_first", [True, False])
@pytest.mark.parametrize(
    ("whole", "adapted"),
    [
        ({"modules_to_save": ["layer.1"]}, {}),
        ({"modules_to_save": ["LayerNorm"]}, {}),
        ({"modules_to_save": ["LayerNorm"], "train_layer_norm": False}, {"invertible": "nice"}),
        ({"modules_to_save": ["bert.embeddings"]}, {"train_layer_norm": "all"}),
    ],
    ids=str,
)
def test_what_one_adapter_trains_as_a_whole_cannot_hold_places_of_another(
    whole, adapted, is_whole_first
):
    first, second = (whole, adapted) if is_whole_first else (adapted, whole)
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=2, **first), adapter_name="one")
    untouched = state_of(model)
    with pytest.raises(ValueError, match="as a whole"):
        model.add_adapter("two", HoulsbyConfig(r=2, **second))
    assert state_of(model) == untouched
    model.add_adapter("two", HoulsbyConfig(r=2, **first))


def test_modules_to_save_are_found_by_the_end_of_their_name():
    base = tiny_bert()
    get_peft_model(base, HoulsbyConfig(r=2, modules_to_save=["pooler", "query"]))
    wrapped = {name for name, module in base.named_modules() if isinstance(module, HoulsbyHead)}
    queries = {f"bert.encoder.layer.{index}.attention.self.query" for index in range(4)}
    assert wrapped == {"bert.pooler", "classifier"} | queries


@pytest.mark.parametrize(
    ("model_class", "options", "word"),
    [
        (BertForSequenceClassification, {"modules_to_save": ["embeddings"]}, "inside"),
        (BertForMaskedLM, {"modules_to_save": ["cls"], "invertible": "nice"}, "output embedding"),
        (BertForSequenceClassification, {"target_modules": ["query", "value"]}, "LoRA"),
        (BertForSequenceClassification, {"target_modules": "all-linear"}, "as LoRA needs it"),
    ],
)
def test_modules_that_cannot_be_trained_or_adapted_are_refused(model_class, options, word):
    with pytest.raises(ValueError, match=word):
        get_peft_model(model_class(tiny_bert().config), HoulsbyConfig(r=2, **options))


def test_modules_inside_a_sub_layer_are_adapted_with_a_warning(caplog):
    ends = ["attention.output.dense", "output.dropout"]
    get_peft_model(tiny_bert(), HoulsbyConfig(r=4, target_modules=ends))
    assert not caplog.records
    get_peft_model(tiny_bert(), HoulsbyConfig(r=4, target_modules=["intermediate.dense"]))
    assert len(caplog.records) == 1


@pytest.mark.filterwarnings("ignore:.*is falling back to its reference")
def test_norms_without_weights_are_left_alone():
    config = FalconMambaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4, intermediate_size=32
    )
    model = get_peft_model(
        FalconMambaModel(config), HoulsbyConfig(r=2, target_modules=["mixer.out_proj"])
    )
    assert sum(isinstance(module, HoulsbyLayer) for module in model.modules()) == 2


def test_a_layer_has_the_attributes_of_the_module_it_wraps():
    layer = HoulsbyLayerNorm(nn.LayerNorm(6, eps=0.25))
    assert layer.eps == 0.25
    assert HoulsbyLayer(nn.Linear(3, 4)).in_features == 3
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = layer.no_such_thing
    layer.base_layer._hf_hook = object()
    assert not hasattr(layer, "_hf_hook"), "accelerate would remove the hook from the wrong module"
