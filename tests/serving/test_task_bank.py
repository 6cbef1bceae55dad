"""Many tasks on one base model: equal to each adapter by itself, bounded, from several threads,
whatever fails.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertTokenizer

from answers import near
from edited_json import edited_json
from houlsby_peft import AdapterError, HubError, TaskBank, TaskSource, load
from hub_models import WORDS, make_adapter, make_base, save_adapter
from model_states import state_of


TASKS = {
    "sentiment": {"id2label": {0: "bad", 1: "good"}},
    "topic": {"id2label": dict(enumerate("abcde"))},
    "similarity": {"id2label": {0: "similarity"}},
    "tags": {"id2label": dict(enumerate("xyz")), "problem_type": "multi_label_classification"},
    "version 2.0": {"id2label": {0: "no", 1: "yes"}},
}
OPTIONS = {
    "topic": {"share_layers": 1, "r": 2},
    "version 2.0": {"extension": "gated"},  # which has no slots
    "sentiment": {"kind": "ladder"},
    "tags": {"kind": "ladder", "train_layer_norm": False, "layers_to_transform": [1]},
}


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    """An adapter for each of TASKS."""
    path = tmp_path_factory.mktemp("adapters")
    for seed, (task, head) in enumerate(TASKS.items()):
        save_adapter(
            path / task, base, head=head, seed=seed, task_type="SEQ_CLS", **OPTIONS.get(task, {})
        )
    return {task: path / task for task in TASKS}


@pytest.fixture(scope="module")
def alone(folders):
    """What each adapter predicts on a base model of its own, by task and text."""
    inputs = [*WORDS, (WORDS[0], WORDS[1]), WORDS[1] * 30]
    results = {}
    for task, folder in folders.items():
        predictions = load(folder).predict(inputs, batch_size=1)
        results[task] = dict(zip(inputs, predictions, strict=True))
    return results


def assert_as_alone(results, requests, alone):
    assert results == near([alone[task][text] for task, text in requests])


def bank_model(bank):
    """The model of the first kind of task that was loaded."""
    return next(iter(bank._held._first.values())).model


def some_requests(alone, number, seed=0):
    chance = random.Random(seed)
    tasks = chance.choices(list(alone), k=number)
    return [(task, chance.choice(list(alone[task]))) for task in tasks]


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
    weights = []
    for name, weight in model.named_parameters():
        if ".task_2." in name:
            weights.append(weakref.ref(weight))
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
    backwards = sorted(words, key=lambda word: (not word.startswith("["), -words[word]))
    folder = make_adapter(tmp_path, base, str(base))
    tokenizer = BertTokenizer(
        vocab={word: number for number, word in enumerate(backwards)}, model_max_length=64
    )
    tokenizer.save_pretrained(folder)
    expected = [alone["sentiment"][WORDS[0]], *load(folder).predict(WORDS[0])]
    bank = TaskBank({**folders, "own": folder})
    assert bank.predict([("sentiment", WORDS[0]), ("own", WORDS[0])]) == near(expected)


@pytest.mark.parametrize("first", ["types", "no types"])
def test_rows_with_and_without_token_types_stay_apart(first, base, tmp_path):
    folders, pair, alone = {}, (WORDS[0], WORDS[5]), {}
    for seed, (task, options) in enumerate(
        {"types": {}, "no types": {"model_input_names": ["input_ids", "attention_mask"]}}.items()
    ):
        folders[task] = make_adapter(tmp_path / task, base, str(base), seed)
        AutoTokenizer.from_pretrained(base, **options).save_pretrained(folders[task])
        alone[task] = {pair: load(folders[task]).predict(pair)[0]}
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
    with_tokens, expected = {}, dict(alone)
    for task, tokens in {"second": [7, 9], "third": [8]}.items():
        folder = make_adapter(tmp_path / task, base, str(base), trainable_token_indices=tokens)
        with_tokens[task] = folder
        expected[task] = dict(zip(WORDS, load(folder).predict(WORDS, batch_size=1), strict=True))
    # The one without trained tokens comes second.
    pair = [("third", WORDS[0]), ("topic", WORDS[0])]
    assert_as_alone(TaskBank(folders | with_tokens).predict(pair, batch_size=1), pair, expected)
    bank = TaskBank(
        {"topic": folders["topic"], **with_tokens}, max_bytes=size(with_tokens["third"])
    )
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
    start = threading.Barrier(len(requests))

    def ask(number):
        start.wait()
        return bank.predict(requests[number], batch_size=3)

    with ThreadPoolExecutor(len(requests)) as threads:
        results = threads.map(ask, range(len(requests)))
        for results_of_thread, requests_of_thread in zip(results, requests, strict=True):
            assert_as_alone(results_of_thread, requests_of_thread, alone)


def on_another_base(folder, base):
    make_adapter(folder, make_base(folder.with_name("base"), seed=5), "org/other")


def with_another_head(folder, base):
    save_adapter(folder, base, AutoModelForMaskedLM)


def with_damaged_weights(folder, base):
    make_adapter(folder, base, str(base))
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")


def with_more_tokens_than_saved(folder, base):
    make_adapter(folder, base, str(base), trainable_token_indices=[7, 9])
    with edited_json(folder / "adapter_config.json") as config:
        config["trainable_token_indices"] = [7, 9, 11]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (on_another_base, "org/other"),
        (with_another_head, "fill-mask"),
        (with_damaged_weights, "damaged"),
        (with_more_tokens_than_saved, "token"),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_the_others_go_on(
    make, word, base, folders, alone, tmp_path
):
    """Whether it is refused at the gate, or fails when the adapter has been added."""
    make(tmp_path / "bad", base)
    bank, request = TaskBank({**folders, "bad": tmp_path / "bad"}), ("topic", WORDS[0])
    bank.predict([request])
    untouched = state_of(bank_model(bank))
    for _ in range(2):
        with pytest.raises((AdapterError, HubError), match=word):
            bank.predict([request, ("bad", WORDS[0])])
        [result, error] = bank.predict([request, ("bad", WORDS[0])], return_errors=True)
        assert_as_alone([result], [request], alone)
        assert word in str(error)
        assert "bad" not in bank.held
        assert state_of(bank_model(bank)) == untouched


def test_errors_take_the_places_of_their_results(folders, alone):
    bank = TaskBank(folders | {"no threshold": TaskSource(folders["similarity"], None, 0.5)})
    requests = [
        ("topic", WORDS[0]), ("no threshold", "a"), ("nothing", "a"), ("topic", 5),
        ("sentiment", WORDS[1]),
    ]  # fmt: skip
    results = bank.predict(requests, return_errors=True)
    assert_as_alone([results[0], results[4]], [requests[0], requests[4]], alone)
    for request, error in zip(requests[1:4], results[1:4], strict=True):
        assert isinstance(error, ValueError)
        with pytest.raises(type(error)):
            bank.predict([request])


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


@pytest.mark.parametrize(
    ("requests", "options", "word"),
    [
        ("first", {}, "pair"),
        (["first"], {}, "pair"),
        ([("first", "a", "b")], {}, "pair"),
        ([("first", "a")], {"top_k": [1, 2]}, "top_k"),
        ([("topic", "a")], {"top_k": "2"}, "top_k"),
        ([("topic", "a")], {"batch_size": 0}, "batch_size"),
        ([("unknown", "a"), ("neither", "a")], {}, "unknown"),
        ([("topic", None)], {}, "text"),
    ],
)
def test_requests_of_another_form_are_refused(requests, options, word, folders):
    with pytest.raises(ValueError, match=word):
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
    scores = [result["score"] for result in bank.predict(requests)]
    assert bank_model(bank).get_base_model().dtype == torch.bfloat16
    expected = [alone["topic"][text]["score"] for text in WORDS]
    assert scores == pytest.approx(expected, rel=0.05)


def test_a_text_for_several_tasks(folders, alone):
    bank, [first, second, *_] = TaskBank(folders), WORDS
    requests = [
        (["sentiment", "tags"], first), ("topic", first), (["topic"], second), ([], first)
    ]  # fmt: skip
    several, single, by_list, nothing = bank.predict(requests)
    assert several.keys() == {"sentiment", "tags"}
    assert several["sentiment"] == near(alone["sentiment"][first])
    assert several["tags"] == near(alone["tags"][first])
    assert single == near(alone["topic"][first])
    assert by_list == {"topic": near(alone["topic"][second])}
    assert nothing == {}
    assert bank.predict([]) == []


def test_a_text_for_all_tasks(folders, alone):
    bank = TaskBank(folders)
    answers = bank.ask(WORDS[0])
    assert answers.keys() == folders.keys()
    assert answers["tags"] == near(alone["tags"][WORDS[0]])
    assert bank.ask(WORDS[0], ["topic"]).keys() == {"topic"}
    assert bank.ask(WORDS[0], "topic").keys() == {"topic"}
