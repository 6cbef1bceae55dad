"""Classification of any texts: from somebody's own file to a model, its scores, its predictions and
its evaluation.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from sklearn import metrics
from torch.nn.functional import binary_cross_entropy_with_logits, cosine_similarity, cross_entropy
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DistilBertConfig,
    DistilBertModel,
    FunnelConfig,
    FunnelModel,
)

import houlsby_peft
import paper_tasks
import text_classification
from answers import near
from architecture_cases import CASES
from data.labels import MULTI
from decoders import save_gpt2
from demo import minimal_pairs
from edited_json import edited_json
from houlsby_peft import AdapterError
from houlsby_peft_cli import main
from recipe_runs import logits_of, results_of, run, write
from results.accuracy_table import accuracies
from results.additional import PAPER_COLUMNS
from results.lines import arrange
from results.read import collect
from run.arguments import ClassifierArguments
from run.command import parse_command
from run.edge import RecipeError
from tasks.classification import (
    ClassificationArguments,
    classification_scores,
)
from tasks.classification_trainer import contrastive_loss, weighted_loss


SENTENCES = minimal_pairs()["train"]["sentence"][:60]
TEXTS = {"Billing": "the king pays", "Login": "the painter was", "Größe": 'the "dog", it is large'}


def classify(encoder, data, output, **flags):
    run(text_classification, data=data, model_name=encoder, output_dir=output, max_steps=2, **flags)
    return results_of(output)


def mean_states(encoder: Path, adapter: Path, texts: Iterable[str]) -> torch.Tensor:
    """The mean of the last states of each text, in plain PyTorch."""
    model = AutoModelForSequenceClassification.from_pretrained(encoder)
    model = PeftModel.from_pretrained(model, adapter).eval()
    batch = AutoTokenizer.from_pretrained(adapter)([*texts], padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states[-1]
    is_token = batch["attention_mask"].bool()
    return torch.stack([row[tokens].mean(0) for row, tokens in zip(states, is_token, strict=True)])


def evaluate(folder: Path, **flags: object) -> dict:
    run(text_classification, **flags, output_dir=folder)
    return json.loads((folder / "evaluation.json").read_text())


class TestKindsOfLabels:
    def test_several_labels_per_row_and_a_test_split(self, encoder, tmp_path):
        tags = [["a"], [], ["a", "b"], ["c"]] * 15
        for split in ("train", "validation", "test"):
            write(tmp_path / f"{split}.parquet", text=SENTENCES, labels=tags)
        results = classify(encoder, tmp_path, tmp_path / "run")
        adapter = tmp_path / "run" / "adapter"
        logits = logits_of(encoder, adapter, 3, SENTENCES)
        expected = np.array([[tag in row for tag in "abc"] for row in tags])
        right = ((logits > 0) == expected).all(1)
        assert results["test"]["accuracy"] == pytest.approx(right.mean())
        assert results["chosen_by"] == "macro_f1"
        # The thresholds that are recorded have the best F1 of all on validation, and decide what is
        # predicted.
        config = json.loads((adapter / "adapter_config.json").read_text())
        thresholds = config["recorded"]["thresholds"]
        scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
        for of_class, has_class, threshold in zip(scores.T, expected.T, thresholds, strict=True):
            best = max(metrics.f1_score(has_class, of_class >= score) for score in of_class)
            assert metrics.f1_score(has_class, of_class >= threshold) == pytest.approx(best)
        predictions = houlsby_peft.load(adapter).predict(list(SENTENCES))
        for answers, row in zip(predictions, scores, strict=True):
            labels = {"abc"[number] for number in np.flatnonzero(row >= thresholds)}
            assert {answer["label"] for answer in answers} == labels

    @pytest.mark.parametrize("method", ["houlsby", "full"])
    def test_a_regression_in_any_unit(self, encoder, tmp_path, method):
        errors = ("mean_absolute_error", "root_mean_squared_error")
        texts = (SENTENCES, SENTENCES[::-1])
        in_unit = {}
        for unit, shift in ((1, 0), (200, 600)):
            folder = tmp_path / str(unit)
            targets = np.round(unit * np.linspace(0, 5, 60) + shift, 2)
            for split in ("train", "test"):
                write(folder / f"{split}.jsonl", title=texts[0], body=texts[1], score=targets)
            results = classify(encoder, folder, folder / "run", text_columns=["title", "body"],
                               method=method, learning_rate=1e-2)  # fmt: skip
            in_unit[unit] = results["test"]
            if method == "houlsby":
                outputs = logits_of(encoder, folder / "run" / "adapter", 1, *texts)[:, 0]
                error = np.abs(outputs - targets)
                expected = (error.mean(), np.sqrt((error**2).mean()))
                assert [results["test"][name] for name in errors] == pytest.approx(
                    expected, rel=1e-4
                )
                written = pd.read_csv(folder / "run" / "predictions.csv", dtype=str)
                assert [*written["label"]] == [*map(str, targets.tolist())]
                values = np.array([*written["predicted"]], dtype=np.float32)
                assert [*written["predicted"]] == [*map(str, values)]
        for name in errors:
            assert in_unit[200][name] == pytest.approx(200 * in_unit[1][name], rel=1e-3)
        assert in_unit[200]["spearmanr"] == pytest.approx(in_unit[1]["spearmanr"], abs=0.01)
        assert (folder / "run" / "values.png").exists()

    def test_weights_of_rare_classes(self, encoder, tmp_path, capsys):
        """A class weighs its mean share over its own: 26 rows over 48 and over 4."""
        labels = ["common"] * 48 + ["rare"] * 4
        texts = [f"the king {row}" for row in range(52)]
        for split in ("train", "validation"):
            write(tmp_path / f"{split}.csv", text=texts, label=labels)
        classify(encoder, tmp_path, tmp_path / "run", class_weights="balanced")
        assert "common 0.54, rare 6.50" in capsys.readouterr().out

    @pytest.mark.parametrize("labels", [[0.5, 1.25, 2.75] * 10, ["a,b", "a", "b,c"] * 10])
    def test_labels_of_no_single_class_are_not_smoothed(self, labels, encoder, tmp_path):
        data = write(tmp_path / "a.csv", text=SENTENCES[:30], label=labels)
        separator = {"label_separator": ","} if "a" in labels else {}
        with pytest.raises(RecipeError, match="--label_smoothing_factor"):
            classify(encoder, data, tmp_path / "run", label_smoothing_factor=0.1, **separator)

    @pytest.mark.parametrize("name", ["bart", "opt:post", "funnel", "deberta"])
    def test_encoders_that_differ(self, name, encoder, tmp_path):
        """BART gives the states of its encoder as well, OPT's embeddings have a width of their own,
        Funnel's middle layers have fewer tokens, and a part of DeBERTa is read in float32.
        """
        tokenizer = AutoTokenizer.from_pretrained(encoder)
        if name == "funnel":
            sizes = {"block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24}
            model = FunnelModel(FunnelConfig(vocab_size=len(tokenizer), **sizes))
        else:
            model = CASES[name].model(vocab_size=len(tokenizer), pad_token_id=0)
        for saved in (model, tokenizer):
            saved.save_pretrained(tmp_path / "base")
        labels = [0, 1, 1] * 20
        data = write(tmp_path / "a.csv", text=SENTENCES, label=labels)
        results = classify(tmp_path / "base", data, tmp_path / "run", validation_file=data,
                           keep_repeated=True, max_length=16, base_dtype="bfloat16")  # fmt: skip
        logits = logits_of(tmp_path / "base", tmp_path / "run" / "adapter", 2, SENTENCES)
        accuracy = np.mean(logits.argmax(-1) == labels)
        assert results["best_scores"]["accuracy"] == pytest.approx(accuracy, abs=0.05)
        assert results["baseline"]["scores"]["accuracy"] > 0

    def test_a_run_is_scored_anew_on_its_own_validation_texts(self, encoder, tmp_path):
        """Without those that are training texts as well, as in the run."""
        classes = ["a", "b"] * 20
        write(tmp_path / "train.csv", text=[f"the king {row}" for row in range(40)], label=classes)
        write(
            tmp_path / "validation.csv",
            text=[f"the king {row}" for row in range(20, 60)],
            label=classes,
        )
        results = classify(encoder, tmp_path, tmp_path / "run")
        evaluation = evaluate(tmp_path / "again", data=tmp_path, evaluate=tmp_path / "run")
        assert evaluation["scores"] == pytest.approx(results["best_scores"], rel=1e-4)

    @pytest.mark.parametrize("several", [False, True])
    def test_the_weighted_loss(self, several):
        """By its formula: the mean over rows of each row's loss times the weight of its class."""
        logits = torch.randn(4, 3, generator=torch.manual_seed(0))
        weights = torch.tensor([0.5, 1.0, 4.0])
        if several:
            labels = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]])
            per_class = binary_cross_entropy_with_logits(logits, labels, reduction="none")
            expected = (per_class * torch.where(labels == 1, weights, 1.0)).mean()
        else:
            labels = torch.tensor([0, 2, 1, 0])
            expected = (cross_entropy(logits, labels, reduction="none") * weights[labels]).mean()
        assert torch.allclose(weighted_loss(logits, labels, weights), expected)

    def test_the_contrastive_loss(self):
        """By its definition: the squared differences of cosines, a mean for each kind of pair."""
        states = torch.randn(5, 7, generator=torch.manual_seed(0))
        labels = torch.tensor([0, 2, 0, 2, 2])
        errors = {True: [], False: []}
        for one in range(5):
            for two in range(one):
                is_same = bool(labels[one] == labels[two])
                cosine = cosine_similarity(states[one], states[two], dim=0)
                errors[is_same].append((cosine - float(is_same)) ** 2)
        equal, unequal = (torch.stack(errors[kind]).mean() for kind in (True, False))
        assert torch.allclose(contrastive_loss(states, labels), (equal + unequal) / 2)
        assert torch.allclose(contrastive_loss(states[:1], labels[:1]), torch.tensor(0.0))

    def test_few_texts_of_one_class_are_drawn_together(self, encoder, tmp_path, capsys):
        """By default, in the states of the saved adapter, as plain PyTorch computes them."""
        labels = ["a", "b"] * 30
        data = write(tmp_path / "a.csv", text=SENTENCES, label=labels)
        fewer = {"max_steps": 40, "learning_rate": 1e-2}
        for name, flags in (("default", {}), ("without", {"contrastive_weight": 0})):
            run(text_classification, data=data, model_name=encoder, output_dir=tmp_path / name,
                **fewer, **flags)  # fmt: skip
        assert capsys.readouterr().out.count("--contrastive_weight 0") == 1
        classes = torch.tensor([0, 1] * 30)
        distances = {}
        for name in ("default", "without"):
            states = mean_states(encoder, tmp_path / name / "adapter", SENTENCES)
            distances[name] = contrastive_loss(states, classes)
        assert distances["default"] < 0.8 * distances["without"], distances

    def test_scores_are_not_compared(self, encoder, tmp_path):
        data = write(tmp_path / "a.csv", text=SENTENCES, label=np.linspace(0.5, 3, 60))
        with pytest.raises(RecipeError, match="one class per text"):
            classify(encoder, data, tmp_path / "run", contrastive_weight=1)


class TestScores:
    @pytest.mark.parametrize(
        ("rows", "macro"), [([[1, 0, 0], [0, 1, 0]], 1.0), ([[0, 0, 0], [0, 0, 0]], 0.0)]
    )
    def test_a_label_that_no_row_and_no_prediction_has_is_not_averaged_over(self, rows, macro):
        labels = np.array(rows, dtype=np.float32)
        scores = classification_scores(2 * labels - 1, labels, MULTI)
        assert scores == {"accuracy": 1.0, "macro_f1": macro, "micro_f1": macro}


class TestPoolers:
    def test_one_is_trained_and_saved(self, encoder, tmp_path):
        for split in ("train", "test"):
            write(tmp_path / f"{split}.parquet", text=SENTENCES, label=[0, 1] * 30)
        results = classify(
            encoder, tmp_path, tmp_path / "run", train_pooler="true", learning_rate=1e-2
        )
        adapter = tmp_path / "run" / "adapter"
        pooler = load_file(encoder / "model.safetensors")["pooler.dense.weight"]
        trained = load_file(adapter / "adapter_model.safetensors")
        assert not torch.equal(trained["base_model.model.bert.pooler.dense.weight"], pooler)
        predicted = logits_of(encoder, adapter, 2, SENTENCES).argmax(-1)
        assert results["test"]["accuracy"] == pytest.approx((predicted == [0, 1] * 30).mean())

    def test_an_encoder_without_one(self, encoder, tmp_path):
        tokenizer = AutoTokenizer.from_pretrained(encoder)
        config = DistilBertConfig(
            vocab_size=len(tokenizer), dim=32, n_layers=2, n_heads=4, hidden_dim=48
        )
        DistilBertModel(config).save_pretrained(tmp_path / "distilbert")
        tokenizer.save_pretrained(tmp_path / "distilbert")
        data = write(tmp_path / "train.csv", text=SENTENCES, label=[0, 1] * 30)
        with pytest.raises(RecipeError, match="--train_pooler needs"):
            classify(tmp_path / "distilbert", data, tmp_path / "run", train_pooler="true")


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
class TestDecodersWithoutAPadToken:
    @pytest.mark.parametrize(
        ("method", "pad_of_model"),
        [("houlsby", None), ("houlsby", 2), ("lora", None), ("full", 2)],
    )
    def test_a_batch_is_read_as_each_text_alone(self, method, pad_of_model, tmp_path):
        """While it trains, when it is evaluated, and when it is loaded to predict.

        The tokenizer pads on the left, and a text ends with the end token, by which others may be
        padded.
        """
        base = save_gpt2(tmp_path / "base")
        for name, field in (
            ("config.json", {"pad_token_id": pad_of_model}),
            ("tokenizer_config.json", {"padding_side": "left"}),
        ):
            with edited_json(base / name) as content:
                content |= field
        texts = ["fine film", "he said so . who ?", "a fine film he said", "said so <eos>", "who"]
        data = write(tmp_path / "train.csv", text=texts * 8, label=[0, 1, 0, 1, 1] * 8)
        test = write(tmp_path / "test.csv", text=texts)
        results = classify(base, data, tmp_path / "run", method=method, validation_file=data,
                           test_file=test, do_train=True, do_eval=True, do_predict=True,
                           lora_targets="c_attn")  # fmt: skip
        predictions = pd.read_csv(tmp_path / "run" / "predictions.csv")
        ends = 0 if pad_of_model is None else 2
        saved = tmp_path / "run" / ("model" if method == "full" else "adapter")
        classes = {"num_labels": 2, "pad_token_id": ends}
        source = saved if method == "full" else base
        model = AutoModelForSequenceClassification.from_pretrained(source, **classes)
        if method != "full":
            model = PeftModel.from_pretrained(model, saved)
        tokenizer, expected = AutoTokenizer.from_pretrained(base), []
        for text in texts:
            logits = model.eval()(**tokenizer(text, return_tensors="pt")).logits
            expected.append(logits.softmax(-1).max().item())
        assert [*predictions["probability"]] == pytest.approx(expected, abs=6e-4)
        assert len({round(probability, 2) for probability in expected}) > 2
        evaluation = evaluate(tmp_path / "run", data=data, validation_file=data, do_eval=True)
        assert evaluation["scores"] == pytest.approx(results["best_scores"], rel=1e-4)
        if method == "houlsby":
            answers = houlsby_peft.load(saved).predict(texts)
            assert [answer["score"] for answer in answers] == pytest.approx(expected, abs=1e-5)
            alone = [houlsby_peft.load(saved).predict(text)[0] for text in texts]
            assert answers == near(alone)


@pytest.fixture(scope="module")
def tickets(encoder, tmp_path_factory):
    """The folder of somebody who has run the recipe with nothing but a file and an encoder."""
    folder = tmp_path_factory.mktemp("somebody")
    rows = [(1000 + row, TEXTS[(*TEXTS,)[row % 3]], (*TEXTS,)[row % 3]) for row in range(60)]
    frame = pd.DataFrame(rows, columns=["ticket_id", "message", "category"])
    frame.to_csv(folder / "tickets.csv", index=False, encoding="cp1252", sep=";")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        run(text_classification, data="tickets.csv", model_name=encoder, max_steps=60,
            learning_rate=1e-2)  # fmt: skip
    return folder


class TestFromAFileToPredictions:
    def test_the_adapter_knows_its_labels(self, tickets):
        results = results_of(tickets / "runs" / "tickets")
        adapter = houlsby_peft.load(tickets / "runs" / "tickets" / "adapter")
        assert list(adapter.labels) == results["labels"] == ["Billing", "Größe", "Login"]
        assert results["best_score"] == 1.0, "three texts, each with its own label"
        assert [answer["label"] for answer in adapter.predict(list(TEXTS.values()))] == list(TEXTS)

    def test_its_own_file_is_scored_on_the_validation_rows(self, tickets, tmp_path):
        """Wherever it is now; another file is scored whole, by the classes of the adapter."""
        run_folder = tickets / "runs" / "tickets"
        moved = shutil.copy(tickets / "tickets.csv", tmp_path / "moved.csv")
        evaluation = evaluate(tmp_path, data=moved, evaluate=run_folder)
        assert evaluation["dataset"]["rows"] == {"validation": 12}
        assert evaluation["scores"] == pytest.approx(
            results_of(run_folder)["best_scores"], rel=1e-4
        )
        data = write(tmp_path / "new.csv", message=[*TEXTS.values()], category=["Login"] * 3)
        evaluation = evaluate(tmp_path, data=data, evaluate=run_folder / "adapter")
        assert evaluation["scores"]["accuracy"] == pytest.approx(1 / 3)
        write(data, message=["a"], category=["Other"])
        with pytest.raises(RecipeError, match="row 2 has 'Other'"):
            evaluate(tmp_path, data=data, evaluate=run_folder)
        write(data, message=["a"], label=["Login"])
        with pytest.raises(RecipeError, match="no column 'category'"):
            evaluate(tmp_path, data=data, evaluate=run_folder)

    def test_data_that_were_trained_on_as_a_whole_are_named(
        self, encoder, tickets, tmp_path, capsys
    ):
        data = tickets / "tickets.csv"
        classify(encoder, data, tmp_path, do_train=True)
        assert results_of(tmp_path)["dataset"]["rows"] == {"train": 60}
        assert results_of(tmp_path)["epochs"] == []
        evaluation = evaluate(tmp_path, data=data, evaluate=tmp_path)
        assert evaluation["dataset"]["rows"] == {"validation": 60}
        assert "were trained on" in capsys.readouterr().out

    @pytest.mark.parametrize("labeled", [True, False])
    def test_predictions_of_a_test_file(self, tickets, tmp_path, labeled, capsys):
        """In the evaluation's own folder, with the texts as they are."""
        columns = {"message": [*TEXTS.values(), "=1+1", "-5"]}
        if labeled:
            columns["category"] = [*TEXTS, "Login", "Login"]
        test = write(tmp_path / "test.csv", **columns)
        saved = tickets / "runs" / "tickets" / "adapter"
        evaluation = evaluate(
            tmp_path, data=tickets / "tickets.csv", test_file=test, evaluate=saved
        )
        table = pd.read_csv(tmp_path / "evaluation" / "predictions.csv")
        labels = ["label"] if labeled else []
        assert list(table) == ["row", "message", *labels, "predicted", "probability"]
        assert table["predicted"][:3].tolist() == list(TEXTS)
        assert table["message"].tolist() == columns["message"]
        assert (evaluation["test"] is not None) == labeled
        assert ("not scored, as it has no label" in capsys.readouterr().out) == (not labeled)

    @pytest.mark.parametrize("method", ["full", "lora"])
    def test_other_methods(self, encoder, tickets, tmp_path, method):
        data = tickets / "tickets.csv"
        results = classify(encoder, data, tmp_path / "run", method=method, max_length=5)
        evaluation = evaluate(tmp_path / "run", data=data, do_eval=True)
        assert evaluation["scores"] == pytest.approx(results["best_scores"], rel=1e-4)
        assert evaluation["evaluated"].endswith("model" if method == "full" else "adapter")

    @pytest.mark.parametrize("method", ["houlsby", "lora"])
    def test_the_columns_of_pairs_are_those_of_later_evaluations(self, encoder, tmp_path, method):
        columns = {"title": SENTENCES, "body": SENTENCES[::-1], "label": ["a", "b"] * 30}
        data, out = write(tmp_path / "mails.csv", **columns), tmp_path / "run"
        results = classify(encoder, data, out, text_columns=["title", "body"], method=method)
        if method == "houlsby":
            table = str(tmp_path / "new.csv")
            main(["predict", str(out / "adapter"), "--file", str(data), "--output", table])
            expected = logits_of(encoder, out / "adapter", 2, SENTENCES, SENTENCES[::-1])
            predicted = pd.read_csv(table)["predicted_label"].map({"a": 0, "b": 1})
            # Logits may be equal but for rounding.
            assert (predicted == expected.argmax(-1)).mean() > 0.98
        evaluation = evaluate(tmp_path / "evaluation", data=data, evaluate=out)
        assert evaluation["scores"] == pytest.approx(results["best_scores"], rel=1e-4)
        columns["subject"] = columns.pop("title")
        data = write(tmp_path / "others.csv", **columns)
        with pytest.raises(AdapterError, match="'title' and 'body'"):
            evaluate(tmp_path / "evaluation", data=data, evaluate=out)


class TestFlags:
    def parse(self, *args: object) -> dict[str, object]:
        groups = parse_command(ClassificationArguments, ClassifierArguments, list(map(str, args)))
        return {name: value for group in groups for name, value in vars(group).items()}

    def test_names_of_transformers_examples(self, tmp_path):
        path = write(tmp_path / "a.csv", text=["a"])
        flags = (
            f"--model_name_or_path bert --train_file {path} --validation_file {path} --do_train"
            " --max_seq_length 64 --text_column_names message --label_column_name category"
        )
        arguments = self.parse(*flags.split())
        expected = {
            "model_name": "bert",
            "data": str(path),
            "validation_file": str(path),
            "max_length": 64,
            "text_columns": ["message"],
            "label_columns": ["category"],
            "do_predict": False,
        }
        assert expected.items() <= arguments.items()

    @pytest.mark.parametrize(
        ("flags", "done"),
        [([], "train eval predict"), (["--do_train"], "train"), (["--do_eval"], "eval")],
    )
    def test_what_is_done(self, flags, done):
        """What is not trained knows its encoder from the training."""
        arguments = self.parse("--data", "user/data", *flags)
        of_flags = [name for name in ("train", "eval", "predict") if arguments[f"do_{name}"]]
        assert of_flags == done.split()
        assert (arguments["eval_strategy"] == "no") == ("eval" not in done)
        assert (arguments["model_name"] is None) == ("train" not in done)

    @pytest.mark.parametrize("kind", ["json", "yaml"])
    def test_a_file_and_flags_after_it(self, tmp_path, monkeypatch, kind):
        monkeypatch.chdir(tmp_path)
        values = {
            "data": "user/data",
            "r": 16,
            "learning_rate": 0.002,
            "text_columns": ["message"],
            "bf16": False,
            "eval_strategy": "no",
            "load_best_model_at_end": False,
            "train_layer_norm": "all",
            "layers": [0, 1],
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr": 0.5},
        }
        (tmp_path / "a.json").write_text(json.dumps({**values, "seed": None}))
        (tmp_path / "a.yaml").write_text(
            "data: user/data\nr: 16\nlearning_rate: 2e-3\ntext_columns: [message]\nbf16: false\n"
            "eval_strategy: no\nload_best_model_at_end: no\ntrain_layer_norm: all\n"
            "layers:\n- 0\n- 1\n"
            "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 0.5}\nseed:\n"
        )
        arguments = self.parse(f"a.{kind}", "--r", "8")
        assert {**values, "r": 8, "seed": 42}.items() <= arguments.items()

    def test_patience_without_evaluations_is_refused(self):
        with pytest.raises(RecipeError, match="counts evaluations"):
            self.parse("--data", "user/data", "--do_train", "--early_stopping_patience", "2")

    def test_a_checkpoint_for_each_evaluation(self):
        flags = "--eval_strategy steps --save_strategy steps --eval_steps 7"
        assert self.parse("--data", "user/data", *flags.split())["save_steps"] == 7

    def test_a_score_that_the_task_lacks_is_refused_before_anything_is_loaded(self, tmp_path):
        data = write(tmp_path / "a.csv", text=SENTENCES, label=["a", "b"] * 30)
        with pytest.raises(RecipeError, match="one of main, accuracy"):
            run(text_classification, data=data, model_name="user/none", output_dir=tmp_path,
                metric_for_best_model="bleu")  # fmt: skip


@pytest.mark.parametrize(
    "flags", [{"method": "full"}, {"head": "two_layer"}], ids=["full", "two_layer"]
)
def test_the_papers_tasks(flags, encoder, tmp_path):
    """Both columns of table 3 of Mohebbi and Rajaei 2020, for one of the 17 tasks."""
    data = tmp_path / "additional"
    for split in ("train", "validation", "test"):
        table = data / "sms_spam" / f"{split}.csv"
        write(table, text=SENTENCES, label=["ham", "spam"] * 30)
    command = {"data": data, "model_name": encoder, "max_steps": 1, "output_dir": tmp_path / "run"}
    run(paper_tasks, **command, **flags, task="sms_spam")
    results = results_of(tmp_path / "run")
    table = accuracies(arrange(collect(tmp_path / "run"), ()))
    (ours,) = {*table} - {*PAPER_COLUMNS, "data"}
    accuracy = f"{100 * results['test']['accuracy']:.2f}"
    assert table[ours]["sms spam"] == table[ours]["mean of 1"] == accuracy
    assert table["data"]["sms spam"] == "180 rows, 2 classes; paper: 5,573, 2"
    if "head" in flags:
        weights = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
        of_head = sum(value.numel() for key, value in weights.items() if "classifier" in key)
        assert of_head == 32 * 32 + 32 + 2 * 32 + 2
    with pytest.raises(RecipeError, match="20_newsgroups"):
        run(paper_tasks, **command)
