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


WORDS = [
    "ada",
    "alan",
    "lived",
    "worked",
    "in",
    "paris",
    "oslo",
    "and",
    "where",
    "did",
    "who",
    "for",
    "no",
    "work",
]


class TestScores:
    def test_by_hand(self):
        """Rajpurkar et al. 2016, section 6.1: without case, punctuation and articles, by the best
        answer.
        """
        predictions = {
            "1": "the red house",
            "2": "Oslo",
            "3": "a",
            "4": "an-other  Théâtre,\nU.S.A.",
        }
        golds = {
            "1": ["red barn", "big red house"],
            "2": ["oslo."],
            "3": ["The"],
            "4": ["Another théâtre usa"],
        }
        scores = squad_scores(predictions, golds)
        assert scores == pytest.approx(
            {"f1": 100 * (0.8 + 1 + 0 + 1) / 4, "exact_match": 100 * (0 + 1 + 1 + 1) / 4}
        )

    def test_no_answer(self):
        scores = squad_scores(
            {"1": "", "2": "Oslo", "3": "Oslo"}, {"1": [], "2": [], "3": ["Oslo", "the"]}
        )
        assert scores == pytest.approx(
            {
                "f1": 200 / 3,
                "exact_match": 200 / 3,
                "has_answer_f1": 100,
                "has_answer_exact_match": 100,
                "no_answer_f1": 50,
                "no_answer_exact_match": 50,
            }
        )


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


def windows_of(tokenizer, max_length=100, **options):
    return Windows(
        tokenizer,
        max_length,
        **{"stride": 8, "max_answer_length": 4, "null_threshold": 0.0, **options},
    )


class TestWindows:
    @pytest.mark.parametrize(
        "answer", ["lived in paris", " lived in paris", "lived in paris ", " lived in paris\n"]
    )
    def test_the_answer_is_marked_where_it_is_whole(self, tokenizer, answer):
        """Blanks around it are in no token."""
        context = (
            "oslo " * 150 + "ada lived in paris" + answer[-1].replace("s", " ") + "oslo " * 150
        )
        windows = windows_of(tokenizer)
        row = question("q", context, answer)
        marked = 0
        for train, window in zip(
            training_windows(Dataset.from_list([row]), windows),
            windows.split(row["question"], context),
            strict=True,
        ):
            first, last = train["start_positions"], train["end_positions"]
            if first == last == window.cls == 0:
                assert "lived in paris" not in " ".join(
                    context[slice(*span)] for span in window.spans if span
                )
            else:
                marked += 1
                assert context[window.spans[first][0] : window.spans[last][1]] == "lived in paris"
        assert marked >= 1

    def test_windows_share_as_many_tokens_as_asked_for(self, tokenizer):
        """Also more than half of what a window holds beside the question."""
        for before, after in itertools.pairwise(
            windows_of(tokenizer, stride=60).split("where", long_context(300))
        ):
            assert [span for span in before.spans if span][-60:] == [
                span for span in after.spans if span
            ][:60]

    def test_no_answer_is_marked_at_the_first_token(self, tokenizer):
        data = Dataset.from_list([question("q", "ada", "ada"), question("r", "ada")])
        rows = training_windows(data, windows_of(tokenizer))
        assert rows["start_positions"][0] > 0
        assert rows["start_positions"][1] == rows["end_positions"][1] == 0

    def test_questions_keep_their_windows_apart(self, tokenizer):
        """Against all spans of all windows of each question, one by one."""
        data = Dataset.from_list(
            [question(str(n), long_context(150 + 40 * n, n), "oslo") for n in range(4)]
        )
        windows = windows_of(tokenizer, null_threshold=None)
        rows = evaluation_windows(data, windows)
        start, end = (
            np.random.default_rng(0)
            .normal(size=(2, len(rows), max(rows["length"])))
            .astype(np.float32)
        )
        expected, number = {}, 0
        for row in data:
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
    pd.DataFrame([*rows, question("none", "ada lived")]).to_parquet(tmp_path / "train.parquet")
    pd.DataFrame([*rows[:7], question("none", "ada lived")]).to_json(
        tmp_path / "validation.jsonl", orient="records", lines=True
    )
    return tmp_path


class TestRuns:
    def squad(self, encoder, data, output, *flags):
        run(
            squad,
            "--data",
            data,
            "--model_name",
            encoder,
            "--output_dir",
            output,
            "--use_cpu",
            "--max_steps",
            2,
            "--max_length",
            100,
            "--stride",
            16,
            *flags,
        )

    def test_a_run_with_questions_without_answer(self, encoder, folder, tmp_path):
        self.squad(
            encoder, folder, tmp_path / "run", "--learning_rate", 1e-2, "--max_train_samples", 20
        )
        results = results_of(tmp_path / "run")
        answers = json.loads((tmp_path / "run" / "predictions.json").read_text())
        assert results["dataset"]["rows"] == {"train": 20, "validation": 8}
        [epoch] = results["epochs"]
        assert epoch["f1"] == results["best_score"]
        assert {"exact_match", "no_answer_f1", "has_answer_f1"} <= set(epoch)
        golds = {row["id"]: row["answers"]["text"] for row in read_split(folder, "validation")}
        assert epoch["f1"] == squad_scores(answers, golds)["f1"]
        run(
            squad,
            "--data",
            folder,
            "--evaluate",
            tmp_path / "run",
            "--use_cpu",
            "--stride",
            16,
            "--output_dir",
            tmp_path / "again",
        )
        found = json.loads((tmp_path / "again" / "evaluation.json").read_text())["scores"]
        assert found == pytest.approx(results["best_scores"])
        assert (
            json.loads((tmp_path / "again" / "evaluation" / "predictions.json").read_text())
            == answers
        )

    @pytest.mark.parametrize("method", ["houlsby", "lora"])
    def test_an_evaluation_abstains_as_the_run_did(self, encoder, folder, tmp_path, method):
        """By the threshold in the adapter, or in results.json for another method; a flag overrides
        it.
        """
        thresholds = {"always": -1000, "never": 1000}
        self.squad(
            encoder,
            folder,
            tmp_path / "run",
            "--null_threshold",
            thresholds["always"],
            "--method",
            method,
        )
        for flags, expected in (
            ((), "always"),
            (("--null_threshold", thresholds["never"]), "never"),
        ):
            run(
                squad,
                "--data",
                folder,
                "--evaluate",
                tmp_path / "run",
                "--use_cpu",
                "--stride",
                16,
                "--output_dir",
                tmp_path / "again",
                *flags,
            )
            answers = json.loads(
                (tmp_path / "again" / "evaluation" / "predictions.json").read_text()
            ).values()
            assert not any(answers) if expected == "always" else all(answers)

    def test_the_saved_adapter_gives_the_answers(self, encoder, folder, tmp_path, tokenizer):
        """In plain PyTorch, window by window."""
        self.squad(
            encoder, folder, tmp_path / "run", "--learning_rate", 1e-2, "--max_eval_samples", 5
        )
        answers = json.loads((tmp_path / "run" / "predictions.json").read_text())
        data = read_split(folder, "validation").filter(lambda row: row["id"] in answers)
        model = PeftModel.from_pretrained(
            AutoModelForQuestionAnswering.from_pretrained(encoder, num_labels=2),
            tmp_path / "run" / "adapter",
        ).eval()
        windows = Windows(tokenizer, 100, 16, null_threshold=0.0)
        rows = evaluation_windows(data, windows)
        logits = np.zeros((2, len(rows), 100), dtype=np.float32)
        for number, row in enumerate(rows):
            with torch.no_grad():
                outputs = model(
                    torch.tensor([row["input_ids"]]),
                    token_type_ids=torch.tensor([row["token_type_ids"]]),
                )
            logits[:, number, : row["length"]] = torch.stack(
                [outputs.start_logits[0], outputs.end_logits[0]]
            )
        assert len(answers) == 5
        # Abstaining is decided by the whole validation split, not by the drawn questions.
        assert (
            PeftConfig.from_pretrained(tmp_path / "run" / "adapter").saved.record.null_threshold
            == 0
        )
        assert find_answers(data, windows, *logits) == answers

    @pytest.mark.parametrize("max_length", [75, 200])
    def test_windows_without_room(self, encoder, folder, tmp_path, max_length):
        with pytest.raises(
            RecipeError, match=rf"from 84 .* to the encoder's 128, got {max_length}"
        ):
            self.squad(encoder, folder, tmp_path / "run", "--max_length", max_length)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"answers": {"text": [" "], "answer_start": [6]}}, "row 1 has the answer ' '"),
            (
                {"answers": {"text": ["paris"], "answer_start": [3]}},
                "answer 'paris' at character 3, where .* 'ved l'",
            ),
            ({"answers": {"text": ["lived"], "answer_start": [-5]}}, "at character -5"),
            ({"id": "q"}, "row 1 has the id 'q' again"),
            ({"answers": {"text": ["lived"]}}, "row 1 has no answers with text and answer_start"),
        ],
    )
    def test_bad_rows(self, change, message):
        rows = [
            question("q", "alan lived", "alan"),
            {**question("r", "alived lived", "lived"), **change},
        ]
        with pytest.raises(RecipeError, match=message):
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
        with pytest.raises(RecipeError, match="row 0 has the answer 'Paris' at character -1"):
            read_questions(Dataset.from_list(rows), "train")
