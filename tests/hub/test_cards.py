"""Cards state facts about the adapter and its runs, the Hub accepts them, and sections written by hand are kept."""

from __future__ import annotations

import ast
import html
import json
import re
import statistics
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from peft import PeftModel, get_peft_model
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    ViTConfig,
    ViTForImageClassification,
)

import houlsby_peft
from houlsby_peft import AdapterError, HoulsbyConfig
from houlsby_peft.checkpoints.untrusted import check_weights, read_config
from houlsby_peft.hub import push
from houlsby_peft.hub.card import count_parameters, make_card, merge_cards
from houlsby_peft.hub.markdown import escape, one_line
from houlsby_peft.hub.metadata import check_metadata
from houlsby_peft.hub.results import format_mean
from houlsby_peft.hub.sections import mark, split, update
from hub_models import LABELS, make_adapter, make_base
from mutated_adapters import HOSTILE
from study.presets import GlueArguments
from tiny_models import perturb
from training.arguments import ClassifierArguments, RecipeTrainingArguments
from training.methods import ClassifierMethodArguments


ROOT = Path(__file__).parents[2]
SEEDS = {1: 0.80, 2: 0.84, 3: 0.79}
RUN = {
    "task": "messages",
    "method": "houlsby",
    "seed": 1,
    "dataset": {
        "id": "org/messages",
        "name": "Messages",
        "config": 3,
        "split": "validation",
        "revision": "abc",
        "language": "en",
        "rows": {"train": 1200, "validation": 300},
    },
    "epochs": [
        {"epoch": 1.0, "step": 38, "seconds": 4.5, "loss": 0.9, "accuracy": 0.71, "f1": 0.7, "runtime": 2.0},
        {"epoch": 2.0, "step": 76, "seconds": 9.1, "loss": 0.5, "accuracy": 0.80, "f1": 0.79, "runtime": 2.0},
        {"epoch": 3.0, "step": 114, "seconds": 13.6, "loss": 0.6, "accuracy": 0.78, "f1": 0.77, "runtime": 2.0},
    ],
    "best_epoch": 2.0,
    "chosen_by": "accuracy",
    "test": {"all": {"adapter": 0.77, "probe": 0.5}, "late | parcels": {"adapter": 0.7, "probe": 0.4}},
    "trainable_parameters": 1000,
    "total_parameters": 20_000,
    "seconds": 125.2,
    "hardware": "2 CPU cores | none else",
    "emissions": 0.00042,
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "arguments": {"learning_rate": 3e-4, "weight_decay": 0.0, "max_length": 128, "seed": 1, "hub_token": "secret"},
    "defaults": {"learning_rate": 3e-4, "weight_decay": 0.0, "max_length": 256, "seed": 42},
    "command": "accelerate launch recipes/glue.py --task messages",
    "references": [{"name": "Somebody et al. 2019", "scores": {"accuracy": 0.86}}],
}
SECTIONS = (
    "Usage", "Adapter", "Base model", "Results", "Data", "Hyperparameters", "Training log", "Environment", "Limits",
    "Command", "Citation",
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("adapter"), base)


def headings(card):
    return [section.partition("\n")[0].removeprefix("## ") for section in split(card.text)][1:]


def row(card, name):
    return next(line for line in card.text.splitlines() if line.startswith((f"| {name} |", f"- **{name}**:")))


def test_a_card_without_a_run_says_what_the_adapter_is_and_leaves_the_rest_out(adapter):
    card = make_card(adapter, "user/messages")
    assert headings(card) == ["Usage", "Adapter", "Base model", "Citation"]
    assert "None" not in card.text
    assert 'houlsby_peft.load("user/messages")' in card.text
    assert 'from_pretrained("user/messages", num_labels=3, ignore_mismatched_sizes=True)' in card.text
    assert row(card, "classes") == f"- **classes**: {', '.join(LABELS)}"
    assert card.data.to_dict() == {
        "library_name": "peft",
        "base_model": "org/tiny-bert",
        "base_model_relation": "adapter",
        "pipeline_tag": "text-classification",
        "tags": ["adapter", "houlsby", "peft"],
    }


def test_a_card_of_a_run_has_every_section_and_no_secret(adapter):
    card = make_card(adapter, "user/messages", results=RUN, example=("a", "b"), answer=[{"label": "praise"}])
    assert tuple(headings(card)) == SECTIONS
    assert 'texts = (\n    "a",\n    "b",\n)\nfor result in adapter.predict(texts):\n    print(result)\n' in card.text
    assert "\n```text\n{'label': 'praise'}\n```" in card.text
    assert "secret" not in card.content
    assert row(card, "accuracy") == "| accuracy | 0.800 | 0.860 |"
    assert row(card, "late \\| parcels") == "| late \\| parcels | 0.700 | 0.400 |"
    assert row(card, "2") == "| 2 | 76 | 0.500 | 0.800 | 0.790 | **kept** |"
    assert row(card, "hardware") == "- **hardware**: 2 CPU cores | none else"
    assert row(card, "time") == "- **time**: 2 min 5 s"
    assert row(card, "emissions") == "- **emissions**: 0.42 g CO₂ (CodeCarbon)"
    assert row(card, "train examples") == "- **train examples**: 1,200"
    data = card.data.to_dict()
    assert data["co2_eq_emissions"]["emissions"] == 0.42
    assert data["datasets"] == ["org/messages"]
    assert data["metrics"] == ["accuracy", "f1"]
    (result,) = data["model-index"][0]["results"]
    assert result["dataset"] == {
        "type": "org/messages", "name": "Messages", "config": "3", "split": "validation", "revision": "abc"
    }  # fmt: skip
    assert {metric["type"]: metric["value"] for metric in result["metrics"]} == {"accuracy": 0.8, "f1": 0.79}


def of_images(folder):
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4)
    ViTForImageClassification(config).save_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder, num_labels=3, ignore_mismatched_sizes=True)
    return model, {}, torch.rand(2, 3, 8, 8)


def of_texts(folder, **labels):
    AutoModelForSequenceClassification.from_pretrained(make_base(folder), num_labels=5).save_pretrained(folder)
    options = {} if labels else {"num_labels": 3, "ignore_mismatched_sizes": True}
    model = AutoModelForSequenceClassification.from_pretrained(folder, **options)
    return model, labels, torch.arange(5, 17).reshape(2, 6)


@pytest.mark.parametrize("labels", [None, {}, {"id2label": dict(enumerate(LABELS))}], ids=["images", "head", "labels"])
def test_the_snippets_run_as_printed_on_a_checkpoint_with_another_head(labels, tmp_path, monkeypatch):
    base, options, inputs = of_images(tmp_path / "base") if labels is None else of_texts(tmp_path / "base", **labels)
    model = get_peft_model(base, HoulsbyConfig(r=4, **options)).eval()
    perturb(model)
    model.save_pretrained(tmp_path / "user" / "x")
    monkeypatch.chdir(tmp_path)
    text = make_card(tmp_path / "user" / "x", "user/x", base_model="org/base").text
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == (1 if labels is None else 2)
    for snippet in snippets:
        names = {}
        exec(snippet, names)
        loaded = names["model"] if "model" in names else names["adapter"].model
        torch.testing.assert_close(loaded.eval()(inputs).logits, model(inputs).logits)
    if labels is None:
        with pytest.raises(AdapterError, match=r"must be for texts; .* is for image-classification\."):
            houlsby_peft.load("user/x")


@pytest.mark.parametrize("example", ["a \"b\" 'c'\n\\d é", ("a", "b"), ["a", "b"], [("a", "b"), ("c", "d")]])
def test_the_example_of_the_snippet_is_the_one_that_was_run(adapter, example):
    card = make_card(adapter, "user/messages", example=example, answer=[1])
    snippet = ast.parse(re.search(r"```python\n(.*?)```", card.text, re.DOTALL)[1]).body
    assert ast.unparse(snippet[0]) == "import houlsby_peft"
    assert ast.literal_eval(snippet[2].value) == example


def test_a_number_that_is_written_otherwise_is_no_change(adapter):
    run = RUN | {"arguments": {"num_train_epochs": 10.0}, "defaults": {"num_train_epochs": 10}}
    card = make_card(adapter, "user/messages", results=run)
    assert [line for line in card.text.splitlines() if line.startswith("| `")] == ["| `num_train_epochs` | 10 |"]


def test_changed_hyperparameters_come_first(adapter):
    own = {"train_pooler": True, "class_weights": "balanced"}
    run = RUN | {"arguments": RUN["arguments"] | own, "defaults": RUN["defaults"] | {"train_pooler": False}}
    card = make_card(adapter, "user/messages", results=run)
    rows = [line for line in card.text.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `max_length` | 128 | 256 |",
        "| `train_pooler` | True | False |",
        "| `class_weights` | balanced |  |",
        "| `seed` | 1 | 42 |",
        "| `learning_rate` | 0.0003 |",
        "| `weight_decay` | 0 |",
    ]


def test_several_seeds_give_mean_and_standard_error_beside_full_fine_tuning(adapter, tmp_path):
    runs = []
    for method, shift in (("houlsby", 0.0), ("full", 0.02)):
        for seed, accuracy in SEEDS.items():
            epochs = [{"epoch": 1.0, "step": 38, "accuracy": accuracy + shift}]
            runs.append(tmp_path / f"{method}-{seed}.json")
            runs[-1].write_text(
                json.dumps({**RUN, "method": method, "seed": seed, "epochs": epochs, "best_epoch": 1.0})
            )
    card = make_card(adapter, "user/messages", results=runs)
    mean, error = statistics.fmean(SEEDS.values()), statistics.stdev(SEEDS.values()) / 3**0.5
    assert row(card, "score") == (
        "| score | mean ± standard error | seed 1 | seed 2 | seed 3 | full fine-tuning | Somebody et al. 2019 |"
    )
    assert row(card, "accuracy") == (
        f"| accuracy | {mean:.3f} ± {error:.3f} | 0.800 | 0.840 | 0.790 | {mean + 0.02:.3f} ± {error:.3f} | 0.860 |"
    )
    assert card.data.to_dict()["model-index"][0]["results"][0]["metrics"][0]["value"] == pytest.approx(mean)
    assert "There is only one run" not in card.text


def test_large_scores_have_one_decimal():
    assert format_mean([88.25, 89.15]) == "88.7 ± 0.5"
    assert format_mean([]) == ""


def everything_less_one(value, path=()):
    """Yield copies of a nested mapping, each with one key missing or None."""
    for key in value:
        yield (*path, key), {k: v for k, v in value.items() if k != key}
        yield (*path, key), {**value, key: None}
        if isinstance(value[key], dict):
            for inner, changed in everything_less_one(value[key], (*path, key)):
                yield inner, {**value, key: changed}


@pytest.mark.parametrize(("missing", "run"), list(everything_less_one(RUN)), ids=lambda value: str(value)[:30])
def test_any_part_of_a_run_may_be_missing(adapter, missing, run):
    card = make_card(adapter, "user/messages", results=run)
    assert "None" not in card.text, missing
    assert ModelCard(card.content).data.to_dict() == card.data.to_dict()


def test_the_parameters_are_those_that_the_model_trains(base, adapter, tmp_path):
    config = read_config(adapter)
    sizes = check_weights(adapter, config)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    trained, _ = PeftModel.from_pretrained(model, adapter, is_trainable=True).get_nb_trainable_parameters()
    d, r, layers = 32, 4, 2
    expected = {"bottlenecks": 2 * layers * (2 * r * d + d + r), "layer norms": 2 * layers * 2 * d, "head": 3 * d + 3}
    assert count_parameters(sizes) == expected
    assert sum(expected.values()) == trained
    assert f"- **trained parameters**: {trained:,} (bottlenecks 1,168, " in make_card(adapter, "user/x").text
    two = make_adapter(tmp_path, base, trainable_token_indices=[5, 6])
    assert count_parameters(check_weights(two, read_config(two))) == {**expected, "tokens": 2 * d}


@pytest.mark.parametrize("kind", ["multi_label_classification", "tags", "single_label_classification"])
def test_only_classes_that_exclude_each_other_are_told_apart(kind, base, tmp_path):
    auto_class = AutoModelForTokenClassification if kind == "tags" else AutoModelForSequenceClassification
    options = {} if kind == "tags" else {"problem_type": kind}
    config = HoulsbyConfig(r=4, id2label=dict(enumerate(LABELS)), **options)
    get_peft_model(auto_class.from_pretrained(base), config).save_pretrained(tmp_path)
    text = make_card(tmp_path, base_model="org/tiny-bert", results=RUN).text
    is_choice = kind == "single_label_classification"
    assert ("to tell complaint, praise and question apart" in text) == is_choice
    assert ("always chooses one of its classes" in text) == is_choice
    assert f"- **classes**: {', '.join(LABELS)}" in text


def test_a_commit_is_shown_and_pushed_only_with_the_base_model_that_it_is_of(base, tmp_path):
    folder = make_adapter(tmp_path, base, "org/mirror")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"revision": "a" * 40}))
    for name, commit in (("org/mirror", "a" * 40), ("org/tiny-bert", None)):
        pushed = push._complete_config(folder, name)
        assert (pushed["base_model_name_or_path"], pushed["revision"]) == (name, commit)
        card = make_card(folder, base_model=name, revision=pushed["revision"])
        assert ("a" * 40 in card.text) == (commit is not None)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"base_model": "/home/me/bert"}, "base_model must be a name on the Hub: user/name; got '/home/me/bert'"),
        ({"base_model": "runs/bert/base"}, "base_model must be a name on the Hub"),
        ({"datasets": ["../data"]}, "datasets must be a name on the Hub"),
        ({"language": "English"}, "language must be an ISO 639 code such as en; got 'English'"),
        ({"license": "Apache 2.0"}, "license must be an identifier such as apache-2.0"),
        ({"tags": ["a", 3]}, "tags must be a list of words; got 3"),
    ],
)
def test_metadata_that_the_hub_refuses_are_refused_before(data, message):
    with pytest.raises(ValueError, match=message):
        check_metadata(data)


def test_a_local_base_model_never_gets_into_a_card(adapter):
    with pytest.raises(ValueError, match="base_model must be a name on the Hub"):
        make_card(adapter, "user/messages", base_model="/home/me/bert")


def test_results_that_cannot_be_read_are_named(adapter, tmp_path):
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(AdapterError, match=r"results.json must hold one JSON object, got list"):
        make_card(adapter, "user/messages", results=tmp_path / "results.json")
    with pytest.raises(AdapterError, match=r"nothing.json must be a results.json that a recipe has written"):
        make_card(adapter, "user/messages", results=str(tmp_path / "nothing.json"))


WRONG = (7, "x", [1], {"a": [1]}, [[]], True, float("nan"), 10**400)


def everything_replaced(run, value):
    """Yield copies of a run in each of which one value, at most two levels deep, is replaced."""
    for key in run:
        yield {**run, key: value}
        if isinstance(run[key], dict):
            for inner in run[key]:
                yield {**run, key: {**run[key], inner: value}}


@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:10])
def test_a_value_of_another_kind_makes_a_card_or_one_line(adapter, value):
    refused = 0
    for run in everything_replaced({**RUN, "strategy": {"processes": 2, "mixed_precision": "no"}}, value):
        try:
            card = make_card(adapter, "user/messages", results=run)
        except ValueError as error:
            refused += 1
            message = str(error)
            assert re.match(r"run 0 of results: \w+(\.\w+)? must be .*; got .*|The card's \w+ must be ", message), (
                message
            )
            assert "\n" not in message
        else:
            assert ModelCard(card.content).data.to_dict() == card.data.to_dict()
    assert refused


def test_addresses_and_control_characters_stay_text():
    assert escape("see https://a.example, WWW.b.example or c@d.example") == (
        "see https\\://a.example, WWW\\.b.example or c\\@d.example"
    )
    assert escape("\x1b[31mred\u202egnirts\ud800") == "\ufffd\\[31mred\ufffdgnirts\ufffd"
    assert escape("e\u0301 \u200d \u0645\u06cc\u200c\u062e") == "e\u0301 \u200d \u0645\u06cc\u200c\u062e"


OLD = mark("# Name\n\nIntro.\n\n## A\n\nold a\n\n## B\n\nold b\n\n```bash\n## no heading\n```\n")
NEW = mark("# New name\n\nIntro.\n\n## A\n\nnew a\n\n## C\n\nnew c\n")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda text: text, NEW),
        (lambda text: text.replace("\n", "\r\n"), NEW),
        (lambda text: text.replace("old a", "old a  "), NEW),
        (
            lambda text: text.replace("old a", "my a"),
            NEW.replace(split(NEW)[1], split(OLD)[1].replace("old a", "my a")),
        ),
        (
            lambda text: text.replace("## B", "## Mine\n\nwords\n\n## B"),
            NEW.replace("## C", "## Mine\n\nwords\n\n## C"),
        ),
        (lambda text: "Badge\n\n" + text + "\n## End\n\nx", "Badge\n\n" + NEW.replace("## C", "## End\n\nx\n\n## C")),
        (lambda text: text.replace("## no heading", "## still none"), None),
        (lambda text: text.replace("Intro.", "My intro."), None),
        (lambda text: "## Twice\n\n1\n\n## Twice\n\n2\n", "## Twice\n\n1\n\n## Twice\n\n2\n\n" + NEW),
    ],
)
def test_sections_written_or_changed_by_hand_stay_where_they_were(edit, expected):
    found = update(NEW, edit(OLD))
    if expected is None:  # the changed section stays, and the rest is new
        kept = [section for section in split(edit(OLD)) if section not in split(OLD)]
        assert len(kept) == 1
        assert kept[0].strip() in found
        assert "new a" in found
    else:
        assert found == expected
    assert update(NEW, found) == found


def test_a_new_card_keeps_further_metadata_and_tags_of_the_old_one(adapter, tmp_path):
    path = tmp_path / "README.md"
    first = make_card(adapter, "user/messages", results=RUN, metadata={"license": "mit", "tags": ["mine"]})
    path.write_text(first.content.replace("license: mit", "license: cc-by-4.0\nthumbnail: me.png"))
    again = {**RUN, "epochs": [], "dataset": None}
    data = merge_cards(make_card(adapter, "user/messages", results=again), [path]).data.to_dict()
    assert (data["license"], data["thumbnail"]) == ("cc-by-4.0", "me.png")
    assert "mine" in data["tags"]
    assert "model-index" not in data, "scores of weights that are no more"
    assert merge_cards(make_card(adapter, "user/x", metadata={"license": "mit"}), [path]).data.license == "mit"
    assert make_card(adapter, "user/x", metadata={"tags": "mine"}).data.tags == ["adapter", "houlsby", "mine", "peft"]


def test_pefts_template_is_replaced_and_broken_metadata_are_an_error(adapter, tmp_path):
    template = tmp_path / "template.md"
    ModelCard.from_template(ModelCardData()).save(template)
    assert "[More Information Needed]" in template.read_text()
    card = merge_cards(make_card(adapter, "user/messages"), [template])
    assert "[More Information Needed]" not in card.content
    broken = tmp_path / "README.md"
    broken.write_text("---\nlicense: [mit\n---\n\n## Mine\n")
    with pytest.raises(AdapterError, match=r"begins with metadata that are not valid YAML: .*\. Repair them\.$"):
        merge_cards(card, [broken])


def test_figures_of_the_folder_are_shown(base, tmp_path):
    folder = make_adapter(tmp_path, base)
    (folder / "loss_per_step.png").write_bytes(b"")
    card = make_card(folder, "user/messages")
    assert "## Figures" in card.text
    assert "![loss per step](loss_per_step.png)" in card.text


def test_the_examples_are_cards_as_they_are_generated():
    paths = sorted((ROOT / "hub_cards" / "examples").glob("*.md"))
    assert len(paths) >= 2
    for path in paths:
        card = ModelCard.load(path)
        check_metadata(card.data.to_dict())
        assert set(headings(card)) <= {*SECTIONS, "Figures"}, path.name
        assert update("# X\n", card.text) == "# X\n", f"{path.name}: a section is not as it was generated"


@pytest.mark.parametrize("path", sorted((ROOT / "hub_cards" / "examples").glob("*.md")), ids=lambda path: path.stem)
def test_the_examples_have_the_defaults_of_the_recipe(path):
    groups = (GlueArguments, ClassifierMethodArguments, ClassifierArguments, RecipeTrainingArguments)
    defaults = {field.name: field.default for group in groups for field in fields(group)}
    (section,) = (text for text in split(path.read_text()) if text.startswith("## Hyperparameters"))
    shown = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert len(shown) > 20
    for name, *_, default in shown:
        expected = defaults[name.strip("`")]
        assert default == (f"{expected:g}" if isinstance(expected, float) else str(expected)), name


def elements(markdown_it, text):
    """Return the elements of a page in order, without its text."""
    tokens = [inner for token in markdown_it.parse(text) for inner in [token, *(token.children or [])]]
    return [(token.type, token.tag) for token in tokens if token.type not in ("text", "text_special", "softbreak")]


@pytest.mark.parametrize("text", HOSTILE)
def test_names_from_outside_do_not_change_the_page(text, base, tmp_path):
    markdown_it = pytest.importorskip("markdown_it").MarkdownIt("gfm-like", {"linkify": False, "html": True})
    pages = []
    for words in ("harmless", text):
        folder = make_adapter(tmp_path, base)
        path = folder / "adapter_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"id2label": {"0": words, "1": "b"}, "revision": words}))
        run = {
            **RUN,
            "dataset": RUN["dataset"] | {"name": words, "config": words, "split": words, "rows": {words: 3}},
            "epochs": [{**row, words: 0.5} for row in RUN["epochs"]],
            "test": {words: {words: 0.1}},
            "hardware": words,
            "versions": {words: words},
            "arguments": {"optim": words},
            "command": words,
            "chosen_by": words,
            "references": [{"name": words, "scores": {}}],
        }
        pages.append(make_card(folder, "user/messages", results=run, example=words, answer=[words]))
    harmless, card = pages
    assert headings(card) == list(SECTIONS)
    assert elements(markdown_it, card.text) == elements(markdown_it, harmless.text)
    rendered = [line for line in markdown_it.render(card.text).splitlines() if line.startswith("<li><strong>classes")]
    assert html.unescape(re.sub(r"<[^>]*>", "", rendered[0])) == f"classes: {one_line(text)}, b"
    assert card.data.eval_results[0].dataset_name == text
    assert ModelCard(card.content).data.to_dict() == card.data.to_dict()
    # What is generated is recognized as such on the next update.
    assert update(mark("# New\n"), card.text) == mark("# New\n")
