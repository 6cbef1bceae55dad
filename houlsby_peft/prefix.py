"""The frozen layers below the lowest adapted one: found, and computed once per text by
`FrozenPrefix`.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from .placement.places import find_places
from .registration import PREFIX


class FrozenPrefix:
    """Cache the output of the frozen layers below the lowest trained layer, until `remove` is
    called.

    If only upper layers have adapters, the layers below them compute the same activations for a
    text in every epoch, provided that their dropout is off. `FrozenPrefix` computes them without
    dropout, also in training mode, and caches their output by the tokens of each text. A text is
    computed the first time it appears in a batch. From the second epoch on, the frozen layers do
    not run.

    While the cache is in use, do not change the frozen weights or the active adapters, and pass
    texts as `input_ids`, with an `attention_mask` if they are padded. Other tensors, such as
    LayoutLM's `bbox`, also identify a text. The hidden states of padding tokens are zeros.
    `output_hidden_states`, `output_attentions` and `adapter_names` are refused.

    Args:
        model: Model with adapters in the upper layers of a single encoder or decoder. It is changed
            in place.
        max_bytes: Maximum size of the cache in bytes. Texts that do not fit are computed every
            time.
        folder: Folder for the cache. Later runs reuse its content, and several processes may use it
            at the same time. The cache is in a subfolder named after a digest of the frozen
            weights, those of other active adapters included, so a folder can serve many models and
            data sets. Pass None to keep the cache in memory.

    Attributes:
        index: Index of the lowest trained layer, which is also the number of frozen layers.

    Raises:
        ValueError: No layer below the lowest trained layer is frozen, or the trained adapters are
            not in a single list of layers. The first forward pass raises it if the frozen layers
            pass on more than hidden states, as T5's position biases.
    """

    def __init__(
        self,
        model: PeftModel,
        max_bytes: int = 4 * 10**9,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        base: Any = model.get_base_model()
        tuner: Any = model.base_model
        is_trained = {key for key, weight in base.named_parameters() if weight.requires_grad}
        trained = [
            name
            for name in tuner.active_adapters
            if any(
                f".{PREFIX}{kind}.{name}." in key
                for key in is_trained
                for kind in ("adapter", "norm")
            )
        ]
        found = [
            place
            for name in trained
            for place in find_places(base, base.peft_config[name]).values()
        ]
        adapted = [(place.stack, place.layer) for place in found if place.layer is not None]
        stacks = sorted({stack for stack, _ in adapted})
        stack, self.index = min(adapted, default=("", 0))
        layers, tokens = list(base.get_submodule(stack).children()), base.get_input_embeddings()
        # The smallest module with the embeddings and the layers. A user may call it or a module
        # around it.
        while tokens not in set(base.get_submodule(stack).modules()):
            stack = stack.rpartition(".")[0]
        self._encoder = base.get_submodule(stack)
        self._frozen, upper = layers[: self.index], layers[self.index :]
        lowest = set(upper[0].parameters())
        below = takewhile(lambda weight: weight not in lowest, self._encoder.parameters())
        problem = None
        if len(stacks) != 1:
            problem = f"the adapters are in {' and '.join(stacks) or 'no list'}"
        elif self.index == 0 or any(weight.requires_grad for weight in below):
            problem = f"{'layer 0 is' if self.index == 0 else 'the embeddings are'} trained"
        if problem:
            raise ValueError(
                "FrozenPrefix needs adapters in one list of layers, and below them frozen embeddings and at least one "
                f"frozen layer; here {problem}. Adapt upper layers of a single encoder or decoder only, with "
                "layers_to_transform, and set neither train_layer_norm='all' nor invertible."
            )
        if folder is not None:
            others = [
                repr(base.peft_config[name])
                for name in tuner.active_adapters
                if name not in trained
            ]
            folder = Path(folder, _digest(self._encoder, upper, repr((self._frozen, others))))
        self._store = Store(max_bytes, folder)
        # How many things each frozen layer returns in a tuple; None: a tensor.
        self._lengths: dict[nn.Module, int | None] = {}
        # What the last of them returns for the texts of the batch that is running, `(texts, tokens,
        # width)`.
        self._known: torch.Tensor | None = None
        # While they run for texts that are not in the cache: what the last one has returned, and
        # all others beside it.
        self._hidden: Any = None
        self._passed_on: list[Any] | None = None
        self._forward, enter = self._encoder.forward, tuner._enable_peft_forward_hooks

        # Not in the encoder: it also runs to find the rows of a mixed batch, and errors there would
        # not be raised.
        def refuse_names(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("adapter_names") is not None:
                raise ValueError(
                    f"FrozenPrefix caches the frozen layers with the active adapters; got adapter_names. {_REMEDY}"
                )
            return enter(*args, **kwargs)

        self._undo = [
            *(
                _override(each, "forward", partial(self._run, each, each.forward))
                for each in self._frozen
            ),
            upper[0].register_forward_pre_hook(self._stop, prepend=True, with_kwargs=True).remove,
            _override(tuner, "_enable_peft_forward_hooks", refuse_names),
            # With the same signature: transformers' Trainer leaves out the columns that a model
            # does not name.
            _override(
                self._encoder, "forward", update_wrapper(partial(self._encode), self._forward)
            ),
        ]

    def remove(self) -> None:
        """Restore the model. The content of a folder is kept."""
        while self._undo:
            self._undo.pop()()

    def _encode(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder's output, with the activations of its texts looked up, in place of its
        `forward`.
        """
        texts = _Texts.read(self._forward, getattr(self._encoder, "config", None), args, kwargs)
        keys = texts.keys()
        rows = [self._store.get(key) for key in keys]
        missing = [number for number, row in enumerate(rows) if row is None]
        if not self._lengths and not missing:
            self._compute(texts.select([0]))
        if missing:
            computed = self._compute(texts.select(missing))
            new = {
                number: output[texts.mask[number]]
                for number, output in zip(missing, computed, strict=True)
            }
            self._store.put({keys[number]: own for number, own in new.items()})
            rows = [new.get(number, row) for number, row in enumerate(rows)]
        tokens = torch.cat([row.to(texts.mask.device) for row in rows if row is not None])
        known = tokens.new_zeros(*texts.mask.shape, tokens.shape[-1])
        known[texts.mask] = tokens
        self._known = known
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._known = None

    def _compute(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the hidden states of texts behind the frozen layers, from running the encoder up
        to that point.
        """
        self._passed_on = []
        # Without dropout. In training, the other layers have theirs.
        modes = {inner: inner.training for inner in self._encoder.modules()}
        try:
            for inner in modes:
                inner.training = False
            with torch.no_grad():
                self._forward(**inputs)
        except _Arrived:
            pass
        finally:
            for inner, mode in modes.items():
                inner.training = mode
            hidden, self._hidden, self._passed_on = self._hidden, None, None
        tokens = inputs["input_ids"].shape
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or hidden.shape[:2] != tokens:
            got = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else type(hidden).__name__
            self._refuse(f"returns {got} for {tuple(tokens)} tokens")
        return hidden

    def _run(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the output of a frozen layer, in place of its `forward`."""
        received = next(
            value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)
        )
        if self._known is None:
            # Gradient checkpointing runs layers again in the backward pass, on the texts of any
            # earlier batch.
            with torch.no_grad():
                output = forward(*args, **kwargs)
            if self._passed_on is not None:
                is_tuple = type(output) is tuple
                self._lengths[layer] = len(output) if is_tuple else None
                self._hidden = output[0] if is_tuple else output
                self._passed_on += output[1:] if is_tuple else ()
        else:
            hidden = self._known if layer is self._frozen[-1] else received
            length = self._lengths[layer]
            output = hidden if length is None else (hidden, *[None] * (length - 1))
        # With reentrant checkpointing, a layer whose input requires no gradient is not trained.
        if received.requires_grad and torch.is_grad_enabled():
            (output[0] if isinstance(output, tuple) else output).requires_grad_()
        return output

    def _stop(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """End a run of the frozen layers before the first adapted one. Registered as a forward
        pre-hook of that.
        """
        if self._passed_on is None:
            return
        others = {id(value) for value in self._passed_on if isinstance(value, torch.Tensor)}
        if any(id(value) in others for value in (*args, *kwargs.values())):
            self._refuse("passes on more than hidden states")
        raise _Arrived

    def _refuse(self, problem: str) -> NoReturn:
        raise ValueError(
            "FrozenPrefix needs frozen layers that pass on nothing but hidden states of the shape (texts, tokens, "
            f"width); {type(self._frozen[-1]).__name__} {problem}. Train this model without FrozenPrefix."
        )


class _Arrived(Exception):
    """The frozen layers have run, and the rest of the encoder need not."""


@dataclass(frozen=True)
class _Texts:
    """The texts that an encoder is called with.

    Args:
        inputs: The encoder's arguments, by name.
        mask: Whether each token is part of its text, `(texts, tokens)`; False at padding.
    """

    inputs: dict[str, Any]
    mask: torch.Tensor

    @classmethod
    def read(
        cls, forward: Callable[..., Any], config: Any, args: Any, kwargs: dict[str, Any]
    ) -> _Texts:
        """Return the texts of a call of an encoder."""
        inputs = inspect.signature(forward).bind(*args, **kwargs).arguments
        inputs |= inputs.pop("kwargs", {})
        ids: Any = inputs.get("input_ids")
        problems = [] if ids is not None else ["no input_ids"]
        for name in ("output_attentions", "output_hidden_states"):
            given = inputs.get(name)
            if getattr(config, name, False) if given is None else given:
                problems.append(f"{name}=True")
        for name, value in inputs.items():
            if not (value is None or isinstance(value, (int, float, str, torch.Tensor))):
                problems.append(f"{name} of {type(value).__name__}")
        mask = inputs.get("attention_mask")
        if ids is not None and isinstance(mask, torch.Tensor) and mask.shape != ids.shape:
            problems.append(f"attention_mask of the shape {tuple(mask.shape)}")
        if problems:
            raise ValueError(
                "FrozenPrefix recognizes texts by input_ids and the other tensors that the model is called with, in "
                "which attention_mask has the shape of input_ids, and it caches neither attentions nor the hidden "
                f"states of all layers; got {problems[0]}. {_REMEDY}"
            )
        if inputs.get("position_ids") is not None:  # which may be the same for all texts
            inputs["position_ids"] = inputs["position_ids"].expand(ids.shape)
        return cls(inputs, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool())

    def select(self, rows: list[int]) -> dict[str, Any]:
        """Return the arguments for some of the texts."""
        return {
            name: value[rows] if self._has_rows(value) else value
            for name, value in self.inputs.items()
        }

    def keys(self) -> list[str]:
        """Return a key for each text, of all that its activations depend on beside the weights."""
        device = self.mask.device.type
        precision = str(
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else ""
        ).encode()
        # The number of labels in a step, with which transformers' Trainer scales the loss, says
        # nothing of a text.
        tensors = {
            name: value.detach().cpu()
            for name, value in sorted(self.inputs.items())
            if isinstance(value, torch.Tensor)
            and name not in ("attention_mask", "num_items_in_batch")
        }
        keys = []
        for row, own in enumerate(self.mask.cpu()):
            digest = hashlib.blake2b(precision, digest_size=16)
            # The indices of the tokens are part of the key: padding on the left changes the
            # position embeddings.
            digest.update(own.nonzero().numpy().tobytes())
            for name, value in tensors.items():
                is_per_token = value.shape[:2] == self.mask.shape
                _digest_tensor(
                    digest,
                    name,
                    value[row][own]
                    if is_per_token
                    else value[row]
                    if self._has_rows(value)
                    else value,
                )
            keys.append(digest.hexdigest())
        return keys

    def _has_rows(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape[:1] == self.mask.shape[:1]


_REMEDY = "Call the FrozenPrefix's remove() first if you need it."


def _digest(encoder: nn.Module, upper: list[nn.Module], facts: str) -> str:
    """Return a digest of all weights that the hidden states of texts depend on, and of further
    facts.
    """
    modules = list(encoder.modules())
    heads = [
        each
        for each in modules[modules.index(upper[0]) :]
        if isinstance(each, ModulesToSaveWrapper)
    ]
    above = {
        id(weight)
        for each in [*upper, *heads]
        for weight in each.state_dict(keep_vars=True).values()
    }
    digest = hashlib.sha256(facts.encode())
    for name, weight in encoder.state_dict(keep_vars=True).items():
        if id(weight) not in above and not weight.requires_grad:
            _digest_tensor(digest, name, weight)
    return digest.hexdigest()[:32]


def _digest_tensor(digest: Any, name: str, weight: torch.Tensor) -> None:
    digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
    digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _override(module: nn.Module, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Override a method of a module and return a function that restores it."""
    if name in module.__dict__:  # Accelerate overrides `forward` in the same way
        restore = partial(setattr, module, name, module.__dict__[name])
    else:
        restore = partial(delattr, module, name)
    setattr(module, name, method)
    return restore


class Store:
    """The activations of texts, `(tokens, width)` on the CPU, in memory or in a folder, where later
    runs find them.

    A full store keeps what it has. All texts come again in every epoch, so dropping the oldest one
    would drop each text just before it is needed. Processes that share a folder find what was there
    when they started.

    Args:
        max_bytes: Maximum size of all activations, including those of earlier runs in a folder.
        folder: Folder of the files, each with the new texts of one batch. None: in memory.
    """

    def __init__(self, max_bytes: int, folder: Path | None = None) -> None:
        self._free = max_bytes
        self._folder = folder
        # By key: the activations, or the file that they are in.
        self._entries: dict[str, torch.Tensor | Path] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("*.safetensors"):
                self._free -= path.stat().st_size
                with safe_open(path, "pt") as file:
                    self._entries |= dict.fromkeys(file.keys(), path)

    def get(self, key: str) -> torch.Tensor | None:
        """Return the activations of a key, or None if there are none."""
        entry = self._entries.get(key)
        if isinstance(entry, Path):
            with safe_open(entry, "pt") as file:
                entry = file.get_tensor(key)
        return entry

    def put(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Store those of the activations that fit."""
        new = {}
        for key, own in rows.items():
            if key not in self._entries and own.nbytes <= self._free:
                self._free -= own.nbytes
                new[key] = own.to("cpu", copy=True)
        self._entries |= new
        if new and self._folder is not None:
            path = self._folder / f"{uuid.uuid4().hex}.safetensors"
            # Renamed when it is complete, so that a crash leaves no file that others would read.
            save_file(new, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
            self._entries |= dict.fromkeys(new, path)
