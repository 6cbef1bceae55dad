"""Damaged adapter folders through every way that an adapter is used; see `tests/support/torture.py`."""

from __future__ import annotations

import pytest

from torture import torture


# Damage that was once accepted or badly refused: a size, a task type, a factor, recorded places, a card's metadata.
ONCE_WRONG = (211, 465, 502, 954, 1991)


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((*range(1, 13), *ONCE_WRONG), id="sample"),
        pytest.param(range(2000), id="all", marks=pytest.mark.slow),
    ],
)
def test_each_loads_with_its_outputs_or_is_refused_in_one_line_and_leaves_nothing(numbers):
    found = torture(list(numbers))
    assert len(found) == len(numbers)
    assert {way for _, _, outcomes, _, _ in found for way in outcomes} >= {
        "load",
        "from_pretrained",
        "predict",
        "push",
    }
    assert any("loaded" in outcomes.values() for _, _, outcomes, _, _ in found)
    problems = [f"{number} ({what}): {problem}" for number, what, _, problems, _ in found for problem in problems]
    assert not problems, "\n".join(problems)
