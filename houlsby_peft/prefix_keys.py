"""What identifies the activations of `FrozenPrefix`: the weights that compute them, and the text."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from .layer import HoulsbyLayer, HoulsbyTunerLayer
from .prefix_store import KEY_BYTES
from .registration import PREFIX


@dataclass(frozen=True)
class Texts:
    """The texts that an encoder is called with.

    Args:
        inputs: The encoder's arguments, by name.
        mask: Whether each token is part of its text, `(texts, tokens)`; False at padding.
        per_text: Names of the arguments that have one entry per text.
    """

    inputs: dict[str, Any]
    mask: torch.Tensor
    per_text: frozenset[str]

    @classmethod
    def read(cls, encoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Texts:
        """Return the texts of a call of an encoder.

        Raises:
            ValueError: An argument does not identify texts.
        """
        bound = inspect.signature(encoder.forward).bind(*args, **kwargs)
        inputs = bound.arguments
        inputs |= inputs.pop("kwargs", {})
        ids = inputs.get("input_ids")
        if ids is None:
            raise ValueError(
                "FrozenPrefix recognizes texts by their input_ids; got none. Pass input_ids, or call remove() first."
            )
        if inputs.get("output_attentions", getattr(getattr(encoder, "config", None), "output_attentions", False)):
            raise ValueError(
                "FrozenPrefix does not cache attention probabilities; got output_attentions=True. Leave it out, or "
                "call remove() first."
            )
        per_text = set()
        for name, value in inputs.items():
            if _is_setting(name, value):
                continue
            is_tensor = isinstance(value, torch.Tensor)
            if (
                not is_tensor
                or (name == "attention_mask" and value.shape != ids.shape)
                or (name in _POSITIONS and value.dim() > 2)
            ):
                got = f"the shape {tuple(value.shape)}" if is_tensor else type(value).__name__
                raise ValueError(
                    "FrozenPrefix recognizes texts by the tensors that the model is called with. Positions must have "
                    "at most two dimensions, and attention_mask must have the shape of input_ids, "
                    f"{tuple(ids.shape)}; got {name} of {got}. Leave it out, or call remove() first."
                )
            if value.shape == ids.shape or (name not in _POSITIONS and value.shape[:1] == ids.shape[:1]):
                per_text.add(name)
        mask = inputs.get("attention_mask")
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        return cls(inputs, mask, frozenset(per_text))

    def select(self, rows: list[int]) -> Texts:
        """Return some of the texts."""
        index = torch.tensor(rows, device=self.mask.device)
        inputs = {
            name: value.index_select(0, index.to(value.device)) if name in self.per_text else value
            for name, value in self.inputs.items()
        }
        return replace(self, inputs=inputs, mask=self.mask[index])

    def keys(self) -> list[bytes]:
        """Return a key for each text, of all that its activations depend on beside the weights."""
        device = self.mask.device.type
        precision = str(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else "").encode()
        whole: dict[str, torch.Tensor] = {}
        per_row: dict[str, torch.Tensor] = {}
        per_token: dict[str, torch.Tensor] = {}
        for name, value in sorted(self.inputs.items()):
            if _is_setting(name, value) or name == "attention_mask":
                continue
            if name in _POSITIONS:
                value = value.expand(self.mask.shape)
            is_per_token = value.shape[:2] == self.mask.shape
            kind = per_token if is_per_token else per_row if name in self.per_text else whole
            kind[name] = value.detach().cpu()
        keys = []
        for row, own in enumerate(self.mask.cpu()):
            digest = hashlib.blake2b(precision, digest_size=KEY_BYTES - 1)
            # The indices of the tokens are part of the key: padding on the left changes the position embeddings.
            digest.update(own.nonzero().numpy().tobytes())
            for name, value in whole.items():
                digest_tensor(digest, name, value)
            for name, value in per_row.items():
                digest_tensor(digest, name, value[row])
            for name, value in per_token.items():
                digest_tensor(digest, name, value[row][own])
            keys.append(digest.digest())
        return keys


# One entry per token, which may be the same for all texts.
_POSITIONS = ("position_ids", "cache_position")


def _is_setting(name: str, value: Any) -> bool:
    """Return whether an argument says how to run and not which texts."""
    # The number of labels in a step, with which transformers' Trainer scales the loss.
    return value is None or isinstance(value, (bool, int, float, str)) or name == "num_items_in_batch"


def digest_modules(modules: Iterable[nn.Module]) -> str:
    """Return a digest of the classes and the frozen weights of modules, those of active adapters included."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(type(module).__name__.encode())
        for name, weight in module.state_dict().items():
            if weight.is_meta:
                raise ValueError(
                    "FrozenPrefix identifies a folder by the frozen weights, which must be in memory; "
                    f"{name} of a {type(module).__name__} is offloaded. Use folder=None, or load the model without "
                    "offloading."
                )
            if PREFIX not in name:
                digest_tensor(digest, name, weight)
        for place, inner in module.named_modules():
            if isinstance(inner, HoulsbyTunerLayer):
                _digest_adapters(digest, place, inner)
            elif isinstance(inner, AuxiliaryTrainingWrapper):
                # The weights of all its adapters are in the state above; which of them compute is not.
                digest.update(f"{place} {inner.active_adapters} {inner.disable_adapters}".encode())
    return digest.hexdigest()[:32]


def _digest_adapters(digest: Any, place: str, layer: HoulsbyTunerLayer) -> None:
    """Add the adapters to a digest that a layer applies and that are not trained, in their order."""
    if layer.disable_adapters:
        return
    for name in layer.active_adapters:
        added = [getattr(layer, container) for container in layer.adapter_layer_names]
        # A shared bottleneck may be registered in another layer.
        own: list[Any] = [layer.bottleneck(name)] if isinstance(layer, HoulsbyLayer) else []
        own += [container[name] for container in added if name in container and not own]
        for adapter in own:
            if adapter is None or any(weight.requires_grad for weight in adapter.parameters()):
                continue
            # Its repr has the activation, which is no weight.
            kind, scaling = getattr(adapter, "kind", ""), getattr(adapter, "scaling", "")
            factor = "" if isinstance(scaling, torch.Tensor) else scaling
            digest.update(f"{place} {name} {kind} {factor} {adapter!r}".encode())
            for key, weight in adapter.state_dict().items():
                digest_tensor(digest, key, weight)


def digest_tensor(digest: Any, name: str, weight: torch.Tensor) -> None:
    digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
    digest.update(weight.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
