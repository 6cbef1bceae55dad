"""What `import houlsby_peft` does: the method's place in PEFT's registry, and the names that are
there.
"""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import subprocess
import sys

import peft
import pytest
import torch
from peft import PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

import houlsby_peft
from houlsby_peft import HoulsbyConfig, HoulsbyModel
from houlsby_peft.registration import houlsby_peft_type, register
from tiny_models import tiny_bert


def test_the_type_is_a_full_member_of_the_enum():
    member = PeftType("HOULSBY")
    assert member is PeftType.HOULSBY is PeftType["HOULSBY"] is houlsby_peft_type()
    assert member in list(PeftType)
    assert isinstance(member, PeftType)
    assert (member.name, member.value, member) == ("HOULSBY", "HOULSBY", "HOULSBY")
    assert repr(member) == "<PeftType.HOULSBY: 'HOULSBY'>"
    assert json.dumps({"peft_type": member}) == '{"peft_type": "HOULSBY"}'
    assert pickle.loads(pickle.dumps(member)) is copy.deepcopy(member) is member
    assert len(set(PeftType)) == len(list(PeftType))
    assert PEFT_TYPE_TO_CONFIG_MAPPING["HOULSBY"] is HoulsbyConfig
    assert PEFT_TYPE_TO_TUNER_MAPPING["HOULSBY"] is HoulsbyModel


def test_registering_again_and_reloading_change_nothing():
    types = list(PeftType)
    register(HoulsbyConfig, HoulsbyModel)
    importlib.reload(houlsby_peft.registration)
    importlib.reload(houlsby_peft)
    assert list(PeftType) == types
    assert PEFT_TYPE_TO_TUNER_MAPPING["HOULSBY"] is houlsby_peft.HoulsbyModel


def test_a_method_of_the_same_name_from_elsewhere_is_not_clobbered(monkeypatch):
    monkeypatch.setitem(PEFT_TYPE_TO_CONFIG_MAPPING, PeftType("HOULSBY"), peft.LoraConfig)
    with pytest.raises(KeyError, match="already PEFT method called 'houlsby'"):
        register(HoulsbyConfig, HoulsbyModel)
    assert PEFT_TYPE_TO_CONFIG_MAPPING["HOULSBY"] is peft.LoraConfig


def test_unpickling_a_model_is_enough_to_register_and_imports_neither_the_hub_nor_serving(
    tmp_path, token_ids
):
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, share_layers=3)).eval()
    torch.save({"model": model, "ids": token_ids}, tmp_path / "model.pt")
    script = """
import sys, torch
given = torch.load(sys.argv[1], weights_only=False)
print(given["model"](given["ids"]).logits.sum().item())
late = ("hub", "predict", "service", "placement.show", "cli")
prefixes = tuple(f"houlsby_peft.{part}" for part in late)
loaded = lambda: [name for name in sys.modules if name.startswith(prefixes)]
assert not loaded(), loaded()
import houlsby_peft
assert not loaded(), loaded()
houlsby_peft.load
assert "houlsby_peft.predict.load" in loaded() and "houlsby_peft.hub.push" not in loaded()
houlsby_peft.push_to_hub
assert "houlsby_peft.hub.push" in loaded()
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model.pt")], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) == pytest.approx(model(token_ids).logits.sum().item(), abs=1e-5)


def test_every_public_name_is_there():
    assert set(houlsby_peft.__all__) <= set(dir(houlsby_peft))
    for name in houlsby_peft.__all__:
        assert getattr(houlsby_peft, name) is not None
        assert getattr(houlsby_peft, name).__doc__, name
