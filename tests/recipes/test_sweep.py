"""Sweeps: which runs there are, and that none is lost, run twice or left behind, whatever happens to the sweep."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import optuna
import psutil
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from recipe_runs import save_tiny_encoder
from sweep import parse_arguments
from sweeping.processes import find_slots, launch_command, lock
from sweeping.runs import best_point, choose, make_runs
from sweeping.search import Sweep
from tasks.minimal_pairs import minimal_pairs
from training.errors import RecipeError
from training.trained_on import describe_file


ROOT = Path(__file__).parents[2]
COMPLETE = TrialState.COMPLETE
# What a sweep needs of a recipe, and no more: it goes on from its checkpoint, and writes results.json last, at once.
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
run = {"task": "toy", "method": "houlsby", "seed": seed, "chosen_by": "accuracy", "best_score": score,
       "best_scores": {"accuracy": score}, "trainable_parameters": 10, "total_parameters": 110,
       "seconds": step / 10, "ended": time.time(),
       "arguments": {"learning_rate": rate, "r": 64, "output_dir": str(folder)}}
(folder / "part").write_text(json.dumps(run))
(folder / "part").replace(results)
"""


# Instead of accelerate launch, which takes seconds to start, and of PyTorch, which a sweep asks only for GPUs.
STUBS = {
    "accelerate/__init__.py": "",
    "accelerate/commands/__init__.py": "",
    "accelerate/commands/launch.py": """
import subprocess, sys

sys.exit(subprocess.run([sys.executable, *sys.argv[4:]]).returncode)  # behind --quiet --config_file FILE
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


def command(recipe, *flags):
    return [sys.executable, str(ROOT / "recipes" / "sweep.py"), str(recipe), *map(str, flags)]


def start(recipe, *flags, **environment):
    return subprocess.Popen(
        command(recipe, "--output_dir", recipe.parent / "out", *flags),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


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
    files = sorted((recipe.parent / "out").glob("*/*/starts"))
    return {file.parent.name: [int(line.split()[0]) for line in file.read_text().splitlines()] for file in files}


def results(recipe):
    return sorted((recipe.parent / "out").glob("*/*/results.json"))


AXES = {"task": ["cola", "rte"], "learning_rate": ["1e-3", "0.003"], "seed": ["0", "1", "2"]}


class TestRuns:
    def test_a_run_for_each_combination(self, tmp_path):
        runs = make_runs(tmp_path, Path("glue.py"), AXES, ["--max_length", "64"])
        assert len({run.folder for run in runs}) == len(runs) == 2 * 2 * 3
        assert runs[0].folder == tmp_path / "cola" / "learning_rate=0.001,seed=0"
        flags = "--task cola --learning_rate 1e-3 --seed 0 --max_length 64"
        assert runs[0].arguments == [
            "glue.py",
            *flags.split(),
            *("--output_dir", str(runs[0].folder), "--resume_from_checkpoint", "last"),
        ]

    def test_what_means_nothing_to_a_method_is_not_varied(self, tmp_path):
        axes = {"method": ["houlsby", "full", "top_k"], "r": ["8", "64"], "share_layers": ["0", "3"], "top_k": ["1"]}
        points = [run.point for run in make_runs(tmp_path, Path("glue.py"), axes, [])]
        assert points[4:] == [{"method": "full"}, {"method": "top_k", "top_k": "1"}]
        assert [(point["r"], point["share_layers"]) for point in points[:4]] == [
            ("8", "0"),
            ("8", "3"),
            ("64", "0"),
            ("64", "3"),
        ]

    def test_the_choice_is_by_the_mean_over_most_seeds(self):
        assert choose({"a": [0.5, 0.7], "b": [0.4, 0.9], "one lucky seed": [0.95]}) == "b"
        assert choose({"a": [0.5, 0.7], "b": [0.4, 0.9]}, lower_is_better=True) == "a"
        assert choose({"first": [0.5], "second": [0.5]}) == "first"

    def test_the_best_point_of_no_runs(self, tmp_path):
        assert best_point(make_runs(tmp_path, Path("glue.py"), AXES, [])) is None

    @pytest.mark.parametrize(("chosen_by", "best"), [("accuracy", "0.003"), ("loss", "1e-3")])
    def test_the_best_point(self, tmp_path, chosen_by, best):
        runs = make_runs(tmp_path, Path("glue.py"), {"learning_rate": ["1e-3", "0.003", "1"], "seed": ["5"]}, [])
        for run, score in zip(runs, (0.6, 0.7, None), strict=True):
            run.folder.mkdir(parents=True)
            (run.folder / "results.json").write_text(json.dumps({"best_score": score, "chosen_by": chosen_by}))
        assert best_point(runs) == {"learning_rate": best}


class TestCommandLine:
    def parse(self, monkeypatch, recipe, *flags):
        script = str(ROOT / "recipes" / f"{recipe}.py")
        monkeypatch.setattr(sys, "argv", ["sweep.py", script, "--output_dir", "out", *flags])
        return parse_arguments()

    @pytest.mark.parametrize(
        ("recipe", "flags", "message"),
        [
            ("stream", "--data a.csv b.csv", "stream.py writes one per task"),
            ("glue", "--push_to_hub --hub_model_id user/cola", "all runs would push to one repository"),
            ("glue", "--push_to_hub=true", "all runs would push to one repository"),
            ("glue", "--pruner median --eval_strategy no", "leave --eval_strategy out"),
            ("glue", "--n_trials 3", "--sampler tpe and --n_trials need each other"),
            ("glue", "--sampler tpe", "--sampler tpe and --n_trials need each other"),
            ("glue", "--learning_rate 1e-4:1e-3", "a grid takes a list of values.* got --learning_rate 1e-4:1e-3"),
            ("glue", "--sampler tpe --n_trials 3 --r 8:64", "got --r 8:64"),
            ("glue", "--sampler tpe --n_trials 3 --learning_rate 1e-4 1e-3", "got --learning_rate 1e-4 1e-3"),
            ("glue", "--sampler tpe --n_trials 3 --search_seeds 2", "searches with one seed, got --search_seeds 2"),
            ("glue", "--jobs 0", "--jobs must be at least 1, got 0"),
        ],
    )
    def test_wrong_flags(self, monkeypatch, capsys, recipe, flags, message):
        with pytest.raises(SystemExit, match="2"):
            self.parse(monkeypatch, recipe, *flags.split())
        assert re.search(message, capsys.readouterr().err)

    def test_the_recipes_flags(self, monkeypatch):
        arguments, rest = self.parse(monkeypatch, "text_classification", "--data", "a.csv", "--r", "2", "4")
        assert (arguments.r, rest) == (["2", "4"], ["--data", "a.csv"])

    @pytest.mark.parametrize(("axis", "values"), [("r", ["8", "1.5"]), ("learning_rate", ["1e-3", "fast"])])
    def test_values_that_are_no_numbers(self, tmp_path, axis, values):
        with pytest.raises(RecipeError, match=f"--{axis} must be a .*number above 0, got '{values[1]}'"):
            Sweep(tmp_path, make_runs(tmp_path, Path("glue.py"), {axis: values}, []))


class TestExecution:
    """In this process, without accelerate."""

    def sweep(self, recipe, axes, *flags, search_seeds=None, n_trials=None, slots=({},), **kwargs):
        output = recipe.parent / "out"
        runs = make_runs(output, recipe, axes, ["--steps", "3", *flags])
        sweep = Sweep(output, runs, ["learning_rate"], search_seeds, n_trials)
        return sweep.execute([sys.executable], slots, **kwargs)

    def test_the_other_seeds_run_at_the_best_point_only(self, recipe, capsys):
        axes = {"learning_rate": ["1e-3", "2e-3", "3e-3"], "seed": ["0", "1", "2"]}
        assert self.sweep(recipe, axes, search_seeds=1) == {}
        assert list(starts(recipe)) == [
            "learning_rate=0.001,seed=0",
            *(f"learning_rate=0.002,seed={seed}" for seed in range(3)),
            "learning_rate=0.003,seed=0",
        ]
        assert "5/5" in capsys.readouterr().err, "progress"

    def test_a_full_grid(self, recipe):
        assert self.sweep(recipe, {"learning_rate": ["1e-3", "2e-3"], "seed": ["0", "1"]}) == {}
        assert len(results(recipe)) == 4

    def test_a_run_per_device(self, recipe):
        axes = {"learning_rate": ["1e-3"], "seed": ["0", "1", "2", "3"]}
        assert self.sweep(recipe, axes, slots=[{"CUDA_VISIBLE_DEVICES": name} for name in ("GPU-a", "GPU-b")]) == {}
        spans: dict[str, list[tuple[float, float]]] = {}
        for file in results(recipe):
            _, begin, device, _ = (file.parent / "starts").read_text().split()
            spans.setdefault(device, []).append((float(begin), json.loads(file.read_text())["ended"]))
        assert set(spans) == {"GPU-a", "GPU-b"}
        for runs in spans.values():
            runs.sort()
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(runs))
        (a, b), (c, d) = spans["GPU-a"][0], spans["GPU-b"][0]
        assert max(a, c) < min(b, d), "the devices do not run at the same time"

    def test_a_failure_stops_nothing_and_is_tried_again(self, recipe):
        axes = {"learning_rate": ["1e-3"], "seed": ["0", "1", "2"]}
        ((failed, lines),) = self.sweep(recipe, axes, "--fail", "1").items()
        assert failed.point["seed"] == "1"
        assert lines == "a run that fails\n(exit status 1)"
        assert len(results(recipe)) == 2
        self.sweep(recipe, axes, "--fail", "1")
        assert {name: len(steps) for name, steps in starts(recipe).items()} == {
            "learning_rate=0.001,seed=0": 1,
            "learning_rate=0.001,seed=1": 2,
            "learning_rate=0.001,seed=2": 1,
        }

    def test_a_recipe_that_writes_no_results(self, recipe):
        recipe.write_text("print('done')")
        (lines,) = self.sweep(recipe, {"learning_rate": ["1e-3"], "seed": ["0"]}).values()
        assert re.fullmatch(r"done\n\(exit status 0, but there is no .*,seed=0/results.json\)", lines)

    def test_the_search_goes_on_without_what_has_failed(self, recipe):
        axes = {"learning_rate": ["1e-3", "2e-3", "3e-3"], "seed": ["0", "1"]}
        (failed,) = self.sweep(recipe, axes, "--fail", "2e-3", search_seeds=1)
        assert failed.point == {"learning_rate": "2e-3", "seed": "0"}
        assert [path.parent.name for path in results(recipe)] == [
            "learning_rate=0.001,seed=0",
            "learning_rate=0.001,seed=1",
            "learning_rate=0.003,seed=0",
        ]

    def test_other_flags_need_another_folder(self, recipe):
        axes = {"learning_rate": ["1e-3"], "seed": ["0"]}
        self.sweep(recipe, axes)
        with pytest.raises(RecipeError, match=r"other flags. Then: none; now: --more 1. Give the same"):
            self.sweep(recipe, axes, "--more", "1")

    @pytest.mark.parametrize("sampled", [False, True], ids=["grid", "sampled"])
    def test_finished_runs_on_other_data_are_refused(self, recipe, sampled):
        """As the recipe itself refuses them; what it has recorded of its files is all that is known."""
        train, test = recipe.parent / "train.csv", recipe.parent / "test.csv"
        train.write_text("a")
        test.write_text("b")
        code = """
(folder / "arguments.json").write_text(json.dumps({"trained_on": {"files": {"train": DESCRIPTION}}}))
(folder / "results.json").write_text(json.dumps({**run, "test_file": OF_TEST}))
"""
        described = repr(describe_file(train)), repr(describe_file(test))
        code = code.replace("DESCRIPTION", described[0]).replace("OF_TEST", described[1])
        recipe.write_text(recipe.read_text() + code)
        axes = {"learning_rate": ["1e-3:1e-2" if sampled else "1e-3"], "seed": ["0"]}
        kwargs = {"n_trials": 2, "search_seeds": 1} if sampled else {}
        for _ in range(2):
            self.sweep(recipe, axes, **kwargs)
            assert {len(of_run) for of_run in starts(recipe).values()} == {1}
        train.write_text("other")
        with pytest.raises(RecipeError, match=r"other data: data of train .* train\.csv had 1 bytes, has 5\. Give"):
            self.sweep(recipe, axes, **kwargs)
        train.write_text("a")
        test.write_text("c")
        with pytest.raises(RecipeError, match=r"another test file: .* test\.csv has .* or score this one with"):
            self.sweep(recipe, axes, **kwargs)
        for file in (train, test):  # they are elsewhere now
            file.unlink()
        self.sweep(recipe, axes, **kwargs)
        assert {len(of_run) for of_run in starts(recipe).values()} == {1}

    def test_the_order_of_flags_and_the_form_of_numbers_do_not_matter(self, recipe):
        self.sweep(recipe, {"learning_rate": ["1e-3"], "seed": ["0"]}, "--more", "1", "2", "--other=3")
        self.sweep(recipe, {"learning_rate": ["0.001"], "seed": ["0"]}, "--other", "3", "--more", "1", "2")
        assert len(starts(recipe)) == 1
        with pytest.raises(RecipeError, match=r"Then: --more 1 2; now: --more 2 1. Give the same"):
            self.sweep(recipe, {"learning_rate": ["1e-3"], "seed": ["0"]}, "--other", "3", "--more", "2", "1")

    def test_the_launched_process_keeps_the_lock(self, recipe):
        axes = {"learning_rate": ["1e-3"], "seed": ["0"]}
        sweep = threading.Thread(target=self.sweep, args=(recipe, axes))
        sweep.start()
        wait_for(lambda: starts(recipe))
        (run,) = make_runs(recipe.parent / "out", recipe, axes, [])
        assert lock(run.folder / "lock") is None
        sweep.join()
        with lock(run.folder / "lock"):
            assert lock(run.folder / "lock") is None

    def test_locks_as_nfs_has_them(self, tmp_path, monkeypatch):
        """flock(2): over NFS, the file of an exclusive lock must be open for writing."""
        flock = fcntl.flock

        def over_nfs(descriptor, operation):
            mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            if operation & fcntl.LOCK_EX and mode == os.O_RDONLY:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", over_nfs)
        for _ in range(2):
            with lock(tmp_path / "run" / "lock"):
                pass


class TestStudy:
    """What Optuna knows of a sweep, and what it decides."""

    def sweep(self, recipe, axes, *flags, **kwargs):
        return TestExecution().sweep(recipe, axes, *flags, **kwargs)

    def study(self, recipe, storage=None, name="toy: toy/run"):
        """As anyone loads it who has Optuna alone."""
        journal = str(recipe.parent / "out" / "optuna.journal")
        return optuna.load_study(study_name=name, storage=storage or JournalStorage(JournalFileBackend(journal)))

    @pytest.mark.parametrize("database", [False, True])
    def test_scores_are_values_and_flags_are_parameters(self, recipe, database):
        storage = f"sqlite:///{recipe.parent}/study.db" if database else None
        axes = {"method": ["houlsby"], "learning_rate": ["1e-3", "2e-3"], "seed": ["0", "1"]}
        assert self.sweep(recipe, axes, storage=storage) == {}
        study = self.study(recipe, storage, "toy: toy/method=houlsby")
        assert {(t.params["learning_rate"], t.params["seed"]): t.value for t in study.trials} == pytest.approx(
            {(rate, seed): 0.9 - abs(rate - 0.002) + 0.01 * seed for rate in (1e-3, 2e-3) for seed in (0, 1)}
        )
        assert study.best_trial.params == {"method": "houlsby", "learning_rate": 2e-3, "seed": 1}
        assert study.best_trial.user_attrs["point"]["learning_rate"] == "2e-3"
        assert (recipe.parent / "out" / "optuna.journal").exists() != database

    def test_runs_of_before_are_recorded_and_not_run_again(self, recipe):
        axes = {"learning_rate": ["1e-3"], "seed": ["0"]}
        self.sweep(recipe, axes)
        (recipe.parent / "out" / "optuna.journal").unlink()
        self.sweep(recipe, {**axes, "seed": ["0", "1"]})
        assert list(starts(recipe).values()) == [[0], [0]]
        assert {trial.params["seed"]: trial.value for trial in self.study(recipe).trials} == {0: 0.899, 1: 0.909}

    def test_more_values_are_of_the_same_study(self, recipe):
        for rates in (["2e-3"], ["1e-3", "4e-3"]):
            self.sweep(recipe, {"learning_rate": rates, "seed": ["0"]})
        assert len(self.study(recipe).trials) == 3

    @pytest.mark.parametrize(
        ("name", "flags", "direction"), [("toy", [], "MAXIMIZE"), ("toy", ["--metric_for_best_model=eval_loss"],
        "MINIMIZE"), ("mlm", [], "MINIMIZE"), ("toy", ["--metric_for_best_model", "loss"], "MINIMIZE"),
        ("toy", ["--data_dir", "gloss"], "MAXIMIZE")],
    )  # fmt: skip
    def test_a_loss_is_minimized(self, recipe, name, flags, direction):
        script = recipe.rename(recipe.with_name(f"{name}.py"))
        script.write_text("raise SystemExit(1)")
        self.sweep(script, {"learning_rate": ["1e-3"], "seed": ["0"]}, *flags)
        assert self.study(recipe, name=f"{name}: {name}/run").direction.name == direction

    def test_tpe_samples_a_range_and_the_other_seeds_run_at_its_best_point(self, recipe):
        axes = {"r": ["8"], "learning_rate": ["1e-4:1e-2"], "seed": ["0", "1"]}
        options = {"search_seeds": 1, "n_trials": 4, "slots": [{}, {}]}
        assert self.sweep(recipe, axes, **options) == {}
        trials = self.study(recipe, name="toy: toy/r=8").trials
        rates = [trial.params["learning_rate"] for trial in trials if trial.params["seed"] == 0]
        assert len(set(rates)) == 4
        assert all(1e-4 <= rate <= 1e-2 for rate in rates)
        best = min(rates, key=lambda rate: abs(rate - 0.002))
        assert [t.params["learning_rate"] for t in trials if t.params["seed"] == 1] == [best]
        assert sorted(starts(recipe)) == sorted(
            f"r=8,learning_rate={rate!r},seed={seed}" for rate, seed in [*((r, 0) for r in rates), (best, 1)]
        )
        self.sweep(recipe, axes, **{**options, "n_trials": 5})
        assert len(starts(recipe)) in (6, 7), "one more point is sampled, which may be the best"

    def test_the_median_pruner(self, recipe, monkeypatch):
        """Six runs report after each of three epochs; the sixth is worse than the others and never ends by itself."""
        monkeypatch.setattr("sweeping.search.SECONDS_TO_LOOK", 0.1)
        recipe.write_text(PRUNABLE)
        axes = {"learning_rate": ["1", "2", "3", "4", "5", "0.1"], "seed": ["0"]}
        assert self.sweep(recipe, axes, prune=True) == {}
        *others, last = self.study(recipe).trials
        assert {trial.state.name for trial in others} == {"COMPLETE"}
        assert last.state.name == "PRUNED"
        assert set(last.intermediate_values) == {1}
        assert len(results(recipe)) == 5
        self.sweep(recipe, axes, prune=True)
        assert len(self.study(recipe).trials) == 6, "what was pruned is run again"

    def test_the_other_seeds_are_not_pruned(self, recipe, monkeypatch):
        """However poorly they score: a mean without them would be too good."""
        monkeypatch.setattr("sweeping.search.SECONDS_TO_LOOK", 0.1)
        recipe.write_text(PRUNABLE)
        axes = {"learning_rate": ["2", "3", "4", "5", "6"], "seed": ["0", "1", "5"]}
        assert self.sweep(recipe, axes, search_seeds=1, prune=True) == {}
        trials = self.study(recipe).trials
        assert {trial.state.name for trial in trials} == {"COMPLETE"}
        assert [trial.value for trial in trials if trial.params["learning_rate"] == 6] == [6, 5, 1]

    def test_a_damaged_journal(self, recipe):
        (recipe.parent / "out").mkdir()
        (recipe.parent / "out" / "optuna.journal").write_text("{}\n{\n{}\n")
        with pytest.raises(RecipeError, match=r"Optuna cannot open .*optuna.journal: .* Delete it; finished"):
            self.sweep(recipe, {"learning_rate": ["1e-3"], "seed": ["0"]})

    def test_a_wrong_address(self, recipe):
        with pytest.raises(RecipeError, match=r"Optuna cannot open nowhere://: .* Check its address"):
            self.sweep(recipe, {"learning_rate": ["1e-3"], "seed": ["0"]}, storage="nowhere://")


PRUNABLE = """
import json, sys, time
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder, score = Path(flags["--output_dir"]), float(flags["--learning_rate"]) - int(flags["--seed"])
for epoch in (1, 2, 3):
    (folder / f"checkpoint-{epoch}").mkdir(exist_ok=True)
    (folder / f"checkpoint-{epoch}" / "trainer_state.json").write_text(
        json.dumps({"epoch": float(epoch), "best_metric": score}))
    while score < 1:
        time.sleep(0.1)
    time.sleep(0.3)
(folder / "results.json").write_text(json.dumps({"chosen_by": "accuracy", "best_score": score, "seconds": 1}))
"""


class TestPlaces:
    """Of GPUs that there may not be."""

    @pytest.fixture
    def four(self, monkeypatch):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    @pytest.mark.parametrize(
        ("jobs", "processes", "places"),
        [
            (None, None, ["0", "1", "2", "3"]),
            (2, None, ["0", "1"]),
            (6, None, ["0", "1", "2", "3", "0", "1"]),
            (None, 2, ["0,1", "2,3"]),
            (None, 3, ["0,1,2"]),
            (None, 4, ["0,1,2,3"]),
        ],
    )
    @pytest.mark.usefixtures("four")
    def test_with_gpus(self, tmp_path, jobs, processes, places):
        config = tmp_path / "config.yaml"
        config.write_text(f"num_processes: {processes}\n")
        slots = find_slots(jobs, str(config) if processes else None)
        assert slots == [{"CUDA_VISIBLE_DEVICES": place} for place in places]

    @pytest.mark.usefixtures("four")
    def test_only_the_visible_ones(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8a,3")
        assert find_slots(None) == [{"CUDA_VISIBLE_DEVICES": "GPU-8a"}, {"CUDA_VISIBLE_DEVICES": "3"}]

    @pytest.mark.parametrize(
        ("jobs", "given", "threads"), [(None, None, ["8"]), (2, None, ["4", "4"]), (2, "3", ["3", "3"])]
    )
    def test_without_a_gpu_the_cores_are_shared(self, monkeypatch, jobs, given, threads):
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setattr("os.cpu_count", lambda: 8)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        config = str(ROOT / "recipes" / "accelerate" / "ddp.yaml")
        assert [slot["OMP_NUM_THREADS"] for slot in find_slots(jobs, config)] == threads

    @pytest.mark.parametrize(
        ("slot", "config"), [({"CUDA_VISIBLE_DEVICES": "0"}, "one_gpu"), ({"OMP_NUM_THREADS": "1"}, "cpu")]
    )
    def test_the_default_configuration(self, slot, config):
        assert launch_command(None, [slot])[-1] == str(ROOT / "recipes" / "accelerate" / f"{config}.yaml")

    @pytest.mark.parametrize(("name", "alone"), [("cpu", True), ("one_gpu", True), ("ddp", False), ("zero2", False)])
    def test_runs_of_several_processes_have_ports_of_their_own(self, name, alone):
        command = launch_command(str(ROOT / "recipes" / "accelerate" / f"{name}.yaml"), [{}])
        assert ("--main_process_port" not in command) == alone


DISTRIBUTED = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
SCORE = accelerator.gather(torch.tensor([accelerator.process_index + 1.0])).sum().item() / 10
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder = Path(flags["--output_dir"])
if accelerator.is_main_process:
    run = {"task": "toy", "method": "houlsby", "seed": int(flags["--seed"]), "chosen_by": "accuracy",
           "best_score": SCORE, "best_scores": {"accuracy": SCORE}, "trainable_parameters": 10,
           "total_parameters": 110, "seconds": 1, "arguments": {"r": 64, "output_dir": str(folder)}}
    (folder / "results.json").write_text(json.dumps(run))
accelerator.end_training()
"""


def test_two_runs_of_two_processes_at_once(tmp_path):
    """Each pair of processes has added up its ranks, 1 + 2, and not met the other pair."""
    (tmp_path / "toy.py").write_text("import json, sys\nfrom pathlib import Path\n" + DISTRIBUTED)
    config = (ROOT / "recipes" / "accelerate" / "ddp.yaml").read_text()
    (tmp_path / "two.yaml").write_text(config.replace("num_processes: 4", "num_processes: 2"))
    environment = {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    flags = ("--seed", 0, 1, "--jobs", 2, "--config_file", tmp_path / "two.yaml")
    finish(start(tmp_path / "toy.py", *flags, **environment))
    assert [json.loads(path.read_text())["best_score"] for path in results(tmp_path / "toy.py")] == [0.3, 0.3]


class TestAccidents:
    FLAGS = ("--learning_rate", "1e-3", "--seed", "0", "1", "2")

    def killed(self, recipe, with_its_runs):
        """Kills a sweep in its second run, and returns the first one's results and the second one's folder."""
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
        before = first.stat().st_mtime_ns
        output, _ = finish(start(recipe, *self.FLAGS, "--steps", 15))
        assert "0 1 2" in output, "the seeds in the table"
        assert first.stat().st_mtime_ns == before
        (once, (begun, gone_on), other) = starts(recipe).values()
        assert once == other == [0]
        assert begun == 0 < gone_on, "it starts anew"

    def test_the_run_of_a_sweep_killed_alone_is_waited_for(self, recipe):
        _, second = self.killed(recipe, with_its_runs=False)
        sweep = start(recipe, *self.FLAGS, "--steps", 15)
        wait_for(lambda: len(results(recipe)) == 2)  # the others; the second one is still held
        assert "finished: " in sweep.stdout.readline()
        assert sweep.stdout.readline() == "waiting for runs of other processes; runs left: 1\n"
        assert sweep.poll() is None
        (second / "hold").unlink()
        output, _ = finish(sweep)
        assert "0 1 2" in output
        assert "waiting" not in output, "it is said once"
        assert list(starts(recipe).values()) == [[0], [0], [0]]

    @pytest.mark.parametrize("database", [False, True])
    def test_one_of_two_processes_on_one_study_is_killed(self, recipe, database):
        """The other one resumes its run: each combination is done once, and none is missing."""
        storage = ("--storage", f"sqlite:///{recipe.parent}/study.db") if database else ()
        flags = ("--learning_rate", "1e-3", "2e-3", "--seed", 0, 1, "--steps", 8, *storage)
        sweeps = [start(recipe, *flags) for _ in range(2)]

        def running():
            """The folders of the first one's run that has begun."""
            children = psutil.Process(sweeps[0].pid).children(recursive=True)
            commands = [child.as_dict(["cmdline"])["cmdline"] or [] for child in children]
            folders = [Path(command[-3]) for command in commands if "--resume_from_checkpoint" in command]
            return [folder for folder in folders if (folder / "checkpoint").exists()]

        wait_for(running)
        killed = running()[0]
        (killed / "hold").touch()
        for process in [sweeps[0], *psutil.Process(sweeps[0].pid).children(recursive=True)]:
            process.kill()
        sweeps[0].communicate()
        assert not (killed / "results.json").exists(), "it was too fast to be killed"
        (killed / "hold").unlink()
        finish(sweeps[1])
        begun = starts(recipe)
        (first, resumed) = begun.pop(killed.name)
        assert first == 0 < resumed, "it starts anew"
        assert list(begun.values()) == [[0], [0], [0]]
        study = TestStudy().study(recipe, *storage[1:])
        done = [(trial.params["learning_rate"], trial.params["seed"]) for trial in study.get_trials(states=[COMPLETE])]
        assert sorted(done) == [(1e-3, 0), (1e-3, 1), (2e-3, 0), (2e-3, 1)]
        assert len(study.trials) == 5, "four, and the killed one"

    @pytest.mark.parametrize(
        ("number", "in_background"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)]
    )
    def test_an_interrupt_leaves_nothing_running(self, recipe, number, in_background):
        """Also under nohup, and in the background of a script, where hangups and Ctrl-C are ignored."""
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
        assert not any(process.is_running() and process.status() != "zombie" for process in processes)

    def test_a_failed_run_is_shown(self, recipe):
        output, errors = finish(start(recipe, *self.FLAGS, "--steps", 1, "--fail", 1, "--jobs", 2), code=1)
        assert "FAILED: toy/learning_rate=0.001,seed=1" in errors
        assert "a run that fails" in errors
        assert "0 2" in output, "the seeds in the table"

    def test_the_commands_of_a_sweep(self, recipe):
        output, _ = finish(start(recipe, *self.FLAGS, "--steps", 1, "--dry_run"))
        assert output.count("accelerate.commands.launch --quiet") == 3
        assert starts(recipe) == {}


def evaluations(folder):
    """How many there have been, in all processes of the run."""
    log = folder / "log.txt"
    return log.read_text().count("validation loss") if log.exists() else 0


def test_a_sweep_of_glue_that_is_killed(tmp_path):
    """The recipe itself: the killed run goes on from its checkpoint, the finished one is left as it is."""
    save_tiny_encoder(tmp_path / "tiny")
    (tmp_path / "data" / "cola").mkdir(parents=True)
    for split in ("train", "validation"):
        rows = minimal_pairs()[split].select(range(64)).to_pandas()[["sentence", "label"]]
        rows.to_csv(tmp_path / "data" / "cola" / f"{split}.csv", index=False)
    # Thirty epochs take long enough to be killed in.
    flags = ["--task", "cola", "--learning_rate", "1e-3", "--num_train_epochs", 1, 30, "--seed", 0]
    flags += ["--model_name", tmp_path / "tiny", "--data_dir", tmp_path / "data", "--disable_tqdm", "true"]
    recipe = ROOT / "recipes" / "glue.py"
    whole = command(recipe, *flags, "--output_dir", tmp_path / "out")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first, second = (
        tmp_path / "out" / "cola" / f"learning_rate=0.001,num_train_epochs={epochs},seed=0" for epochs in (1, 30)
    )
    with subprocess.Popen(whole, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as sweep:
        wait_for(lambda: evaluations(second) > 6, seconds=300)
        for process in [*psutil.Process(sweep.pid).children(recursive=True), sweep]:
            process.kill()
    assert not (second / "results.json").exists(), "it was too fast to be killed"
    before = (first / "results.json").stat().st_mtime_ns

    output = subprocess.run(whole, env=environment, check=True, capture_output=True, text=True).stdout
    assert (first / "results.json").stat().st_mtime_ns == before
    results = json.loads((second / "results.json").read_text())
    assert [entry["epoch"] for entry in results["epochs"]] == list(range(1, 31))
    assert evaluations(second) < 30 + 6, "it was trained anew"
    assert f"{100 * results['best_score']:.2f}" in output
