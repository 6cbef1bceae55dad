"""Converted adapters compute what the `adapters` library computes, in folders that it has written.

`tests/support/make_adapterhub_golden.py` has written the folders and the library's outputs.
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
from houlsby_peft_cli import main
from hub_models import make_base


GOLDEN = Path(__file__).parents[1] / "data" / "adapterhub"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
# Heads that no class of transformers computes.
REFUSED = {
    "bert-one_layer": "The head has 1 layers with the activation 'tanh' on the hidden states",
    "distilbert-two_layers": (
        "The head has 2 layers with the activation 'tanh' on the hidden states"
    ),
}


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
    class_name = json.loads((adapter / "adapter_config.json").read_text())["auto_mapping"][
        "base_model_class"
    ]
    adapted = PeftModel.from_pretrained(tiny_base(model, class_name), adapter).eval()
    base, given = adapted.get_base_model(), inputs(model)
    if case == "bert-choice":
        given = {name: value.unsqueeze(0) for name, value in given.items()}
    if has_head:
        given.pop("decoder_input_ids", None)
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
            found = base(**given)
        if last:
            yield last[-1][..., :6]
        elif "start_logits" in found:
            yield torch.stack([found.start_logits, found.end_logits])
        else:
            yield found.logits[..., :6]


@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED])
def test_outputs_equal_the_librarys(case, converted):
    expected = torch.tensor(
        json.loads((GOLDEN / case / "expected.json").read_text()), dtype=torch.float64
    )
    assert expected.std() > 0.05
    single, double = outputs(case, converted(case))
    torch.testing.assert_close(double, expected, atol=1e-10, rtol=0)
    assert (single.double() - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


@pytest.mark.parametrize(("case", "reason"), REFUSED.items())
def test_heads_that_cannot_be_had_are_refused_and_can_be_left_out(case, reason, bases, tmp_path):
    base = bases / case.partition("-")[0]
    with pytest.raises(houlsby_peft.AdapterError, match=reason):
        houlsby_peft.convert(GOLDEN / case, tmp_path / "new", base_model=base)
    assert not list(tmp_path.iterdir())
    target = houlsby_peft.convert(GOLDEN / case, tmp_path / "new", base_model=base, with_head=False)
    assert not any("classifier" in key for key in load_file(target / "adapter_model.safetensors"))


def test_one_command_from_a_published_adapter_to_predictions(tmp_path, capsys):
    base = make_base(tmp_path / "base", hidden_size=16, num_attention_heads=2)
    target = tmp_path / "converted"
    main(
        [
            "convert",
            str(GOLDEN / "bert-pickled"),
            str(target),
            "--base-model",
            str(base),
            "--allow-pickle",
        ]
    )
    assert capsys.readouterr().out.endswith(f"{target}\n")
    with pytest.raises(SystemExit, match="not empty"):
        main(["convert", str(GOLDEN / "bert-houlsby"), str(target), "--base-model", str(base)])
    card = (target / "README.md").read_text()
    assert "base_model: tiny/bert" in card
    assert "bert-pickled, an adapter in AdapterHub's format" in card.replace("`", "")
    adapter = houlsby_peft.load(target)
    predictions = adapter.predict(["A fine film.", "He waited an hour."])
    assert {prediction["label"] for prediction in predictions} <= set("abc")
    assert sorted(path.name for path in target.iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "case", ["bart-houlsby", "gpt2-pfeiffer", "t5-houlsby_leave_out", "xlmr-pfeiffer_inv"]
)
def test_without_a_head_the_adapter_fits_models_with_other_heads(case, bases, tmp_path):
    name, class_name = {
        "bart-houlsby": ("bart", "BartForSequenceClassification"),
        "gpt2-pfeiffer": ("gpt2", "GPT2ForTokenClassification"),
        "t5-houlsby_leave_out": ("t5", "T5Model"),
        "xlmr-pfeiffer_inv": ("xlmr", "XLMRobertaForTokenClassification"),
    }[case]
    target = houlsby_peft.convert(
        GOLDEN / case, tmp_path / "new", base_model=bases / name, with_head=False
    )
    adapted = PeftModel.from_pretrained(tiny_base(name, class_name), target).eval()
    given = {key: value[1:] for key, value in inputs(name).items()}
    with torch.no_grad():
        found = adapted(**given)[0]
        with adapted.disable_adapter():
            assert (adapted(**given)[0] - found).abs().max() > 1e-3
    loaded = {key for key, _ in adapted.named_parameters() if "houlsby" in key}
    assert len(loaded) == len(load_file(target / "adapter_model.safetensors"))


@pytest.mark.parametrize(
    ("model_type", "rule"), [("modernbert", "modernbert"), ("albert", "albert")]
)
def test_only_base_models_that_both_libraries_adapt_alike_are_converted(model_type, rule, tmp_path):
    shutil.copytree(GOLDEN / "bert-houlsby", tmp_path / "source")
    file = tmp_path / "source/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": model_type}))
    AutoConfig.for_model(model_type, hidden_size=16).save_pretrained(tmp_path / "base")
    with pytest.raises(houlsby_peft.AdapterError, match=rule):
        houlsby_peft.convert(tmp_path / "source", tmp_path / "new", base_model=tmp_path / "base")
    assert not (tmp_path / "new").exists()


def convert_and_load():
    """Client: convert adapters from the Hub; return the labels of predictions, and what an error
    says.
    """
    houlsby_peft.convert("user/published", "converted", base_model="org/base", allow_pickle=True)
    labels = [
        prediction["label"]
        for prediction in houlsby_peft.load("converted").predict(["Hello.", "He came."])
    ]
    try:
        houlsby_peft.convert("user/published", "again")
    except houlsby_peft.AdapterError as error:
        return labels, str(error)


def test_an_adapter_on_the_hub_is_converted_by_its_name(hub, tmp_path):
    hub.add("org/base", make_base(tmp_path / "base", hidden_size=16, num_attention_heads=2))
    files = {path.name: path.read_bytes() for path in (GOLDEN / "bert-pickled").iterdir()}
    hub.add(
        "user/published", files | {"config.py": b"raise SystemExit", "pytorch_model.bin": b"large"}
    )
    labels, message = hub.call(convert_and_load, home=tmp_path / "home", token=None)
    assert set(labels) <= set("abc")
    assert message.startswith(
        "user/published cannot be converted: The weights are in pytorch_adapter.bin, a pickled"
    )
    fetched = {path.name for path in (tmp_path / "home").rglob("snapshots/*/*")}
    assert fetched.isdisjoint({"config.py", "pytorch_model.bin"})
    assert "pytorch_adapter.bin" in fetched
