"""The progress of a run: on a terminal one bar with loss and score, and everywhere one line per evaluation."""

import sys
import time
from typing import Any

from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as Arguments
from transformers.trainer_utils import IntervalStrategy

from training.scores import format_scores, without_times


_SECONDS = 60  # from one line about the loss to the next, where there is no bar


class Progress(TrainerCallback):
    """Show the progress of a training, and log its loss at the end of each epoch as well."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._evaluation: tqdm[Any] | None = None
        self._shown: dict[str, float] = {}
        self._last_line = 0.0

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begin with the steps that an interrupted run has taken."""
        self._shown, self._last_line = {}, time.monotonic()
        if state.is_world_process_zero:
            self._bar = _make_bar(args, state.max_steps, "training", initial=state.global_step)

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_epoch_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Let the Trainer log the loss of an epoch that has fewer steps than --logging_steps."""
        if args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    def on_log(
        self,
        args: Arguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the loss, and once a minute print it where there is no bar."""
        if self._bar is None or not logs or "loss" not in logs:
            return
        self._show(loss=logs["loss"])
        waited = time.monotonic() - self._last_line > _SECONDS
        if self._bar.disable and waited and not control.should_evaluate:  # which prints a line with the loss
            self._print(f"{_moment(state)}: loss {logs['loss']:.3f}")

    def on_prediction_step(
        self,
        args: Arguments,
        state: TrainerState,
        control: TrainerControl,
        eval_dataloader: DataLoader[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Advance the bar of an evaluation, which disappears at its end."""
        if state.is_world_process_zero:
            if self._evaluation is None:
                self._evaluation = _make_bar(args, len(eval_dataloader), "evaluating", leave=False)
            self._evaluation.update()

    def on_evaluate(
        self,
        args: Arguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **kwargs: Any,
    ) -> None:
        """Print the scores of an evaluation during the training."""
        self.on_predict(args, state, control)
        if state.is_world_process_zero and state.global_step:
            scores = without_times(metrics)
            chosen = (args.metric_for_best_model or "").removeprefix("eval_")
            line = f"{_moment(state)}: " + (f"loss {self._shown['loss']:.3f}, " if "loss" in self._shown else "")
            self._show(**({chosen: scores[chosen]} if chosen in scores and chosen != "loss" else {}))
            named = {"validation loss" if name == "loss" else name: score for name, score in scores.items()}
            self._print(f"{line}{format_scores(named)}")

    def on_predict(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the bar of an evaluation."""
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    def on_train_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the full bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show(self, **scores: float) -> None:
        self._shown |= scores
        if self._bar is not None:
            self._bar.set_postfix_str(format_scores(self._shown))

    def _print(self, line: str) -> None:
        self._last_line = time.monotonic()
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


def _make_bar(args: Arguments, total: int, name: str, **options: Any) -> "tqdm[Any]":
    # None: only on a terminal.
    return tqdm(total=total, desc=name, dynamic_ncols=True, disable=True if args.disable_tqdm else None, **options)


def _moment(state: TrainerState) -> str:
    if state.epoch is not None and float(state.epoch).is_integer():
        return f"epoch {state.epoch:.0f} of {state.num_train_epochs}"
    return f"step {state.global_step:,} of {state.max_steps:,}"
