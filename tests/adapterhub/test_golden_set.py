"""Converted adapters compute what the `adapters` library computes, in folders that it has written.

adapters 1.3.0 has written the folders, and their outputs in float64. They are frozen; the program
that had them written is `tests/support/make_adapterhub_golden.py` of commit 2a85c21.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig

import houlsby_peft
from adapterhub_models import CONFIGS, inputs, tiny_base, tiny_config, whole_float64
from edited_json import edited_json
from houlsby_peft_cli import main
from hub_models import make_base


GOLDEN = Path(__file__).parents[1] / "data" / "adapterhub"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
# Heads that no class of transformers computes.
REFUSED = {"bert-one_layer": "1 layers", "distilbert-two_layers": "2 layers"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders that hold nothing but the base models' configurations, by model."""
    folder = tmp_path_factory.mktemp("bases")
    for model in CONFIGS:
        tiny_config(model).save_pretrained(folder / model)
    return folder


@pytest.fixture(scope="module")
def converted(bases, tmp_path_factory):
    """Return the converted adapter of a golden folder, which is converted once."""
    folder = tmp_path_factory.mktemp("converted")

    def convert(case):
        target = folder / case
        if not target.exists():
            base = bases / case.partition("-")[0]
            houlsby_peft.convert(GOLDEN / case, target, base_model=base, allow_pickle=True)
        return target

    return convert


def outputs(case, adapter):
    """The outputs of a loaded adapter in float32 and in float64, of which the golden file holds the
    library's.
    """
    model, has_head = case.partition("-")[0], (GOLDEN / case / "head_config.json").exists()
    adapted = PeftModel.from_pretrained(tiny_base(model, class_of(adapter)), adapter).eval()
    base, batch = adapted.get_base_model(), inputs(model)
    if case == "bert-choice":
        batch = {name: value.unsqueeze(0) for name, value in batch.items()}
    if has_head:
        batch.pop("decoder_input_ids", None)
    encoder = getattr(base, base.base_model_prefix, base)
    last = []
    if not has_head and not case.endswith("_lm"):
        encoder = getattr(encoder, "decoder", encoder)
        encoder.register_forward_hook(
            lambda module, args, output: last.append(output.last_hidden_state)
        )
    for dtype in (torch.float32, torch.float64):
        adapted.to(dtype)
        with torch.no_grad(), whole_float64():
            result = base(**batch)
        if last:
            yield last[-1][..., :6]
        elif "start_logits" in result:
            yield torch.stack([result.start_logits, result.end_logits])
        else:
            yield result.logits[..., :6]


def class_of(adapter):
    """The class of the base model of a converted adapter."""
    fields = json.loads((adapter / "adapter_config.json").read_text())
    return fields["auto_mapping"]["base_model_class"]


@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED])
def test_outputs_equal_the_librarys(case, converted):
    values = json.loads((GOLDEN / case / "expected.json").read_text())
    expected = torch.tensor(values, dtype=torch.float64)
    assert expected.std() > 0.05
    single, double = outputs(case, converted(case))
    torch.testing.assert_close(double, expected, atol=1e-10, rtol=0)
    assert (single.double() - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize(("case", "word"), REFUSED.items())
def test_heads_that_cannot_be_had_are_refused_and_can_be_left_out(case, word, bases, tmp_path):
    base = bases / case.partition("-")[0]
    with pytest.raises(houlsby_peft.AdapterError, match=word):
        houlsby_peft.convert(GOLDEN / case, tmp_path / "new", base_model=base)
    assert not list(tmp_path.iterdir())
    target = houlsby_peft.convert(GOLDEN / case, tmp_path / "new", base_model=base, with_head=False)
    assert not any("classifier" in key for key in load_file(target / "adapter_model.safetensors"))


def test_one_command_from_a_published_adapter_to_predictions(tmp_path, capsys):
    base = make_base(tmp_path / "base", hidden_size=16, num_attention_heads=2)
    target = tmp_path / "converted"
    command = [str(target), "--base-model", str(base), "--allow-pickle"]
    main(["convert", str(GOLDEN / "bert-pickled"), *command])
    assert capsys.readouterr().out.endswith(f"{target}\n")
    with pytest.raises(SystemExit, match="not empty"):
        main(["convert", str(GOLDEN / "bert-houlsby"), *command])
    assert "base_model: tiny/bert" in (target / "README.md").read_text()
    adapter = houlsby_peft.load(target)
    predictions = adapter.predict(["A fine film.", "He waited an hour."])
    assert {prediction["label"] for prediction in predictions} <= set("abc")
    assert sorted(path.name for path in target.iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "class_name"),
    [
        ("bart-houlsby", "BartForSequenceClassification"),
        ("gpt2-pfeiffer", "GPT2ForTokenClassification"),
        ("t5-houlsby_leave_out", "T5Model"),
        ("xlmr-pfeiffer_inv", "XLMRobertaForTokenClassification"),
    ],
)
def test_without_a_head_the_adapter_fits_models_with_other_heads(case, class_name, bases, tmp_path):
    model, target = case.partition("-")[0], tmp_path / "converted"
    houlsby_peft.convert(GOLDEN / case, target, base_model=bases / model, with_head=False)
    adapted = PeftModel.from_pretrained(tiny_base(model, class_name), target).eval()
    batch = {key: value[1:] for key, value in inputs(model).items()}
    with torch.no_grad():
        result = adapted(**batch)[0]
        with adapted.disable_adapter():
            assert (adapted(**batch)[0] - result).abs().max() > 1e-3
    names = [name for name, _ in adapted.named_parameters() if "houlsby" in name]
    assert len(names) == len(load_file(target / "adapter_model.safetensors"))


@pytest.mark.parametrize("model_type", ["modernbert", "albert"])
def test_only_base_models_that_both_libraries_adapt_alike_are_converted(model_type, tmp_path):
    shutil.copytree(GOLDEN / "bert-houlsby", tmp_path / "source")
    with edited_json(tmp_path / "source/adapter_config.json") as config:
        config["model_type"] = model_type
    AutoConfig.for_model(model_type, hidden_size=16).save_pretrained(tmp_path / "base")
    with pytest.raises(houlsby_peft.AdapterError, match=model_type):
        houlsby_peft.convert(tmp_path / "source", tmp_path / "new", base_model=tmp_path / "base")
    assert not (tmp_path / "new").exists()


def convert_and_load():
    """Client: convert adapters from the Hub; return the labels of predictions, and what an error
    says.
    """
    houlsby_peft.convert("user/published", "converted", base_model="org/base", allow_pickle=True)
    predictions = houlsby_peft.load("converted").predict(["Hello.", "He came."])
    try:
        houlsby_peft.convert("user/published", "again")
    except houlsby_peft.AdapterError as error:
        return [prediction["label"] for prediction in predictions], str(error)


def test_an_adapter_on_the_hub_is_converted_by_its_name(hub, tmp_path):
    hub.add("org/base", make_base(tmp_path / "base", hidden_size=16, num_attention_heads=2))
    files = {path.name: path.read_bytes() for path in (GOLDEN / "bert-pickled").iterdir()}
    hub.add(
        "user/published", files | {"config.py": b"raise SystemExit", "pytorch_model.bin": b"large"}
    )
    labels, message = hub.call(convert_and_load, home=tmp_path / "home", token=None)
    assert set(labels) <= set("abc")
    assert "pickled" in message
    fetched = {path.name for path in (tmp_path / "home").rglob("snapshots/*/*")}
    assert fetched.isdisjoint({"config.py", "pytorch_model.bin"})
    assert "pytorch_adapter.bin" in fetched
