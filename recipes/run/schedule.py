"""How long a run trains at most, when it stops, which weights it keeps, and for how long its
learning rate rises, where the command line leaves it open: counted in steps, as it is steps that an
adapter needs.

Ten epochs of a few hundred texts are a few dozen steps, after which an adapter has hardly begun to
learn. Mosbach et al. 2021 (arXiv 2006.04884) trace runs that fail to too few steps and a warm-up
that is too short. With the steps that slow learners need, others have long learned: they stop once
a quarter of the planned evaluations brings nothing.

Few validation examples choose an epoch by chance, often one at a high learning rate. Such a run
takes all of its steps, of which it needs fewer, and keeps the last weights.
"""

import copy
import math

from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from run.edge import log
from run.training_arguments import RecipeTrainingArguments


EPOCHS = 10
FEWEST_STEPS, FEWEST_STEPS_TO_LAST = 1_000, 300
FEW = 100  # validation examples, from fewer of which a score is uncertain
FEWEST_WARMUP_STEPS = 100
WARMUP = 0.1  # of all steps
MOST_EVALUATIONS = 20
PATIENCE = 1 / 4  # of the planned evaluations


def settle_schedule(
    training: RecipeTrainingArguments, rows: int, validation_rows: int
) -> RecipeTrainingArguments:
    """Return a copy for this many rows of training and validation data, with what the command line
    does not name of the epochs, the warm-up and the weights to keep, and say so.

    Args:
        training: The arguments; `num_train_epochs`, `warmup_steps` and `load_best_model_at_end` may
            be None.
        rows: Rows of training data; 0 if nothing is trained.
        validation_rows: Rows of validation data.
    """
    settled = copy.copy(training)
    is_open = training.num_train_epochs is None and training.max_steps <= 0
    keeps_last = False
    if training.load_best_model_at_end is None:
        has_no_patience = training.early_stopping_patience is None
        keeps_last = is_open and has_no_patience and validation_rows < FEW
        settled.load_best_model_at_end = not keeps_last
    rows_per_step: int = (
        training.world_size
        * training.per_device_train_batch_size
        * training.gradient_accumulation_steps
    )
    steps_per_epoch = max(1, math.ceil(rows / rows_per_step))
    steps = training.max_steps
    epochs = training.num_train_epochs
    if epochs is None:
        fewest_steps = FEWEST_STEPS_TO_LAST if keeps_last else FEWEST_STEPS
        epochs = max(EPOCHS, math.ceil(fewest_steps / steps_per_epoch))
        settled.num_train_epochs = epochs
        if is_open:
            _evaluate_less_often(settled, epochs, steps_per_epoch)
            _stop_in_time(settled, epochs, steps_per_epoch)
    if steps <= 0:
        steps = math.ceil(epochs * steps_per_epoch)
    if training.warmup_steps is None:
        settled.warmup_steps = warmup_of(steps)
    is_left_open = training.num_train_epochs is None or training.warmup_steps is None
    if rows and is_left_open and training.process_index == 0:
        message = _describe(settled, steps, steps / steps_per_epoch)
        if keeps_last:
            message += (
                f"; the last weights are kept, as {validation_rows:,} validation examples cannot "
                "tell the best epoch (--load_best_model_at_end)"
            )
        log(message)
    return settled


def _describe(settled: RecipeTrainingArguments, steps: int, epochs: float) -> str:
    """Return how long a run trains, and when it stops."""
    message = (
        f"{steps:,} steps, {epochs:g} epochs; the learning rate rises for "
        f"{settled.get_warmup_steps(steps):,} steps (--num_train_epochs, --warmup_steps)"
    )
    if settled.early_stopping_patience:
        message = (
            f"at most {message}; stops after {settled.early_stopping_patience} evaluations "
            f"without a better {settled.metric_for_best_model} (--early_stopping_patience)"
        )
    return message


def _stop_in_time(training: RecipeTrainingArguments, epochs: int, steps_per_epoch: int) -> None:
    """Set the patience of early stopping, which needs a kept best epoch, unless it is given."""
    if training.early_stopping_patience is not None or not training.load_best_model_at_end:
        return
    evaluations: float = epochs
    if training.eval_strategy == IntervalStrategy.STEPS:
        interval = training.eval_steps or training.logging_steps
        evaluations = epochs * steps_per_epoch / interval
    training.early_stopping_patience = max(1, int(PATIENCE * evaluations + 0.5))


def warmup_of(steps: int) -> int:
    """Return the steps of the warm-up: a tenth of all, at least 100, but at most half."""
    return min(max(FEWEST_WARMUP_STEPS, math.ceil(WARMUP * steps)), math.ceil(steps / 2))


def _evaluate_less_often(
    training: RecipeTrainingArguments, epochs: int, steps_per_epoch: int
) -> None:
    """Evaluate and save after several epochs instead of each, so that the evaluations of a small
    training set do not take longer than its training.
    """
    interval = math.ceil(epochs / MOST_EVALUATIONS)
    if interval == 1:
        return
    steps = interval * steps_per_epoch
    if training.eval_strategy == IntervalStrategy.EPOCH:
        training.eval_strategy, training.eval_steps = IntervalStrategy.STEPS, steps
    if training.save_strategy == SaveStrategy.EPOCH:
        training.save_strategy, training.save_steps = SaveStrategy.STEPS, steps
