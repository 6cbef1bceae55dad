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
from houlsby_peft.saved.fingerprint import check_fingerprint, compare_fingerprints, fingerprint
from hub_models import TEXTS, make_adapter, make_base
from model_states import state_of
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
    [difference] = compare_fingerprints(recorded, fingerprint_of(base))
    assert difference.endswith("encoder.layer.1, encoder.layer.3")


def test_another_size_is_named():
    recorded, base = fingerprint_of(tiny_bert()), tiny_bert(intermediate_size=64)
    assert "here 64" in compare_fingerprints(recorded, fingerprint_of(base))[0]


def with_other(*names):
    """A tiny BERT, of which some modules have the weights of another one."""
    base, source = tiny_bert(), tiny_bert(seed=1)
    for name in names:
        weights = source.bert.get_submodule(name).state_dict()
        base.bert.get_submodule(name).load_state_dict(weights)
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
    differences = compare_fingerprints(recorded, fingerprint_of(with_other(*names)))
    assert differences == [f"other weights in {named}"]


@pytest.mark.parametrize("tensors", [["a"], {"a": 1}, {"a": "no base64!"}, {"a": "AAA="}], ids=str)
def test_a_fingerprint_of_another_form_is_refused(tensors):
    recorded = fingerprint_of(tiny_bert())
    check_fingerprint(recorded)
    with pytest.raises(AdapterError, match="fingerprint"):
        check_fingerprint(recorded | {"tensors": tensors})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two base models, and an adapter on each."""
    path = tmp_path_factory.mktemp("folders")
    for seed, name in enumerate(("base", "other")):
        folder = make_base(path / name, seed=seed)
        make_adapter(path / f"of {name}", folder, str(folder))
    return path


def load_base(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)


DIFFERENCE = "which differs: other weights in "


def test_another_base_is_refused_by_load(folders):
    running = houlsby_peft.load(folders / "of other")
    untouched = state_of(running.model)
    for options in (
        {"base_model": load_base(folders / "other")},
        {"base_model": str(folders / "other")},
        {"beside": running},
    ):
        with pytest.raises(AdapterError, match=DIFFERENCE):
            houlsby_peft.load(folders / "of base", **options)
    assert state_of(running.model) == untouched


def test_another_base_is_loaded_nevertheless_if_a_warning_is_asked_for(folders):
    with pytest.warns(UserWarning, match=DIFFERENCE):
        loaded = houlsby_peft.load(
            folders / "of base", base_model=str(folders / "other"), other_base="warn"
        )
    [answer] = loaded.predict(TEXTS[0][0])
    assert answer["label"] in houlsby_peft.load(folders / "of base").labels


def test_peft_and_transformers_warn_about_another_base(folders):
    adapter = folders / "of base"
    with pytest.warns(UserWarning, match=DIFFERENCE):
        model = PeftModel.from_pretrained(load_base(folders / "other"), adapter)
    with pytest.warns(UserWarning, match=DIFFERENCE):
        model.load_adapter(adapter, "again")
    with pytest.warns(UserWarning, match=DIFFERENCE):
        load_base(folders / "other").load_adapter(str(adapter))


def test_a_base_of_another_task_class_is_the_same_base(tmp_path):
    """Its checkpoint has neither pooler nor head, so each class makes new ones, if it has any."""
    folder = make_base(tmp_path / "base")
    BertForMaskedLM.from_pretrained(folder).bert.save_pretrained(tmp_path / "encoder")
    bare = fingerprint_of(AutoModel.from_pretrained(tmp_path / "encoder"))
    for model_class in (AutoModelForSequenceClassification, AutoModelForMaskedLM):
        of_task = fingerprint_of(model_class.from_pretrained(tmp_path / "encoder"))
        assert compare_fingerprints(bare, of_task) == compare_fingerprints(of_task, bare) == []


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
        theirs = read(unreadable)
        assert theirs["tensors"] == {}
        assert compare_fingerprints(ours, theirs) == compare_fingerprints(theirs, ours) == []
