"""What a run was computed on, and what that has cost."""

import csv
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch


def hardware() -> str:
    """The accelerators of this machine, or its processor."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return f"{count} x {torch.cuda.get_device_name()}" if count > 1 else torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"


def emissions(output_dir: Path) -> float | None:
    """Kilograms of CO2 that CodeCarbon has written down for a run with --report_to codecarbon, or None."""
    path = output_dir / "emissions.csv"
    if not path.exists():
        return None
    with path.open(newline="") as file:
        return float(list(csv.DictReader(file))[-1]["emissions"])


def command(argv: Sequence[str], token: str | None = None) -> str:
    """The command line of a recipe as others may see it: without a token, and without the folders that absolute paths
    lie in, which often tell a name."""
    script, *words = (word.replace(token, "TOKEN") if token else word for word in argv)
    words = [Path(word).name if Path(word).is_absolute() else word for word in words]
    return shlex.join(["accelerate", "launch", f"recipes/{Path(script).name}", *words])


def _processor() -> str:
    """Its name: Linux tells it in a file only."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
