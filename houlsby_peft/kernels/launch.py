"""Starting Triton's kernels.

Triton examines and binds all arguments at each start of a kernel, which takes several times as long
as the start itself. A place has two starts in a forward pass and three in a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Kernel:
    """A kernel with its constants.

    Args:
        function: A function of `triton.jit`. Its arguments are tensors, numbers and constants.
        constants: The constants, in the order of the arguments.
        warps: How many warps a program has.
    """

    def __init__(self, function: Any, constants: Sequence[Any], warps: int) -> None:
        self.function = function
        self.constants = tuple(constants)
        self.warps = warps
        # By everything that Triton compiles a kernel anew for.
        self._compiled: dict[object, Any] = {}

    def start(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor | None],
        numbers: Sequence[float],
    ) -> None:
        """Start a grid of programs on the device of the first tensor."""
        device = tensors[0].device  # type: ignore[union-attr]
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.start(grid, tensors, numbers)
            return
        addresses, dtypes = 0, []
        for tensor in tensors:
            if tensor is not None:
                addresses |= tensor.data_ptr()
                dtypes.append(tensor.dtype)
        arguments = (*tensors, *numbers, *self.constants)
        key = (device.index, *dtypes, *numbers)
        if addresses % 16 == 0 and key in self._compiled:
            self._compiled[key][grid](*arguments)
            return
        # Triton's own default of `enable_fp_fusion` will change.
        options = {"num_warps": self.warps, "enable_fp_fusion": True}
        compiled = self.function[grid](*arguments, **options)
        if addresses % 16 == 0 and compiled is not None:  # it is None in Triton's interpreter
            self._compiled[key] = compiled
