"""GLUE: its metrics, its files, short runs against plain PyTorch, the papers' presets, and
submissions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from peft import get_peft_model
from sklearn import metrics
from transformers import (
    AutoTokenizer,
    EvalPrediction,
    TrainerControl,
    TrainerState,
)

import glue
from demo import minimal_pairs
from houlsby_peft import HoulsbyConfig
from recipe_runs import logits_of, results_of, run, write
from run.edge import RecipeError
from run.resumable_trainer import Patience
from run.trainer import RecipeTrainer
from run.training_arguments import RecipeTrainingArguments
from tasks.glue_tasks import (
    TASKS,
    TEST_SETS,
    numeric_labels,
    parse_arguments,
)


SENTENCES = minimal_pairs()["train"]["sentence"][:]


def glue_scores(task: str, predictions: list, references: list) -> dict[str, float]:
    """The scores of outputs that give these predictions."""
    outputs = np.array(predictions)[:, None] if task == "stsb" else np.eye(2)[predictions]
    return TASKS[task].score(EvalPrediction(outputs, np.array(references)))


class TestMetric:
    def test_scores(self):
        """By hand: of two predicted and two true pairs one is right."""
        for task in ("mrpc", "qqp"):
            assert glue_scores(task, [1, 1, 0, 0], [1, 0, 1, 0]) == {"f1": 0.5, "accuracy": 0.5}
        predictions, references = [1.0, 2.0, 4.0, 3.0], [0.0, 1.0, 3.0, 5.0]
        expected = {
            "spearmanr": 1 - 6 * 2 / (4 * 15),  # of the ranks, of which two are exchanged
            "pearson": np.corrcoef(predictions, references)[0, 1],
        }
        assert glue_scores("stsb", predictions, references) == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("task", "predictions", "expected"),
        [
            ("cola", [1, 1, 1, 1], {"matthews_correlation": 0.0, "accuracy": 0.5}),
            ("mrpc", [0, 0, 0, 0], {"f1": 0.0, "accuracy": 0.5}),
            ("stsb", [2.0, 2.0, 2.0, 2.0], {"spearmanr": 0.0, "pearson": 0.0}),
        ],
    )
    def test_scores_without_a_value_are_zero(self, task, predictions, expected):
        assert glue_scores(task, predictions, [1, 0, 1, 0]) == expected

    def test_outputs_that_are_no_numbers(self):
        with pytest.raises(RecipeError, match="has diverged"):
            TASKS["stsb"].score(EvalPrediction(np.array([[np.nan]]), np.array([1.0])))


class TestData:
    @pytest.mark.parametrize(
        ("labels", "number", "message"),
        [
            ([0, 1, -1], 2, "from 0 to 1, row 2 has -1"),
            ([0, 2], 2, "row 1 has 2"),
            ([0.5, 1], 2, "0.5"),
            (["1", "x"], 2, "class label x"),
            ([0.0, 5.5], 1, "from 0 to 5, row 1 has 5.5"),
        ],
    )
    def test_labels_out_of_range(self, labels, number, message):
        with pytest.raises((RecipeError, ValueError), match=message):
            numeric_labels(
                Dataset.from_dict({"label": labels}), "cola train", ["no", "yes"][:number]
            )

    def test_an_analysis_reads_no_training_examples(self, tmp_path):
        for split in ("validation_matched", "validation_mismatched"):
            write(tmp_path / "mnli" / f"{split}.csv", premise=["a"], hypothesis=["b"], label=[0])
        assert set(TASKS["mnli"].load(str(tmp_path), trains=False).splits) == set(
            TASKS["mnli"].validation_splits
        )

    @pytest.mark.parametrize(
        ("flags", "word"),
        [
            ("--task rte --data_dir {folder}", "has no rte"),
            ("--task rte --model_name /no/such/model", "--model_name"),
            ("--task cola --metric_for_best_model f1", "matthews_correlation"),
            ("--task cola --data_dir {folder} --predict", r"cola/test\.parquet"),
            ("--task cola --preset han2021 --gradient_accumulation_steps 3", "3 accumulated steps"),
        ],
    )
    def test_mistakes_in_a_command(self, flags, word, glue_data):
        with pytest.raises(RecipeError, match=word):
            parse_arguments(flags.format(folder=glue_data).split())


class TestRuns:
    def test_of_equal_scores_the_lower_loss_is_better(self, tmp_path):
        """It is kept; only one that is lower by more than 0.01 keeps the training going."""
        trainer, patience = object.__new__(RecipeTrainer), Patience(2)
        trainer.callback_handler = SimpleNamespace(callbacks=[patience])
        trainer.control = TrainerControl()
        trainer.args = RecipeTrainingArguments(
            str(tmp_path), metric_for_best_model="accuracy", save_strategy="epoch"
        )
        for loss, accuracy, best, waits in (
            (0.8, 0.9, 10, 0),
            (0.995, 0.9, 10, 1),
            (1.2, 0.9, 5, 2),
            (0.8, 0.8, 5, 3),
            (1.2, 0.95, 10, 0),
        ):
            trainer.state = TrainerState(global_step=10, best_metric=0.9, best_global_step=5)
            trainer.state.log_history = [
                {"step": 5, "loss": 9.0},
                {"step": 5, "eval_loss": 1.0, "eval_accuracy": 0.9},
            ]
            is_best = trainer._determine_best_metric(
                {"eval_loss": loss, "eval_accuracy": accuracy}, None
            )
            assert (trainer.state.best_global_step, is_best) == (best, best == 10)
            assert patience.early_stopping_patience_counter == waits
            assert trainer.control.should_training_stop == (waits >= 2)
            trainer.control.should_training_stop = False
        of_squad = [{"step": 5, "eval_f1": 0.9}]
        trainer.args.metric_for_best_model = "f1"
        trainer.state = TrainerState(
            global_step=10, best_metric=0.9, best_global_step=5, log_history=of_squad
        )
        assert not trainer._determine_best_metric({"eval_f1": 0.9}, None), "there is no loss"
        trainer.args.metric_for_best_model = "main"
        training = trainer.args.choosing_by(["mean_absolute_error"], "runs")
        assert not training.greater_is_better
        assert trainer.args.metric_for_best_model == "main", "the command's own stays"

    def test_the_saved_adapter_has_the_best_epochs_score(self, encoder, glue_data, tmp_path):
        run(glue, task="cola", data_dir=glue_data, model_name=encoder, seed=2, num_train_epochs=4,
            learning_rate=3e-2, lr_scheduler_type="constant", per_device_train_batch_size=8,
            output_dir=tmp_path)  # fmt: skip
        results = results_of(tmp_path)
        scores = {entry["epoch"]: entry["matthews_correlation"] for entry in results["epochs"]}
        assert list(scores) == [1, 2, 3, 4]
        assert scores[results["best_epoch"]] == max(scores.values()) == results["best_score"]
        rows = pd.read_csv(glue_data / "cola" / "validation.csv")
        predicted = logits_of(encoder, tmp_path / "adapter", 2, rows["sentence"]).argmax(-1)
        expected = metrics.matthews_corrcoef(rows["label"], predicted)
        assert results["best_score"] == pytest.approx(expected, abs=1e-12)
        # AutoModel would look for base weights beside it.
        assert not (tmp_path / "adapter" / "config.json").exists()
        assert {"python", "torch", "transformers", "peft", "houlsby_peft"} <= {*results["versions"]}

    def test_a_regression(self, encoder, tmp_path):
        """A score that the task lacks does not choose: its own does."""
        texts, labels = (SENTENCES[:64], SENTENCES[64:128]), np.arange(64) % 6 * 1.0
        for split in ("train", "validation"):
            table = tmp_path / "stsb" / f"{split}.csv"
            write(table, sentence1=texts[0], sentence2=texts[1], label=labels)
        run(glue, task="stsb", data_dir=tmp_path, model_name=encoder, num_train_epochs=1,
            output_dir=tmp_path / "{task}-run", metric_for_best_model="accuracy")  # fmt: skip
        results = results_of(tmp_path / "stsb-run")
        outputs = logits_of(encoder, tmp_path / "stsb-run" / "adapter", 1, *texts)[:, 0]
        [epoch] = results["epochs"]
        assert epoch["pearson"] == pytest.approx(np.corrcoef(outputs, labels)[0, 1], abs=1e-5)
        assert results["chosen_by"] == "spearmanr"

    def test_both_validation_splits_of_mnli_and_their_tests(self, encoder, tmp_path):
        texts, labels = (SENTENCES[:48], SENTENCES[48:96]), np.arange(48) % 3
        splits = {"train": 48, "validation_matched": 30, "validation_mismatched": 48}
        for split, rows in splits.items():
            write(tmp_path / "mnli" / f"{split}.csv", premise=texts[0][:rows],
                  hypothesis=texts[1][:rows], label=labels[:rows])  # fmt: skip
        of_tests = (SENTENCES[:9], SENTENCES[9:18])
        for split in ("mnli/test_matched", "mnli/test_mismatched", "ax/test"):
            table = tmp_path / f"{split}.csv"
            write(table, premise=of_tests[0], hypothesis=of_tests[1], idx=range(9))
        command = {"task": "mnli", "data_dir": tmp_path, "output_dir": tmp_path / "run"}
        run(glue, **command, model_name=encoder, max_steps=2, share_layers=3, predict=True)
        results = results_of(tmp_path / "run")
        [epoch] = results["epochs"]
        adapter = tmp_path / "run" / "adapter"
        right = logits_of(encoder, adapter, 3, *texts).argmax(-1) == labels
        assert epoch["matched_accuracy"] == results["best_score"] == right[:30].mean()
        assert epoch["mismatched_accuracy"] == right.mean()

        names, outputs = TASKS["mnli"].labels, logits_of(encoder, adapter, 3, *of_tests)
        expected = ["index\tprediction"]
        expected += [f"{row}\t{names[number]}" for row, number in enumerate(outputs.argmax(-1))]
        submission = tmp_path / "run" / "submission"
        written = {path.name: path.read_text().splitlines() for path in submission.iterdir()}
        assert written == dict.fromkeys(("MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"), expected)

        run(glue, **command, evaluate=tmp_path / "run", predict=True)
        evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
        assert evaluation["scores"] == pytest.approx(results["best_scores"], rel=1e-5)
        again = tmp_path / "run" / "evaluation" / "submission" / "AX.tsv"
        assert again.read_text().splitlines() == expected

    def test_several_tasks(self, encoder, glue_data, tmp_path, monkeypatch):
        """All of two: their folders, and both averages, which need all nine."""
        data = tmp_path / "data"
        two = [replace(TASKS[name], data_dir=str(data)) for name in ("cola", "rte")]
        monkeypatch.setattr(glue, "find_tasks", lambda _: two)
        monkeypatch.setattr("tasks.glue_tasks.find_tasks", lambda _: [])
        for split in ("train", "validation"):
            write(data / "rte" / f"{split}.csv", sentence1=SENTENCES[:16],
                  sentence2=SENTENCES[16:32], label=[0, 1] * 8)  # fmt: skip
        (data / "cola").symlink_to(glue_data / "cola")
        runs = tmp_path / "runs"
        run(glue, task="all", data_dir=data, model_name=encoder, max_steps=1, output_dir=runs)
        table = json.loads((runs / "all.json").read_text())
        assert table["scores"]["rte"] == results_of(runs / "rte")["best_scores"]
        assert table["server_average"] is None

    @pytest.mark.parametrize(
        ("given", "named"), [("user/one", "user/one-cola"), ("user/{task}-a", "user/cola-a")]
    )
    def test_each_of_several_tasks_has_its_own_repository(self, given, named):
        flags = ["--task", "all", "--hub_model_id", given, "--output_dir", "runs"]
        command = parse_arguments(flags)
        training = command.of_several().for_task("cola").training
        assert (training.output_dir, training.hub_model_id) == ("runs/cola", named)

    def test_accumulated_steps_report_the_models_loss(self, encoder, glue_data, tmp_path):
        """Untouched, the Trainer would report the loss times the number of accumulated steps."""
        run(glue, task="cola", data_dir=glue_data, model_name=encoder, max_steps=1,
            gradient_accumulation_steps=4, per_device_train_batch_size=16, logging_steps=1,
            output_dir=tmp_path)  # fmt: skip
        state = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
        assert 0.3 < state["log_history"][0]["loss"] < 1.2

    def test_the_order_of_the_rows(self, encoder, tmp_path):
        """That of training depends on the seed of the data, or --seed."""
        tokenizer = AutoTokenizer.from_pretrained(encoder)
        task = replace(TASKS["cola"], splits={"test": minimal_pairs()["test"].shuffle(seed=0)})
        model, _ = task.load_model(str(encoder), "float32")
        model = get_peft_model(model, HoulsbyConfig())
        rows = task.encode(task.splits["test"], "test", tokenizer, 32)

        def trainer(**seeds):
            training = RecipeTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **seeds)
            options = {"data_collator": task.collator(tokenizer), "processing_class": tokenizer}
            return RecipeTrainer(model, training, train_dataset=rows, eval_dataset=rows, **options)

        seeds = ({"seed": 1, "data_seed": 2}, {"seed": 3, "data_seed": 2}, {"seed": 2}, {"seed": 3})
        orders = [list(trainer(**of_run)._get_train_sampler()) for of_run in seeds]
        assert orders[0] == orders[1] == orders[2] != orders[3]


def parsed(flags: str) -> dict[str, object]:
    """All arguments that the command line gives for CoLA, in one."""
    arguments = {}
    for group in parse_arguments(["--task", "cola", *flags.split()]):
        arguments |= vars(group)
    return arguments


class TestPresets:
    def test_flags_overrule(self):
        arguments = parsed("--preset houlsby2019 --learning_rate=3e-3 --r 8")
        expected = {"learning_rate": 3e-3, "r": 8, "num_train_epochs": 20}
        assert expected.items() <= arguments.items()

    @pytest.mark.parametrize(
        ("flags", "head", "norm", "rate"),
        [
            ("", "two_layer", "true", 3e-4),
            ("--share_layers 3", "linear", "false", 3e-4),
            ("--method lora", "linear", "true", 3e-4),
            ("--method full", "linear", "true", 3e-5),
        ],
    )
    def test_what_depends_on_the_method(self, flags, head, norm, rate):
        arguments = parsed(f"--preset mohebbi2020 {flags}")
        expected = {"head": head, "train_layer_norm": norm, "learning_rate": rate}
        assert expected.items() <= arguments.items()

    @pytest.mark.parametrize(
        ("flags", "pooler", "rate"),
        [
            ("", True, 1e-3),
            ("--train_pooler false --learning_rate 3e-4", False, 3e-4),
            ("--method full --learning_rate 3e-5", False, 3e-5),
            ("--method lora", True, 3e-4),
            ("--preset houlsby2019", True, 3e-4),
        ],
    )
    def test_of_the_packaged_encoder(self, flags, pooler, rate):
        arguments = parsed(f"--model_name minilm {flags}")
        assert (arguments["train_pooler"], arguments["learning_rate"]) == (pooler, rate)

    @pytest.mark.parametrize(
        ("flags", "processes", "size"),
        [
            ("", 1, 32),
            ("", 2, 16),
            ("--gradient_accumulation_steps 4", 2, 4),
            ("--per_device_train_batch_size 5 --gradient_accumulation_steps 3", 1, 5),
        ],
    )
    def test_the_batch_is_split(self, monkeypatch, flags, processes, size):
        monkeypatch.setattr("run.presets.os.environ", {"WORLD_SIZE": str(processes)})
        for name in ("_prepare_processors", "_check_processes"):  # which look for the others
            monkeypatch.setattr(RecipeTrainingArguments, name, lambda self: None)
        assert parsed(f"--preset han2021 {flags}")["per_device_train_batch_size"] == size


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CoLA", ["0", "1"]),
        ("RTE", ["entailment", "not_entailment"]),
        ("STS-B", ["0.0000", "5.0000"]),
    ],
)
def test_what_the_server_reads(name, words):
    """Words for entailment in three tasks, 1 for the second class in the others, and similarities
    in their range.
    """
    outputs = np.array([[-3.0], [7.5]]) if name == "STS-B" else np.eye(2)
    assert TEST_SETS[name].table(outputs).to_dict("list") == {"index": [0, 1], "prediction": words}


def test_all_test_sets_of_the_server():
    """In the zip of all tasks there is one file of each."""
    assert len(TEST_SETS) == 11
    assert {test_set.task for test_set in TEST_SETS.values()} == set(TASKS)
