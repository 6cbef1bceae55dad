"""Houlsby bottleneck adapters for Hugging Face PEFT. Importing this package registers the method "houlsby"."""

from importlib.metadata import version

from .ablation import ablate, prune
from .bottleneck import Bottleneck
from .config import HoulsbyConfig
from .errors import AdapterError, HubError
from .hub.push import push_to_hub
from .inference.load import load
from .inference.predictor import Predictor
from .inference.task_bank import TaskBank
from .layer import HoulsbyLayer, HoulsbyLayerNorm
from .model import HoulsbyModel
from .registration import register


__all__ = [
    "AdapterError",
    "Bottleneck",
    "HoulsbyConfig",
    "HoulsbyLayer",
    "HoulsbyLayerNorm",
    "HoulsbyModel",
    "HubError",
    "Predictor",
    "TaskBank",
    "ablate",
    "load",
    "prune",
    "push_to_hub",
]
__version__ = version("houlsby-peft")

register(HoulsbyConfig, HoulsbyModel)
