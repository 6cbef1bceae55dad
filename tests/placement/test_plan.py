"""Places that cannot hold an adapter, and which modules `modules_to_save` means."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import BertForMaskedLM, FalconMambaConfig, FalconMambaModel

from houlsby_peft import HoulsbyConfig, HoulsbyLayer, HoulsbyLayerNorm
from houlsby_peft.heads.head import HoulsbyHead
from tiny_models import perturb, tiny_bert


BERT_ENDS = ("attention.output.dropout", "output.dropout")


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
    with pytest.raises(
        ValueError, match=r"in evaluation, the fast path .*set_fastpath_enabled\(False\)"
    ):
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
    with pytest.raises(
        ValueError, match=r"'attention\.out_proj': .* never calls its parts\. Name .*: 'attention'"
    ):
        get_peft_model(attention, HoulsbyConfig(r=2, target_modules=["out_proj"]))


def test_a_norm_and_a_bottleneck_cannot_be_at_one_place():
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=2), adapter_name="one")
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=r"is a HoulsbyLayerNorm for another adapter"):
        model.add_adapter(
            "two", HoulsbyConfig(r=2, target_modules=["output.LayerNorm"], train_layer_norm=False)
        )
    assert list(model.state_dict()) == before
    assert list(model.peft_config) == ["one"]


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
    before = list(model.state_dict())
    with pytest.raises(
        ValueError, match=r"trains as a whole cannot hold what another .* same modules_to_save"
    ):
        model.add_adapter("two", HoulsbyConfig(r=2, **second))
    assert list(model.state_dict()) == before
    assert list(model.peft_config) == ["one"]
    model.add_adapter("two", HoulsbyConfig(r=2, **first))


def test_modules_to_save_are_found_by_the_end_of_their_name():
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=2, modules_to_save=["pooler", "query"]))
    wrapped = {
        name
        for name, module in model.base_model.model.named_modules()
        if isinstance(module, HoulsbyHead)
    }
    assert wrapped == {"bert.pooler", "classifier"} | {
        f"bert.encoder.layer.{i}.attention.self.query" for i in range(4)
    }
    with pytest.raises(
        ValueError, match=r"matches 'bert.embeddings.word_embeddings', which is inside 'bert"
    ):
        get_peft_model(tiny_bert(), HoulsbyConfig(r=2, modules_to_save=["embeddings"]))
    with pytest.raises(
        ValueError, match=r"invertible needs the output embedding, 'cls.predictions.decoder'"
    ):
        get_peft_model(
            BertForMaskedLM(tiny_bert().config),
            HoulsbyConfig(invertible="nice", modules_to_save=["cls"]),
        )


def test_modules_inside_a_sub_layer_are_adapted_with_a_warning(caplog):
    for names, warnings in (
        (["intermediate.dense"], 1),
        (["attention.output.dense", "output.dropout"], 0),
    ):
        caplog.clear()
        get_peft_model(tiny_bert(), HoulsbyConfig(r=4, target_modules=names))
        assert len(caplog.records) == warnings, names
    with pytest.raises(ValueError, match="as LoRA needs it"):
        get_peft_model(tiny_bert(), HoulsbyConfig(r=4, target_modules=["query", "value"]))


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
