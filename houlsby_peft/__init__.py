"""Houlsby bottleneck adapters for Hugging Face PEFT. Importing this package registers the method "houlsby"."""

from importlib.metadata import version

from .bottleneck import Bottleneck
from .config import HoulsbyConfig
from .layer import HoulsbyLayer, HoulsbyLayerNorm
from .model import HoulsbyModel
from .registration import register


__all__ = ["Bottleneck", "HoulsbyConfig", "HoulsbyLayer", "HoulsbyLayerNorm", "HoulsbyModel"]
__version__ = version("houlsby-peft")

register(HoulsbyConfig, HoulsbyModel)
