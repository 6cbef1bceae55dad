"""A bank with every kind of task: mixed batches, several classes, thresholds, and tasks that change
while it runs.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import houlsby_peft
from answers import near
from edited_json import edited_json
from houlsby_peft import AdapterError, HubError, TaskBank, TaskSource
from hub_models import WORDS, make_adapter, save_adapter


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
QUESTIONS = [("How long does the battery last?", CONTEXT), ("Where?", "Best bread in town.")]
TEXTS = [*WORDS[:4], " ".join(WORDS)]
INPUTS = {"things": TEXTS, "more things": TEXTS, "answer": QUESTIONS, "other answer": QUESTIONS}


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    """An adapter for each of KINDS."""
    path = tmp_path_factory.mktemp("adapters")
    for seed, (task, (model_class, head)) in enumerate(KINDS.items()):
        model = save_adapter(path / task, base, model_class, head, seed)
        if task == "more things":
            model.base_model.note("default", max_length=20)
            model.save_pretrained(path / task)
    return {task: path / task for task in KINDS}


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


@pytest.mark.parametrize("batch_size", [3, 64])
def test_every_kind_of_task_is_predicted_as_by_its_adapter_alone(
    folders, requests, expected, batch_size
):
    results = TaskBank(folders).predict(requests, batch_size=batch_size)
    answered = set()
    for (task, _), result, expected_result in zip(requests, results, expected, strict=True):
        assert result == near(expected_result), task
        if result:
            answered.add(task)
    assert answered == set(KINDS)


def test_embeddings_are_the_mean_of_the_tokens(base, folders):
    model = AutoModel.from_pretrained(base)
    model.load_adapter(str(folders["vector"]))
    tokenizer = AutoTokenizer.from_pretrained(base)
    # In a batch, a pair has a second end mark even if its second text is empty; a tokenizer alone
    # leaves it out.
    pairs = [(WORDS[0], WORDS[1]), (WORDS[0], ""), ("", WORDS[0])]
    rows = [tokenizer(text, return_tensors="pt") for text in WORDS]
    rows += [tokenizer([first], [second], return_tensors="pt") for first, second in pairs]
    with torch.no_grad():
        means = [model.eval()(**row).last_hidden_state[0].mean(0) for row in rows]
    vectors = houlsby_peft.load(folders["vector"]).predict([*WORDS, *pairs], batch_size=5)
    torch.testing.assert_close(torch.tensor(vectors), torch.stack(means), rtol=1e-4, atol=1e-5)


def test_the_best_classes(folders):
    predictor, bank = houlsby_peft.load(folders["topic"]), TaskBank(folders)
    tokens = predictor.tokenizer(WORDS[0], return_tensors="pt")
    with torch.no_grad():
        scores = predictor.model(**tokens, adapter_names=["default"]).logits.softmax(-1)[0]
    by_score = []
    for number in scores.argsort(descending=True).tolist():
        by_score.append({"label": "abcd"[number], "score": scores[number].item()})
    for top_k in (1, 3, 4, 9):
        expected = [near(by_score[:top_k])]
        assert predictor.predict(WORDS[0], top_k=top_k) == expected
        assert bank.predict([("topic", WORDS[0])], top_k=top_k) == expected
    classes, vector = bank.predict([("topic", WORDS[0]), ("vector", WORDS[0])], top_k=[2, None])
    assert (len(classes), len(vector)) == (2, 32)


def test_asking_all_tasks_leaves_out_those_that_read_other_inputs(folders):
    bank = TaskBank(folders)
    tags = {"things", "more things"}
    answers = {"answer", "other answer"}
    for text, others in ((WORDS[0], answers), (QUESTIONS[0], tags)):
        named = [task for task in KINDS if task not in others]
        assert bank.ask(text) == near(bank.ask(text, named))
        assert list(bank.ask(text)) == named
        with pytest.raises(ValueError, match="must be"):
            bank.ask(text, list(KINDS))
    with pytest.raises(ValueError, match="Leave out empty"):
        bank.ask(" ")


def test_a_service_that_is_asked_for_all_tasks_leaves_out_the_same(folders):
    pytest.importorskip("uvicorn", reason="the extra serve is not installed")
    from running_service import ServiceInThread

    service = ServiceInThread(folders["topic"].parent)
    question, context = QUESTIONS[0]
    row = {"question": question, "context": context}
    status, content = service.predict({"tasks": "*", "text": WORDS[0]}, {"tasks": "*", **row})
    refused, _ = service.predict({"tasks": [*KINDS], "text": WORDS[0]})
    service.stop()
    assert (status, refused) == (200, 422)
    bank = TaskBank(folders)
    assert content["predictions"] == [near(bank.ask(WORDS[0])), near(bank.ask(QUESTIONS[0]))]


@pytest.mark.parametrize("task", ["similarity", "vector"])
def test_classes_of_what_is_no_classification_are_refused(task, folders):
    with pytest.raises(ValueError, match="top_k"):
        houlsby_peft.load(folders[task]).predict(WORDS[0], top_k=2)
    with pytest.raises(ValueError, match="top_k"):
        TaskBank(folders).predict([("topic", WORDS[0]), (task, WORDS[0])], top_k=2)


def test_thresholds(folders):
    requests = [("labels", WORDS[0]), ("topic", WORDS[0])]
    labels, [best] = (
        TaskBank(folders).predict([request], top_k=top_k)[0]
        for request, top_k in zip(requests, (9, 1), strict=True)
    )

    def bank_with(of_labels, of_topic):
        sources = {
            "labels": TaskSource(folders["labels"], threshold=of_labels),
            "topic": TaskSource(folders["topic"], threshold=of_topic),
        }
        return TaskBank(sources)

    bank = bank_with(labels[2]["score"] - 1e-4, best["score"] + 1e-4)
    none = {"label": None, "score": best["score"]}
    assert bank.predict(requests) == near([labels[:3], none])
    assert bank.predict(requests, top_k=2) == near([labels[:2], []])
    bank = bank_with(1.0, best["score"] - 1e-4)
    assert bank.predict(requests) == near([[], best])


def test_a_label_needs_half_of_the_score_without_a_threshold(folders):
    [labels] = houlsby_peft.load(folders["labels"]).predict(WORDS[0], top_k=9)
    bank, request = TaskBank(folders), [("labels", WORDS[0])]
    assert bank.predict(request, top_k=9) == [near(labels)]
    assert bank.predict(request) == near([[label for label in labels if label["score"] >= 0.5]])


@pytest.mark.parametrize("task", ["similarity", "things", "answer", "vector"])
def test_a_threshold_of_what_is_no_classification_is_refused(task, folders):
    bank = TaskBank(folders)
    with pytest.raises(ValueError, match="threshold"):
        bank.add("new", TaskSource(folders[task], threshold=0.5))
    assert "new" not in bank.tasks
    assert all(held.name != "new" for held in bank._held)


def test_tasks_are_added_replaced_and_removed(folders):
    bank, request = TaskBank({"topic": folders["topic"]}), [("topic", WORDS[0])]
    first_answer = bank.predict(request)
    bank.add("answer", folders["answer"])
    bank.add("labels", TaskSource(folders["labels"], threshold=0.0))
    assert bank.held == bank.tasks == ("topic", "answer", "labels")
    assert len(bank.predict([("labels", WORDS[0])])[0]) == 5
    with pytest.raises(AdapterError, match="replace=True"):
        bank.add("topic", folders["labels"])
    with pytest.raises(HubError, match="no folder"):
        bank.add("topic", folders["topic"] / "nothing", replace=True)
    assert bank.predict(request) == first_answer
    bank.add("topic", folders["similarity"], replace=True)
    assert bank.predict(request) == houlsby_peft.load(folders["similarity"]).predict(WORDS[0])
    nbytes = bank._held.nbytes
    bank.remove("labels")
    assert bank.tasks == ("topic", "answer")
    assert bank.held == ("answer", "topic")
    weights = load_file(folders["labels"] / "adapter_model.safetensors").values()
    assert nbytes - bank._held.nbytes == sum(weight.nbytes for weight in weights)
    for change in (bank.remove, bank.reload, lambda task: bank.warm_up([task])):
        with pytest.raises(AdapterError, match="labels"):
            change("labels")


@pytest.fixture
def changing(base, folders, tmp_path):
    """A bank whose task "changing" has a folder that changes, and another adapter for it."""
    sources = [make_adapter(tmp_path / str(seed), base, str(base), seed) for seed in (1, 2)]
    live = shutil.copytree(sources[0], tmp_path / "live")
    bank = TaskBank({"first": folders["topic"], "changing": live})
    bank.warm_up()
    return bank, live, sources


REQUESTS = [("changing", text) for text in WORDS]


def predictions_of(folder):
    return near(houlsby_peft.load(folder).predict(WORDS))


def change(live, source):
    time.sleep(0.01)  # a file system may count in these steps
    shutil.copytree(source, live, dirs_exist_ok=True)


def test_a_changed_folder_is_loaded_again_and_a_damaged_one_is_not(changing):
    bank, live, sources = changing
    assert bank.predict(REQUESTS) == predictions_of(sources[0]) != predictions_of(sources[1])
    assert not bank.reload("changing")
    change(live, sources[1])
    assert bank.reload("changing")
    assert bank.predict(REQUESTS) == predictions_of(sources[1])
    (live / "adapter_model.safetensors").write_bytes(b"half a fi")
    with pytest.raises(AdapterError, match="header"):
        bank.reload("changing")
    assert bank.predict(REQUESTS) == predictions_of(sources[1])


def test_running_requests_keep_the_adapter_that_is_replaced(changing, monkeypatch):
    bank, live, sources = changing
    reached, go_on = threading.Event(), threading.Event()
    decode = bank.decode

    def wait(question):
        """Stop after the first answer, until the adapter has been replaced."""
        decode(question)
        if not reached.is_set():
            reached.set()
            go_on.wait(60)

    monkeypatch.setattr(bank, "decode", wait)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(bank.predict, iter(REQUESTS), batch_size=4)
        assert reached.wait(60)
        change(live, sources[1])
        bank.reload("changing")
        assert bank.predict(REQUESTS) == predictions_of(sources[1])
        assert bank.held == ("first", "changing", "changing")
        go_on.set()
        assert running.result() == predictions_of(sources[0])
    assert bank.held == ("first", "changing"), "the first adapter was not dropped"


def test_a_tokenizer_whose_numbers_are_huge_is_refused_at_once(base, folders, tmp_path):
    """The tokenizers library would write a line for each number below the largest one."""
    folder = make_adapter(tmp_path / "huge", base, str(base))
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    with edited_json(folder / "tokenizer.json") as tokenizer:
        tokenizer["model"]["vocab"]["town"] = 2**31
    bank = TaskBank({"topic": folders["topic"], "huge": folder})
    start = time.perf_counter()
    for load in (lambda: houlsby_peft.load(folder), lambda: bank.predict([("huge", WORDS[0])])):
        with pytest.raises(AdapterError, match="10,000,000"):
            load()
    assert time.perf_counter() - start < 5, "it was written or copied"
