"""An exported encoder and exported ladders compute together what each adapter computes; what has no
encoder in common is refused.
"""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from peft import get_peft_model
from tokenizers import Tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from architecture_cases import CASES, OF_LADDERS
from edited_json import edited_json
from houlsby_peft import AdapterError, HoulsbyConfig, TaskBank, export_onnx
from houlsby_peft.export.parts import Encoder, LadderWithHead
from houlsby_peft.method.tuner_layer import record_of
from houlsby_peft_cli import main
from hub_models import WORDS, make_base, save_adapter
from tiny_models import perturb


onnx = pytest.importorskip("onnx", reason="the extra export is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra export is not installed")
pytest.importorskip("onnxscript", reason="the extra export is not installed")

TOPICS = {0: "food", 1: "staff", 2: "price"}
TAGS = {0: "O", 1: "B-PLACE"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """A folder with the ladders of two tasks on one adapter: with each task, its model."""
    root = tmp_path_factory.mktemp("adapters")
    save_adapter(root / "common", base)
    shared = {"kind": "ladder", "beneath": str(root / "common")}
    classes = AutoModelForSequenceClassification, {"num_labels": 3}
    tags = AutoModelForTokenClassification, {"num_labels": 2}
    topic = {"r": 8, "id2label": TOPICS, "task_type": "SEQ_CLS", **shared}
    place = {"r": 4, "id2label": TAGS, "task_type": "TOKEN_CLS", "seed": 2, **shared}
    return root / "tasks", {
        "topic": save_adapter(root / "tasks" / "topic", base, *classes, **topic),
        "place": save_adapter(root / "tasks" / "place", base, *tags, **place),
    }


@pytest.fixture(scope="module")
def exported(adapters, tmp_path_factory):
    """The folder of their export."""
    folder = tmp_path_factory.mktemp("exported")
    main(["export", str(adapters[0]), str(folder), "--int8"])
    return folder


def answers(folder, task, texts, encoder="encoder.onnx"):
    """What onnxruntime computes of texts for a task, as a service without PyTorch would."""
    encodings = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(texts)
    values = {
        "input_ids": np.array([encoding.ids for encoding in encodings]),
        "attention_mask": np.array([encoding.attention_mask for encoding in encodings]),
        "token_type_ids": np.array([encoding.type_ids for encoding in encodings]),
    }
    encoder = onnxruntime.InferenceSession(folder / encoder)
    names = [output.name for output in encoder.get_outputs()]
    values |= dict(zip(names, encoder.run(names, values), strict=True))
    [logits] = onnxruntime.InferenceSession(folder / f"{task}.onnx").run(["logits"], values)
    return torch.from_numpy(logits)


@pytest.mark.parametrize("task", ["topic", "place"])
@torch.no_grad()
def test_a_task_has_the_answers_of_its_adapter(task, adapters, exported, base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    for texts in (WORDS[:1], WORDS[3:4], WORDS, ["soup " * 100, "soup"]):
        inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        expected = adapters[1][task](**inputs).logits
        logits = answers(exported, task, texts)
        assert logits.shape == expected.shape
        mask = inputs["attention_mask"].bool() if task == "place" else ...
        torch.testing.assert_close(logits[mask], expected[mask], rtol=0, atol=1e-4)
    assert expected.std() > 0.1


def test_answers_that_8_bit_integers_change_are_counted(
    adapters, exported, tmp_path, monkeypatch, capsys
):
    folder = shutil.copytree(exported, tmp_path / "exported")
    # So small a model loses nothing in 8-bit integers. This one has lost much.
    encoder, random = onnx.load(folder / "encoder.onnx"), np.random.default_rng(0)
    for tensor in encoder.graph.initializer:
        if len(tensor.dims) == 2 and tensor.data_type == onnx.TensorProto.FLOAT:
            weight = onnx.numpy_helper.to_array(tensor)
            weight = weight * random.normal(1, 0.3, weight.shape).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(weight, tensor.name))
    onnx.save(encoder, folder / "encoder_quantized.onnx")
    words = sorted({word for text in WORDS for word in text.split()})
    texts = [" ".join(row) for row in random.choice(words, (300, 5))]
    pd.DataFrame({"text": [*texts, " "]}).to_csv(tmp_path / "texts.csv", index=False)
    # The files that are there are compared, of which others prove what they compute.
    monkeypatch.setattr("houlsby_peft.commands.export_onnx", lambda *_, **__: {})
    main(["export", str(adapters[0]), str(folder), "--check", str(tmp_path / "texts.csv")])
    lines = capsys.readouterr().out.splitlines()
    for task, line in zip(("place", "topic"), sorted(lines), strict=True):
        in_float32 = answers(folder, task, texts).argmax(-1)
        in_int8 = answers(folder, task, texts, "encoder_quantized.onnx").argmax(-1)
        differ = in_float32 != in_int8
        if task == "place":  # of any word; [CLS] and [SEP] are none
            encodings = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(texts)
            is_word = [np.array(encoding.special_tokens_mask) == 0 for encoding in encodings]
            differ = (differ & torch.tensor(np.array(is_word))).any(-1)
        changed = int(differ.sum())
        assert 0 < changed < 300
        assert line == f"{task}: {changed} of 300 answers change in 8-bit integers"


def test_the_encoder_is_exported_once_and_labels_stand_beside_their_task(exported, base):
    names = {path.name for path in exported.iterdir()}
    files = {f"{task}.{kind}" for task in ("topic", "place") for kind in ("onnx", "json")}
    encoders = {"encoder.onnx", "encoder_quantized.onnx"}
    assert names == files | encoders | {"tokenizer.json", "tokenizer_config.json"}
    for task, labels in (("topic", TOPICS), ("place", TAGS)):
        content = json.loads((exported / f"{task}.json").read_text())
        assert content["id2label"] == {str(number): name for number, name in labels.items()}
    bytes_of_base = (base / "model.safetensors").stat().st_size
    assert (exported / "encoder.onnx").stat().st_size > 0.8 * bytes_of_base
    for task in ("topic", "place"):
        file = exported / f"{task}.onnx"
        assert file.stat().st_size < 0.6 * bytes_of_base
        assert b".py" not in file.read_bytes()  # no path of this machine


@pytest.mark.parametrize("name", OF_LADDERS)
@torch.no_grad()
def test_an_encoder_and_a_ladder_compute_what_the_model_computes(name):
    layers = dict.fromkeys(("num_hidden_layers", "n_layers"), 3)
    adapted = get_peft_model(CASES[name].model(**layers), HoulsbyConfig(r=4, kind="ladder"))
    perturb(adapted)
    model = adapted.eval().get_base_model()
    place = record_of(adapted, "default").ladder
    inputs = CASES[name].batch()
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, -2:] = 0
    inputs["attention_mask"] = mask
    expected = model(**inputs).last_hidden_state
    read = Encoder(copy.deepcopy(model), place)(inputs)
    assert list(read) == ["reading_0", "reading_1", "reading_2", "sum"]
    ladder = LadderWithHead(copy.deepcopy(model), place)
    found = ladder(inputs | read)["last_hidden_state"]
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])
    for key, value in read.items():
        changed = ladder(inputs | {**read, key: -value})["last_hidden_state"]
        assert not torch.equal(changed, found)


def refused(adapters, folder):
    with pytest.raises(AdapterError) as error:
        export_onnx(TaskBank(adapters), folder)
    assert not folder.exists()
    return str(error.value)


def test_tasks_without_a_common_encoder_are_refused(adapters, base, tmp_path):
    topic = adapters[0] / "topic"
    save_adapter(tmp_path / "plain", base, task_type="SEQ_CLS")
    message = refused({"topic": topic, "plain": tmp_path / "plain"}, tmp_path / "out")
    assert "'plain' is none" in message

    save_adapter(tmp_path / "alone", base, kind="ladder", task_type="SEQ_CLS")
    message = refused({"topic": topic, "alone": tmp_path / "alone"}, tmp_path / "out")
    assert "'topic' and 'alone' differ" in message

    shutil.copytree(tmp_path / "alone", tmp_path / "short")
    with edited_json(tmp_path / "short" / "adapter_config.json") as config:
        config["recorded"]["max_length"] = 8
    message = refused({"alone": tmp_path / "alone", "short": tmp_path / "short"}, tmp_path / "out")
    assert "length of texts; 'alone' and 'short' differ" in message


def test_two_files_of_one_name_are_refused(adapters, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("houlsby_peft.export.onnx_files._write_model", lambda *_: None)
    monkeypatch.setattr("houlsby_peft.export.onnx_files._largest_difference", lambda *_: 0)
    monkeypatch.setattr(
        "houlsby_peft.export.onnx_files._run_file", lambda path, inputs, _: [{}] * len(inputs)
    )
    ladder = adapters[0] / "topic"
    for name in ("tokenizer", "encoder_quantized"):
        message = refused({name: ladder}, tmp_path / "out")
        assert f"'{name}' is already that of" in message
    assert "has a folder" in refused({"../../topic": ladder}, tmp_path / "a" / "out")

    with pytest.raises(SystemExit, match="Two adapters are called 'topic'"):
        main(["export", str(ladder), str(ladder), str(tmp_path / "out")])
