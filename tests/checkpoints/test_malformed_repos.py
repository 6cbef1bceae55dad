"""Repositories that are damaged or mean harm: each gives a clear error, quickly, and nothing of it is executed."""

from __future__ import annotations

import json
import pickle
import re
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

import houlsby_peft
from hub_models import BASE, make_adapter, make_base


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DOWN = "base_model.model.bert.encoder.layer.0.attention.output.dropout.houlsby_adapter.down_proj.weight"
HEAD = "base_model.model.classifier.weight"
DIGITS = {str(number): str(number) for number in range(3)}


def config(**changes):
    """Change fields of the configuration; ... removes one."""

    def change(files):
        fields = json.loads(files[CONFIG]) | changes
        kept = {name: value for name, value in fields.items() if value is not ...}
        return files | {CONFIG: json.dumps(kept).encode()}

    return change


def weights(**changes):
    """Change tensors; None removes one. Names: `down` and `head` for one tensor each, others as they are."""

    def change(files):
        tensors = load(files[WEIGHTS])
        for name, tensor in changes.items():
            tensors[{"down": DOWN, "head": HEAD}.get(name, name)] = tensor
        return files | {WEIGHTS: save({name: tensor for name, tensor in tensors.items() if tensor is not None})}

    return change


def put(**contents):
    """Replace whole files, or remove them (None): `config`, `weights`, or a name with __ for the dot."""

    def change(files):
        short = {"config": CONFIG, "weights": WEIGHTS}
        new = {short.get(name, name.replace("__", ".")): content for name, content in contents.items()}
        return {name: content for name, content in (files | new).items() if content is not None}

    return change


def header(text, length=None):
    """A safetensors file of nothing but a header, of which a false length may be announced."""
    return put(weights=struct.pack("<Q", len(text) if length is None else length) + text.encode())


def with_nan(value):
    def change(files):
        tensors = load(files[WEIGHTS])
        tensors[DOWN][0, 0] = value
        return files | {WEIGHTS: save(tensors)}

    return change


FAR = '{"x.houlsby_adapter.down_proj.weight":{"dtype":"F32","shape":[9,9],"data_offsets":[0,324]}}'
TYPE = '{"x":{"dtype":"COMPLEX9","shape":[1],"data_offsets":[0,4]}}'
# Case: (what is changed, what the error says).
CASES = {
    "no configuration": (put(config=None), "holds no adapter_config.json"),
    "empty configuration": (put(config=b""), "is not valid JSON"),
    "configuration is no JSON": (put(config=b"r: 8"), "is not valid JSON"),
    "configuration is a list": (put(config=b"[]"), "must hold one JSON object"),
    "configuration is nested": (put(config=b"[" * 100_000), "is not valid JSON"),
    "configuration is no text": (put(config=b"\xff\xfe\x00"), "is not valid JSON"),
    "configuration is huge": (put(config=b" " * 2_000_000), "must be smaller than 1,000,000 bytes"),
    "no method": (config(peft_type=...), "must have peft_type 'HOULSBY'; it has none"),
    "another method": (config(peft_type="LORA"), "got 'LORA'. Load adapters of other methods with peft"),
    "another library": (config(peft_type=..., config={}, hidden_size=32), "one of the `adapters` library"),
    "r = 0": (config(r=0), "r must be a whole number of at least 1; got 0"),
    "r is text": (config(r="4"), "r must be a whole number of at least 1; got '4'"),
    "r is too large": (config(r=10**9), "asks for bottlenecks of size 1,000,000,000, which have more weights than"),
    "r overflows": (config(r=10**40), "have more weights than all of"),
    "r in a pattern is too large": (config(rank_pattern={"output": 10**9}), "have more weights than all of"),
    "another r": (config(r=5), r"has the shape \(4, 32\), the model needs \(5, 32\)"),
    "unknown activation": (config(activation="exec"), "activation must be a key of transformers' ACT2FN"),
    "activation is a list": (config(activation=["gelu"]), "activation must be a key of transformers' ACT2FN"),
    "dropout": (config(dropout=2), r"dropout must be a probability in \[0, 1\)"),
    "init_std is NaN": (config(init_std=float("nan")), "init_std must be a number of at least 0"),
    "negative sharing": (config(share_layers=-1), "share_layers must be a whole number of at least 0"),
    "other sharing": (config(share_layers=2), "which this model and configuration have no place for"),
    "unknown position": (config(positions=["head"]), "positions must be one or more of"),
    "position is a number": (config(positions=[1]), "positions must be a list of names"),
    "target is a number": (config(target_modules=7), "target_modules must be a list of names or one pattern"),
    "target is no pattern": (config(target_modules="("), "a pattern must be a regular expression"),
    "target takes forever": (config(target_modules="((a|b|.)+)+x"), "as matching it could take forever"),
    "target of optional parts": (config(target_modules=".?" * 60 + "!"), "as matching it could take forever"),
    "exclusion of alternatives": (
        config(exclude_modules=r"(?:.|\w)" * 60 + "!"),
        "as matching it could take forever",
    ),
    "repeat behind a comment": (config(target_modules=r"(?:.|\w)(?#)+!"), "as matching it could take forever"),
    "repeat behind a space": (config(rank_pattern={r"(?x)(?:.|\w) +!": 4}), "as matching it could take forever"),
    "target does not exist": (
        config(target_modules=["nowhere"], recorded=None),
        "no place for one with target_",
    ),
    "pattern of r is a list": (config(rank_pattern=["a"]), "rank_pattern must be a mapping"),
    "layer that is not there": (config(layers_to_transform=[99], recorded=None), "must be among this model"),
    "layers is text": (config(layers_to_transform="all"), "layers_to_transform must be"),
    "modules to save are numbers": (config(modules_to_save=[1]), "modules_to_save must be a list of names"),
    "modules to save are missing": (config(modules_to_save=["pooler"]), "it lacks .*pooler"),
    "labels are a list": (config(id2label=["a"]), "id2label must be a dict from every number"),
    "labels have a gap": (config(id2label={"0": "a", "2": "b"}), "id2label must be a dict from every number"),
    "too few labels": (config(id2label={"0": "a", "1": "b"}), r"has the shape \(3, 32\), the model needs \(2, 32\)"),
    "unknown task": (config(task_type="SHELL"), "Invalid task type: 'SHELL'"),
    "class that is no model": (
        config(task_type=None, auto_mapping={"base_model_class": "system", "parent_library": "os"}),
        "must name its task, by a task type of PEFT or by a class of transformers",
    ),
    "base is missing": (config(base_model_name_or_path=None), "must be a name on the Hub, got ''"),
    "base is a path": (
        config(base_model_name_or_path="../../../etc"),
        "must be a name on the Hub, got '../../../etc'",
    ),
    "base is a folder": (config(base_model_name_or_path="/etc"), "must be a name on the Hub, got '/etc'"),
    "base has a long name": (config(base_model_name_or_path="b" * 300), "must be a name on the Hub, got 'bbbb"),
    "token beyond the vocabulary": (config(trainable_token_indices=[10**6]), "which has tokens 0 to 199. Use the"),
    "tokens of no module": (config(trainable_token_indices={"nowhere": [1]}), "which is not found in the model"),
    "tokens are text": (config(trainable_token_indices="all"), "must be a list of different tokens of the model"),
    "base is a number": (config(base_model_name_or_path=5), "base_model_name_or_path must be text"),
    "revision of the base is a path": (config(revision="../../main"), "it has no such revision"),
    "fingerprint is text": (config(base_fingerprint="x"), "base_fingerprint must be a mapping"),
    "fingerprint of words": (
        config(recorded={"base": {"config": {}, "weights": [["a"]]}}),
        "The recorded base of an adapter must be",
    ),
    "another base": (
        config(recorded={"base": {"config": {"hidden_size": 99}, "weights": []}}),
        "was trained on the base model 'org/tiny-bert' and is loaded on .* hidden_size 99, here 32",
    ),
    "no weights": (put(weights=None), "holds adapter_config.json but no adapter_model.safetensors"),
    "pickled weights": (put(weights=None, adapter_model__bin="pickle"), "a pickled file, which can run any code"),
    "empty weights": (put(weights=b""), "is not a valid safetensors file"),
    "weights are text": (put(weights=b"weights, honestly"), "is not a valid safetensors file"),
    "weights are cut off": (lambda files: files | {WEIGHTS: files[WEIGHTS][:-9]}, "is not a valid safetensors file"),
    "header of 1 GB": (header("{}", 2**30), "is not a valid safetensors file"),
    "header of 8 EB": (header("{}", 2**63 - 1), "is not a valid safetensors file"),
    "header is no JSON": (header("{x}"), "is not a valid safetensors file"),
    "header names no bytes": (header(FAR), "is not a valid safetensors file"),
    "header has an unknown type": (header(TYPE), "is not a valid safetensors file"),
    "header without tensors": (header("{}"), "must hold matrices .*down_proj.weight; it holds nothing"),
    "NaN": (with_nan(float("nan")), "must hold finite numbers, got NaN or infinity"),
    "infinity": (with_nan(float("inf")), "must hold finite numbers, got NaN or infinity"),
    "whole numbers": (weights(head=torch.ones(3, 32, dtype=torch.int64)), "must hold floating-point numbers"),
    "float8": (weights(down=torch.ones(4, 32).to(torch.float8_e4m3fn)), "floating-point numbers of at least 16 bits"),
    "huge": (weights(down=torch.full((4, 32), 1e300, dtype=torch.float64)), r"must hold numbers up to 1\.84e\+19"),
    "a page of a network's login": (put(weights=b"<!DOCTYPE html><html>Sign in"), "is not a valid safetensors file"),
    "such a page for the configuration": (put(config=b"<!DOCTYPE html><html>Sign in"), "is not valid JSON"),
    "a weight is missing": (weights(down=None), "it lacks .*down_proj.weight"),
    "a weight of no place": (weights(**{f"{DOWN}.more": torch.ones(1)}), "have no place for"),
    "a weight with a path": (weights(**{"../../x.houlsby_norm.weight": torch.ones(1)}), "have no place for"),
    "a scalar": (weights(down=torch.tensor(1.0)), "must hold matrices"),
    "another shape": (weights(head=torch.ones(3, 31)), r"has the shape \(3, 31\), the model needs \(3, 32\)"),
    "tokenizer is no JSON": (put(tokenizer__json=b"{"), "The tokenizer of .* cannot be loaded"),
    "tokenizer is empty": (put(tokenizer__json=b"{}"), "The tokenizer of .* cannot be loaded"),
    "tokenizer has code": (
        put(
            tokenizer__json=b"{}",
            tokenizer_config__json=json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}).encode(),
            evil__py="code",
        ),
        "The tokenizer of .* cannot be loaded: it needs code from its repository, which is never run",
    ),
    "base has code": (config(base_model_name_or_path="org/code"), "org/code cannot be loaded: it needs code from its"),
    "base is pickled": (
        config(base_model_name_or_path="org/pickled"),
        "org/pickled cannot be loaded: it has no safetensors",
    ),
}


class _Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def load_each(names):
    """Client: for each repository the error, its message and how long it took."""
    found = []
    for name in names:
        start = time.perf_counter(), time.process_time()
        try:
            houlsby_peft.load(name)
            kind, message = "loaded", ""
        except Exception as error:
            kind, message = type(error).__name__, str(error)
        found.append([kind, message, time.perf_counter() - start[0], time.process_time() - start[1]])
    return found


@pytest.fixture(scope="module")
def trapped(hub, tmp_path_factory):
    """The hub with all repositories; the folder in which a file appears as soon as code from one of them runs."""
    base, traps = make_base(tmp_path_factory.mktemp("base")), tmp_path_factory.mktemp("traps")
    code = f"from pathlib import Path\nPath({str(traps / 'code')!r}).touch()\nclass T: pass\n".encode()
    pickled = pickle.dumps(_Trap(traps / "pickle"))
    hub.add(BASE, base)
    files = {path.name: path.read_bytes() for path in base.iterdir()}
    mapped = {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.T", "AutoModelForSequenceClassification": "evil.T"},
    }
    coded = json.dumps(json.loads(files["config.json"]) | mapped).encode()
    hub.add("org/code", files | {"config.json": coded, "evil.py": code})
    hub.add("org/pickled", {"config.json": files["config.json"], "pytorch_model.bin": pickled})
    adapter = make_adapter(tmp_path_factory.mktemp("adapter"), base)
    good = {path.name: path.read_bytes() for path in adapter.iterdir()}
    for number, (change, _) in enumerate(CASES.values()):
        changed = {
            path: {"pickle": pickled, "code": code}.get(content, content) for path, content in change(good).items()
        }
        hub.add(f"user/case-{number}", changed)
    hub.add("user/good", good | {"../../../outside.json": b"{}", "../adapter_config.json": b"{}"})
    return traps


def test_each_gives_a_clear_error_in_two_seconds_and_runs_nothing(hub, trapped, tmp_path):
    names = [f"user/case-{number}" for number in range(len(CASES))]
    # The first repository is a good one: its time is that of the imports.
    (kind, *_), *outcomes = hub.call(load_each, ["user/good", *names], home=tmp_path / "home" / "cache", token=None)
    assert kind == "loaded"
    assert len(CASES) >= 40
    for name, (case, (_, expected)), (kind, message, wall, seconds) in zip(
        names, CASES.items(), outcomes, strict=True
    ):
        assert kind in ("AdapterError", "HubError"), f"{case}: {kind}: {message}"
        assert re.search(expected, message), f"{case}: {message}"
        assert name in message or "base model" in message, f"{case}: {message}"
        assert len(message) < 1000, case
        assert seconds < 2, case
        assert wall < 10, f"{case}: {wall} s, on a machine that may be busy"
    assert list(trapped.iterdir()) == [], "code from a repository was run"
    assert {path.name for path in tmp_path.iterdir()} == {"home"}, "a file was written outside of the cache"
    assert not list((tmp_path / "home").glob("*.json"))
