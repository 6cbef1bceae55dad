"""Errors and precision of averages; `test_contract.py` compares averages with ones computed by hand."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict

from houlsby_peft import HoulsbyConfig
from tiny_models import perturb, tiny_bert


def two_adapters(one=None, two=None, dtype=torch.float32, autocast=True):
    model = get_peft_model(
        tiny_bert().to(dtype), HoulsbyConfig(r=4, **(one or {})), "one", autocast_adapter_dtype=autocast
    )
    perturb(model, seed=1)
    model.add_adapter("two", HoulsbyConfig(**{"r": 4, **(two or {})}), autocast_adapter_dtype=autocast)
    model.set_adapter("two")
    perturb(model, seed=2)
    return model.eval()


@pytest.mark.parametrize(
    ("two", "difference"),
    [
        ({"r": 3}, r"houlsby_\w+|down_proj.weight has the shapes \(4, 32\) and \(3, 32\)"),
        ({"activation": "relu"}, "activation is 'gelu' and 'relu'"),
        ({"share_layers": 1}, r"output\.dropout down_proj\.weight has the shapes \(4, 32\) and None"),
        ({"train_layer_norm": False}, "LayerNorm weight has the shapes .* and None"),
        ({"layers_to_transform": [1]}, r"layer\.0\..* and None"),
        ({"modules_to_save": ["pooler"]}, r"pooler dense\.weight has the shapes None and \(32, 32\)"),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices is None and \[1\]"),
    ],
    ids=str,
)
def test_adapters_that_differ_are_refused(two, difference):
    model = two_adapters(two=two)
    before = set(model.state_dict())
    with pytest.raises(ValueError, match=rf"'one' and 'two' differ: .*{difference}.*same configuration"):
        model.add_weighted_adapter(["one", "two"], [0.5, 0.5], "mean")
    assert set(model.state_dict()) == before
    assert list(model.peft_config) == ["one", "two"]


def test_invalid_requests_are_refused():
    model = two_adapters()
    for adapters, weights, name, message in (
        (["one", "three"], [1.0, 1.0], "mean", "which are one, two; got .*three"),
        ([], [], "mean", r"got \[\]"),
        (["one", "two"], [1.0], "mean", "got 2 and 1 of them"),
        (["one", "two"], [1.0, 1.0], "two", "already is an adapter 'two'"),
    ):
        with pytest.raises(ValueError, match=message):
            model.add_weighted_adapter(adapters, weights, name)
    assert list(model.peft_config) == ["one", "two"]


@pytest.mark.parametrize("autocast", [True, False])
def test_an_average_keeps_the_dtype_and_is_summed_in_float32(autocast):
    model = two_adapters(dtype=torch.bfloat16, autocast=autocast)
    # In bfloat16 the sum of the first two terms would round the second one away.
    model.add_weighted_adapter(["one", "two", "one"], [1e4, 1.0, -1e4], "mean")
    two, mean = (get_peft_model_state_dict(model, adapter_name=name) for name in ("two", "mean"))
    for key in two:
        assert mean[key].dtype == two[key].dtype
        torch.testing.assert_close(mean[key].float(), two[key].float(), atol=2e-3, rtol=1e-2)


def test_an_average_of_loaded_adapters_saves_and_loads(tmp_path, token_ids):
    two_adapters({"share_layers": 3}, {"share_layers": 3}).save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(tiny_bert(), tmp_path / "one", adapter_name="one")
    model.load_adapter(tmp_path / "two", "two")
    model.add_weighted_adapter(["one", "two"], [0.3, 0.7], "mean")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.set_adapter("mean")
    expected = model(token_ids).logits
    model.save_pretrained(tmp_path, selected_adapters=["mean"])
    again = PeftModel.from_pretrained(tiny_bert(), tmp_path / "mean").eval()
    assert torch.equal(again(token_ids).logits, expected)
