"""Settings of the whole process that are changed temporarily, by one thread at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import transformers


_LOCK = threading.RLock()


@contextmanager
def set_verbosity(level: int) -> Iterator[None]:
    """Let transformers log from this level on, within the context."""
    with _LOCK:
        before = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity(level)
        try:
            yield
        finally:
            transformers.logging.set_verbosity(before)


@contextmanager
def set_environment(name: str, value: str) -> Iterator[None]:
    """Give an environment variable this value, within the context."""
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
