"""What a training shows of itself: a line per evaluation, a bar or lines with the loss, the scores
of each epoch and the seconds until then.
"""

import sys
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as Arguments

from tasks.scores import format_scores


TRAIN_SECONDS = "train_seconds"
_SECONDS = 60  # from one line about the loss to the next, where there is no bar
_TIMES = ("runtime", "_per_second", "model_preparation_time")


def without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the scores among the Trainer's metrics: without the prefix "eval_", the epoch and the
    times.
    """
    scores = {}
    for name, value in metrics.items():
        if name != "epoch" and not name.endswith(_TIMES):
            scores[name.removeprefix("eval_")] = value
    return scores


def scores_per_epoch(log_history: Iterable[dict[str, float]]) -> list[dict[str, float]]:
    """Return an entry per evaluation: epoch, step, seconds of training, and the scores of all
    validation splits, without "eval_".
    """
    evaluations: dict[float, dict[str, float]] = {}
    for entry in log_history:
        scores = {name: value for name, value in entry.items() if name.startswith("eval_")}
        if scores:
            step = entry["step"]
            evaluations.setdefault(
                step, {"epoch": entry["epoch"], "step": step, "seconds": entry[TRAIN_SECONDS]}
            )
            evaluations[step] |= without_times(scores)
    return list(evaluations.values())


class Clock(TrainerCallback):
    """Adds up the time of all training steps, without that of evaluations and checkpoints."""

    seconds = 0.0

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.seconds = 0.0
        for entry in state.log_history:  # of a run that resumes
            self.seconds = entry.get(TRAIN_SECONDS, self.seconds)

    def on_step_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._start = time.perf_counter()

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.seconds += time.perf_counter() - self._start


class Bar(ProgressCallback):
    """The Trainer's bar, with the loss beside it in place of lines."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix_str(format_scores({"loss": logs["loss"]}))


class Lines(TrainerCallback):
    """A line per evaluation, after the first one the time that is left at most and, where there is
    no bar, a line with the loss every minute.
    """

    def on_train_begin(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin with the steps that an interrupted run has taken."""
        self._evaluated, self._last_line = state.global_step, time.monotonic()
        self._first_step, self._begin = state.global_step, time.monotonic()
        self._has_estimated = False

    def on_epoch_end(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the Trainer log the loss of an epoch that has fewer steps than --logging_steps."""
        control.should_log = control.should_log or args.logging_strategy != "no"

    def on_log(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if "loss" not in kwargs["logs"] or not args.disable_tqdm or not state.is_world_process_zero:
            return
        if time.monotonic() - self._last_line > _SECONDS:
            loss, self._last_line = kwargs["logs"]["loss"], time.monotonic()
            print(f"step {state.global_step:,} of {state.max_steps:,}: loss {loss:.3f}", flush=True)

    def on_evaluate(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Print the loss since the previous evaluation, and the scores of this one, in training."""
        if not state.is_world_process_zero or not state.global_step:
            return
        moment = f"step {state.global_step:,} of {state.max_steps:,}"
        if state.epoch is not None and float(state.epoch).is_integer():
            moment = f"epoch {state.epoch:.0f} of {state.num_train_epochs}"
        shown, total, step = {}, 0.0, self._evaluated
        for entry in state.log_history:
            if "loss" in entry and entry["step"] > step:
                # Each logged loss is a mean over the steps since the one before.
                total += entry["loss"] * (entry["step"] - step)
                step = int(entry["step"])
        if step > self._evaluated:
            shown["loss"] = total / (step - self._evaluated)
            self._evaluated = step
        for name, score in without_times(kwargs["metrics"]).items():
            if name == "loss":
                name = "validation loss"
            shown[name] = score
        tqdm.write(f"{moment}: {format_scores(shown)}", file=sys.stdout)
        steps_left = state.max_steps - state.global_step
        if not self._has_estimated and steps_left:
            self._has_estimated = True
            seconds = time.monotonic() - self._begin
            seconds_left = steps_left * seconds / (state.global_step - self._first_step)
            duration = timedelta(seconds=round(seconds_left))
            tqdm.write(f"at most {steps_left:,} steps and {duration} left", file=sys.stdout)
        sys.stdout.flush()
        self._last_line = time.monotonic()
