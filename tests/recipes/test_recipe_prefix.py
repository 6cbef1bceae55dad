"""--layers and --keep_prefix of the GLUE recipe: upper layers are adapted, and what lies below runs once a text."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import LongformerConfig, LongformerForSequenceClassification, TrainingArguments
from transformers.models.bert.modeling_bert import BertLayer

import glue
from houlsby_peft import HoulsbyConfig
from recipe_runs import run, save_tiny_encoder
from training.arguments import AdapterArguments
from training.errors import RecipeError
from training.methods import MethodArguments, keep_prefix, prepare_model


EPOCHS, BATCH = 3, 32
FLAGS = ("--use_cpu", "--max_train_samples", 64, "--num_train_epochs", EPOCHS, "--learning_rate", 1e-2, "--r", 4)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Without dropout, so that a run with the prefix kept is to give what one without it gives."""
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder"), **no_dropout)


@pytest.fixture
def rows(monkeypatch):
    """How many rows each run of an encoder's layer has had."""
    counts = []
    forward = BertLayer.forward

    def counted(layer, hidden_states, *args, **kwargs):
        counts.append(len(hidden_states))
        return forward(layer, hidden_states, *args, **kwargs)

    monkeypatch.setattr(BertLayer, "forward", counted)
    return counts


def train(encoder, output, *flags):
    run(glue, "--model_name", encoder, "--output_dir", output, *FLAGS, *flags)
    results = json.loads((output / "results.json").read_text())
    return results["best_scores"], load_file(output / "adapter" / "adapter_model.safetensors")


def test_the_adapter_is_the_same_and_the_prefix_runs_once_a_text(encoder, tmp_path, rows, capsys):
    scores, weights = train(encoder, tmp_path / "plain", "--layers", 2, 3, "--keep_prefix", "off")
    plain = sum(rows)
    assert HoulsbyConfig.from_pretrained(str(tmp_path / "plain" / "adapter")).layers_to_transform == [2, 3]
    assert not [name for name in weights if ".layer.0." in name or ".layer.1." in name]
    kept = []
    # The second run with the folder finds what the first one has left there.
    for name, where in [("memory", "auto"), ("first", tmp_path / "kept"), ("second", tmp_path / "kept")]:
        rows.clear()
        found = train(encoder, tmp_path / name, "--layers", 2, 3, "--keep_prefix", where)
        kept.append(sum(rows))
        assert found[0] == pytest.approx(scores, abs=1e-4)
        assert found[1].keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(found[1][key], weight, atol=1e-4, rtol=1e-3)
    said = f"kept in {tmp_path / 'kept'}: the outputs of the embeddings and the 2 layers below the first adapter"
    assert said in capsys.readouterr().out
    assert json.loads((tmp_path / "memory" / "results.json").read_text())["arguments"]["keep_prefix"] == "memory"
    # Half of the layers' rows are the prefix's; the second run has none of them. Before, each run tries two made-up
    # texts: through all four layers twice, through the prefix and into the first adapted layer, through the two
    # adapted layers alone, and one of the texts through the prefix again.
    assert kept[2] == plain / 2 + 2 * (4 * 2) + 3 * 2 + 2 * 2 + 3 * 1
    assert kept[2] < kept[0] == kept[1] < 0.8 * plain


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--keep_prefix needs --method houlsby and --layers without layer 0, got houlsby and no --layers"),
        (("--layers", 0, 1), "--layers without layer 0, got houlsby and 0 1"),
        (("--layers", 2, "--train_layer_norm", "all"), "the embeddings are trained"),
        (("--layers", 2, "--method", "lora"), "--keep_prefix needs --method houlsby"),
        (("--layers", 2, 4), r"layers_to_transform must be among this model's layers, 0 to 3; got \[2, 4\]"),
    ],
)
def test_what_cannot_be_kept(encoder, tmp_path, flags, message):
    with pytest.raises(RecipeError, match=message):
        train(encoder, tmp_path, "--keep_prefix", "memory", *flags)


def test_by_default_nothing_is_kept_of_layers_that_it_would_change(tmp_path):
    """Longformer pads the texts before its layers."""
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LongformerConfig(**sizes, intermediate_size=48, attention_window=4, pad_token_id=1)
    training = TrainingArguments(str(tmp_path), use_cpu=True)
    adapter = AdapterArguments(layers=[2, 3])
    method = MethodArguments(base_dtype="float32", keep_prefix="auto")
    model = prepare_model(LongformerForSequenceClassification(config), method, adapter, training, 16)
    assert method.keep_prefix == "off"
    ids = torch.randint(5, 99, (2, 6), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        model(input_ids=ids, labels=torch.tensor([0, 1])).loss.backward()
    method.keep_prefix = "memory"
    with pytest.raises(RecipeError, match="--keep_prefix: FrozenPrefix needs frozen layers that run each text alone"):
        prepare_model(LongformerForSequenceClassification(config), method, adapter, training, 16)


def test_sharded_layers_cannot_be_kept(encoder, tmp_path, monkeypatch):
    """As accelerate launch says it to its processes."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    training = TrainingArguments(str(tmp_path), use_cpu=True)
    monkeypatch.setattr(training, "fsdp", False)
    with pytest.raises(RecipeError, match="ZeRO-3 and FSDP shard them"):
        keep_prefix(None, "memory", 1.0, training)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setattr(training, "fsdp", True)
    with pytest.raises(RecipeError, match="ZeRO-3 and FSDP shard them"):
        keep_prefix(None, "memory", 1.0, training)


def test_an_adapter_of_other_layers_is_no_start(encoder, tmp_path):
    train(encoder, tmp_path / "upper", "--layers", 2, 3)
    with pytest.raises(RecipeError, match=r"\[2, 3\], this run None\. Give --layers 2 3 here, or no --layers where"):
        train(encoder, tmp_path / "all", "--init_adapter", tmp_path / "upper" / "adapter")
    train(encoder, tmp_path / "start", "--layers", 2, 3, "--init_adapter", tmp_path / "upper" / "adapter")
