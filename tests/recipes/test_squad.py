"""SQuAD: the official scores, windows over long contexts, answers put together, and short runs."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

import squad
from data.reading import read_split
from houlsby_peft.predict.answers import Windows
from recipe_runs import results_of, run, save_tiny_encoder
from run.edge import RecipeError
from tasks.questions import (
    evaluation_windows,
    find_answers,
    read_questions,
    squad_scores,
    training_windows,
)


WORDS = (
    *("ada", "alan", "lived", "worked", "in", "paris", "oslo"),
    *("and", "where", "did", "who", "for", "no", "work"),
)


class TestScores:
    def test_by_hand(self):
        """Rajpurkar et al. 2016, section 6.1: without case, punctuation and articles, by the best
        answer.
        """
        predictions = {"1": "the red house", "2": "Oslo", "3": "a",
                       "4": "an-other  Théâtre,\nU.S.A."}  # fmt: skip
        golds = {"1": ["red barn", "big red house"], "2": ["oslo."], "3": ["The"],
                 "4": ["Another théâtre usa"]}  # fmt: skip
        expected = {"f1": 100 * (0.8 + 1 + 0 + 1) / 4, "exact_match": 100 * (0 + 1 + 1 + 1) / 4}
        assert squad_scores(predictions, golds) == pytest.approx(expected)

    def test_no_answer(self):
        predictions = {"1": "", "2": "Oslo", "3": "Oslo"}
        scores = squad_scores(predictions, {"1": [], "2": [], "3": ["Oslo", "the"]})
        whole, has_answer, no_answer = 200 / 3, 100, 50
        for score in ("f1", "exact_match"):
            assert scores[score] == pytest.approx(whole)
            assert scores[f"has_answer_{score}"] == pytest.approx(has_answer)
            assert scores[f"no_answer_{score}"] == pytest.approx(no_answer)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    return save_tiny_encoder(folder, words=[*WORDS, "?"], max_position_embeddings=128, num_labels=2)


@pytest.fixture(scope="module")
def tokenizer(encoder):
    return AutoTokenizer.from_pretrained(encoder)


def question(name, context, *answers, ask="where did ada work ?"):
    starts = [context.index(answer) for answer in answers]
    return {
        "id": name,
        "question": ask,
        "context": context,
        "answers": {"text": [*answers], "answer_start": starts},
    }


def long_context(size, seed=0):
    return " ".join(random.Random(seed).choices(WORDS, k=size))


def windows_of(tokenizer, **options):
    defaults = {"stride": 8, "max_answer_length": 4, "null_threshold": 0.0}
    return Windows(tokenizer, 100, **{**defaults, **options})


class TestWindows:
    @pytest.mark.parametrize(
        "answer", ["lived in paris", " lived in paris", "lived in paris ", " lived in paris\n"]
    )
    def test_the_answer_is_marked_where_it_is_whole(self, tokenizer, answer):
        """Blanks around it are in no token."""
        blank = answer[-1].replace("s", " ")
        context = "oslo " * 150 + "ada lived in paris" + blank + "oslo " * 150
        windows = windows_of(tokenizer)
        row = question("q", context, answer)
        rows = training_windows(Dataset.from_list([row]), windows)
        marked = 0
        for train, window in zip(rows, windows.split(row["question"], context), strict=True):
            first, last = train["start_positions"], train["end_positions"]
            if first == last == window.cls == 0:
                words = [context[slice(*span)] for span in window.spans if span]
                assert "lived in paris" not in " ".join(words)
            else:
                marked += 1
                assert context[window.spans[first][0] : window.spans[last][1]] == "lived in paris"
        assert marked >= 1

    def test_windows_share_as_many_tokens_as_asked_for(self, tokenizer):
        """Also more than half of what a window holds beside the question."""
        windows = windows_of(tokenizer, stride=60).split("where", long_context(300))
        for window, following in itertools.pairwise(windows):
            spans = [*filter(None, window.spans)]
            assert spans[-60:] == [*filter(None, following.spans)][:60]

    def test_no_answer_is_marked_at_the_first_token(self, tokenizer):
        data = Dataset.from_list([question("q", "ada", "ada"), question("r", "ada")])
        rows = training_windows(data, windows_of(tokenizer))
        assert rows["start_positions"][0] > 0
        assert rows["start_positions"][1] == rows["end_positions"][1] == 0

    def test_questions_keep_their_windows_apart(self, tokenizer):
        """Against all spans of all windows of each question, one by one."""
        rows = [question(str(n), long_context(150 + 40 * n, n), "oslo") for n in range(4)]
        data = Dataset.from_list(rows)
        windows = windows_of(tokenizer, null_threshold=None)
        inputs = evaluation_windows(data, windows)
        shape = (2, len(inputs), max(inputs["length"]))
        start, end = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        expected, number = {}, 0
        for row in rows:
            spans = []
            for window in windows.split(row["question"], row["context"]):
                for first, last in itertools.product(range(len(window.spans)), repeat=2):
                    if window.spans[first] and window.spans[last] and first <= last < first + 4:
                        score = start[number, first] + end[number, last]
                        spans.append((score, window.spans[first][0], window.spans[last][1]))
                number += 1
            _, begin, finish = max(spans)
            expected[row["id"]] = row["context"][begin:finish]
        assert find_answers(data, windows, start, end) == expected


@pytest.fixture
def folder(tmp_path):
    contexts = ["ada lived in oslo and worked in paris", long_context(200) + " alan lived in paris"]
    rows = [question(f"q{n}", contexts[n % 2], "paris", "in paris") for n in range(24)]
    none = question("none", "ada lived")
    pd.DataFrame([*rows, none]).to_parquet(tmp_path / "train.parquet")
    validation = pd.DataFrame([*rows[:7], none])
    validation.to_json(tmp_path / "validation.jsonl", orient="records", lines=True)
    return tmp_path


def train(encoder, folder, output, **flags):
    run(squad, data=folder, model_name=encoder, output_dir=output, max_steps=2, stride=16,
        **{"max_length": 100, **flags})  # fmt: skip


def evaluate(folder, trained, output, **flags):
    """Evaluate a run; return its scores and answers."""
    run(squad, data=folder, evaluate=trained, output_dir=output, stride=16, **flags)
    scores = json.loads((output / "evaluation.json").read_text())["scores"]
    return scores, json.loads((output / "evaluation" / "predictions.json").read_text())


class TestRuns:
    def test_a_run_with_questions_without_answer(self, encoder, folder, tmp_path):
        output = tmp_path / "run"
        train(encoder, folder, output, learning_rate=1e-2, max_train_samples=20)
        results = results_of(output)
        answers = json.loads((output / "predictions.json").read_text())
        assert results["dataset"]["rows"] == {"train": 20, "validation": 8}
        [epoch] = results["epochs"]
        assert {"exact_match", "no_answer_f1", "has_answer_f1"} <= set(epoch)
        golds = {row["id"]: row["answers"]["text"] for row in read_split(folder, "validation")}
        expected = squad_scores(answers, golds)["f1"]
        assert epoch["f1"] == results["best_score"] == expected
        scores, answers_again = evaluate(folder, output, tmp_path / "again")
        assert scores == pytest.approx(results["best_scores"])
        assert answers_again == answers

    def test_one_file_is_divided_by_its_contexts(self, encoder, tmp_path, monkeypatch):
        """Which an evaluation of the run does in the same way, in the folder of the file's name."""
        monkeypatch.chdir(tmp_path)
        rows = [question(f"q{n}", f"ada lived in oslo {n // 3} years", "oslo") for n in range(30)]
        pd.DataFrame(rows).to_json("oslo.jsonl", orient="records", lines=True)
        run(squad, data="oslo.jsonl", model_name=encoder, max_steps=2, max_length=100, stride=16)
        output = tmp_path / "runs" / "oslo"
        assert results_of(output)["dataset"]["rows"] == {"train": 24, "validation": 6}
        answered = json.loads((output / "predictions.json").read_text())
        contexts = [int(name[1:]) // 3 for name in answered]
        assert sorted(contexts) == sorted([*set(contexts)] * 3), "all questions of two contexts"
        scores, again = evaluate("oslo.jsonl", output, output)
        assert again == answered
        assert scores == pytest.approx(results_of(output)["best_scores"])

    @pytest.mark.parametrize("method", ["houlsby", "lora"])
    def test_an_evaluation_abstains_as_the_run_did(self, encoder, folder, tmp_path, method):
        """By the threshold in the adapter, or in results.json for another method; a flag overrides
        it.
        """
        always, never = -1000, 1000
        train(encoder, folder, tmp_path / "run", null_threshold=always, method=method)
        _, answers = evaluate(folder, tmp_path / "run", tmp_path / "again")
        assert not any(answers.values())
        _, answers = evaluate(folder, tmp_path / "run", tmp_path / "more", null_threshold=never)
        assert all(answers.values())

    def test_the_saved_adapter_gives_the_answers(self, encoder, folder, tmp_path, tokenizer):
        """In plain PyTorch, window by window."""
        train(encoder, folder, tmp_path / "run", learning_rate=1e-2, max_eval_samples=5)
        adapter = tmp_path / "run" / "adapter"
        answers = json.loads((tmp_path / "run" / "predictions.json").read_text())
        data = read_split(folder, "validation").filter(lambda row: row["id"] in answers)
        model = AutoModelForQuestionAnswering.from_pretrained(encoder, num_labels=2)
        model = PeftModel.from_pretrained(model, adapter).eval()
        windows = Windows(tokenizer, 100, 16, null_threshold=0.0)
        rows = evaluation_windows(data, windows)
        logits = np.zeros((2, len(rows), 100), dtype=np.float32)
        for number, row in enumerate(rows):
            types = torch.tensor([row["token_type_ids"]])
            with torch.no_grad():
                outputs = model(torch.tensor([row["input_ids"]]), token_type_ids=types)
            logits[0, number, : row["length"]] = outputs.start_logits[0]
            logits[1, number, : row["length"]] = outputs.end_logits[0]
        assert len(answers) == 5
        # Abstaining is decided by the whole validation split, not by the drawn questions.
        assert PeftConfig.from_pretrained(adapter).saved.record.null_threshold == 0
        assert find_answers(data, windows, *logits) == answers

    @pytest.mark.parametrize("max_length", [75, 200])
    def test_windows_without_room(self, encoder, folder, tmp_path, max_length):
        with pytest.raises(RecipeError, match="from 84 "):
            train(encoder, folder, tmp_path / "run", max_length=max_length)


class TestQuestions:
    @pytest.mark.parametrize(
        ("change", "word"),
        [
            ({"answers": {"text": [" "], "answer_start": [6]}}, "' '"),
            ({"answers": {"text": ["paris"], "answer_start": [3]}}, "'ved l'"),
            ({"answers": {"text": ["lived"], "answer_start": [-5]}}, "character -5"),
            ({"answers": {"text": ["lived"]}}, "answer_start"),
            ({"id": "q"}, "the id 'q' again"),
        ],
    )
    def test_what_is_refused(self, change, word):
        """Whatever is no question, or an answer that is not where it claims to be."""
        second = {**question("r", "alived lived", "lived"), **change}
        rows = [question("q", "alan lived", "alan"), second]
        with pytest.raises(RecipeError, match=word):
            read_questions(Dataset.from_list(rows), "train")

    @pytest.mark.parametrize(
        ("forms", "expected"),
        [
            ([[{"text": "lived", "answer_start": 5}], []], [(["lived"], [5]), ([], [])]),
            (["lived", None], [(["lived"], [5]), ([], [])]),
            ([["lived", "alan"], []], [(["lived", "alan"], [5, 0]), ([], [])]),
            ([{"text": "lived", "answer_start": 5}, None], [(["lived"], [5]), ([], [])]),
            (["{'text': ['lived'], 'answer_start': [5]}", "[]"], [(["lived"], [5]), ([], [])]),
        ],
        ids=["objects", "texts", "lists of texts", "single ones", "in a table"],
    )
    def test_other_forms_of_answers(self, forms, expected):
        rows = [question("q", "alan lived"), question("r", "alan lived")]
        for row, answers in zip(rows, forms, strict=True):
            row["answers"] = answers
        read = read_questions(Dataset.from_list(rows), "train")["answers"]
        assert [(answers["text"], answers["answer_start"]) for answers in read] == expected

    def test_an_answer_that_its_context_lacks(self):
        rows = [{**question("q", "alan lived"), "answers": "Paris"}]
        with pytest.raises(RecipeError, match="character -1"):
            read_questions(Dataset.from_list(rows), "train")
