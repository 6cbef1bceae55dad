"""`houlsby-peft train`, `check` and `evaluate` start the recipes, from any folder."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from demo import minimal_pairs
from houlsby_peft_cli import main
from recipe_runs import write


ROOT = Path(__file__).parents[2]
SENTENCES = minimal_pairs()["train"]["sentence"][:60]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder of its own, and in this process the recipe that the command
    becomes.
    """
    monkeypatch.chdir(tmp_path)

    def become(python, words):
        monkeypatch.setattr(sys, "argv", words[1:])
        runpy.run_path(words[1], run_name="__main__")

    def run(*words):
        monkeypatch.setattr(os, "execv", become)
        try:
            main([*map(str, words)])
        except SystemExit as stopped:
            return stopped.code or "", capsys.readouterr().out
        return "", capsys.readouterr().out

    return run


def test_train_and_evaluate_from_another_folder(encoder, command, tmp_path):
    """The encoding of the system lacks a letter of a class."""
    write(tmp_path / "tickets.csv", text=SENTENCES, label=["ґ", "bad", "ґ"] * 20)
    write(tmp_path / "new.csv", text=SENTENCES[:9], label=["ґ", "bad", "ґ"] * 3)
    flags = ("--model_name", encoder, "--r", 4, "--num_train_epochs", 1, "--use_cpu")
    words = [sys.executable, "-m", "houlsby_peft_cli", "train", "tickets.csv", *map(str, flags)]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {**os.environ, **ascii_only, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tickets"
    assert json.loads((run / "results.json").read_text())["arguments"]["r"] == 4
    assert str(Path("runs", "tickets", "mistakes.csv")) in done.stdout
    stopped, printed = command("check", "tickets.csv", "--model_name", encoder, "--use_cpu")
    assert stopped == ""
    assert "of 60 labels are doubtful: runs/tickets/label_issues.csv" in printed
    assert (run / "label_issues.csv").exists()
    assert command("evaluate", "runs/tickets", "new.csv", "--use_cpu")[0] == ""
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["per_class"]["scores"]["bad"]["support"] == 3
    mistakes = pd.read_csv(run / "evaluation" / "mistakes.csv")
    assert evaluation["scores"]["accuracy"] == pytest.approx(1 - len(mistakes) / 9)
    lines = (tmp_path / "new.csv").read_text().splitlines()
    for where, text in zip(mistakes["row"], mistakes["text"], strict=True):
        assert lines[int(where) - 1].startswith(text)


def test_help_and_mistakes(command):
    assert "--label_columns" in command("train", "--help")[1]
    assert "--warmup_steps" in command("train", "--help-all")[1]
    assert command("train")[0].startswith("error: The data are missing")
    error, _ = command("train", "nothing.csv")
    assert error.startswith("error: ")
    assert "nothing.csv" in error
    assert len(error.splitlines()) == 1
