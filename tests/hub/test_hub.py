"""Push and pull over a local Hub with the real client, each side in its own process and with its
own cache.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, snapshot_download
from peft import AutoPeftModelForSequenceClassification, PeftModel, get_peft_model
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load, load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    TrainingArguments,
    pipeline,
)

import houlsby_peft
from answers import near
from houlsby_peft import AdapterError, HoulsbyConfig, TaskBank, TaskSource, plan_push
from hub_models import BASE, LABELS, TEXTS, make_adapter, make_base
from snippets import run_snippets


ROOT = Path(__file__).parents[2]
NEW_TEXTS = [
    "The soup was late and cold.",
    "Is the menu in town?",
    "A quick train to the coast, wonderful.",
]
DATASET = {"id": "org/messages", "name": "Messages", "config": "short", "revision": "abc123"}
RESULTS = {
    "seed": 1,
    "dataset": {**DATASET, "split": "test"},
    "epochs": [{"epoch": 1.0, "step": 20, "accuracy": 0.75}],
}


def train_and_push():
    """Client: train on a base model from the Hub and push; return the URLs and the logits."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    base = AutoModelForSequenceClassification.from_pretrained(
        BASE, num_labels=3, id2label=dict(enumerate(LABELS))
    )
    model = get_peft_model(base, HoulsbyConfig(r=8, share_layers=1), adapter_name="messages")
    batch = tokenizer([text for text, _ in TEXTS], padding=True, return_tensors="pt")
    labels = torch.tensor([label for _, label in TEXTS])
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    metadata = {"license": "mit", "language": "en", "tags": ["customers"]}
    url = houlsby_peft.push_to_hub(
        model,
        "messages",
        tokenizer=tokenizer,
        results=RESULTS,
        example=NEW_TEXTS[0],
        metadata=metadata,
        private=True,
    )
    still_training = model.training
    model.save_pretrained("saved")
    training = TrainingArguments("runs/by-recipe", push_to_hub=True, hub_private_repo=True)
    push = plan_push(training, BASE)
    url_of_recipe = push("saved/messages", results=RESULTS)
    with torch.no_grad():
        logits = model.eval()(**tokenizer(NEW_TEXTS, padding=True, return_tensors="pt")).logits
    return {
        "url": url,
        "url_of_recipe": url_of_recipe,
        "trainer_pushes": training.push_to_hub,
        "losses": losses,
        "logits": logits.tolist(),
        "still_training": still_training,
    }


def pull(name, revision):
    """Client: load in every way that users load; return the logits of each way, and the
    predictions.
    """
    adapter = houlsby_peft.load(name, revision=revision)
    batch = adapter.tokenizer(NEW_TEXTS, padding=True, return_tensors="pt")
    base = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=3)
    ways = {
        "load": adapter.model,
        "PeftModel": PeftModel.from_pretrained(base, name, revision=revision),
        "AutoModel": AutoModelForSequenceClassification.from_pretrained(name, num_labels=3),
        "AutoPeftModel": AutoPeftModelForSequenceClassification.from_pretrained(name, num_labels=3),
    }
    with torch.no_grad():
        logits = {way: model.eval()(**batch).logits.tolist() for way, model in ways.items()}
    ours = adapter.pipeline(top_k=None)(NEW_TEXTS)[0]
    theirs = pipeline(
        "text-classification",
        model=adapter.pipeline().model,
        tokenizer=adapter.tokenizer,
        device=-1,
    )
    return {
        "logits": logits,
        "labels": adapter.labels,
        "predicted": adapter.predict(NEW_TEXTS),
        "pipeline": theirs(NEW_TEXTS),
        "all_labels": ours,
        "revision": adapter.config.revision,
    }


def run_page(page):
    """Client: run the snippets of a page."""
    run_snippets(Path(page).read_text())


def load_offline(name):
    return houlsby_peft.load(name).predict(NEW_TEXTS)


def load_with_peft(name):
    """Client: download what PEFT needs of an adapter, and the base model with its tokenizer."""
    AutoTokenizer.from_pretrained(BASE)
    PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=3), name
    )


def serve_revisions(name, first):
    """Client: a bank with tasks of the first and the latest commit; then the repository gets
    another commit.
    """
    bank = TaskBank({"pinned": TaskSource(name, revision=first), "latest": name})

    def predict():
        return [bank.predict([(task, text) for text in NEW_TEXTS]) for task in ("pinned", "latest")]

    predictions, reloads = [predict()], [bank.reload("latest")]
    folder = Path("next")
    shutil.copytree(snapshot_download(name), folder)
    weights = load_file(folder / SAFETENSORS_WEIGHTS_NAME)
    # Logits of the opposite sign.
    heads = {key: -weight for key, weight in weights.items() if "classifier" in key}
    save_file(weights | heads, folder / SAFETENSORS_WEIGHTS_NAME)
    HfApi().upload_folder(repo_id=name, folder_path=folder)
    predictions.append(predict())
    reloads += [bank.reload(task) for task in ("pinned", "latest")]
    return [*predictions, predict()], reloads


def replace_by_another(name, bases):
    """Client: push an adapter with its tokenizer, then one of another base without; return the
    texts' tokens.
    """
    for base in bases:
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
        tokenizer = AutoTokenizer.from_pretrained(base)
        pushed = tokenizer if base == bases[0] else None
        adapted = get_peft_model(model, HoulsbyConfig(r=4))
        houlsby_peft.push_to_hub(adapted, name, tokenizer=pushed)
    return {
        "trained": tokenizer(NEW_TEXTS).input_ids,
        "loaded": houlsby_peft.load(name).tokenizer(NEW_TEXTS).input_ids,
    }


def push_ladder(common, ladder):
    """Client: push a ladder before and after the adapter beneath it; return the refusal."""
    push = houlsby_peft.push_to_hub
    refusal = ""
    try:
        push(ladder, "user/ladder")
    except AdapterError as error:
        refusal = str(error)
    with pytest.raises(AdapterError, match="base model alone"):
        push(common, "user/common", beneath="user/ladder")
    push(common, "user/common", private=True)
    push(ladder, "user/ladder", beneath="user/common")
    # Others may change it: ladders keep the commit that they were trained on.
    changed = {"path_or_fileobj": b"{}", "path_in_repo": "adapter_config.json"}
    HfApi().upload_file(**changed, repo_id="user/common")
    return refusal


def load_ladder(token):
    """Client without a login of its own."""
    return houlsby_peft.load("user/ladder", token=token).predict(NEW_TEXTS)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of a client that most tests share."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def pushed(hub, home, tmp_path_factory):
    hub.add(BASE, make_base(tmp_path_factory.mktemp("base")))
    hub.add("org/messages-data", {"README.md": b""})
    return hub.call(train_and_push, home=home)


def test_a_new_process_with_an_empty_cache_gets_the_same_logits_and_labels(hub, pushed, tmp_path):
    assert pushed["losses"][-1] < 0.5 * pushed["losses"][0]
    revision = hub.store.repos["user/messages"].head.oid
    pulled = hub.call(pull, "user/messages", revision, home=tmp_path)
    for way, logits in pulled["logits"].items():
        assert logits == pushed["logits"], way
    assert pulled["labels"] == list(LABELS)
    for row, result, of_pipeline in zip(
        torch.tensor(pushed["logits"]).softmax(-1),
        pulled["predicted"],
        pulled["pipeline"],
        strict=True,
    ):
        assert result["label"] == of_pipeline["label"] == LABELS[row.argmax()]
        assert result["score"] == pytest.approx(row.max().item(), rel=1e-5)
    assert {result["label"] for result in pulled["all_labels"]} == set(LABELS)
    assert pulled["revision"] == hub.store.repos[BASE].head.oid

    offline = hub.call(load_offline, "user/messages", home=tmp_path, HF_HUB_OFFLINE="1")
    assert offline == pulled["predicted"]


def test_an_adapter_that_peft_has_downloaded_loads_offline_with_the_tokenizer_of_its_base(
    hub, pushed, tmp_path
):
    hub.call(load_with_peft, "user/messages", home=tmp_path)
    offline = hub.call(load_offline, "user/messages", home=tmp_path, HF_HUB_OFFLINE="1")
    assert len(offline) == len(NEW_TEXTS)
    online = hub.call(load_offline, "user/messages", home=tmp_path)
    assert hub.call(load_offline, "user/messages", home=tmp_path, HF_HUB_OFFLINE="1") == online


def test_tasks_of_a_bank_have_their_revisions_until_they_are_reloaded(hub, pushed, home):
    first = hub.add("user/served", hub.store.repos["user/messages"].head.files).head.oid
    predictions, reloads = hub.call(serve_revisions, "user/served", first, home=home)
    loaded, after_commit, after_reload = predictions
    logits = torch.tensor(pushed["logits"])
    largest = [LABELS[number] for number in logits.argmax(-1)]
    smallest = [LABELS[number] for number in logits.argmin(-1)]
    assert labels(loaded) == labels(after_commit) == [largest, largest]
    assert reloads == [False, False, True]
    assert labels(after_reload) == [largest, smallest]


def labels(predictions):
    """The labels of the results of each task."""
    return [[result["label"] for result in results] for results in predictions]


def test_a_ladder_names_the_commit_of_the_adapter_beneath_it(hub, pushed, home, tmp_path):
    base = make_base(tmp_path / "base")
    common = make_adapter(tmp_path / "common", base)
    ladder = make_adapter(
        tmp_path / "ladder", base, seed=2, kind="ladder", beneath=str(common), init_std=1
    )
    expected = houlsby_peft.load(ladder, base_model=str(base)).predict(NEW_TEXTS)
    refusal = hub.call(push_ladder, str(common), str(ladder), home=home)
    assert "must be on the Hub" in refusal
    assert "Push it first" in refusal
    files = hub.store.repos["user/ladder"].head.files
    fields = json.loads(files["adapter_config.json"])
    assert fields["beneath"] == "user/common"
    commit = fields["recorded"]["beneath"]["commit"]
    assert commit in [made.oid for made in hub.store.repos["user/common"].commits]
    assert f"user/common at commit {commit}" in files["README.md"].decode()
    shutil.rmtree(common)
    answers = hub.call(load_ladder, "hf_write", home=tmp_path / "home", token=None)
    assert answers == near(expected)


def test_one_commit_holds_the_needed_files_and_nothing_else(hub, pushed):
    repo = hub.store.repos["user/messages"]
    assert repo.head.message == "Upload Houlsby adapter"
    assert len(repo.commits) == 2
    files = {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert repo.head.files.keys() == files | {"tokenizer.json", "tokenizer_config.json"}
    assert repo.private
    assert pushed["url"] == f"{hub.url}/user/messages/commit/{repo.head.oid}"
    assert pushed["still_training"]
    weights = load(repo.head.files["adapter_model.safetensors"])
    for key, weight in weights.items():
        assert "down_proj.weight" not in key or weight.shape == (8, 32)
    for path, content in repo.head.files.items():
        if not path.endswith("safetensors"):
            assert str(Path.home()).encode() not in content
            assert b"/tmp/" not in content


def test_a_push_without_a_tokenizer_leaves_none_of_an_earlier_push(hub, pushed, home, tmp_path):
    base = make_base(tmp_path / "other", seed=1)
    vocabulary = json.loads((base / "tokenizer.json").read_text())["model"]["vocab"]
    backwards = sorted(vocabulary, key=lambda word: (not word.startswith("["), -vocabulary[word]))
    numbers = {word: number for number, word in enumerate(backwards)}
    BertTokenizer(vocab=numbers).save_pretrained(base)
    hub.add("org/other", base)
    tokens = hub.call(replace_by_another, "user/replaced", [BASE, "org/other"], home=home)
    assert tokens["loaded"] == tokens["trained"]
    assert not [name for name in hub.store.repos["user/replaced"].head.files if "token" in name]


def test_a_recipe_pushes_what_it_saved_in_place_of_the_trainer(hub, pushed):
    by_recipe, by_hand = hub.store.repos["user/by-recipe"], hub.store.repos["user/messages"]
    assert pushed["url_of_recipe"] == f"{hub.url}/user/by-recipe/commit/{by_recipe.head.oid}"
    assert not pushed["trainer_pushes"]
    assert by_recipe.private
    weights = by_recipe.head.files["adapter_model.safetensors"]
    assert weights == by_hand.head.files["adapter_model.safetensors"]
    saved = json.loads(by_recipe.head.files["adapter_config.json"])
    assert saved["revision"] == hub.store.repos[BASE].head.oid
    assert [*saved["recorded"]["id2label"].values()] == [*LABELS]
    assert plan_push(TrainingArguments("runs"), BASE) is None


def test_the_snippets_of_the_page_run_and_print_what_it_says(hub, home, tmp_path):
    hub.add("google-bert/bert-base-uncased", make_base(tmp_path / "base"))
    hub.call(run_page, str(ROOT / "docs" / "hub.md"), home=home)
    assert "A fine film." in hub.store.repos["user/sentiment"].head.files["README.md"].decode()
