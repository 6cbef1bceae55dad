"""Cards state facts about the adapter and its runs, and keep what people write around the generated
part.
"""

from __future__ import annotations

import ast
import html
import json
import re
import statistics
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from peft import PeftModel, get_peft_model
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertForNextSentencePrediction,
    ViTConfig,
    ViTForImageClassification,
)

from edited_json import edited_json
from houlsby_peft import AdapterError, HoulsbyConfig
from houlsby_peft.errors import shortened
from houlsby_peft.hub import card as cards
from houlsby_peft.hub.card import count_parameters, find_base, keep_written, write_card
from houlsby_peft.hub.results import format_mean, read_report
from houlsby_peft.saved.adapter import SavedAdapter
from hub_models import LABELS, make_adapter, make_base, save_adapter
from mutated_adapters import HOSTILE
from tiny_models import adapted


ROOT = Path(__file__).parents[2]
SEEDS = {1: 0.80, 2: 0.84, 3: 0.79}
RUN = {
    "task": "messages",
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
        {"epoch": 1.0, "step": 38, "seconds": 4.5, "loss": 0.9, "accuracy": 0.71, "f1": 0.7},
        {"epoch": 2.0, "step": 76, "seconds": 9.1, "loss": 0.5, "accuracy": 0.80, "f1": 0.79},
        {"epoch": 3.0, "step": 114, "seconds": 13.6, "loss": 0.6, "accuracy": 0.78, "f1": 0.77},
    ],
    "best_epoch": 2.0,
    "chosen_by": "accuracy",
    "test": {"accuracy": 0.77, "late | parcels": 0.7},
    "per_class": {
        "split": "validation",
        "scores": {"pra|ise": {"precision": 0.5, "recall": 1.0, "f1": 2 / 3, "support": 1200}},
    },
    "total_parameters": 20_000,
    "seconds": 125.2,
    "hardware": "2 CPU cores | none else",
    "strategy": {"type": "DDP", "processes": 2, "mixed_precision": "bf16"},
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "arguments": {
        "learning_rate": 3e-4,
        "weight_decay": 0.0,
        "max_length": 128,
        "seed": 1,
        "hub_token": "secret",
    },
    "defaults": {"learning_rate": 3e-4, "weight_decay": 0, "max_length": 256, "seed": 42},
    "command": "python recipes/glue.py --task messages",
}
SECTIONS = (
    "Usage",
    "Adapter",
    "Base model",
    "Results",
    "Data",
    "Hyperparameters",
    "Training log",
    "Environment",
    "Limits",
    "Command",
    "Citation",
)


def make_card(saved, repo_id=None, results=None, **options):
    """The card of an adapter with a report of its runs."""
    return cards.make_card(saved, read_report(saved.folder, results), repo_id, **options)


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return SavedAdapter.open(make_adapter(tmp_path_factory.mktemp("adapter"), base))


def headings(card):
    return re.findall(r"^## (.*)$", card.text, re.MULTILINE)


def row(card, name):
    beginnings = (f"| {name} |", f"- **{name}**:")
    [line, *_] = [line for line in card.text.splitlines() if line.startswith(beginnings)]
    return line


def test_a_card_without_a_run_says_what_the_adapter_is_and_leaves_the_rest_out(adapter):
    card = make_card(adapter, "user/messages")
    assert headings(card) == ["Usage", "Adapter", "Base model", "Citation"]
    assert "None" not in card.text
    assert "Install the Python package `houlsby-peft`" in card.text
    assert 'houlsby_peft.load("user/messages")' in card.text
    assert row(card, "classes") == f"- **classes**: {', '.join(LABELS)}"
    assert card.data.to_dict() == {
        "library_name": "peft",
        "base_model": "org/tiny-bert",
        "base_model_relation": "adapter",
        "pipeline_tag": "text-classification",
        "tags": ["adapter", "houlsby", "peft"],
    }


def test_a_card_of_a_run_states_its_facts_and_no_secret(adapter):
    card = make_card(
        adapter, "user/messages", results=RUN, example=("a", "b"), answer=[{"label": "praise"}]
    )
    assert tuple(headings(card)) == SECTIONS
    assert "secret" not in card.content
    assert "\n```text\n{'label': 'praise'}\n```" in card.text
    assert "```bash\npython recipes/glue.py --task messages\n```" in card.text
    for expected in (
        "| accuracy | 0.800 |",
        "By class, on the validation data:",
        "| pra\\|ise | 0.500 | 1.000 | 0.667 | 1,200 |",
        "| late \\| parcels | 0.700 |",
        "| 2 | 76 | 0.500 | 0.800 | 0.790 | **kept** |",
        "| `max_length` | 128 | 256 |",
        "| `weight_decay` | 0 |",
        "- **hardware**: 2 CPU cores | none else",
        "- **processes**: DDP on 2 processes",
        "- **precision**: bf16",
        "- **time**: 2 min 5 s",
        "- **versions**: python 3.11.7, torch 2.13.0",
        "- **examples**: train 1,200, validation 300",
        "- Texts were truncated to 128 tokens in training and evaluation.",
    ):
        assert f"\n{expected}\n" in card.text
    assert card.text.index("| `seed` | 1 | 42 |") < card.text.index("| `learning_rate` | 0.0003 |")
    data = card.data.to_dict()
    assert (data["datasets"], data["metrics"]) == (["org/messages"], ["accuracy", "f1"])
    [result] = data["model-index"][0]["results"]
    assert result["dataset"] == {
        "type": "org/messages", "name": "Messages", "config": "3", "split": "validation",
        "revision": "abc",
    }  # fmt: skip
    assert [metric["value"] for metric in result["metrics"]] == [0.8, 0.79]


def test_any_part_of_a_run_may_be_missing(adapter):
    for key in RUN:
        inner = RUN[key] if isinstance(RUN[key], dict) else {}
        runs = [{**RUN, key: None}, *({**RUN, key: {**inner, name: None}} for name in inner)]
        for run in runs:
            card = make_card(adapter, "user/messages", results=run)
            assert "None" not in card.text, key
            assert ModelCard(card.content).data.to_dict() == card.data.to_dict()


def test_several_seeds_give_mean_and_standard_error(adapter, tmp_path):
    runs = []
    for seed, accuracy in SEEDS.items():
        run = {**RUN, "seed": seed, "best_epoch": 1}
        run["epochs"] = [{"epoch": 1.0, "step": 38, "accuracy": accuracy}]
        if seed == 2:
            run["adapter_crc32"] = zlib.crc32(adapter.weights_file.read_bytes())
        runs.append(tmp_path / f"{seed}.json")
        runs[-1].write_text(json.dumps(run))
    card = make_card(adapter, "user/messages", results=runs)
    mean, error = statistics.fmean(SEEDS.values()), statistics.stdev(SEEDS.values()) / 3**0.5
    assert row(card, "score") == "| score | mean ± standard error | seed 2 | seed 1 | seed 3 |"
    assert row(card, "accuracy") == (
        f"| accuracy | {mean:.3f} ± {error:.3f} | 0.840 | 0.800 | 0.790 |"
    )
    assert card.data.eval_results[0].metric_value == pytest.approx(mean)
    assert "There is only one run" not in card.text
    assert format_mean([88.25, 89.15]) == "88.7 ± 0.5"  # large scores have one decimal


def test_results_of_other_weights_or_of_several_tasks_are_refused(adapter):
    other = {**RUN, "adapter_crc32": zlib.crc32(adapter.weights_file.read_bytes()) ^ 1}
    with pytest.raises(AdapterError, match="other weights"):
        make_card(adapter, "user/messages", results=other)
    make_card(adapter, "user/messages", results=[RUN, other])  # one whose weights are not known
    with pytest.raises(AdapterError, match=r"one task.*mrpc"):
        make_card(adapter, "user/messages", results=[RUN, {**RUN, "task": "mrpc"}])


def test_further_metrics_stand_beside_the_scores(adapter):
    runs = [
        {**RUN, "seed": seed, "metrics": {"mean_squared_error": value, "broken": float("nan")}}
        for seed, value in ((1, 0.25), (2, 0.75))
    ]
    card = make_card(adapter, "user/messages", results=runs[0])
    assert row(card, "accuracy") == "| accuracy | 0.800 |"
    assert row(card, "mean squared error") == "| mean squared error | 0.250 |"
    assert "broken" not in card.text
    two = make_card(adapter, "user/messages", results=runs)
    # The standard error of two values is half of their difference.
    expected = "| mean squared error | 0.500 ± 0.250 | 0.250 | 0.750 |"
    assert row(two, "mean squared error") == expected
    values = {result.metric_type: result.metric_value for result in two.data.eval_results}
    assert values == {"accuracy": 0.8, "f1": 0.79, "mean_squared_error": 0.5}


def test_the_parameters_are_those_that_the_model_trains(base, adapter, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    adapted = PeftModel.from_pretrained(model, adapter.folder, is_trainable=True)
    trained, _ = adapted.get_nb_trainable_parameters()
    d, r, layers = 32, 4, 2
    expected = {
        "bottlenecks": 2 * layers * (2 * r * d + d + r),
        "layer norms": 2 * layers * 2 * d,
        "head": 3 * d + 3,
    }
    assert count_parameters(adapter) == expected
    assert sum(expected.values()) == trained
    assert f"{trained:,} (bottlenecks 1,168, " in row(make_card(adapter), "trained parameters")
    two = make_adapter(tmp_path, base, trainable_token_indices=[5, 6])
    assert count_parameters(SavedAdapter.open(two)) == {**expected, "tokens": 2 * d}


def test_the_card_of_an_adapter_whose_task_is_unknown(base, tmp_path):
    model = get_peft_model(BertForNextSentencePrediction.from_pretrained(base), HoulsbyConfig(r=4))
    trained, _ = model.get_nb_trainable_parameters()
    model.save_pretrained(tmp_path)
    card = make_card(SavedAdapter.open(tmp_path), "user/x")
    assert row(card, "trained parameters").startswith(f"- **trained parameters**: {trained:,} (")
    assert "pipeline_tag" not in card.data.to_dict()
    assert 'PeftModel.from_pretrained(base_model, "user/x")' in card.text


OPTIONS = {
    "share_layers": 1,
    "kind": "parallel",
    "scaling": 4.0,
    "activation": "relu",
    "layers_to_transform": [0],
}


def test_the_options_are_those_that_differ_from_their_defaults(base, tmp_path):
    saved = SavedAdapter.open(make_adapter(tmp_path, base, **OPTIONS))
    text = re.search(r"- \*\*options\*\*: `(.*)`", make_card(saved).text)[1]
    assert eval(text, {"HoulsbyConfig": lambda **options: options}) == {
        **OPTIONS, "r": 4, "positions": ["feed_forward"]
    }  # fmt: skip
    plain = SavedAdapter.open(make_adapter(tmp_path / "plain", base))
    assert "`HoulsbyConfig(r=4)`" in make_card(plain).text


@pytest.mark.parametrize(
    "kind", ["multi_label_classification", "tags", "single_label_classification"]
)
def test_only_classes_that_exclude_each_other_are_told_apart(kind, base, tmp_path):
    model_class, options = AutoModelForSequenceClassification, {"problem_type": kind}
    if kind == "tags":
        model_class, options = AutoModelForTokenClassification, {}
    save_adapter(tmp_path, base, model_class, id2label=dict(enumerate(LABELS)), **options)
    text = make_card(SavedAdapter.open(tmp_path), base_model="org/tiny-bert", results=RUN).text
    is_choice = kind == "single_label_classification"
    assert ("to tell complaint, praise and question apart" in text) == is_choice
    assert ("always chooses one of its classes" in text) == is_choice


def of_images(folder):
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4
    )
    ViTForImageClassification(config).save_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(
        folder, num_labels=3, ignore_mismatched_sizes=True
    )
    return model, {}, torch.rand(2, 3, 8, 8)


def of_texts(folder, **labels):
    AutoModelForSequenceClassification.from_pretrained(
        make_base(folder), num_labels=5
    ).save_pretrained(folder)
    options = {} if labels else {"num_labels": 3, "ignore_mismatched_sizes": True}
    model = AutoModelForSequenceClassification.from_pretrained(folder, **options)
    return model, labels, torch.arange(5, 17).reshape(2, 6)


@pytest.mark.parametrize(
    "labels", [None, {}, {"id2label": dict(enumerate(LABELS))}], ids=["images", "head", "labels"]
)
def test_the_snippets_run_as_printed_on_a_checkpoint_with_another_head(
    labels, tmp_path, monkeypatch
):
    make = of_images if labels is None else partial(of_texts, **labels)
    base, options, inputs = make(tmp_path / "base")
    model = adapted(base, **options)
    model.save_pretrained(tmp_path / "user" / "x")
    monkeypatch.chdir(tmp_path)
    saved = SavedAdapter.open(tmp_path / "user" / "x")
    text = make_card(saved, "user/x", base_model="org/base").text
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == (1 if labels is None else 2)
    for snippet in snippets:
        names = {}
        exec(snippet, names)
        loaded = names["model"] if "model" in names else names["adapter"].model
        torch.testing.assert_close(loaded.eval()(inputs).logits, model(inputs).logits)


@pytest.mark.parametrize(
    "example", ["a \"b\" 'c'\n\\d é ```", ("a", "b"), ["a", "b" * 200], [("a", "b"), ("c", "d")]]
)
def test_the_example_of_the_snippet_is_the_one_that_was_run(adapter, example):
    card = make_card(adapter, "user/messages", example=example, answer=[1, 2])
    snippet = ast.parse(re.search(r"```python\n(.*?)\n```", card.text, re.DOTALL)[1]).body
    assert ast.unparse(snippet[0]) == "import houlsby_peft"
    assert ast.literal_eval(snippet[2].value) == example


@pytest.mark.parametrize(
    ("example", "answer", "widget"),
    [
        (
            "Late.",
            [{"label": "a", "score": 0.12346}],
            [{"text": "Late.", "output": [{"label": "a", "score": 0.1235}]}],
        ),
        (["x", "y"], None, [{"text": "x"}, {"text": "y"}]),
        (("x", "y"), [{"label": "a", "score": 0.5}], None),  # the widget has one field
    ],
)
def test_the_example_is_in_the_widget_until_other_weights_predict(adapter, example, answer, widget):
    card = make_card(adapter, "user/x", example=example, answer=answer)
    assert card.data.get("widget") == widget
    merged = keep_written(make_card(adapter, "user/x"), [card.content])
    assert merged.data.get("widget") == (widget if answer is None else None)


@pytest.mark.parametrize(
    ("steps", "names"), [(60, ["max_steps"]), (-1, ["num_train_epochs", "max_steps"])]
)
def test_epochs_are_listed_only_if_they_were_planned(steps, names, adapter):
    arguments = {"num_train_epochs": 143, "max_steps": steps}
    card = make_card(adapter, results={"arguments": arguments})
    assert re.findall(r"^\| `(\w+)` \|", card.text, re.MULTILINE) == names


def test_the_base_model_is_named_as_on_the_hub_or_not_at_all(adapter, tmp_path):
    commit = "0" * 40
    snapshot = tmp_path / "models--org--tiny-bert" / "snapshots" / commit
    snapshot.mkdir(parents=True)

    def find(recorded, given=None, revision=None):
        return find_base(
            HoulsbyConfig(base_model_name_or_path=str(recorded), revision=revision), given
        )

    assert find("org/tiny-bert", revision="v1") == ("org/tiny-bert", "v1")
    assert find(snapshot) == ("org/tiny-bert", commit)
    assert find(snapshot, "org/tiny-bert") == ("org/tiny-bert", commit)
    assert find("org/tiny-bert", "org/mirror", "v1") == ("org/mirror", None)
    assert find(tmp_path) == (None, None)
    assert find(tmp_path, "org/tiny-bert") == ("org/tiny-bert", None)
    for wrong in ("/home/me/bert", "runs/bert/base", "../bert"):
        with pytest.raises(AdapterError, match="base_model"):
            make_card(adapter, "user/messages", base_model=wrong)


def test_figures_of_the_adapter_and_of_its_run_are_shown(base, tmp_path):
    saved = SavedAdapter.open(make_adapter(tmp_path / "run" / "adapter", base))
    (saved.folder / "loss_per_step.png").write_bytes(b"")
    (tmp_path / "run" / "scores.png").write_bytes(b"")
    page = write_card(saved.folder).read_text()
    assert "scores.png" not in page, "it is not known to be of this adapter"
    results = tmp_path / "run" / "results.json"
    results.write_text(json.dumps({"adapter_crc32": zlib.crc32(saved.weights_file.read_bytes())}))
    text = write_card(saved.folder).read_text()
    assert "![loss per step](loss_per_step.png)" in text
    assert "![scores](../scores.png)" in text


WORDS = "\n## Who\n\nWe did. [More Information Needed]\n"


@pytest.fixture(scope="module")
def edited(adapter):
    """A card of a run with words around its generated part, and metadata of its own."""
    page = make_card(
        adapter, "user/messages", results=RUN, metadata={"license": "mit", "tags": ["mine"]}
    ).content
    page = page.replace("license: mit", "license: cc-by-4.0\nthumbnail: me.png")
    page = page.replace("# messages", "# Edited")
    return page.replace("<!-- Generated", "![badge](a.png)\n\n<!-- Generated") + WORDS


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_what_is_written_around_the_generated_part_is_kept(line_end, edited, adapter):
    update = make_card(adapter, "user/messages")
    card = keep_written(update, [edited.replace("\n", line_end)])
    assert card.text == f"\n![badge](a.png)\n\n{update.text.strip()}\n{WORDS}"
    data = card.data.to_dict()
    assert (data["license"], data["thumbnail"]) == ("cc-by-4.0", "me.png")
    assert data["tags"] == ["adapter", "houlsby", "mine", "peft"]
    assert "model-index" not in data, "scores of weights that are no more"
    assert keep_written(update, [card.content]).content == card.content


def test_metadata_that_are_given_come_before_those_of_the_page(edited, adapter):
    update = make_card(adapter, metadata={"license": "mit"})
    assert keep_written(update, [edited]).data.license == "mit"


def test_of_several_pages_the_first_one_with_words_counts_and_metadata_come_from_all(
    edited, adapter
):
    update = make_card(adapter, "user/messages")
    metadata = "license: mit\nthumbnail: no.png\ninference: false"
    later = f"---\n{metadata}\n---\n\n{update.text}\nAnother.\n"
    card = keep_written(update, [update.content, edited, later])
    assert "We did." in card.text
    assert "Another." not in card.text
    assert (card.data.thumbnail, card.data.inference) == ("me.png", False)


def test_a_card_from_elsewhere_follows_the_generated_part_unless_it_is_a_template(adapter):
    update = make_card(adapter, "user/messages")
    card = keep_written(update, ["---\nlicense: mit\n---\n# Mine\n"])
    assert card.text.strip() == f"{update.text.strip()}\n\n# Mine"
    template = ModelCard.from_template(ModelCardData()).content
    assert keep_written(update, [template]).content == keep_written(update, []).content


def aliases(level, first, form):
    """Metadata of a few lines that repeat the first one ten times in each of so many levels."""
    lines = [f"a0: &a0 {first}"]
    for number in range(level):
        repeated = ", ".join([f"*a{number}"] * 10)
        lines.append(f"a{number + 1}: &a{number + 1} {form.format(repeated)}")
    return "\n".join(lines)


def nested_aliases(level):
    return aliases(level, "[x, x, x, x, x, x, x, x, x, x]", "[{}]")


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        (f"{nested_aliases(30)}\ntags: *a30", "aliases"),
        (aliases(30, "{x: 1}", "{{<<: [{}]}}"), "aliases"),
        ("tags: &a [*a]", "aliases"),
        ("tags: [", "YAML"),
        ("tags: !!python/name:os.system", "YAML"),
        (f"tags: {'[' * 5000}{']' * 5000}", "deep"),
    ],
    ids=["nested", "merged", "itself", "no YAML", "code", "brackets"],
)
def test_metadata_that_cannot_be_written_out_are_refused(adapter, metadata, word):
    with pytest.raises(AdapterError, match=word):
        keep_written(make_card(adapter), [f"---\n{metadata}\n---\nMine.\n"])


def test_metadata_may_have_aliases(adapter):
    page = f"---\n{nested_aliases(3)}\ndatasets: &names [mine]\ntags: *names\n---\nMine.\n"
    data = keep_written(make_card(adapter), [page]).data.to_dict()
    assert data["datasets"] == ["mine"]
    assert "mine" in data["tags"]


def elements(markdown_it, text):
    """Return the elements of a page in order, without its text."""
    kinds = []
    for token in markdown_it.parse(text):
        for part in [token, *(token.children or [])]:
            if part.type not in ("text", "text_special", "softbreak"):
                kinds.append((part.type, part.tag))
    return kinds


def card_with(words, folder):
    """The card of an adapter and a run in which everything from outside is called like this."""
    with edited_json(folder / "adapter_config.json") as config:
        config["recorded"]["id2label"] = {"0": words, "1": "b"}
        config |= {"id2label": None, "revision": words}
    names = {"name": words, "config": words, "split": words, "rows": {words: 3}}
    run = {
        **RUN,
        "dataset": {**RUN["dataset"], **names},
        "epochs": [{**epoch, words: 0.5} for epoch in RUN["epochs"]],
        "test": {words: 0.1},
        "hardware": words,
        "versions": {words: words},
        "arguments": {"optim": words},
        "command": words,
        "chosen_by": words,
    }
    saved = SavedAdapter.open(folder)
    return make_card(saved, "user/messages", results=run, example=words, answer=[words])


def test_names_from_outside_do_not_change_the_page(base, tmp_path):
    markdown_it = pytest.importorskip("markdown_it").MarkdownIt(
        "gfm-like", {"linkify": False, "html": True}
    )
    folder = make_adapter(tmp_path, base)
    expected = elements(markdown_it, card_with("harmless", folder).text)
    for text in [*HOSTILE, "<!-- End of the generated part. -->"]:
        page = card_with(text, folder)
        assert elements(markdown_it, page.text) == expected, text
        [classes, *_] = re.findall("<strong>classes.*", markdown_it.render(page.text))
        visible = html.unescape(re.sub(r"<[^>]*>", "", classes))
        assert visible == f"classes: {shortened(text)}, b"
        assert page.data.eval_results[0].dataset_name == text
        assert ModelCard(page.content).data.to_dict() == page.data.to_dict()
        # What is generated is recognized as such on the next update.
        update = make_card(SavedAdapter.open(folder))
        assert keep_written(update, [page.content]).text == keep_written(update, []).text, text
