"""Every model type of transformers: its layers with attention are adapted as a whole, or refused
with a remedy.

Each type is built on the meta device from its default configuration. A dozen types belong to the
ordinary tests. To check all of them, and to write a table of the outcomes, one row per type in the
order in which they finish:

    export PLACEMENT_TABLE=/tmp/placement.tsv
    python -m pytest -q -n 2 tests/placement/test_all_model_types.py
    cut -f 2 $PLACEMENT_TABLE | sort | uniq -c

The outcomes are: known (by the table of architectures), inferred, both (a composite), refused, no
attention, not built.
"""

from __future__ import annotations

import ast
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from houlsby_peft import HoulsbyConfig
from houlsby_peft.placement import places
from houlsby_peft.placement.plan import Plan
from houlsby_peft.saved.record import Place


SAMPLE = {
    "bart",  # cross-attention
    "clip",  # two towers
    "hiera",  # width changes within a stage
    "idefics",  # layers with cross-attention only
    "mllama",  # layers of two kinds in one list
    "resnet",  # no attention
    "recurrent_gemma",  # some layers without attention
    "sam2",  # width changes, and a decoder
    "swin",  # stages
    "t5",  # sub-layers in a list
    "timesfm",  # a square feed-forward, of which either layer could be the end
    "xlm",  # attentions in a list of their own
}  # fmt: skip


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention with linear projections, by the name of its class."""
    name = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return True
    if not re.search(r"Attention|Attn", name) or name.endswith("MLP"):
        return False
    linear = [part for part in module.modules() if type(part).__name__ in ("Linear", "Conv1D")]
    return len(linear) >= 2


def attentions_in_lists(model: nn.Module) -> dict[str, nn.Module]:
    """The innermost attentions, by name, that are in any numbered list."""
    attentions = {}
    for key, module in reversed(list(model.named_modules())):  # the parts of a module first
        is_in_list = re.search(r"(^|\.)\d+(\.|$)", key)
        is_outer = any(inner.startswith(f"{key}.") for inner in attentions)
        if is_in_list and is_attention(module) and not is_outer:
            attentions[key] = module
    return attentions


def layers_around(key: str) -> list[str]:
    """The items of lists that a module is inside of, or is."""
    parts = key.split(".")
    return [".".join(parts[: index + 1]) for index, part in enumerate(parts) if part.isdigit()]


def is_cross(key: str, module: nn.Module) -> bool:
    *_, own_names = re.split(r"\.\d+\.", re.sub(r"\.\d+$", "", key))
    names = f"{own_names.partition('.')[0] if own_names != key else key} {type(module).__name__}"
    # LXMERT's cross-attention is its "visual_attention".
    return bool(
        re.search(
            r"cross|enc_?dec|encoder_attn|multihead_attn|visual_attention", names, re.IGNORECASE
        )
    )


def check_whole(model: nn.Module, bottlenecks: dict[str, Place], left_out: str = "none") -> None:
    """Compare the adapted places with the layers that have attention, but for the pattern of those
    left out.
    """
    positions = defaultdict(Counter)
    for place in bottlenecks.values():
        positions[f"{place.stack}.{place.layer}"][place.position] += 1
    attentions = count_attentions(model, positions, left_out)
    for layer, count in attentions.items():
        adapted = positions[layer]
        assert adapted["attention"] == count, f"{layer} has {count} attentions, adapted: {adapted}"
        # Each layer of Nemotron-H holds a single sub-layer, so that its feed-forwards are layers of
        # their own.
        stack = layer.rpartition(".")[0]
        has_feed_forward = adapted["feed_forward"] > 0
        for name in positions.keys() - attentions.keys():
            is_beside = name.rpartition(".")[0] == stack
            has_feed_forward |= is_beside and positions[name]["feed_forward"] > 0
        assert has_feed_forward, f"{layer} has no adapted feed-forward"
    check_neighbors(model, bottlenecks, positions)


def count_attentions(model: nn.Module, adapted: Collection[str], left_out: str) -> Counter:
    """Count the attentions of each adapted layer but for cross-attentions."""
    counts = Counter()
    for key, module in attentions_in_lists(model).items():
        if not is_cross(key, module) and not re.fullmatch(left_out, key):
            around = [name for name in layers_around(key) if name in adapted]
            assert len(around) == 1, f"{key} is in {len(around)} adapted layers"
            counts[around[0]] += 1
    return counts


def check_neighbors(
    model: nn.Module, bottlenecks: dict[str, Place], positions: dict[str, Counter]
) -> None:
    """A layer without attention has its feed-forward where the others of its list have theirs. In
    Nemotron-H, a module of the same name may be a Mamba block instead, which has another class.
    """
    ends, modules = defaultdict(set), dict(model.named_modules())
    for place in bottlenecks.values():
        if place.position == "feed_forward":
            ends[place.stack].add((place.relative(place.key), type(modules[place.key])))
    for stack, adapted in ends.items():
        for index in range(len(modules[stack])):
            layer = f"{stack}.{index}"
            has_one = any(type(modules.get(f"{layer}.{name}")) is kind for name, kind in adapted)
            assert has_one == (positions[layer]["feed_forward"] > 0), layer


def build(model_type: str) -> nn.Module:
    with torch.device("meta"):
        return AutoModel.from_config(CONFIG_MAPPING[model_type]())


def outcome_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The outcome for one model and what it was, after the check of its wholeness."""
    inferred = []
    monkeypatch.setattr(
        places, "log_inferred", lambda ends: inferred.extend({stack for stack, _ in ends})
    )
    try:
        plan = Plan(model, HoulsbyConfig())
    except ValueError as error:
        message = str(error)
        assert "target_modules" in message
        assert len(message) < 4000
        assert "\n" not in message
        if remedy := re.search(r"exclude_modules=(\[.*?\]|'.*?')", message):
            pattern = excluded = ast.literal_eval(remedy[1])
            if not isinstance(excluded, str):
                pattern = "|".join(rf"{re.escape(name)}\..*" for name in excluded)
            plan = Plan(model, HoulsbyConfig(exclude_modules=excluded))
            check_whole(model, plan.bottlenecks, pattern)
        return ("refused" if attentions_in_lists(model) else "no attention"), message
    check_whole(
        model, plan.bottlenecks, r".*shared_transformer.*"
    )  # Zamba2's, without a skip connection of its own
    stacks = {place.stack for place in plan.bottlenecks.values()}
    kind = "known" if not inferred else "inferred" if stacks <= set(inferred) else "both"
    bottlenecks = len(plan.bottlenecks)
    return kind, f"{bottlenecks} bottlenecks, {len(plan.places) - bottlenecks} norms"


# What transformers warns of while it builds a model is not this test's concern.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow)
        for name in sorted(MODEL_MAPPING_NAMES)
    ],
)
def test_a_model_is_adapted_as_a_whole_or_refused(model_type, monkeypatch):
    try:
        model = build(model_type)
    except (
        Exception
    ) as error:  # the default configuration of some types is incomplete, or a package is missing
        outcome = "not built", f"{type(error).__name__}: {error}"
    else:
        outcome = outcome_of(model, monkeypatch)
    if table := os.environ.get("PLACEMENT_TABLE"):
        with Path(table).open("a", encoding="utf-8") as file:
            file.write("\t".join([model_type, outcome[0], " ".join(outcome[1].split())]) + "\n")
    if outcome[0] == "not built":
        assert model_type not in SAMPLE, outcome[1]
        pytest.skip(f"not built: {outcome[1]}")
