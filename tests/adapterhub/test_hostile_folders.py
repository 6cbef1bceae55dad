"""The converter refuses folders that are damaged or mean harm, as the loader does: quickly, and no code runs."""

from __future__ import annotations

import io
import json
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
    """Change fields at the top of a configuration; ... removes one."""

    def change(files):
        fields = json.loads(files[file]) | changes
        return files | {file: json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()}

    return change


def options(file=CONFIG, **changes):
    """Change the options of the bottleneck or of the head."""

    def change(files):
        fields = json.loads(files[file])
        fields["config"] |= changes
        return files | {file: json.dumps(fields).encode()}

    return change


def head(**changes):
    return options(HEAD_CONFIG, **changes)


def weights(file=WEIGHTS, **changes):
    """Change tensors; None removes one."""

    def change(files):
        tensors = load(files[file])
        tensors |= {{"down": DOWN, "up": UP}.get(name, name): tensor for name, tensor in changes.items()}
        return files | {file: save({name: tensor for name, tensor in tensors.items() if tensor is not None})}

    return change


def put(name, content):
    """Replace a file, or remove it (None)."""

    def change(files):
        return {key: value for key, value in (files | {name: content}).items() if value is not None}

    return change


def pickled(content):
    """Put the weights into a pickled file: an object, or the bytes of the file."""

    def change(files):
        if isinstance(content, bytes):
            data = content
        else:
            buffer = io.BytesIO()
            torch.save(content, buffer)
            data = buffer.getvalue()
        return {name: value for name, value in files.items() if name != WEIGHTS} | {"pytorch_adapter.bin": data}

    return change


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
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return packed.getvalue()


TENSORS = {DOWN: torch.ones(2, 16)}
# Case: (what is changed, what the error says).
CASES = {
    "no configuration": (put(CONFIG, None), "holds no adapter_config.json"),
    "empty configuration": (put(CONFIG, b""), "is not valid JSON"),
    "configuration is a list": (put(CONFIG, b"[]"), "must hold one JSON object"),
    "configuration is nested": (put(CONFIG, b"[" * 100_000), "is not valid JSON"),
    "configuration is no text": (put(CONFIG, b"\xff\xfe\x00"), "is not valid JSON"),
    "configuration is huge": (put(CONFIG, b" " * 2_000_000), "must be smaller than 1,000,000 bytes"),
    "an adapter of PEFT": (put(CONFIG, b'{"peft_type": "LORA", "r": 8}'), "An adapter of PEFT needs no conversion"),
    "options are a list": (top(config=[1]), "must hold the options of one bottleneck adapter"),
    "no name": (top(name=...), "name must be text"),
    "name is a list": (top(name=["task"]), "name must be text"),
    "another name": (top(name="../../etc"), "which its configuration has no place for"),
    "no width": (top(hidden_size=None), "hidden_size must be the base model's width"),
    "huge width": (top(hidden_size=10**40), "hidden_size must be the base model's width"),
    "another width": (top(hidden_size=17), "a base model of the type bert and the width 17"),
    "another type": (top(model_type="gpt2"), "a base model of the type gpt2"),
    "base is a path": (top(model_name="../../../etc"), "model_name must be a name on the Hub; got '../../../etc'"),
    "base is a folder": (top(model_name="/etc"), "model_name must be a name on the Hub; got '/etc'"),
    "base has a long name": (top(model_name="b" * 500), "model_name must be a name on the Hub; got 'bbb"),
    "base is a number": (top(model_name=5), "model_name must be text"),
    "no activation": (options(non_linearity=None), "non_linearity must be text"),
    "unknown activation": (options(non_linearity="exec"), "activation must be a key of transformers' ACT2FN"),
    "activation with weights": (options(non_linearity="prelu"), "An activation with weights of its own"),
    "factor is 0": (options(reduction_factor=0), "reduction_factor must be a positive number"),
    "factor is NaN": (options(reduction_factor=float("nan")), "reduction_factor must be a positive number"),
    "factor is text": (options(reduction_factor="8"), "reduction_factor must be a positive number"),
    "factor is tiny": (options(reduction_factor=1e-8), "may have up to 4 times the width"),
    "factors lack a layer": (options(reduction_factor={"0": 2}), "layer 1 has none"),
    "factors are words": (options(reduction_factor={"default": "x"}), "reduction_factor must be a positive number"),
    "another factor": (options(reduction_factor=4), r"has the shape \(2, 16\), the model needs \(4, 16\)"),
    "scaling is a word": (options(scaling="exec"), "scaling must be a number, 'learned' or 'channel'"),
    "scaling is infinite": (options(scaling=float("inf")), "scaling must be a number, 'learned' or 'channel'"),
    "leaves out layer 99": (options(leave_out=[99]), "leave_out must name layers of the base model, 0 to 1"),
    "leaves out a word": (options(leave_out=["x"]), "leave_out must be a list of layers"),
    "leaves out all": (options(leave_out=[0, 1]), "cannot be converted"),
    "no sub-layer": (options(output_adapter=False), "positions must be one or more of"),
    "a sub-layer more": (options(mh_adapter=True), "it lacks .*attention"),
    "sub-layer is a word": (options(mh_adapter="yes"), "mh_adapter must be true or false"),
    "dropout": (options(dropout=2), "dropout must be a probability"),
    "Compacter": (options(phm_layer=True), "phm_layer=True, which cannot be converted: its projections are sums"),
    "a gate": (options(use_gating=True), "use_gating=True, which cannot be converted: a gate"),
    "a norm before": (options(ln_before=True), "ln_before=True, which cannot be converted: a norm of its own"),
    "a norm after": (options(ln_after=True), "ln_after=True, which cannot be converted: a norm of its own"),
    "Glow": (options(inv_adapter="glow", inv_adapter_reduction_factor=2), "inv_adapter must be 'nice' or nothing"),
    "a coupling without weights": (options(inv_adapter="nice", inv_adapter_reduction_factor=2), r"it lacks .*\.F\."),
    "LoRA": (options(architecture="lora"), "it is not a bottleneck adapter"),
    "another residual": (options(residual_before_ln="post_add"), "residual_before_ln='post_add', is_parallel=False"),
    "AdapterPlus after a norm": (
        options(residual_before_ln=False, original_ln_after=False),
        "which computes something else on a bert model",
    ),
    "no weights": (put(WEIGHTS, None), "must hold the weights in adapter.safetensors or pytorch_adapter.bin"),
    "empty weights": (put(WEIGHTS, b""), "is not a valid safetensors file"),
    "weights are text": (put(WEIGHTS, b"weights, honestly"), "is not a valid safetensors file"),
    "weights are cut off": (lambda files: files | {WEIGHTS: files[WEIGHTS][:-9]}, "is not a valid safetensors file"),
    "header of 1 GB": (header("{}", 2**30), "is not a valid safetensors file"),
    "header of 8 EB": (header("{}", 2**63 - 1), "is not a valid safetensors file"),
    "header names no bytes": (
        header('{"x":{"dtype":"F32","shape":[9,9],"data_offsets":[0,324]}}'),
        "is not a valid safetensors file",
    ),
    "header without tensors": (header("{}"), "it lacks "),
    "NaN": (weights(down=torch.full((2, 16), float("nan"))), "must hold finite numbers, got NaN or infinity"),
    "infinity": (weights(up=torch.full((16, 2), -float("inf"))), "must hold finite numbers, got NaN or infinity"),
    "whole numbers": (weights(down=torch.ones(2, 16, dtype=torch.int64)), "must hold floating-point numbers"),
    "float8": (weights(down=torch.ones(2, 16).to(torch.float8_e4m3fn)), "floating-point numbers of at least 16 bits"),
    "huge": (weights(down=torch.full((2, 16), 1e300, dtype=torch.float64)), r"must hold numbers up to 1\.84e\+19"),
    "a weight is missing": (weights(down=None), "it lacks .*down_proj.weight"),
    "a weight of no place": (weights(**{f"{DOWN}.more": torch.ones(1)}), "which its configuration has no place for"),
    "a weight with a path": (weights(**{"../../x": torch.ones(1)}), "which its configuration has no place for"),
    "a weight twice": (weights(**{DOWN.removeprefix("bert."): torch.ones(2, 16)}), "which its configuration has no"),
    "a scalar": (weights(down=torch.tensor(1.0)), "has the shape"),
    "head is no JSON": (put(HEAD_CONFIG, b"{"), "is not valid JSON"),
    "head's options are a list": (top(HEAD_CONFIG, config=[]), "config must be a mapping"),
    "head is unknown": (head(head_type="exec"), "head_type must be one of classification"),
    "head's type is a list": (head(head_type=["x"]), "head_type must be one of classification"),
    "head is a language model": (head(head_type="masked_lm"), "the base model's own head predicts instead"),
    "head is a parser": (head(head_type="dependency_parsing"), "head_type must be one of classification"),
    "head of 1,000,000,000 layers": (head(layers=10**9), "no class of transformers for bert has such a head"),
    "head's activation": (head(activation_function="exec"), "no class of transformers for bert has such a head"),
    "head has no weights": (put(HEAD_WEIGHTS, None), "must hold the weights in model_head.safetensors"),
    "head lacks a weight": (weights(HEAD_WEIGHTS, **{"heads.task.1.bias": None}), "has the shape|it lacks"),
    "head has one more": (weights(HEAD_WEIGHTS, **{"heads.task.9.bias": torch.ones(1)}), "it has heads.task.9.bias"),
    "head of another width": (weights(HEAD_WEIGHTS, **{"heads.task.4.weight": torch.ones(3, 15)}), "has the shape"),
    "head of NaN": (weights(HEAD_WEIGHTS, **{"heads.task.4.weight": torch.full((3, 16), float("nan"))}), "finite"),
    "head of other labels": (head(num_labels=5), "num_labels must be the head's number of outputs, 3; got 5"),
    "labels have a gap": (head(label2id={"a": 0, "b": 2, "c": 3}), "label2id must give each of the 3 outputs a name"),
    "labels are a list": (head(label2id=["a", "b", "c"]), "label2id must give each of the 3 outputs a name"),
    "labels are numbers": (head(label2id={"a": "0", "b": "1", "c": "2"}), "label2id must give each of the 3 outputs"),
    "labels are no text": (head(label2id={"\ud800": 0, "b": 1, "c": 2}), "id2label must be"),
    "static head of no model": (top(HEAD_CONFIG, config=None, model_class="system"), "the head of a 'system' cannot"),
    "static head of another model": (
        top(HEAD_CONFIG, config=None, model_class="RobertaForSequenceClassification", num_labels=3),
        "fits no BertForSequenceClassification",
    ),
    "static head of 10**12 labels": (
        top(HEAD_CONFIG, config=None, model_class="BertForSequenceClassification", num_labels=10**12),
        "num_labels must be the head's number of outputs",
    ),
}
PICKLED = {
    "code": (pickled(pickle.dumps(Trap(), protocol=2)), "cannot be read as pickled tensors"),
    "code as torch saves it": (pickled({DOWN: Trap()}), "cannot be read as pickled tensors"),
    "a list": (pickled([torch.ones(2)]), "it holds no tensors by name"),
    "numbers": (pickled({DOWN: 5}), "is no plain tensor"),
    "a sparse tensor": (pickled({DOWN: torch.ones(2, 16).to_sparse()}), "is no plain tensor"),
    "a view of one number": (pickled({DOWN: torch.ones(1).expand(2**40)}), "has more bytes than the file"),
    "a bomb": (pickled(bomb()), "it would unpack to"),
    "text": (pickled(b"weights, honestly"), "cannot be read as pickled tensors"),
    "an empty file": (pickled(b""), "cannot be read as pickled tensors"),
    "NaN": (pickled({DOWN: torch.full((2, 16), float("nan"))}), "must hold finite numbers"),
    "one weight": (pickled(TENSORS), "it lacks "),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_config("bert").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def good():
    return {path.name: path.read_bytes() for path in SOURCE.iterdir() if path.name != "expected.json"}


def write(files, folder):
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def refuse(case, changes, expected, base, tmp_path, allow_pickle=False):
    source = write(changes, tmp_path / "source")
    start = time.process_time()
    # A base model of one's own choice takes the place of the recorded one.
    own = None if case.startswith("base ") else base
    with pytest.raises(houlsby_peft.AdapterError, match=expected) as error:
        houlsby_peft.convert(source, tmp_path / "target", base_model=own, allow_pickle=allow_pickle)
    assert str(source) in str(error.value) or "base model" in str(error.value)
    assert len(str(error.value)) < 1000
    assert time.process_time() - start < 2
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("case", CASES)
def test_each_is_refused_with_a_clear_error(case, good, base, tmp_path):
    change, expected = CASES[case]
    refuse(case, change(good), expected, base, tmp_path)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # of torch 2.15, before the refusal
@pytest.mark.parametrize("case", PICKLED)
def test_pickled_files_are_read_only_if_allowed_and_never_run_code(case, good, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, expected = PICKLED[case]
    files = change(good)
    refuse(case, files, expected, base, tmp_path, allow_pickle=True)
    (folder := tmp_path / "again").mkdir()
    refuse(case, files, "a pickled file, which only the converter reads, and only if you allow it", base, folder)


def test_mutated_folders_are_refused_or_convert_to_adapters_that_load(good, base, tmp_path):
    names = {WEIGHTS: "adapter_model.safetensors"}
    files = {names.get(name, name): content for name, content in good.items()}
    back = {new: old for old, new in names.items()}
    outcomes = {"refused": 0, "converted": 0}
    for number in range(80):
        changed, what = mutate(number, files)
        source = write({back.get(name, name): content for name, content in changed.items()}, tmp_path / f"{number}")
        target = tmp_path / f"target-{number}"
        with suppress(houlsby_peft.AdapterError):
            houlsby_peft.convert(source, target, base_model=base)
        if not target.exists():
            outcomes["refused"] += 1
            continue
        outcomes["converted"] += 1
        if outcomes["converted"] % 8 == 1:
            class_name = json.loads((target / CONFIG).read_text())["auto_mapping"]["base_model_class"]
            model = PeftModel.from_pretrained(tiny_base("bert", class_name), target).eval()
            assert model(**inputs("bert")).logits.isfinite().all(), what
    assert min(outcomes.values()) > 10, outcomes
