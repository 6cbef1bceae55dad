"""`houlsby-peft train` and `evaluate` start the recipes, from any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from demo import minimal_pairs
from recipe_runs import write


ROOT = Path(__file__).parents[2]
SENTENCES = minimal_pairs()["train"]["sentence"][:60]


def command(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "houlsby_peft_cli", *map(str, words)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_train_and_evaluate_from_another_folder(encoder, tmp_path):
    write(tmp_path / "tickets.csv", text=SENTENCES, label=["good", "bad", "good"] * 20)
    write(tmp_path / "new.csv", text=SENTENCES[:9], label=["good", "bad", "good"] * 3)
    flags = ("--model_name", encoder, "--r", 4, "--num_train_epochs", 1, "--use_cpu")
    status, printed, error = command(tmp_path, "train", "tickets.csv", *flags)
    assert status == 0, error
    run = tmp_path / "runs" / "tickets"
    assert json.loads((run / "results.json").read_text())["arguments"]["r"] == 4
    assert str(Path("runs", "tickets", "mistakes.csv")) in printed
    status, printed, error = command(tmp_path, "evaluate", "runs/tickets", "new.csv", "--use_cpu")
    assert status == 0, error
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["per_class"]["scores"]["bad"]["support"] == 3
    mistakes = pd.read_csv(run / "evaluation_mistakes.csv")
    assert evaluation["scores"]["accuracy"] == pytest.approx(1 - len(mistakes) / 9)
    lines = (tmp_path / "new.csv").read_text().splitlines()
    for where, text in zip(mistakes["row"], mistakes["text"], strict=True):
        assert lines[int(where.removeprefix("line ")) - 1].startswith(text)


def test_help_and_mistakes(tmp_path):
    assert "--label_columns" in command(tmp_path, "train", "--help")[1]
    assert "--warmup_steps" in command(tmp_path, "train", "--help-all")[1]
    assert command(tmp_path, "train")[2].startswith("error: The data are missing")
    status, _, error = command(tmp_path, "train", "nothing.csv")
    assert status == 1
    assert "nothing.csv" in error
    assert len(error.splitlines()) == 1
