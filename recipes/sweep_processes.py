"""A run of a sweep on this machine: locked, started, stopped; and as many at once as there are devices."""

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
from sweep_runs import Run


SECONDS_TO_STOP = 10
LAST_LINES = 15


@dataclass(frozen=True)
class Outcome:
    """What became of a run: "taken" means that another sweep is at it; of one that failed, its last lines."""

    status: Literal["finished", "failed", "taken", "stopped"]
    last_lines: str = ""


def execute(
    run: Run, launch: Sequence[str], environment: Mapping[str, str] | None = None, stop: threading.Event | None = None
) -> Outcome:
    """Runs it to its end, unless it has ended or someone else is at it.

    The lock is the kernel's, on an open file that the launched process inherits: it goes with the last of the two, so
    that a sweep that is killed leaves neither a lock behind nor a run that a second sweep would start again beside it.

    Args:
        run: What to run.
        launch: The command that the recipe and its flags are put after.
        environment: Changes of the environment.
        stop: Once set, the run is stopped.
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
            start_new_session=True,  # a group of its own, which can be stopped as a whole
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


def is_locked(run: Run) -> bool:
    """Whether someone is at the run just now."""
    # Over NFS only a file that is open for writing can be locked; "w" would make one where no run has begun.
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
    """Ends the process and all of its group, gently first."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(SECONDS_TO_STOP)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_lines(run: Run, start: int, code: int) -> str:
    lines = (run.folder / "log.txt").read_bytes()[start:].decode(errors="replace").splitlines()
    lines = [line for line in lines if line.strip() and "it/s]" not in line]
    without = "" if code else f", but there is no {run.folder / 'results.json'}"
    return "\n".join([*lines[-LAST_LINES:], f"(exit status {code}{without})"])


class LocalExecutor:
    """Runs on this machine, as many at once as there are places.

    Args:
        launch: As in execute.
        places: For each place the GPUs of its runs, as CUDA_VISIBLE_DEVICES has them, or None for the CPU.
    """

    def __init__(self, launch: Sequence[str], places: Sequence[str | None]) -> None:
        self.launch = launch
        self.threads = ThreadPoolExecutor(len(places))
        self.stopping = threading.Event()
        self.free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for place in places:
            self.free.put(place)
        # On the CPU each run would take all cores.
        cores = max(1, (os.cpu_count() or 1) // len(places))
        self.threads_each = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores))}

    def submit(self, runs: Sequence[Run]) -> list["Future[Outcome]"]:
        """Starts the runs, or puts them behind those that are under way."""
        return [self.threads.submit(self._execute, run) for run in runs]

    def _execute(self, run: Run) -> Outcome:
        place = self.free.get()
        environment = self.threads_each if place is None else {"CUDA_VISIBLE_DEVICES": place}
        try:
            return execute(run, self.launch, environment, self.stopping)
        finally:
            self.free.put(place)

    def cancel(self) -> None:
        """Stops all runs, and returns when they have stopped."""
        self.stopping.set()
        self.threads.shutdown(cancel_futures=True)


def find_places(jobs: int | None, config_file: str | None = None) -> list[str | None]:
    """The places of a LocalExecutor: a GPU for each run, or as many as the configuration has processes.

    Args:
        jobs: How many places, on the GPUs in turn; None: as many as there are GPUs for. Without a GPU 1, or `jobs`.
        config_file: Of accelerate launch; None: one process.
    """
    import torch  # for this alone, as it takes seconds

    if not torch.cuda.is_available():
        return [None] * (jobs or 1)
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    devices = named or [str(number) for number in range(torch.cuda.device_count())]
    each = count_processes(config_file) if config_file else 1
    groups = [devices[start : start + each] for start in range(0, max(1, len(devices) - each + 1), each)]
    return [",".join(groups[number % len(groups)]) for number in range(jobs or len(groups))]


def launch_command(config_file: str) -> list[str]:
    """`accelerate launch` with that file, by the Python that runs this."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", config_file]
    # Runs at the same time must not meet on the usual port.
    return [*command, "--main_process_port", "0"] if count_processes(config_file) > 1 else command


def count_processes(config_file: str) -> int:
    """How many processes `accelerate launch` starts with that file."""
    return int(yaml.safe_load(Path(config_file).read_text()).get("num_processes", 1))
