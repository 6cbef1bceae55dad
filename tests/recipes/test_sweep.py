"""Sweeps: which runs there are, and that none is lost, run twice or left behind, whatever happens
to the sweep.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import psutil
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from run.edge import RecipeError
from sweep import parse_arguments
from sweeping.processes import CONFIGS, find_slots, launch_command
from sweeping.runs import best_point, choose, make_runs
from sweeping.search import execute_all, make_searches


ROOT = Path(__file__).parents[2]
# What a sweep needs of a recipe, and no more: it goes on from its checkpoint, and writes
# results.json last, at once.
RECIPE = """
import json, os, sys, time
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = Path(flags["--output_dir"])
checkpoint, results = folder / "checkpoint", folder / "results.json"
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
with (folder / "starts").open("a") as starts:
    devices, threads = map(os.environ.get, ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"))
    starts.write(f"{step} {time.time()} {devices} {threads}\\n")
if flags.get("--fail") in (flags["--seed"], flags["--learning_rate"]):
    sys.exit("a run that fails")
while step < int(flags["--steps"]) or ((folder / "hold").exists() and step < 600):
    time.sleep(0.1)
    step += 1
    (folder / "next").write_text(str(step))
    (folder / "next").replace(checkpoint)
rate, seed = float(flags["--learning_rate"]), int(flags["--seed"])
score = 0.9 - abs(rate - 0.002) + 0.01 * seed
run = {"task": "toy", "method": "houlsby", "seed": seed, "chosen_by": "accuracy",
       "best_score": score, "best_scores": {"accuracy": score},
       "trainable_parameters": 10, "total_parameters": 110,
       "seconds": step / 10, "ended": time.time(),
       "arguments": {"learning_rate": rate, "r": 64, "output_dir": str(folder)}}
(folder / "part").write_text(json.dumps(run))
(folder / "part").replace(results)
"""


# Instead of accelerate launch, which takes seconds to start, and of PyTorch, which a sweep asks
# only for GPUs.
STUBS = {
    "accelerate/__init__.py": "",
    "accelerate/commands/__init__.py": "",
    "accelerate/commands/launch.py": """
import subprocess, sys

# The command stands behind --quiet --config_file FILE.
sys.exit(subprocess.run([sys.executable, *sys.argv[4:]]).returncode)
""",
    "torch/__init__.py": "class cuda:\n    is_available = staticmethod(lambda: False)\n",
}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(RECIPE)
    for name, code in STUBS.items():
        (tmp_path / "stubs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "stubs" / name).write_text(code)
    path = (str(tmp_path / "stubs"), *filter(None, [os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    yield tmp_path / "toy.py"
    for process in psutil.process_iter(["cmdline"]):  # what a test that fails leaves behind
        if any(str(tmp_path) in word for word in process.info["cmdline"] or ()):
            process.kill()


def start(recipe, *flags):
    sweep = ROOT / "recipes" / "studies" / "sweep.py"
    command = [sys.executable, sweep, recipe, "--output_dir", recipe.parent / "out", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    piped = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*map(str, command)], env=environment, **piped)


def finish(process, code=0):
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code, output + errors
    return output, errors


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)


def starts(recipe):
    """Per run the steps that it was started at."""
    steps = {}
    for file in sorted((recipe.parent / "out").glob("*/*/starts")):
        lines = file.read_text().splitlines()
        steps[file.parent.name] = [int(line.split()[0]) for line in lines]
    return steps


def running(processes):
    return [
        process
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def results(recipe):
    return sorted((recipe.parent / "out").glob("*/*/results.json"))


AXES = {"task": ["cola", "rte"], "learning_rate": ["1e-3", "0.003"], "seed": ["0", "1", "2"]}


class TestRuns:
    def test_a_run_for_each_combination(self, tmp_path):
        runs = make_runs(tmp_path, Path("glue.py"), AXES, ["--max_length", "64"])
        assert len({run.folder for run in runs}) == len(runs) == 2 * 2 * 3
        assert runs[0].folder == tmp_path / "cola" / "learning_rate=0.001,seed=0"
        flags = "--task cola --learning_rate 1e-3 --seed 0 --max_length 64"
        assert runs[0].arguments == ["glue.py", *flags.split(), "--output_dir", str(runs[0].folder)]

    def test_what_means_nothing_to_a_method_is_not_varied(self, tmp_path):
        axes = {"method": ["houlsby", "full", "top_k"], "r": ["8", "64"], "top_k": ["1"]}
        points = [run.point for run in make_runs(tmp_path, Path("glue.py"), axes, [])]
        houlsby = [{"method": "houlsby", "r": r} for r in ("8", "64")]
        assert points == [*houlsby, {"method": "full"}, {"method": "top_k", "top_k": "1"}]

    def test_the_choice_is_by_the_mean_over_most_seeds(self):
        assert choose({"a": [0.5, 0.7], "b": [0.4, 0.9], "one lucky seed": [0.95]}) == "b"
        assert choose({"a": [0.5, 0.7], "b": [0.4, 0.9]}, lower_is_better=True) == "a"

    @pytest.mark.parametrize(("chosen_by", "best"), [("accuracy", "0.003"), ("loss", "1e-3")])
    def test_the_best_point(self, tmp_path, chosen_by, best):
        axes = {"learning_rate": ["1e-3", "0.003", "1"], "seed": ["5"]}
        runs = make_runs(tmp_path, Path("glue.py"), axes, [])
        for run, score in zip(runs, (0.6, 0.7, None), strict=True):
            run.folder.mkdir(parents=True)
            scores = {"best_score": score, "chosen_by": chosen_by}
            (run.folder / "results.json").write_text(json.dumps(scores))
        assert best_point(runs) == {"learning_rate": best}


@pytest.mark.parametrize("flags", ["--n_trials 3", "--r 8:64", "--n_trials 3 --r 8:64 64:512"])
def test_ranges_and_the_number_of_points_need_each_other(monkeypatch, flags):
    script = str(ROOT / "recipes" / "glue.py")
    monkeypatch.setattr(sys, "argv", ["sweep.py", script, "--output_dir", "out", *flags.split()])
    with pytest.raises(SystemExit, match="2"):
        parse_arguments()


def test_an_axis_may_be_spelled_with_hyphens():
    script = str(ROOT / "recipes" / "glue.py")
    arguments, flags = parse_arguments(
        [script, "--output_dir", "out", "--learning-rate", "1e-4", "1e-3", "--max-length", "64"]
    )
    assert arguments.learning_rate == ["1e-4", "1e-3"]
    assert flags == ["--max-length", "64"]


def sweep(recipe, axes, *flags, search_seeds=None, n_trials=None, slots=({},)):
    """Run a sweep in this process, without accelerate; return the runs that failed."""
    output = recipe.parent / "out"
    runs = make_runs(output, recipe, axes, ["--steps", "3", *flags])
    searches = make_searches(output, runs, ["learning_rate"], search_seeds, n_trials)
    return execute_all(searches, [sys.executable], slots)


class TestExecution:
    def test_the_other_seeds_run_at_the_best_point_only(self, recipe, capsys):
        axes = {"learning_rate": ["1e-3", "2e-3", "3e-3"], "seed": ["0", "1", "2"]}
        assert sweep(recipe, axes, search_seeds=1) == {}
        assert list(starts(recipe)) == [
            "learning_rate=0.001,seed=0",
            *(f"learning_rate=0.002,seed={seed}" for seed in range(3)),
            "learning_rate=0.003,seed=0",
        ]
        assert "5/5" in capsys.readouterr().err, "progress"

    def test_a_run_per_device(self, recipe):
        axes = {"learning_rate": ["1e-3"], "seed": ["0", "1", "2", "3"]}
        slots = [{"CUDA_VISIBLE_DEVICES": name} for name in ("GPU-a", "GPU-b")]
        assert sweep(recipe, axes, slots=slots) == {}
        spans: dict[str, list[tuple[float, float]]] = {"GPU-a": [], "GPU-b": []}
        for file in results(recipe):
            _, begin, device, _ = (file.parent / "starts").read_text().split()
            spans[device].append((float(begin), json.loads(file.read_text())["ended"]))
        for runs in spans.values():
            for (_, end), (begin, _) in itertools.pairwise(sorted(runs)):
                assert end <= begin
        firsts = [min(runs) for runs in spans.values()]
        begins, ends = zip(*firsts, strict=True)
        assert max(begins) < min(ends), "the devices do not run at the same time"

    def test_a_failure_stops_nothing_and_is_tried_again(self, recipe):
        """The other seeds run at the best of the points that have not failed."""
        axes = {"learning_rate": ["1e-3", "2e-3", "3e-3"], "seed": ["0", "1"]}
        for _ in range(2):
            ((failed, lines),) = sweep(recipe, axes, "--fail", "2e-3", search_seeds=1).items()
            assert failed.point == {"learning_rate": "2e-3", "seed": "0"}
            assert lines == "a run that fails\n(exit status 1, no results.json)"
        numbers = {name: len(steps) for name, steps in starts(recipe).items()}
        names = ("0.001,seed=0", "0.001,seed=1", "0.002,seed=0", "0.003,seed=0")
        expected = zip(names, (1, 1, 2, 1), strict=True)
        assert numbers == {f"learning_rate={name}": number for name, number in expected}
        runs = make_runs(recipe.parent / "out", recipe, axes, ["--fail", "2e-3", "--steps", "3"])
        [search] = make_searches(recipe.parent / "out", runs, search_seeds=1)
        assert search.count_left() == 1

    def test_other_flags_of_a_finished_run_need_another_folder(self, recipe):
        axes = {"learning_rate": ["1e-3"], "seed": ["0"]}
        sweep(recipe, axes, "--fail", "0")
        sweep(recipe, axes, "--more", "1", "--other=3")  # nothing was finished
        sweep(recipe, {**axes, "learning_rate": ["0.001"]}, "--other", "3", "--more", "1")
        assert list(starts(recipe)) == ["learning_rate=0.001,seed=0"]
        with pytest.raises(RecipeError, match="other flags"):
            sweep(recipe, axes, "--more", "2")


class TestSampling:
    """What Optuna knows of a sweep that samples its points, and what it decides."""

    def study(self, recipe, name):
        """As anyone loads it who has Optuna alone."""
        journal = str(recipe.parent / "out" / "optuna.journal")
        return optuna.load_study(
            study_name=name, storage=JournalStorage(JournalFileBackend(journal))
        )

    def test_tpe_samples_a_range_and_the_other_seeds_run_at_its_best_point(self, recipe):
        axes = {"r": ["8"], "learning_rate": ["1e-4:1e-2"], "seed": ["0", "1"]}
        options = {"search_seeds": 1, "n_trials": 4, "slots": [{}, {}]}
        assert sweep(recipe, axes, **options) == {}
        trials = self.study(recipe, "toy: toy/r=8").trials
        rates = [trial.params["learning_rate"] for trial in trials]
        assert len(set(rates)) == 4
        assert all(1e-4 <= rate <= 1e-2 for rate in rates)
        scores = [0.9 - abs(rate - 0.002) for rate in rates]
        assert [trial.value for trial in trials] == pytest.approx(scores)
        best = min(rates, key=lambda rate: abs(rate - 0.002))
        runs = [f"r=8,learning_rate={rate!r},seed=0" for rate in rates]
        assert starts(recipe).keys() == {*runs, f"r=8,learning_rate={best!r},seed=1"}
        sweep(recipe, axes, **{**options, "n_trials": 5})
        assert len(starts(recipe)) in (6, 7), "one more point is sampled, which may be the best"

    @pytest.mark.parametrize(
        ("flags", "direction"),
        [
            (["--label_columns", "error"], "MAXIMIZE"),
            (["--metric_for_best_model", "eval_loss"], "MINIMIZE"),
            (["--metric_for_best_model=loss", "--data", "a"], "MINIMIZE"),
        ],
    )
    def test_the_score_that_chooses_says_which_way_is_better(self, flags, direction, recipe):
        output = recipe.parent / "out"
        runs = make_runs(output, recipe, {"learning_rate": ["1e-4:1e-2"], "seed": ["0"]}, flags)
        make_searches(output, runs, ["learning_rate"], 1, 1)
        assert self.study(recipe, "toy: toy/run").direction.name == direction

    def test_what_has_begun_keeps_its_ranges_and_score_and_a_dry_run_begins_nothing(self, recipe):
        output = recipe.parent / "out"

        def search(rates, *flags, **options):
            runs = make_runs(output, recipe, {"learning_rate": [rates], "seed": ["0"]}, flags)
            return make_searches(output, runs, ["learning_rate"], 1, 1, **options)

        [planned] = search("1e-4:1e-1", dry_run=True)
        assert planned.count_left() == 1
        assert not output.exists()
        search("1e-4:1e-2")
        for other in (["1e-4:1e-1"], ["1e-4:1e-2", "--metric_for_best_model", "loss"]):
            for dry_run in (True, False):
                with pytest.raises(RecipeError, match="--output_dir"):
                    search(*other, dry_run=dry_run)

    def test_a_killed_trial_is_finished_before_others_are_sampled(self, recipe):
        axes = {"learning_rate": ["1e-4:1e-2"], "seed": ["0"]}
        assert len(sweep(recipe, axes, "--fail", "0", n_trials=2)) == 2
        names = set(starts(recipe))
        assert sweep(recipe, axes, n_trials=2) == {}
        assert set(starts(recipe)) == names
        assert len(results(recipe)) == 2


class TestSlots:
    """Of GPUs that there may not be."""

    @pytest.mark.parametrize(
        ("visible", "jobs", "processes", "devices"),
        [
            (None, None, None, ["0", "1", "2", "3"]),
            (None, 6, None, ["0", "1", "2", "3", "0", "1"]),
            (None, None, 2, ["0,1", "2,3"]),
            (None, None, 3, ["0,1,2"]),
            ("GPU-8a,3", None, None, ["GPU-8a", "3"]),
        ],
    )
    def test_with_gpus(self, monkeypatch, tmp_path, visible, jobs, processes, devices):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
        config = tmp_path / "config.yaml"
        config.write_text(f"num_processes: {processes}\n")
        slots = find_slots(jobs, str(config) if processes else None)
        assert slots == [{"CUDA_VISIBLE_DEVICES": device} for device in devices]
        command = launch_command(str(config) if processes else None, slots)
        assert command[5] == str(config if processes else CONFIGS / "one_gpu.yaml")
        # Several launchers need other ports.
        assert ("--main_process_port" in command) == bool(processes)

    @pytest.mark.parametrize(("variable", "threads"), [(None, ["4", "4"]), ("3", ["3", "3"])])
    def test_without_a_gpu_the_cores_are_shared(self, monkeypatch, variable, threads):
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setattr("os.cpu_count", lambda: 8)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if variable:
            monkeypatch.setenv("OMP_NUM_THREADS", variable)
        slots = find_slots(2, str(CONFIGS / "ddp.yaml"))
        assert [slot["OMP_NUM_THREADS"] for slot in slots] == threads
        assert launch_command(None, slots)[-1] == str(CONFIGS / "cpu.yaml")


class TestAccidents:
    FLAGS = ("--learning_rate", "1e-3", "--seed", "0", "1", "2")

    def killed(self, recipe, with_its_runs):
        """Kills a sweep in its second run, and returns the first one's results and the second one's
        folder.
        """
        sweep = start(recipe, *self.FLAGS, "--steps", 15)
        second = recipe.parent / "out" / "toy" / "learning_rate=0.001,seed=1"
        wait_for(lambda: (second / "checkpoint").exists())
        (second / "hold").touch()
        processes = psutil.Process(sweep.pid).children(recursive=True) if with_its_runs else []
        for process in [sweep, *processes]:
            process.kill()
        sweep.communicate()
        (first,) = results(recipe)
        return first, second

    def test_a_sweep_killed_with_its_runs_goes_on(self, recipe):
        first, second = self.killed(recipe, with_its_runs=True)
        (second / "hold").unlink()
        written = first.stat().st_mtime_ns
        output, _ = finish(start(recipe, *self.FLAGS, "--steps", 15))
        assert "0 1 2" in output, "the seeds in the table"
        assert first.stat().st_mtime_ns == written
        (of_first, (begun, gone_on), of_third) = starts(recipe).values()
        assert of_first == of_third == [0]
        assert begun == 0 < gone_on, "it starts anew"

    def test_the_run_of_a_sweep_killed_alone_is_waited_for(self, recipe):
        _, second = self.killed(recipe, with_its_runs=False)
        sweep = start(recipe, *self.FLAGS, "--steps", 15)
        wait_for(lambda: len(results(recipe)) == 2)  # the others; the second one is still held
        assert sweep.poll() is None
        (second / "hold").unlink()
        output, _ = finish(sweep)
        assert "0 1 2" in output
        assert list(starts(recipe).values()) == [[0], [0], [0]]

    def test_two_processes_share_a_sweep(self, recipe):
        """Each combination is done once."""
        flags = ("--learning_rate", "1e-3", "2e-3", "--seed", 0, 1, "--steps", 4)
        for sweep in [start(recipe, *flags) for _ in range(2)]:
            finish(sweep)
        assert list(starts(recipe).values()) == [[0]] * 4

    @pytest.mark.parametrize(
        ("number", "in_background"), [(signal.SIGINT, False), (signal.SIGTERM, True)]
    )
    def test_an_interrupt_leaves_nothing_running(self, recipe, number, in_background):
        """Also under nohup, and in the background of a script, where hangups and Ctrl-C are
        ignored.
        """
        ignored = (signal.SIGHUP, signal.SIGINT) if in_background else ()
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
        sweep = start(recipe, *self.FLAGS, "--jobs", 2, "--steps", 600)
        for ignored_number, handler in handlers.items():
            signal.signal(ignored_number, handler)
        wait_for(lambda: len(starts(recipe)) == 2)
        processes = psutil.Process(sweep.pid).children(recursive=True)
        assert len(processes) >= 4, "two launchers and two runs"
        if in_background:
            sweep.send_signal(signal.SIGHUP)
        sweep.send_signal(number)
        _, errors = finish(sweep, code=130)
        assert errors.rstrip().endswith("Interrupted. The same command resumes from here.")
        assert "Traceback" not in errors
        assert not running(processes)

    def test_the_plan_of_a_sweep(self, recipe):
        output, _ = finish(start(recipe, *self.FLAGS, "--steps", 1, "--dry_run"))
        assert "\n3 runs, ? hours: " in output  # nothing is known of the data
        assert output.count("accelerate.commands.launch --quiet") == 1
        sampled = ("--task", "cola", "--r", "8:64", "--n_trials", 5, "--seed", 0, 1)
        output, _ = finish(start(recipe, *sampled, "--dry_run"))
        assert output == "6 runs, whose values are drawn in ranges\n"
        assert starts(recipe) == {}


# Run by bash on this machine.
SLURM = sorted((ROOT / "recipes" / "launch" / "slurm").glob("*.sbatch"))


@pytest.fixture
def slurm(recipe, monkeypatch):
    """Starts a batch file as Slurm would, with this Python and a scontrol that only writes what it
    is asked to do.
    """
    programs = {
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
        "scontrol": f'echo "$@" > {recipe.parent}/asked',
    }
    for name, body in programs.items():
        (recipe.parent / name).write_text(f"#!/bin/sh\n{body}\n")
        (recipe.parent / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(recipe.parent), os.environ["PATH"]]))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    flags = ["--learning_rate", "1e-3", "--seed", "0", "1", "--steps", "8"]
    command = [recipe, *flags, "--output_dir", recipe.parent / "out"]
    piped = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return lambda file: subprocess.Popen(["bash", file, *command], cwd=ROOT, **piped)


@pytest.mark.parametrize(
    "file", [file for file in SLURM if "sweep.py" in file.read_text()], ids=lambda file: file.name
)
def test_a_job_whose_time_is_up_is_queued_again_and_resumes(recipe, slurm, file):
    job = slurm(file)
    wait_for(lambda: list((recipe.parent / "out").glob("*/*/checkpoint")))
    processes = psutil.Process(job.pid).children(recursive=True)
    job.send_signal(signal.SIGUSR1)
    _, errors = finish(job, code=128 + signal.SIGUSR1)
    assert "The same command resumes from here" in errors
    assert (recipe.parent / "asked").read_text() == "requeue 7\n"
    assert not running(processes)
    finish(slurm(file))
    (first, resumed), of_second_run = starts(recipe).values()
    assert first == 0 < resumed
    assert of_second_run == [0]
    assert len(results(recipe)) == 2
