"""Task-specific pretraining: what it trains, what it keeps, and how other recipes start from it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling

import glue
import mlm
from data.reading import read_file
from demo import minimal_pairs
from houlsby_peft import HoulsbyConfig
from recipe_runs import results_of, run
from run.edge import RecipeError
from run.model import load_model
from run.training_arguments import RecipeTrainingArguments


OFTEN = {"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 3,
         "eval_strategy": "steps", "eval_steps": 1, "per_device_train_batch_size": 8}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder in the form of a task of GLUE, whose name it has."""
    folder = tmp_path_factory.mktemp("data") / "cola"
    folder.mkdir()
    for split, rows in (("train", 96), ("validation", 32)):
        frame = minimal_pairs()[split].select(range(rows)).to_pandas()[["sentence", "label"]]
        frame.to_csv(folder / f"{split}.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, encoder, data):
    """The output folder of a short run."""
    folder = tmp_path_factory.mktemp("pretrained")
    run(mlm, data=data, model_name=encoder, output_dir=folder, max_steps=3, **OFTEN)
    return folder


class TestPretraining:
    def test_the_saved_adapter_holds_bottlenecks_and_norms_only(self, pretrained):
        weights = load_file(pretrained / "adapter" / "adapter_model.safetensors")
        assert weights
        assert all(".houlsby_adapter." in key or ".houlsby_norm." in key for key in weights)
        assert all(key.startswith("base_model.model.bert.encoder.") for key in weights)
        # Biases start at zero.
        up = [value for key, value in weights.items() if key.endswith("up_proj.bias")]
        assert all(value.abs().min() > 0 for value in up)

    def test_the_head_without_its_output_weights_is_kept_beside_it(self, pretrained):
        head = load_file(pretrained / "adapter" / mlm.HEAD_FILE)
        assert "cls.predictions.bias" in head
        assert "cls.predictions.decoder.weight" not in head
        adapter = 4 * 2 * (2 * 64 * 32 + 64 + 32 + 2 * 32)
        of_head = sum(value.numel() for value in head.values())
        assert results_of(pretrained)["trainable_parameters"] == adapter + of_head

    def test_the_head_of_a_checkpoint_stays_frozen(self, encoder, data, tmp_path):
        model, tokenizer, _ = load_model(AutoModelForMaskedLM, str(encoder))
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        run(mlm, data=data, output_dir=tmp_path / "run", model_name=tmp_path / "model",
            max_steps=2, train_layer_norm="all")  # fmt: skip
        assert not (tmp_path / "run" / "adapter" / mlm.HEAD_FILE).exists()
        weights = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
        # Nor is the norm of the head, which other models do not have.
        assert not any("cls." in key for key in weights)
        assert any("embeddings.LayerNorm" in key for key in weights)

    def test_the_loss_is_the_models_own(self, encoder, tmp_path):
        model, tokenizer, _ = load_model(AutoModelForMaskedLM, str(encoder))
        adapted = get_peft_model(model, HoulsbyConfig())
        collator = DataCollatorForLanguageModeling(tokenizer, seed=0)
        texts = minimal_pairs()["train"][:8]["sentence"]
        batch = dict(collator([tokenizer(text) for text in texts]))
        arguments = RecipeTrainingArguments(
            str(tmp_path), use_cpu=True, eval_strategy="no", load_best_model_at_end=False
        )
        trainer = mlm.MlmTrainer({}, model=adapted, args=arguments, data_collator=collator)
        labels = batch["labels"]
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            logits = adapted.eval()(**inputs).logits
            expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            loss = trainer.compute_loss(adapted, dict(batch))
            assert loss == pytest.approx(expected.item(), rel=1e-5)
            nothing = {**batch, "labels": torch.full_like(labels, -100)}
            assert trainer.compute_loss(adapted, nothing) == 0

    def test_evaluation_reads_the_adapter_and_the_head(self, data, pretrained, tmp_path):
        """And masks the same words."""
        run(mlm, data=data, evaluate=pretrained, output_dir=tmp_path)
        scores = json.loads((tmp_path / "evaluation.json").read_text())["scores"]
        assert scores["loss"] == pytest.approx(results_of(pretrained)["best_score"], rel=1e-5)
        assert scores["perplexity"] == pytest.approx(np.exp(scores["loss"]))

    def test_an_adapter_without_its_head_is_not_evaluated_with_a_random_one(
        self, data, pretrained, tmp_path
    ):
        adapter = shutil.copytree(pretrained / "adapter", tmp_path / "adapter")
        (adapter / mlm.HEAD_FILE).unlink()
        with pytest.raises(RecipeError, match="needs the head"):
            run(mlm, data=data, evaluate=adapter, output_dir=tmp_path / "scores", max_length=32)

    def test_a_run_that_was_killed_within_an_epoch_masks_the_same_words_and_has_its_head(
        self, encoder, data, pretrained, tmp_path
    ):
        folder = shutil.copytree(pretrained, tmp_path / "run")
        (folder / "results.json").unlink()
        for name in ("adapter", "checkpoint-3"):
            shutil.rmtree(folder / name)
        run(mlm, data=data, model_name=encoder, output_dir=folder, max_steps=3, **OFTEN)
        for name in ("checkpoint-3/adapter_model.safetensors", f"adapter/{mlm.HEAD_FILE}"):
            assert (folder / name).read_bytes() == (pretrained / name).read_bytes()

    def test_a_batch_has_the_same_words_masked_in_every_evaluation(self, encoder):
        _, tokenizer, _ = load_model(AutoModelForMaskedLM, str(encoder))
        texts = minimal_pairs()["train"][:16]["sentence"]
        first = [dict(tokenizer(text)) for text in texts[:8]]
        second = [dict(tokenizer(text)) for text in texts[8:]]
        random = DataCollatorForLanguageModeling(tokenizer)
        batch, _, again = (mlm.mask_by_text(random, rows) for rows in (first, second, first))
        torch.testing.assert_close(batch, again, rtol=0, atol=0)
        assert random.seed is None, "in training, other words are masked each time"

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("BertForPreTraining", True),
            ("RobertaForMaskedLM", True),
            ("ElectraForPreTraining", False),
            ("BertForSequenceClassification", False),
        ],
    )
    def test_which_checkpoints_have_a_head_for_masked_words(
        self, kind, expected, encoder, tmp_path
    ):
        config = json.loads((encoder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [kind]}))
        assert mlm.has_head(str(tmp_path)) == expected

    def test_a_text_file_is_enough(self, tmp_path):
        lines = minimal_pairs()["train"][:40]["sentence"]
        (tmp_path / "texts.txt").write_text("\n\n".join(lines) + "\n  \n")
        assert read_file(tmp_path / "texts.txt")["text"] == lines

    def test_a_tokenizer_without_masks(self, encoder, data, tmp_path):
        _, tokenizer, _ = load_model(AutoModelForMaskedLM, str(encoder))
        AutoModelForMaskedLM.from_pretrained(encoder).save_pretrained(tmp_path)
        tokenizer.mask_token = None
        tokenizer.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="mask token"):
            run(mlm, data=data, model_name=tmp_path, output_dir=tmp_path / "run")


def test_a_recipe_starts_from_it_with_a_fresh_head(encoder, data, pretrained, tmp_path):
    """At a learning rate that is zero in float32, a recipe saves what it started from."""

    def start_from(adapter, output, **flags):
        run(glue, task="cola", data_dir=data.parent, model_name=encoder, max_steps=1,
            learning_rate=1e-60, init_adapter=adapter, output_dir=output, **flags)  # fmt: skip
        return load_file(output / "adapter" / "adapter_model.safetensors")

    source = load_file(pretrained / "adapter" / "adapter_model.safetensors")
    first = start_from(pretrained / "adapter", tmp_path / "first")
    assert all(torch.equal(first[key], value) for key, value in source.items())
    again = start_from(tmp_path / "first" / "adapter", tmp_path / "again", seed=5)
    head = "base_model.model.classifier.weight"
    assert set(first) == set(again) == {*source, head, "base_model.model.classifier.bias"}
    assert not torch.equal(first[head], again[head]), "the head of the adapter it starts from"
