"""The GLUE recipe on two processes: 3-shared bottlenecks under every strategy, and runs that break
off.

DDP runs in every suite, the other strategies with `-m slow`; `.ci/run` adds FSDP2 and ZeRO-3.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

from distributed_checks import CHECKS
from distributed_runs import (
    CONFIGS,
    ROOT,
    STEPS,
    STRATEGIES,
    Run,
    launch_flags,
    make_inputs,
    run,
    start,
)
from run.edge import RecipeError
from run.training_arguments import RecipeTrainingArguments


SHARED = ("--share_layers", "3")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory, inputs) -> Run:
    """In one process."""
    return run(inputs, tmp_path_factory.mktemp("one"), None, *SHARED)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory, inputs) -> Run:
    """In two processes, and nothing interrupts it."""
    return run(inputs, tmp_path_factory.mktemp("ddp"), "ddp", *SHARED)


def check_all(two: Run, one: Run, name: str, inputs: Path) -> None:
    for check in CHECKS:
        check(two, one, STRATEGIES[name], inputs)


def skip_without_deepspeed(name: str) -> None:
    if name.startswith("zero"):
        pytest.importorskip(
            "deepspeed", reason="needs the extra 'deepspeed', which is not installed"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2", "zero1", "zero2", "zero3"])
def test_two_processes_do_what_one_does(name, inputs, one, tmp_path):
    skip_without_deepspeed(name)
    check_all(run(inputs, tmp_path, name, *SHARED), one, name, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "fsdp2"])
def test_two_processes_do_what_one_does_inside_the_norm(name, inputs, tmp_path):
    """The bottlenecks read the norm of the sum, which the strategy has sharded."""
    skip_without_deepspeed(name)
    shared = (*SHARED, "--kind", "pfeiffer")
    one = run(inputs, tmp_path / "one", None, *shared)
    check_all(run(inputs, tmp_path / name, name, *shared), one, name, inputs)


@pytest.mark.slow
def test_a_new_head_for_masked_words_is_saved_whole_from_zero3(inputs, tmp_path):
    """Scored by one process, it has the loss of the run, whose last epoch is restored."""
    skip_without_deepspeed("zero3")
    (tmp_path / "texts.csv").write_text("text\n" + "a film that he said was fine\n" * 64)
    recipe = [str(ROOT / "recipes" / "mlm.py"), "--data", str(tmp_path / "texts.csv")]
    launch = ["-m", "accelerate.commands.launch", *launch_flags(tmp_path, "zero3")]
    flags = ["--model_name", str(inputs / "model"), "--num_train_epochs", "2", "--max_length", "16"]
    flags += ["--output_dir", str(tmp_path / "run")]
    for words in (
        [*launch, *recipe, *flags],
        [*recipe, "--evaluate", str(tmp_path / "run"), "--output_dir", str(tmp_path)],
    ):
        subprocess.run([sys.executable, *words], check=True, cwd=ROOT)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["scores"]["loss"] == pytest.approx(results["best_scores"]["loss"], rel=1e-2)


def test_two_processes_under_ddp_do_what_one_does_even_if_one_is_killed_while_it_saves(
    inputs, one, tmp_path
):
    """It leaves half a checkpoint, and the run starts again from the one before, although only one
    is to be kept.
    """
    flags = (*SHARED, "--resume_from_checkpoint", "last", "--save_total_limit", "1")
    killed = run(inputs, tmp_path, "ddp", *flags, launcher=("--max_restarts", "3"), kill_in_save=8)
    log = (tmp_path / "log.txt").read_text()
    assert "exitcode: -9" in log
    assert "checkpoint-8: it is incomplete" in log
    check_all(killed, one, "ddp", inputs)


def first_command(page: str) -> list[str]:
    """The first command of a page of the docs."""
    block = (ROOT / "docs" / page).read_text().partition("```bash\n")[2].partition("```")[0]
    return shlex.split(block)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "zero2", "zero3"])
def test_the_documented_command_runs_two_processes_without_a_gpu(config, inputs, tmp_path):
    """Nothing imitates a GPU here."""
    accelerate, *words = first_command("distributed.md")
    assert (accelerate, words[:2]) == ("accelerate", ["launch", "--config_file"])
    words[2] = words[2].replace("ddp", config)
    flags = ["--max_steps", "4", "--report_to", "none", "--output_dir", str(tmp_path / "run")]
    flags += ["--model_name", str(inputs / "model"), "--data_dir", str(inputs / "data")]
    # Not the launcher's usual port, which another run may have.
    launcher = ["-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command = [sys.executable, *launcher, *words[1:], *flags]
    command[command.index("mrpc")] = "mnli"
    process = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    )
    assert process.returncode == 0
    strategy = json.loads((tmp_path / "run" / "results.json").read_text())["strategy"]
    kind = "DDP" if config == "ddp" else config.replace("zero", "ZeRO-")
    assert (strategy["type"], strategy["processes"]) == (kind, 2)


@pytest.mark.parametrize(
    ("environment", "has_gpu", "word"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, False, "FSDP needs GPUs"),
        ({"WORLD_SIZE": "2"}, True, "2 processes were started"),
    ],
)
def test_processes_that_would_not_find_each_other(environment, has_gpu, word, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    with pytest.raises(RecipeError, match=word):
        RecipeTrainingArguments(report_to="none")


def test_one_process_where_several_were_asked_for_is_said(monkeypatch, capsys):
    """As accelerate launch --cpu --num_processes 2 starts it."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_PORT", "29500")
    RecipeTrainingArguments(report_to="none")
    assert "warning: this is one process" in capsys.readouterr().out


@pytest.mark.slow
def test_two_launchers_make_one_run(inputs, one, tmp_path):
    """As on two machines with a shared folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = ("--main_process_ip", "127.0.0.1", "--main_process_port", port)
    machines = []
    for rank in "01":
        launcher = ("--machine_rank", rank, *address)
        machines.append(start(inputs, tmp_path, "several_nodes", *SHARED, launcher=launcher))
    for machine in machines:
        output, _ = machine.communicate(timeout=300)
        assert machine.returncode == 0, output[-6000:]
    check_all(Run(tmp_path), one, "several_nodes", inputs)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*")), ids=lambda path: path.stem)
def test_configurations(path):
    config = load_config_from_file(str(path))
    assert config.use_cpu is (path.stem == "cpu")
    assert (config.num_processes > 1) is (path.stem not in ("cpu", "one_gpu"))
    if path.stem.startswith("zero"):
        settings = json.loads((ROOT / config.deepspeed_config["deepspeed_config_file"]).read_text())
        assert settings["zero_optimization"]["stage"] == int(path.stem[4])
        assert ("offload_param" in settings["zero_optimization"]) is ("offload" in path.stem)


@pytest.mark.slow
def test_accumulated_steps_exchange_once(inputs, one, tmp_path):
    batches = ("--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "2")
    check_all(run(inputs, tmp_path, "ddp", *SHARED, *batches), one, "ddp", inputs)


@pytest.mark.slow
def test_adapters_in_some_layers_need_no_search_for_unused_parameters(inputs, tmp_path):
    two = run(inputs, tmp_path, "ddp", "--layers", "1", "2")
    for record in two.records:
        assert record["find_unused_parameters"] is False
        assert record["exchanged_per_step"] == 4 * two.results["trainable_parameters"]
    assert {key.split("layer.")[1][0] for key in two.adapter if "houlsby" in key} == {"1", "2"}


# 8: in the middle of an epoch; 12: nothing is left to do but choosing and saving the best.
@pytest.mark.slow
@pytest.mark.parametrize("step", [8, STEPS])
def test_a_resumed_run_ends_as_one_without_a_break(step, inputs, ddp, tmp_path):
    for checkpoint in ddp.output.glob("checkpoint-*"):
        if int(checkpoint.name.rpartition("-")[2]) <= step:
            shutil.copytree(checkpoint, tmp_path / "output" / checkpoint.name)
    resumed = run(inputs, tmp_path, "ddp", *SHARED, "--resume_from_checkpoint", "last")
    assert [record["processes"] for record in resumed.records] == [2, 2]
    assert resumed.records[0]["steps"] == list(range(1, STEPS + 1))
    assert resumed.records[0]["losses"] == pytest.approx(ddp.records[0]["losses"], abs=1e-7)
    for name in ("best_epoch", "best_score"):
        assert resumed.results[name] == ddp.results[name]
    torch.testing.assert_close(resumed.adapter, ddp.adapter, atol=0, rtol=0)


@pytest.mark.slow
def test_a_stuck_process_ends_the_run(inputs, tmp_path):
    begin = time.monotonic()
    stuck = start(inputs, tmp_path, "ddp", *SHARED, "--ddp_timeout", "15", hang=3)
    output, _ = stuck.communicate(timeout=300)
    assert stuck.returncode != 0
    assert "Timed out waiting 15000ms" in output
    assert time.monotonic() - begin < 200
