"""Any valid configuration survives being copied, saved and loaded; anything else is refused in one line."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as some
from peft import PeftConfig, TaskType
from transformers.activations import ACT2FN

from houlsby_peft import HoulsbyConfig
from houlsby_peft.config import POSITIONS, PROBLEM_TYPES


# The same examples in every run.
EXAMPLES = settings(max_examples=60, derandomize=True, database=None, deadline=None)
NAME = some.from_regex(r"[a-z_]{1,8}(\.[a-z0-9]{1,4})?", fullmatch=True)
NAMES = some.lists(NAME, min_size=1, max_size=3)
INDICES = some.lists(some.integers(0, 50), min_size=1, max_size=3)
LABELS = some.lists(some.text(some.characters(exclude_categories=["Cs"])), min_size=1, max_size=4)
FIELDS = {
    "r": some.integers(1, 4096),
    "activation": some.sampled_from(sorted(ACT2FN)),
    "dropout": some.floats(0, 1, exclude_max=True),
    "share_layers": some.integers(0, 99),
    "init_std": some.floats(0, 1),
    "train_layer_norm": some.sampled_from([True, False, "all"]),
    "init_weights": some.booleans(),
    "positions": some.lists(some.sampled_from(POSITIONS), min_size=1, unique=True).map(tuple),
    "target_modules": some.none() | NAMES | NAME,
    "exclude_modules": some.none() | NAMES | NAME,
    "layers_to_transform": some.integers(0, 50) | INDICES,
    "layers_pattern": some.none() | NAME | NAMES,
    "modules_to_save": some.none() | NAMES,
    "trainable_token_indices": some.none() | INDICES | some.dictionaries(NAME, INDICES, max_size=2),
    "id2label": some.none() | LABELS.map(lambda names: dict(enumerate(names))),
    "problem_type": some.none() | some.sampled_from(PROBLEM_TYPES),
    "two_layer_head": some.booleans(),
    "task_type": some.none() | some.sampled_from(list(TaskType)),
    "revision": some.none() | some.text(max_size=5),
}
JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=4),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def refusal_of(call: Callable[[], object], kind: type[Exception]) -> str | None:
    """Return the message of an error of this kind, which must be one line; None if there is no error."""
    try:
        call()
    except kind as error:
        message = str(error)
    else:
        return None
    assert "\n" not in message
    assert len(message) < 1000
    return message


@EXAMPLES
@given(some.fixed_dictionaries({}, optional=FIELDS))
def test_a_valid_configuration_survives_copying_and_its_file(fields):
    if "layers_to_transform" not in fields:
        fields.pop("layers_pattern", None)
    config = HoulsbyConfig(**fields)
    assert HoulsbyConfig(**config.to_dict()) == config
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        assert HoulsbyConfig.from_pretrained(folder) == config
        assert PeftConfig.from_pretrained(folder) == config


@EXAMPLES
@given(some.sampled_from([*FIELDS, "rank_pattern", "recorded"]), JSON)
def test_any_other_value_is_refused_in_one_line_that_names_the_field(name, value):
    refusal = refusal_of(lambda: HoulsbyConfig(**{name: value}), ValueError)
    assert refusal is None or name in refusal or name == "task_type"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "adapter_config.json").write_text(json.dumps({"peft_type": "HOULSBY", name: value}))
        assert refusal_of(lambda: HoulsbyConfig.from_pretrained(folder), ValueError) == refusal
