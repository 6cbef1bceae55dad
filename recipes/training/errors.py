"""Errors that the user can repair, and how a recipe reports them: in one line, without a traceback."""

import errno
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar


Result = TypeVar("Result")


class RecipeError(Exception):
    """A wrong flag, file or value. The message states the rule, the value received and the remedy."""


def end_with_one_line(main: Callable[[], Result]) -> Result:
    """Run a recipe; an error that the user can repair ends it with one line on stderr and exit status 1."""
    try:
        return main()
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
