"""The command line that the recipes share: the adapter's flags, and the arguments of transformers' Trainer."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments, get_scheduler
from transformers.hf_argparser import HfArg

from houlsby_peft import HoulsbyConfig
from training.errors import RecipeError
from training.model import MINILM, POOLER
from training.rules import NOT_FLAGS, OneLineErrors, check_flags


BERT = "google-bert/bert-base-uncased"
MAIN_METRIC = "main"


# Fields with a list type and HfArg need the exception from RUF009, which takes the type for a mutable default.
@dataclass
class EncoderArguments:
    """The encoder that gets the adapter."""

    model_name: str = HfArg(default=BERT, help=f"Folder, name on the Hub, or {MINILM!r} for the packaged encoder.")
    max_length: int = HfArg(default=128, help="Tokens per example; longer ones are truncated.")


@dataclass(kw_only=True)
class DataArguments(EncoderArguments):
    """The encoder and a data set, of your own or on the Hub."""

    _argument_group_name = "data"

    data: str = HfArg(
        help="A folder with train, validation and test files (.parquet, .csv, .tsv, .jsonl), one such file, or the "
        "name of a data set on the Hub."
    )
    data_config: str | None = HfArg(default=None, help="Configuration of the data set on the Hub, if it has several.")
    max_train_samples: int | None = HfArg(default=None, help="Train on a random sample of this many examples.")


@dataclass(kw_only=True)
class TextArguments(DataArguments):
    """A data set of texts or pairs of texts."""

    text_columns: list[str] | None = HfArg(  # noqa: RUF009
        default=None, help="Column of the text, or two columns for pairs; default: detected by name."
    )


@dataclass
class AdapterArguments:
    """The adapter; HoulsbyConfig documents each field."""

    _argument_group_name = "adapter"

    r: int = HfArg(default=64, help="Width of the bottleneck.")
    share_layers: int = HfArg(
        default=0,
        help="0: a separate bottleneck at each position; 1: one per layer; k: one per k consecutive layers.",
    )
    train_layer_norm: Literal["true", "false", "all"] = HfArg(
        default="true", help="Train the layer norms of the adapted layers, none, or all of the model's."
    )
    activation: str = HfArg(default="gelu", help="Any activation that transformers knows by name.")
    layers: list[int] | None = HfArg(  # noqa: RUF009
        default=None, help="Layers to adapt, counted from 0; default: all."
    )
    kind: Literal["houlsby", "pfeiffer", "parallel"] = HfArg(
        default="houlsby", help="What the bottleneck reads: the sub-layer's output, the normalized sum, or its input."
    )
    dropout: float = HfArg(default=0.0, help="Dropout inside the bottleneck.")
    init_std: float = HfArg(default=0.01, help="Standard deviation of the initial projections.")
    init_adapter: str | None = HfArg(
        default=None, help="Start from the bottlenecks and norms of this adapter; the head is new."
    )

    def __post_init__(self) -> None:
        self.config()  # checks the options before anything is loaded

    def config(self, **kwargs: Any) -> HoulsbyConfig:
        """Return the PEFT configuration. Further fields, such as task_type, are passed on.

        Raises:
            RecipeError: If an option breaks its rule in HoulsbyConfig.
        """
        train_layer_norm = {"true": True, "false": False, "all": "all"}[self.train_layer_norm]
        try:
            return HoulsbyConfig(
                r=self.r,
                share_layers=self.share_layers,
                train_layer_norm=train_layer_norm,
                layers_to_transform=self.layers,
                activation=self.activation,
                kind=self.kind,
                dropout=self.dropout,
                init_std=self.init_std,
                **kwargs,
            )
        except ValueError as error:
            message = str(error).replace("HoulsbyConfig.layers_to_transform", "--layers")
            raise RecipeError(message.replace("HoulsbyConfig.", "--")) from error


@dataclass
class ClassifierArguments(AdapterArguments):
    """The adapter of a text classifier, which may also train the pooler between encoder and head."""

    train_pooler: bool = HfArg(
        default=False,
        help="Also train BERT's pooler, as full fine-tuning does. With an encoder whose pooler was never pretrained, "
        "such as minilm, adapters then learn sooner and with every seed.",
    )

    def config(self, **kwargs: Any) -> HoulsbyConfig:
        """Return the PEFT configuration, with the pooler among the modules to train and save if asked for."""
        return super().config(modules_to_save=[POOLER] if self.train_pooler else None, **kwargs)


@dataclass
class RecipeTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments with the defaults of Houlsby et al. 2019: Adam (AdamW without decay), batches of
    32, linear warm-up over a tenth of the steps and linear decay to zero, best epoch by the validation score."""

    _argument_group_name = "training (every argument of transformers' TrainingArguments)"

    output_dir: str = HfArg(default="runs/{task}", help="Folder of checkpoints, adapter and results.json.")
    learning_rate: float = HfArg(default=3e-4, help="Peak learning rate, reached after the warm-up.")
    num_train_epochs: float = HfArg(default=10, help="Number of passes over the training data.")
    per_device_train_batch_size: int = HfArg(default=32, help="Examples per training step on each device.")
    per_device_eval_batch_size: int = HfArg(default=64, help="Examples per evaluation step on each device.")
    warmup_steps: float = HfArg(default=0.1, help="Steps of linear warm-up; below 1: share of all steps.")
    train_sampling_strategy: str = HfArg(
        default="group_by_length", help="'group_by_length', which needs the least padding, or 'random'."
    )
    eval_strategy: str = HfArg(default="epoch", help="When to evaluate: 'epoch', 'steps' or 'no'.")
    save_strategy: str = HfArg(default="epoch", help="When to save a checkpoint: 'epoch', 'steps', 'best' or 'no'.")
    save_total_limit: int | None = HfArg(default=1, help="Number of checkpoints to keep besides the best.")
    # Without an accelerator, every run would warn about pinned memory.
    dataloader_pin_memory: bool = HfArg(default=torch.accelerator.is_available(), help="Pin batches in memory.")
    # Every step uses all trained weights, and the buffers of a frozen encoder never change.
    ddp_find_unused_parameters: bool | None = HfArg(default=False, help="Let DDP search for unused parameters.")
    ddp_broadcast_buffers: bool | None = HfArg(default=False, help="Let DDP send the buffers before every step.")
    logging_steps: float = HfArg(default=50, help="Steps between two reports of the loss.")
    load_best_model_at_end: bool = HfArg(default=True, help="End with the weights of the best epoch, not the last.")
    metric_for_best_model: str = HfArg(
        default=MAIN_METRIC, help="Score that chooses the best epoch; 'main' is the task's own."
    )

    logging_nan_inf_filter: bool = HfArg(default=False, help="Leave NaN and infinite losses out of the log.")
    early_stopping_patience: int | None = HfArg(
        default=None, help="Stop after this many evaluations without improvement; default: never."
    )
    # Early stopping must go on counting after a crash.
    restore_callback_states_from_checkpoint: bool = HfArg(
        default=True, help="Also restore the state of the callbacks when resuming."
    )
    overwrite_output_dir: bool = HfArg(
        default=False, help="Start over in a folder that holds another run, and delete its checkpoints and results."
    )
    resume_from_checkpoint: str | None = HfArg(
        default=None,
        help="Checkpoint to resume from, or 'last' for the last complete one in output_dir, whatever the arguments; "
        "default: the last one of a run with the same arguments.",
    )
    hub_private_repo: bool = HfArg(
        aliases=["--hub_private"], default=False, help="Make a new repository on the Hub private."
    )

    # transformers' flags without effect in a recipe; see NOT_FLAGS.
    do_train: bool = field(default=False, init=False)
    do_eval: bool = field(default=False, init=False)
    do_predict: bool = field(default=False, init=False)
    greater_is_better: bool | None = field(default=None, init=False)
    remove_unused_columns: bool = field(default=True, init=False)
    label_names: list[str] | None = field(default=None, init=False)
    length_column_name: str = field(default="length", init=False)
    prediction_loss_only: bool = field(default=False, init=False)
    include_for_metrics: list[str] = field(default_factory=list, init=False)
    batch_eval_metrics: bool = field(default=False, init=False)
    eval_do_concat_batches: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # The Trainer would make them after the model is loaded, and fail then.
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(self)
        if not self.deepspeed and options.keys() <= {"lr", "betas", "eps", "fused", "weight_decay", "momentum"}:
            optimizer = optimizer_class([torch.zeros(1, requires_grad=True)], **options)
            get_scheduler(self.lr_scheduler_type, optimizer, 1, 10, self.lr_scheduler_kwargs)

    def choose_by(self, scores: Sequence[str]) -> None:
        """Let the first of a task's scores choose the best epoch, unless the command line names another.

        Args:
            scores: The names of all scores of an evaluation.

        Raises:
            RecipeError: If the command line names none of them.
        """
        named = self.metric_for_best_model.removeprefix("eval_")
        if named not in (MAIN_METRIC, *scores):
            raise RecipeError(
                f"--metric_for_best_model must be one of {', '.join([MAIN_METRIC, *scores])}, got {named!r}. Leave it "
                "out for the task's own."
            )
        self.metric_for_best_model = scores[0] if named == MAIN_METRIC else named
        self.greater_is_better = not self.metric_for_best_model.endswith("loss")


class RecipeParser(OneLineErrors, HfArgumentParser):
    """HfArgumentParser that checks every value by the recipes' rules."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, then check all values, before any dataclass does something with them."""
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        values = vars(namespace)
        check_flags(values, {name: self.get_default(name) for name in values})
        return namespace, unknown

    def parse(self, args: Sequence[str] | None = None) -> tuple[Any, ...]:
        """Parse the command line, or `args`, into the dataclasses, in their order.

        Raises:
            RecipeError: If a value breaks its rule.
        """
        try:
            *groups, unknown = self.parse_args_into_dataclasses(args, return_remaining_strings=True)
        # TrainingArguments checks some flags, and imports what others need.
        except (ValueError, TypeError, KeyError, OSError, ImportError, AssertionError, NotImplementedError) as error:
            self.error(str(error))
        for name, remedy in NOT_FLAGS.items():
            if any(word.partition("=")[0] in (f"--{name}", f"--{name.replace('_', '-')}") for word in unknown):
                self.error(f"--{name} is not a flag of the recipes: {remedy}")
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}")
        return tuple(groups)
