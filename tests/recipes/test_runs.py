"""A run in its folder: when it is the same one, resumed bit for bit, finished, or refused; and how
it ends early.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers.trainer_pt_utils import LengthGroupedSampler

import glue
import killed_runs
from edited_json import edited_json
from killed_runs import forked, status_of
from recipe_runs import results_of, run, write
from run import progress
from run.checkpoints import COMPLETE, step_of
from run.edge import RecipeError, end_with_one_line
from run.resumable_trainer import OrderOfEpoch
from run.run import CONTENT, command_line, describe_content, differences, lock


STEPS_PER_EPOCH = 12
BY_STEPS = {"save_strategy": "steps", "eval_strategy": "steps"}


@pytest.fixture(scope="module")
def flags(encoder, glue_data):
    """A task for a tiny model with dropout: 12 steps in an epoch."""
    return {"task": "cola", "data_dir": glue_data, "model_name": encoder, "num_train_epochs": 6,
            "learning_rate": 1e-3, "per_device_train_batch_size": 8}  # fmt: skip


@pytest.fixture(scope="module")
def finished(flags, tmp_path_factory):
    """The folder of a finished run of 12 steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(glue, **flags, max_steps=12, output_dir=folder)
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def weights(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def scores(folder):
    epochs = results_of(folder)["epochs"]
    seconds = [epoch.pop("seconds") for epoch in epochs]
    assert seconds == sorted(seconds), "the time of training goes on where the run does"
    return epochs


def last_step(folder):
    whole = [path.parent.name for path in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return max((int(name.removeprefix("checkpoint-")) for name in whole), default=0)


def wait_until(condition, child):
    deadline = time.monotonic() + 240
    while not condition():
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it has ended"
        assert time.monotonic() < deadline
        time.sleep(0.001)


def in_a_checkpoint(folder):
    """A checkpoint is being written, and there is a whole one before it, of a later epoch than the
    first.
    """
    unfinished = [path for path in folder.glob("checkpoint-*") if not (path / COMPLETE).exists()]
    written = any((path / "adapter_model.safetensors").exists() for path in unfinished)
    return written and last_step(folder) > STEPS_PER_EPOCH


def in_batches(rows: list[int]) -> list[tuple[int, ...]]:
    return [tuple(rows[start : start + 4]) for start in range(0, len(rows), 4)]


def test_batches_of_like_lengths_come_in_random_order():
    """By default, the Trainer's groups go from long texts to short ones, 50 batches at a time."""
    lengths = torch.randint(1, 100, (402,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = LengthGroupedSampler(4, lengths=lengths)
    seeds = iter([7, 7, 8])
    order = OrderOfEpoch(sampler, lambda: next(seeds))
    epochs = [list(order) for _ in range(3)]

    assert epochs[0] == epochs[1] != epochs[2]
    for epoch in epochs:
        assert sorted(epoch) == list(range(402))
        sampler.generator = torch.Generator().manual_seed(7 if epoch == epochs[0] else 8)
        grouped = set(in_batches(list(sampler)))
        batches = in_batches(epoch)
        assert set(batches) == grouped
        assert max(lengths) in [lengths[row] for row in batches[0]]
        longest = [max(lengths[row] for row in batch) for batch in batches]
        descents = sum(a >= b for a, b in itertools.pairwise(longest))
        assert descents < 0.7 * len(longest)


def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(flags, tmp_path):
    """In the middle of epochs, as 5 does not divide 12; in the order of length groups; with
    accumulated gradients.
    """
    command = {**flags, **BY_STEPS, "save_steps": 5, "eval_steps": 5, "num_train_epochs": 3,
               "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}  # fmt: skip
    run(glue, **command, output_dir=tmp_path / "whole")
    folder = tmp_path / "killed"
    child = forked(lambda: run(glue, **command, output_dir=folder), tmp_path / "log")
    wait_until(lambda: in_a_checkpoint(folder), child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not (folder / "results.json").exists()

    run(glue, **command, output_dir=folder)
    torch.testing.assert_close(weights(folder), weights(tmp_path / "whole"), rtol=0, atol=0)
    assert scores(folder) == scores(tmp_path / "whole")


@pytest.mark.slow
def test_runs_that_are_killed_at_any_change_of_a_file(encoder, glue_data):
    """A sample of all events; see killed_runs.py."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    seed = str(random.randrange(10**6))
    command = [sys.executable, killed_runs.__file__, glue_data, encoder, "12", seed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 of 12 killed runs are identical" in done.stdout


def times(folder):
    """When each file of a folder was changed."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


class TestTheSameRun:
    @pytest.mark.parametrize(
        "changes",
        [
            {"logging_steps": 1, "per_device_eval_batch_size": 4},
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        ],
        ids=["flags that teach nothing", "the same rows per step in other parts"],
    )
    def test_a_finished_run_is_left_as_it_is(self, changes, folder, flags):
        untouched = times(folder)
        run(glue, **{**flags, **changes}, max_steps=12, output_dir=folder)
        assert times(folder) == untouched

    def test_the_same_data_and_encoder_elsewhere_and_arguments_of_another_version(
        self, folder, flags, tmp_path
    ):
        elsewhere = dict(flags)
        for name in ("data_dir", "model_name"):
            elsewhere[name] = shutil.copytree(flags[name], tmp_path / name)
        with edited_json(folder / "arguments.json") as arguments:
            del arguments["adam_epsilon"], arguments["lr_scheduler_kwargs"]
            arguments["gone"] = 3
        untouched = times(folder)
        run(glue, **elsewhere, max_steps=12, output_dir=folder)
        assert times(folder) == untouched

    @pytest.mark.parametrize(
        ("flag", "value", "named"),
        [
            ("learning_rate", 2e-3, "learning_rate"),
            ("per_device_train_batch_size", 4, "rows_per_step"),
            ("r", 8, "r"),
            ("seed", 1, "seed"),
        ],
    )
    def test_another_run_is_refused_and_nothing_lost(self, folder, flags, flag, value, named):
        untouched = times(folder)
        with pytest.raises(RecipeError, match=f": {named} was"):
            run(glue, **{**flags, flag: value}, max_steps=12, output_dir=folder)
        assert times(folder) == untouched

    def test_other_data_under_the_same_name(self, folder, flags, tmp_path):
        data = shutil.copytree(flags["data_dir"], tmp_path / "data")
        with (data / "cola" / "train.csv").open("a") as file:
            file.write("one more sentence,0\n")
        with pytest.raises(RecipeError, match="data of train"):
            run(glue, **{**flags, "data_dir": data}, max_steps=12, output_dir=folder)

    def test_other_data_on_the_hub(self, tmp_path):
        """Their content is not known, so that their name counts."""
        file = write(tmp_path / "a.csv", text=["a"])
        arguments = {"data": "a", CONTENT: describe_content({"train": [file]}, {})}
        assert list(differences(arguments, {"data": "b", CONTENT: {}})) == ["data"]

    def test_starting_over_leaves_nothing_of_another_method(self, folder, flags):
        run(glue, **flags, max_steps=1, output_dir=folder, method="linear",
            overwrite_output_dir=True)  # fmt: skip
        assert not (folder / "adapter").exists()
        assert (folder / "model" / "model.safetensors").exists()
        assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]

    def test_a_folder_of_an_unknown_run(self, flags, tmp_path):
        (tmp_path / "results.json").write_text('{"task": "cola"}')
        with pytest.raises(RecipeError, match="is missing"):
            run(glue, **flags, output_dir=tmp_path)


class TestResuming:
    def test_more_steps(self, folder, flags):
        run(glue, **flags, max_steps=18, output_dir=folder, resume_from_checkpoint="last")
        assert [entry["step"] for entry in scores(folder)] == [12, 18]

    @pytest.mark.parametrize(
        "change", [{"learning_rate": 2e-3}, {"optim": "sgd"}, {"adam_beta1": 0.5}]
    )
    def test_what_a_checkpoint_restores_must_stay(self, folder, flags, change):
        (name,) = change
        resumed = {"max_steps": 18, "output_dir": folder, "resume_from_checkpoint": "last"}
        with pytest.raises(RecipeError, match=f"restores .*{name} was"):
            run(glue, **{**flags, **resumed, **change})

    @pytest.mark.parametrize(
        ("damaged", "content"),
        [
            (COMPLETE, None),
            ("optimizer.pt", None),
            ("scheduler.pt", b"another"),
            ("rng_state.pth", None),
        ],
    )
    def test_an_incomplete_checkpoint_is_skipped(self, damaged, content, folder, flags, capsys):
        (folder / "results.json").unlink()
        newer = folder / "checkpoint-20"
        shutil.copytree(folder / "checkpoint-12", newer)
        (newer / damaged).unlink()
        if content is not None:
            (newer / damaged).write_bytes(content)
        run(glue, **flags, max_steps=12, output_dir=folder)
        assert f"Resuming from {folder / 'checkpoint-12'}" in capsys.readouterr().out

    @pytest.mark.parametrize("evaluates", [True, False])
    def test_the_time_is_that_of_all_parts_of_a_run(self, flags, tmp_path, evaluates, monkeypatch):
        """A clock by which each step takes a second."""
        clock = SimpleNamespace(perf_counter=itertools.count().__next__, monotonic=time.monotonic)
        monkeypatch.setattr(progress, "time", clock)
        command = {**flags, "max_steps": 12, "save_strategy": "steps", "save_steps": 5,
                   "eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": False,
                   "save_total_limit": 3, "do_train": True, "do_eval": evaluates}  # fmt: skip
        run(glue, **command, output_dir=tmp_path)
        (tmp_path / "results.json").unlink()
        shutil.rmtree(tmp_path / "checkpoint-12")
        run(glue, **command, output_dir=tmp_path)
        results = results_of(tmp_path)
        assert results["seconds"] == 12
        steps = [4, 8, 12] if evaluates else []
        assert [epoch["seconds"] for epoch in results["epochs"]] == steps

    def test_weights_that_are_gone_are_made_again(self, folder, flags):
        weights = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
        shutil.rmtree(folder / "adapter")
        run(glue, **flags, max_steps=12, output_dir=folder)
        assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == weights

    def test_a_best_checkpoint_that_is_gone(self, flags, tmp_path):
        """With a rate of almost 0, the first epoch is the best."""
        command = {**flags, "learning_rate": 1e-60, "num_train_epochs": 2}
        run(glue, **command, output_dir=tmp_path)
        assert results_of(tmp_path)["best_epoch"] == 1
        (tmp_path / "results.json").unlink()
        shutil.rmtree(min(tmp_path.glob("checkpoint-*"), key=step_of))
        run(glue, **command, output_dir=tmp_path)
        assert results_of(tmp_path)["best_epoch"] is None

    def test_early_stopping_counts_on_after_a_crash(self, flags, tmp_path):
        """With a rate of almost 0 no epoch is better than the first: two more are scored, whatever
        happens between.
        """
        command = {**flags, "learning_rate": 1e-60, "early_stopping_patience": 2,
                   "save_total_limit": 3, "per_device_train_batch_size": 32}  # fmt: skip
        run(glue, **command, output_dir=tmp_path)
        assert [entry["epoch"] for entry in scores(tmp_path)] == [1, 2, 3]
        (tmp_path / "results.json").unlink()
        shutil.rmtree(tmp_path / "checkpoint-9")
        run(glue, **command, output_dir=tmp_path)
        assert [entry["epoch"] for entry in scores(tmp_path)] == [1, 2, 3]

    @pytest.mark.parametrize(
        ("end", "steps"),
        [
            ({"max_steps": 10, "eval_steps": 5, **BY_STEPS}, [5, 10]),
            ({"early_stopping_patience": 1, "per_device_train_batch_size": 32}, [3, 6]),
        ],
        ids=["in an epoch", "stopped early"],
    )
    def test_a_run_takes_no_step_after_its_last(self, flags, tmp_path, end, steps):
        """With a rate of almost 0, the first evaluation is the best; its checkpoint is found where
        the folder is.
        """
        command = {**flags, "learning_rate": 1e-60, "save_total_limit": 3, **end}
        run(glue, **command, output_dir=tmp_path / "before")
        expected = scores(tmp_path / "before")
        assert [entry["step"] for entry in expected] == steps
        (tmp_path / "before" / "results.json").unlink()
        (tmp_path / "before").rename(tmp_path / "after")
        run(glue, **command, output_dir=tmp_path / "after")
        assert scores(tmp_path / "after") == expected
        assert results_of(tmp_path / "after")["best_epoch"] == expected[0]["epoch"]


class TestEnds:
    def test_a_loss_that_is_no_number_stops_the_run(self, flags, tmp_path):
        with pytest.raises(RecipeError, match="loss is nan"):
            run(glue, **{**flags, "learning_rate": 1e30}, warmup_steps=0, output_dir=tmp_path)
        assert not (tmp_path / "results.json").exists()

    def test_two_runs_in_one_folder(self, tmp_path):
        lock(tmp_path)
        lock(tmp_path)  # this process has it

        def other_process():
            with pytest.raises(RecipeError, match="in use"):
                lock(tmp_path)

        child = forked(other_process, tmp_path / "log")
        assert status_of(child) == 0, (tmp_path / "log").read_text()

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (RecipeError("wrong"), "error: wrong"),
            (ValueError("wrong"), "error: wrong (--debug shows where)"),
            (OSError(errno.ENOSPC, "full"), "error: [Errno 28] full (--debug shows where)"),
            (KeyboardInterrupt(), 130),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_one_line(self, error, code, monkeypatch):
        def fail():
            raise error

        monkeypatch.delenv("HOULSBY_DEBUG", raising=False)
        with pytest.raises(SystemExit) as stopped:
            end_with_one_line(fail)
        assert stopped.value.code == code
        monkeypatch.setenv("HOULSBY_DEBUG", "1")
        with pytest.raises((type(error), SystemExit)) as raised:
            end_with_one_line(fail)
        assert raised.type is type(error) or code == 130

    def test_a_bug_keeps_its_traceback(self):
        with pytest.raises(ZeroDivisionError):
            end_with_one_line(lambda: 1 / 0)

    def test_sigterm(self, flags, tmp_path):
        command = {**flags, "output_dir": tmp_path, "num_train_epochs": 500}

        def work():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            end_with_one_line(lambda: run(glue, **command))

        child = forked(work, tmp_path / "log")
        wait_until(lambda: last_step(tmp_path), child)
        os.kill(child, signal.SIGTERM)
        assert status_of(child) == 143
        printed = (tmp_path / "log").read_text()
        assert "The same command resumes" in printed
        assert "Traceback" not in printed


def test_no_token_lies_beside_the_adapter(flags, tmp_path):
    run(glue, **flags, max_steps=1, output_dir=tmp_path, hub_token="hf_secret")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"hf_secret" in path.read_bytes()]


@pytest.mark.parametrize(
    ("script", "environment", "expected"),
    [
        ("glue.py", {}, "python recipes/glue.py"),
        ("glue.py", {"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate launch recipes/glue.py"),
        ("studies/paper_tasks.py", {}, "python recipes/studies/paper_tasks.py"),
    ],
)
def test_the_command_tells_how_it_was_launched_and_no_secrets(
    script, environment, expected, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = [f"/home/ann/recipes/{script}", "--data_dir=/home/ann/data", "--hub_token", "hf_x"]
    assert command_line(words, "hf_x") == f"{expected} --data_dir=data --hub_token TOKEN"
