"""Predictors on one base model in several threads: right answers, and nothing that they share is
switched.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from peft import get_peft_model
from torch import nn
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import houlsby_peft
from houlsby_peft import HoulsbyConfig, Predictor
from houlsby_peft.heads.tasks import task_kind_of_class
from houlsby_peft.predict.questions import Question
from hub_models import WORDS, make_adapter, save_adapter
from model_states import trained_names


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    """Four adapters of one base model, of different sizes and kinds."""
    options = [{}, {"share_layers": 1}, {"train_layer_norm": False}, {"layers_to_transform": [1]}]
    path = tmp_path_factory.mktemp("adapters")
    for seed, fields in enumerate(options):
        make_adapter(path / str(seed), base, str(base), seed, **fields)
    return [path / str(seed) for seed in range(4)]


def answers(predictor, text):
    """What a predictor answers by itself, as a value that nearly compares."""
    [result] = predictor.predict(text)
    return [{**result, "score": pytest.approx(result["score"], abs=1e-6)}]


@pytest.fixture
def impatient(monkeypatch):
    """Threads take turns as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("calls", [96, pytest.param(10_000, marks=pytest.mark.slow)])
def test_eight_threads_over_four_predictors_give_each_its_own_answers(calls, folders):
    expected = []
    for folder in folders:
        predictor = houlsby_peft.load(folder)
        expected.append([answers(predictor, text) for text in WORDS[:4]])
    assert len({str(of_adapter[0]) for of_adapter in expected}) == 4
    first = houlsby_peft.load(folders[0])
    predictors = [first, *(houlsby_peft.load(folder, beside=first) for folder in folders[1:])]

    def work(thread):
        wrong = 0
        for turn in range(calls // 8):
            number, text = (thread + turn) % 4, (thread * 7 + turn // 4) % 4
            wrong += predictors[number].predict(WORDS[text]) != expected[number][text]
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 0
    assert first.model.active_adapters == ["default"]


def test_threads_cut_contexts_as_each_needs(base, tmp_path, impatient):
    """Questions of unlike length leave contexts unlike room, and threads share the tokenizer."""
    save_adapter(tmp_path, base, AutoModelForQuestionAnswering)
    reader = houlsby_peft.load(tmp_path, base_model=str(base)).reader()
    pairs = [(" ".join(WORDS[:n]), " ".join(WORDS * 2)) for n in (1, 2, 3)]

    def read(number):
        question = Question(pairs[number % 3])
        reader.read(question)
        return [row.inputs for row in question.rows]

    expected = [read(number) for number in range(3)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(300))) == expected * 100


def test_threads_may_load_onto_one_base_model_while_others_predict(folders):
    first = houlsby_peft.load(folders[0])
    expected = answers(first, WORDS[0])
    stop = threading.Event()

    def predict():
        wrong = 0
        while not stop.is_set():
            wrong += first.predict(WORDS[0]) != expected
        return wrong

    def load(number):
        return houlsby_peft.load(folders[number % 4], beside=first)

    with ThreadPoolExecutor(6) as pool:
        predicting = pool.submit(predict)
        loaded = list(pool.map(load, range(5)))
        stop.set()
        assert predicting.result() == 0
    assert len({predictor.name for predictor in loaded}) == 5
    for number, predictor in enumerate(loaded):
        alone = houlsby_peft.load(folders[number % 4])
        assert predictor.predict(WORDS[1]) == answers(alone, WORDS[1])


def test_loading_in_threads_touches_no_module_of_other_threads(folders, impatient):
    """PEFT and accelerate make modules on the meta device by a patch that all threads see."""
    expected = [answers(houlsby_peft.load(folder), WORDS[0]) for folder in folders]
    stop = threading.Event()

    def create():
        """Modules of another thread: how many there were, and how many without weights."""
        number = empty = 0
        while not stop.is_set():
            weight = nn.Linear(8, 8).weight.detach()
            number += 1
            empty += weight.is_meta or not 0 < weight.abs().max() < 1
        return number, empty

    def load(number):
        predictor = houlsby_peft.load(folders[number % 4])
        return predictor.predict(WORDS[0]) == expected[number % 4]

    with ThreadPoolExecutor(9) as pool:
        creating = pool.submit(create)
        try:
            assert all(pool.map(load, range(40)))
        finally:
            stop.set()
        number, empty = creating.result()
    assert number > 100
    assert empty == 0


def test_a_model_that_is_trained_stays_as_it_is(base, tmp_path):
    """Loading beside an adapter that trains, and predicting with it, change neither what trains nor
    what is active.
    """
    bare = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    model = get_peft_model(bare, HoulsbyConfig(r=4))
    task_kind = task_kind_of_class("BertForSequenceClassification")
    trained = Predictor(model, "default", task_kind, AutoTokenizer.from_pretrained(base))
    model.train()
    names = trained_names(model)
    loaded = houlsby_peft.load(make_adapter(tmp_path, base, str(base)), beside=trained)
    assert model.training
    assert (model.active_adapters, trained_names(model)) == (["default"], names)
    with pytest.raises(ValueError, match="training mode"):
        loaded.predict(WORDS[0])
    model.eval()
    loaded.predict(WORDS[0])
    assert (model.active_adapters, trained_names(model)) == (["default"], names)
