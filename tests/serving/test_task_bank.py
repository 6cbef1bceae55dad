"""Many tasks on one base model: equal to each adapter by itself, bounded, from several threads,
whatever fails.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import threading
import weakref
from itertools import chain

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
)

from houlsby_peft import AdapterError, HoulsbyConfig, HubError, TaskBank, TaskSource, load
from houlsby_peft.hub.metadata import as_list
from hub_models import WORDS, make_adapter, make_base
from tiny_models import perturb


TASKS = {
    "sentiment": {"id2label": {0: "bad", 1: "good"}},
    "topic": {"id2label": dict(enumerate("abcde"))},
    "similarity": {"id2label": {0: "similarity"}},
    "tags": {"id2label": dict(enumerate("xyz")), "problem_type": "multi_label_classification"},
    "version 2.0": {"id2label": {0: "no", 1: "yes"}},
}
OPTIONS = {
    "topic": {"share_layers": 1, "r": 2},
    "sentiment": {"kind": "ladder"},
    "tags": {"kind": "ladder", "train_layer_norm": False, "layers_to_transform": [1]},
}


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    """An adapter for each of TASKS."""
    found = {}
    for seed, (task, head) in enumerate(TASKS.items()):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(base, **head)
        model = get_peft_model(
            model, HoulsbyConfig(task_type="SEQ_CLS", **{"r": 4, **OPTIONS.get(task, {})})
        )
        perturb(model, seed)
        found[task] = tmp_path_factory.mktemp("adapters") / str(seed)
        model.save_pretrained(found[task])
    return found


@pytest.fixture(scope="module")
def alone(folders):
    """What each adapter predicts on a base model of its own, by task and text."""
    inputs = [*WORDS, (WORDS[0], WORDS[1]), WORDS[1] * 30]
    return {
        task: dict(zip(inputs, load(folder).predict(inputs, batch_size=1), strict=True))
        for task, folder in folders.items()
    }


def assert_as_alone(found, requests, alone):
    expected = [alone[task][text] for task, text in requests]
    found, expected = (
        list(chain(*map(as_list, items))) for items in (found, expected)
    )  # several labels are a list
    assert [item["label"] for item in found] == [item["label"] for item in expected]
    assert [item["score"] for item in found] == pytest.approx(
        [item["score"] for item in expected], rel=1e-4
    )


def bank_model(bank):
    """The model of the first kind of task that was loaded."""
    return next(iter(bank._held._first.values())).model


def some_requests(alone, number, seed=0):
    chosen = random.Random(seed)
    return [
        (task, chosen.choice(list(alone[task]))) for task in chosen.choices(list(alone), k=number)
    ]


def size(folder):
    return sum(weight.nbytes for weight in load_file(folder / "adapter_model.safetensors").values())


def test_adapters_are_loaded_when_needed_and_the_least_recently_used_are_dropped(folders, alone):
    bound = size(folders["topic"]) + size(folders["version 2.0"])
    bank = TaskBank(folders, max_bytes=bound)

    def ask(task):
        assert_as_alone(bank.predict([(task, WORDS[0])]), [(task, WORDS[0])], alone)
        return bank.held

    assert bank.held == ()
    ask("sentiment")
    ask("topic")
    assert ask("similarity") == ("sentiment", "topic", "similarity")
    assert ask("topic") == ("sentiment", "similarity", "topic")
    assert ask("version 2.0") == ("sentiment", "topic", "version 2.0")
    assert ask("similarity") == ("sentiment", "similarity")  # larger than "topic"
    loaded = set(bank_model(bank).peft_config)
    assert ask("sentiment") == ("similarity", "sentiment")
    assert set(bank_model(bank).peft_config) == loaded
    # All tasks of a batch are there, even where they do not fit.
    requests = some_requests(alone, 40)
    assert_as_alone(bank.predict(requests), requests, alone)
    assert set(bank.held) == set(TASKS)
    assert sum(size(folders[task]) for task in ask("similarity") if task != "sentiment") <= bound


def test_the_first_adapter_has_its_weights_in_slots_alone(folders, alone):
    bank = TaskBank({"topic": folders["topic"]})
    requests = [("topic", word) for word in WORDS[:3]]
    assert_as_alone(bank.predict(requests), requests, alone)
    assert not [name for name, _ in bank_model(bank).named_parameters() if ".task_1." in name]
    assert bank._held.nbytes == size(folders["topic"])


def test_what_is_dropped_gives_its_memory_back_and_tokenizers_are_shared(folders):
    bank = TaskBank(folders, max_bytes=0)
    bank.predict([("sentiment", WORDS[0])])
    bank.predict([("topic", WORDS[0])])
    assert bank._held.nbytes == size(folders["topic"])
    model, tokenizers = bank_model(bank), set(map(id, bank._held._tokenizers.values()))
    weights = [
        weakref.ref(weight) for name, weight in model.named_parameters() if ".task_2." in name
    ]
    [held] = [form.slots for form in bank._held._forms.values() if form.slots.numbers]
    for stack in held.stacks.values():
        weights += map(weakref.ref, stack.weights.values())
    del held, stack
    assert len(weights) > 10
    bank.predict([("tags", WORDS[0])])
    assert set(map(id, bank._held._tokenizers.values())) == tokenizers
    gc.collect()
    assert all(weight() is None for weight in weights)


def test_an_adapter_with_a_tokenizer_of_its_own(base, folders, alone, tmp_path):
    words = AutoTokenizer.from_pretrained(base).get_vocab()
    special = [word for word in words if word.startswith("[")]
    others = [word for word in words if not word.startswith("[")]
    mixed_up = {word: number for number, word in enumerate([*special, *reversed(others)])}
    folder = make_adapter(tmp_path, base, str(base))
    BertTokenizer(vocab=mixed_up, model_max_length=64).save_pretrained(folder)
    expected = load(folder).predict(WORDS[0])[0]
    found = TaskBank({**folders, "own": folder}).predict(
        [("sentiment", WORDS[0]), ("own", WORDS[0])]
    )
    assert_as_alone(
        found, [("sentiment", WORDS[0]), ("own", WORDS[0])], {**alone, "own": {WORDS[0]: expected}}
    )


@pytest.mark.parametrize("first", ["types", "no types"])
def test_rows_with_and_without_token_types_stay_apart(first, base, tmp_path):
    names = {"types": None, "no types": ["input_ids", "attention_mask"]}
    folders = {
        task: make_adapter(tmp_path / task, base, str(base), seed)
        for seed, task in enumerate(names)
    }
    for task, inputs in names.items():
        options = {} if inputs is None else {"model_input_names": inputs}
        AutoTokenizer.from_pretrained(base, **options).save_pretrained(folders[task])
    pair = (WORDS[0], WORDS[5])
    alone = {task: {pair: load(folder).predict(pair)[0]} for task, folder in folders.items()}
    bank = TaskBank(folders)
    bank.warm_up([first])
    requests = [(task, pair) for task in ("types", "no types", "types")]
    assert_as_alone(bank.predict(requests), requests, alone)


def count_calls(run):
    """Return how many Python functions a function calls."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def test_loading_takes_the_same_work_however_many_adapters_are_held(folders):
    bank = TaskBank({str(number): folders["topic"] for number in range(12)})
    calls = [count_calls(lambda task=task: bank.predict([(task, WORDS[0])])) for task in bank.tasks]
    # The fifth and the last one, which need no more slots.
    assert calls[11] < 1.02 * calls[4]


def test_predicting_takes_the_same_work_however_many_adapters_are_held(folders):
    bank = TaskBank({str(number): folders["topic"] for number in range(64)})
    several = [(str(number), WORDS[number % 2]) for number in range(4)]  # two texts, each twice
    calls = []
    for held in (4, 64):
        for task in bank.tasks[:held]:
            bank.reader(task)
        bank.predict(several)
        calls.append(count_calls(lambda: bank.predict(several)))
    # Each held adapter is looked at once in a call: whether its task is still there, and its bytes.
    assert calls[1] - calls[0] < 4 * 60


def test_adapters_that_train_tokens(base, folders, alone, tmp_path):
    tokens = {"second": [7, 9], "third": [8]}
    own = {
        t: make_adapter(tmp_path / t, base, str(base), trainable_token_indices=i)
        for t, i in tokens.items()
    }
    expected = alone | {
        task: {text: load(folder).predict(text)[0] for text in WORDS}
        for task, folder in own.items()
    }
    both = [("third", WORDS[0]), ("topic", WORDS[0])]  # the one without trained tokens comes second
    assert_as_alone(TaskBank({**folders, **own}).predict(both, batch_size=1), both, expected)
    bank = TaskBank({"topic": folders["topic"], **own}, max_bytes=size(own["third"]))
    requests = [(task, text) for text in WORDS for task in bank.tasks]
    assert_as_alone(bank.predict(requests), requests, expected)
    # The others are dropped, and come back.
    assert set(bank.held) == set(bank.tasks)
    assert_as_alone(bank.predict(requests[2:3]), requests[2:3], expected)
    assert bank.held == ("third",)
    assert_as_alone(bank.predict(requests), requests, expected)


def test_threads_that_ask_for_tasks_that_drop_each_other(folders, alone):
    bank = TaskBank(folders, max_bytes=size(folders["topic"]))
    requests = [some_requests(alone, 30, seed) for seed in range(4)]
    found = [None] * len(requests)
    start = threading.Barrier(len(requests))

    def ask(number):
        start.wait()
        found[number] = bank.predict(requests[number], batch_size=3)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for predictions, asked in zip(found, requests, strict=True):
        assert_as_alone(predictions, asked, alone)


def test_what_cannot_be_loaded_is_refused_and_the_others_go_on(base, folders, alone, tmp_path):
    other = make_adapter(
        tmp_path / "other", make_base(tmp_path / "other base", seed=5), "org/other"
    )
    words = get_peft_model(AutoModelForMaskedLM.from_pretrained(base), HoulsbyConfig(r=4))
    words.save_pretrained(tmp_path / "words")
    damaged = make_adapter(tmp_path / "damaged", base, str(base))
    (damaged / "adapter_model.safetensors").write_bytes(b"no tensors")
    tokenizer = make_adapter(tmp_path / "tokenizer", base, str(base))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / name).write_text("{")
    bad = {
        "other": other,
        "words": tmp_path / "words",
        "damaged": damaged,
        "nowhere": tmp_path / "nowhere",
    }
    bad |= {"tokenizer": tokenizer}
    bank = TaskBank({**folders, **bad})
    request = ("topic", WORDS[0])
    for task, message in {
        "other": "was trained on the base model 'org/other'",
        "words": "the task of 'words' is fill-mask",
        "damaged": "damaged or incomplete",
        "nowhere": "is no folder, and on the Hub: ",
        "tokenizer": r"The tokenizer of .* cannot be loaded",
    }.items():
        for _ in range(2):
            with pytest.raises((AdapterError, HubError), match=message):
                bank.predict([request, (task, WORDS[0])])
            assert_as_alone(bank.predict([request]), [request], alone)
        assert task not in bank.held
        assert set(bank_model(bank).peft_config) == {
            bank._held._first["AutoModelForSequenceClassification"].name
        }
    with pytest.raises(
        AdapterError, match=r"among those of the bank: .'sentiment', .*; got unknown\."
    ):
        bank.predict([request, ("unknown", WORDS[0]), ("neither", WORDS[0])])


def test_errors_in_place_of_results_leave_nothing_in_the_model(base, folders, alone, tmp_path):
    """Neither what is refused at the gate, nor what fails when the adapter has been added."""
    bad = {
        name: make_adapter(tmp_path / name, base, str(base), trainable_token_indices=[7, 9])
        for name in ("far", "unlike")
    }
    for name, tokens in {"far": [7, -900], "unlike": [7, 9, 11]}.items():
        path = bad[name] / "adapter_config.json"
        fields = json.loads(path.read_text()) | {"trainable_token_indices": tokens}
        path.write_text(json.dumps(fields))
    bank = TaskBank(
        {**folders, **bad, "no threshold": TaskSource(folders["similarity"], None, 0.5)}
    )
    requests = [("topic", WORDS[0]), *((task, WORDS[0]) for task in (*bad, "no threshold"))]
    shapes = []
    for _ in range(3):
        found = bank.predict(requests, return_errors=True)
        assert_as_alone(found[:1], requests[:1], alone)
        assert [type(item) for item in found[1:]] == [AdapterError, AdapterError, ValueError]
        model = bank_model(bank)
        shapes.append([(name, type(module)) for name, module in model.named_modules()])
        assert list(model.peft_config) == ["task_1"]
    assert shapes[1:] == shapes[:1] * 2


def ask_a_lost_one(bank):
    with pytest.raises(HubError):
        bank.predict([(["topic", "lost"], WORDS[0])])


def ask_a_lost_one_for_its_error(bank):
    [results] = bank.predict([(["topic", "lost"], WORDS[0])], return_errors=True)
    assert isinstance(results["lost"], HubError)


def ask_what_is_no_text(bank):
    [results] = bank.predict([(["topic", "similarity"], 3)], return_errors=True)
    assert all(isinstance(error, ValueError) for error in results.values())


@pytest.mark.parametrize(
    "fail", [ask_a_lost_one, ask_a_lost_one_for_its_error, ask_what_is_no_text]
)
def test_after_an_error_a_removed_task_is_gone_at_once(fail, folders, tmp_path):
    """The frames of an error, which hold tasks, would wait for a garbage collection."""
    bank = TaskBank({**folders, "lost": tmp_path / "lost"})
    bank.predict([("topic", WORDS[0])])
    gc.disable()
    try:
        fail(bank)
        bank.remove("topic")
        assert "topic" not in bank.held
    finally:
        gc.enable()


def test_serving_beside_one_that_is_lost(folders, tmp_path):
    """As above, with the error of a task that is loaded in the same call."""
    bank = TaskBank({})
    gc.disable()
    try:
        assert set(bank.serve({"topic": folders["topic"], "lost": tmp_path / "lost"})) == {"lost"}
        assert bank.held == ("topic",)
        bank.remove("topic")
        assert bank.held == ()
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_has_at_least_one_input(size, folders):
    bank = TaskBank(folders)
    with pytest.raises(ValueError, match=f"batch_size must be at least 1; got {size}"):
        bank.predict([("topic", WORDS[0])], batch_size=size)
    with pytest.raises(ValueError, match=f"batch_size must be at least 1; got {size}"):
        load(folders["topic"]).predict(WORDS, batch_size=size)


def test_nothing_is_no_input(folders):
    bank = TaskBank(folders)
    bank.warm_up(["topic"])
    with pytest.raises(ValueError, match=r"Each input must be a text .*; got None"):
        bank.predict([("topic", None)])


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ("first", {}, "Each request must be a pair of a task, or a list of tasks, and an input"),
        (["first"], {}, "Each request must be a pair"),
        ([("first", "a", "b")], {}, "Each request must be a pair"),
        ([("first", "a")], {"top_k": [1, 2]}, "top_k must be one number, or one for each of the 1"),
        ([("topic", "a")], {"top_k": "2"}, "top_k must be a number of classes"),
    ],
)
def test_requests_of_another_form_are_refused(requests, options, message, folders):
    with pytest.raises(ValueError, match=message):
        TaskBank(folders).predict(requests, **options)


def test_a_folder_of_adapters_and_a_generator_of_requests(base, tmp_path):
    make_adapter(tmp_path / "mails", base)
    make_adapter(tmp_path / "chats", base)
    bank = TaskBank(tmp_path, base_model=str(base))
    assert sorted(bank.tasks) == ["chats", "mails"]
    requests = [(task, text) for task in bank.tasks for text in ("a", "b")]
    assert bank.predict(request for request in requests) == bank.predict(requests)


def test_a_base_model_and_a_precision_that_are_given(base, folders, alone):
    bank = TaskBank(folders, base_model=str(base), dtype=torch.bfloat16, device="cpu")
    requests = [("topic", text) for text in WORDS]
    found = bank.predict(requests)
    assert bank_model(bank).get_base_model().dtype == torch.bfloat16
    expected = [alone[task][text]["score"] for task, text in requests]
    assert [item["score"] for item in found] == pytest.approx(expected, rel=0.05)


def test_a_text_for_several_tasks(folders, alone):
    bank = TaskBank(folders)
    found = bank.predict(
        [
            (["sentiment", "tags"], WORDS[0]),
            ("topic", WORDS[0]),
            (["topic"], WORDS[1]),
            ([], WORDS[0]),
        ]
    )
    assert [type(each) for each in found] == [dict] * 4
    results = [found[0]["sentiment"], found[0]["tags"], found[1], found[2]["topic"]]
    requests = [
        (task, WORDS[text])
        for task, text in (("sentiment", 0), ("tags", 0), ("topic", 0), ("topic", 1))
    ]
    assert_as_alone(results, requests, alone)
    assert found[3] == {}
    assert bank.predict([]) == []
    asked = bank.ask(WORDS[0])
    assert asked.keys() == folders.keys()
    assert_as_alone([asked["tags"]], [("tags", WORDS[0])], alone)
    assert bank.ask(WORDS[0], ["topic"]).keys() == {"topic"}
    assert bank.ask(WORDS[0], "topic").keys() == {"topic"}
