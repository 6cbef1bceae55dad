"""Fixtures of every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest


if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from local_hub import LocalHub


# In the background (`nohup pytest &`) Ctrl-C is ignored, which every process that a test starts and
# interrupts would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The folders whose files take longest. With the others at the end, no worker waits long for the
# other one.
LONGEST = ("distributed", "serving", "recipes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in LONGEST)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Never the bytes of a file: an archive holds the second that it was packed in."""
    return argname if isinstance(val, bytes) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    import torch  # not by the process that only hands out the tests
    import transformers
    from packaging.version import Version

    transformers.set_seed(0)  # so that no test depends on those that ran before it
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if "instructblip" in item.name.lower() and Version(transformers.__version__) < Version("5.22"):
        pytest.skip(
            "transformers before 5.22 makes InstructBLIP's Q-Former with the configuration of the "
            "whole model"
        )


@pytest.fixture
def token_ids() -> torch.Tensor:
    """A batch of 5 sentences of 7 tokens."""
    import torch

    return torch.randint(0, 99, (5, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    """A Hugging Face Hub of its own for the tests of a file."""
    from local_hub import LocalHub  # needs uvicorn and starlette, which other tests do not

    with LocalHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny BERT with a tokenizer, for the tests of a file."""
    from hub_models import make_base

    return make_base(tmp_path_factory.mktemp("base"))
