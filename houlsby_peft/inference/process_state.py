"""Settings of the whole process that are changed for a moment: by one thread at a time, so that each finds them again
as they were."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import transformers


_LOCK = threading.RLock()


@contextmanager
def verbosity(level: int) -> Iterator[None]:
    """transformers logs from this level on."""
    with _LOCK:
        before = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity(level)
        try:
            yield
        finally:
            transformers.logging.set_verbosity(before)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """An environment variable has this value."""
    with _LOCK:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before


@contextmanager
def raised_warnings(message: str) -> Iterator[None]:
    """Warnings whose text matches this regular expression are raised."""
    with _LOCK, warnings.catch_warnings():
        warnings.filterwarnings("error", message=message)
        yield
