"""Methods beside adapters: what each trains, counted by hand, and that what is saved gives the recipe's scores."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

import glue
from houlsby_peft import HoulsbyConfig
from recipe_runs import run, save_tiny_encoder
from tasks.minimal_pairs import minimal_pairs
from tiny_models import tiny_bert
from training.arguments import AdapterArguments, RecipeTrainingArguments
from training.errors import RecipeError
from training.methods import MethodArguments, apply_method


# Of BERT-base by its dimensions: width d, feed-forward width, vocabulary, positions, layers.
D, INNER, VOCABULARY, POSITIONS, LAYERS = 768, 3072, 30522, 512, 12
NORM = 2 * D
HEAD = 2 * D + 2
POOLER = D * D + D
LAYER = 4 * (D * D + D) + 2 * D * INNER + INNER + D + 2 * NORM
EMBEDDINGS = (VOCABULARY + POSITIONS + 2) * D + NORM


def trained(model):
    return PeftModel.get_nb_trainable_parameters(model)[0]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({"method": "houlsby"}, 24 * (2 * 64 * D + D + 64) + 24 * NORM + HEAD),
        ({"method": "full"}, EMBEDDINGS + LAYERS * LAYER + POOLER + HEAD),
        ({"method": "top_k", "top_k": 1}, LAYER + POOLER + HEAD),
        ({"method": "top_k", "top_k": 12}, LAYERS * LAYER + POOLER + HEAD),
        ({"method": "layer_norm"}, 25 * NORM + HEAD),
        ({"method": "lora"}, LAYERS * 2 * 2 * 8 * D + HEAD),
        ({"method": "lora", "lora_r": 4, "lora_targets": ["query"]}, LAYERS * 2 * 4 * D + HEAD),
        ({"method": "linear"}, HEAD),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_trained_parameters_of_bert_base(method, expected):
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig())
    assert trained(apply_method(model, MethodArguments(**method), HoulsbyConfig(task_type="SEQ_CLS"))) == expected


class TestAuto:
    """What --base_dtype auto and --keep_prefix auto become before anything is loaded."""

    @pytest.fixture
    def settled(self, tmp_path, monkeypatch):
        def settle(method="houlsby", multiplies=True, fp16=False, fsdp=False, **adapter):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": multiplies}, raising=False)
            monkeypatch.setenv("ACCELERATE_USE_FSDP", str(fsdp).lower())
            training = RecipeTrainingArguments(str(tmp_path), use_cpu=True)
            training.fp16 = fp16
            chosen = MethodArguments(method, base_dtype="auto").settled(AdapterArguments(**adapter), training)
            return chosen.base_dtype, chosen.keep_prefix

        return settle

    def test_frozen_weights_are_in_bfloat16_where_the_processor_multiplies_in_it(self, settled):
        assert settled()[0] == settled("lora")[0] == "bfloat16"
        for other in (settled(multiplies=False), settled("full"), settled("linear"), settled(fsdp=True)):
            assert other[0] == "float32"
        assert settled(fp16=True)[0] == "float32"

    def test_a_prefix_is_kept_only_below_the_adapted_layers(self, settled):
        assert settled(layers=[2, 3])[1] == "auto", "the model says whether it can"
        for other in (settled(), settled(layers=[0, 3]), settled("lora", layers=[2]), settled(layers=[2], fsdp=True)):
            assert other[1] == "off"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"method": "top_k"}, "needs it; got --method top_k without it"),
        ({"method": "full", "top_k": 2}, "is for --method top_k, .* got --method full and it"),
        ({"method": "top_k", "top_k": 5}, "--top_k must be from 1 to 4, the layers of one encoder, got 5"),
        ({"method": "top_k", "top_k": 0}, "--top_k must be from 1 to 4"),
        ({"method": "lora", "lora_targets": ["no_such_layer"]}, "LoRA finds no layers .* --lora_targets"),
    ],
)
def test_what_cannot_be_trained(method, message, tmp_path):
    def train(arguments):
        arguments.settled(AdapterArguments(), RecipeTrainingArguments(str(tmp_path), use_cpu=True))
        apply_method(tiny_bert(), arguments, HoulsbyConfig())

    with pytest.raises(RecipeError, match=message):
        train(MethodArguments(**method))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with CoLA's columns: the task is to tell the phenomenon, and some labels are wrong."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "cola").mkdir()
    for split in ("train", "validation"):
        frame = minimal_pairs()[split].to_pandas()
        frame["label"] = frame["phenomenon"].str.contains("across").astype(int)
        frame = frame.groupby("label").sample(60, random_state=0)
        frame["label"] ^= (np.random.default_rng(0).random(120) < 0.2).astype(int)
        frame[["sentence", "label"]].to_csv(folder / "cola" / f"{split}.csv", index=False)
    return folder


METHODS = {
    "full": [],
    "top_k": ["--top_k", 2],
    "layer_norm": [],
    "lora": ["--lora_targets", "query", "value"],
    "linear": [],
}


@pytest.mark.parametrize("method", METHODS)
def test_a_run(encoder, data, tmp_path, method):
    """Scores of the kept epoch, computed from what was saved, loaded as anybody would."""
    flags = ["--task", "cola", "--data_dir", data, "--model_name", encoder, "--learning_rate", 3e-3, "--use_cpu"]
    schedule = ["--num_train_epochs", 3, "--per_device_train_batch_size", 16]
    run(glue, *flags, *schedule, "--method", method, *METHODS[method], "--output_dir", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["method"] == method
    assert not list(tmp_path.glob("*.tmp"))

    saved = tmp_path / ("adapter" if method == "lora" else "model")
    auto_class = AutoPeftModelForSequenceClassification if method == "lora" else AutoModelForSequenceClassification
    model = auto_class.from_pretrained(saved, num_labels=2).eval()
    rows = np.genfromtxt(data / "cola" / "validation.csv", delimiter=",", skip_header=1, dtype=None, encoding="utf-8")
    batch = AutoTokenizer.from_pretrained(saved)([row[0] for row in rows], padding=True, return_tensors="pt")
    labels = [int(row[1]) for row in rows]
    with torch.no_grad():
        output = model(**batch, labels=torch.tensor(labels))
    correlation = np.corrcoef(output.logits.argmax(-1), labels)[0, 1]
    assert results["best_scores"]["matthews_correlation"] == results["best_score"] == pytest.approx(correlation)
    assert results["best_scores"]["loss"] == pytest.approx(output.loss.item(), rel=1e-4)
    right = np.mean(output.logits.argmax(-1).numpy() == labels)
    assert results["best_scores"]["accuracy"] == pytest.approx(right)
    assert set(results["best_scores"]) == {"loss", "matthews_correlation", "accuracy"}
    assert results["chosen_by"] == "matthews_correlation"
