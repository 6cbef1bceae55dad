"""Methods beside adapters, and the frozen weights' data type: what each trains, saves and gives."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "full", "top_k": 2}, "need each other, got full and 2"),
        (
            {"method": "top_k", "top_k": 5},
            "--top_k must be from 1 to 4, the layers of one encoder, got 5",
        ),
    ],
)
def test_what_does_not_go_together(options, message, tmp_path):
    def train(method):
        method.check(AdapterArguments(), RecipeTrainingArguments(str(tmp_path), use_cpu=True))
        apply_method(tiny_bert(), method, HoulsbyConfig())

    with pytest.raises(RecipeError, match=message):
        train(MethodArguments(**options))


class Recipe(NamedTuple):
    """A recipe, the class that loads what it saves, and the names of its head's modules."""

    script: ModuleType
    auto_class: Any
    head: tuple[str, ...]
    flags: tuple[object, ...] = ()


RECIPES = {
    "tagging": Recipe(token_classification, AutoModelForTokenClassification, ("classifier.",)),
    "squad": Recipe(
        squad, AutoModelForQuestionAnswering, ("qa_outputs.",), ("--max_length", 80, "--stride", 4)
    ),
    "texts": Recipe(text_classification, AutoModelForSequenceClassification, ("classifier.",)),
    "masked words": Recipe(mlm, AutoModelForMaskedLM, ("cls.",), ("--text_columns", "text")),
}
OPTIONS = {"top_k": ("--top_k", 2), "lora": ("--lora_targets", "query", "value")}
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
def ends(monkeypatch):
    """The models at the end of the runs, with the weights that they kept."""
    found = []
    save = RecipeTrainer.save_trained
    monkeypatch.setattr(
        RecipeTrainer, "save_trained", lambda self: (found.append(self.model.eval()), save(self))
    )
    return found


def is_trained(method: str, name: str, head: tuple[str, ...]) -> bool:
    """What the method trains of the base model, by the names of BERT's weights."""
    return (
        name.startswith(head)
        or method == "full"
        or (
            method == "top_k" and (".layer.2." in name or ".layer.3." in name or ".pooler." in name)
        )
        or (method == "layer_norm" and "LayerNorm" in name)
    )


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
def test_a_run(recipe, method, encoder, data, tmp_path, ends):
    """Which weights change, by name, and that what is saved gives the same outputs, loaded as
    anybody would.
    """
    script, auto_class, head, own = RECIPES[recipe]
    flags = (
        "--method",
        method,
        *OPTIONS.get(method, ()),
        *own,
        "--warmup_steps",
        0,
        "--learning_rate",
        1e-2,
    )
    run(script, "--data", data / recipe, "--model_name", encoder, "--output_dir", tmp_path,
        "--use_cpu", "--max_steps", 1, *flags)  # fmt: skip
    assert results_of(tmp_path)["method"] == method
    tokens = AutoTokenizer.from_pretrained(encoder)(
        SENTENCES[:4], padding=True, return_tensors="pt"
    )
    if method in ("lora", "ia3"):
        saved = tmp_path / "adapter"
        model = auto_class.from_pretrained(encoder, num_labels=2)
        if (saved / mlm.HEAD_FILE).exists():
            model.load_state_dict(load_file(saved / mlm.HEAD_FILE), strict=False)
        model = PeftModel.from_pretrained(model, saved)
    else:
        model = auto_class.from_pretrained(tmp_path / "model")
        before = load_file(encoder / "model.safetensors")
        now = {name.removeprefix("bert."): value for name, value in model.state_dict().items()}
        # A key's bias moves all scores of a query alike, so that it has no gradient.
        same = {name for name in before.keys() & now.keys() if torch.equal(before[name], now[name])}
        frozen = {
            name for name in before.keys() & now.keys() if not is_trained(method, f".{name}", head)
        }
        assert frozen <= same | {name for name in before if method == "full" and "pooler" in name}
        assert {
            name for name in same - frozen if "key.bias" not in name and "pooler" not in name
        } == set()
    with torch.no_grad():
        for kept, loaded in zip(
            ends[-1](**tokens).to_tuple(), model.eval()(**tokens).to_tuple(), strict=True
        ):
            torch.testing.assert_close(loaded, kept)


def test_up_projections_have_a_rate_of_their_own(encoder, glue_data, tmp_path):
    """After a resume, too: the second command has more steps."""
    flags = ("--task", "cola", "--use_cpu", "--up_lr_ratio", "0.1", "--learning_rate", "1e-2")
    folders = ("--model_name", encoder, "--data_dir", glue_data, "--output_dir", tmp_path)
    saving = ("--save_strategy", "steps", "--eval_strategy", "steps", "--save_steps", "1")
    for steps, more in ((1, ()), (2, ("--resume_from_checkpoint", "last"))):
        run(glue, *flags, *folders, *saving, "--eval_steps", 1, "--max_steps", steps, *more)
        saved = torch.load(tmp_path / f"checkpoint-{steps}" / "optimizer.pt", weights_only=True)
        # Weights with decay and without: the norms and biases.
        rates = [group["initial_lr"] for group in saved["param_groups"]]
        assert rates == [1e-2, 1e-3, 1e-2, 1e-3]


def test_pretraining_without_adapters_is_a_start_for_a_task(encoder, glue_data, data, tmp_path):
    """At a learning rate that is zero in float32, what glue.py saves is what it started from, with
    a new head.
    """
    text = tmp_path / "cola-text"
    run(mlm, "--data", data / "texts", "--model_name", encoder, "--output_dir", text, "--use_cpu",
        "--max_steps", 1, "--method", "full")  # fmt: skip
    pretrained, before = (
        load_file(text / "model" / "model.safetensors"),
        load_file(encoder / "model.safetensors"),
    )
    assert torch.equal(pretrained["bert.pooler.dense.weight"], before["pooler.dense.weight"])
    run(glue, "--task", "cola", "--data_dir", glue_data, "--use_cpu", "--max_steps", 1,
        "--method", "full", "--model_name", tmp_path / "{task}-text" / "model",
        "--output_dir", tmp_path / "run", "--learning_rate", 1e-60)  # fmt: skip
    started = load_file(tmp_path / "run" / "model" / "model.safetensors")
    shared = {name for name in pretrained if name.startswith("bert.")}
    assert started.keys() == shared | {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(started[name], pretrained[name]) for name in shared)


class TestDataType:
    @pytest.fixture
    def dtype(self, encoder, tmp_path, monkeypatch):
        def find(method="houlsby", fp16=False, fsdp=False, **adapter):
            monkeypatch.setattr(models, "_choose_dtype", lambda *_: "bfloat16")
            training = RecipeTrainingArguments(str(tmp_path), use_cpu=True)
            monkeypatch.setenv("ACCELERATE_USE_FSDP", str(fsdp).lower())
            training.fp16 = fp16
            arguments = EncoderArguments(model_name=str(encoder))
            command = Command(
                arguments, MethodArguments(method), AdapterArguments(**adapter), training
            )
            chosen = find_dtype(command, str(encoder))
            monkeypatch.delenv("ACCELERATE_USE_FSDP")
            return chosen

        return find

    def test_auto(self, dtype):
        assert dtype() == dtype("lora") == "bfloat16"
        assert {dtype("full"), dtype("linear"), dtype(fsdp=True), dtype(fp16=True)} == {"float32"}

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
        flags = ["--task", "cola", "--data_dir", glue_data, "--model_name", encoder, "--use_cpu",
                 "--max_steps", 1, "--output_dir", tmp_path]  # fmt: skip
        monkeypatch.setattr(models, "_choose_dtype", lambda *_: "bfloat16")
        run(glue, *flags)
        adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert {weight.dtype for weight in adapter.values()} == {torch.float32}
        monkeypatch.setattr(models, "_choose_dtype", lambda *_: "float32")
        run(glue, *flags)
        assert "nothing is trained" in capsys.readouterr().out
        run(glue, *flags[:-1], tmp_path / "again", "--evaluate", tmp_path)
        assert results_of(tmp_path)["arguments"]["base_dtype"] == "bfloat16"


ORIGINAL = models._choose_dtype  # before conftest.py replaces it
