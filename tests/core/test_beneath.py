"""A saved adapter beneath ladders: what they compute on it, what is saved, what is refused."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from answers import near
from edited_json import edited_json
from houlsby_peft import AdapterError, HoulsbyConfig, HubError, StateCache, TaskBank, ablate, load
from hub_models import WORDS, make_adapter, make_base
from model_states import assert_same_tensors, state_of
from tiny_models import perturb, perturb_adapter, tiny_bert


IDS = torch.randint(5, 99, (3, 8), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
POOLER = ["bert.pooler"]


@pytest.fixture
def common(tmp_path):
    """Two adapters that may lie beneath ladders."""
    for number, options in enumerate([{}, {"share_layers": 2, "activation": "relu"}]):
        model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, modules_to_save=POOLER, **options))
        perturb(model, number)
        model.save_pretrained(tmp_path / f"common_{number}")
    return [str(tmp_path / f"common_{number}") for number in range(2)]


def ladder_on(beneath, **options):
    return HoulsbyConfig(kind="ladder", r=8, beneath=beneath, modules_to_save=POOLER, **options)


def with_ladder(beneath, seed=3):
    model = get_peft_model(tiny_bert(), ladder_on(beneath)).eval()
    perturb_adapter(model, "default", seed)
    return model


def adapted_by(folder):
    model = PeftModel.from_pretrained(tiny_bert(), folder).eval()
    return model.base_model.model


def file_of(folder):
    return folder / "adapter_config.json"


@torch.no_grad()
@pytest.mark.parametrize("number", [0, 1])
def test_a_ladder_reads_the_states_of_the_adapter_and_is_added_at_its_end(common, number):
    adapted = adapted_by(common[number])
    sums = []
    end = adapted.bert.encoder.layer[-1].output
    hook = end.LayerNorm.register_forward_pre_hook(lambda _, args: sums.append(args[0]))
    states = adapted.bert(**BATCH, output_hidden_states=True).hidden_states
    hook.remove()
    model = get_peft_model(tiny_bert(), ladder_on(common[number])).eval()
    new = model.base_model.model.bert
    own_norm = new.encoder.layer[-1].output.LayerNorm.houlsby_norm["default"]
    torch.testing.assert_close(
        own_norm.state_dict(), end.LayerNorm.module_of("default").state_dict()
    )
    own_pooler = new.pooler.modules_to_save["default"]
    torch.testing.assert_close(
        own_pooler.state_dict(), adapted.bert.pooler.head("default").state_dict()
    )
    perturb_adapter(model, "default", 3)
    computed = new(**BATCH, output_hidden_states=True).hidden_states
    for state, expected in zip(computed[:-1], states[:-1], strict=True):
        assert torch.equal(state, expected)
    ladder = new.encoder.layer[-1].output.dropout.houlsby_ladder["default"]
    readings = type("Readings", (), {})()
    readings.states = {
        index: torch.nn.functional.layer_norm(state, state.shape[-1:])
        for index, state in enumerate(states[:-1])
    }
    readings.mask = None
    torch.testing.assert_close(computed[-1], own_norm(sums[0] + ladder(readings)))


def test_only_the_ladder_and_its_heads_train_and_nothing_else_is_saved(common, tmp_path):
    model = get_peft_model(tiny_bert(), ladder_on(common[0]))
    perturb(model)
    model.train()
    model(**BATCH, labels=torch.tensor([0, 1, 2])).loss.backward()
    parts = ("houlsby_ladder.default", "houlsby_norm.default", "modules_to_save.default")
    for key, weight in model.named_parameters():
        is_own = any(part in key for part in parts)
        assert weight.requires_grad is is_own is (weight.grad is not None), key
    plain = get_peft_model(tiny_bert(), ladder_on(None))
    assert model.num_parameters(only_trainable=True) == plain.num_parameters(only_trainable=True)
    model.save_pretrained(tmp_path / "ladder")
    saved = load_file(tmp_path / "ladder" / "adapter_model.safetensors")
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert sum(weight.numel() for weight in saved.values()) == trained
    assert not any("houlsby_adapter" in key for key in saved)
    fields = json.loads(file_of(tmp_path / "ladder").read_text())
    assert fields["beneath"] == common[0]
    assert len(fields["recorded"]["beneath"]["sha256"]) == 64
    assert_same_tensors(model.unload().state_dict(), tiny_bert().state_dict())


@torch.no_grad()
def test_a_saved_ladder_brings_the_adapter_beneath_it(common, tmp_path):
    model = with_ladder(common[1])
    expected = model(**BATCH).logits
    assert not torch.allclose(expected, with_ladder(None)(**BATCH).logits, atol=1e-3)
    model.save_pretrained(tmp_path / "ladder")
    loaded = PeftModel.from_pretrained(tiny_bert(), tmp_path / "ladder", adapter_name="other")
    assert torch.equal(loaded.eval()(**BATCH).logits, expected)
    assert torch.equal(copy.deepcopy(loaded)(**BATCH).logits, expected)
    assert torch.equal(load_with_transformers(tmp_path / "ladder")(**BATCH).logits, expected)
    half = PeftModel.from_pretrained(tiny_bert().bfloat16(), tmp_path / "ladder").eval()
    torch.testing.assert_close(half(**BATCH).logits.float(), expected, atol=0.3, rtol=0.1)
    with loaded.disable_adapter():
        assert torch.equal(loaded(**BATCH).logits, tiny_bert()(**BATCH).logits)


def load_with_transformers(folder):
    base = tiny_bert()
    base.load_adapter(str(folder))
    return base.eval()


def several(common):
    """Ladders on two adapters and on none, and another adapter."""
    model = get_peft_model(tiny_bert(), ladder_on(common[0]), "one")
    model.add_adapter("two", ladder_on(common[0]))
    model.add_adapter("other", ladder_on(common[1]))
    model.add_adapter("plain", ladder_on(None))
    model.add_adapter("bottlenecks", HoulsbyConfig(r=4, modules_to_save=POOLER))
    for seed, name in enumerate(model.peft_config):
        perturb_adapter(model, name, seed)
    return model.eval()


ALIKE = [["one", "two"], ["two"], ["two", "one"]]
UNLIKE = [["one", "other", "plain", "bottlenecks"], ["__base__", "two"], ["other"]]


@torch.no_grad()
@pytest.mark.parametrize("names", [ALIKE, UNLIKE], ids=str)
def test_many_tasks_of_a_text_give_what_each_gives_alone(common, names):
    model = several(common)
    expected, rows, flat = [], [], []
    for text, names_of_text in enumerate(names):
        for name in names_of_text:
            row = {key: value[text : text + 1] for key, value in BATCH.items()}
            if name == "__base__":
                with model.disable_adapter():
                    expected.append(model(**row).logits)
            else:
                model.set_adapter(name)
                expected.append(model(**row).logits)
            rows.append(text)
            flat.append(name)
    nested = model(**BATCH, adapter_names=names).logits
    torch.testing.assert_close(nested, torch.cat(expected), atol=1e-5, rtol=1e-5)
    repeated = {key: value[rows] for key, value in BATCH.items()}
    mixed = model(**repeated, adapter_names=flat).logits
    torch.testing.assert_close(mixed, torch.cat(expected), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_one_copy_serves_all_ladders_and_goes_with_the_last(common):
    model = several(common)
    layer = model.base_model.model.bert.encoder.layer[0].attention.output.dropout

    def copies():
        return [name for name in layer.houlsby_adapter if name.startswith("beneath_")]

    assert len(copies()) == 2
    model.set_adapter("plain")
    model.delete_adapter("one")
    model.delete_adapter("other")
    assert len(copies()) == 1
    model.base_model.add_weighted_adapter(["two", "two"], [0.5, 0.5], "copy")
    model.delete_adapter("two")
    assert len(copies()) == 1
    model.delete_adapter("copy")
    assert copies() == []
    model = several(common)
    with pytest.raises(ValueError, match="other adapters lie beneath"):
        model.base_model.add_weighted_adapter(["one", "other"], [0.5, 0.5], "sum")


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:You are trying")
def test_a_ladder_that_cannot_be_replaced_stays_with_the_adapter(common, monkeypatch):
    model = with_ladder(common[0])
    untouched, expected = state_of(model), model(**BATCH).logits
    monkeypatch.setattr("houlsby_peft.model.start_heads", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        get_peft_model(model.get_base_model(), ladder_on(common[1]))
    assert state_of(model) == untouched
    assert torch.equal(model(**BATCH).logits, expected)


@pytest.mark.filterwarnings("ignore:Adapter ladder was active", "ignore:Already found")
def test_transformers_deletes_it_with_the_ladder(common):
    model = tiny_bert()
    model.add_adapter(HoulsbyConfig(r=4), "other")
    untouched = state_of(model)
    model.add_adapter(ladder_on(common[0]), "ladder")
    assert "beneath_" in str(state_of(model)["weights"].keys())
    model.delete_adapter("ladder")
    model.set_adapter("other")
    assert not any("beneath_" in name for name in model.state_dict())
    assert state_of(model)["hooks"] == untouched["hooks"]


def test_what_cannot_lie_beneath_is_refused(common, tmp_path):
    with pytest.raises(ValueError, match="only a ladder"):
        HoulsbyConfig(beneath=common[0])
    with pytest.raises(HubError, match=r"adapter beneath the ladder: .* is no folder"):
        get_peft_model(tiny_bert(), ladder_on(str(tmp_path / "nowhere")))
    with_ladder(common[0]).save_pretrained(tmp_path / "ladder")
    with pytest.raises(AdapterError, match="must be of kind 'houlsby'"):
        get_peft_model(tiny_bert(), ladder_on(str(tmp_path / "ladder")))
    with pytest.warns(UserWarning, match="trained on the base model"):
        get_peft_model(tiny_bert(seed=5), ladder_on(common[0]))


def test_a_ladder_from_the_hub_names_no_folder_of_this_machine(common, tmp_path):
    snapshot = tmp_path / "models--user--ladder" / "snapshots" / ("0" * 40)
    with_ladder(common[0]).save_pretrained(tmp_path / "ladder")
    shutil.copytree(tmp_path / "ladder", snapshot)
    with pytest.raises(AdapterError, match="beneath must be a name on the Hub"):
        load(snapshot, base_model=tiny_bert())


@pytest.mark.parametrize("change", ["weights", "activation", "other", "no record"])
def test_another_adapter_than_in_training_is_refused(common, tmp_path, change):
    folder = tmp_path / "ladder"
    with_ladder(common[0]).save_pretrained(folder)
    if change == "weights":
        file = tmp_path / "common_0" / "adapter_model.safetensors"
        save_file({key: 2 * weight for key, weight in load_file(file).items()}, file)
    else:
        path = tmp_path / "common_0" if change == "activation" else folder
        with edited_json(file_of(path)) as fields:
            if change == "no record":
                del fields["recorded"]["beneath"]
            else:
                fields |= {"beneath": common[1]} if change == "other" else {"activation": "relu"}
    with pytest.raises(AdapterError, match="that it was trained on"):
        PeftModel.from_pretrained(tiny_bert(), folder)
    with pytest.raises(AdapterError, match="that it was trained on"):
        load(folder, base_model=tiny_bert())


@torch.no_grad()
def test_kept_states_are_those_of_the_adapter_beneath(common, tmp_path):
    for beneath in (common[0], None, common[1]):
        model = with_ladder(beneath)
        expected = model(**BATCH).logits
        cache = StateCache(model, tmp_path / "states")
        for _ in range(2):
            torch.testing.assert_close(model(**BATCH).logits, expected, atol=2e-3, rtol=2e-3)
        cache.close()
    assert len(list((tmp_path / "states").iterdir())) == 3


@torch.no_grad()
@pytest.mark.parametrize("way", ["disabled", "ablated", "rows of the base"])
def test_a_pass_without_it_neither_keeps_states_nor_reads_kept_ones(way, common, tmp_path):
    model = with_ladder(common[0])
    expected = model(**BATCH).logits

    def run():
        if way == "rows of the base":
            return model(**BATCH, adapter_names=["__base__"] * 3).logits
        is_disabled = way == "disabled"
        with model.disable_adapter() if is_disabled else ablate(model, [3], keep_norms=False):
            return model(**BATCH).logits

    expected_without = run()
    assert not torch.allclose(expected_without, expected, atol=0.01)
    cache = StateCache(model, tmp_path)
    for _ in range(2):
        assert torch.equal(run(), expected_without)
    [path] = tmp_path.glob("*.states")
    assert not path.stat().st_size
    for _ in range(2):
        torch.testing.assert_close(model(**BATCH).logits, expected, atol=2e-3, rtol=2e-3)
    assert path.stat().st_size
    assert torch.equal(run(), expected_without)
    cache.close()


def test_a_bank_loads_it_once_and_runs_each_group_in_one_pass(tmp_path):
    base = make_base(tmp_path / "base")
    common = make_adapter(tmp_path / "common", base, str(base))
    folders = {"common": common}
    for seed, beneath in enumerate([str(common), str(common), None]):
        name = f"ladder_{seed}"
        options = {"kind": "ladder", "beneath": beneath}
        folders[name] = make_adapter(tmp_path / name, base, str(base), seed, **options)
    expected = {name: load(folder).predict(WORDS[0])[0] for name, folder in folders.items()}
    bank = TaskBank(folders)
    bank.warm_up()
    model = next(iter(bank._held._first.values())).model
    passes = []
    layers = model.base_model.model.bert.encoder.layer
    for layer in layers:
        layer.attention.register_forward_hook(lambda _, args, __: passes.append(len(args[0])))
    assert bank.ask(WORDS[0]) == near(expected)
    assert passes == [1] * 3 * len(layers), "one row for both ladders on the adapter"
    bottlenecks = layers[0].attention.output.dropout.houlsby_adapter
    assert sum(name.startswith("beneath_") for name in bottlenecks) == 1
