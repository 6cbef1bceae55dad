"""SQuAD: the official scores, windows over long contexts, answers put together, and short runs."""

from __future__ import annotations

import json
import random

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, CanineTokenizer

import squad
from common.data import load_splits
from common.edge import RecipeError
from common.questions import QUESTION_TOKENS, Windows, check_questions, squad_scores
from recipe_runs import results_of, run, save_tiny_encoder


WORDS = ["ada", "alan", "lived", "worked", "in", "paris", "oslo", "and", "where", "did", "who", "for", "no", "work"]


class TestScores:
    def test_by_hand(self):
        """Rajpurkar et al. 2016, section 6.1: without case, punctuation and articles, by the best answer."""
        predictions = {"1": "the red house", "2": "Oslo", "3": "a", "4": "an-other  Théâtre,\nU.S.A."}
        golds = {"1": ["red barn", "big red house"], "2": ["oslo."], "3": ["The"], "4": ["Another théâtre usa"]}
        scores = squad_scores(predictions, golds)
        assert scores == pytest.approx({"f1": 100 * (0.8 + 1 + 0 + 1) / 4, "exact_match": 100 * (0 + 1 + 1 + 1) / 4})

    def test_no_answer(self):
        scores = squad_scores({"1": "", "2": "Oslo", "3": "Oslo"}, {"1": [], "2": [], "3": ["Oslo", "the"]})
        assert scores == pytest.approx(
            {
                "f1": 200 / 3, "exact_match": 200 / 3, "has_answer_f1": 100, "has_answer_exact_match": 100,
                "no_answer_f1": 50, "no_answer_exact_match": 50,
            }
        )  # fmt: skip

    def test_a_question_without_prediction_is_wrong(self):
        assert squad_scores({"1": "x"}, {"1": ["x"], "2": ["x"]}) == {"f1": 50, "exact_match": 50}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    return save_tiny_encoder(folder, words=[*WORDS, "?"], max_position_embeddings=128, num_labels=2)


@pytest.fixture(scope="module")
def tokenizer(encoder):
    return AutoTokenizer.from_pretrained(encoder)


def question(name, context, *answers, ask="where did ada work ?"):
    starts = [context.index(answer) for answer in answers]
    return {"id": name, "question": ask, "context": context, "answers": {"text": [*answers], "answer_start": starts}}


def long_context(size, seed=0):
    return " ".join(random.Random(seed).choices(WORDS, k=size))


def windows_of(tokenizer, max_length=100, stride=8, **options):
    fixed = {"n_best": 5, "max_answer_length": 4, "null_threshold": 0.0}
    return Windows(tokenizer, max_length, stride, **{**fixed, **options})


class TestWindows:
    def test_every_token_of_a_long_context_is_in_a_window(self, tokenizer):
        context = long_context(500)
        rows = windows_of(tokenizer).evaluation(Dataset.from_list([question("q", context, "oslo")]))
        assert len(rows) > 5
        seen = {(s, e) for row in rows for s, e in zip(row["starts"], row["ends"], strict=True) if s >= 0}
        assert [context[s:e] for s, e in sorted(seen)] == context.split()

    @pytest.mark.parametrize("answer", ["lived in paris", " lived in paris", "lived in paris ", " lived in paris\n"])
    def test_the_answer_is_marked_where_it_is_whole(self, tokenizer, answer):
        """Blanks around it are in no token."""
        context = "oslo " * 150 + "ada lived in paris" + answer[-1].replace("s", " ") + "oslo " * 150
        windows = windows_of(tokenizer)
        data = Dataset.from_list([question("q", context, answer)])
        marked = 0
        for train, row in zip(windows.training(data), windows.evaluation(data), strict=True):
            first, last = train["start_positions"], train["end_positions"]
            if first == last == row["cls"] == 0:
                text = [context[s:e] for s, e in zip(row["starts"], row["ends"], strict=True) if s >= 0]
                assert "lived in paris" not in " ".join(text)
            else:
                marked += 1
                assert context[row["starts"][first] : row["ends"][last]] == "lived in paris"
        assert marked >= 1

    def test_no_answer_is_marked_at_the_first_token(self, tokenizer):
        rows = windows_of(tokenizer).training(Dataset.from_list([question("q", "ada", "ada"), question("r", "ada")]))
        assert rows["start_positions"][0] > 0
        assert rows["start_positions"][1] == rows["end_positions"][1] == 0

    def test_a_long_question_is_cut(self, tokenizer):
        data = Dataset.from_list([question("q", long_context(300), "oslo", ask=long_context(900))])
        rows = windows_of(tokenizer).evaluation(data)
        assert all(row["starts"][:2] == [-1, -1] and row["starts"][QUESTION_TOKENS + 2] >= 0 for row in rows)

    @pytest.mark.parametrize("max_length", [75, 200])
    def test_windows_without_room(self, tokenizer, max_length):
        tokenizer.model_max_length = 128
        with pytest.raises(RecipeError, match=rf"from 76 .* to the encoder's 128, got {max_length}"):
            windows_of(tokenizer, max_length)

    def test_a_tokenizer_that_does_not_say_where_its_tokens_are(self):
        with pytest.raises(RecipeError, match=r"need a fast tokenizer, .* CanineTokenizer is none\. Choose another"):
            windows_of(CanineTokenizer())

    def test_an_empty_context(self, tokenizer):
        data = Dataset.from_list([{**question("q", ""), "answers": {"text": [], "answer_start": []}}])
        windows = windows_of(tokenizer)
        rows = windows.evaluation(data)
        zeros = np.zeros((1, rows[0]["length"]))
        assert windows.answers(data, rows, zeros, zeros) == {"q": ""}


class TestAnswers:
    def logits(self, rows, seed=0):
        width = max(rows["length"])
        return np.random.default_rng(seed).normal(size=(2, len(rows), width)).astype(np.float32)

    def test_the_best_span_of_all_windows(self, tokenizer):
        """Against all spans, one by one."""
        data = Dataset.from_list([question(str(n), long_context(150 + 40 * n, n), "oslo") for n in range(4)])
        windows = windows_of(tokenizer, n_best=100)
        rows = windows.evaluation(data)
        start, end = self.logits(rows)
        best = {}
        for number, row in enumerate(rows):
            for first in range(row["length"]):
                for last in range(first, min(first + 4, row["length"])):
                    if row["starts"][first] >= 0 and row["starts"][last] >= 0:
                        span = (start[number, first] + end[number, last], row["starts"][first], row["ends"][last])
                        best[row["id"]] = max(best.get(row["id"], span), span)
        texts = {row["id"]: row["context"] for row in data}
        expected = {name: texts[name][s:e] for name, (_, s, e) in best.items()}
        assert windows.answers(data, rows, start, end) == expected

    @pytest.mark.parametrize(("threshold", "expected"), [(-1.5, ""), (-0.5, "ada")])
    def test_no_answer_by_its_threshold(self, tokenizer, threshold, expected):
        data = Dataset.from_list([question("q", "ada lived"), question("r", "ada", "ada")])
        windows = windows_of(tokenizer, null_threshold=threshold)
        rows = windows.evaluation(data)
        logits = np.zeros((2, max(rows["length"])), dtype=np.float32)
        logits[:, rows[0]["starts"].index(0)] = 0.5  # "ada" scores 1, no answer 0
        assert windows.answers(data, rows, logits, logits)["q"] == expected

    def test_where_every_question_has_an_answer_one_is_given(self, tokenizer):
        data = Dataset.from_list([question("q", "ada", "ada")])
        windows = windows_of(tokenizer, null_threshold=None)
        rows = windows.evaluation(data)
        logits = np.full((1, rows[0]["length"]), -1, dtype=np.float32)
        logits[0, 0] = 9
        assert windows.answers(data, rows, logits, logits) == {"q": "ada"}


@pytest.fixture
def folder(tmp_path):
    contexts = ["ada lived in oslo and worked in paris", long_context(200) + " alan lived in paris"]
    rows = [question(f"q{n}", contexts[n % 2], "paris", "in paris") for n in range(24)]
    pd.DataFrame([*rows, question("none", "ada lived")]).to_parquet(tmp_path / "train.parquet")
    pd.DataFrame([*rows[:7], question("none", "ada lived")]).to_json(
        tmp_path / "validation.jsonl", orient="records", lines=True
    )
    return tmp_path


class TestRuns:
    def squad(self, encoder, data, output, *flags):
        run(squad, "--data", data, "--model_name", encoder, "--output_dir", output, "--use_cpu", "--max_steps", 2,
            "--max_length", 100, "--stride", 16, *flags)  # fmt: skip

    def test_a_run_with_questions_without_answer(self, encoder, folder, tmp_path):
        self.squad(encoder, folder, tmp_path / "run", "--learning_rate", 1e-2, "--max_train_samples", 20)
        results = results_of(tmp_path / "run")
        answers = json.loads((tmp_path / "run" / "predictions.json").read_text())
        assert results["dataset"]["rows"] == {"train": 20, "validation": 8}
        [epoch] = results["epochs"]
        assert epoch["f1"] == results["best_score"]
        assert {"exact_match", "no_answer_f1", "has_answer_f1"} <= set(epoch)
        golds = {row["id"]: row["answers"]["text"] for row in load_splits(str(folder))["validation"]}
        assert epoch["f1"] == squad_scores(answers, golds)["f1"]
        run(squad, "--data", folder, "--evaluate", tmp_path / "run", "--use_cpu", "--stride", 16, "--output_dir",
            tmp_path / "again")  # fmt: skip
        found = json.loads((tmp_path / "again" / "evaluation.json").read_text())["scores"]
        assert found == pytest.approx(results["best_scores"])
        assert json.loads((tmp_path / "again" / "evaluation_predictions.json").read_text()) == answers

    @pytest.mark.parametrize("method", ["houlsby", "lora"])
    def test_an_evaluation_abstains_as_the_run_did(self, encoder, folder, tmp_path, method):
        """By the threshold in the adapter, or in results.json for another method; a flag overrides it."""
        thresholds = {"always": -1000, "never": 1000}
        self.squad(encoder, folder, tmp_path / "run", "--null_threshold", thresholds["always"], "--method", method)
        for flags, expected in (((), "always"), (("--null_threshold", thresholds["never"]), "never")):
            run(squad, "--data", folder, "--evaluate", tmp_path / "run", "--use_cpu", "--stride", 16, "--output_dir",
                tmp_path / "again", *flags)  # fmt: skip
            answers = json.loads((tmp_path / "again" / "evaluation_predictions.json").read_text()).values()
            assert not any(answers) if expected == "always" else all(answers)

    def test_the_saved_adapter_gives_the_answers(self, encoder, folder, tmp_path, tokenizer):
        """In plain PyTorch, window by window."""
        self.squad(encoder, folder, tmp_path / "run", "--learning_rate", 1e-2, "--max_eval_samples", 5)
        answers = json.loads((tmp_path / "run" / "predictions.json").read_text())
        data = load_splits(str(folder))["validation"].filter(lambda row: row["id"] in answers)
        model = PeftModel.from_pretrained(
            AutoModelForQuestionAnswering.from_pretrained(encoder, num_labels=2), tmp_path / "run" / "adapter"
        ).eval()
        windows = Windows(tokenizer, 100, 16, n_best=20, max_answer_length=30, null_threshold=0.0)
        rows = windows.evaluation(data)
        logits = np.zeros((2, len(rows), 100), dtype=np.float32)
        for number, row in enumerate(rows):
            with torch.no_grad():
                outputs = model(torch.tensor([row["input_ids"]]), token_type_ids=torch.tensor([row["token_type_ids"]]))
            logits[:, number, : row["length"]] = torch.stack([outputs.start_logits[0], outputs.end_logits[0]])
        assert len(answers) == 5
        # Abstaining is decided by the whole validation split, not by the drawn questions.
        assert PeftConfig.from_pretrained(tmp_path / "run" / "adapter").record.null_threshold == 0
        assert windows.answers(data, rows, *logits) == answers

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"answers": {"text": [" "], "answer_start": [6]}}, "row 1 has the answer ' '"),
            ({"answers": {"text": ["paris"], "answer_start": [3]}}, "answer 'paris' at character 3, where .* 'ved l'"),
            ({"answers": {"text": ["lived"], "answer_start": [-5]}}, "at character -5"),
            ({"answers": {"text": ["lived"], "answer_start": []}}, "1 answers and 0 starts"),
            ({"id": "q"}, "row 1 has the id 'q' again"),
        ],
    )
    def test_bad_rows(self, change, message):
        rows = [question("q", "alan lived", "alan"), {**question("r", "alived lived", "lived"), **change}]
        with pytest.raises(RecipeError, match=message):
            check_questions(Dataset.from_list(rows), "train")

    def test_a_missing_column(self, encoder, tmp_path):
        for split in ("train", "validation"):
            pd.DataFrame({"id": ["1"], "question": ["a"], "context": ["b"]}).to_parquet(tmp_path / f"{split}.parquet")
        with pytest.raises(RecipeError, match="train lacks the column 'answers'"):
            self.squad(encoder, tmp_path, tmp_path / "run")

    def test_no_validation_split(self, encoder, folder, tmp_path):
        (folder / "validation.jsonl").unlink()
        with pytest.raises(RecipeError, match="must have a split 'validation'"):
            self.squad(encoder, folder, tmp_path / "run")
