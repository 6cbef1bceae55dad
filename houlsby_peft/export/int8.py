"""Weights and matrix products of an ONNX file in 8-bit integers.

It is imported on first use, because onnxscript comes with the extra `export`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper, numpy_helper
from onnxscript import opset18, script
from onnxscript.values import Opset


op: Any = opset18
_OPSET = Opset("houlsby_peft", 1)
_FLOAT = int(onnx.TensorProto.FLOAT)
_INT32 = int(onnx.TensorProto.INT32)
_UINT8 = int(onnx.TensorProto.UINT8)
# Rows and columns that a weight needs: the product with a narrower one is faster in float32.
_FEWEST = 128


@script(_OPSET, default_opset=op)
def MultiplyInt8(tokens, weight, scales, sums):  # type: ignore[no-untyped-def]
    """Multiply tokens `(..., d)` by integers `(d, n)`, which stand for `weight * scales`.

    Each token has 256 steps between its least and its largest value. `sums` are those of the
    weight's columns.
    """
    width = op.Shape(weight, start=0, end=1)
    rows = op.Reshape(tokens, op.Concat(op.Constant(value_ints=[-1]), width, axis=0))
    last = op.Constant(value_ints=[1])
    least = op.Min(op.ReduceMin(rows, last, keepdims=0), 0.0)
    largest = op.Max(op.ReduceMax(rows, last, keepdims=0), 0.0)
    steps = op.Max((largest - least) / 255.0, 1e-9)
    zeros = op.Cast(op.Round(-least / steps), to=_UINT8)
    integers = op.QuantizeLinear(rows, steps, zeros, axis=0)
    # MatMulInteger has one zero for all rows.
    shifts = op.Unsqueeze(op.Cast(zeros, to=_INT32), last) * sums
    products = op.MatMulInteger(integers, weight) - shifts
    outputs = op.DequantizeLinear(products, steps, axis=0) * scales
    lengths = op.Shape(tokens, start=0, end=-1)
    return op.Reshape(outputs, op.Concat(lengths, op.Shape(weight, start=1, end=2), axis=0))


@script(_OPSET, default_opset=op)
def GatherInt8(ids, table, scales):  # type: ignore[no-untyped-def]
    """Return the rows of a table of integers, which stand for `table * scales`."""
    rows = op.Cast(op.Gather(table, ids), to=_FLOAT)
    return rows * op.Unsqueeze(op.Gather(scales, ids), op.Constant(value_ints=[-1]))


def quantize(source: Path, target: Path) -> None:
    """Write a file whose wide weights are 8-bit integers, in which matrix products are computed,
    with a scale for each token.
    """
    model = onnx.load(source)
    graph = model.graph
    del graph.value_info[:]  # which has the shapes of the weights
    weights = {}
    for tensor in graph.initializer:
        if len(tensor.dims) == 2 and min(tensor.dims) >= _FEWEST:
            weights[tensor.name] = tensor
    parts: dict[str, torch.Tensor] = {}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            function: Any = MultiplyInt8
            read, name = node.input
            integers, scales = _round(weights[name], axis=0)
            own = {"int8": integers, "scales": scales, "sums": integers.sum(0, dtype=torch.int32)}
        elif node.op_type == "Gather" and node.input[0] in weights:
            function = GatherInt8
            name, read = node.input
            integers, scales = _round(weights[name], axis=1)
            own = {"int8": integers, "scales": scales}
        else:
            continue
        names = [f"{name}.{function.name}.{part}" for part in own]
        parts.update(zip(names, own.values(), strict=True))
        outputs = list(node.output)
        node.CopyFrom(
            helper.make_node(function.name, [read, *names], outputs, domain=_OPSET.domain)
        )
    used = {name for node in graph.node for name in node.input}
    initializers = [tensor for tensor in graph.initializer if tensor.name in used]
    for name, values in parts.items():
        initializers.append(numpy_helper.from_array(values.numpy(), name))
    del graph.initializer[:]
    graph.initializer.extend(initializers)
    model.functions.extend([MultiplyInt8.to_function_proto(), GatherInt8.to_function_proto()])
    model.opset_import.append(helper.make_opsetid(_OPSET.domain, _OPSET.version))
    is_large = source.with_name(f"{source.name}.data").exists()
    location = f"{target.name}.data"
    onnx.save(model, target, save_as_external_data=is_large, location=location)


def _round(tensor: onnx.TensorProto, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight as integers from -127 to 127, and the scales that are common to an axis."""
    weight = torch.tensor(numpy_helper.to_array(tensor))
    # Of zeros alone, any scale will do.
    scales = weight.abs().amax(axis, keepdim=True).clamp(min=1e-9) / 127
    return (weight / scales).round().char(), scales.squeeze(axis)
