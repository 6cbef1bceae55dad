"""How long a run trains where the command line leaves it open, by arithmetic of its own."""

import pytest

from run.schedule import FEW, settle_schedule
from run.training_arguments import RecipeTrainingArguments


@pytest.fixture
def arguments(tmp_path):
    return lambda **given: RecipeTrainingArguments(output_dir=tmp_path, use_cpu=True, **given)


@pytest.mark.parametrize(
    ("rows", "given", "epochs", "warmup"),
    [
        # More than 100 steps per epoch: ten epochs, and a tenth of their steps.
        (8_551, {}, 10, 268),
        (3_668, {}, 10, 115),
        # 78, 4 and one step per epoch: the epochs after which there are 1,000 steps.
        (2_490, {}, 13, 102),
        (100, {}, 250, 100),
        (5, {}, 1_000, 100),
        # As many rows on two accumulated batches of 16.
        (2_490, {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}, 13, 102),
        # What the command line names stays; 234 and 150 steps are then few.
        (2_490, {"num_train_epochs": 3}, 3, 100),
        (2_490, {"max_steps": 150}, 13, 75),
        (2_490, {"warmup_steps": 0.1}, 13, 0.1),
        (2_490, {"warmup_steps": 0}, 13, 0),
        (2_490, {"num_train_epochs": 0.5, "warmup_steps": 7}, 0.5, 7),
    ],
)
def test_small_training_sets_get_enough_steps(arguments, rows, given, epochs, warmup):
    settled = settle_schedule(arguments(**given), rows, FEW)
    assert (settled.num_train_epochs, settled.warmup_steps) == (epochs, warmup)


@pytest.mark.parametrize(
    ("rows", "given", "strategy", "steps"),
    [
        (3_668, {}, "epoch", None),
        (2_490, {}, "epoch", None),
        (100, {}, "steps", 13 * 4),  # 13 of 250 epochs
        (100, {"num_train_epochs": 250}, "epoch", None),
        (100, {"max_steps": 12}, "epoch", None),
        (100, {"eval_strategy": "steps", "eval_steps": 8, "save_steps": 8}, "steps", 8),
    ],
)
def test_many_short_epochs_are_evaluated_twenty_times(arguments, rows, given, strategy, steps):
    given.setdefault("save_strategy", given.get("eval_strategy", "epoch"))
    settled = settle_schedule(arguments(**given), rows, FEW)
    assert (settled.eval_strategy, settled.eval_steps) == (strategy, steps)
    assert (settled.save_strategy, steps and settled.save_steps) == (strategy, steps)


@pytest.mark.parametrize(
    ("rows", "given", "patience"),
    [
        (3_668, {}, 3),  # of 10 evaluations
        (100, {}, 5),  # of 250 / 13
        (240, {}, 4),  # of 125 / 7
        (100, {"eval_strategy": "steps", "eval_steps": 8, "save_steps": 8}, 31),  # of 125
        (100, {"early_stopping_patience": 2}, 2),
        (100, {"early_stopping_patience": 0}, 0),  # never
        (100, {"num_train_epochs": 250}, None),
        (100, {"max_steps": 12}, None),
        (100, {"do_train": True}, None),  # nothing is evaluated
    ],
)
def test_a_quarter_of_the_evaluations_without_a_better_one_ends_a_run(
    arguments, rows, given, patience
):
    given.setdefault("save_strategy", given.get("eval_strategy", "epoch"))
    assert settle_schedule(arguments(**given), rows, FEW).early_stopping_patience == patience


@pytest.mark.parametrize(
    ("rows", "validation_rows", "given", "keeps_best", "epochs", "patience"),
    [
        (80, 20, {}, False, 100, None),  # 300 steps
        (5_000, 99, {}, False, 10, None),
        (400, 100, {}, True, 77, 5),  # 1,001 steps
        # What the command line names stays.
        (80, 20, {"load_best_model_at_end": True}, True, 334, 5),
        (80, 20, {"early_stopping_patience": 3}, True, 334, 3),
        (80, 20, {"num_train_epochs": 10}, True, 10, None),
        (80, 20, {"max_steps": 30}, True, 334, None),
        (400, 100, {"load_best_model_at_end": False}, False, 77, None),
    ],
)
def test_few_validation_examples_choose_no_epoch(
    arguments, rows, validation_rows, given, keeps_best, epochs, patience
):
    settled = settle_schedule(arguments(save_strategy="epoch", **given), rows, validation_rows)
    assert settled.load_best_model_at_end is keeps_best
    assert settled.num_train_epochs == epochs
    assert settled.early_stopping_patience == patience
