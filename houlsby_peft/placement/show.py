"""Print where the adapters of a configuration go in a model.

As a command, from the model's configuration alone; no weights are needed:

    python -m houlsby_peft.placement bert-base-uncased --r 64 --model_class
    AutoModelForSequenceClassification
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import transformers
from torch import nn

from ..checkpoints.downloads import find_packaged
from ..config import KINDS, HoulsbyConfig
from ..record import Place, fold_places
from .places import output_width
from .plan import Plan


def placement_map(model: nn.Module, config: HoulsbyConfig | None = None) -> str:
    """Return a readable map of where the adapters of a configuration go in a model, and how large
    they are.

    The map has a line for each kind of place, with its layers folded, the module's name and the
    width of its output; then the numbers of trained parameters. The model is not changed, and may
    be on the meta device.

    Args:
        model: The base model.
        config: The configuration. Default: `HoulsbyConfig()`.

    Raises:
        ValueError: The places cannot be found; see `find_places`.
    """
    plan = Plan(model, config or HoulsbyConfig())
    rows = []
    by_width: dict[int, list[Place]] = {}
    for key, place in plan.places.items():
        by_width.setdefault(output_width(key, plan.reference(place)), []).append(place)
    for width, places in by_width.items():
        for row in fold_places(places):
            layers = f"{row['stack']}.{row['layers']}".lstrip(".") if row["layers"] else ""
            rows.append((layers, row["position"], row["module"], f"{width:,}"))
    with torch.device("meta"):
        owned = [
            plan.new_bottleneck(place)
            for key, place in plan.bottlenecks.items()
            if plan.owners[key] == key
        ]
        couplings = [
            plan.new_bottleneck(place)
            for key, place in plan.couplings.items()
            if plan.owners[key] == key
        ]
    # A place on a tuner layer counts as the module that it wraps.
    norms = [plan.reference(place) for place in plan.places.values() if place.is_norm]
    trained: dict[str, Sequence[nn.Module]] = {
        f"{len(owned)} bottlenecks at {len(plan.bottlenecks)} places (r={plan.config.r})": owned,
        f"{len(norms)} norms": norms,
        **({f"invertible module ({plan.config.invertible})": couplings} if couplings else {}),
        **{
            f"module to save: {key}": [own or model.get_submodule(key)]
            for key, own in plan.heads.items()
        },
    }
    sizes = {what: sum(_size(module) for module in modules) for what, modules in trained.items()}
    total, base = sum(sizes.values()), _size(model)
    sizes[f"trainable ({total / base:.2%} of the base model's {base:,})"] = total
    numbers = [(what, f"{size:,}") for what, size in sizes.items()]
    return "\n".join([type(model).__name__, "", *_align(rows), "", *_align(numbers)])


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
    name, model_class = options.pop("model"), options.pop("model_class")
    try:
        # On the meta device, from its configuration; code from the Hub is not run.
        model_config = transformers.AutoConfig.from_pretrained(
            find_packaged(name), trust_remote_code=False
        )
        class_name = model_class or next(iter(model_config.architectures or []), "AutoModel")
        cls = getattr(transformers, class_name)
        with torch.device("meta"):
            model = (
                cls.from_config(model_config)
                if class_name.startswith("Auto")
                else cls(model_config)
            )
        print(placement_map(model, HoulsbyConfig(**options)))
    except (AttributeError, OSError, ValueError) as error:
        parser.error(str(error))


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns; the last column holds numbers, which are aligned
    to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([*map(str.ljust, row[:-1], widths), row[-1].rjust(widths[-1])]) for row in rows
    ]
