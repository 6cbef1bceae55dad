"""Measure what a user waits for before the first result: import, load and switch; and the size of
the file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from peft import PeftModel

from methods import FULL, METHODS
from models import build
from timing import compared, interleaved


_IMPORT = "import time; start = time.process_time(); import {}; print(time.process_time() - start)"


def imports(rounds: int) -> list[dict[str, Any]]:
    """Measure the time to import peft, and to import houlsby_peft, which imports peft, each in new
    processes.
    """
    times: dict[str, list[float]] = {"import peft": [], "import houlsby_peft": []}
    for _ in range(rounds + 1):
        for name, values in times.items():
            code = _IMPORT.format(name.removeprefix("import "))
            run = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            )
            values.append(float(run.stdout))
    times = {
        name: values[1:] for name, values in times.items()
    }  # the first round fills the file cache
    return [{"action": name, **numbers} for name, numbers in compared(times, "import peft").items()]


def actions(shape: str, rounds: int) -> list[dict[str, Any]]:
    """Measure, for each method of PEFT, the time to load an adapter and to switch adapters, and the
    file size.
    """
    rows = []
    for name, method in METHODS.items():
        model = build(shape, method)
        if not isinstance(model, PeftModel):
            if name == FULL:
                size = sum(weight.nbytes for weight in model.parameters())
                rows.append({"method": name, "file_bytes": size})
            continue
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            file = Path(folder, "adapter_model.safetensors")
            model.load_adapter(folder, "other")
            calls = {"load": partial(_load, model, folder), "switch": partial(_switch, model)}
            times = interleaved(calls, rounds)
            least = {f"{action}_s": min(values) for action, values in times.items()}
            rows.append({"method": name, "file_bytes": file.stat().st_size, **least})
    return rows


def _load(model: PeftModel, folder: str) -> None:
    model.delete_adapter("other")
    model.load_adapter(folder, "other")


def _switch(model: PeftModel) -> None:
    model.set_adapter("other")
    model.set_adapter("default")
