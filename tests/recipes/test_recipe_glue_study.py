"""The GLUE study: all tasks and their averages, evaluation, predictions, and what users expect."""

from __future__ import annotations

import json
import sqlite3
import zipfile
from contextlib import closing
from statistics import mean
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import glue
import houlsby_peft
from houlsby_peft import HoulsbyConfig
from recipe_runs import run, save_tiny_encoder
from tasks.glue import TASKS
from tasks.minimal_pairs import minimal_pairs
from tasks.submission import TEST_SETS
from tiny_models import tiny_bert
from training.errors import RecipeError
from training.methods import MethodArguments, apply_method


ROWS = 24
SENTENCES = minimal_pairs()["train"]["sentence"][: 2 * ROWS]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder"))


def texts(task):
    return {column: SENTENCES[number * ROWS : (number + 1) * ROWS] for number, column in enumerate(task.text_columns)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """All nine tasks, 24 rows a split; test splits have no labels, as GLUE's."""
    folder = tmp_path_factory.mktemp("data")
    for task in TASKS.values():
        labels = np.arange(ROWS) % max(2, len(task.labels))
        for split in ("train", *task.validation_splits):
            write(folder / task.name / f"{split}.parquet", {**texts(task), "label": labels})
    for test_set in TEST_SETS.values():
        rows = {**texts(TASKS[test_set.task]), "label": [-1] * ROWS, "idx": range(ROWS)}
        write(folder / test_set.source / f"{test_set.split}.parquet", rows)
    return folder


def write(path, columns):
    path.parent.mkdir(exist_ok=True)
    pd.DataFrame(columns).to_parquet(path)


def short(encoder, data, output, *flags):
    run(
        glue,
        "--data_dir",
        data,
        "--model_name",
        encoder,
        "--use_cpu",
        "--max_steps",
        2,
        "--output_dir",
        output,
        *flags,
    )


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def nine(encoder, data, tmp_path_factory):
    """The folder of runs of all tasks."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.raises(RecipeError, match=r"would refuse .*submission.zip: CoLA.tsv: there must be 1,063"):
        short(encoder, data, folder, "--task", "all", "--predict")
    return folder


class TestAllTasks:
    def test_both_averages(self, nine):
        """By their definitions, from the files of the runs."""
        names = [name for name in TASKS if name != "minimal_pairs"]
        best = {name: results_of(nine / name)["best_scores"] for name in names}
        written = json.loads((nine / "all.json").read_text())
        nine = [
            best["cola"]["matthews_correlation"], best["sst2"]["accuracy"], best["mrpc"]["f1"],
            best["stsb"]["spearmanr"], best["qqp"]["f1"], best["mnli"]["matched_accuracy"],
            best["mnli"]["mismatched_accuracy"], best["qnli"]["accuracy"], best["rte"]["accuracy"],
        ]  # fmt: skip
        own = {task: {name: score for name, score in best[task].items() if "loss" not in name} for task in names}
        del own["cola"]["accuracy"]  # which is no score of GLUE's
        server = [mean(scores.values()) for scores in own.values()]
        assert written["mean_of_nine_columns"] == pytest.approx(mean(nine))
        assert written["server_average"] == pytest.approx(mean(server))
        assert len(server) == 9
        assert written["scores"] == best

    def test_the_papers_scores_go_to_the_card(self, nine):
        mnli = results_of(nine / "mnli")["references"]
        assert [row["name"].split(": ")[1] for row in mnli] == ["full (test)", "r 64 (test)"]
        assert mnli[1]["scores"] == pytest.approx({"matched_accuracy": 0.853, "mismatched_accuracy": 0.846})
        assert results_of(nine / "wnli")["references"] == []

    def test_which_is_which_is_said(self, encoder, data, nine, capsys):
        """By the same command, which finds all runs finished."""
        with pytest.raises(RecipeError, match="would refuse"):
            short(encoder, data, nine, "--task", "all", "--predict")
        output = capsys.readouterr().out
        assert output.count("nothing is trained") == 9
        averages = [line for line in output.splitlines() if "nine" in line and ": " in line]
        assert [line.split(" (")[0] for line in averages] == [
            "Mean of the papers' nine columns",
            "GLUE server's average",
        ]

    def test_a_name_before_the_task(self, data, nine, tmp_path, capsys):
        """Its averages lie beside those of another; MNLI's losses, under their splits' names, are no scores."""
        flags = ["--task", "all", "--data_dir", data, "--use_cpu", "--output_dir", tmp_path / "r8-{task}", "--predict"]
        with pytest.raises(RecipeError, match=r"would refuse .*r8-evaluation_submission.zip: CoLA.tsv"):
            run(glue, *flags, "--evaluate", nine / "{task}" / "adapter")
        found = json.loads((tmp_path / "r8-evaluation_all.json").read_text())
        assert found["mean_of_nine_columns"] == pytest.approx(
            json.loads((nine / "all.json").read_text())["mean_of_nine_columns"]
        )
        [printed] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mnli  ")]
        assert [entry.split()[0] for entry in printed.removeprefix("mnli  ").split(", ")] == [
            "matched_accuracy",
            "mismatched_accuracy",
        ]

    def test_predictions_are_the_models(self, encoder, data, nine):
        with zipfile.ZipFile(nine / "submission.zip") as archive:
            files = {name: archive.read(name).decode() for name in archive.namelist()}
        assert set(files) == {f"{name}.tsv" for name in TEST_SETS}
        for name in ("MNLI-mm", "AX", "STS-B"):
            task = TASKS[TEST_SETS[name].task]
            logits = logits_of(encoder, nine / task.name / "adapter", task)
            expected = [task.labels[row.argmax()] for row in logits] if len(task.labels) > 1 else None
            found = [line.split("\t")[1] for line in files[f"{name}.tsv"].splitlines()[1:]]
            if expected is None:
                assert np.allclose([float(text) for text in found], logits[:, 0].clip(0, 5), atol=6e-5)
            else:
                assert found == expected

    @pytest.mark.parametrize("task", ["cola", "stsb", "mnli"])
    def test_evaluation_gives_the_scores_of_the_run(self, data, nine, tmp_path, task):
        """The adapter knows its encoder."""
        flags = ["--task", task, "--data_dir", data, "--use_cpu", "--output_dir", tmp_path]
        run(glue, *flags, "--evaluate", nine / "{task}" / "adapter")
        found = json.loads((tmp_path / "evaluation.json").read_text())["scores"]
        assert found == pytest.approx(results_of(nine / task)["best_scores"], rel=1e-5)
        assert not (tmp_path / "results.json").exists()

    def test_an_evaluation_leaves_the_submission_of_the_run(self, encoder, data, nine, tmp_path):
        """In its folder, even that of a worse adapter; a finished run writes its own again."""
        short(encoder, data, tmp_path / "run", "--task", "rte", "--predict", "--learning_rate", 1e-2)
        own = (tmp_path / "run" / "submission" / "RTE.tsv").read_bytes()
        flags = ["--task", "rte", "--data_dir", data, "--use_cpu", "--output_dir", tmp_path / "run", "--predict"]
        run(glue, *flags, "--evaluate", nine / "rte")
        found = (tmp_path / "run" / "evaluation_submission" / "RTE.tsv").read_bytes()
        assert found == (nine / "rte" / "submission" / "RTE.tsv").read_bytes() != own
        assert (tmp_path / "run" / "submission" / "RTE.tsv").read_bytes() == own
        (tmp_path / "run" / "submission" / "RTE.tsv").unlink()
        short(encoder, data, tmp_path / "run", "--task", "rte", "--predict", "--learning_rate", 1e-2)
        assert (tmp_path / "run" / "submission" / "RTE.tsv").read_bytes() == own

    def test_an_adapter_of_another_task(self, data, nine, tmp_path):
        flags = ["--task", "rte", "--data_dir", data, "--use_cpu", "--output_dir", tmp_path]
        with pytest.raises(RecipeError, match=r"predicts not_equivalent, equivalent; the task has entailment"):
            run(glue, *flags, "--evaluate", nine / "mrpc" / "adapter")

    def test_an_adapter_that_is_not_there(self, data, tmp_path):
        with pytest.raises(RecipeError, match="--evaluate must be a folder or file that exists"):
            run(glue, "--task", "rte", "--data_dir", data, "--use_cpu", "--evaluate", tmp_path / "absent")


def logits_of(encoder, adapter, task):
    """Outputs for the task's texts by what anybody would use."""
    predictor = houlsby_peft.load(adapter)
    batch = predictor.tokenizer(*texts(task).values(), padding=True, return_tensors="pt")
    with torch.no_grad():
        return predictor.model(**batch).logits.numpy()


@pytest.mark.parametrize("method", ["houlsby", "full", "layer_norm", "lora"])
def test_evaluation_cuts_texts_as_the_run_did(encoder, data, tmp_path, method):
    short(encoder, data, tmp_path / "run", "--task", "rte", "--method", method, "--max_length", 7)
    saved = tmp_path / "run" / ("adapter" if method in ("houlsby", "lora") else "model")
    flags = ["--task", "rte", "--data_dir", data, "--use_cpu", "--output_dir", tmp_path, "--evaluate", saved]
    with patch("glue.tokenize", wraps=glue.tokenize) as spy:
        run(glue, *flags, "--max_length", 9)
        run(glue, *flags)
    assert [call.args[3] for call in spy.call_args_list] == [9, 7]
    found = json.loads((tmp_path / "evaluation.json").read_text())["scores"]
    assert found == pytest.approx(results_of(tmp_path / "run")["best_scores"], rel=1e-5)


class TestHeadAndPooler:
    def test_both_are_saved_and_loaded(self, encoder, data, tmp_path):
        flags = ["--task", "rte", "--head", "two_layer", "--train_pooler", True, "--learning_rate", 0.01]
        short(encoder, data, tmp_path / "run", *flags)
        weights = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
        head = {name.removeprefix("base_model.model.") for name in weights if ".houlsby_" not in name}
        layers = ("classifier.dense", "classifier.out_proj", "bert.pooler.dense")
        assert head == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
        run(glue, "--task", "rte", "--data_dir", data, "--use_cpu", "--output_dir", tmp_path, "--evaluate",
            tmp_path / "run" / "adapter")  # fmt: skip
        found = json.loads((tmp_path / "evaluation.json").read_text())["scores"]
        assert found == pytest.approx(results_of(tmp_path / "run")["best_scores"], rel=1e-5)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--head", "two_layer", "--method", "full"], "--head two_layer needs --method houlsby, got full"),
            (["--task", "all", "--hub_model_id", "user/glue"], r"--hub_model_id must contain \{task\}"),
            (["--push_to_hub", "--method", "lora"], "--push_to_hub needs --method houlsby, got lora"),
            (
                ["--example", "a", "b", "--method", "lora"],
                "--example needs --method houlsby, got lora",
            ),
            (["--example", "a", "b", "--example", "c"], "--example must give two texts for each pair, got 3"),
            (["--base_dtype", "bfloat16", "--method", "full"], "is for --method houlsby or lora, .*; got full"),
            (["--base_dtype", "bfloat16", "--method", "top_k", "--top_k", 1], "got top_k. Leave it out"),
        ],
    )
    def test_what_does_not_go_together(self, flags, message):
        with pytest.raises(RecipeError, match=message):
            run(glue, "--task", "rte", *flags)


class TestPrecision:
    def test_a_base_in_bfloat16_with_adapters_in_float32(self, encoder, data, tmp_path):
        for dtype in ("float32", "bfloat16"):
            flags = ["--task", "rte", "--head", "two_layer", "--base_dtype", dtype, "--logging_steps", 1]
            short(encoder, data, tmp_path / dtype, *flags, "--save_total_limit", 2)
        weights = load_file(tmp_path / "bfloat16" / "adapter" / "adapter_model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {torch.float32}
        losses = [results_of(tmp_path / dtype)["best_scores"]["loss"] for dtype in ("float32", "bfloat16")]
        assert losses[0] != losses[1]
        assert losses[1] == pytest.approx(losses[0], rel=0.02)

    @pytest.mark.parametrize("method", ["houlsby", "lora"])
    def test_what_is_trained_of_such_a_model_is_float32(self, method):
        config = HoulsbyConfig(task_type="SEQ_CLS")
        model = apply_method(tiny_bert().bfloat16(), MethodArguments(method, base_dtype="bfloat16"), config)
        dtypes = {weight.dtype for weight in model.parameters() if weight.requires_grad}
        assert dtypes == {torch.float32}
        frozen = model.get_base_model().bert.encoder.layer[0].intermediate.dense.weight
        assert frozen.dtype == torch.bfloat16
        output = model(input_ids=torch.ones(2, 5, dtype=torch.long), labels=torch.tensor([0, 1]))
        assert output.loss.dtype == torch.float32

    @pytest.mark.parametrize("method", ["houlsby", "lora"])
    def test_an_evaluation_has_the_precision_of_the_training(self, encoder, data, tmp_path, method):
        short(encoder, data, tmp_path / "run", "--task", "rte", "--method", method, "--base_dtype", "bfloat16")
        flags = ["--task", "rte", "--data_dir", data, "--use_cpu", "--evaluate", tmp_path / "run"]
        expected = results_of(tmp_path / "run")["best_scores"]
        for dtype, tolerance in (("auto", 1e-5), ("float32", 0.02)):
            run(glue, *flags, "--base_dtype", dtype, "--output_dir", tmp_path / dtype)
            found = json.loads((tmp_path / dtype / "evaluation.json").read_text())["scores"]
            assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        assert found["loss"] != pytest.approx(expected["loss"], rel=1e-5)

    def test_mixed_precision(self, encoder, data, tmp_path):
        short(encoder, data, tmp_path, "--task", "rte", "--bf16")
        assert results_of(tmp_path)["strategy"]["mixed_precision"] == "bf16"
        weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_accumulated_gradients_give_the_same_weights(data, tmp_path):
    """24 rows at once, or in 4 batches of 6."""
    encoder = save_tiny_encoder(tmp_path / "encoder", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    flags = ["--task", "rte", "--train_sampling_strategy", "sequential", "--learning_rate", 1e-3, "--max_grad_norm", 0]
    for size, parts in ((24, 1), (6, 4), (6, 1)):
        batches = ["--per_device_train_batch_size", size, "--gradient_accumulation_steps", parts]
        short(encoder, data, tmp_path / f"{size} x {parts}", *flags, *batches)
    once, in_parts, smaller = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("24 x 1", "6 x 4", "6 x 1")
    )
    assert max((in_parts[name] - once[name]).abs().max() for name in once) < 1e-5
    assert max((smaller[name] - once[name]).abs().max() for name in once) > 1e-4


def test_compiled_models_are_saved_under_their_own_names(encoder, data, tmp_path):
    """By the backend that traces and compiles nothing, as others need a compiler."""
    short(encoder, data, tmp_path, "--task", "rte", "--torch_compile", "--torch_compile_backend", "eager")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=2).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    batch = tokenizer(*texts(TASKS["rte"]).values(), padding=True, return_tensors="pt")
    with torch.no_grad():
        loss = model(**batch, labels=torch.arange(ROWS) % 2).loss
    assert results_of(tmp_path)["best_scores"]["loss"] == pytest.approx(loss.item(), rel=1e-4)


class TestTrackers:
    def test_tensorboard(self, encoder, data, tmp_path, monkeypatch):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "log"))
        short(encoder, data, tmp_path / "run", "--task", "rte", "--report_to", "tensorboard", "--logging_steps", 1)
        events = EventAccumulator(str(tmp_path / "log"))
        events.Reload()
        assert {"train/loss", "train/learning_rate", "eval/accuracy"} <= set(events.Tags()["scalars"])
        accuracies = [event.value for event in events.Scalars("eval/accuracy")]
        assert max(accuracies) == pytest.approx(results_of(tmp_path / "run")["best_score"])
        assert [event.step for event in events.Scalars("train/loss")] == [1, 2]

    def test_trackio(self, encoder, data, tmp_path, monkeypatch):
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
        pytest.importorskip("trackio", reason="needs trackio, of the extra 'recipes', which is not installed")
        flags = ["--report_to", "trackio", "--project", "study", "--run_name", "rte", "--logging_steps", 1]
        short(encoder, data, tmp_path / "run", "--task", "rte", *flags)
        [base] = (tmp_path / "trackio").rglob("study*.db")
        with closing(sqlite3.connect(base)) as connection:
            logged = [json.loads(row[0]) for row in connection.execute("select metrics from metrics order by id")]
        assert len([entry for entry in logged if "train/loss" in entry]) == 2
        accuracies = [entry["eval/accuracy"] for entry in logged if "eval/accuracy" in entry]
        assert max(accuracies) == results_of(tmp_path / "run")["best_score"]


class TestMistakes:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda rows: rows.rename(columns={"sentence1": "text"}), "rte train lacks the column 'sentence1'"),
            (lambda rows: rows.assign(label=7), "rte train: label must be a whole number from 0 to 1, row 0 has 7"),
            (lambda rows: rows[:0], r"train.parquet .*: it has no rows"),
        ],
        ids=["column", "label", "empty split"],
    )
    def test_in_the_data(self, encoder, tmp_path, change, message):
        rows = pd.DataFrame({**texts(TASKS["rte"]), "label": np.arange(ROWS) % 2})
        write(tmp_path / "rte" / "train.parquet", change(rows))
        write(tmp_path / "rte" / "validation.parquet", rows)
        with pytest.raises(RecipeError, match=message):
            short(encoder, tmp_path, tmp_path / "run", "--task", "rte")

    def test_a_test_split_whose_rows_are_shuffled(self, encoder, data, tmp_path):
        for split in ("train", "validation"):
            write(tmp_path / "rte" / f"{split}.parquet", pd.read_parquet(data / "rte" / f"{split}.parquet"))
        write(tmp_path / "rte" / "test.parquet", pd.read_parquet(data / "rte" / "test.parquet")[::-1])
        with pytest.raises(RecipeError, match="rte test: idx must count the rows from 0, in their order"):
            short(encoder, tmp_path, tmp_path / "run", "--task", "rte", "--predict")

    def test_predictions_need_a_task_of_glue(self, encoder, tmp_path):
        flags = ["--model_name", encoder, "--use_cpu", "--max_steps", 1, "--output_dir", tmp_path, "--predict"]
        with pytest.raises(RecipeError, match="--predict needs a task of GLUE"):
            run(glue, *flags)

    def test_fewer_training_examples(self, encoder, data, tmp_path, capsys):
        short(encoder, data, tmp_path, "--task", "rte", "--max_train_samples", 10)
        assert "rte: 10 training examples" in capsys.readouterr().out
        assert results_of(tmp_path)["dataset"]["rows"] == {"train": 10, "validation": ROWS}
