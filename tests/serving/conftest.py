"""What the tests of banks and of the service ask: three adapters in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from hub_models import make_adapter


TASKS = ("first", "second", "third")


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters "first", "second" and "third", which stays as it is."""
    path = tmp_path_factory.mktemp("service") / "adapters"
    for seed, task in enumerate(TASKS):
        make_adapter(path / task, base, str(base), seed)
    return path
