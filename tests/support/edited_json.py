"""A JSON file that a test changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def edited_json(path: Path) -> Iterator[Any]:
    """The content of a file, which is written back with the changes made in this context."""
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))
