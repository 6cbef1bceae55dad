"""Classification of any texts: columns, kinds of labels, scores, and what bad data give."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from peft import PeftModel
from safetensors.torch import load_file
from sklearn.metrics import f1_score
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DistilBertConfig, DistilBertModel

import text_classification
from houlsby_peft import AdapterError
from houlsby_peft_cli import main
from recipe_runs import run, save_tiny_encoder
from tasks.classification import ClassificationArguments, classification_scores, load_task
from tasks.labels import MULTI, REGRESSION, SINGLE, Labels, describe_balance, find_labels
from tasks.minimal_pairs import minimal_pairs
from training.arguments import RecipeTrainingArguments
from training.errors import RecipeError


REAL_DATA = Path(__file__).parents[3] / "shared" / "data" / "additional"
SENTENCES = minimal_pairs()["train"]["sentence"][:120]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder"))


def classify(encoder, data, output, *flags):
    run(text_classification, "--data", data, "--model_name", encoder, "--output_dir", output, "--use_cpu",
        "--max_steps", 2, *flags)  # fmt: skip
    return json.loads((output / "results.json").read_text())


def logits_of(encoder, adapter, texts, num_labels):
    """Outputs of the saved adapter on freshly loaded base weights, in plain PyTorch; pairs are two lists of texts."""
    model = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=num_labels)
    model = PeftModel.from_pretrained(model, adapter).eval()
    texts = texts if isinstance(texts[0], list) else [list(texts)]
    batch = AutoTokenizer.from_pretrained(adapter)(*texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits.numpy()


class TestRuns:
    def test_texts_as_labels_and_a_validation_split_of_its_own(self, encoder, tmp_path, capsys):
        frame = pd.DataFrame({"text": SENTENCES, "topic": ["good", "bad", "good"] * 40})
        frame.to_csv(tmp_path / "reviews.csv", index=False)
        results = classify(encoder, tmp_path / "reviews.csv", tmp_path / "run", "--label_columns", "topic")
        output = capsys.readouterr().out
        assert re.search(r"2 classes: good \d+ \(6\d\.\d%\), bad \d+ \(3\d\.\d%\)\n", output)
        assert "no validation split: 12 of the 120 training examples are used instead" in output
        assert results["labels"] == ["bad", "good"]
        assert results["test"] is None
        assert results["task"] == "reviews"
        assert set(results["epochs"][0]) >= {"accuracy", "macro_f1"}
        saved = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
        assert saved["id2label"] == {"0": "bad", "1": "good"}
        assert saved["problem_type"] == SINGLE

    def test_several_labels_per_row_and_a_test_split(self, encoder, tmp_path):
        tags = [["a"], [], ["a", "b"], ["c"]] * 30
        for split in ("train", "validation", "test"):
            pd.DataFrame({"text": SENTENCES, "labels": tags}).to_parquet(tmp_path / f"{split}.parquet")
        results = classify(encoder, tmp_path, tmp_path / "run")
        logits = logits_of(encoder, tmp_path / "run" / "adapter", SENTENCES, 3)
        expected = np.array([[tag in row for tag in "abc"] for row in tags])
        assert results["test"]["accuracy"] == pytest.approx(((logits > 0) == expected).all(1).mean())
        assert results["chosen_by"] == "macro_f1"

    def test_a_regression(self, encoder, tmp_path):
        scores = np.linspace(0, 5, 120)
        for split in ("train", "test"):
            frame = pd.DataFrame({"title": SENTENCES, "body": SENTENCES[::-1], "score": scores})
            frame.to_json(tmp_path / f"{split}.jsonl", orient="records", lines=True)
        results = classify(encoder, tmp_path, tmp_path / "run", "--text_columns", "title", "body")
        assert results["labels"] == ["score"]
        assert set(results["test"]) == {"pearson", "spearmanr"}

    @pytest.mark.parametrize("method", ["houlsby", "lora"])
    def test_the_columns_of_pairs_are_those_of_later_evaluations(self, encoder, tmp_path, capsys, method):
        frame = pd.DataFrame({"title": SENTENCES, "body": SENTENCES[::-1], "label": ["a", "b"] * 60})
        frame.to_csv(tmp_path / "mails.csv", index=False)
        out, data = tmp_path / "run", tmp_path / "mails.csv"
        results = classify(encoder, data, out, "--text_columns", "title", "body", "--method", method)
        if method == "houlsby":
            saved = json.loads((out / "adapter" / "adapter_config.json").read_text())
            assert saved["recorded"]["text_columns"] == ["title", "body"]
            main(["predict", str(out / "adapter"), "--file", str(data), "--output", str(tmp_path / "new.csv")])
            assert "text: title, body\n" in capsys.readouterr().err
            expected = logits_of(encoder, out / "adapter", [SENTENCES, SENTENCES[::-1]], 2)
            found = pd.read_csv(tmp_path / "new.csv")["predicted_label"].map({"a": 0, "b": 1})
            assert (found == expected.argmax(-1)).mean() > 0.98, "logits may be equal but for rounding"

        flags = ["--evaluate", out, "--output_dir", tmp_path / "evaluation", "--use_cpu"]
        run(text_classification, "--data", data, *flags)
        assert "texts: title, body; " in capsys.readouterr().out
        found = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
        assert found["scores"] == pytest.approx(results["best_scores"], rel=1e-4)

        frame.rename(columns={"title": "subject"}).to_csv(tmp_path / "others.csv", index=False)
        message = (
            r"must read pairs of texts, .* on 'title' and 'body'; got body\. Name two columns with --text_columns"
        )
        with pytest.raises(AdapterError, match=message):
            run(text_classification, "--data", tmp_path / "others.csv", *flags)
        run(text_classification, "--data", tmp_path / "others.csv", *flags, "--text_columns", "subject", "body")

    def test_the_pooler_is_trained_and_saved(self, encoder, tmp_path):
        for split in ("train", "test"):
            pd.DataFrame({"text": SENTENCES, "label": [0, 1] * 60}).to_parquet(tmp_path / f"{split}.parquet")
        flags = ["--train_pooler", "true", "--learning_rate", 1e-2]
        results = classify(encoder, tmp_path, tmp_path / "run", *flags)
        saved = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
        own = saved["base_model.model.bert.pooler.dense.weight"]
        assert not torch.equal(own, load_file(encoder / "model.safetensors")["pooler.dense.weight"])
        right = logits_of(encoder, tmp_path / "run" / "adapter", SENTENCES, 2).argmax(-1) == [0, 1] * 60
        assert results["test"]["accuracy"] == pytest.approx(right.mean())

    def test_an_encoder_without_a_pooler(self, encoder, tmp_path):
        tokenizer = AutoTokenizer.from_pretrained(encoder)
        config = DistilBertConfig(vocab_size=len(tokenizer), dim=32, n_layers=2, n_heads=4, hidden_dim=48)
        DistilBertModel(config).save_pretrained(tmp_path / "distilbert")
        tokenizer.save_pretrained(tmp_path / "distilbert")
        pd.DataFrame({"text": SENTENCES, "label": [0, 1] * 60}).to_csv(tmp_path / "train.csv", index=False)
        with pytest.raises(RecipeError, match=r"--train_pooler needs an encoder with a pooler; DistilBert.* has none"):
            classify(tmp_path / "distilbert", tmp_path / "train.csv", tmp_path / "run", "--train_pooler", "true")

    def test_the_drawn_examples_do_not_depend_on_the_seed(self, tmp_path):
        """So that runs with several seeds differ in nothing but the seed."""
        pd.DataFrame({"text": SENTENCES, "label": [0, 1] * 60}).to_csv(tmp_path / "data.csv", index=False)
        arguments = ClassificationArguments(data=str(tmp_path / "data.csv"), max_train_samples=30)
        drawn = [
            load_task(arguments, RecipeTrainingArguments(output_dir=str(tmp_path), seed=seed)).splits["train"]["text"]
            for seed in (1, 2)
        ]
        assert drawn[0] == drawn[1]
        assert len(drawn[0]) == 30

    def test_empty_texts_and_a_line_of_ten_megabytes(self, encoder, tmp_path, capsys):
        texts = [*SENTENCES[:40], "", "  ", "the king is " * 900_000]
        frame = pd.DataFrame({"text": texts, "label": [*["a", "b"] * 21, "a"]})
        frame.to_csv(tmp_path / "train.csv", index=False)
        frame[38:].to_csv(tmp_path / "validation.csv", index=False)
        results = classify(encoder, tmp_path, tmp_path / "run", "--max_length", 16)
        assert "train: 2 rows without text left out (line 42, line 43)" in capsys.readouterr().out
        assert results["epochs"][0]["accuracy"] * 5 == pytest.approx(round(results["epochs"][0]["accuracy"] * 5))

    @pytest.mark.parametrize(
        ("train", "validation", "message"),
        [
            ({"text": ["a", "b"]}, {}, r"no column with one of the names label, .*, only text"),
            ({"text": ["a", "b"], "label": ["x", "x"]}, {}, "two classes; the column 'label' has only x"),
            ({"text": ["a", "b"], "label": ["x", "y"]}, {"text": ["c"]}, "validation lacks the column 'label'"),
            (
                {"text": ["a", "b"], "label": ["x", "y"]},
                {"text": ["c"], "label": ["z"]},
                "validation: line 2 has the label 'z', which is not one of the 2 classes of the training "
                "examples: x, y",
            ),
            ({"text": ["a", "b"], "label": ["x", ""]}, {}, "two classes; the column 'label' has only x"),
            ({"text": ["a", "b"], "label": ["0.5", "?"]}, {}, None),
            ({"text": ["", " "], "label": ["x", "y"]}, {}, "all its 2 rows are empty"),
        ],
    )
    def test_bad_data(self, encoder, tmp_path, train, validation, message):
        pd.DataFrame(train).to_csv(tmp_path / "train.csv", index=False)
        pd.DataFrame(validation or train).to_csv(tmp_path / "validation.csv", index=False)
        if message is None:
            assert classify(encoder, tmp_path, tmp_path / "run")["labels"] == ["0.5", "?"]
            return
        with pytest.raises(RecipeError, match=message):
            classify(encoder, tmp_path, tmp_path / "run")

    def test_a_wrong_option_costs_no_loading(self, encoder, tmp_path):
        with pytest.raises(RecipeError, match="share_layers must be"):
            classify(encoder, tmp_path, tmp_path / "run", "--share_layers", -1)


class TestLabels:
    @pytest.mark.parametrize(
        ("values", "problem_type", "names"),
        [
            (["b", "a", "b"], SINGLE, ("a", "b")),
            ([10, 9, 2], SINGLE, ("2", "9", "10")),
            (["10", "9"], SINGLE, ("9", "10")),
            ([1.0, 0.0], SINGLE, ("0", "1")),
            ([True, False], SINGLE, ("False", "True")),
            (["0.5", "1"], REGRESSION, ("label",)),
            ([[3], [1, 3], []], MULTI, ("1", "3")),
        ],
    )
    def test_kinds(self, values, problem_type, names):
        data = Dataset.from_dict({"label": values})
        assert find_labels(data, None, None) == Labels(("label",), problem_type, names)

    def test_numbers_of_several_labels(self):
        data = Dataset.from_dict({"a": [1, 0], "b": ["1", "0"], "text": ["x", "y"]})
        labels = find_labels(data, ["a", "b"], None)
        assert labels.problem_type == MULTI
        assert labels.encode(data, "train")["label"] == [[1.0, 1.0], [0.0, 0.0]]

    def test_names_that_the_data_set_declares(self):
        """A class of which training has no example is known all the same."""
        names = ["neg", "neutral", "pos"]
        data = Dataset.from_dict({"label": [0, 2]}, features=Features({"label": ClassLabel(names=names)}))
        labels = find_labels(data, None, None)
        assert labels.names == tuple(names)
        assert labels.encode(data, "train")["label"] == [0, 2]
        assert describe_balance(labels, [0, 2]) == "3 classes: neg 1 (50.0%), pos 1 (50.0%); 2 seen once; 1 never seen"
        lists = Dataset.from_dict({"label": [[0, 1]]}, features=Features({"label": List(ClassLabel(names=names))}))
        assert find_labels(lists, None, None) == Labels(("label",), MULTI, tuple(names))

    def test_whole_scores_are_a_regression_when_asked_for(self):
        data = Dataset.from_dict({"stars": ["1", "5"]})
        labels = find_labels(data, ["stars"], REGRESSION)
        encoded = labels.encode(data, "train")
        assert encoded["label"] == [1.0, 5.0]
        assert encoded.features["label"] == Value("float32")
        assert describe_balance(labels, encoded["label"]) == "stars: scores from 1 to 5"
        with pytest.raises(RecipeError, match="validation: stars must be a finite number, row 1 has 'many'"):
            labels.encode(Dataset.from_dict({"stars": ["1", "many"]}), "validation")

    def test_a_column_that_is_not_there(self):
        with pytest.raises(RecipeError, match="There is no column 'topic', only text"):
            find_labels(Dataset.from_dict({"text": ["a"]}), ["topic"], None)


class TestScores:
    def test_macro_f1_by_its_formula(self):
        labels, predicted = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 0, 0])
        scores = classification_scores(np.eye(3)[predicted], labels, SINGLE)
        f1 = [2 * 2 / (2 * 2 + 2 + 1), 2 * 1 / (2 * 1 + 1 + 1), 0]  # 2 TP / (2 TP + FP + FN)
        assert scores == {"accuracy": pytest.approx(3 / 6), "macro_f1": pytest.approx(np.mean(f1))}

    def test_several_labels(self):
        labels = np.array([[1, 0], [1, 1], [0, 0]])
        outputs = np.array([[2.0, -1.0], [0.5, -0.5], [-3.0, -3.0]])
        scores = classification_scores(outputs, labels, MULTI)
        assert scores["accuracy"] == pytest.approx(2 / 3)
        assert scores["micro_f1"] == pytest.approx(f1_score(labels.ravel(), (outputs > 0).ravel()))

    @pytest.mark.parametrize(("rows", "macro"), [([[1, 0, 0], [0, 1, 0]], 1.0), ([[0, 0, 0], [0, 0, 0]], 0.0)])
    def test_a_label_that_no_row_and_no_prediction_has_is_not_averaged_over(self, rows, macro):
        labels = np.array(rows, dtype=np.float32)
        scores = classification_scores(2 * labels - 1, labels, MULTI)
        assert scores == {"accuracy": 1.0, "macro_f1": macro, "micro_f1": macro}

    def test_constant_scores(self):
        scores = classification_scores(np.ones((3, 1)), np.array([1.0, 2.0, 3.0]), REGRESSION)
        assert scores == {"spearmanr": 0.0, "pearson": 0.0}

    def test_outputs_that_are_no_numbers(self):
        with pytest.raises(RecipeError, match=r"has diverged\. Lower --learning_rate"):
            classification_scores(np.array([[np.nan, 1.0]]), np.array([0]), SINGLE)


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"needs the files in {REAL_DATA}, which are not here")
def test_classes_that_only_test_has_are_known_by_the_names_in_the_file(encoder, tmp_path, capsys):
    flags = [
        "--max_train_samples",
        64,
        "--max_length",
        16,
        "--eval_strategy",
        "no",
        "--load_best_model_at_end",
        "false",
    ]
    results = classify(encoder, REAL_DATA / "customer_complaints_issue", tmp_path, *flags)
    assert len(results["labels"]) == 63
    assert "never seen" in capsys.readouterr().out
    assert 0 <= results["test"]["accuracy"] <= 1
