"""Houlsby bottleneck adapters for Hugging Face PEFT. Importing this package registers the method
"houlsby".
"""

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bottleneck import Bottleneck
from .config import HoulsbyConfig
from .derive.initialize import init_from
from .derive.layers import ablate, prune
from .errors import AdapterError, HubError
from .heads.finding import find_new_modules
from .heads.new_heads import TwoLayerHead, put_two_layer_head
from .ladder import Ladder
from .layer import HoulsbyLayer, HoulsbyLayerNorm
from .model import HoulsbyModel
from .placement.places import find_places
from .record import AdapterRecord, Place
from .registration import (
    let_adapters_lack_tokens,
    register,
    replace_template,
    undo_failed_loads,
)


if TYPE_CHECKING:
    from .adapterhub.convert import convert
    from .derive.adapter_drop import AdapterDrop
    from .export import export_onnx
    from .graphed_step import GraphedStep
    from .hub.push import plan_push, push_to_hub
    from .placement.show import placement_map
    from .serving.held_adapters import TaskSource
    from .serving.load import load
    from .serving.predictor import Predictor
    from .serving.results import AnswerPrediction, ClassPrediction, EntityPrediction
    from .serving.task_bank import TaskBank
    from .slow_up import slow_up_projections
    from .state_cache import StateCache


# Imported on first use (PEP 562), because most processes that train or apply an adapter do not need
# them.
_LAZY = {
    "AdapterDrop": ".derive.adapter_drop",
    "AnswerPrediction": ".serving.results",
    "ClassPrediction": ".serving.results",
    "EntityPrediction": ".serving.results",
    "GraphedStep": ".graphed_step",
    "Predictor": ".serving.predictor",
    "StateCache": ".state_cache",
    "TaskBank": ".serving.task_bank",
    "TaskSource": ".serving.held_adapters",
    "export_onnx": ".export",
    "convert": ".adapterhub.convert",
    "load": ".serving.load",
    "placement_map": ".placement.show",
    "plan_push": ".hub.push",
    "push_to_hub": ".hub.push",
    "slow_up_projections": ".slow_up",
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
    "slow_up_projections",
]
__version__ = version("houlsby-peft")

register(HoulsbyConfig, HoulsbyModel)


def _write_card(folder: Path) -> None:
    from .hub.card import write_card_of_saved  # most processes save no adapter

    write_card_of_saved(folder)


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
