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
    """Change fields at the top of a configuration; ... removes one."""

    def change(files):
        fields = json.loads(files[file]) | changes
        return files | {
            file: json.dumps(
                {name: value for name, value in fields.items() if value is not ...}
            ).encode()
        }

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
        tensors |= {
            {"down": DOWN, "up": UP}.get(name, name): tensor for name, tensor in changes.items()
        }
        return files | {
            file: save({name: tensor for name, tensor in tensors.items() if tensor is not None})
        }

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
        return {name: value for name, value in files.items() if name != WEIGHTS} | {
            "pytorch_adapter.bin": data
        }

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


# Case: (what is changed, what the error says).
CASES = {
    "empty configuration": (put(CONFIG, b""), "is not valid JSON"),
    "configuration is nested": (put(CONFIG, b"[" * 100_000), "is not valid JSON"),
    "configuration is huge": (
        put(CONFIG, b" " * 20_000_001),
        "must be smaller than 20,000,000 bytes",
    ),
    "an adapter of PEFT": (
        put(CONFIG, b'{"peft_type": "LORA", "r": 8}'),
        "is of PEFT.s format already, method",
    ),
    "another name": (top(name="../../etc"), "which its configuration has no place for"),
    "huge width": (top(hidden_size=10**40), "the width 1000"),
    "another type": (top(model_type="gpt2"), "a base model of the type gpt2"),
    "base is a path": (
        top(model_name="../../../etc"),
        "model_name .* must be a name on the Hub; got '../../../etc'",
    ),
    "activation with weights": (options(non_linearity="prelu"), "it lacks .*activation.weight"),
    "factor is 0": (options(reduction_factor=0), "ZeroDivisionError"),
    "factors lack a layer": (options(reduction_factor={"0": 2}), "has the shape"),
    "another factor": (
        options(reduction_factor=4),
        r"has the shape \(2, 16\), the model needs \(4, 16\)",
    ),
    "leaves out layer 1": (options(leave_out=[1]), "which its configuration has no place for"),
    "a sub-layer more": (options(mh_adapter=True), "it lacks .*attention"),
    "Compacter": (
        options(phm_layer=True),
        "phm_layer=True cannot be converted: its projections are sums",
    ),
    "Glow": (
        options(inv_adapter="glow", inv_adapter_reduction_factor=2),
        "inv_adapter='glow' cannot be converted",
    ),
    "a coupling without weights": (
        options(inv_adapter="nice", inv_adapter_reduction_factor=2),
        r"it lacks .*\.F\.",
    ),
    "LoRA": (options(architecture="lora"), "it is not a bottleneck adapter"),
    "another residual": (
        options(residual_before_ln="post_add"),
        "residual_before_ln='post_add', is_parallel=False",
    ),
    "AdapterPlus after a norm": (
        options(residual_before_ln=False, original_ln_after=False),
        "which computes something else on a bert model",
    ),
    "weights are text": (put(WEIGHTS, b"weights, honestly"), "SafetensorError"),
    "header of 8 EB": (header("{}", 2**63 - 1), "SafetensorError"),
    "header without tensors": (header("{}"), "it lacks "),
    "NaN": (weights(down=torch.full((2, 16), float("nan"))), "must hold finite numbers"),
    "a weight is missing": (weights(down=None), "it lacks .*down_proj.weight"),
    "a weight with a path": (
        weights(**{"../../x": torch.ones(1)}),
        "which its configuration has no place for",
    ),
    "a weight twice": (
        weights(**{DOWN.removeprefix("bert."): torch.ones(2, 16)}),
        "which its configuration has no",
    ),
    "head is unknown": (
        head(head_type="exec"),
        "A head must be for one of classification, .*; got exec",
    ),
    "head of 1,000,000,000 layers": (
        head(layers=10**9),
        "no class of transformers for bert has such a head",
    ),
    "head of another width": (
        weights(HEAD_WEIGHTS, **{"heads.task.4.weight": torch.ones(3, 15)}),
        "has the shape",
    ),
    "labels have a gap": (head(label2id={"a": 0, "b": 2, "c": 3}), "id2label"),
    "labels are no text": (head(label2id={"\ud800": 0, "b": 1, "c": 2}), "surrogates|id2label"),
    "static head of no model": (
        top(HEAD_CONFIG, config=None, model_class="system"),
        "A head must be for one of .*; got system",
    ),
    "static head of another model": (
        top(HEAD_CONFIG, config=None, model_class="RobertaForSequenceClassification", num_labels=3),
        "must hold the weights of the head of a BertForSequenceClassification",
    ),
    "static head of 10**12 labels": (
        top(
            HEAD_CONFIG, config=None, model_class="BertForSequenceClassification", num_labels=10**12
        ),
        "cannot be converted",
    ),
}
PICKLED = {
    "code": (pickled(pickle.dumps(Trap(), protocol=2)), "holds more than tensors"),
    "code as torch saves it": (pickled({DOWN: Trap()}), "holds more than tensors"),
    "a list": (pickled([torch.ones(2)]), "AttributeError"),
    "a sparse tensor": (pickled({DOWN: torch.ones(2, 16).to_sparse()}), "not a plain tensor"),
    "a view of one number": (
        pickled({DOWN: torch.ones(1).expand(2**40)}),
        "of at most the file's size",
    ),
    "a bomb": (pickled(bomb()), "would unpack to"),
    "an empty file": (pickled(b""), "EOFError"),
    "NaN": (pickled({DOWN: torch.full((2, 16), float("nan"))}), "must hold finite numbers"),
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


def refuse(case, changes, expected, base, tmp_path, allow_pickle=False):
    source = write(changes, tmp_path / "source")
    start = time.process_time()
    # A base model of one's own choice takes the place of the recorded one.
    own = None if case.startswith("base ") else base
    with pytest.raises(houlsby_peft.AdapterError, match=expected) as error:
        houlsby_peft.convert(source, tmp_path / "target", base_model=own, allow_pickle=allow_pickle)
    assert str(error.value).startswith(f"{source} cannot be converted: ")
    assert len(str(error.value)) < 1000
    assert time.process_time() - start < 2
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("case", CASES)
def test_each_is_refused_with_a_clear_error(case, good, base, tmp_path):
    change, expected = CASES[case]
    refuse(case, change(good), expected, base, tmp_path)


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize(
    "name", [CONFIG, WEIGHTS, "pytorch_adapter.bin", HEAD_CONFIG, HEAD_WEIGHTS]
)
def test_a_pipe_is_refused_and_never_waited_for(name, allow_pickle, good, base, tmp_path):
    source = write({key: value for key, value in good.items() if key != name}, tmp_path / "source")
    os.mkfifo(source / name)
    with pytest.raises(houlsby_peft.AdapterError, match=f"{name} must be a regular file"):
        houlsby_peft.convert(
            source, tmp_path / "target", base_model=base, allow_pickle=allow_pickle
        )
    assert not (tmp_path / "target").exists()


def test_a_missing_file_is_named(good, base, tmp_path):
    for number, (name, lacking) in enumerate(((CONFIG, CONFIG), (WEIGHTS, "pytorch_adapter.bin"))):
        source = write(
            {key: value for key, value in good.items() if key != name}, tmp_path / str(number)
        )
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
    change, expected = PICKLED[case]
    files = change(good)
    refuse(case, files, expected, base, tmp_path, allow_pickle=True)
    (folder := tmp_path / "again").mkdir()
    refuse(
        case,
        files,
        "a pickled file, which only the converter reads, and only if you allow it",
        base,
        folder,
    )


def test_mutated_folders_are_refused_or_convert_to_adapters_that_load(good, base, tmp_path):
    names = {WEIGHTS: "adapter_model.safetensors"}
    files = {names.get(name, name): content for name, content in good.items()}
    back = {new: old for old, new in names.items()}
    outcomes = {"refused": 0, "converted": 0}
    for number in range(40):
        changed, what = mutate(number, files)
        source = write(
            {back.get(name, name): content for name, content in changed.items()},
            tmp_path / f"{number}",
        )
        target = tmp_path / f"target-{number}"
        with suppress(houlsby_peft.AdapterError, FileNotFoundError):
            houlsby_peft.convert(source, target, base_model=base)
        if not target.exists():
            outcomes["refused"] += 1
            continue
        outcomes["converted"] += 1
        if outcomes["converted"] % 4 == 1:
            class_name = json.loads((target / CONFIG).read_text())["auto_mapping"][
                "base_model_class"
            ]
            model = PeftModel.from_pretrained(tiny_base("bert", class_name), target).eval()
            assert model(**inputs("bert")).logits.isfinite().all(), what
    assert min(outcomes.values()) > 5, outcomes
