"""Sweeps by submitit: its jobs on this machine, and what it would hand to Slurm."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import psutil
import pytest
from test_sweep import ROOT, finish, recipe, results, start, starts, wait_for

from training.errors import RecipeError


__all__ = ["recipe"]  # the fixture

pytest.importorskip("submitit", reason="needs submitit, of the extra 'recipes', which is not installed")

from sweeping.cluster import ClusterExecutor, read_options
from sweeping.runs import make_runs


FLAGS = ("--learning_rate", "1e-3", "--seed", "0", "1")


class TestLocalJobs:
    def test_two_jobs_at_once(self, recipe):
        output, _ = finish(start(recipe, *FLAGS, "--steps", 30, "--cluster", "local"))
        assert "0 1" in output, "the seeds in the table"
        spans = [
            (float((file.parent / "starts").read_text().split()[1]), json.loads(file.read_text())["ended"])
            for file in results(recipe)
        ]
        assert max(begin for begin, _ in spans) < min(end for _, end in spans)
        assert len(list((recipe.parent / "out" / "jobs").glob("*_result.pkl"))) == 2

    def test_a_failed_job(self, recipe):
        flags = ("--steps", 1, "--fail", 1, "--cluster", "local")
        _, errors = finish(start(recipe, *FLAGS, *flags), code=1)
        assert "FAILED: toy/learning_rate=0.001,seed=1" in errors
        assert "a run that fails" in errors
        assert len(results(recipe)) == 1

    def test_an_interrupt_leaves_nothing_running(self, recipe):
        sweep = start(recipe, *FLAGS, "--steps", 600, "--cluster", "local")
        wait_for(lambda: len(starts(recipe)) == 2)
        processes = psutil.Process(sweep.pid).children(recursive=True)
        sweep.send_signal(signal.SIGINT)
        finish(sweep, code=130)
        psutil.wait_procs(processes, timeout=10)
        assert not any(process.is_running() and process.status() != "zombie" for process in processes)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Where the scripts go that a Slurm without machines is given."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    programs = {
        "srun": "exit 1",
        "scancel": "exit 0",
        "sbatch": f'cp "$1" {shlex.quote(str(scripts))}/; echo "Submitted batch job 7"',
    }
    (tmp_path / "bin").mkdir()
    for name, body in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # an executor adds to it
    return scripts


class TestSlurm:
    def submit(self, tmp_path, runs, *options):
        made = make_runs(tmp_path / "out", Path("glue.py"), {"seed": [str(seed) for seed in range(runs)]}, [])
        executor = ClusterExecutor(["launch"], tmp_path / "jobs", "slurm", read_options(options, "slurm", 2, None))
        return executor.submit(made)

    def test_the_script_of_an_array(self, tmp_path, slurm):
        options = ("slurm_partition=gpu", "timeout_min=90", "mem_gb=1.5", "slurm_exclusive=true")
        jobs = self.submit(tmp_path, 3, *options)
        assert [job.job_id for job in jobs] == ["7_0", "7_1", "7_2"]
        (script,) = slurm.iterdir()
        lines = script.read_text().splitlines()
        for line in (
            "--array=0-2%2",
            "--partition=gpu",
            "--time=90",
            "--gpus-per-node=1",
            "--mem=1536MB",
            "--exclusive",
            "--nodes=1",
            "--job-name=sweep",
        ):
            assert f"#SBATCH {line}" in lines
        assert any(line.startswith("srun ") and "submitit.core._submit" in line for line in lines)
        assert str(ROOT / "recipes") in os.environ["PYTHONPATH"].split(os.pathsep), "jobs cannot import the recipes"

    def test_what_a_job_runs(self, tmp_path, slurm):
        self.submit(tmp_path, 2)
        pickles = sorted((tmp_path / "jobs").glob("7_*_submitted.pkl"))
        assert len(pickles) == 2
        from submitit.core.utils import DelayedSubmission

        submissions = [DelayedSubmission.load(path) for path in pickles]
        assert [submission.args[0].point for submission in submissions] == [{"seed": "0"}, {"seed": "1"}]
        assert submissions[0].args[1] == ["launch"]
        # Before its time is over a job is queued again, as it is.
        again = submissions[0].function.checkpoint(*submissions[0].args)
        assert again.args == submissions[0].args

    @pytest.mark.parametrize(("config", "gpus"), [(None, 1), ("one_gpu", 1), ("ddp", 4), ("zero2", 4)])
    def test_a_gpu_for_each_process(self, config, gpus):
        file = str(ROOT / "recipes" / "accelerate" / f"{config}.yaml") if config else None
        assert read_options([], "slurm", None, file)["gpus_per_node"] == gpus
        assert read_options(["gpus_per_node=2"], "slurm", None, file)["gpus_per_node"] == 2
        assert read_options([], "local", None, file)["gpus_per_node"] == 0

    def test_nothing_to_run(self, tmp_path, slurm):
        assert self.submit(tmp_path, 0) == []
        assert not list(slurm.iterdir())

    @pytest.mark.parametrize(
        ("option", "message"),
        [("slurm_partion=gpu", "argument 'partion'"), ("mem_gb=much", "mem_gb"), ("partition", "NAME=VALUE, got 'pa")],
    )
    def test_a_wrong_option(self, tmp_path, slurm, option, message):
        with pytest.raises(RecipeError, match=message):
            self.submit(tmp_path, 1, option)

    def test_no_slurm(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", "")
        with pytest.raises(RecipeError, match="srun"):
            self.submit(tmp_path, 1)
