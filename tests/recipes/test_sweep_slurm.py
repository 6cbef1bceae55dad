"""The batch files for Slurm, run by bash on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys

import psutil
import pytest
from test_sweep import ROOT, finish, recipe, results, running, starts, wait_for


__all__ = ["recipe"]  # the fixture

FILES = sorted((ROOT / "recipes" / "launch" / "slurm").glob("*.sbatch"))


@pytest.fixture
def slurm(recipe, monkeypatch):
    """Starts a batch file as Slurm would, with this Python and a scontrol that only writes what it
    is asked to do.
    """
    programs = {
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
        "scontrol": f'echo "$@" > {recipe.parent}/asked',
    }
    for name, body in programs.items():
        (recipe.parent / name).write_text(f"#!/bin/sh\n{body}\n")
        (recipe.parent / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(recipe.parent), os.environ["PATH"]]))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    flags = ["--learning_rate", "1e-3", "--seed", "0", "1", "--steps", "8"]
    command = [recipe, *flags, "--output_dir", recipe.parent / "out"]
    piped = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return lambda file: subprocess.Popen(["bash", file, *command], cwd=ROOT, **piped)


@pytest.mark.parametrize(
    "file", [file for file in FILES if "sweep.py" in file.read_text()], ids=lambda file: file.name
)
def test_a_job_whose_time_is_up_is_queued_again_and_resumes(recipe, slurm, file):
    job = slurm(file)
    wait_for(lambda: list((recipe.parent / "out").glob("*/*/checkpoint")))
    processes = psutil.Process(job.pid).children(recursive=True)
    job.send_signal(signal.SIGUSR1)
    _, errors = finish(job, code=128 + signal.SIGUSR1)
    assert "The same command resumes from here" in errors
    assert (recipe.parent / "asked").read_text() == "requeue 7\n"
    assert not running(processes)
    finish(slurm(file))
    (first, resumed), of_second_run = starts(recipe).values()
    assert first == 0 < resumed
    assert of_second_run == [0]
    assert len(results(recipe)) == 2
