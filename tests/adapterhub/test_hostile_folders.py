"""The converter refuses folders that are damaged or mean harm, as the loader does: quickly, and no
code runs.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, save

import houlsby_peft
from adapterhub_models import inputs, tiny_base, tiny_config
from mutated_adapters import mutate


SOURCE = Path(__file__).parents[1] / "data" / "adapterhub" / "bert-two_layers"
CONFIG, WEIGHTS = "adapter_config.json", "adapter.safetensors"
HEAD_CONFIG, HEAD_WEIGHTS = "head_config.json", "model_head.safetensors"
DOWN = "bert.encoder.layer.0.output.adapters.task.adapter_down.0.weight"
UP = "bert.encoder.layer.0.output.adapters.task.adapter_up.weight"


def top(file=CONFIG, **changes):
    """Change fields at the top of a configuration."""
    return lambda files: files | {file: json.dumps(json.loads(files[file]) | changes).encode()}


def options(file=CONFIG, **changes):
    """Change the options of the bottleneck or of the head."""

    def change(files):
        fields = json.loads(files[file])
        fields["config"] |= changes
        return files | {file: json.dumps(fields).encode()}

    return change


def head(**changes):
    return options(HEAD_CONFIG, **changes)


def weights(changes, file=WEIGHTS):
    """Change tensors; None removes one."""

    def change(files):
        tensors = load(files[file]) | changes
        return files | {file: save(without_none(tensors))}

    return change


def without_none(values):
    return {name: value for name, value in values.items() if value is not None}


def put(name, content):
    """Replace a file, or remove it (None)."""
    return lambda files: without_none(files | {name: content})


def pickled(content):
    """Put the weights into a pickled file: an object, or the bytes of the file."""

    data = content
    if not isinstance(content, bytes):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        data = buffer.getvalue()
    return lambda files: without_none(files | {WEIGHTS: None, "pytorch_adapter.bin": data})


def header(text, length=None):
    return put(WEIGHTS, struct.pack("<Q", len(text) if length is None else length) + text.encode())


class Trap:
    """Unpickled, it leaves a file behind."""

    def __reduce__(self):
        return Path.touch, (Path("trap-was-sprung"),)


def bomb():
    """A file of torch whose one tensor is compressed, and unpacks to a thousand times its size."""
    buffer = io.BytesIO()
    torch.save({DOWN: torch.zeros(250_000)}, buffer)
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(buffer) as plain,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        for entry in plain.infolist():
            compressed.writestr(entry.filename, plain.read(entry))
    return packed.getvalue()


NAN = torch.full((2, 16), float("nan"))
NICE = {"inv_adapter_reduction_factor": 2}
STATIC = {"config": None, "model_class": "BertForSequenceClassification"}
# Case: what is changed, and a word of the error.
CASES = {
    "empty configuration": (put(CONFIG, b""), "JSON"),
    "configuration is nested": (put(CONFIG, b"[" * 100_000), "JSON"),
    "configuration is huge": (put(CONFIG, b" " * 20_000_001), "20,000,000 bytes"),
    "an adapter of PEFT": (put(CONFIG, b'{"peft_type": "LORA", "r": 8}'), "PEFT"),
    "another name": (top(name="../../etc"), "no place"),
    "huge width": (top(hidden_size=10**40), "width"),
    "another type": (top(model_type="gpt2"), "gpt2"),
    "base is a path": (top(model_name="../../../etc"), "name on the Hub"),
    "activation with weights": (options(non_linearity="prelu"), "activation"),
    "factor is 0": (options(reduction_factor=0), "ZeroDivisionError"),
    "factors lack a layer": (options(reduction_factor={"0": 2}), "shape"),
    "another factor": (options(reduction_factor=4), "shape"),
    "leaves out layer 1": (options(leave_out=[1]), "no place"),
    "a sub-layer more": (options(mh_adapter=True), "lacks .*attention"),
    "Compacter": (options(phm_layer=True), "phm_layer"),
    "Glow": (options(inv_adapter="glow", **NICE), "glow"),
    "a coupling without weights": (options(inv_adapter="nice", **NICE), r"lacks .*\.F\."),
    "LoRA": (options(architecture="lora"), "bottleneck"),
    "another residual": (options(residual_before_ln="post_add"), "post_add"),
    "AdapterPlus after a norm": (
        options(residual_before_ln=False, original_ln_after=False),
        "something else",
    ),
    "weights are text": (put(WEIGHTS, b"weights, honestly"), "SafetensorError"),
    "header of 8 EB": (header("{}", 2**63 - 1), "SafetensorError"),
    "header without tensors": (header("{}"), "lacks"),
    "NaN": (weights({DOWN: NAN}), "finite"),
    "a weight is missing": (weights({DOWN: None}), "lacks"),
    "a weight with a path": (weights({"../../x": torch.ones(1)}), "no place"),
    "a weight twice": (weights({DOWN.removeprefix("bert."): torch.ones(2, 16)}), "has no"),
    "head is unknown": (head(head_type="exec"), "exec"),
    "head of 1,000,000,000 layers": (head(layers=10**9), "head"),
    "head of another width": (
        weights({"heads.task.4.weight": torch.ones(3, 15)}, HEAD_WEIGHTS),
        "shape",
    ),
    "labels have a gap": (head(label2id={"a": 0, "b": 2, "c": 3}), "id2label"),
    "labels are no text": (head(label2id={"\ud800": 0, "b": 1, "c": 2}), r"surrogates|id2label"),
    "static head of no model": (top(HEAD_CONFIG, **STATIC | {"model_class": "system"}), "system"),
    "static head of another model": (
        top(HEAD_CONFIG, **STATIC | {"model_class": "RobertaForSequenceClassification"}),
        "BertForSequenceClassification",
    ),
    "static head of 10**12 labels": (top(HEAD_CONFIG, **STATIC, num_labels=10**12), "converted"),
}
PICKLED = {
    "code": (pickled(pickle.dumps(Trap(), protocol=2)), "more than tensors"),
    "code as torch saves it": (pickled({DOWN: Trap()}), "more than tensors"),
    "a list": (pickled([torch.ones(2)]), "AttributeError"),
    "a sparse tensor": (pickled({DOWN: torch.ones(2, 16).to_sparse()}), "plain tensor"),
    "a view of one number": (pickled({DOWN: torch.ones(1).expand(2**40)}), "file's size"),
    "a bomb": (pickled(bomb()), "unpack"),
    "an empty file": (pickled(b""), "EOFError"),
    "NaN": (pickled({DOWN: NAN}), "finite"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_config("bert").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def good():
    return {
        path.name: path.read_bytes() for path in SOURCE.iterdir() if path.name != "expected.json"
    }


def write(files, folder):
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def assert_refused(files, word, base, tmp_path, **options):
    source = write(files, tmp_path / "source")
    start = time.process_time()
    with pytest.raises(houlsby_peft.AdapterError, match=word) as error:
        houlsby_peft.convert(source, tmp_path / "target", base_model=base, **options)
    assert str(error.value).startswith(f"{source} cannot be converted: ")
    assert len(str(error.value)) < 1000
    assert time.process_time() - start < 2
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("case", CASES)
def test_each_is_refused_with_a_clear_error(case, good, base, tmp_path):
    change, word = CASES[case]
    # A base model of one's own choice takes the place of the recorded one.
    assert_refused(change(good), word, None if case == "base is a path" else base, tmp_path)


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize(
    "name", [CONFIG, WEIGHTS, "pytorch_adapter.bin", HEAD_CONFIG, HEAD_WEIGHTS]
)
def test_a_pipe_is_refused_and_never_waited_for(name, allow_pickle, good, base, tmp_path):
    source, target = write(put(name, None)(good), tmp_path / "source"), tmp_path / "target"
    os.mkfifo(source / name)
    with pytest.raises(houlsby_peft.AdapterError, match=name):
        houlsby_peft.convert(source, target, base_model=base, allow_pickle=allow_pickle)
    assert not target.exists()


@pytest.mark.parametrize(("name", "lacking"), [(CONFIG, CONFIG), (WEIGHTS, "pytorch_adapter.bin")])
def test_a_missing_file_is_named(name, lacking, good, base, tmp_path):
    source = write(put(name, None)(good), tmp_path / "source")
    with pytest.raises(FileNotFoundError, match=lacking):
        houlsby_peft.convert(source, tmp_path / "target", base_model=base)
    assert not (tmp_path / "target").exists()


@pytest.mark.filterwarnings(
    "ignore:Validating sparse tensor invariants"
)  # of torch 2.15, before the refusal
@pytest.mark.parametrize("case", PICKLED)
def test_pickled_files_are_read_only_if_allowed_and_never_run_code(
    case, good, base, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    change, word = PICKLED[case]
    (tmp_path / "allowed").mkdir()
    assert_refused(change(good), word, base, tmp_path / "allowed", allow_pickle=True)
    (tmp_path / "not allowed").mkdir()
    assert_refused(change(good), "a pickled file", base, tmp_path / "not allowed")
    assert not Path("trap-was-sprung").exists()


def test_mutated_folders_are_refused_or_convert_to_adapters_that_load(good, base, tmp_path):
    # The file of weights, as `mutate` calls it.
    renamed = "adapter_model.safetensors"
    files = put(WEIGHTS, None)(good) | {renamed: good[WEIGHTS]}
    converted = []
    for number in range(40):
        changed, change = mutate(number, files)
        changed = put(renamed, None)(changed | {WEIGHTS: changed.get(renamed)})
        source, target = write(changed, tmp_path / f"{number}"), tmp_path / f"target-{number}"
        with suppress(houlsby_peft.AdapterError, FileNotFoundError):
            converted.append((houlsby_peft.convert(source, target, base_model=base), change))
    assert 5 < len(converted) < 35
    for target, change in converted[::4]:
        fields = json.loads((target / CONFIG).read_text())
        bert = tiny_base("bert", fields["auto_mapping"]["base_model_class"])
        model = PeftModel.from_pretrained(bert, target).eval()
        assert model(**inputs("bert")).logits.isfinite().all(), change
