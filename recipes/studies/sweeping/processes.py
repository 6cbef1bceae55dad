"""Runs of a sweep on this machine: locked, started and stopped, one at a time per slot."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import TextIO

import yaml

from sweeping.runs import FLAGS, PlannedRun


CONFIGS = Path(__file__).parents[2] / "launch" / "accelerate"
SECONDS_TO_STOP = 10
LAST_LINES = 15


def lock(path: Path) -> TextIO | None:
    """Return the locked file, to be closed; None if another process has the lock.

    The kernel holds the lock until all processes that inherited the open file have closed it or
    ended. So a killed process leaves no lock behind, but the run that it started keeps its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")  # over NFS only a file that is open for writing can be locked
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def execute(
    run: PlannedRun,
    launch: Sequence[str],
    locked: TextIO,
    environment: Mapping[str, str],
    stopped: Event,
) -> str | None:
    """Execute a run until it ends or is stopped; return the last lines of its log if it failed.

    The run inherits its lock.
    """
    (run.folder / FLAGS).write_text(run.constant)
    with (run.folder / "log.txt").open("ab") as log:
        start = log.tell()
        process = subprocess.Popen(
            [*launch, *run.arguments],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a separate process group, which can be stopped as a whole
            pass_fds=[locked.fileno()],
        )
        try:
            while process.poll() is None and not stopped.wait(0.1):
                pass
        finally:
            _stop(process)
    if stopped.is_set() or run.finished:
        return None
    text = (run.folder / "log.txt").read_bytes()[start:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip() and "it/s]" not in line]
    return "\n".join([*lines[-LAST_LINES:], f"(exit status {process.returncode}, no results.json)"])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and its group, first with SIGTERM, then with SIGKILL."""
    for number, seconds in ((signal.SIGTERM, SECONDS_TO_STOP), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(seconds)


def find_slots(jobs: int | None, config_file: str | None = None) -> list[dict[str, str]]:
    """Return the environment of each of `jobs` simultaneous runs.

    It names a run's GPUs, one for each process of the configuration, or its share of the cores. By
    default, there are as many runs as GPUs for them, or one.
    """
    import torch  # only here, as the import takes seconds

    if not torch.cuda.is_available():
        cores = max(1, (os.cpu_count() or 1) // (jobs or 1))  # each run would use all of them
        return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores))}] * (jobs or 1)
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(",", " ").split()
    devices = named or list(map(str, range(torch.cuda.device_count())))
    per_run = count_processes(config_file) if config_file else 1
    # Devices that are too few for another run stay idle; one run starts in any case.
    starts = range(0, max(1, len(devices) - per_run + 1), per_run)
    visible = [",".join(devices[start : start + per_run]) for start in starts]
    count = jobs or len(visible)
    return [{"CUDA_VISIBLE_DEVICES": visible[slot % len(visible)]} for slot in range(count)]


def launch_command(config_file: str | None, slots: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the command of `accelerate launch` with this Python, and that file or the default."""
    default = "one_gpu.yaml" if "CUDA_VISIBLE_DEVICES" in slots[0] else "cpu.yaml"
    config = config_file or str(CONFIGS / default)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    command = [*launcher, "--config_file", config]
    if count_processes(config) > 1:
        # Simultaneous runs need different launcher ports.
        command += ["--main_process_port", "0"]
    return command


def count_processes(config_file: str) -> int:
    return int(yaml.safe_load(Path(config_file).read_text()).get("num_processes", 1))
