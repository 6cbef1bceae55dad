"""Methods beside adapters, and the frozen weights' data type: what each trains, saves and gives."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

import glue
import mlm
import squad
import text_classification
import token_classification
from demo import minimal_pairs
from houlsby_peft import HoulsbyConfig
from recipe_runs import results_of, run, save_tiny_encoder, write
from run import model as models
from run.arguments import AdapterArguments, EncoderArguments, MethodArguments
from run.command import Command
from run.edge import RecipeError
from run.model import apply_method, find_dtype
from run.trainer import RecipeTrainer
from run.training_arguments import RecipeTrainingArguments
from tiny_models import tiny_bert


# Of BERT-base by its dimensions: width d, feed-forward width, vocabulary, positions, layers.
D, INNER, VOCABULARY, POSITIONS, LAYERS = 768, 3072, 30522, 512, 12
NORM, HEAD, POOLER = 2 * D, 2 * D + 2, D * D + D
LAYER = 4 * (D * D + D) + 2 * D * INNER + INNER + D + 2 * NORM
EMBEDDINGS = (VOCABULARY + POSITIONS + 2) * D + NORM


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({"method": "houlsby"}, 24 * (2 * 64 * D + D + 64) + 24 * NORM + HEAD),
        ({"method": "full"}, EMBEDDINGS + LAYERS * LAYER + POOLER + HEAD),
        ({"method": "top_k", "top_k": 12}, LAYERS * LAYER + POOLER + HEAD),
        ({"method": "layer_norm"}, 25 * NORM + HEAD),
        ({"method": "lora", "lora_r": 4, "lora_targets": ["query"]}, LAYERS * 2 * 4 * D + HEAD),
        ({"method": "ia3"}, LAYERS * (3 * D + INNER) + HEAD),
        ({"method": "linear"}, HEAD),
    ],
    ids=lambda value: value["method"] if isinstance(value, dict) else "",
)
def test_trained_parameters_of_bert_base(method, expected):
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig())
    adapted = apply_method(model, MethodArguments(**method), HoulsbyConfig(task_type="SEQ_CLS"))
    assert PeftModel.get_nb_trainable_parameters(adapted)[0] == expected


def test_what_does_not_go_together(tmp_path):
    training = RecipeTrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(RecipeError, match="full and 2"):
        MethodArguments("full", top_k=2).check(AdapterArguments(), training)
    with pytest.raises(RecipeError, match="from 1 to 4"):
        apply_method(tiny_bert(), MethodArguments("top_k", top_k=5), HoulsbyConfig())


class Recipe(NamedTuple):
    """A recipe, the class that loads what it saves, and the names of its head's modules."""

    script: ModuleType
    auto_class: Any
    head: tuple[str, ...]
    flags: Mapping[str, object] = {}


RECIPES = {
    "tagging": Recipe(token_classification, AutoModelForTokenClassification, ("classifier.",)),
    "squad": Recipe(
        squad, AutoModelForQuestionAnswering, ("qa_outputs.",), {"max_length": 80, "stride": 4}
    ),
    "texts": Recipe(text_classification, AutoModelForSequenceClassification, ("classifier.",)),
    "masked words": Recipe(mlm, AutoModelForMaskedLM, ("cls.",), {"text_columns": "text"}),
}
OPTIONS = {"top_k": {"top_k": 2}, "lora": {"lora_targets": ["query", "value"]}}
SENTENCES = minimal_pairs()["train"]["sentence"][:32]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """One that reads windows of SQuAD."""
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder"), max_position_embeddings=96)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder per recipe, each with the same few sentences."""
    root = tmp_path_factory.mktemp("data")
    words = [sentence.rstrip(".").split() for sentence in SENTENCES]
    texts = {"text": SENTENCES, "label": ["a", "b"] * 16}
    columns = {
        "texts": texts,
        "masked words": texts,
        "tagging": {"words": words, "tags": [["X", *"O" * (len(row) - 1)] for row in words]},
        "squad": {
            "id": [str(number) for number in range(32)],
            "context": SENTENCES,
            "question": [sentence.replace(".", "?") for sentence in SENTENCES],
            "answers": [{"text": [text.split()[0]], "answer_start": [0]} for text in SENTENCES],
        },
    }
    for name, of_recipe in columns.items():
        for split in ("train", "validation"):
            write(root / name / f"{split}.jsonl", **of_recipe)
    return root


@pytest.fixture
def trained(monkeypatch):
    """The models at the end of the runs, with the weights that they kept."""
    models = []
    save = RecipeTrainer.save_trained

    def keep(trainer):
        models.append(trainer.model.eval())
        save(trainer)

    monkeypatch.setattr(RecipeTrainer, "save_trained", keep)
    return models


# What each method trains of the base model beside its head, by parts of the names of BERT's
# weights.
TRAINED = {
    "full": ("",),
    "top_k": (".layer.2.", ".layer.3.", "pooler."),
    "layer_norm": ("LayerNorm",),
    "linear": (),
}


@pytest.mark.parametrize(
    ("recipe", "method"),
    [
        ("tagging", "top_k"),
        ("squad", "layer_norm"),
        ("squad", "ia3"),
        ("texts", "full"),
        ("texts", "linear"),
        ("masked words", "full"),
        ("masked words", "lora"),
    ],
)
def test_a_run(recipe, method, encoder, data, tmp_path, trained):
    """Which weights change, by name, and that what is saved gives the same outputs, loaded as
    anybody would.
    """
    script, auto_class, head, flags = RECIPES[recipe]
    run(script, data=data / recipe, model_name=encoder, output_dir=tmp_path, method=method,
        max_steps=1, warmup_steps=0, learning_rate=1e-2, **flags,
        **OPTIONS.get(method, {}))  # fmt: skip
    assert results_of(tmp_path)["method"] == method
    if method in ("lora", "ia3"):
        saved = tmp_path / "adapter"
        model = auto_class.from_pretrained(encoder, num_labels=2)
        if (saved / mlm.HEAD_FILE).exists():
            model.load_state_dict(load_file(saved / mlm.HEAD_FILE), strict=False)
        model = PeftModel.from_pretrained(model, saved)
    else:
        model = auto_class.from_pretrained(tmp_path / "model")
        before = load_file(encoder / "model.safetensors")
        for name, weight in model.state_dict().items():
            name = name.removeprefix("bert.")
            # A key's bias moves all scores of a query alike, so that it has no gradient; nor has a
            # pooler that is not read.
            if name in before and "key.bias" not in name and "pooler" not in name:
                is_trained = name.startswith(head) or any(part in name for part in TRAINED[method])
                assert torch.equal(weight, before[name]) != is_trained, name
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    tokens = tokenizer(SENTENCES[:4], padding=True, return_tensors="pt")
    with torch.no_grad():
        outputs, expected = model.eval()(**tokens), trained[-1](**tokens)
    torch.testing.assert_close(outputs.to_tuple(), expected.to_tuple())


def test_pretraining_without_adapters_is_a_start_for_a_task(encoder, glue_data, data, tmp_path):
    """At a learning rate that is zero in float32, what glue.py saves is what it started from, with
    a new head.
    """
    text = tmp_path / "cola-text"
    run(mlm, data=data / "texts", model_name=encoder, output_dir=text, max_steps=1, method="full")
    pretrained = load_file(text / "model" / "model.safetensors")
    before = load_file(encoder / "model.safetensors")
    assert torch.equal(pretrained["bert.pooler.dense.weight"], before["pooler.dense.weight"])
    run(glue, task="cola", data_dir=glue_data, max_steps=1, method="full", learning_rate=1e-60,
        model_name=tmp_path / "{task}-text" / "model", output_dir=tmp_path / "run")  # fmt: skip
    started = load_file(tmp_path / "run" / "model" / "model.safetensors")
    shared = {name for name in pretrained if name.startswith("bert.")}
    assert started.keys() == shared | {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(started[name], pretrained[name]) for name in shared)


class TestDataType:
    @pytest.mark.parametrize(
        ("method", "training", "environment", "expected"),
        [
            ("houlsby", {}, {}, "bfloat16"),
            ("lora", {}, {}, "bfloat16"),
            ("full", {}, {}, "float32"),
            ("linear", {}, {}, "float32"),
            ("houlsby", {"fp16": True}, {}, "float32"),
            ("houlsby", {}, {"ACCELERATE_USE_FSDP": "true"}, "float32"),
        ],
    )
    def test_auto(self, method, training, environment, expected, encoder, tmp_path, monkeypatch):
        """Frozen weights are in the faster type, unless they train or are kept in another one."""
        monkeypatch.setattr(models, "_choose_dtype", lambda *_: "bfloat16")
        arguments = RecipeTrainingArguments(str(tmp_path), use_cpu=True)
        vars(arguments).update(training)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        groups = (EncoderArguments(str(encoder)), MethodArguments(method), AdapterArguments())
        assert find_dtype(Command(*groups, arguments), str(encoder)) == expected

    def test_it_is_measured_once_per_machine(self, encoder, tmp_path, monkeypatch):
        training = RecipeTrainingArguments(str(tmp_path), use_cpu=True)
        monkeypatch.setattr(models, "HF_ASSETS_CACHE", tmp_path)
        measured = ORIGINAL(training, str(encoder))
        assert measured in ("float32", "bfloat16")
        monkeypatch.setattr(models, "Timer", None)
        assert ORIGINAL(training, str(encoder)) == measured

    def test_a_run_goes_on_in_the_type_it_began_with(
        self, encoder, glue_data, tmp_path, monkeypatch, capsys
    ):
        command = {"task": "cola", "data_dir": glue_data, "model_name": encoder, "max_steps": 1}
        monkeypatch.setattr(models, "_choose_dtype", lambda *_: "bfloat16")
        run(glue, **command, output_dir=tmp_path)
        adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert {weight.dtype for weight in adapter.values()} == {torch.float32}
        monkeypatch.setattr(models, "_choose_dtype", lambda *_: "float32")
        run(glue, **command, output_dir=tmp_path)
        assert "nothing is trained" in capsys.readouterr().out
        run(glue, **command, output_dir=tmp_path / "again", evaluate=tmp_path)
        assert results_of(tmp_path)["arguments"]["base_dtype"] == "bfloat16"


ORIGINAL = models._choose_dtype  # before conftest.py replaces it
