"""Errors and precision of averages; `test_contract.py` compares averages with ones computed by hand."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import BertForMaskedLM

from houlsby_peft import HoulsbyConfig, prune
from tiny_models import perturb, tiny_bert


def two_adapters(one=None, two=None, dtype=torch.float32, autocast=True):
    model = get_peft_model(
        tiny_bert().to(dtype), HoulsbyConfig(**{"r": 4, **(one or {})}), "one", autocast_adapter_dtype=autocast
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


@pytest.mark.parametrize("combination_type", ["linear", "cat"])
def test_heads_that_number_the_same_classes_differently_are_refused(combination_type):
    """The mean of the rows of two classes would be called one of them."""
    model = two_adapters({"id2label": {0: "bad", 1: "good"}}, {"id2label": {0: "good", 1: "bad"}})
    with pytest.raises(
        ValueError, match=r"differ: the classes are \{0: 'bad', 1: 'good'\} and \{0: 'good', 1: 'bad'\}"
    ):
        model.add_weighted_adapter(["one", "two"], [0.5, 0.5], "mean", combination_type)
    model.add_adapter("three", HoulsbyConfig(r=4, id2label={0: "no", 1: "yes"}))
    model.add_weighted_adapter(["one", "three"], [0.5, 0.5], "mean", combination_type)
    assert model.peft_config["mean"].labels == {0: "bad", 1: "good"}


@pytest.mark.parametrize(
    ("sharing", "two", "difference"),
    [
        (1, {"positions": ["attention"]}, r"at bert\.\S*\.0\.output.dropout is .*\.0\.attention\S* and of none"),
        (3, {"layers_to_transform": [0, 3]}, r"at bert\.\S*\.1\.attention\S* is .* and of none"),
    ],
)
def test_adapters_that_share_bottlenecks_at_other_places_are_refused(sharing, two, difference):
    options = {"share_layers": sharing, "train_layer_norm": False}
    model = two_adapters(options, options | two)
    with pytest.raises(ValueError, match=rf"'one' and 'two' differ: {difference}"):
        model.add_weighted_adapter(["one", "two"], [0.5, 0.5], "mean")


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


@pytest.mark.parametrize(
    ("combination_type", "weights", "wrong"),
    [
        ("linear", [1e6, 1], r"houlsby_\w+|LayerNorm"),
        ("cat", [1e6, 1], "up_proj"),
        ("cat", [1, -0.99999], "LayerNorm"),
    ],
)
def test_a_combination_that_half_precision_cannot_hold_is_refused(combination_type, weights, wrong):
    model = two_adapters(dtype=torch.float16, autocast=False)
    before = set(model.state_dict())
    with pytest.raises(
        ValueError, match=rf"({wrong})\S* must hold numbers up to 6.55e\+04, as it is used in torch.float16"
    ):
        model.add_weighted_adapter(["one", "two"], weights, "both", combination_type)
    assert set(model.state_dict()) == before


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


@pytest.mark.parametrize("combination_type", ["linear", "cat"])
def test_what_is_made_from_adapters_without_a_head_has_none(combination_type, tmp_path, token_ids):
    language_model = BertForMaskedLM(tiny_bert().config)
    language_model.bert = tiny_bert().bert
    model = get_peft_model(language_model, HoulsbyConfig(r=4))
    perturb(model)
    model.save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(tiny_bert(), tmp_path)
    expected = model(token_ids).logits
    model.add_weighted_adapter(["default"], [1.0], "mean", combination_type)
    prune(model, [0], "small")
    model.set_adapter("mean")
    assert torch.equal(model(token_ids).logits, expected)
    assert not any("modules_to_save" in key for key in model.state_dict())


def branch(model, key, name, hidden):
    bottleneck = model.base_model.model.get_submodule(key).bottleneck(name)
    return bottleneck(hidden) - hidden


@pytest.mark.parametrize(
    ("one", "two", "r"),
    [
        ({"r": 3}, {"r": 5}, 8),
        ({"r": 3, "share_layers": 1}, {"r": 5}, 8),
        ({"r": 3, "share_layers": 2}, {"r": 5, "share_layers": 2}, 8),
        ({"rank_pattern": {"layer.0.output.dropout": 2}}, {}, 8),
        ({"kind": "pfeiffer", "scaling": "learned"}, {"kind": "pfeiffer", "scaling": "learned", "r": 2}, 6),
        ({"kind": "parallel", "scaling": "channel"}, {"kind": "parallel", "scaling": "channel"}, 8),
        ({"scaling": 4.0}, {"scaling": 0.5}, 8),
    ],
    ids=str,
)
def test_joined_bottlenecks_add_the_weighted_sum_of_branches(one, two, r, tmp_path, token_ids):
    model = two_adapters(one, two).double()
    model.add_weighted_adapter(["one", "two"], [0.3, -0.7], "both", combination_type="cat")
    config, hidden = model.peft_config["both"], torch.randn(5, 32, dtype=torch.float64)
    assert config.r == r
    keys = [
        f"bert.encoder.layer.{layer}.{name}.dropout" for layer in range(4) for name in ("attention.output", "output")
    ]
    for key in keys if config.kind == "houlsby" else keys[1::2]:
        expected = 0.3 * branch(model, key, "one", hidden) - 0.7 * branch(model, key, "two", hidden)
        torch.testing.assert_close(branch(model, key, "both", hidden), expected, atol=1e-12, rtol=1e-12)
    norms = model.base_model.model.bert.encoder.layer[0].output.LayerNorm.houlsby_norm
    mean = (0.3 * norms["one"].weight - 0.7 * norms["two"].weight) / (0.3 - 0.7)
    torch.testing.assert_close(norms["both"].weight, mean, atol=1e-6, rtol=1e-6)
    model.float().set_adapter("both")
    model.save_pretrained(tmp_path, selected_adapters=["both"])
    again = PeftModel.from_pretrained(tiny_bert(), tmp_path / "both").eval()
    torch.testing.assert_close(again(token_ids).logits, model(token_ids).logits, atol=1e-6, rtol=1e-6)


def test_one_adapter_joined_with_itself_is_the_same_function(token_ids):
    model = two_adapters()
    model.add_weighted_adapter(["one", "one"], [0.25, 0.75], "both", "cat")
    model.set_adapter("one")
    expected = model(token_ids).logits
    model.set_adapter("both")
    torch.testing.assert_close(model(token_ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("one", "two", "weights", "message"),
    [
        ({}, {"activation": "relu"}, [1, 1], "activation is 'gelu' and 'relu'"),
        ({}, {"positions": ["attention"]}, [1, 1], r"only one has a bottleneck at bert\..*output\.dropout"),
        ({"positions": ["feed_forward"]}, {"kind": "pfeiffer"}, [1, 1], "kind is 'houlsby' and 'pfeiffer'"),
        ({"scaling": "learned"}, {}, [1, 1], "scaling is 'learned' and 1.0"),
        ({"invertible": "nice"}, {"invertible": "nice"}, [1, 1], "their invertible modules cannot"),
        (
            {"activation": "prelu"},
            {"activation": "prelu"},
            [1, 1],
            "if their activation has no weights",
        ),
        ({}, {"train_layer_norm": False}, [1, 1], "LayerNorm weight has the shapes .* and None"),
        ({}, {}, [1, -1], r"the coefficients must not sum to 0; got \[1, -1\]"),
        ({}, {}, [0.1 + 0.2, -0.3], "the coefficients must not sum to 0"),
        ({}, {}, [float("nan"), 1], "must be finite numbers"),
    ],
    ids=str,
)
def test_bottlenecks_that_cannot_be_joined_are_refused(one, two, weights, message):
    model = two_adapters(one, two)
    before = set(model.state_dict())
    with pytest.raises(ValueError, match=message):
        model.add_weighted_adapter(["one", "two"], weights, "both", combination_type="cat")
    with pytest.raises(ValueError, match="combination_type must be 'linear' or 'cat'; got 'svd'"):
        model.add_weighted_adapter(["one", "two"], [1, 1], "both", combination_type="svd")
    assert set(model.state_dict()) == before
    assert list(model.peft_config) == ["one", "two"]
