"""Houlsby bottleneck adapters for Hugging Face PEFT. Importing this package registers the method "houlsby"."""

from importlib.metadata import version

from .ablation import ablate, prune
from .bottleneck import Bottleneck
from .config import HoulsbyConfig
from .errors import AdapterError, HubError
from .frozen_prefix import FrozenPrefix
from .hub.push import plan_push, push_to_hub
from .inference.load import load
from .inference.predictor import Predictor
from .inference.task_bank import TaskBank
from .layer import HoulsbyLayer, HoulsbyLayerNorm
from .model import HoulsbyModel
from .new_modules import find_new_modules
from .placement import placement_map
from .places import Place, find_places
from .pretraining import init_from
from .registration import register
from .two_layer_head import put_two_layer_head


__all__ = [
    "AdapterError",
    "Bottleneck",
    "FrozenPrefix",
    "HoulsbyConfig",
    "HoulsbyLayer",
    "HoulsbyLayerNorm",
    "HoulsbyModel",
    "HubError",
    "Place",
    "Predictor",
    "TaskBank",
    "ablate",
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
