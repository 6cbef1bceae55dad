"""Print where the adapters of a configuration go in a model.

As a command, from the model's configuration alone; no weights are needed:

    python -m houlsby_peft.placement bert-base-uncased --model_class BertForSequenceClassification
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from ..config import KINDS, HoulsbyConfig
from ..saved.downloads import find_packaged
from ..saved.record import Place, fold_places
from .plan import Plan
from .view import output_width


def placement_map(model: nn.Module, config: HoulsbyConfig | None = None) -> str:
    """Return a readable map of the places and sizes of a configuration's adapters in a model.

    The map has a line for each kind of place, with its layers folded, the module's name and the
    width of its output. The numbers of trained parameters follow. The model is not changed, and may
    be on the meta device.

    Args:
        model: The base model.
        config: The configuration. Default: `HoulsbyConfig()`.

    Raises:
        ValueError: The places cannot be found; see `find_places`.
    """
    plan = Plan(model, config or HoulsbyConfig())
    sizes = _count_parameters(plan)
    trainable, total = sum(sizes.values()), _size(model)
    sizes[f"trainable ({trainable / total:.2%} of the base model's {total:,})"] = trainable
    numbers = [(part, f"{size:,}") for part, size in sizes.items()]
    places = _align(_describe_places(plan))
    return "\n".join([type(model).__name__, "", *places, "", *_align(numbers)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m houlsby_peft.placement",
        description=__doc__.split("\n")[0],
        epilog="The flags without a description are fields of HoulsbyConfig.",
    )
    parser.add_argument(
        "model", help="model on the Hub or local folder; only its configuration is read"
    )
    parser.add_argument(
        "--model_class", help="class in transformers; default: the one that the configuration names"
    )
    defaults = HoulsbyConfig()
    parser.add_argument("--r", type=int, default=defaults.r)
    parser.add_argument("--share_layers", type=int, default=defaults.share_layers)
    parser.add_argument("--kind", choices=KINDS, default=defaults.kind)
    parser.add_argument("--invertible", choices=("nice",))
    parser.add_argument("--positions", nargs="+", metavar="POSITION")
    options = vars(parser.parse_args(arguments))
    name, class_name = options.pop("model"), options.pop("model_class")
    try:
        config = transformers.AutoConfig.from_pretrained(
            find_packaged(name), trust_remote_code=False
        )
        if class_name is None:
            class_name, *_ = config.architectures or ["AutoModel"]
        model_class: Any = getattr(transformers, class_name)
        make = model_class.from_config if class_name.startswith("Auto") else model_class
        with torch.device("meta"):  # without weights
            model = make(config)
        print(placement_map(model, HoulsbyConfig(**options)))
    except (AttributeError, OSError, ValueError) as error:
        parser.error(str(error))


def _describe_places(plan: Plan) -> list[tuple[str, ...]]:
    """Return layers, position, module and width of each kind of place."""
    by_width: dict[int, list[Place]] = {}
    for key, place in plan.places.items():
        by_width.setdefault(output_width(key, plan.reference(place)), []).append(place)
    kinds: list[tuple[str, ...]] = []
    for width, places in by_width.items():
        for kind in fold_places(places):
            layers = f"{kind['stack']}.{kind['layers']}".strip(".")
            kinds.append((layers, kind["position"], kind["module"], f"{width:,}"))
    return kinds


def _count_parameters(plan: Plan) -> dict[str, int]:
    """Return the numbers of parameters that train, by what they belong to."""
    config = plan.config
    with torch.device("meta"):
        bottlenecks = _make_owned(plan, plan.bottlenecks)
        couplings = _make_owned(plan, plan.couplings)
    # A place on a tuner layer counts as the module that it wraps.
    norms = [plan.reference(place) for place in plan.places.values() if place.is_norm]
    places = f"{len(bottlenecks)} bottlenecks at {len(plan.bottlenecks)} places (r={config.r})"
    if config.kind == "ladder":
        places = f"a ladder that ends at 1 place (r={config.r})"
    sizes = {
        places: sum(map(_size, bottlenecks)),
        f"{len(norms)} norms": sum(map(_size, norms)),
    }
    if couplings:
        sizes[f"invertible module ({config.invertible})"] = sum(map(_size, couplings))
    for name in plan.heads:
        sizes[f"module to save: {name}"] = _size(plan.head(name))
    return sizes


def _make_owned(plan: Plan, places: Mapping[str, Place]) -> list[nn.Module]:
    """Return a new module for each of these places that owns one."""
    return [plan.new_bottleneck(place) for key, place in places.items() if plan.owners[key] == key]


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _align(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Return lines with aligned columns; the numbers in the last one are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = []
    for *cells, number in lines:
        padded = [*map(str.ljust, cells, widths), number.rjust(widths[-1])]
        aligned.append("  ".join(padded))
    return aligned
