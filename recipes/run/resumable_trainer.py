"""A Trainer that can be killed at any moment, and resumes as if it had not been."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.data import Dataset, Sampler
from transformers import EarlyStoppingCallback, Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from run.checkpoints import seal, step_of
from run.edge import RecipeError, log
from run.training_arguments import RecipeTrainingArguments


CLEAR_GAIN = 0.01  # in the loss


class Patience(EarlyStoppingCallback):
    """Ends the training after some evaluations in a row without a better one.

    ResumableTrainer counts them, by the rule that chooses the weights to keep.
    """

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Leave the comparison to the trainer, whose rule is not the one of transformers."""


class ResumableTrainer(Trainer):
    """A Trainer with these changes.

    - Batches of texts of similar length come in random order, which depends on seed and epoch only.
    - A complete checkpoint can be told from an incomplete one, and resuming gives the same weights
      as no interruption.
    - It is known which step's weights the model ends with. Of equal scores, the one with the lower
      loss is better. The same rule ends the training early.
    """

    args: RecipeTrainingArguments
    # Whose weights the model has after training; None: those of the last step.
    best_step: int | None = None

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int] | None:
        sampler = super()._get_train_sampler(train_dataset)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        sampler.batch_size *= self.args.world_size  # the same order on another number of devices
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return OrderOfEpoch(sampler, lambda: seed + int(self.state.epoch or 0))

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Return the epochs and steps that are over, as Trainer._init_training_state does.

        The Trainer would take another step after the last one if that was not the end of an epoch,
        or if early stopping has ended the run. It also forgets the best checkpoint if the folder
        has been moved.
        """
        trained = super()._init_training_state(
            max_steps, steps_per_epoch, epochs, checkpoint, trial
        )
        if checkpoint is None:
            return trained
        if self.state.best_global_step:
            self._find_best_checkpoint()
        is_over = self.state.global_step >= max_steps
        patience = self._patience
        if patience is not None:
            # The command's, not the checkpoint's.
            patience.early_stopping_patience = self.args.early_stopping_patience or 0
            is_over |= patience.early_stopping_patience_counter >= patience.early_stopping_patience
        if is_over:
            return epochs, 0
        return trained

    @property
    def _patience(self) -> Patience | None:
        """What ends the training early; None without it."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Patience):
                return callback
        return None

    def _find_best_checkpoint(self) -> None:
        """Find the checkpoint of the best epoch so far, or forget its score if it is gone."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        checkpoint = Path(self.args.output_dir, name)
        if checkpoint.is_dir():
            self.state.best_model_checkpoint = str(checkpoint)
            return
        log(f"note: {checkpoint}, the best so far, is gone: the best of the later ones is kept")
        self.state.best_model_checkpoint = self.state.best_metric = None
        self.state.best_global_step = None

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial))
        checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            # An incomplete one of an earlier attempt, whose files must not be taken for those of
            # this one.
            shutil.rmtree(checkpoint, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            with saving(checkpoint):
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        # Only now are older checkpoints deleted, so that a crash at any moment leaves a complete
        # one.
        if self.args.should_save:
            if not self.args.save_only_model:
                with saving(checkpoint):
                    seal(checkpoint)
            rotate_checkpoints(str(folder), limit, self.state.best_model_checkpoint)

    def _load_best_model(self) -> None:
        self.best_step = step_of(Path(str(self.state.best_model_checkpoint)))
        super()._load_best_model()

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Return whether an evaluation is the best so far, of equal scores by the loss; end the
        training after too many that are not.

        A loss that falls by less than CLEAR_GAIN does not keep it going: where all answers are
        right, it falls for ever.
        """
        best = self.state.best_metric
        is_best = super()._determine_best_metric(metrics, trial)
        name = f"eval_{self.args.metric_for_best_model.removeprefix('eval_')}"
        is_clear = is_best
        if not is_best and metrics[name] == best:
            gain = self._gain_in_loss(metrics)
            is_best, is_clear = gain > 0, gain > CLEAR_GAIN
            if is_best:
                self.state.best_global_step = self.state.global_step
        patience = self._patience
        if patience is not None:
            count = 0 if is_clear else patience.early_stopping_patience_counter + 1
            patience.early_stopping_patience_counter = count
            self.control.should_training_stop |= count >= patience.early_stopping_patience
        return is_best

    def _gain_in_loss(self, metrics: dict[str, float]) -> float:
        """Return by how much the loss of an evaluation is below the one of the best so far; SQuAD
        has none.
        """
        for entry in self.state.log_history:
            if entry["step"] == self.state.best_global_step:
                for name in metrics:
                    if name.endswith("loss") and name in entry:
                        return entry[name] - metrics[name]
        return 0.0


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """End the run with one line if its weights cannot be written, as on a full disk."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise RecipeError(
            f"{path} cannot be saved: {error}. The same command resumes from the checkpoint before."
        ) from error


class OrderOfEpoch(Sampler[int]):
    """Length grouping with the batches in random order.

    The grouping itself goes from long texts to short ones, over and over, 50 batches at a time. The
    batch with the longest text stays first, so that a lack of memory shows at once. The order
    depends only on seed and epoch, so that a run that resumes in the middle of an epoch sees
    exactly the remaining examples.
    """

    def __init__(self, sampler: LengthGroupedSampler, seed: Callable[[], int]) -> None:
        self._sampler, self._seed = sampler, seed

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed())
        self._sampler.generator = generator
        first, *batches = torch.tensor(list(self._sampler)).split(self._sampler.batch_size)
        whole, last = batches[:-1], batches[-1:]
        order = torch.randperm(len(whole), generator=generator).tolist()
        yield from torch.cat([first, *(whole[number] for number in order), *last]).tolist()
