"""Runs that are killed, started again, finished, or begun anew; and what stops a run for good."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import glue
from recipe_runs import run, save_tiny_encoder
from tasks.minimal_pairs import minimal_pairs
from training.arguments import RecipeTrainingArguments
from training.errors import RecipeError, is_full_disk
from training.runs import changed_arguments


RECIPE = Path(__file__).parents[2] / "recipes" / "glue.py"
STEPS_PER_EPOCH = 12


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """A task for a tiny model, with dropout: 6 epochs of 12 steps."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "data" / "cola").mkdir(parents=True)
    for split in ("train", "validation"):
        frame = minimal_pairs()[split].select(range(8 * STEPS_PER_EPOCH)).to_pandas()[["sentence", "label"]]
        frame.to_csv(folder / "data" / "cola" / f"{split}.csv", index=False)
    model = save_tiny_encoder(folder / "model")
    flags = [
        "--task",
        "cola",
        "--data_dir",
        folder / "data",
        "--model_name",
        model,
        "--use_cpu",
        "--disable_tqdm",
        True,
    ]
    return [*flags, "--num_train_epochs", 6, "--learning_rate", 1e-3, "--per_device_train_batch_size", 8]


def weights(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def scores(folder):
    epochs = json.loads((folder / "results.json").read_text())["epochs"]
    seconds = [epoch.pop("seconds") for epoch in epochs]
    assert seconds == sorted(seconds), "the time of training goes on where the run does"
    return epochs


def in_a_checkpoint(folder):
    """A checkpoint is being written, and there is a whole one before it, of a later epoch than the first."""
    unfinished = [path for path in folder.glob("checkpoint-*") if not (path / "trainer_state.json").exists()]
    written = any((path / "adapter_model.safetensors").exists() for path in unfinished)
    return written and last_step(folder) > STEPS_PER_EPOCH


def last_step(folder):
    whole = [path.parent.name for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max((int(name.removeprefix("checkpoint-")) for name in whole), default=0)


def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(flags, tmp_path):
    """In the middle of epochs, as 5 does not divide 12; in the order of length groups; with accumulated gradients."""
    command = [
        *flags,
        *("--save_strategy", "steps", "--save_steps", 5, "--eval_strategy", "steps", "--eval_steps", 5),
        *("--gradient_accumulation_steps", 2, "--per_device_train_batch_size", 4, "--base_dtype", "float32"),
    ]
    run(glue, *command, "--output_dir", tmp_path / "whole")
    folder = tmp_path / "killed"
    kill_when([sys.executable, RECIPE, *map(str, command), "--output_dir", folder], lambda: in_a_checkpoint(folder))
    assert not (folder / "results.json").exists()

    run(glue, *command, "--output_dir", folder)
    assert_equal(weights(folder), weights(tmp_path / "whole"))
    assert scores(folder) == scores(tmp_path / "whole")


def kill_when(command, condition):
    """Starts a run and ends it by SIGKILL, which no process can see coming."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


class TestTheFolderOfARun:
    def test_a_finished_run_is_left_as_it_is(self, flags, tmp_path, capsys):
        short = [*flags, "--max_steps", 2, "--output_dir", tmp_path]
        run(glue, *short)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        run(glue, *short, "--logging_steps", 1)  # which does not change what is learned
        assert "holds this run, finished: nothing is trained" in capsys.readouterr().out
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before

    def test_other_arguments(self, flags, tmp_path):
        run(glue, *flags, "--max_steps", 2, "--output_dir", tmp_path)
        first = (tmp_path / "results.json").read_text()
        other = [*flags, "--max_steps", 2, "--output_dir", tmp_path, "--learning_rate", 2e-3]
        with pytest.raises(
            RecipeError, match=r"holds a run with other arguments: learning_rate was 0.001, is 0.002\."
        ):
            run(glue, *other)
        assert (tmp_path / "results.json").read_text() == first
        run(glue, *other, "--overwrite_output_dir")
        again = json.loads((tmp_path / "results.json").read_text())
        assert again["arguments"]["learning_rate"] == 2e-3
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]

    def test_a_folder_of_an_unknown_run(self, flags, tmp_path):
        (tmp_path / "results.json").write_text("{}")
        with pytest.raises(RecipeError, match="holds a run with unknown arguments"):
            run(glue, *flags, "--output_dir", tmp_path)

    def test_last_goes_on_with_other_arguments(self, flags, tmp_path):
        """A command that is refused leaves the finished run as it is."""
        run(glue, *flags, "--max_steps", 12, "--output_dir", tmp_path)
        more = [*flags, "--max_steps", 18, "--output_dir", tmp_path, "--resume_from_checkpoint", "last"]
        with pytest.raises(RecipeError, match="--data_dir"):
            run(glue, *more, "--task", "minimal_pairs")
        assert [entry["step"] for entry in scores(tmp_path)] == [12]
        run(glue, *more)
        assert [entry["step"] for entry in scores(tmp_path)] == [12, 18]

    def test_a_checkpoint_that_is_not_there(self, flags, tmp_path):
        with pytest.raises(RecipeError, match=r"the folder of a checkpoint, or 'last', got .*checkpoint-7"):
            run(glue, *flags, "--output_dir", tmp_path, "--resume_from_checkpoint", tmp_path / "checkpoint-7")

    def test_what_counts_as_other_arguments(self):
        now = {"learning_rate": 1.0, "r": 8, "logging_steps": 5, "hub_model_id": "a", "seed": 1}
        before = {"learning_rate": 1.0, "r": 4, "logging_steps": 50, "hub_model_id": None, "gone": 2}
        assert changed_arguments(before, now) == ["gone was 2, is None", "r was 4, is 8", "seed was None, is 1"]
        # Of the data loader, the examples and their order change what is learned.
        names = [field.name for field in fields(RecipeTrainingArguments) if field.name.startswith("dataloader_")]
        changed = changed_arguments(dict.fromkeys(names), dict.fromkeys(names, 1))
        assert changed == ["dataloader_drop_last was None, is 1", "dataloader_in_order was None, is 1"]


def test_early_stopping_counts_on_after_a_crash(flags, tmp_path):
    """With a rate of almost 0 no epoch is better than the first: two more are scored, whatever happens between."""
    command = [*flags, "--learning_rate", 1e-60, "--early_stopping_patience", 2, "--save_total_limit", 3]
    run(glue, *command, "--output_dir", tmp_path)
    assert [entry["epoch"] for entry in scores(tmp_path)] == [1, 2, 3]
    (tmp_path / "results.json").unlink()
    shutil.rmtree(tmp_path / f"checkpoint-{3 * STEPS_PER_EPOCH}")
    assert last_step(tmp_path) == 2 * STEPS_PER_EPOCH
    run(glue, *command, "--output_dir", tmp_path)
    assert [entry["epoch"] for entry in scores(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("end", "steps"),
    [
        (("--max_steps", 10, "--eval_strategy", "steps", "--eval_steps", 5, "--save_strategy", "steps"), [5, 10]),
        (("--num_train_epochs", 2), [12, 24]),
        (("--early_stopping_patience", 1), [12, 24]),
    ],
    ids=["in an epoch", "epochs", "stopped early"],
)
def test_a_run_takes_no_step_after_its_last(flags, tmp_path, end, steps):
    """With a rate of almost 0, the first evaluation is the best; its checkpoint is found where the folder is now."""
    command = [*flags, "--learning_rate", 1e-60, "--save_total_limit", 3, *end]
    run(glue, *command, "--output_dir", tmp_path / "before")
    expected = scores(tmp_path / "before")
    assert [entry["step"] for entry in expected] == steps
    (tmp_path / "before" / "results.json").unlink()
    (tmp_path / "before").rename(tmp_path / "after")
    run(glue, *command, "--output_dir", tmp_path / "after")
    assert scores(tmp_path / "after") == expected
    results = json.loads((tmp_path / "after" / "results.json").read_text())
    assert results["best_epoch"] == expected[0]["epoch"]
    # More patience continues.
    if "--early_stopping_patience" in end:
        more = ("--early_stopping_patience", 2, "--resume_from_checkpoint", "last")
        run(glue, *command, *more, "--output_dir", tmp_path / "after")
        assert [entry["step"] for entry in scores(tmp_path / "after")] == [*steps, 36]


def test_a_loss_that_is_no_number_stops_the_run(flags, tmp_path):
    with pytest.raises(
        RecipeError, match=r"loss is nan at step [2-9], with the learning rate .*e\+\d+ of at most 1e\+30"
    ):
        run(glue, *flags, "--learning_rate", 1e30, "--warmup_steps", 0, "--output_dir", tmp_path)
    assert not (tmp_path / "results.json").exists()


def can_mount():
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a small file system")
@pytest.mark.parametrize("kilobytes", [100, 350], ids=["in the adapter", "in the optimizer's state"])
def test_a_full_disk_is_one_line(flags, tmp_path, kilobytes):
    """On a file system of that size; each library that writes has errors of its own."""
    mount = f"mount -t tmpfs -o size={kilobytes}k tmpfs {tmp_path}"
    command = shlex.join([sys.executable, *map(str, [RECIPE, *flags, "--max_steps", 1, "--output_dir", tmp_path])])
    process = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount} && {command}"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    assert re.match(r"error: The disk is full: .+; the same command then resumes", process.stderr.splitlines()[-1])
    assert "Traceback" not in process.stderr


def test_other_errors_are_not_taken_for_a_full_disk():
    assert not is_full_disk(OSError(errno.EACCES, "Permission denied"))
    assert not is_full_disk(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert is_full_disk(OSError(errno.ENOSPC, "No space left on device"))
