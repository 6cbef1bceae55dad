"""The edge of every recipe: known errors and interrupts end it with one line, and noise of
libraries is left out.
"""

import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from houlsby_peft_cli import escape_other_letters


DEBUG = "HOULSBY_DEBUG"
RESUMES = (
    "The same command resumes from the last complete checkpoint; if there is none, it starts over."
)
# Warnings of libraries about each other, on which the user of a recipe cannot act.
_NOISE = (
    "`is_gradient_checkpointing` is deprecated",  # PEFT reads what transformers 5.23 has renamed
    "`broadcast_buffers` is deprecated",  # accelerate gives DDP what torch 2.13 has renamed
)


class RecipeError(Exception):
    """A wrong flag, file or value. The message states the rule, the value and the remedy."""


def log(message: str, file: TextIO | None = None) -> None:
    """Print a message once, whatever the number of processes; to stdout if no file is given."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=file, flush=True)


def looks_like_a_path(name: str) -> bool:
    """Return whether a name cannot be one on the Hub, or a file or folder of that name exists."""
    path = Path(name)
    return path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists()


def end_with_one_line(main: Callable[[], Any]) -> Any:
    """Run a recipe. A known error, Ctrl-C or SIGTERM ends it with one line on stderr and the status
    1, 130 or 143.

    --debug on the command line, or HOULSBY_DEBUG=1, shows the traceback of an error instead.
    """
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        os.environ[DEBUG] = "1"
    escape_other_letters()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    for text in _NOISE:
        warnings.filterwarnings("ignore", re.escape(text), FutureWarning)
    # accelerate imports DeepSpeed wherever it is installed.
    is_asked_for = any("--deepspeed" in word for word in sys.argv)
    if "ACCELERATE_USE_DEEPSPEED" not in os.environ and not is_asked_for:
        logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    try:
        return main()
    except KeyboardInterrupt:
        log(f"\nInterrupted. {RESUMES}", sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except _Terminated:
        log(f"\nInterrupted. {RESUMES}", sys.stderr)
        raise
    except Exception as error:
        line = _one_line(error)
        if line is None or os.environ.get(DEBUG):
            raise
        sys.exit(line)


def _one_line(error: Exception) -> str | None:
    """Return the line that a known error ends a recipe with, or None.

    Ours state the remedy. With the others, libraries report wrong values, files and downloads.
    """
    text = f"error: {' '.join(str(error).split())}"
    if isinstance(error, RecipeError) or type(error).__module__.startswith("houlsby_peft"):
        return text
    if isinstance(error, (ValueError, OSError, ImportError)):
        return f"{text} (--debug shows where)"
    return None


class _Terminated(SystemExit):
    """SIGTERM. Processes that were forked from the recipe, such as those of a data loader, end with
    it silently.
    """


_received: list[int] = []  # signals that end the recipe


def _terminate(number: int, frame: object) -> NoReturn:
    _received.append(number)
    raise _Terminated(128 + number)


def end_if_terminated() -> None:
    """End the recipe if it was told to, and a library has caught the exception by which it ends.

    `datasets` catches all exceptions while it tokenizes.
    """
    if _received:
        raise _Terminated(128 + _received[0])
