"""Record what a version of the library computes, and compare two records.

    python tests/support/record.py write FOLDER [--only REGEX]
    python tests/support/record.py compare FOLDER_A FOLDER_B

`write` runs the cases of `record_cases.py`. `compare` prints each entry that differs, and exits with 1 if there is
one. To record another version, put its checkout first in PYTHONPATH: the cases use public names only, so that the
same script runs on every version. Outputs are compared bit for bit, so both records must come from the same machine
and the same versions of torch, transformers and PEFT.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


if __name__ == "__main__":
    # huggingface_hub reads it on import. Nothing may depend on the network.
    os.environ["HF_HUB_OFFLINE"] = "1"

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file


ENTRIES_FILE, TENSORS_FILE = "record.json", "tensors.safetensors"

Case = Callable[["Record", Path], None]


class Record:
    """Entries by name. Tensors are entered with the hash of their bytes, anything else as JSON.

    Args:
        prefix: The beginning of the entries' names, for a part of a record.
        whole: The record that this is a part of.
    """

    def __init__(self, prefix: str = "", whole: Record | None = None) -> None:
        self.prefix = prefix
        self.entries: dict[str, Any] = {} if whole is None else whole.entries
        self.tensors: dict[str, torch.Tensor] = {} if whole is None else whole.tensors

    def part(self, name: str) -> Record:
        """Return the part of this record whose entries' names begin with `name`."""
        return Record(f"{self.prefix}{name}/", self)

    def put(self, name: str, value: Any) -> None:
        """Enter a value: a tensor, a mapping from names to tensors, or what JSON can hold.

        Raises:
            ValueError: An entry has the name already.
        """
        if isinstance(value, Mapping) and any(isinstance(item, torch.Tensor) for item in value.values()):
            for key, item in value.items():
                self.part(name).put(key, item)
            return
        full_name = f"{self.prefix}{name}"
        if full_name in self.entries:
            raise ValueError(f"An entry must have a name of its own; got {full_name!r} twice.")
        if not isinstance(value, torch.Tensor):
            self.entries[full_name] = json.loads(json.dumps(value, default=float))  # NumPy's numbers
            return
        tensor = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        digest = _hash(tensor)
        self.entries[full_name] = {"sha256": digest, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
        self.tensors[digest] = tensor

    def save(self, folder: Path) -> None:
        """Write the record to a folder, which is created if necessary."""
        folder.mkdir(parents=True, exist_ok=True)
        environment = {
            "houlsby_peft": str(_library()),
            "python": platform.python_version(),
            **{module.__name__: str(module.__version__) for module in (torch, transformers, peft)},
        }
        text = json.dumps({"environment": environment, "entries": self.entries}, indent=1)
        (folder / ENTRIES_FILE).write_text(text + "\n", encoding="utf-8")
        save_file(self.tensors, folder / TENSORS_FILE)


def _library() -> Path:
    # Comparing must work where the library cannot be imported.
    import houlsby_peft

    return Path(houlsby_peft.__file__).parent


def _hash(tensor: torch.Tensor) -> str:
    """Return the hash of a tensor's dtype, shape and bytes."""
    header = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    return hashlib.sha256(header + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def run(cases: Mapping[str, Case]) -> Record:
    """Run cases, each from the same state of the random generator, and return the record of all of them.

    An error ends its case only: the name of its type is entered, and its message is printed.
    """
    record = Record()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, case in cases.items():
                torch.manual_seed(0)
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        case(record.part(name), Path(folder))
                    except Exception as error:
                        record.put(f"{name}/error", type(error).__name__)
                        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        torch.set_num_threads(threads)
    return record


def compare(first: Path, second: Path) -> list[str]:
    """Return one line for each entry in which the records of two folders differ."""
    first_entries, second_entries = (
        json.loads((folder / ENTRIES_FILE).read_text(encoding="utf-8"))["entries"] for folder in (first, second)
    )
    first_tensors, second_tensors = (load_file(folder / TENSORS_FILE) for folder in (first, second))
    lines = []
    for name in sorted(first_entries.keys() | second_entries.keys()):
        if name not in first_entries or name not in second_entries:
            lines.append(f"{name}: only in {first if name in first_entries else second}")
        elif (one := first_entries[name]) != (other := second_entries[name]):
            if _is_tensor(one) and _is_tensor(other):
                difference = _difference(first_tensors[one["sha256"]], second_tensors[other["sha256"]])
            else:
                difference = f"{_short(one)} and {_short(other)}"
            lines.append(f"{name}: {difference}")
    return lines


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, dict) and "sha256" in entry


def _difference(one: torch.Tensor, other: torch.Tensor) -> str:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{list(one.shape)} of {one.dtype} and {list(other.shape)} of {other.dtype}"
    one, other = one.double(), other.double()
    # Equal infinities, as in the logits of heads of unequal width, do not differ.
    distance = torch.where(one == other, 0.0, (one - other).abs())
    return f"max abs difference {distance.max().item():.3g}, in {int((distance != 0).sum())} of {one.numel()} values"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="record what the installed version computes")
    write.add_argument("folder", type=Path)
    write.add_argument("--only", default="", metavar="REGEX", help="run only the cases whose names match")
    comparison = commands.add_parser("compare", help="print the entries that differ")
    comparison.add_argument("first", type=Path)
    comparison.add_argument("second", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "compare":
        lines = compare(options.first, options.second)
        print("\n".join([*lines, f"{len(lines)} entries differ."]))
        return int(bool(lines))

    from record_cases import CASES

    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    start = time.monotonic()
    record = run({name: case for name, case in CASES.items() if re.search(options.only, name)})
    record.save(options.folder)
    errors = sum(name.endswith("/error") for name in record.entries)
    print(
        f"{len(record.entries)} entries, {errors} of them errors, of {_library()} in {time.monotonic() - start:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
