"""The kernels in Triton's interpreter against PyTorch, for `test_kernels.py`.

The interpreter must be chosen before the kernels are imported, so this is a program of its own.
"""

from __future__ import annotations

import itertools
import os


os.environ["TRITON_INTERPRET"] = "1"

import torch

from houlsby_peft.kernels import bottleneck, layer_norm, rows, triton_bottleneck, triton_layer_norm


CASES = [
    *itertools.product([1, 8, 64, 192], ["gelu"]),
    *((3, name) for name in bottleneck.ACTIVATIONS),
]


def main() -> None:
    torch.manual_seed(0)
    for number, (r, activation) in enumerate(CASES):
        width, dtype = 72 + number, (torch.float32, torch.bfloat16)[number % 2]
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        hidden = torch.randn((1, 35)[number % 3 == 0], width, dtype=dtype)
        down_weight, up_weight = 0.1 * torch.randn(r, width), 0.1 * torch.randn(width, r)
        weights = (down_weight, torch.randn(r), up_weight, torch.randn(width))
        expected = bottleneck.compute(hidden, *weights, activation)
        computed = triton_bottleneck.run(hidden, *weights, activation)
        grad = torch.randn_like(hidden)
        inner = expected[1]
        inputs = (grad, hidden, inner, down_weight, up_weight, activation)
        expected += bottleneck.compute_backward(*inputs)
        computed += triton_bottleneck.run_backward(*inputs)
        for value, expected_value in zip(computed, expected, strict=True):
            assert value.dtype == expected_value.dtype
            assert (value - expected_value).norm() <= tolerance * expected_value.norm()


def compare_rows() -> None:
    """Rows whose weights are in slots, of which some are empty or serve several rows."""
    torch.manual_seed(0)
    shapes = [(1, 1), (1, 35), (5, 3), (4, 33)]
    for number, (r, shape) in enumerate(itertools.product([1, 8, 64, 192], shapes)):
        width, dtype = 71 + number, (torch.float32, torch.bfloat16)[number % 2]
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        hidden = torch.randn(*shape, width, dtype=dtype)
        weights = [0.1 * torch.randn(7, r, width), torch.randn(7, r)]
        weights += [0.1 * torch.randn(7, width, r), torch.randn(7, width)]
        for weight in weights:
            weight[[1, 4]] = torch.nan  # empty slots
        # Columns of one tensor, as slots are.
        joined = torch.cat([weight.flatten(1) for weight in weights], 1)
        columns = joined.split([weight[0].numel() for weight in weights], 1)
        for index, column in enumerate(columns):
            weights[index] = column.unflatten(1, weights[index].shape[1:])
        slots = torch.tensor([6, 0, 0, 3, 2])[: len(hidden)]
        expected = []
        for row, slot in zip(hidden, slots, strict=True):
            weights_of_row = [weight[slot] for weight in weights]
            expected.append(bottleneck.compute(row, *weights_of_row, "gelu")[0])
        computed_by = (
            triton_bottleneck.run_rows(hidden, *weights, slots, "gelu"),
            rows.compute(hidden, *weights, slots, "gelu"),
            rows.run(hidden, weights, slots, "gelu"),
        )
        for computed in computed_by:
            assert computed.dtype == dtype
            difference = computed - torch.stack(expected)
            assert difference.norm() <= tolerance * torch.stack(expected).norm()


def compare_norms() -> None:
    """Norms with and without a bias, and those of rows whose weights are in slots."""
    torch.manual_seed(0)
    # 35 rows are more than a program of the backward pass takes.
    shapes = [(1, 1, 64), (1, 35, 72), (5, 3, 24)]
    for shape, dtype in itertools.product(shapes, [torch.float32, torch.bfloat16]):
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        hidden, grad = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        weights, biases = torch.randn(7, shape[-1]), torch.randn(7, shape[-1])
        slots = torch.tensor([6, 0, 0, 3, 2])[: len(hidden)]
        for bias in (None, biases):
            one_bias = None if bias is None else bias[0]
            expected = layer_norm.compute(hidden, weights[0], one_bias, 1e-5)
            computed = triton_layer_norm.run(hidden, weights[0], one_bias, 1e-5)
            statistics = expected[1:]
            expected += layer_norm.compute_backward(grad, hidden, *statistics, weights[0])
            computed += triton_layer_norm.run_backward(grad, hidden, *statistics, weights[0])
            expected += (layer_norm.compute_rows(hidden, weights, bias, slots, 1e-5),)
            computed += (triton_layer_norm.run_rows(hidden, weights, bias, slots, 1e-5),)
            for value, expected_value in zip(computed, expected, strict=True):
                assert value.dtype == expected_value.dtype
                torch.testing.assert_close(value, expected_value, atol=tolerance, rtol=tolerance)


if __name__ == "__main__":
    main()
    compare_rows()
    compare_norms()
