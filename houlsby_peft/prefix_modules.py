"""Finds what lies below the first adapter of a model, for `FrozenPrefix`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from .layer import HoulsbyTunerLayer, is_inside


def lowest_trained_layer(model: nn.Module) -> tuple[str, int]:
    """The list of layers that holds all adapters, and the lowest layer in it that trains.

    Raises:
        ValueError: adapters are in no list of layers, or in several.
    """
    found: dict[str, int] = {}
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for name, module in model.named_modules():
        outer = min((other for other in lists if is_inside(name, other)), key=len, default="")
        if outer and isinstance(module, HoulsbyTunerLayer) and trains(module):
            index = int(name.removeprefix(f"{outer}.").partition(".")[0])
            found[outer] = min(index, found.get(outer, index))
    if len(found) != 1:
        raise ValueError(
            "The trained adapters must be in one list of layers for what lies below them to be kept; found them in "
            f"{', '.join(map(repr, found)) or 'none'}. Keep activations only where a single encoder or decoder has "
            "adapters."
        )
    return next(iter(found.items()))


def embeddings_of(model: Any, layers: str) -> nn.Module:
    """The largest module around the input embeddings that does not hold the layers."""
    inner = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is inner)
    while (outer := name.rpartition(".")[0]) and not is_inside(layers, outer):
        name = outer
    return model.get_submodule(name)  # type: ignore[no-any-return]


def module_around(model: nn.Module, module: nn.Module, layers: str) -> nn.Module:
    """The smallest module that holds a module and the layers of a name: the encoder, for its embeddings."""
    around = {
        name: outer
        for name, outer in model.named_modules()
        if (not name or is_inside(layers, name)) and any(inner is module for inner in outer.modules())
    }
    return model.get_submodule(max(around, key=len))


def trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


@torch.no_grad()
def modules_before_the_adapter(layer: nn.Module, args: Any, kwargs: Any) -> tuple[list[nn.Module], list[Any]]:
    """The modules of a layer that run before its first trained one, and what each gives; none if they cannot be told.

    They can if the last one's output is what the trained one is given, and if the layer's output stays the same when
    the others give zeros: Llama rotates what its projections give, and others use a norm's output twice.
    """
    modes = {module: module.training for module in layer.modules()}
    for module in modes:
        module.training = False
    try:
        # Copies, as a decoder's layer adds to the cache of keys and values that it is given.
        done, given, expected = _trace(layer, *copy.deepcopy((args, kwargs)))
        names = {module: name for name, module in layer.named_modules()}
        outer = [m for m in done if not any(is_inside(names[m], names[o]) for o in done if o is not m)]
        mask_shape = args[0].shape[:2]
        shapes = [_shape(done[module], mask_shape) for module in outer]
        if not outer or done[outer[-1]] is not given or None in shapes:
            return [], []
        for module, shape in zip(outer, shapes, strict=True):
            output = given if module is outer[-1] else blank(shape, args[0][..., 0])
            module.forward = lambda *_, output=output, **__: output
        args, kwargs = copy.deepcopy((args, kwargs))
        same = torch.equal(layer.forward(*args, **kwargs), expected)
        return (outer, shapes) if same else ([], [])
    finally:
        for module, mode in modes.items():
            module.training = mode
            module.__dict__.pop("forward", None)


def _trace(layer: nn.Module, args: Any, kwargs: Any) -> tuple[dict[nn.Module, Any], Any, Any]:
    """The outputs of the modules that end before the first trained one starts, its input, and the layer's output."""
    done: dict[nn.Module, Any] = {}
    given: list[Any] = []
    handles = []
    for module in list(layer.modules())[1:]:
        if isinstance(module, HoulsbyTunerLayer) and trains(module):
            handles.append(module.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0])))
        handles.append(module.register_forward_hook(lambda m, _, output: None if given else done.update({m: output})))
    try:
        output = layer.forward(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return done, given[0] if given else None, output


def _shape(output: Any, rows: torch.Size) -> Any:
    """What a module gives for each token: the rest of a tensor's shape and its dtype, in tuples as they are; "none"
    for None; None if it is anything else."""
    if output is None:
        return "none"
    if isinstance(output, torch.Tensor):
        return [output.shape[2:], output.dtype] if output.shape[:2] == rows else None
    if isinstance(output, tuple):
        shapes = tuple(_shape(item, rows) for item in output)
        return None if None in shapes else shapes
    return None


def blank(shape: Any, mask: torch.Tensor) -> Any:
    """Zeros of such a shape that take no memory."""
    if shape == "none":
        return None
    if isinstance(shape, tuple):
        return tuple(blank(item, mask) for item in shape)
    return torch.zeros((), dtype=shape[1], device=mask.device).expand(*mask.shape, *shape[0])
