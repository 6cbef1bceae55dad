"""Errors that the user can repair, and interrupts: how a recipe reports them in one line, without a traceback."""

import ctypes
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

from training.quiet import leave_out_noise


Result = TypeVar("Result")
# How a process is called that started a recipe by `accelerate launch` or `python -m accelerate.commands.launch`.
_LAUNCHERS = ("accelerate", "accelerate-launch", "accelerate.commands.launch")
_PR_SET_PDEATHSIG = 1
RESUMES = "The same command resumes from the last complete checkpoint; if there is none, it starts over."


class RecipeError(Exception):
    """A wrong flag, file or value. The message states the rule, the value received and the remedy."""


class _Terminated(SystemExit):
    """SIGTERM. Processes that were forked from the recipe, such as those of a data loader, end with it silently."""


def end_with_one_line(main: Callable[[], Result], how_to_continue: str = RESUMES) -> Result:
    """Run a recipe; an error that the user can repair, Ctrl-C or SIGTERM ends it with one line on stderr.

    The exit status is 1 after an error, 130 after Ctrl-C and 143 after SIGTERM. A signal that is ignored when the
    recipe starts, as SIGINT is in the background of a script, stays ignored.

    Args:
        main: The recipe.
        how_to_continue: What to say after an interrupt.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    _end_with_launcher()
    leave_out_noise()
    try:
        return main()
    except KeyboardInterrupt:
        _say_interrupted("Interrupted", how_to_continue)
        sys.exit(128 + signal.SIGINT)
    except _Terminated:
        _say_interrupted("Terminated", how_to_continue)
        raise
    except RecipeError as error:
        sys.exit(f"error: {error}")
    except Exception as error:
        # Imported only now: sweep.py and study_table.py start in a moment because they do not need PyTorch.
        from houlsby_peft import AdapterError, HubError

        if isinstance(error, (AdapterError, HubError)):
            sys.exit(f"error: {error}")
        if not is_full_disk(error):
            raise
        sys.exit(
            f"error: The disk is full: {' '.join(str(error).split())}. Free some space, or give another --output_dir; "
            "the same command then resumes from the last complete checkpoint."
        )


def _terminate(number: int, frame: object) -> NoReturn:
    raise _Terminated(128 + number)


def _end_with_launcher() -> None:
    """Receive SIGTERM when `accelerate launch` ends, which passes no signal on to a single process; on Linux only."""
    try:
        launcher = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return
    if any(Path(os.fsdecode(word)).name in _LAUNCHERS for word in launcher):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _say_interrupted(what: str, how_to_continue: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # as all processes of a run are interrupted
        print(f"\n{what}. {how_to_continue}", file=sys.stderr)


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error is, or was caused by, a write that found no space left."""
    return any(
        (isinstance(cause, OSError) and cause.errno == errno.ENOSPC)
        # safetensors raises errors without a number, and the writer of PyTorch's files errors without a reason.
        or "No space left on device" in str(cause)
        or ("inline_container" in str(cause) and "unexpected pos" in str(cause))
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
