"""`init_from`: bottlenecks and norms come from a saved adapter, the head does not."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

import houlsby_peft
from houlsby_peft import AdapterError, HoulsbyConfig
from tiny_models import perturb, tiny_bert


# What PEFT puts before the names of modules in a file.
FILE_PREFIX = "base_model.model."


def save_adapter(folder, base=None, **options):
    """Save an adapter whose bottlenecks, norms and head are far from their initial values. Return its tensors."""
    model = get_peft_model(base or tiny_bert(), HoulsbyConfig(r=4, **options))
    perturb(model)
    model.save_pretrained(folder)
    return load_file(folder / "adapter_model.safetensors")


def adapter_tensors(model, name):
    """Return the tensors of an adapter in a model by their names in a file, read from the modules themselves."""
    return {
        FILE_PREFIX + key.removeprefix(FILE_PREFIX).replace(f".{name}.", "."): tensor.clone()
        for key, tensor in model.state_dict().items()
        if ".houlsby_" in key and f".{name}." in key
    }


def head_tensors(model, name):
    return [tensor.clone() for key, tensor in model.state_dict().items() if f".modules_to_save.{name}." in key]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", ["default", "second"])
@pytest.mark.parametrize(
    ("options", "bottlenecks"),
    [({}, 8), ({"share_layers": 3}, 2), ({"train_layer_norm": "all", "layers_to_transform": [1, 3]}, 4)],
    ids=str,
)
def test_bottlenecks_and_norms_are_the_saved_ones_and_the_head_is_not(options, bottlenecks, name, tmp_path):
    saved = save_adapter(tmp_path, **options)
    expected = {key: tensor for key, tensor in saved.items() if ".houlsby_" in key}
    assert sum(key.endswith("down_proj.weight") for key in expected) == bottlenecks
    assert len(expected) < len(saved), "the file has no head"

    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, **options))
    if name != "default":
        model.add_adapter(name, HoulsbyConfig(r=4, **options))
    perturb(model, seed=2)
    head, others = head_tensors(model, name), adapter_tensors(model, "default")
    assert len(head) == 2
    trained = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    houlsby_peft.init_from(model, tmp_path, name)

    assert_equal(adapter_tensors(model, name), expected)
    assert all(map(torch.equal, head_tensors(model, name), head))
    assert [key for key, parameter in model.named_parameters() if parameter.requires_grad] == trained
    if name != "default":
        assert_equal(adapter_tensors(model, "default"), others)


def test_shared_bottlenecks_compute_what_the_saved_ones_do(tmp_path, token_ids):
    """All positions of a group use the bottleneck of its owner."""
    source = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, share_layers=3)).eval()
    perturb(source)
    source.save_pretrained(tmp_path)
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, share_layers=3)).eval()
    houlsby_peft.init_from(model, tmp_path)
    hidden = [each.get_base_model().bert(token_ids).last_hidden_state for each in (source, model)]
    assert torch.equal(*hidden)


def test_the_source_may_have_another_head_or_none(tmp_path):
    saved = save_adapter(tmp_path / "more_labels", tiny_bert(num_labels=5))
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4))
    houlsby_peft.init_from(model, str(tmp_path / "more_labels"))
    assert_equal(adapter_tensors(model, "default"), {key: t for key, t in saved.items() if ".houlsby_" in key})
    saved = save_adapter(tmp_path / "no_head", tiny_bert(seed=0).bert, modules_to_save=[])
    model = get_peft_model(tiny_bert(seed=0).bert, HoulsbyConfig(r=4, modules_to_save=[]))
    houlsby_peft.init_from(model, tmp_path / "no_head")
    assert_equal(adapter_tensors(model, "default"), saved)


@pytest.mark.parametrize(
    ("field", "there", "here"),
    [
        ("r", 4, 8),
        ("share_layers", 0, 3),
        ("train_layer_norm", True, False),
        ("activation", "gelu", "relu"),
        ("positions", ("attention", "feed_forward"), ("attention",)),
        ("layers_to_transform", None, [0, 2]),
        ("rank_pattern", {}, {"attention.output.dropout": 2}),
        ("target_modules", None, ["attention.output.dense"]),
    ],
)
def test_other_options_are_refused_with_the_field_and_both_values(field, there, here, tmp_path):
    save_adapter(tmp_path)
    model = get_peft_model(tiny_bert(), HoulsbyConfig(**{"r": 4, field: here}))
    before = adapter_tensors(model, "default")
    with pytest.raises(AdapterError) as error:
        houlsby_peft.init_from(model, tmp_path)
    assert f"has {field}={there!r}, adapter 'default' has {here!r}" in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert_equal(adapter_tensors(model, "default"), before)


@pytest.mark.filterwarnings("ignore:You have passed exclude_modules")
def test_what_is_excluded_may_differ_where_the_weights_fit(tmp_path):
    """A language model's adapter leaves out the norm of its head, which a classifier does not have."""
    save_adapter(tmp_path, exclude_modules=["cls.predictions.transform.LayerNorm"])
    saved = load_file(tmp_path / "adapter_model.safetensors")
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4))
    houlsby_peft.init_from(model, tmp_path)
    own = get_peft_model_state_dict(model)
    assert_equal(
        {key: value for key, value in own.items() if ".houlsby_" in key},
        {key: value for key, value in saved.items() if ".houlsby_" in key},
    )
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, exclude_modules=["encoder.layer.0.output.dropout"]))
    before = adapter_tensors(model, "default")
    with pytest.raises(ValueError, match="which this model and configuration have no place for"):
        houlsby_peft.init_from(model, tmp_path)
    assert_equal(adapter_tensors(model, "default"), before)


def test_shared_bottlenecks_at_other_places_are_refused(tmp_path):
    """The file holds the owner's weights alone, whichever places are left out."""
    save_adapter(tmp_path, share_layers=4, train_layer_norm=False, exclude_modules=["layer.1.output.dropout"])
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, share_layers=4, train_layer_norm=False))
    before = adapter_tensors(model, "default")
    with pytest.raises(AdapterError, match=r"has a bottleneck at bert\.encoder\.layer\.1\.output\.dropout\. Train"):
        houlsby_peft.init_from(model, tmp_path)
    assert_equal(adapter_tensors(model, "default"), before)


def test_the_name_of_the_list_of_layers_is_compared(tmp_path):
    save_adapter(tmp_path, layers_to_transform=[0])
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, layers_to_transform=[0], layers_pattern="layer"))
    with pytest.raises(AdapterError, match="has layers_pattern=None, adapter 'default' has 'layer'"):
        houlsby_peft.init_from(model, tmp_path)


@pytest.mark.parametrize(
    ("base", "difference"),
    [
        ({"seed": 1}, "other weights in embeddings.* and 5 more"),
        ({"num_hidden_layers": 5}, "num_hidden_layers 5, here 4; other weights in embeddings.*"),
    ],
)
def test_another_base_model_is_refused(base, difference, tmp_path):
    save_adapter(tmp_path, tiny_bert(**base))
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4))
    before = adapter_tensors(model, "default")
    with pytest.raises(AdapterError, match=rf"one of the same base model; .*{difference}\. Use that base model"):
        houlsby_peft.init_from(model, tmp_path)
    assert_equal(adapter_tensors(model, "default"), before)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=str)
def test_one_configuration_for_two_models_leaves_their_base_models_apart(order, tmp_path):
    save_adapter(tmp_path, tiny_bert(seed=0))
    config = HoulsbyConfig(r=4)
    models = {seed: get_peft_model(tiny_bert(seed=seed), config) for seed in order}
    houlsby_peft.init_from(models[0], tmp_path)
    with pytest.raises(AdapterError, match="one of the same base model"):
        houlsby_peft.init_from(models[1], tmp_path)


def test_an_adapter_of_another_method_is_refused(tmp_path):
    get_peft_model(tiny_bert(), LoraConfig(target_modules=["query"])).save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match=r"from a Houlsby adapter; .* is a LORA adapter"):
        houlsby_peft.init_from(get_peft_model(tiny_bert(), HoulsbyConfig(r=4)), tmp_path)


def test_an_unknown_adapter_is_refused(tmp_path):
    save_adapter(tmp_path)
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4))
    with pytest.raises(ValueError, match="which are default; got 'other'"):
        houlsby_peft.init_from(model, tmp_path, "other")


def test_a_file_without_some_of_the_weights_is_refused(tmp_path):
    """They would stay at their random initial values."""
    saved = save_adapter(tmp_path)
    lost = next(key for key in saved if ".houlsby_adapter." in key)
    save_file({key: tensor for key, tensor in saved.items() if key != lost}, tmp_path / "adapter_model.safetensors")
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4))
    before = adapter_tensors(model, "default")
    with pytest.raises(ValueError, match=r"lacks .*down_proj"):
        houlsby_peft.init_from(model, tmp_path)
    assert_equal(adapter_tensors(model, "default"), before)
