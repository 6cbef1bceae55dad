"""The operations in place of modules: the same results and gradients, and few of them."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from houlsby_peft import Bottleneck, HoulsbyConfig
from houlsby_peft.kernels import bottleneck, layer_norm, rows


WIDTH, R = 24, 5


def made(activation="gelu", **options):
    torch.manual_seed(0)
    config = HoulsbyConfig(r=R, activation=activation, init_weights=False, **options)
    return Bottleneck(config, WIDTH)


def results(module, hidden, call):
    """Return the output, and the gradients of the hidden states and the weights."""
    module.zero_grad()
    hidden = hidden.detach().clone().requires_grad_()
    output = call(hidden)
    # The same in all dtypes, with sums that do not cancel out.
    grad = torch.linspace(0.5, 1, output.numel()).reshape(output.shape).bfloat16()
    output.backward(grad.to(output))
    return [output, hidden.grad, *(weight.grad for weight in module.parameters())]


def assert_near(values, expected, bound):
    """Compare with what float64 gives, relative to its norm."""
    for value, value_in_float64 in zip(values, expected, strict=True):
        difference = value.cpu() - value_in_float64
        assert difference.norm() <= bound * value_in_float64.norm()


@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH), (3, 7, WIDTH), (2, 0, WIDTH)], ids=str)
@pytest.mark.parametrize("activation", bottleneck.ACTIVATIONS)
def test_float32_is_bit_for_bit_what_the_modules_compute(activation, shape):
    """On a CPU, the modules run in float32: the operation saves nothing there."""
    module, hidden = made(activation), torch.randn(shape)
    assert not bottleneck.can_run(module, hidden)
    computed = results(module, hidden, lambda hidden: bottleneck.run(module, hidden))
    of_modules = results(module, hidden, lambda hidden: module(hidden, hidden))
    assert all(map(torch.equal, computed, of_modules))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("activation", bottleneck.ACTIVATIONS)
def test_half_precision_is_near_float64(activation, autocast):
    """The gradients of weights in float32 are in float32."""
    module, hidden = made(activation), torch.randn(3, 7, WIDTH).bfloat16()
    wide = made(activation).double()
    expected = results(wide, hidden.double(), wide)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        computed = results(module, hidden, module)
    dtypes = [value.dtype for value in computed]
    assert dtypes == [torch.bfloat16] * 2 + [torch.float32] * 4
    assert_near(computed, expected, 0.01)


def test_the_kernels_compute_the_same_in_tritons_interpreter():
    pytest.importorskip("triton", reason="Triton is for Linux")
    program = Path(__file__).parents[1] / "support" / "interpreted_kernels.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def assert_compiles_for_an_h100(kernel, missing=()):
    """Compile a kernel for hidden states in bfloat16, as the GPU gets it."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.function.arg_names
    constants = dict(zip(names[-len(kernel.constants) :], kernel.constants, strict=True))
    constants |= dict.fromkeys(missing)
    types = {}
    for name in names:
        if name in constants:
            types[name] = "constexpr"
        elif name in ("number", "vectors_of_row", "width", "r") or name.endswith("stride"):
            types[name] = "i32"
        elif name in ("eps", "slots"):
            types[name] = {"eps": "fp32", "slots": "*i64"}[name]
        elif name in ("mean", "rstd", "sums") or name.endswith(("weight", "bias", "weights")):
            types[name] = "*fp32"
        else:
            types[name] = "*bf16"
    source = ASTSource(kernel.function, types, constants)
    options = {"num_warps": kernel.warps, "enable_fp_fusion": True}
    compiled = compile_kernel(source, GPUTarget("cuda", 90, 32), options)
    # As much as any GPU since Ampere has.
    assert compiled.metadata.shared <= 99 * 1024


@pytest.mark.parametrize("r", [1, 64, 256])
def test_the_kernels_of_bottlenecks_compile_for_an_h100_without_one(r):
    """What a kernel needs that the GPU has not would show at the first call only."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    from houlsby_peft.kernels import triton_bottleneck as kernels

    for function, flags, missing in (
        (kernels._forward, (False, "gelu"), ["slots"]),
        (kernels._forward, (True, "gelu"), ["inner"]),
        (kernels._backward, ("gelu",), []),
        (kernels._add_up, (), []),
    ):
        kernel = kernels._kernel(function, r, torch.bfloat16, *flags)
        assert_compiles_for_an_h100(kernel, missing)


@pytest.mark.parametrize("width", [24, 768, 8192])
def test_the_kernels_of_norms_compile_for_an_h100_without_one(width):
    pytest.importorskip("triton", reason="Triton is for Linux")
    from houlsby_peft.kernels import triton_layer_norm as kernels

    assert_compiles_for_an_h100(kernels._forward_kernel(width, True, True), ["mean", "rstd"])
    assert_compiles_for_an_h100(kernels._forward_kernel(width, False, False), ["slots", "bias"])
    assert_compiles_for_an_h100(kernels._backward_kernel(width))


# In half precision, relative to the norm of what float64 gives.
BOUNDS = {torch.bfloat16: 0.01, torch.float16: 0.002}


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("r", "activation", "dtype"),
    [
        *((r, "gelu", torch.bfloat16) for r in (1, 8, 64, 192)),
        *((48, activation, torch.bfloat16) for activation in bottleneck.ACTIVATIONS),
        (64, "gelu", torch.float16),
    ],
    ids=str,
)
def test_the_kernels_on_a_gpu_are_near_float64(r, activation, dtype):
    """Whole tiles, parts of tiles, and one row."""
    # The slope of ReLU jumps where a sum is rounded to the other side of 0.
    bound = 0.1 if activation == "relu" else BOUNDS[dtype]
    for shape in [(64, 128), (5, 7, 72), (1, 24)]:
        torch.manual_seed(0)
        config = HoulsbyConfig(r=r, activation=activation, init_weights=False)
        module = Bottleneck(config, shape[-1])
        hidden = torch.randn(shape, dtype=dtype)
        wide = copy.deepcopy(module).double()
        expected = results(wide, hidden.double(), wide)
        module.cuda()
        assert bottleneck.can_run(module, hidden.cuda())
        assert bottleneck.kernels_for(hidden.cuda(), r) is not None
        assert_near(results(module, hidden.cuda(), module), expected, bound)


@pytest.mark.cuda
@pytest.mark.parametrize("r", [1, 8, 64, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_with_weights_in_slots_on_a_gpu(dtype, r):
    """They are columns of one tensor, as slots are, and empty slots are not read."""
    bound = {torch.float32: 1e-5, **BOUNDS}[dtype]
    for shape in [(5, 32, 128), (3, 35, 72), (1, 1, 24)]:
        torch.manual_seed(0)
        config = HoulsbyConfig(r=r, init_weights=False)
        bottlenecks = [Bottleneck(config, shape[-1]) for _ in range(6)]
        nn.init.constant_(bottlenecks[1].up_proj.bias, torch.nan)
        weights, shapes = [], [weight.shape for weight in bottlenecks[0].parameters()]
        rows_of_slots = [nn.utils.parameters_to_vector(b.parameters()) for b in bottlenecks]
        joined = torch.stack(rows_of_slots).detach().cuda()
        for columns, of_one in zip(joined.split([*map(math.prod, shapes)], 1), shapes, strict=True):
            weights.append(columns.unflatten(1, of_one))
        hidden, slots = torch.randn(shape, dtype=dtype), [5, 0, 0, 2, 4][: shape[0]]
        computed = rows.run(hidden.cuda(), weights, torch.tensor(slots).cuda(), "gelu")
        assert computed.dtype == dtype
        expected = []
        for row, slot in zip(hidden.double(), slots, strict=True):
            expected.append(bottlenecks[slot].double()(row, row))
        assert_near(computed, expected, bound)


@pytest.mark.cuda
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_on_a_gpu_are_near_float64(dtype, bias):
    for shape in [(5, 128, 768), (3, 35, 72), (1, 24)]:
        torch.manual_seed(0)
        norm, hidden = nn.LayerNorm(shape[-1], bias=bias), 3 + torch.randn(shape, dtype=dtype)
        nn.init.normal_(norm.weight)
        wide = copy.deepcopy(norm).double()
        expected = results(wide, hidden.double(), wide)
        norm.cuda()
        computed = results(norm, hidden.cuda(), partial(layer_norm.run, norm))
        assert_near(computed, expected, BOUNDS[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_of_rows_on_a_gpu(dtype):
    bound = {torch.float32: 1e-5, **BOUNDS}[dtype]
    for shape in [(5, 32, 768), (3, 35, 72), (1, 1, 24), (4, 64)]:
        torch.manual_seed(0)
        # Columns of one tensor, as slots are.
        weight, bias = torch.randn(6, 2 * shape[-1]).cuda().split(shape[-1], 1)
        hidden, slots = torch.randn(shape, dtype=dtype), [5, 0, 0, 2, 4][: shape[0]]
        index = torch.tensor(slots).cuda()
        computed = layer_norm.run_rows(hidden.cuda(), weight, bias, index, 1e-5)
        expected = []
        for row, slot in zip(hidden.double(), slots, strict=True):
            weights = (weight[slot].cpu().double(), bias[slot].cpu().double())
            expected.append(nn.functional.layer_norm(row, shape[-1:], *weights))
        assert_near(computed, expected, bound)


@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_in_float32_normalizes_half_precision(bias):
    norm, hidden = nn.LayerNorm(WIDTH, bias=bias), torch.randn(3, 7, WIDTH).bfloat16()
    nn.init.normal_(norm.weight)
    assert layer_norm.can_run(norm, (hidden,), {})
    computed = results(norm, hidden, lambda hidden: layer_norm.run(norm, hidden))
    expected = results(norm, hidden, lambda hidden: norm(hidden.float()).bfloat16())
    for value, value_of_modules in zip(computed, expected, strict=True):
        assert value.dtype == value_of_modules.dtype
        torch.testing.assert_close(value, value_of_modules)


@pytest.mark.parametrize("is_plain", [True, False])
def test_first_and_second_derivatives(is_plain):
    module = made().double()
    hidden = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)

    def call(hidden):
        return module(hidden, hidden if is_plain else None)

    assert torch.autograd.gradcheck(call, hidden)
    assert torch.autograd.gradgradcheck(call, hidden)


def observed(module, part):
    module.get_submodule(part).register_forward_hook(lambda *args: None)
    return module


def replaced(module):
    module.activation = nn.ELU()
    return module


def transposed(module):
    weight = module.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    return module


PLAIN = {
    "activation": lambda: made("gelu_new"),
    "scaling": lambda: made(scaling=2.0),
    "learned scaling": lambda: made(scaling="learned"),
    "dropout": lambda: made(dropout=0.5),
    "hook": lambda: observed(made(), "up_proj"),
    "hook of the activation": lambda: observed(made(), "activation"),
    "replaced activation": lambda: replaced(made()),
    "offloaded": lambda: made().to("meta"),
    "other strides": lambda: transposed(made()),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_else_happens_in_modules_is_left_to_them(name):
    assert bottleneck.can_run(made(), torch.randn(2, WIDTH).bfloat16())
    assert not bottleneck.can_run(PLAIN[name](), torch.randn(2, WIDTH).bfloat16())


def test_weights_less_precise_than_the_hidden_states_are_left_to_the_modules():
    assert bottleneck.can_run(made().double(), torch.randn(2, WIDTH).double())
    assert not bottleneck.can_run(made(), torch.randn(2, WIDTH).double())


def test_function_transforms_and_autocast_to_another_dtype_see_the_modules():
    module, hidden = made(), torch.randn(2, WIDTH).bfloat16()
    module(hidden)
    expected = module(hidden, hidden)
    torch.testing.assert_close(torch.func.vmap(module)(hidden), expected)
    with torch.autocast("cpu", torch.float16):
        assert not bottleneck.can_run(module, hidden)


def test_strides_are_those_of_the_modules():
    hidden = torch.randn(2, WIDTH, 3, 4).bfloat16().movedim(1, -1)
    assert made()(hidden).stride() == hidden.stride()


def test_pytorch_computes_where_tritons_kernels_do_not_run(monkeypatch):
    """As in a container without a C compiler; here there is no GPU."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    monkeypatch.setattr(bottleneck, "has_triton", lambda device: True)
    with pytest.warns(UserWarning, match="PyTorch's operations on cpu"):
        assert bottleneck.usable_kernels.__wrapped__(torch.device("cpu")) is None
