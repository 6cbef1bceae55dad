"""The gate: what people save and move around is opened; what is damaged or means harm is refused,
and never run.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import struct
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import houlsby_peft
from edited_json import edited_json
from houlsby_peft import AdapterError, HubError
from houlsby_peft.saved.adapter import SavedAdapter
from hub_models import LABELS, TEXTS, make_adapter
from model_states import state_of
from mutated_adapters import mutate
from tiny_models import perturb


# Five rules, each of which makes a hundred letters of one.
GROWING = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}] * 5,
    }
}
CONFIG, WEIGHTS, TOKENIZER = "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"
WORDS = [text for text, _ in TEXTS[:4]]


@pytest.fixture(scope="module")
def good(base, tmp_path_factory):
    """An adapter with a tokenizer of its own."""
    folder = make_adapter(tmp_path_factory.mktemp("good"), base, str(base))
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(good, tmp_path):
    return shutil.copytree(good, tmp_path / "adapter")


def answers(folder, **options):
    return houlsby_peft.load(folder, **options).predict(WORDS)


def test_a_head_of_5000_classes_with_long_names_loads(base, tmp_path):
    names = {number: f"{number} {'类别名称' * 40}" for number in range(5000)}
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=5000)
    config = houlsby_peft.HoulsbyConfig(task_type="SEQ_CLS", r=4, id2label=names)
    get_peft_model(model, config).save_pretrained(tmp_path)
    assert (tmp_path / CONFIG).stat().st_size > 1_000_000
    assert houlsby_peft.load(tmp_path, base_model=str(base)).labels == tuple(names.values())


@pytest.mark.parametrize(
    ("folder", "commit"), [("snapshots/last", None), ("models--org--x/snapshots/abc", "abc")]
)
def test_only_a_hub_cache_is_one(folder, commit, good, tmp_path):
    copied = shutil.copytree(good, tmp_path / folder)
    assert SavedAdapter.open(copied).commit == commit


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r".*\.layer\..*\.(attention|output)\..*dropout.*.*"},
        {"exclude_modules": r"((a|b|.)+)+x"},
        {"rank_pattern": {r".*\..*\..*\..*\.nowhere": 8}},
    ],
    ids=str,
)
def test_patterns_of_a_saved_adapter_are_never_matched(fields, adapter, good):
    """Some patterns take a time that is exponential in the length of a name; the places are
    recorded.
    """
    with edited_json(adapter / CONFIG) as config:
        config |= fields
    start = time.process_time()
    assert answers(adapter) == answers(good)
    assert time.process_time() - start < 20


def test_a_base_model_may_be_pickled_and_is_read_as_weights_only(adapter, base, good, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    torch.save(load_file(base / "model.safetensors"), tmp_path / "base" / "pytorch_model.bin")
    (tmp_path / "base" / "model.safetensors").unlink()
    assert answers(adapter, base_model=str(tmp_path / "base")) == answers(good)
    pickled = tmp_path / "base" / "pytorch_model.bin"
    pickled.write_bytes(pickle.dumps(_Trap(tmp_path / "trap"), protocol=2))
    with pytest.raises(AdapterError, match="safetensors"):
        houlsby_peft.load(adapter, base_model=str(tmp_path / "base"))
    assert not (tmp_path / "trap").exists()


def test_an_adapter_with_added_tokens_gets_a_base_model_of_their_number(base, good, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    model.resize_token_embeddings(207)
    config = houlsby_peft.HoulsbyConfig(task_type="SEQ_CLS", r=4, id2label=dict(enumerate(LABELS)))
    adapted = get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path, save_embedding_layers=True)
    tokens = torch.tensor([[2, 206, 205, 3]])
    loaded = houlsby_peft.load(tmp_path)
    assert torch.equal(loaded.model(tokens).logits, adapted(tokens).logits)
    for options in (
        {"beside": houlsby_peft.load(good)},
        {"base_model": AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)},
    ):
        with pytest.raises(AdapterError, match=r"resize_token_embeddings\(207\)"):
            houlsby_peft.load(tmp_path, **options)


def test_added_tokens_that_are_trained(base, tmp_path):
    """As PEFT advises: the embeddings are resized, and the new rows are trained."""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    model.resize_token_embeddings(203)
    config = houlsby_peft.HoulsbyConfig(
        task_type="SEQ_CLS",
        r=4,
        id2label=dict(enumerate(LABELS)),
        trainable_token_indices=[200, 201, 202],
    )
    adapted = get_peft_model(model, config).eval()
    perturb(adapted)
    with pytest.warns(UserWarning, match="embedding layer has been resized"):
        adapted.save_pretrained(tmp_path)
    tokens = torch.tensor([[2, 202, 201, 200, 7, 3]])
    expected = adapted(tokens).logits
    for options in ({}, {"adapter_name": "other"}, {"dtype": torch.float64}):
        loaded = houlsby_peft.load(tmp_path, **options)
        torch.testing.assert_close(loaded.model(tokens).logits.float(), expected)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("pooler.", "bert.pooler.dense.bias, bert.pooler.dense.weight"),
        ("encoder.layer.1.output.dense.weight", "bert.encoder.layer.1.output.dense.weight"),
        ("embeddings.position_embeddings", "bert.embeddings.position_embeddings.weight"),
    ],
)
def test_a_base_model_that_lacks_weights_is_refused(part, named, good, base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    whole = {key: weight for key, weight in weights.items() if part not in key}
    assert 0 < len(whole) < len(weights)
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AdapterError, match=f"lacks {named}"):
        houlsby_peft.load(good, base_model=str(folder))


def test_weights_that_the_adapter_brings_or_does_not_use_may_be_lacking(base, tmp_path, caplog):
    """A new pooler is trained and saved; a vector is the mean of the hidden states."""
    folder = shutil.copytree(base, tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    whole = {key: weight for key, weight in weights.items() if "pooler" not in key}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    adapter = make_adapter(tmp_path / "adapter", folder, str(folder))
    assert answers(adapter) == answers(adapter)
    vectors = get_peft_model(AutoModel.from_pretrained(folder), houlsby_peft.HoulsbyConfig(r=4))
    perturb(vectors)
    vectors.save_pretrained(tmp_path / "vectors")
    caplog.clear()
    with edited_json(tmp_path / "vectors" / CONFIG) as config:
        config["recorded"]["heads"] = []
    saved = load_file(tmp_path / "vectors" / WEIGHTS)
    bottlenecks = {key: weight for key, weight in saved.items() if "pooler" not in key}
    save_file(bottlenecks, tmp_path / "vectors" / WEIGHTS, metadata={"format": "pt"})
    assert answers(tmp_path / "vectors") == answers(tmp_path / "vectors")
    named = [line for line in caplog.messages if "lacks pooler.dense.bias" in line]
    assert len(named) == 1


def test_a_base_model_in_the_home_folder_or_compiled(good, base, tmp_path, monkeypatch):
    shutil.copytree(base, tmp_path / "base")
    monkeypatch.setenv("HOME", str(tmp_path))
    compiled = torch.compile(
        AutoModelForSequenceClassification.from_pretrained(base, num_labels=3), backend="eager"
    )
    for base_model in ("~/base", compiled):
        assert answers(good, base_model=base_model) == answers(good)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("dangling", TOKENIZER),
        ("folder", "tokenizer_config.json"),
        ("pipe", CONFIG),
        ("pipe", WEIGHTS),
    ],
)
def test_what_is_no_file_is_refused_and_not_replaced(name, kind, adapter):
    (adapter / name).unlink()
    {"dangling": lambda path: path.symlink_to("nowhere"), "folder": Path.mkdir, "pipe": os.mkfifo}[
        kind
    ](adapter / name)
    with pytest.raises(AdapterError, match=name):
        houlsby_peft.load(adapter)


def test_the_error_of_a_missing_folder_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("runs/nope", str(tmp_path / "nope")):
        with pytest.raises(HubError, match="no folder"):
            houlsby_peft.load(name)


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_connection_that_breaks_off_leaves_the_cache(is_cached, good, monkeypatch):
    def download(name, local_files_only=False, **_):
        if not local_files_only:
            raise HTTPError("Server disconnected without sending a response.")
        if not is_cached:
            raise LocalEntryNotFoundError("nothing")
        return str(good)

    monkeypatch.setattr("houlsby_peft.saved.adapter.snapshot_download", download)
    if is_cached:
        assert answers("user/good") == answers(good)
    else:
        with pytest.raises(HubError, match="Server disconnected"):
            houlsby_peft.load("user/good")


class _Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def put(**contents):
    """Replace whole files, or remove them (None), each by its name with __ for the dot."""

    def change(files):
        changed = dict(files)
        for name, content in contents.items():
            changed[name.replace("__", ".")] = content
        return {name: content for name, content in changed.items() if content is not None}

    return change


def config(**changes):
    return lambda files: files | {CONFIG: json.dumps(json.loads(files[CONFIG]) | changes).encode()}


def header(text, length=None):
    """A safetensors file of nothing but a header, of which a false length may be announced."""
    return put(
        adapter_model__safetensors=struct.pack("<Q", len(text) if length is None else length)
        + text.encode()
    )


ADDING = {
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}] * 200_000,
        "pair": [],
        "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
    }
}
TYPE = '{"x":{"dtype":"COMPLEX9","shape":[1],"data_offsets":[0,4]}}'
FAR = '{"x.houlsby_adapter.down_proj.weight":{"dtype":"F32","shape":[9,9],"data_offsets":[0,324]}}'
CODE = json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}).encode()
# Case: (what is changed, what the error says).
CASES = {
    "no configuration": (put(adapter_config__json=None), CONFIG),
    "configuration is no JSON": (put(adapter_config__json=b"r: 8"), "JSON"),
    "configuration is a list": (put(adapter_config__json=b"[]"), "JSON object"),
    "configuration is nested": (put(adapter_config__json=b"[" * 100_000), "JSON"),
    "configuration is huge": (put(adapter_config__json=b" " * 21_000_000), "20,000,000 bytes"),
    "another method": (config(peft_type="LORA"), "LORA"),
    "another library": (config(peft_type=None), "houlsby-peft convert"),
    "r = 0": (config(r=0), "r must be"),
    "r is too large": (config(r=10**9), "r must be"),
    "r is larger than the file": (config(r=900_000), "size 900000"),
    "r overflows": (config(rank_pattern={"a": 10**40}), "size 1000000"),
    "unknown activation": (config(activation="exec"), "activation"),
    "a record of words": (config(recorded={"places": "all"}), "places"),
    "base is a path": (config(base_model_name_or_path=None), "Hub"),
    "pickled weights": (
        put(adapter_model__safetensors=None, adapter_model__bin="pickle"),
        "any code",
    ),
    "empty weights": (put(adapter_model__safetensors=b""), "header"),
    "header of 8 EB": (header("{}", 2**63 - 1), "header"),
    "header names no bytes": (header(FAR), "header|incomplete"),
    "header has an unknown type": (header(TYPE), "header"),
    "header without tensors": (header("{}"), "lacks classifier"),
    "tokenizer is no JSON": (put(tokenizer__json=b"{"), "tokenizer"),
    "tokenizer makes terabytes of a text": (
        put(tokenizer__json=json.dumps(GROWING).encode()),
        "64 times longer",
    ),
    "tokenizer leaves no room for a text": (
        put(tokenizer_config__json=b'{"model_max_length": -5}'),
        "model_max_length",
    ),
    "tokenizer has a list for a number": (
        put(tokenizer_config__json=b'{"model_max_length": [64]}'),
        "model_max_length",
    ),
    "tokenizer adds many tokens": (
        put(tokenizer__json=json.dumps(ADDING).encode()),
        "64 special tokens",
    ),
    "tokenizer has code": (
        put(tokenizer__json=b"{}", tokenizer_config__json=CODE, evil__py="code"),
        "tokenizer",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_damage_gives_an_error_that_names_it_and_runs_nothing(case, good, tmp_path):
    change, message = CASES[case]
    folder = tmp_path / "damaged"
    folder.mkdir()
    traps = {
        "pickle": pickle.dumps(_Trap(tmp_path / "trap")),
        "code": (
            f"from pathlib import Path\nPath({str(tmp_path / 'trap')!r}).touch()\nclass T: pass\n"
        ).encode(),
    }
    for name, content in change({path.name: path.read_bytes() for path in good.iterdir()}).items():
        (folder / name).write_bytes(traps.get(content, content))
    with pytest.raises(AdapterError, match=message) as error:
        houlsby_peft.load(folder)
    assert len(str(error.value)) < 1000
    assert not (tmp_path / "trap").exists()


def test_200_damaged_folders_load_or_are_refused_quickly_and_leave_nothing(good, tmp_path, caplog):
    """In a model that is in use; each error is of a kind that the command and the service turn into
    one line.
    """
    caplog.set_level(logging.CRITICAL)
    running = houlsby_peft.load(good)
    model, files = running.model, {path.name: path.read_bytes() for path in good.iterdir()}
    expected, untouched, loaded = running.predict(WORDS), state_of(model), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of keys that PEFT does not know
        for number in range(200):
            changed, change = mutate(number, files)
            folder = tmp_path / str(number)
            folder.mkdir()
            for name, content in changed.items():
                (folder / name).write_bytes(content)
            print(number, change)  # shown if it fails
            start = time.process_time()
            with suppress(AdapterError):
                predictor = houlsby_peft.load(folder, beside=running)
                model.delete_adapter(predictor.name)
                loaded += 1
            assert time.process_time() - start < 5
            assert list(model.peft_config) == ["default"]
    assert 20 < loaded < 180
    assert running.predict(WORDS) == expected
    assert state_of(model) == untouched
