"""Answers of predictors, as values that nearly compare."""

from __future__ import annotations

from typing import Any

import pytest


def near(answer: Any) -> Any:
    """The answer with every number in it as one that nearly compares."""
    if isinstance(answer, dict):
        return {key: near(value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [near(value) for value in answer]
    return pytest.approx(answer, rel=1e-3, abs=1e-5) if isinstance(answer, float) else answer
