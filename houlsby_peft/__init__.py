"""Houlsby bottleneck adapters for Hugging Face PEFT. Importing this package registers the method
"houlsby".
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import HoulsbyConfig
from .derive.initialize import init_from
from .derive.layers import ablate, prune
from .errors import AdapterError, HubError
from .heads.finding import find_new_modules
from .heads.new_heads import TwoLayerHead, put_two_layer_head
from .method.bottleneck import Bottleneck
from .method.ladder import Ladder
from .method.layer import HoulsbyLayer, HoulsbyLayerNorm
from .model import HoulsbyModel
from .placement.places import find_places
from .registration import (
    let_adapters_lack_tokens,
    register,
    replace_template,
    undo_failed_loads,
)
from .saved.record import AdapterRecord, Place


if TYPE_CHECKING:
    from .adapterhub.convert import convert
    from .export.onnx_files import export_onnx
    from .hub.push import plan_push, push_to_hub
    from .placement.show import placement_map
    from .predict.held_adapters import TaskSource
    from .predict.load import load
    from .predict.predictor import Predictor
    from .predict.results import AnswerPrediction, ClassPrediction, EntityPrediction
    from .predict.task_bank import TaskBank
    from .training.adapter_drop import AdapterDrop
    from .training.graphed_step import GraphedStep
    from .training.state_cache import StateCache


# Imported on first use (PEP 562), because most processes that train or apply an adapter do not need
# them.
_LAZY = {
    "AdapterDrop": ".training.adapter_drop",
    "AnswerPrediction": ".predict.results",
    "ClassPrediction": ".predict.results",
    "EntityPrediction": ".predict.results",
    "GraphedStep": ".training.graphed_step",
    "Predictor": ".predict.predictor",
    "StateCache": ".training.state_cache",
    "TaskBank": ".predict.task_bank",
    "TaskSource": ".predict.held_adapters",
    "export_onnx": ".export.onnx_files",
    "convert": ".adapterhub.convert",
    "load": ".predict.load",
    "placement_map": ".placement.show",
    "plan_push": ".hub.push",
    "push_to_hub": ".hub.push",
}

__all__ = [
    "AdapterDrop",
    "AdapterError",
    "AdapterRecord",
    "AnswerPrediction",
    "Bottleneck",
    "ClassPrediction",
    "EntityPrediction",
    "GraphedStep",
    "HoulsbyConfig",
    "HoulsbyLayer",
    "HoulsbyLayerNorm",
    "HoulsbyModel",
    "HubError",
    "Ladder",
    "Place",
    "Predictor",
    "StateCache",
    "TaskBank",
    "TaskSource",
    "TwoLayerHead",
    "ablate",
    "convert",
    "export_onnx",
    "find_new_modules",
    "find_places",
    "init_from",
    "load",
    "placement_map",
    "plan_push",
    "prune",
    "push_to_hub",
    "put_two_layer_head",
]
__version__ = version("houlsby-peft")

register(HoulsbyConfig, HoulsbyModel)


def _write_card(folder: Path, tags: Sequence[str]) -> None:
    from .hub.card import write_card_of_saved  # most processes save no adapter

    write_card_of_saved(folder, metadata={"tags": list(tags)} if tags else None)


HoulsbyConfig.write_card = staticmethod(_write_card)
replace_template(_write_card)
let_adapters_lack_tokens()
undo_failed_loads()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
