"""Architectures that are not in the table: the inference against the table, on transformers made
at home, and its refusals.
"""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from torch import nn

from architecture_cases import CASES
from home_made import HomeMade, Layer
from houlsby_peft import HoulsbyConfig, HoulsbyLayer
from houlsby_peft.placement.places import find_places
from houlsby_peft.placement.table import ARCHITECTURES
from tiny_models import perturb


EVERY_POSITION = ("attention", "feed_forward", "cross_attention")


class TorchDecoder(nn.Module):
    """PyTorch's own decoder layers."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 2, 24, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, num_layers=2)

    def forward(self, hidden, memory):
        return self.decoder(hidden, memory)


@pytest.fixture
def no_table(monkeypatch):
    monkeypatch.setattr("houlsby_peft.placement.view.ARCHITECTURES", {})


# Plain layers where the inference does not find the table's ends, and others where it does.
NOT_INFERRED = {"dinov2", "gemma4_vision", "inkling_text", "timesformer:places", "wavlm"}
INFERRED = {"blip_2_qformer", "ibert"}
ONE_OF_EACH = {
    ARCHITECTURES[name.partition(":")[0]]: name
    for name, case in CASES.items()
    if name in INFERRED or (case.layer is None and name not in NOT_INFERRED)
}


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_the_same_places_as_in_the_table(name, no_table):
    case = CASES[name]
    base = case.model()
    expected = {}
    for layer, _, ends in case.layers(base):
        for position, end in ends.items():
            expected[f"{layer}.{end}"] = position
    places = find_places(base, HoulsbyConfig(positions=EVERY_POSITION))
    assert {key: place.position for key, place in places.items() if not place.is_norm} == expected
    assert sum(place.is_norm for place in places.values()) == case.norms


def bottlenecks_of(model):
    """The names of the modules that have one."""
    return [name for name, module in model.named_modules() if isinstance(module, HoulsbyLayer)]


def assert_adapts(model, *inputs):
    """The model, with trained bottlenecks, computes something else than without."""
    perturb(model)
    with model.disable_adapter():
        expected = model(*inputs)
    assert not torch.allclose(model(*inputs), expected, atol=1e-2)


def test_a_transformer_made_at_home_trains():
    base, ids = HomeMade(), torch.randint(0, 50, (3, 5))
    model = get_peft_model(base.eval(), HoulsbyConfig(r=4, modules_to_save=["classifier"]))
    assert bottlenecks_of(base) == [f"blocks.{index}.{end}" for index in range(3) for end in ENDS]
    assert_adapts(model, ids)
    model(ids).sum().backward()
    assert all(weight.grad.any() for weight in model.parameters() if weight.requires_grad)


def test_what_cannot_be_told_apart_is_an_error_with_its_remedy():
    with pytest.raises(ValueError, match=r"net0\.2, net1\.2.* target_modules"):
        get_peft_model(HomeMade(feed_forwards=2), HoulsbyConfig(r=4))
    for options, number in (
        ({"target_modules": ["attention.to_out.0", "net0.2", "net1.2"]}, 9),
        ({"positions": ("attention",)}, 3),
    ):
        model = get_peft_model(HomeMade(feed_forwards=2), HoulsbyConfig(r=4, **options))
        assert len(bottlenecks_of(model)) == number


def test_a_model_without_layers_is_an_error():
    with pytest.raises(ValueError, match="target_modules"):
        get_peft_model(nn.Sequential(nn.Linear(4, 4)), HoulsbyConfig(r=4))


class Hybrid(nn.Module):
    """Layers of which only the second has attention; the others mix in another way."""

    def __init__(self, mixer="mixer", feed_forward="net0"):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        for block in (self.blocks[0], self.blocks[2]):
            del block.attention
            mix = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            block.add_module(mixer, mix)
            block.add_module(feed_forward, block._modules.pop("net0"))


def places_of(model, **options):
    places = find_places(model, HoulsbyConfig(train_layer_norm=False, **options))
    return {key: place.position for key, place in places.items()}


ENDS = {"attention.to_out.0": "attention", "net0.2": "feed_forward"}


def test_a_hybrid_gets_the_feed_forwards_of_all_layers_and_the_attention_that_it_has():
    assert places_of(Hybrid()) == {
        "blocks.0.net0.2": "feed_forward",
        "blocks.1.attention.to_out.0": "attention",
        "blocks.1.net0.2": "feed_forward",
        "blocks.2.net0.2": "feed_forward",
    }


@pytest.mark.parametrize(
    "options", [{"positions": ("attention",)}, {"exclude_modules": ["net0"]}], ids=str
)
def test_a_hybrid_of_which_only_the_attention_is_adapted(options):
    assert places_of(Hybrid(), **options) == {"blocks.1.attention.to_out.0": "attention"}


def test_a_hybrid_whose_feed_forwards_have_other_names_is_refused():
    with pytest.raises(ValueError, match=r"blocks\.0 .* target_modules"):
        find_places(Hybrid(feed_forward="other"), HoulsbyConfig())
    places = places_of(Hybrid(feed_forward="other"), exclude_modules=["blocks.0", "blocks.2"])
    assert [*places] == ["blocks.1.attention.to_out.0", "blocks.1.net0.2"]


def test_one_layer_that_is_used_several_times_is_adapted_once():
    base = HomeMade().eval()
    base.blocks = nn.Sequential(*[base.blocks[0]] * 3)
    model = get_peft_model(base, HoulsbyConfig(r=4))
    assert bottlenecks_of(base) == [f"blocks.0.{end}" for end in ENDS]
    assert_adapts(model, torch.randint(0, 50, (3, 5)))


def test_a_module_that_two_layers_hold_is_refused():
    base = HomeMade()
    base.blocks[2].attention.to_out[0] = base.blocks[1].attention.to_out[0]
    with pytest.raises(ValueError, match=r"blocks\.1\..* also 'blocks\.2"):
        get_peft_model(base, HoulsbyConfig(r=4, target_modules=["attention.to_out.0"]))


def two_towers():
    return nn.ModuleDict({"text": CASES["bert"].model(), "image": HomeMade(feed_forwards=2)})


def test_a_list_that_cannot_be_inferred_is_named_with_the_option_that_leaves_it_out():
    with pytest.raises(ValueError, match=r"exclude_modules=\['image.blocks'\]"):
        find_places(two_towers(), HoulsbyConfig())
    places = places_of(two_towers(), exclude_modules=["image.blocks"])
    assert {key.partition(".")[0] for key in places} == {"text"}
    assert len(places) == 4


@pytest.mark.parametrize(
    "names", [["image"], ["image.blocks"], ["blocks"], r"image\..*", r"(?!text\.).*"]
)
def test_ways_to_leave_a_part_out(names):
    places = places_of(two_towers(), exclude_modules=names)
    assert {key.partition(".")[0] for key in places} == {"text"}


def test_an_excluded_candidate_leaves_the_other_one():
    places = places_of(HomeMade(feed_forwards=2), exclude_modules=["net1"])
    assert [*places] == [f"blocks.{index}.{end}" for index in range(3) for end in ENDS]


def test_decoder_layers_of_pytorch():
    base = TorchDecoder().eval()
    model = get_peft_model(base, HoulsbyConfig(r=4, positions=EVERY_POSITION))
    assert bottlenecks_of(base) == [
        f"decoder.layers.{index}.{end}"
        for index in range(2)
        for end in ("self_attn", "multihead_attn", "linear2")
    ]
    assert_adapts(model, torch.randn(2, 3, 16), torch.randn(2, 5, 16))
