"""The benchmark runs, and its counts and comparisons are correct. The times are not tested."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gpu
import mixed
import profiling
from graphs import graphed
from houlsby_peft import Bottleneck
from methods import FLOOR, FULL, LORA_ALL, METHODS, OURS
from models import SHAPES, build, flops, inputs, saved_bytes
from padding import padding
from report import Report, bars
from timing import FEWEST, compared, interleaved
from tiny_models import perturb


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RUN = BENCHMARKS / "run.py"


def test_floating_point_operations_of_the_floor_and_of_adapters_by_hand():
    shape, tokens = SHAPES["tiny"], 4 * 16
    d, layers, r = shape["hidden_size"], shape["num_hidden_layers"], 64
    given = inputs(4, 16)
    products = tokens * layers * (4 * d * d + 2 * d * shape["intermediate_size"])
    head = 4 * (d * d + 2 * d)
    models = {name: build("tiny", METHODS[name]).eval() for name in (FLOOR, OURS)}
    forward = {name: flops(lambda model=model: model(**given)) for name, model in models.items()}
    assert forward[FLOOR] == 2 * (products + head)
    assert forward[OURS] - forward[FLOOR] == 2 * tokens * layers * 2 * 2 * d * r


def test_bytes_saved_for_backward_by_hand():
    model = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2, bias=False))
    model.forward = lambda x: nn.Sequential.forward(model, x)
    # The model's input, and the activation's input and output. Weights do not count.
    assert saved_bytes(model, {"x": torch.randn(3, 8)}) == 4 * (3 * 8 + 3 * 4 + 3 * 4)


def test_ratios_of_the_minima_and_of_each_round():
    found = compared({"floor": [1.0, 2.0, 4.0], "ours": [1.5, 2.0, 8.0]}, "floor")["ours"]
    assert found["min_s"] == 1.5
    assert found["median_s"] == 2.0
    assert found["ratio_of_minima"] == 1.5
    assert found["median_ratio"] == 1.5
    assert found["ratio_range"] == [1.0, 2.0]


def test_the_share_of_padding_by_hand():
    # Batches of 2 x 4 and 2 x 3 tokens, of which 10 belong to texts.
    assert padding([1, 2, 3, 4], [0, 3, 1, 2], batch=2) == pytest.approx(1 - 10 / 14)
    assert padding([5, 5, 5], [2, 0, 1], batch=2) == 0


def test_a_time_limit_ends_the_rounds_but_leaves_enough_of_them():
    calls = []
    assert len(interleaved({"a": lambda: calls.append(1)}, rounds=50, at_most=0)["a"]) == FEWEST
    assert len(calls) == 1 + FEWEST
    assert len(interleaved({"a": lambda: None}, rounds=5, at_most=60)["a"]) == 5


def test_missing_and_old_packages_are_named_before_anything_runs(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without the packages of this environment
    python.chmod(0o755)
    for name, version in {"torch": "2.11.0+cu130", "transformers": "5.17.0"}.items():
        metadata = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    environment = {**os.environ, "PYTHON": str(python), "PYTHONPATH": str(tmp_path)}
    command = ["bash", str(BENCHMARKS / "gpu.sh"), str(tmp_path / "results"), "--device", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert all(said in line for said in ("transformers 5.17.0", "no peft", "no pytest", "pip install -e"))
    assert "torch" not in line
    assert not (tmp_path / "results").exists()


def test_the_result_of_the_tests_names_why_none_could_run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # saves seconds
    (tmp_path / "tests" / "core").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\nmarkers = cuda\n")
    test = "import pytest, warnings\n\n@pytest.mark.cuda\ndef test():\n    warnings.warn('of another version')\n"
    (tmp_path / "tests" / "test_benchmarks.py").write_text(test)
    (row,) = gpu.run_tests()
    assert row["result"].startswith("1 passed, 1 warning")
    (tmp_path / "tests" / "conftest.py").write_text("import of_another_machine\n")
    with pytest.raises(RuntimeError, match="No module named 'of_another_machine'"):
        gpu.run_tests()


def test_only_tests_of_the_hub_need_its_server(monkeypatch):
    monkeypatch.setitem(sys.modules, "local_hub", None)
    assert "hub" in runpy.run_path(str(Path(__file__).parent / "conftest.py"))


def failing(error):
    def rows():
        yield {"figure": 1}
        raise error

    return rows


def test_what_is_not_measured_is_named_and_the_rest_goes_on(tmp_path):
    jobs = [
        gpu.Job("memory", "too large", failing(torch.OutOfMemoryError("Tried to allocate 1 GiB"))),
        gpu.Job("memory", "broken", failing(ValueError("a mistake"))),
        gpu.Job("tests", "graphs", failing(AssertionError), needs_cuda=True),
        gpu.Job("memory", "small", lambda: [{"figure": 2}]),
    ]
    report = Report(tmp_path, {"gpu": None}, first=(2, 8))
    gpu.work(jobs, report, "cpu", deadline=float("inf"))
    gpu.work([gpu.Job("mixed", "late", failing(AssertionError))], report, "cpu", deadline=0)
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["memory"] == [
        {"job": "too large", "figure": 1}, {"job": "broken", "figure": 1}, {"job": "small", "figure": 2}
    ]  # fmt: skip
    reasons = {name: reason.partition(":")[0] for _, name, reason in result["not_measured"]}
    assert reasons == {
        "too large": "out of memory",
        "broken": "failed",
        "graphs": "needs CUDA",
        "late": "no time left",
    }
    assert report.failures == 1
    page = (tmp_path / "tables.md").read_text()
    assert all(f"- {name}: {reason}" in page for name, reason in reasons.items())


def test_a_second_run_measures_what_the_first_has_not(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "free_memory", lambda: None)  # takes long

    def job(name, rows, **options):
        return gpu.Job("memory", name, rows, **options)

    first = Report(tmp_path, {"gpu": "H100", "load_before": 1}, first=(2, 8))
    whole, short = lambda: [{"figure": 1}], lambda: [{"figure": 2}, {"figure": 3}]
    todo = [job("whole", whole), job("broken", failing(ValueError)), job("long", whole, seconds=1e9)]
    gpu.work(todo, first, "cpu", deadline=time.monotonic() + 1e8)
    gpu.work([job("cut off", short, seconds=-1e9)], first, "cpu", deadline=0)
    assert {name: reason.partition(":")[0] for (_, name), reason in first.notes.items()} == {
        "broken": "failed",
        "long": "no time left",
        "cut off": "no time left for the rest, if there is any",
    }
    second = Report(tmp_path, {"gpu": "H100", "load_before": 2}, first=(2, 8))
    second.load()
    todo = [job("whole", failing(AssertionError)), *(job(name, short) for name in ("broken", "long", "cut off"))]
    # A job that is named twice runs once.
    gpu.work([*todo, job("long", failing(AssertionError))], second, "cpu", deadline=float("inf"))
    assert [(row["job"], row["figure"]) for row in second.sections["memory"]] == [
        ("whole", 1), ("broken", 2), ("broken", 3), ("long", 2), ("long", 3), ("cut off", 2), ("cut off", 3)
    ]  # fmt: skip
    assert not second.notes
    with pytest.raises(SystemExit, match="has gpu H100, and here it is H200"):
        Report(tmp_path, {"gpu": "H200"}, first=(2, 8)).load()
    Report(tmp_path / "new", {"gpu": "H200"}, first=(2, 8)).load()


def test_an_error_of_cuda_that_stays_fails_the_jobs_after_it_and_all_is_written(tmp_path, monkeypatch):
    error = RuntimeError("CUDA error: an illegal memory access was encountered")

    def empty_cache():
        if "bad" in started:
            raise error

    def bad():
        started.append("bad")
        yield {"figure": 1}
        raise error

    started = []
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    report = Report(tmp_path, {"gpu": None}, first=(2, 8))
    gpu.work([gpu.Job("memory", "bad", bad), gpu.Job("tests", "later", list)], report, "cpu", deadline=float("inf"))
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["memory"] == [{"job": "bad", "figure": 1}]
    assert result["not_measured"] == [
        [section, name, f"failed: RuntimeError: {error}"] for section, name in (("memory", "bad"), ("tests", "later"))
    ]


def test_the_main_cells_are_measured_before_what_can_spoil_or_delay_them():
    every = list(gpu.jobs(gpu.WHOLE, "cuda"))
    names = [job.name for job in every]
    captures = next(n for n, job in enumerate(every) if mixed.GRAPH in job.name or job.section == "prediction")
    bf16 = ("bf16 autocast", "bf16 base", "bf16 base, TF32", "bf16 base, autocast")
    main = [f"base, 32 x {length} tokens, {precision}" for length in (128, 512) for precision in bf16]
    main += [f"base, 32 x 512 tokens, {phase}" for phase in ("train", "eval")]
    eager = " and ".join((mixed.BATCHED, mixed.UNCHECKED, mixed.GROUPED))
    main += [f"base, 64 x 128 tokens, up to 64 adapters, bf16 base and adapters, {eager}"]
    assert max(map(names.index, main)) < captures
    assert min(job.seconds for job in every if "compiled" in job.name or job.section == "tests") >= 120


def test_a_method_without_enough_memory_is_noted_and_the_others_are_measured(monkeypatch):
    def too_large(base):
        def forward(**given):
            raise torch.OutOfMemoryError("Tried to allocate 1 GiB")

        base.forward = forward
        return base

    monkeypatch.setitem(METHODS, "too large", too_large)
    models = gpu.Models((FLOOR, FULL, "too large"), "cpu")
    rows = list(gpu.steps(models, "tiny", (1, 4), "float32", rounds=1, at_most=60))
    assert [(row["phase"], row["method"]) for row in rows if "median_ratio" in row] == [
        ("train", FLOOR), ("train", FULL), ("eval", FLOOR)
    ]  # fmt: skip
    assert [row["note"] for row in rows if row["method"] == "too large"] == ["out of memory"] * 2


def test_the_targets_by_hand():
    cell = {"shape": "base", "batch": 32, "length": 128, "phase": "train", "precision": "bf16 base"}
    steps = [{**cell, "method": OURS, "median_ratio": 1.2}, {**cell, "method": LORA_ALL, "median_ratio": 1.3}]
    large = {**cell, "length": 512, "precision": "bf16 autocast"}
    steps += [{**large, "method": OURS, "median_ratio": 1.1}, {**large, "method": LORA_ALL, "median_ratio": 1.05}]
    row = {"shape": "base", "rows": 64, "tokens": 128, "spread": "even", "precision": "float32"}
    rows = [
        {**row, "adapters": 64, "way": mixed.BATCHED, "median_ratio": 1.15},
        {**row, "adapters": 64, "way": mixed.UNCHECKED, "median_ratio": 1.16},
        {**row, "adapters": 1, "way": mixed.GRAPH, "median_ratio": 0.5, "median_s": 0.010},
        {**row, "adapters": 64, "way": mixed.GRAPH, "median_ratio": 0.6, "median_s": 0.012},
    ]
    found = bars({"steps": steps, "mixed": rows})
    assert [row[""] for row in found] == [
        *["not measured"] * 2, "missed", "met", *["not measured"] * 4,  # 32 x 128 tokens
        "met", "missed", *["not measured"] * 6,  # 32 x 512 tokens
        *["not measured"] * 6, "met", "missed", "missed",
    ]  # fmt: skip
    assert found[-1]["measured"] == pytest.approx(1.2)


def test_the_chart_shows_the_medians_and_the_floor_above_the_others(tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib, which draws the chart, is not installed")
    import chart

    figures = {"shape": "tiny", "length": 8, "ratio_of_minima": 1.25, "ratio_range": [1.2, 1.7]}
    rows = [
        {**figures, "batch": batch, "phase": phase, "method": method, "median_ratio": ratio}
        for batch in (1, 2)
        for phase in ("train", "eval")
        for method, ratio in ((FLOOR, 1.0), (OURS, 1.5))
    ]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        chart.draw(rows, tmp_path / "chart.svg")
    texts = re.findall(r"<text .*?</text>", (tmp_path / "chart.svg").read_text(), re.DOTALL)
    assert sum(">1.500<" in text for text in texts) == 4
    assert not any(">1.250<" in text for text in texts)

    def heights(name):
        return [float(re.search(r"[ (]([\d.]+)\)", text)[1]) for text in texts if f">{name}<" in text]

    floor, ours = heights(FLOOR), heights(OURS)
    assert len(floor) == len(ours) == 2
    assert all(above < below for above, below in zip(floor, ours, strict=True))


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_tn>", "products"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "products"),
        ("aten::addmm", "products"),
        ("aten::baddbmm", "products"),
        ("aten::mm", "products"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("void pytorch_flash::flash_fwd_kernel", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", "memory"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>", "memory"),
        ("aten::copy_", "memory"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert profiling.kind_of(kernel) == kind


def test_shares_of_a_step_by_hand(monkeypatch):
    # Two steps, in the first of which the device waits half of the time.
    recorded = {
        "floor": [("gemm", 0.2), ("gemm", 0.2), ("gelu", 0.1), ("gelu", 0.1)],
        "ours": [("gemm", 0.3), ("gemm", 0.3), ("gelu", 0.2), ("gelu", 0.2), ("add", 0.1), ("add", 0.1)],
    }
    monkeypatch.setattr(profiling, "kernels", lambda call, device, steps: recorded[call])
    monkeypatch.setattr(profiling, "interleaved", lambda *args: {"floor": [0.6], "ours": [1.0]})
    rows, extra = profiling.profiles({"floor": "floor", "ours": "ours"}, "cuda", 1, 1, steps=2)
    assert [row["kernels"] for row in rows[:3]] == [2, 3, 1]
    parts = {name: rows[3][f"{name}_s"] for name in profiling.PARTS}
    assert parts == pytest.approx({"optimizer": 0, "attention": 0, "products": 0.1, "memory": 0.2, "waiting": 0.1})
    assert sum(parts.values()) == pytest.approx(rows[3]["median_s"]) == pytest.approx(0.4)
    assert {row["kernel"]: (row["number"], pytest.approx(row["extra_s"])) for row in extra} == {
        "gemm": (0, 0.1), "gelu": (0, 0.1), "add": (1, 0.1)
    }  # fmt: skip


@pytest.mark.parametrize(("rows", "number"), [(256, 64), (64, 16), (5, 5), (7, 1)])
def test_rows_are_spread_evenly_and_unevenly(rows, number):
    even, uneven = mixed.spread(rows, number), mixed.spread_unevenly(rows, number)
    for names in (even, uneven):
        assert len(names) == rows
        assert list(dict.fromkeys(names)) == [f"task_{task}" for task in range(number)]
    assert len({even.count(name) for name in even}) == 1 or rows % number
    if rows > number > 1:
        assert uneven.count("task_0") > 3 * uneven.count(f"task_{number - 1}")


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="needs PyTorch 2.10")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("order", [[0, 0, 1, 2, 2], [2, 0, 2, 1, 2]], ids=["together", "mixed up"])
def test_grouped_products_compute_what_batched_products_do(order, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # what its kernels are for
    model = mixed.with_adapters("tiny", 3, dtype, device="cpu")
    for task in range(3):
        model.set_adapter(f"task_{task}")
        perturb(model, seed=task, scale=0.02)
    model.to(device)
    ids = torch.randint(0, 30522, (5, 7), generator=torch.Generator().manual_seed(0)).to(device)
    names = [f"task_{task}" for task in order]
    expected = mixed.evaluate(model, ids, names)
    other = mixed.evaluate(model, ids, names[::-1])
    with mixed.WAYS[mixed.GROUPED](model, ids, names) as call:
        found = call()
    error, other_error = (found - expected).float().norm(), (other - expected).float().norm()
    assert error <= (0.01 if device == "cuda" else 1e-6) * expected.float().norm()
    assert error < 0.1 * other_error, "the adapters must differ by more than rounding"


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="needs PyTorch 2.10")
def test_grouped_products_without_a_kernel_are_not_measured():
    with torch.device("meta"):
        bottleneck = Bottleneck(4, 2)
    # On tensors without memory, which need no GPU.
    with FakeTensorMode(allow_non_fake_inputs=True):
        bottleneck.to_empty(device="cuda")
        with pytest.raises(mixed.NotAvailable, match="float32"):
            mixed.Ragged(["task"], {"task": bottleneck}, torch.device("cuda"))


@pytest.mark.cuda
def test_a_graph_computes_what_a_mixed_batch_does():
    model = mixed.with_adapters("tiny", 3, torch.float32, device="cuda")
    ids = torch.randint(0, 30522, (3, 7), device="cuda")
    names = ["task_2", "task_0", "task_1"]
    replay = graphed(lambda ids: model(input_ids=ids, adapter_names=names).last_hidden_state, ids)
    ids.copy_(ids.flip(0))
    torch.testing.assert_close(replay(), mixed.evaluate(model, ids, names))


@pytest.mark.slow
def test_the_quick_benchmark_writes_its_tables_and_a_chart(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the chart, is not installed")
    output = tmp_path / "quick.json"
    command = [sys.executable, str(RUN), "--quick", "--rounds", "1", "--output", str(output)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result = json.loads(output.read_text())
    assert result.keys() == {"machine", "steps", "sizes", "tasks", "changes", "held", "imports", "actions", "export"}
    assert result["machine"]["torch"] == torch.__version__
    peaks = {row["method"]: row["peak_bytes"] for row in result["steps"] if row["phase"] == "train"}
    assert peaks["full fine-tuning"] > peaks[OURS]
    for row in result["steps"]:
        assert row["method"] in printed
        low, high = row["ratio_range"]
        assert low <= row["median_ratio"] <= high
    assert output.with_suffix(".png").stat().st_size > 10_000
