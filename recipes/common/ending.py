"""How a recipe ends: with one line, where the user can repair what went wrong."""

import errno
import sys
from collections.abc import Callable, Iterator

from common.errors import RecipeError
from houlsby_peft import AdapterError, HubError


def end_with_one_line(main: Callable[[], None]) -> None:
    """Runs a recipe; what the user can repair ends it with a line on stderr and the exit status 1."""
    try:
        main()
    except (RecipeError, AdapterError, HubError) as error:
        sys.exit(f"error: {error}")
    except Exception as error:
        if not is_full_disk(error):
            raise
        sys.exit(
            f"error: The disk is full: {' '.join(str(error).split())}. Free some space, or give another --output_dir; "
            "the same command then goes on from the last whole checkpoint."
        )


def is_full_disk(error: BaseException) -> bool:
    """Whether an error is, or was raised because of, a write that found no space left."""
    return any(
        (isinstance(cause, OSError) and cause.errno == errno.ENOSPC)
        # Errors of safetensors, without a number, and of the writer of PyTorch's files, without a reason.
        or "No space left on device" in str(cause)
        or ("inline_container" in str(cause) and "unexpected pos" in str(cause))
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
