"""Kill runs of a recipe at file-system events, start them again, and compare them with a run that
was not killed.

    python tests/support/killed_runs.py --kills 40

Each run trains a tiny model and is killed by SIGKILL at another event: when it creates, writes,
renames or deletes a file in its output folder. In a write, half is written. The same command is
then started again, and its adapter and results must be those of the run that was not killed, bit
for bit. Needs a C compiler and Linux.
"""

from __future__ import annotations

import argparse
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
STEPS_PER_EPOCH = 3


def main() -> int:
    """Read the command line, print a line per run that differs and the number of identical ones."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=40, help="Number of runs to kill.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the choice of events.")
    parser.add_argument("--events", type=int, nargs="+", help="Kill at these events instead.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if LIBRARY not in os.environ:
            return preload(folder)
        return compare(folder, arguments.kills, arguments.seed, arguments.events)


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


def compare(folder: Path, kills: int, seed: int, given_events: list[int] | None) -> int:
    """Compare killed runs with one that was not; return 0 if all are identical."""
    sys.path[:0] = [str(ROOT / "recipes"), str(Path(__file__).parent)]
    import glue  # once for all runs, which are forked from this process

    flags = make_flags(folder)
    counted = folder / "events"
    log = folder / "whole.log"
    check(in_child(lambda: train(glue, flags, folder / "whole", counted=counted), log), 0)
    expected, events = outcome(folder / "whole"), int(counted.read_text())
    print(f"A run changes files {events} times.", flush=True)
    all_events = range(1, events + 1)
    kill_at = given_events or sorted(random.Random(seed).sample(all_events, kills))
    different = 0
    for event in kill_at:
        output, log = folder / str(event), folder / f"{event}.log"
        check(in_child(lambda: train(glue, flags, output, event), log), -signal.SIGKILL)  # noqa: B023
        status = in_child(lambda: train(glue, flags, output), log)  # noqa: B023
        facts = outcome(output)
        names = sorted(facts.keys() | expected.keys())
        unlike = [name for name in names if facts.get(name) != expected.get(name)]
        if status != 0 or unlike:
            different += 1
            print(log.read_text())
            print(f"Killed at event {event}, it ends with status {status}.", flush=True)
            print(f"Different: {', '.join(unlike)}", flush=True)
        shutil.rmtree(output, ignore_errors=True)
    print(f"{len(kill_at) - different} of {len(kill_at)} killed runs are identical.")
    return 1 if different else 0


def make_flags(folder: Path) -> dict[str, object]:
    """Return the flags of a task for a tiny model with dropout, of 3 epochs with a
    checkpoint each.
    """
    from demo import minimal_pairs
    from recipe_runs import save_tiny_encoder

    def make() -> None:
        (folder / "data" / "cola").mkdir(parents=True)
        for split in ("train", "validation"):
            rows = minimal_pairs()[split].select(range(8 * STEPS_PER_EPOCH))
            frame = rows.to_pandas()[["sentence", "label"]]
            frame.to_csv(folder / "data" / "cola" / f"{split}.csv", index=False)
        save_tiny_encoder(folder / "model")

    check(in_child(make, folder / "inputs.log"), 0)
    return {
        "task": "cola",
        "data_dir": folder / "data",
        "model_name": folder / "model",
        "base_dtype": "float32",  # with auto, each run would time its own choice
        "disable_tqdm": True,
        "num_train_epochs": 3,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 8,
    }


def train(
    recipe: object,
    flags: dict[str, object],
    output: Path,
    event: int = 0,
    counted: Path | None = None,
) -> None:
    """Run the recipe and kill this process at an event; or write their number into a file."""
    from recipe_runs import run

    library = ctypes.CDLL(os.environ[LIBRARY])
    library.watch(f"{output}/".encode(), ctypes.c_long(event))
    run(recipe, **flags, output_dir=output)
    if counted is not None:
        counted.write_text(str(library.count_events()))


def in_child(work: Callable[[], None], log: Path) -> int:
    """Do some work in a forked process; return its exit status, negative if a signal ended it."""
    child = os.fork()
    if child == 0:
        with log.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        finally:
            sys.stdout.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check(status: int, expected: int) -> None:
    """Raise AssertionError if a process did not end as expected."""
    assert status == expected, f"exit status {status}, not {expected}"


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
