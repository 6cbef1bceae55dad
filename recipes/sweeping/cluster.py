"""Runs of a sweep as jobs of a cluster, by submitit."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.helpers import Checkpointable

from sweeping.processes import Outcome, count_processes, execute
from sweeping.runs import PlannedRun
from training.errors import RecipeError


def read_options(words: Sequence[str], cluster: str, jobs: int | None, config_file: str | None) -> dict[str, Any]:
    """Return submitit's parameters from words such as timeout_min=60, whose values are JSON or plain text.

    By default a job has one GPU per process of the configuration (none with "local") and at most a day.

    Args:
        words: The words of --cluster_options.
        cluster: "slurm" or "local".
        jobs: Maximum number of simultaneous jobs.
        config_file: accelerate launch's configuration; None: one process.

    Raises:
        RecipeError: If a word is not of the form NAME=VALUE.
    """
    gpus = count_processes(config_file) if config_file else 1
    options: dict[str, Any] = {
        "name": "sweep",
        "timeout_min": 24 * 60,
        "gpus_per_node": gpus if cluster == "slurm" else 0,
        **({"slurm_array_parallelism": jobs} if jobs else {}),
    }
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise RecipeError(f"--cluster_options must be of the form NAME=VALUE, got {word!r}.")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


class RunJob(Checkpointable):
    """A job that is queued again when its time is up or it is preempted, and then resumes."""

    def __call__(self, run: PlannedRun, launch: Sequence[str]) -> Outcome:
        return execute(run, launch)


class ClusterExecutor:
    """Executes each run as a job.

    Args:
        launch: The command, as in execute.
        folder: Folder for submitit's logs and scripts of the jobs.
        cluster: "slurm", or "local" to try the jobs on this machine, all at once.
        options: submitit's parameters: timeout_min, gpus_per_node, cpus_per_task, mem_gb, slurm_partition, ...

    Raises:
        RecipeError: If the cluster does not exist, or an option is unknown.
    """

    def __init__(self, launch: Sequence[str], folder: Path, cluster: str, options: dict[str, Any]) -> None:
        # A job unpickles RunJob, which it imports from this package; jobs inherit the environment of the submission.
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
        )
        self.launch = launch
        self.jobs: list[submitit.Job[Outcome]] = []
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self.executor.update_parameters(**options)
        except (AssertionError, NameError, RuntimeError, ValueError) as error:
            raise RecipeError(f"submitit refuses --cluster {cluster} with these options: {error}") from error

    def submit(self, runs: Sequence[PlannedRun]) -> list["submitit.Job[Outcome]"]:
        """Submit the runs, several of them as one array."""
        if not runs:
            return []
        with self.executor.batch():
            jobs = [self.executor.submit(RunJob(), run, self.launch) for run in runs]
        self.jobs += jobs
        return jobs

    def cancel(self) -> None:
        """Cancel the jobs that have not ended."""
        for job in self.jobs:
            if not job.done():
                job.cancel()
