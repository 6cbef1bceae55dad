"""The options of `houlsby-peft serve`, from which its command line is made.

This module is not part of the package `houlsby_peft`, whose import takes seconds, so that the help
and mistakes are shown at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any


_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def _option(
    default: Any,
    help: str,
    kind: Callable[[str], Any] = str,
    least: float | None = None,
    most: float | None = None,
    **argument: Any,
) -> Any:
    """Return a field of `ServiceOptions`, with what its flag and its check need."""
    return field(
        default=default,
        metadata={"help": help, "kind": kind, "least": least, "most": most, "argument": argument},
    )


@dataclass(frozen=True)
class ServiceOptions:
    """Options of the service: flags of `houlsby-peft serve`, and `args` in a deployment file.

    Each one but `tokens` has an environment variable as well, such as HOULSBY_BATCH_SIZE. On a Ray
    cluster, `adapters` and `base_model` are paths that all nodes can read.

    Raises:
        ValueError: A number is outside its limits.
    """

    adapters: str = _option(
        "",
        "folder of adapters or runs, one of these, or a YAML or JSON list",
        metavar="FOLDER_OR_LIST",
    )
    base_model: str | None = _option(
        None, "name or folder of the base model, instead of the recorded one"
    )
    host: str = _option("127.0.0.1", "address to listen on; by default, this machine only")
    port: int = _option(8000, "port to listen on; 0 is a free one", int, 0, 65535)
    batch_size: int = _option(32, "rows that are predicted at once", int, 1)
    max_bytes: float = _option(
        2e9,
        "memory for adapters in each process, in bytes; the least used ones are dropped",
        float,
        0,
    )
    watch: float = _option(5.0, "seconds between looks at the adapters; 0: never look", float, 0)
    cpus: int = _option(
        0,
        "cores that predict, in each process; 0: all but one, at most 8, and on Ray at most 4",
        int,
        0,
    )
    gpus: float = _option(0.0, "GPUs that predict: 0, 1 or, on Ray, a part of one", float, 0)
    compile: bool = _option(False, "repeat the model's layers on a GPU as CUDA graphs")
    ray: bool = _option(False, "predict in replicas, which Ray starts and restarts")
    replicas: int = _option(
        0, "replicas under load, which implies --ray; 0: as the cores allow", int, 0
    )
    min_replicas: int = _option(1, "replicas without load, on Ray", int, 1)
    max_queued: int = _option(512, "requests that may wait; more get the status 503", int, 1)
    max_rows: int = _option(
        1024, "rows of a request, counted once per task; more get the status 413", int, 1
    )
    max_characters: int = _option(
        200_000, "characters of the texts of a request; more get the status 413", int, 1
    )
    hosts: tuple[str, ...] = _option(
        (),
        "names of the service in the header Host; by default, any, or this machine's own",
        nargs="+",
        metavar="NAME",
    )
    tokens: str | None = _option(
        None,
        "file with the tokens of clients; HOULSBY_TOKENS holds its content instead",
        metavar="FILE",
    )
    open: bool = _option(False, "let other machines ask without a token")
    log: str = _option("text", "form of the log", choices=("text", "json"))
    access_log: bool = _option(False, "log each request")

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            least, most = option.metadata["least"], option.metadata["most"]
            if least is None or least <= value <= (most or value):
                continue
            rule = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{_flag(option)} must be {rule}; got {value}.")

    @property
    def is_on_ray(self) -> bool:
        """Whether replicas predict."""
        return self.ray or self.replicas > 0

    @property
    def cores(self) -> int:
        """The cores that predict, in each process."""
        cores = os.cpu_count() or 1
        if self.is_on_ray:
            return self.cpus or min(cores, 4)
        return self.cpus or min(max(1, cores - 1), 8)  # one is left for HTTP

    @property
    def max_replicas(self) -> int:
        """The number of replicas under load."""
        return self.replicas or max(self.min_replicas, (os.cpu_count() or 1) // self.cores)


def _flag(option: Field[Any]) -> str:
    return f"--{option.name.replace('_', '-')}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each option; its default is the environment variable, if that is set."""
    parser.add_argument(
        "folder_or_list", nargs="?", metavar="FOLDER_OR_LIST", help="the same as --adapters"
    )
    for option in fields(ServiceOptions):
        metadata = option.metadata
        variable = None
        if option.name != "tokens":
            variable = os.environ.get(f"HOULSBY_{option.name.upper()}")
        default: Any = option.default if variable is None else variable
        help = metadata["help"]
        if option.default not in (None, "", (), 0):
            shown = option.default
            if isinstance(shown, float):
                shown = f"{shown:g}"
            help += f" (default: {shown})"
        argument = {"type": metadata["kind"], **metadata["argument"]}
        if isinstance(option.default, bool):
            argument = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(_flag(option), default=default, help=help, **argument)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the deployment file for a Ray cluster instead",
    )


def _read_switch(option: Field[Any], value: Any) -> bool:
    """Return whether an environment variable switches an option on."""
    word = str(value).lower()
    if word not in _YES + _NO:
        raise ValueError(f"HOULSBY_{option.name.upper()} must be 1 or 0; got {value!r}.")
    return word in _YES


def read_options(arguments: argparse.Namespace) -> ServiceOptions:
    """Return the options of a command line.

    Raises:
        ValueError: The adapters are missing or given twice, a file is missing, or a value is none
            that its option has.
    """
    values = {option.name: getattr(arguments, option.name) for option in fields(ServiceOptions)}
    flag = values["adapters"]
    is_from_variable = flag == os.environ.get("HOULSBY_ADAPTERS")
    if arguments.folder_or_list and flag and not is_from_variable:
        raise ValueError("The adapters must be given once: as FOLDER_OR_LIST or with --adapters.")
    adapters = arguments.folder_or_list or flag
    if not adapters:
        raise ValueError("The adapters are missing: houlsby-peft serve FOLDER_OR_LIST.")
    # Not resolved: a link may lead to another folder later.
    values["adapters"] = str(Path(adapters).expanduser().absolute())
    for path in (values["adapters"], values["tokens"]):
        if path and not Path(path).expanduser().exists():
            raise ValueError(f"{path} is no file or folder that exists.")
    base_model = values["base_model"]
    if base_model and Path(base_model).expanduser().is_dir():
        values["base_model"] = str(Path(base_model).expanduser().absolute())
    # Of an environment variable, these are still text.
    if isinstance(values["hosts"], str):
        values["hosts"] = values["hosts"].split()
    values["hosts"] = tuple(values["hosts"])
    for option in fields(ServiceOptions):
        if isinstance(option.default, bool):
            values[option.name] = _read_switch(option, values[option.name])
    return ServiceOptions(**values)
