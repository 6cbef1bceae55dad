"""`FrozenPrefix` under the name of its first module; import it from `houlsby_peft`."""

from .prefix_cache import FrozenPrefix


__all__ = ["FrozenPrefix"]
