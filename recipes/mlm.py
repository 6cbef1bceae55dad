r"""Train an adapter, or the whole model, on a task's own text before it sees a label: masked
language modeling.

    accelerate launch recipes/mlm.py --data nyu-mll/glue --data_config rte \
        --output_dir runs/rte-text
    accelerate launch recipes/glue.py --task rte --init_adapter runs/rte-text/adapter
    accelerate launch recipes/mlm.py --data nyu-mll/glue --data_config rte --method full \
        --learning_rate 5e-5 --output_dir runs/rte-text-full
    accelerate launch recipes/glue.py --task rte --method full --model_name runs/rte-text-full/model

The first two commands are the method of Han et al. 2021, the last two their baseline without
adapters. An adapter leaves the encoder frozen, and also the head for masked words if the checkpoint
has one. Otherwise, as with MiniLM, the output weights of the head are tied to the input embeddings
and the rest of it is trained, in float32; it is saved beside the adapter, not in it. A whole model
is saved with the pooler of the checkpoint, as classifiers start with it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from peft import PeftModel
from peft.utils.integrations import gather_params_ctx
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from data.data import check_columns, find_text_columns, rows_with_text, tokenize
from data.reading import files_of, load_data
from data.splits import divide
from houlsby_peft.saved.downloads import find_packaged
from run.arguments import TextArguments
from run.command import Command, parse_command
from run.edge import RecipeError, end_with_one_line, log
from run.model import apply_method, base_model, config_of, keep_pooler, load_model
from run.run_task import run_task
from run.saved import Saved
from run.trainer import RecipeTrainer
from run.training_arguments import RecipeTrainingArguments
from tasks.task import Task


HEAD_FILE = "mlm_head.safetensors"


def mask_by_text(
    collator: DataCollatorForLanguageModeling, rows: Sequence[Mapping[str, Any]], seed: int = 0
) -> Any:
    """Return a batch in which the masked words are chosen by its first text, so that they are the
    same every time.
    """
    return replace(collator, seed=sum(rows[0]["input_ids"]) + seed)(rows)


class MlmTrainer(RecipeTrainer):
    """A trainer with logits for masked tokens only; it saves the head's weights.

    The same ones are masked in every evaluation, and in training those of the seed and the epoch,
    also after a resume.
    """

    def __init__(self, head: dict[str, nn.Parameter], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.head = head if isinstance(self.model, PeftModel) else {}
        self.collator = cast(DataCollatorForLanguageModeling, self.data_collator)
        self.data_collator = self._mask_by_epoch

    def _mask_by_epoch(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        return mask_by_text(self.collator, rows, 1 + self.args.seed + int(self.state.epoch + 1e-6))

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader[Any]:
        """Return batches in which the same words are masked every time, so that losses can be
        compared.
        """
        self.data_collator = partial(mask_by_text, self.collator)
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = self._mask_by_epoch

    def compute_loss(  # type: ignore[override]
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """Return the mean loss of the masked tokens. The head, which costs as much as all layers,
        reads no others.
        """
        labels = inputs.pop("labels")
        masked = labels != -100

        def select(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            output.last_hidden_state = output.last_hidden_state[masked].unsqueeze(0)
            return output

        with base_model(self.model).base_model.register_forward_hook(select):
            outputs = model(**inputs)
        loss = cross_entropy(outputs.logits[0].float(), labels[masked], reduction="sum") / max(
            1, int(masked.sum())
        )
        if return_outputs:
            return loss, outputs
        return loss

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        super()._save(output_dir, state_dict)
        if self.head and self.args.should_save:
            # Weights that are sharded are whole only in the state that the Trainer has gathered.
            whole = state_dict or {}
            weights = {}
            for name, weight in self.head.items():
                weights[name] = whole.get(f"base_model.model.{name}", weight.detach())
            save_file(weights, self._file(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_head(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_head(str(self.state.best_model_checkpoint))

    def _load_head(self, folder: str) -> None:
        if self.head:
            with gather_params_ctx(list(self.head.values())):
                for name, value in load_file(self._file(folder)).items():
                    self.head[name].data.copy_(value)

    def _file(self, folder: str | None) -> Path:
        return Path(folder or self.args.output_dir, HEAD_FILE)


@dataclass(kw_only=True)
class MlmTask(Task):
    """Masked words. `trained` are the weights of the head that the checkpoint lacks, by name."""

    trained: dict[str, nn.Parameter] = field(default_factory=dict)
    scores = ("loss",)
    auto_class = AutoModelForMaskedLM
    collator = DataCollatorForLanguageModeling
    trainer_class = MlmTrainer

    def prepare(self, command: Command) -> tuple[Any, PreTrainedTokenizerBase]:
        """Load the encoder with its head for masked words; make trainable what the method trains,
        and a new head.
        """
        arguments, method, adapter, _ = command
        encoder, tokenizer, missing = load_model(
            self.auto_class, arguments.model_name, method.base_dtype
        )
        # "all" norms are those of the encoder: the models of other recipes would lack a norm of
        # this head.
        config = adapter.config(exclude_modules=rf"(?!{encoder.base_model_prefix}\.).*")
        model = apply_method(encoder, method, config, adapter.init_adapter)
        # Without the output weights, which are tied.
        self.trained = {
            name: weight for name, weight in base_model(model).named_parameters() if name in missing
        }
        for weight in self.trained.values():
            weight.requires_grad = True
        if not isinstance(model, PeftModel):
            keep_pooler(model)
        count = sum(weight.numel() for weight in self.trained.values())
        head = "that of the checkpoint"
        if count:
            head = f"{count:,} weights are new, and trained"
        log(f"{len(self.splits['train']):,} training texts; encoder {arguments.model_name}")
        log(f"head for masked words: {head}")
        return model, tokenizer

    def example_of(self, row: Mapping[str, Any]) -> None:
        """No command predicts masked words."""

    def encode(
        self, split: Dataset, name: str, tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> Dataset:
        return tokenize(split, tokenizer, split.column_names, max_length).remove_columns(
            split.column_names
        )

    def trainer_options(
        self, model: PreTrainedModel, training: RecipeTrainingArguments
    ) -> dict[str, Any]:
        return {"head": self.trained}

    def evaluate(self, trainer: RecipeTrainer) -> dict[str, float]:
        """Return the loss of the validation split, and its perplexity."""
        scores = super().evaluate(trainer)
        return scores | {"perplexity": math.exp(scores["loss"])}


def main() -> None:
    """Read the command line and train, or compute the loss of what a run has saved."""
    # Logits of a whole vocabulary per token would be too much to keep or to predict.
    command = (
        parse_command(TextArguments)
        .for_task("mlm")
        .with_arguments(do_predict=False, prediction_loss_only=True)
    )
    arguments, training = command.arguments, command.training
    if arguments.metric:
        raise RecipeError(
            "--metric needs predictions; masked words have a loss only. Leave it out."
        )
    if arguments.model_name is not None and not has_head(arguments.model_name):
        # A new head trains, tied to frozen embeddings.
        command = command.with_arguments(base_dtype="float32")

    def load(saved: Saved | None) -> MlmTask:
        splits = {}
        for name, split in load_data(arguments, training).items():
            if name != "test":
                splits[name] = texts(split, name, arguments)
        if saved is not None:
            load_head(saved)
        results = None if saved is None else saved.results
        return MlmTask(name="mlm", splits=divide(splits, arguments, training, results))

    run_task(MlmTask, load, command, files_of(arguments))


def load_head(saved: Saved) -> None:
    file, model = Path(saved.name, HEAD_FILE), base_model(saved.model)
    if file.is_file():
        model.load_state_dict(load_file(file), strict=False)
    elif isinstance(saved.model, PeftModel) and not has_head(str(model.name_or_path)):
        raise RecipeError(
            "The loss of an adapter needs the head for masked words that was trained with it; "
            f"{saved.name} lacks {HEAD_FILE}, which a push to the Hub leaves out. Evaluate the "
            "run's own folder."
        )


def has_head(name: str) -> bool:
    """Return whether a checkpoint has a head for masked words, by the class that its configuration
    names.
    """
    # ELECTRA and Funnel are pretrained to tell replaced words, without a head for masked ones.
    without_head = ("ElectraForPreTraining", "FunnelForPreTraining")
    for kind in config_of(find_packaged(name)).architectures or ():
        if kind.endswith(("ForMaskedLM", "ForPreTraining")) and kind not in without_head:
            return True
    return False


def texts(data: Dataset, name: str, arguments: TextArguments) -> Dataset:
    """Return the rows of a split that hold text, and only the columns of the texts."""
    columns = find_text_columns(data, arguments.text_columns)
    check_columns(data, name, columns)
    return rows_with_text(data, name, columns).select_columns(list(columns))


if __name__ == "__main__":
    end_with_one_line(main)
