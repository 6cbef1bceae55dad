"""An adapter recognizes its base model: `load` refuses another one, PEFT and transformers warn
about it.
"""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertForMaskedLM,
)

import houlsby_peft
from houlsby_peft import AdapterError, HoulsbyConfig
from houlsby_peft.placement.plan import Plan
from houlsby_peft.saved.fingerprint import (
    check_fingerprint,
    compare_fingerprints,
    fingerprint,
)
from hub_models import TEXTS, make_adapter, make_base
from tiny_models import tiny_bert


def fingerprint_of(model):
    return Plan(model, HoulsbyConfig(r=4)).base


def resized(size):
    base = tiny_bert()
    base.resize_token_embeddings(size, mean_resizing=False)
    return base


def changed(change):
    base = tiny_bert()
    with torch.no_grad():
        for weight in base.parameters():
            if weight.dim() > 1:
                change(weight)
    return base


def round_to_int8(weight):
    step = weight.abs().max() / 127
    weight.copy_((weight / step).round() * step)


def prune_half(weight):
    weight[weight.abs() <= weight.abs().median()] = 0


def merge_lora(weight):
    weight += 0.3 * weight.std() / 2 * torch.randn(len(weight), 4) @ torch.randn(4, weight.shape[1])


SAME = {
    "float64": lambda: tiny_bert().double(),
    "bfloat16": lambda: tiny_bert().bfloat16(),
    "another head": lambda: tiny_bert(num_labels=7),
    "tokens added": lambda: resized(120),
    "int8": lambda: changed(round_to_int8),
    "pruned": lambda: changed(prune_half),
    "trained further": lambda: changed(
        lambda weight: weight.add_(0.2 * weight.std() * torch.randn_like(weight))
    ),
    "with a merged LoRA": lambda: changed(merge_lora),
}


@pytest.mark.parametrize("name", SAME)
def test_a_base_model_that_people_use_in_another_form_is_the_same(name):
    assert compare_fingerprints(fingerprint_of(tiny_bert()), fingerprint_of(SAME[name]())) == []


def test_each_layer_that_was_trained_apart_is_named():
    recorded, base = fingerprint_of(tiny_bert()), tiny_bert()
    for number in (3, 1):
        base.bert.encoder.layer[number].apply(base._init_weights)
    found = compare_fingerprints(recorded, fingerprint_of(base))
    assert found == ["other weights in encoder.layer.1, encoder.layer.3"]
    (found,) = compare_fingerprints(recorded, fingerprint_of(tiny_bert(seed=1)))
    assert found == "other weights in encoder.layer.0, encoder.layer.1, encoder.layer.2 and 2 more"
    assert compare_fingerprints(recorded, fingerprint_of(tiny_bert(intermediate_size=64)))[
        0
    ].endswith("48, here 64")


def with_other(*names):
    """A tiny BERT, of which some modules have the weights of another one."""
    base, other = tiny_bert(), tiny_bert(seed=1)
    for name in names:
        base.bert.get_submodule(name).load_state_dict(other.bert.get_submodule(name).state_dict())
    return base


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["pooler"], "pooler.dense"),
        (["embeddings.word_embeddings"], "embeddings.word_embeddings"),
        (["embeddings.position_embeddings"], "embeddings.position_embeddings"),
        (["encoder.layer.2.intermediate", "encoder.layer.2.output"], "encoder.layer.2"),
        (["encoder.layer.0.attention.self.value"], "encoder.layer.0"),
    ],
    ids=str,
)
def test_one_part_of_another_model_is_named(names, named):
    recorded = fingerprint_of(tiny_bert())
    found = compare_fingerprints(recorded, fingerprint_of(with_other(*names)))
    assert found == [f"other weights in {named}"]


@pytest.mark.parametrize(
    "change",
    [
        {"config": 1},
        {"tensors": ["a"]},
        {"tensors": {"a": 1}},
        {"tensors": {"a": "no base64!"}},
        {"tensors": {"a": "AAA="}},
    ],
    ids=str,
)
def test_a_fingerprint_of_another_form_is_refused(change):
    recorded = fingerprint_of(tiny_bert())
    check_fingerprint(recorded)
    with pytest.raises(AdapterError, match="fingerprint of the base model has an unknown form"):
        check_fingerprint(recorded | change)


def test_another_base_is_refused_by_load_and_warned_about_by_peft_and_transformers(tmp_path):
    folder = make_base(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", folder, str(folder))
    make_base(tmp_path / "other", seed=1)

    def other_base():
        return AutoModelForSequenceClassification.from_pretrained(tmp_path / "other", num_labels=3)

    message = (
        r"was trained on .*/base' and is loaded on .*/other', which differs: other weights in "
    )
    first = houlsby_peft.load(
        adapter, base_model=AutoModelForSequenceClassification.from_pretrained(folder)
    )
    other = houlsby_peft.load(
        make_adapter(tmp_path / "of other", tmp_path / "other", str(tmp_path / "other"))
    )
    before = {name: weight.clone() for name, weight in other.model.state_dict().items()}
    for options in (
        {"base_model": other_base()},
        {"base_model": str(tmp_path / "other")},
        {"beside": other},
    ):
        with pytest.raises(
            AdapterError, match=message + ".* --other-base warn, it is loaded nevertheless"
        ):
            houlsby_peft.load(adapter, **options)
    assert {
        name: torch.equal(before[name], found) for name, found in other.model.state_dict().items()
    } == dict.fromkeys(before, True)
    with pytest.warns(UserWarning, match=message):
        loaded = houlsby_peft.load(adapter, base_model=str(tmp_path / "other"), other_base="warn")
    assert {found["label"] for found in loaded.predict([text for text, _ in TEXTS])} <= set(
        first.labels
    )
    with pytest.warns(UserWarning, match=message):
        model = PeftModel.from_pretrained(other_base(), adapter)
    with pytest.warns(UserWarning, match=message):
        model.load_adapter(adapter, "again")
    with pytest.warns(UserWarning, match=message):
        other_base().load_adapter(str(adapter))


def test_a_base_of_another_task_class_is_the_same_base(tmp_path):
    """Its checkpoint has neither pooler nor head, so each class makes new ones, if it has any."""
    folder = make_base(tmp_path / "base")
    BertForMaskedLM.from_pretrained(folder).bert.save_pretrained(tmp_path / "encoder")
    classes = (AutoModel, AutoModelForSequenceClassification, AutoModelForMaskedLM)
    first, *others = [
        fingerprint_of(each.from_pretrained(tmp_path / "encoder")) for each in classes
    ]
    for other in others:
        assert compare_fingerprints(first, other) == compare_fingerprints(other, first) == []


class Packed(nn.Parameter):
    """Stands for a quantized weight, which may be stored in a dtype of numbers and in any shape."""


def with_weight(weight):
    module = nn.Module()
    module.weight = weight
    return module


@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning"
)
def test_weights_that_cannot_be_read_never_differ():
    def read(module):
        return fingerprint(nn.Module(), [("a", module)])

    ours = read(nn.Linear(8, 8))
    assert compare_fingerprints(ours, read(nn.Linear(8, 8))) == ["other weights in a"]
    sharded = nn.Linear(8, 8)
    sharded.weight.data = torch.empty(0)
    for unreadable in (
        with_weight(nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)),
        with_weight(Packed(torch.ones(16, 1, dtype=torch.bfloat16), requires_grad=False)),
        sharded,
        nn.Linear(8, 8, device="meta"),
        nn.Linear(8, 8).to(torch.float8_e4m3fn),
        torch.ao.nn.quantized.dynamic.Linear(8, 8),  # its weight is a method
        nn.LayerNorm(8),
        nn.Dropout(),
    ):
        found = read(unreadable)
        assert found["tensors"] == {}
        assert compare_fingerprints(ours, found) == compare_fingerprints(found, ours) == []
