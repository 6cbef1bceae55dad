"""What tests compare of models before and after: weights, modules, and what trains."""

from __future__ import annotations

from typing import Any

import torch
from peft import get_peft_model_state_dict


def tensors_of(model: torch.nn.Module, adapter_name: str = "default") -> dict[str, torch.Tensor]:
    """Copies of the tensors that an adapter's file has."""
    tensors = get_peft_model_state_dict(model, adapter_name=adapter_name)
    return {key: tensor.clone() for key, tensor in tensors.items()}


def assert_same_tensors(
    tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        assert torch.equal(tensor, expected[key]), key


def trained_names(model: torch.nn.Module) -> set[str]:
    """The names of the parameters that train."""
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """All that adding or loading an adapter may change in a model, as values that compare."""
    hooks = []
    for name, module in model.named_modules():
        numbers = len(module._forward_pre_hooks), len(module._forward_hooks)
        methods = vars(module).keys() & {"train", "forward"}
        if any(numbers) or methods:
            hooks.append((name, numbers, sorted(methods)))
    return {
        "hooks": hooks,
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "modes": [module.training for module in model.modules()],
        "trained": trained_names(model),
        "weights": {name: weight.tolist() for name, weight in model.state_dict().items()},
        "configuration": model.config.to_dict(),
        "adapters": list(getattr(model, "peft_config", {})),
        "active": model.active_adapters if hasattr(model, "base_model") else None,
    }
