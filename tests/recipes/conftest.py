"""Fixtures of the recipes' tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def no_bfloat16() -> Iterator[None]:
    """Lets --base_dtype auto be float32 on every machine, as tests compare scores with those of a float32 model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
        yield
