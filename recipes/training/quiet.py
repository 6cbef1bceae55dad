"""Messages of libraries that the user of a recipe cannot act on: each is left out by its logger or category and its
text. Everything else that a library logs or warns of is shown."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


# A warning's category, by the beginning of its text.
_WARNINGS = {
    # PEFT reads the attribute under the name that transformers 5.23 deprecates.
    "`is_gradient_checkpointing` is deprecated": FutureWarning,
    # accelerate passes the argument to DDP under the name that torch 2.13 deprecates.
    "`broadcast_buffers` is deprecated": FutureWarning,
}
# The beginning of a message, by its logger.
_MESSAGES = {
    # accelerate imports DeepSpeed wherever it is installed.
    "DeepSpeed": "Setting accelerator to CPU",
    # A recipe decides the number of labels; the checkpoint's labels are those of a head that is not used.
    "transformers.configuration_utils": "You passed `num_labels=",
    # Of several validation splits, such as MNLI's two, only one chooses the best epoch. A wrong name is refused.
    "transformers.trainer_callback": "early stopping required metric_for_best_model, but did not find",
    # The folder of a run has been moved. The best checkpoint is found by its name, or the run does not resume.
    "transformers.trainer": "The best checkpoint ",
    # Two checkpoints within a second, of a tiny run. The numbers of their steps order them as well.
    "transformers.trainer_utils": "mtime may not be reliable",
}
# What transformers logs of a checkpoint without the head: the table of weights, and that two tied ones are absent.
_ABOUT_WEIGHTS = ("LOAD REPORT", "specifies to tie")


def leave_out_noise() -> None:
    """Leave out, from now on and in this process, what only says that other libraries use each other; show progress
    bars of transformers and datasets on terminals only, and those of transformers only if they take seconds."""
    for text, category in _WARNINGS.items():
        warnings.filterwarnings("ignore", re.escape(text), category)
    for name, text in _MESSAGES.items():
        if not (name == "DeepSpeed" and _uses_deepspeed()):
            logging.getLogger(name).addFilter(lambda record, text=text: not record.getMessage().startswith(text))
    # Only libraries that a recipe has imported: sweep.py starts in a moment because it imports neither.
    if "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.set_tqdm_hook(_show_long_bars)
    if "datasets" in sys.modules and not sys.stderr.isatty():
        sys.modules["datasets"].disable_progress_bars()


def _uses_deepspeed() -> bool:
    launched = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    return launched or any(word.partition("=")[0] == "--deepspeed" for word in sys.argv)


def _show_long_bars(bar: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    return bar(*arguments, **{"disable": None, "leave": False, "delay": 2, **options})


@contextmanager
def hold_load_report() -> Iterator[list[logging.LogRecord]]:
    """Hold back what transformers logs of weights that a checkpoint lacks or has besides, and log it at the end.

    Clear the list that is yielded to leave it out.
    """
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        is_report = any(words in record.getMessage() for words in _ABOUT_WEIGHTS)
        held.extend([record] * is_report)
        return not is_report

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(hold)
    try:
        yield held
    finally:
        logger.removeFilter(hold)
        for record in held:
            logger.handle(record)
