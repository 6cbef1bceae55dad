"""A run of a sweep as a job of a cluster, by submitit."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import submitit
from common.errors import RecipeError
from submitit.helpers import Checkpointable
from sweep_processes import Outcome, count_processes, execute
from sweep_runs import Run


def read_options(words: Sequence[str], cluster: str, jobs: int | None, config_file: str | None) -> dict[str, Any]:
    """submitit's parameters from words like timeout_min=60, whose values are JSON or plain text.

    By default a job has a GPU for each process of the configuration, or none on this machine, and a day at most.

    Args:
        words: Of --cluster_options.
        cluster: "slurm" or "local".
        jobs: How many at once.
        config_file: Of accelerate launch; None: one process.

    Raises:
        RecipeError: If a word is no NAME=VALUE.
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
    """A job that is put back into the queue before its time is over, or when others go first, and then goes on."""

    def __call__(self, run: Run, launch: Sequence[str]) -> Outcome:
        return execute(run, launch)


class ClusterExecutor:
    """One job per run.

    Args:
        launch: As in execute.
        folder: For submitit's files: the jobs' logs and scripts.
        cluster: "slurm", or "local" to try the jobs out on this machine, all at once.
        options: submitit's parameters: timeout_min, gpus_per_node, cpus_per_task, mem_gb, slurm_partition, ...

    Raises:
        RecipeError: If there is no such cluster, or an option is unknown.
    """

    def __init__(self, launch: Sequence[str], folder: Path, cluster: str, options: dict[str, Any]) -> None:
        # A job unpickles RunJob, which is in this folder; both kinds of job have the environment of the submission.
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        )
        self.launch = launch
        self.jobs: list[submitit.Job[Outcome]] = []
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            self.executor.update_parameters(**options)
        except (AssertionError, NameError, RuntimeError, ValueError) as error:
            raise RecipeError(f"submitit refuses --cluster {cluster} with these options: {error}") from error

    def submit(self, runs: Sequence[Run]) -> list["submitit.Job[Outcome]"]:
        """Submits the runs, several of them as one array."""
        if not runs:
            return []
        with self.executor.batch():
            jobs = [self.executor.submit(RunJob(), run, self.launch) for run in runs]
        self.jobs += jobs
        return jobs

    def cancel(self) -> None:
        """Cancels the jobs that have not ended."""
        for job in self.jobs:
            if not job.done():
                job.cancel()
