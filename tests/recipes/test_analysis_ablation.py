"""The ablation of spans of layers: what the shared forwards give and cost, and the command."""

from __future__ import annotations

import json
import time

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
)

from houlsby_peft import HoulsbyConfig, ablate
from recipe_runs import run, save_tiny_encoder
from tiny_models import perturb, tiny_bert


pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra 'recipes', which is not installed")
import ablation
import glue
from analysis.runs import load_run
from analysis.spans import RESTARTABLE, SpanModel
from training.errors import RecipeError


SIZES = {
    "distilbert": {"dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 48},
    "electra": {"embedding_size": 16},  # projected to the width after the embeddings
}
WIDE = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}


def adapted(model: torch.nn.Module, **fields: object) -> PeftModel:
    model = get_peft_model(model, HoulsbyConfig(r=4, **fields)).eval()
    perturb(model)
    return model


def of_type(model_type: str, **fields: object) -> PeftModel:
    sizes = {"vocab_size": 99, "pad_token_id": 1, "num_labels": 3, **WIDE, **SIZES.get(model_type, {})}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes)
    return adapted(AutoModelForSequenceClassification.from_config(config), **fields)


def padded_batch(rows: int = 5, length: int = 7) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 99, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[1, 4:], mask[1, 4:] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}


class TestSpans:
    @pytest.mark.parametrize("keep_norms", [True, False])
    @pytest.mark.parametrize(
        ("model_type", "fields"),
        [*((name, {}) for name in RESTARTABLE), ("bert", {"share_layers": 3}), ("bert", {"train_layer_norm": "all"})],
    )
    def test_equal_to_a_forward_from_the_start(self, model_type, fields, keep_norms):
        model, batch = of_type(model_type, **fields), padded_batch()
        spans = SpanModel(model, keep_norms)
        whole, *without = spans.outputs(batch)
        with torch.inference_mode():
            assert torch.equal(whole, model(**batch).logits)
            for (first, last), logits in zip(spans.spans(), without, strict=True):
                with ablate(model, range(first, last + 1), keep_norms):
                    assert torch.equal(logits, model(**batch).logits), (first, last)
        assert len({tuple(logits.flatten().tolist()) for logits in (whole, *without)}) == 11  # all differ

    def test_the_model_is_as_before(self):
        model, batch = of_type("bert"), padded_batch()
        names = [name for name, _ in model.named_modules()]
        before = model(**batch).logits
        for _ in SpanModel(model).outputs(batch):
            pass
        assert torch.equal(model(**batch).logits, before)
        assert [name for name, _ in model.named_modules()] == names
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def test_cost_for_twelve_layers(self):
        """Counted in layers, and measured; `from_the_start` is what the spans would cost one by one."""
        model = adapted(tiny_bert(num_hidden_layers=12, hidden_size=64, intermediate_size=256))
        batch, forwards = padded_batch(8, 16), []
        spans = SpanModel(model)
        for layer in spans.layers:
            layer.register_forward_hook(lambda *_: forwards.append(1))

        def shared() -> None:
            for _ in spans.outputs(batch):
                pass

        @torch.inference_mode()
        def from_the_start() -> None:
            model(**batch)
            for first, last in spans.spans():
                with ablate(model, range(first, last + 1)):
                    model(**batch)

        counts, seconds = [], []
        for way in (shared, from_the_start):
            forwards.clear()
            way()
            counts.append(len(forwards))
        for _ in range(2):
            for way in (shared, from_the_start):
                start = time.process_time()
                way()
                seconds.append(time.process_time() - start)
        assert counts == [376, 948]
        assert min(seconds[::2]) < 0.6 * min(seconds[1::2])

    def test_layers_that_cannot_be_run_from_the_middle(self):
        config = ModernBertConfig(vocab_size=99, pad_token_id=1, **WIDE)
        with pytest.raises(RecipeError, match="got 'modernbert'"):
            SpanModel(adapted(ModernBertForSequenceClassification(config)))

    def test_a_layer_without_an_adapter(self):
        model = adapted(BertForSequenceClassification(BertConfig(vocab_size=99, **WIDE)), layers_to_transform=[1, 2])
        with pytest.raises(RecipeError, match=r"in each layer.*here \[1, 2\]"):
            SpanModel(model)

    def test_a_model_without_adapters(self):
        with pytest.raises(RecipeError, match="BertForSequenceClassification has none"):
            SpanModel(tiny_bert())


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The folder of a run that has learned more than chance."""
    folder = tmp_path_factory.mktemp("run")
    encoder = save_tiny_encoder(folder / "encoder")
    run(glue, "--model_name", encoder, "--output_dir", folder, "--r", 8, "--max_steps", 4, "--report_to", "none",
        "--save_strategy", "no", "--load_best_model_at_end", "false", "--eval_strategy", "no")  # fmt: skip
    return folder


class TestCommand:
    def test_numbers_figure_and_pruned_adapter(self, finished_run, tmp_path, capsys):
        run(ablation, "--run", finished_run, "--output_dir", tmp_path, "--max_eval_samples", 64, "--prune", 1)
        first, *rows = map(json.loads, (tmp_path / "ablation.jsonl").read_text().splitlines())
        assert first["span"] is None
        assert first["examples"] == 64
        assert sorted(row["span"] for row in rows) == [[i, j] for i in range(4) for j in range(i, 4)]
        for row in rows:
            change = row["scores"]["accuracy"] / first["scores"]["accuracy"] - 1
            assert row["relative_change"] == pytest.approx(change)
        for ending in (".png", ".svg"):
            assert (tmp_path / f"ablation{ending}").stat().st_size > 5_000
        assert "Pruned layers" in capsys.readouterr().out
        assert (tmp_path / "pruned" / "adapter_model.safetensors").is_file()

    def test_scores_are_the_run_s_and_those_of_the_pruned_adapter(self, finished_run, tmp_path):
        run(ablation, "--run", finished_run, "--output_dir", tmp_path, "--prune", 1, "--norms", "remove")
        first, *rows = map(json.loads, (tmp_path / "ablation.jsonl").read_text().splitlines())
        finished = load_run(str(finished_run))
        config = HoulsbyConfig.from_pretrained(tmp_path / "pruned")
        removed = set(range(4)) - set(config.layers_to_transform)
        expected = next(row for row in rows if row["span"] == [min(removed), max(removed)])

        def accuracy(model: PeftModel) -> float:
            hits = [model(**batch).logits.argmax(-1) == labels
                    for batch in finished.batches(64) for labels in [batch.pop("labels")]]  # fmt: skip
            return torch.cat(hits).double().mean().item()

        assert accuracy(finished.model) == pytest.approx(first["scores"]["accuracy"])
        pruned = PeftModel.from_pretrained(finished.model.unload(), tmp_path / "pruned").eval()
        assert accuracy(pruned) == pytest.approx(expected["scores"]["accuracy"])

    def test_a_run_is_on_the_accelerator_with_its_batches(self, finished_run, monkeypatch):
        """The device "meta" stands in for one that there may not be."""
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
        finished = load_run(str(finished_run))
        tensors = [*finished.model.parameters(), *finished.model.buffers(), *next(finished.batches(2)).values()]
        assert {tensor.device.type for tensor in tensors} == {"meta"}

    def test_nothing_to_prune(self, tmp_path, capsys):
        rows = [{"scores": {}}, *({"span": span, "relative_change": -0.5} for span in ((0, 0), (0, 1), (1, 1)))]
        ablation.prune_run(None, rows, ablation.AblationArguments(prune=0.1), tmp_path)
        assert "Nothing to prune: every span costs more than 10.0%" in capsys.readouterr().out
        assert not (tmp_path / "pruned").exists()

    def test_dry_run(self, finished_run, tmp_path, capsys):
        run(ablation, "--run", finished_run, "--output_dir", tmp_path / "out", "--dry_run")
        assert capsys.readouterr().out.startswith(f"{finished_run}: minimal_pairs, ")
        assert not (tmp_path / "out").exists()

    def test_no_run_there(self, tmp_path):
        with pytest.raises(RecipeError, match=r"must be the output folder of a finished run.*recipes/glue.py"):
            run(ablation, "--run", tmp_path)
