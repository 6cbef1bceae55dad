"""transformers' Trainer as the recipes need it."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import DistributedType
from numpy.typing import NDArray
from peft import PeftModel
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
)
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import (
    PredictionOutput,
    TrainOutput,
)

from houlsby_peft import AdapterDrop, AdapterRecord, GraphedStep, StateCache
from run.edge import RecipeError, end_if_terminated, log
from run.model import active_record
from run.progress import TRAIN_SECONDS, Bar, Clock, Lines, scores_per_epoch
from run.resumable_trainer import Patience, ResumableTrainer, saving
from run.run import MOMENT, SAVED, flags_of


# With CUDA graphs, the tokens of a batch are a multiple of it, so that there are few shapes.
_PADDED_TO = 32


def peak_memory() -> int:
    """Return the bytes that the GPU, or else this process, has used at most."""
    of_gpu = torch.cuda.max_memory_allocated()
    if of_gpu:
        return of_gpu
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used  # macOS counts in bytes


@dataclass(frozen=True)
class Described:
    """What a model predicts for a split: the split's name, its examples, and the predictions."""

    split: str
    data: Any
    scores: Any

    @property
    def per_class(self) -> dict[str, Any]:
        """The scores of each class, and the split that they are of."""
        return {"split": self.split, "scores": self.scores.by_class()}


class RecipeTrainer(ResumableTrainer):
    """A ResumableTrainer with these changes.

    - The loss is the model's own, not multiplied by the number of processes and accumulated steps.
    - A loss that becomes NaN or infinite stops the run.
    - Predictions are in the order of the rows, and the loss of a split is the mean over its rows.
    - A step may be one CUDA graph, and a ladder's encoder may read kept states.
    - There are scores of the step whose weights the model ends with.
    - It prints a line per evaluation. The time of the training steps until then is in the log and,
      so that a run that resumes goes on counting, in each checkpoint.
    - No file with the arguments, among them a token for the Hub, is saved beside the weights.

    `describe` makes what the report of the end shows, out of the outputs and the labels of a split.
    """

    model: Any
    processing_class: PreTrainedTokenizerBase

    def __init__(
        self,
        *args: Any,
        describe: Callable[[NDArray[np.float32], NDArray[Any]], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        # In a notebook, the Trainer shows a table of its own.
        has_bar = self.pop_callback(ProgressCallback) is not None
        if has_bar:
            self.add_callback(Bar())
        if has_bar or self.pop_callback(PrinterCallback):
            self.add_callback(Lines())
        self._describe = describe
        self._of_test: tuple[Dataset[Any], PredictionOutput] | None = None
        self._of_validation: tuple[str, Dataset[Any], PredictionOutput] | None = None
        # A subfolder of the output folder.
        self.saved_as = "adapter" if isinstance(self.model, PeftModel) else "model"
        # Counted before anything is sharded.
        self.trainable, self.total = PeftModel.get_nb_trainable_parameters(self.model)
        # BertForSequenceClassification takes **kwargs, so the Trainer expects it to divide its loss
        # by the number of items in the batch. It does not, so the loss would be multiplied by the
        # processes and accumulated steps.
        self.model_accepts_loss_kwargs = False
        self._graphed_step: GraphedStep | None = None
        self._cache: StateCache | None = None
        if self.args.cuda_graphs:
            cast(Any, self.data_collator).pad_to_multiple_of = _PADDED_TO
        self._clock = Clock()
        self.add_callback(self._clock)
        if self.args.early_stopping_patience:
            self.add_callback(Patience(self.args.early_stopping_patience))
        if self.args.adapter_drop:
            self.add_callback(AdapterDrop())

    def train(  # type: ignore[override]
        self, resume_from_checkpoint: str | None = None, **kwargs: Any
    ) -> TrainOutput:
        """Print the number of trained parameters, train as Trainer.train does, and score the last
        step if it has the kept weights and was not evaluated.
        """
        share = self.trainable / self.total
        log(f"trainable parameters: {self.trainable:,} of {self.total:,} ({share:.2%})")
        end_if_terminated()
        used, gpus = self.args.world_size, torch.cuda.device_count()
        is_on_gpu = self.args.device.type == "cuda"
        if is_on_gpu and used < gpus:
            log(f"{used} of {gpus} GPUs in use; for others, see docs/distributed.md")
        if is_on_gpu and used == 1 and not self.args.cuda_graphs:
            log("short texts may train several times as fast with --cuda_graphs true")
        output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        step, steps = self.state.global_step, self.state.max_steps
        if self.args.early_stopping_patience and step < steps:
            log(
                f"stopped at step {step:,} of {steps:,}, after {self.args.early_stopping_patience} "
                f"evaluations without a better {self.args.metric_for_best_model}"
            )
        if self.args.eval_strategy != "no" and not self.kept:
            self.evaluate()
        if self._cache is not None:
            self._cache.keeps_new = False  # those of test splits, which are read once
        return output

    def cache_states(self, folder: str) -> None:
        """Let the encoder, beside which a ladder is trained, read each text once, and say how much
        is kept.
        """
        cache = self._cache = StateCache(self.model, folder)
        splits: list[Any] = [self.train_dataset]
        validation: Any = self.eval_dataset
        splits += validation.values() if isinstance(validation, dict) else [validation]
        tokens = 0
        for split in splits:
            if split is not None:
                tokens += sum(map(len, split["input_ids"]))
        size, free = tokens * cache.bytes_per_token, shutil.disk_usage(folder).free
        kept = f"{folder}: the encoder's states of {tokens:,} tokens, at most {size / 1e9:.2f} GB"
        if size > free / 2:
            cache.keeps_new = False
            kept += f", are not kept: the disk has {free / 1e9:.2f} GB left"
        log(kept)

    @property
    def kept(self) -> dict[str, float]:
        """The evaluation of the weights that the model has after training, as in scores_per_epoch,
        or {} without one.
        """
        step = self.best_step
        if step is None:
            step = self.state.global_step
        for evaluation in scores_per_epoch(self.state.log_history):
            if evaluation["step"] == step:
                return evaluation
        return {}

    @property
    def strategy(self) -> dict[str, str | int]:
        """How the run is really distributed; some launches silently do something else than
        requested.
        """
        accelerator = self.accelerator
        if accelerator.distributed_type is DistributedType.DEEPSPEED:
            kind = f"ZeRO-{accelerator.deepspeed_plugin.zero_stage}"
        elif accelerator.distributed_type is DistributedType.FSDP:
            kind = f"FSDP{accelerator.state.fsdp_plugin.fsdp_version}"
        elif accelerator.distributed_type is DistributedType.NO:
            kind = "none"
        else:
            kind = "DDP"
        return {
            "type": kind,
            "processes": accelerator.num_processes,
            "mixed_precision": accelerator.mixed_precision,
        }

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        end_if_terminated()
        if self.args.cuda_graphs:
            loss = self._run_graph(model, inputs)
        else:
            loss = super().training_step(model, inputs, *args, **kwargs)
        if not torch.isfinite(loss):
            raise RecipeError(
                f"The loss is {loss.item()} at step {self.state.global_step + 1}, with the "
                f"learning rate {self._get_learning_rate():.3g} of at most "
                f"{self.args.learning_rate:g}: the training has diverged. Lower --learning_rate."
            )
        return loss

    def _run_graph(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Do what Trainer.training_step does, with both passes as one CUDA graph."""
        if self._graphed_step is None:
            self._graphed_step = GraphedStep(partial(self._run_passes, model), model.parameters())
        model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()  # a schedule-free one has other weights for evaluations
        return self._graphed_step(self._prepare_inputs(inputs))

    def _run_passes(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Run the forward and the backward pass, and return the loss."""
        with self.compute_loss_context_manager():
            loss = cast(torch.Tensor, self.compute_loss(model, inputs))
        self.accelerator.backward(loss)
        return loss.detach()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer.log does; with the scores of an evaluation, also the time of the training
        until then.
        """
        if any(name.startswith("eval_") for name in logs):
            logs = {**logs, TRAIN_SECONDS: round(self._clock.seconds, 3)}
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        moment = {"step": self.state.global_step, TRAIN_SECONDS: self._clock.seconds}
        self.state.log_history.append(moment)  # which the checkpoint holds
        super()._save_checkpoint(model, trial)

    def predict(
        self, test_dataset: Dataset[Any], *args: Any, metric_key_prefix: str = "test", **kwargs: Any
    ) -> PredictionOutput:
        """Predict as Trainer.predict does, in the order of the rows, which length grouping would
        change.
        """
        strategy = self.args.train_sampling_strategy
        self.args.train_sampling_strategy = "sequential"
        try:
            kwargs["metric_key_prefix"] = metric_key_prefix
            output = super().predict(test_dataset, *args, **kwargs)
        finally:
            self.args.train_sampling_strategy = strategy
        if metric_key_prefix == "test" and output.label_ids is not None:
            self._of_test = test_dataset, output
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Predict a batch as Trainer.prediction_step does. The loss leaves out repeated rows.

        Several processes fill their last batches with the first rows of the split. The Trainer
        drops what they predict for these, but the mean loss of the batch would include them.
        """
        if ignore_keys is None:
            own = getattr(self.model.config, "keys_to_ignore_at_inference", ["past_key_values"])
            ignore_keys = [*own, "encoder_last_hidden_state"]  # which BART's heads give as well
        size = len(inputs["input_ids"])
        state, index = self.accelerator.gradient_state, self.accelerator.process_index
        step = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if self.accelerator.num_processes == 1 or not state.end_of_dataloader:
            return step
        if state.remainder in (-1, 0):  # unknown, or none is repeated
            return step
        rows = state.remainder - index * size
        # A process without rows of its own takes part, because weights may be sharded. The
        # Trainer drops its loss.
        kept = {name: values[: max(1, rows)] for name, values in inputs.items()}
        loss, _, _ = super().prediction_step(model, kept, True, ignore_keys)
        return (loss, *step[1:])

    @property
    def record(self) -> AdapterRecord | None:
        """What is recorded of the adapter that is trained; None without one."""
        return active_record(self.model)

    def flags(self) -> dict[str, Any]:
        """Return the flags of the training, some of which the Trainer has resolved."""
        return flags_of([self.args])

    def results(self) -> dict[str, Any]:
        """Return what results.json says of the training."""
        scores = {name: score for name, score in self.kept.items() if name not in MOMENT}
        chosen_by = self.args.metric_for_best_model
        return {
            "strategy": self.strategy,
            "epochs": scores_per_epoch(self.state.log_history),
            "chosen_by": chosen_by,
            "best_epoch": self.best_step and self.kept["epoch"],
            "best_score": scores.get(chosen_by.removeprefix("eval_")),
            "best_scores": scores,
            "trainable_parameters": self.trainable,
            "total_parameters": self.total,
            "seconds": round(self._clock.seconds, 1),
            "peak_memory": peak_memory(),
        }

    def describe_kept(self) -> Described | None:
        """Return what the kept weights predict for the test split or, if it was not predicted, for
        validation.

        Every process of a distributed run must call it.
        """
        if self._describe is None:
            return None
        if self._of_test is not None:
            name, (data, output) = "test", self._of_test
        elif self.args.eval_strategy == "no":
            return None
        else:
            name, data, output = self.predict_validation()
        outputs, labels = np.asarray(output.predictions), np.asarray(output.label_ids)
        return Described(name, data, self._describe(outputs, labels))

    @property
    def predicted(self) -> dict[str, PredictionOutput]:
        """What the kept weights predict for the test split, if it was predicted."""
        return {"test": self._of_test[1]} if self._of_test is not None else {}

    def predict_validation(self) -> tuple[str, Dataset[Any], PredictionOutput]:
        """Return the validation split's name, its rows, and what the kept weights predict for it.

        Of several, such as MNLI's two, it is the one that chooses the best epoch.
        """
        if self._of_validation is None:
            name, data = "validation", cast(Any, self.eval_dataset)
            if isinstance(data, dict):
                for split in data:
                    if self.args.metric_for_best_model.startswith(f"{split}_"):
                        name, data = f"validation ({split})", data[split]
                        break
            output = self.predict(data, metric_key_prefix="kept")
            self._of_validation = name, data, output
        return self._of_validation

    def save_trained(self) -> None:
        """Save the weights of the kept epoch and the tokenizer in the subfolder `saved_as`, in
        place of all that an earlier run, or an attempt that was killed, has left there.
        """
        if self.args.should_save:
            for name in SAVED:  # also those of another method
                shutil.rmtree(Path(self.args.output_dir, name), ignore_errors=True)
        self.accelerator.wait_for_everyone()
        path = Path(self.args.output_dir, self.saved_as)
        with saving(path):
            self.save_model(str(path))

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        super()._save(output_dir, state_dict)
        Path(output_dir or self.args.output_dir, TRAINING_ARGS_NAME).unlink(missing_ok=True)
