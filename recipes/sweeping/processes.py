"""Runs of a sweep on this machine: locked, started and stopped, one at a time per slot of devices."""

import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from sweeping.runs import PlannedRun


CONFIGS = Path(__file__).parents[1] / "accelerate"
SECONDS_TO_STOP = 10
LAST_LINES = 15


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: "taken" means that another sweep runs it; one that failed has its last lines."""

    status: Literal["finished", "failed", "taken", "stopped"]
    last_lines: str = ""


def execute(
    run: PlannedRun,
    launch: Sequence[str],
    environment: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """Execute a run to its end, unless it is finished or another process executes it.

    The kernel holds the lock, on an open file that the launched process inherits, until both have ended. So a sweep
    that is killed leaves no lock behind, and no second sweep starts a run that is still going.

    Args:
        run: The run.
        launch: The command, to which the recipe and its flags are appended.
        environment: Variables to add to the environment.
        stop: An event that stops the run.
    """
    stop = stop or threading.Event()
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / "lock").open("w") as lock, (run.folder / "log.txt").open("ab") as log:
        if not _lock(lock.fileno()):
            return Outcome("taken")
        if run.results:
            return Outcome("finished")
        run.check()
        run.record()
        start = log.tell()
        process = subprocess.Popen(
            [*launch, *run.arguments],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a separate process group, which can be stopped as a whole
            pass_fds=[lock.fileno()],
        )
        try:
            while process.poll() is None and not stop.is_set():
                stop.wait(0.1)
        finally:
            _stop(process)
    if run.results:
        return Outcome("finished")
    return Outcome("stopped") if stop.is_set() else Outcome("failed", _last_lines(run, start, process.returncode))


def is_locked(run: PlannedRun) -> bool:
    """Return whether a process executes the run now."""
    # Over NFS only a file that is open for writing can be locked; "w" would create one for a run that never started.
    with suppress(FileNotFoundError), (run.folder / "lock").open("r+") as lock:
        return not _lock(lock.fileno())
    return False


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and its group, first with SIGTERM, then with SIGKILL."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(SECONDS_TO_STOP)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_lines(run: PlannedRun, start: int, code: int) -> str:
    lines = (run.folder / "log.txt").read_bytes()[start:].decode(errors="replace").splitlines()
    lines = [line for line in lines if line.strip() and "it/s]" not in line]
    without = "" if code else f", but there is no {run.folder / 'results.json'}"
    return "\n".join([*lines[-LAST_LINES:], f"(exit status {code}{without})"])


class LocalExecutor:
    """Executes runs on this machine, one at a time per slot.

    Args:
        launch: The command, as in execute.
        slots: The GPUs of each slot, as in CUDA_VISIBLE_DEVICES, or None for the CPU.
    """

    def __init__(self, launch: Sequence[str], slots: Sequence[str | None]) -> None:
        self.launch = launch
        self.threads = ThreadPoolExecutor(len(slots))
        self.stopping = threading.Event()
        self.free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for slot in slots:
            self.free.put(slot)
        # On the CPU each run would use all cores.
        cores = max(1, (os.cpu_count() or 1) // len(slots))
        self.threads_each = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores))}

    def submit(self, runs: Sequence[PlannedRun]) -> list["Future[Outcome]"]:
        """Start the runs, or queue them behind those that are going."""
        return [self.threads.submit(self._execute, run) for run in runs]

    def _execute(self, run: PlannedRun) -> Outcome:
        slot = self.free.get()
        environment = self.threads_each if slot is None else {"CUDA_VISIBLE_DEVICES": slot}
        try:
            return execute(run, self.launch, environment, self.stopping)
        finally:
            self.free.put(slot)

    def cancel(self) -> None:
        """Stop all runs, and return when they have stopped."""
        self.stopping.set()
        self.threads.shutdown(cancel_futures=True)


def local_executor(jobs: int | None, config_file: str | None = None) -> LocalExecutor:
    """Return an executor for this machine's devices; see find_slots."""
    slots = find_slots(jobs, config_file)
    config = config_file or CONFIGS / ("cpu.yaml" if slots[0] is None else "one_gpu.yaml")
    return LocalExecutor(launch_command(str(config)), slots)


def find_slots(jobs: int | None, config_file: str | None = None) -> list[str | None]:
    """Return the slots of a LocalExecutor: one GPU each, or as many as the configuration has processes.

    Args:
        jobs: Number of slots, which take the GPUs in turn; None: as many as there are GPUs for, or 1 without a GPU.
        config_file: accelerate launch's configuration; None: one process.
    """
    import torch  # only here, as the import takes seconds

    if not torch.cuda.is_available():
        return [None] * (jobs or 1)
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    devices = named or [str(number) for number in range(torch.cuda.device_count())]
    each = count_processes(config_file) if config_file else 1
    groups = [devices[start : start + each] for start in range(0, max(1, len(devices) - each + 1), each)]
    return [",".join(groups[number % len(groups)]) for number in range(jobs or len(groups))]


def launch_command(config_file: str) -> list[str]:
    """Return the command of `accelerate launch` with that file and this Python."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", config_file]
    # Simultaneous runs need different launcher ports.
    return [*command, "--main_process_port", "0"] if count_processes(config_file) > 1 else command


def count_processes(config_file: str) -> int:
    """Return the number of processes that `accelerate launch` starts with that file."""
    return int(yaml.safe_load(Path(config_file).read_text()).get("num_processes", 1))
