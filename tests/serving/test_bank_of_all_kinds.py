"""A bank with every kind of task: mixed batches, several classes, thresholds, and tasks that change
while it runs.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
import time

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import houlsby_peft
from houlsby_peft import AdapterError, HoulsbyConfig, HubError, TaskBank, TaskSource
from hub_models import WORDS, make_adapter
from tiny_models import perturb


CONTEXT = (
    "The new phone is quick and the battery lasts for days. I waited an hour. The soup was cold. "
    * 8
)
TAGS = {"id2label": {0: "O", 1: "B-THING", 2: "I-THING"}}
LABELS = {"id2label": dict(enumerate("vwxyz")), "problem_type": "multi_label_classification"}
KINDS = {
    "topic": (AutoModelForSequenceClassification, {"id2label": dict(enumerate("abcd"))}),
    "similarity": (AutoModelForSequenceClassification, {"id2label": {0: "similarity"}}),
    "labels": (AutoModelForSequenceClassification, LABELS),
    "things": (AutoModelForTokenClassification, TAGS),
    "more things": (
        AutoModelForTokenClassification,
        {"id2label": {0: "O", 1: "B-X", 2: "B-Y", 3: "I-Y"}},
    ),
    "answer": (AutoModelForQuestionAnswering, {}),
    "other answer": (AutoModelForQuestionAnswering, {}),
    "vector": (AutoModel, {}),
}
INPUTS = {
    "answer": [("How long does the battery last?", CONTEXT), ("Where?", "Best bread in town.")],
    "things": [*WORDS[:4], " ".join(WORDS)],
}
INPUTS |= {"other answer": INPUTS["answer"], "more things": INPUTS["things"]}


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    """An adapter for each of KINDS."""
    found = {}
    for seed, (task, (auto_class, head)) in enumerate(KINDS.items()):
        torch.manual_seed(seed)
        model = get_peft_model(auto_class.from_pretrained(base, **head), HoulsbyConfig(r=4))
        perturb(model, seed)
        if task == "more things":
            model.base_model.records["default"].max_length = 20
        found[task] = tmp_path_factory.mktemp("adapters") / str(seed)
        model.save_pretrained(found[task])
    return found


@pytest.fixture(scope="module")
def requests():
    several = [(task, text) for task in KINDS for text in INPUTS.get(task, WORDS[:5])]
    random.Random(0).shuffle(several)
    return several


@pytest.fixture(scope="module")
def expected(folders, requests):
    """What each adapter predicts by itself."""
    alone = {task: houlsby_peft.load(folder) for task, folder in folders.items()}
    return [alone[task].predict(text, batch_size=1)[0] for task, text in requests]


def approximately(value):
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [approximately(item) for item in value]
    return (
        value
        if isinstance(value, (str, int, type(None)))
        else pytest.approx(value, rel=1e-3, abs=1e-5)
    )


@pytest.mark.parametrize("batch_size", [3, 64])
def test_every_kind_of_task_is_predicted_as_by_its_adapter_alone(
    folders, requests, expected, batch_size
):
    found = TaskBank(folders).predict(requests, batch_size=batch_size)
    for (task, _), result, other in zip(requests, found, expected, strict=True):
        assert result == approximately(other), task
    assert {task for (task, _), result in zip(requests, found, strict=True) if result} == set(KINDS)
    assert len(found[[task for task, _ in requests].index("vector")]) == 32


def test_embeddings_are_the_mean_of_the_tokens(base, folders):
    adapted = get_peft_model(AutoModel.from_pretrained(base), HoulsbyConfig(r=4))
    adapted.load_adapter(str(folders["vector"]), "own")
    adapted.set_adapter("own")
    tokenizer = AutoTokenizer.from_pretrained(base)
    # In a batch, a pair has a second end mark even if its second text is empty; a tokenizer alone
    # leaves it out.
    pairs = [(WORDS[0], WORDS[1]), (WORDS[0], ""), ("", WORDS[0])]
    rows = [tokenizer(text, return_tensors="pt") for text in WORDS]
    rows += [tokenizer([first], [second], return_tensors="pt") for first, second in pairs]
    with torch.no_grad():
        hidden = [adapted.eval()(**row).last_hidden_state[0] for row in rows]
    found = houlsby_peft.load(folders["vector"]).predict([*WORDS, *pairs], batch_size=5)
    torch.testing.assert_close(
        torch.tensor(found), torch.stack([own.mean(0) for own in hidden]), rtol=1e-4, atol=1e-5
    )


def test_the_best_classes(folders):
    predictor = houlsby_peft.load(folders["topic"])
    bank = TaskBank(folders)
    tokens = predictor.tokenizer(WORDS[0], return_tensors="pt")
    with torch.no_grad():
        scores = predictor.model(**tokens, adapter_names=["default"]).logits.softmax(-1)[0]
    by_score = [
        ("abcd"[i], pytest.approx(scores[i].item(), rel=1e-4))
        for i in scores.argsort(descending=True)
    ]
    for top_k in (1, 3, 4, 9):
        for [found] in (
            predictor.predict(WORDS[0], top_k=top_k),
            bank.predict([("topic", WORDS[0])], top_k=top_k),
        ):
            assert [(item["label"], item["score"]) for item in found] == by_score[:top_k]
    both = bank.predict([("topic", WORDS[0]), ("vector", WORDS[0])], top_k=[2, None])
    assert len(both[0]) == 2
    assert len(both[1]) == 32
    many = houlsby_peft.load(folders["labels"]).predict(WORDS[0], top_k=5)[0]
    assert many == approximately(bank.predict([("labels", WORDS[0])], top_k=5)[0])
    for task, kind in {"similarity": "regression", "vector": "feature-extraction"}.items():
        with pytest.raises(
            ValueError, match=rf"top_k is for text classification; the task of .* is {kind}\."
        ):
            houlsby_peft.load(folders[task]).predict(WORDS[0], top_k=2)
        with pytest.raises(ValueError, match="top_k is for text classification"):
            bank.predict([("topic", WORDS[0]), (task, WORDS[0])], top_k=2)
    with pytest.raises(ValueError, match="top_k must be"):
        predictor.predict(WORDS[0], top_k=0)


def test_thresholds(folders):
    free = TaskBank(folders)
    many = free.predict([("labels", WORDS[0])], top_k=9)[0]
    best = free.predict([("topic", WORDS[0])])[0]
    assert free.predict([("labels", WORDS[0])])[0] == approximately(
        [item for item in many if item["score"] >= 0.5]
    )
    middle = many[2]["score"]
    requests = [("labels", WORDS[0]), ("topic", WORDS[0])]

    def bank_with(labels, topic):
        least = {"labels": labels, "topic": topic}
        return TaskBank(
            {task: TaskSource(folders[task], threshold=score) for task, score in least.items()}
        )

    bank = bank_with(middle - 1e-4, best["score"] + 1e-4)
    assert bank.predict(requests) == [
        approximately(many[:3]), {"label": None, "score": pytest.approx(best["score"], rel=1e-4)}
    ]  # fmt: skip
    assert bank.predict(requests, top_k=2) == [approximately(many[:2]), []]
    low = bank_with(1.0, best["score"] - 1e-4)
    assert low.predict(requests) == [[], approximately(best)]
    with pytest.raises(ValueError, match=r"A threshold must be between 0 and 1; got 2 for "):
        TaskSource("anywhere", threshold=2)
    for task in ("similarity", "things", "answer", "vector"):
        with pytest.raises(
            ValueError, match=r"A threshold is for text classification; the task of "
        ):
            free.add("new", TaskSource(folders[task], threshold=0.5))
    assert "new" not in free.tasks
    assert all(task.name != "new" for task in free._held)


def test_tasks_are_added_replaced_and_removed(folders):
    bank = TaskBank({"topic": folders["topic"]})
    before = bank.predict([("topic", WORDS[0])])
    bank.add("answer", folders["answer"])
    bank.add("labels", TaskSource(folders["labels"], threshold=0.0))
    assert bank.held == bank.tasks == ("topic", "answer", "labels")
    assert len(bank.predict([("labels", WORDS[0])])[0]) == 5
    with pytest.raises(
        AdapterError, match=r"must be new to the bank; got 'topic'\. Give replace=True"
    ):
        bank.add("topic", folders["labels"])
    with pytest.raises(HubError, match="is no folder, and on the Hub: "):
        bank.add("topic", folders["topic"] / "nothing", replace=True)
    assert bank.predict([("topic", WORDS[0])]) == before
    bank.add("topic", folders["similarity"], replace=True)
    assert bank.predict([("topic", WORDS[0])]) == houlsby_peft.load(folders["similarity"]).predict(
        WORDS[0]
    )
    nbytes = bank._held.nbytes
    bank.remove("labels")
    assert bank.tasks == ("topic", "answer")
    assert bank.held == ("answer", "topic")
    weights = load_file(folders["labels"] / "adapter_model.safetensors").values()
    assert nbytes - bank._held.nbytes == sum(weight.nbytes for weight in weights)
    for change in (bank.remove, bank.reload, lambda task: bank.warm_up([task])):
        with pytest.raises(
            AdapterError, match=r"A task must be among those of the bank: .*; got labels\."
        ):
            change("labels")


def test_a_changed_folder_is_loaded_again_and_running_requests_keep_the_old_adapter(
    base, folders, tmp_path
):
    old, new = (make_adapter(tmp_path / str(seed), base, str(base), seed) for seed in (1, 2))
    expected = [houlsby_peft.load(folder).predict(WORDS) for folder in (old, new)]
    assert expected[0] != expected[1]
    bank = TaskBank(
        {"first": folders["topic"], "changing": shutil.copytree(old, tmp_path / "live")}
    )
    bank.warm_up()
    requests = [("changing", text) for text in WORDS]
    assert bank.predict(requests) == approximately(expected[0])
    assert not bank.reload("changing")
    reached, go_on = threading.Event(), threading.Event()
    found = []

    def slowly():
        """Requests that stop after their first answer, until the adapter has been replaced."""
        several = iter(requests)
        decode = bank.decode

        def wait(question):
            decode(question)
            if not reached.is_set():
                reached.set()
                go_on.wait(60)

        bank.decode = wait
        found.extend(bank.predict(several, batch_size=4))

    thread = threading.Thread(target=slowly)
    thread.start()
    assert reached.wait(60)
    del bank.decode
    time.sleep(0.01)  # a file system may count in these steps
    for file in new.iterdir():
        shutil.copy(file, tmp_path / "live")
    assert bank.reload("changing")
    assert bank.predict(requests) == approximately(expected[1])
    assert bank.held == ("first", "changing", "changing")
    go_on.set()
    thread.join()
    assert found == approximately(expected[0])
    assert bank.held == ("first", "changing"), "the old adapter was not dropped"
    (tmp_path / "live" / "adapter_model.safetensors").write_bytes(b"half a fi")
    with pytest.raises(AdapterError, match=r"live.*header"):
        bank.reload("changing")
    assert bank.predict(requests) == approximately(expected[1])


def test_a_tokenizer_whose_numbers_are_huge_is_refused_at_once(base, folders, tmp_path):
    """The tokenizers library would write a line for each number below the largest one."""
    folder = make_adapter(tmp_path / "huge", base, str(base))
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["model"]["vocab"]["town"] = 2**31
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    bank = TaskBank({"topic": folders["topic"], "huge": folder})
    start = time.perf_counter()
    for load in (lambda: houlsby_peft.load(folder), lambda: bank.predict([("huge", WORDS[0])])):
        with pytest.raises(AdapterError, match=r"must be below 10,000,000; .* has 2,147,483,648\."):
            load()
    assert time.perf_counter() - start < 5, "it was written or copied"
