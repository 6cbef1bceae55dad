"""Kill runs of a recipe at file-system events, start them again, and compare them with a run that
was not killed.

    python tests/support/killed_runs.py DATA_DIR MODEL KILLS SEED

Each run trains a tiny model on the task cola and is killed by SIGKILL at another event: when it
creates, writes, renames or deletes a file in its output folder. In a write, half is written. The
same command is then started again, and its adapter and results must be those of the run that was
not killed, bit for bit. Needs a C compiler and Linux.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


ROOT = Path(__file__).parents[2]
LIBRARY = "KILL_LIBRARY"
# Three epochs with a checkpoint each. With auto, each run would time its own choice of a dtype.
FLAGS = {"task": "cola", "base_dtype": "float32", "disable_tqdm": True, "num_train_epochs": 3,
         "learning_rate": 1e-2, "per_device_train_batch_size": 32}  # fmt: skip


def main() -> int:
    """Read the command line; return 0 if all runs are identical."""
    data_dir, model_name, kills, seed = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        if LIBRARY not in os.environ:
            return preload(Path(name))
        flags = {**FLAGS, "data_dir": data_dir, "model_name": model_name}
        return compare(Path(name), flags, int(kills), int(seed))


def preload(folder: Path) -> int:
    """Run this script again, with the library that counts events."""
    library = folder / "kill_at.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, Path(__file__).with_name("kill_at.c"), "-ldl"],
        check=True,
    )
    environment = {"LD_PRELOAD": str(library), LIBRARY: str(library), "OMP_NUM_THREADS": "1"}
    environment["TOKENIZERS_PARALLELISM"] = "false"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path[1:]])
    command = [sys.executable, *sys.argv]
    return subprocess.run(command, env=os.environ | environment, check=False).returncode


def compare(folder: Path, flags: dict[str, object], kills: int, seed: int) -> int:
    """Print which killed runs differ from one that was not; return 0 if none does."""
    sys.path[:0] = [str(ROOT / "recipes"), str(Path(__file__).parent)]
    import glue  # once for all runs, which are forked from this process
    from recipe_runs import run

    def train(output: Path, event: int = 0) -> int:
        """Run the recipe, killed at an event; return its exit status."""

        def work() -> None:
            library = ctypes.CDLL(os.environ[LIBRARY])
            library.watch(f"{output}/".encode(), ctypes.c_long(event))
            run(glue, **flags, output_dir=output)
            (folder / "events").write_text(str(library.count_events()))

        return status_of(forked(work, folder / "log"))

    assert train(folder / "whole") == 0, (folder / "log").read_text()
    expected, events = outcome(folder / "whole"), int((folder / "events").read_text())
    different = 0
    for event in sorted(random.Random(seed).sample(range(1, events + 1), kills)):
        output = folder / str(event)
        assert train(output, event) == -signal.SIGKILL
        status, facts = train(output), outcome(output)
        unlike = [name for name in expected if facts.get(name) != expected[name]]
        if status != 0 or facts.keys() != expected.keys() or unlike:
            different += 1
            print(f"Killed at event {event} of {events}: status {status}, different: {unlike}")
            print((folder / "log").read_text())
        shutil.rmtree(output, ignore_errors=True)
    print(f"{kills - different} of {kills} killed runs are identical.")
    return 1 if different else 0


def forked(work: Callable[[], None], log: Path) -> int:
    """Start some work in a forked process, where an interpreter is not the point; return its
    number.
    """
    child = os.fork()
    if child == 0:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        status = 1
        try:
            sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
            work()
            status = 0
        except SystemExit as stopped:
            status = stopped.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return child


def status_of(child: int) -> int:
    """Wait for a process; return its exit status, negative if a signal has ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(output: Path) -> dict[str, object]:
    """Return what a run has saved and claims, except for its time and the name of its folder."""
    try:
        results = json.loads((output / "results.json").read_text())
    except (OSError, ValueError):
        return {}
    for name in ("seconds", "peak_memory", "command", "arguments"):
        del results[name]
    for epoch in results["epochs"]:
        del epoch["seconds"]
    saved = {f"adapter/{path.name}": path.read_bytes() for path in (output / "adapter").iterdir()}
    # The card, with the same results, the time and the name of the folder.
    del saved["adapter/README.md"]
    return saved | results


if __name__ == "__main__":
    sys.exit(main())
