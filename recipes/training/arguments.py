"""The command line that the recipes share: the adapter's flags, and the arguments of transformers' Trainer."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from datasets import Dataset
from transformers import HfArgumentParser, Trainer, TrainingArguments, get_scheduler
from transformers.hf_argparser import HfArg

from houlsby_peft import HoulsbyConfig
from training.data import find_files, load_splits
from training.errors import RecipeError
from training.model import MINILM, POOLER
from training.packaged import PACKAGED
from training.rules import FLAGS_OF_EXAMPLES, NOT_FLAGS, OneLineErrors, check_flags
from training.tables import log
from training.trained_on import describe_file


BERT = "google-bert/bert-base-uncased"
MAIN_METRIC = "main"
# What the packaged encoder needs to learn well, by method: its pooler was never pretrained.
MINILM_SETTINGS: dict[str, dict[str, Any]] = {
    "houlsby": {"train_pooler": True, "learning_rate": 1e-3},
    "lora": {"train_pooler": True},
}


# Fields with a list type and HfArg need the exception from RUF009, which takes the type for a mutable default.
@dataclass
class EncoderArguments:
    """The encoder that gets the adapter."""

    model_name: str = HfArg(
        aliases=["--model_name_or_path"],
        default=BERT,
        help=f"Folder, name on the Hub, or a packaged encoder: {' or '.join(map(repr, PACKAGED))}.",
    )
    max_length: int = HfArg(
        aliases=["--max_seq_length"], default=128, help="Tokens per example; longer ones are truncated."
    )
    max_train_samples: int | None = HfArg(default=None, help="Train on a random sample of this many examples.")
    evaluate: str | None = HfArg(
        default=None,
        help="Score this saved adapter or model (its folder, its run's, or a name on the Hub) instead of training.",
    )


@dataclass(kw_only=True)
class DataArguments(EncoderArguments):
    """The encoder and a data set, of your own or on the Hub."""

    _argument_group_name = "data"

    data: str = HfArg(
        aliases=["--train_file", "--dataset_name"],
        help="A folder with train, validation and test files (.parquet, .csv, .tsv, .jsonl), one such file, or the "
        "name of a data set on the Hub.",
    )
    data_config: str | None = HfArg(
        aliases=["--dataset_config_name"],
        default=None,
        help="Configuration of the data set on the Hub, if it has several.",
    )
    validation_file: str | None = HfArg(default=None, help="File of the validation split, if not in --data.")
    test_file: str | None = HfArg(default=None, help="File of the test split, if not in --data.")

    def load_splits(self) -> dict[str, Dataset]:
        """Load the data set as training.data.load_splits does."""
        return load_splits(self.data, self.data_config, validation=self.validation_file, test=self.test_file)

    def find_files(self) -> dict[str, Path]:
        """Return the files that are trained and validated on, by their splits; none for a data set on the Hub."""
        files = find_files(self.data, validation=self.validation_file)
        return {split: file for split, file in files.items() if split != "test"}

    def describe_test(self) -> dict[str, Any] | None:
        """Return what is recorded of the file of the test split, or None if there is no such file."""
        file = find_files(self.data, test=self.test_file).get("test")
        return None if file is None else describe_file(file)


@dataclass(kw_only=True)
class TextArguments(DataArguments):
    """A data set of texts or pairs of texts."""

    text_columns: list[str] | None = HfArg(  # noqa: RUF009
        aliases=["--text_column", "--text_column_name", "--text_column_names"],
        default=None,
        help="Column of the text, or two columns for pairs; default: detected by name.",
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
        "such as minilm, adapters then learn sooner and with every seed; minilm: true.",
    )

    def config(self, **kwargs: Any) -> HoulsbyConfig:
        """Return the PEFT configuration, with the pooler among the modules to train and save if asked for."""
        return super().config(modules_to_save=[POOLER] if self.train_pooler else None, **kwargs)


@dataclass
class RecipeTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments with the defaults of Houlsby et al. 2019: Adam (AdamW without decay), batches of
    32, linear warm-up over a tenth of the steps and linear decay to zero, best epoch by the validation score."""

    _argument_group_name = "training (arguments of transformers' TrainingArguments)"

    output_dir: str = HfArg(default="runs/{task}", help="Folder of checkpoints, adapter and results.json.")
    learning_rate: float = HfArg(
        default=3e-4, help="Peak learning rate, reached after the warm-up; to classify with minilm and adapters: 1e-3."
    )
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
        help="Checkpoint to resume from, or 'last' for the last complete one in output_dir, for example with more "
        "epochs; default: the last one of a run with the same arguments.",
    )
    push_to_hub: bool = HfArg(
        default=False, help="Push the adapter to the Hub with a generated card, once, at the end of the training."
    )
    hub_model_id: str | None = HfArg(
        default=None, help="Repository to push to, user/name; default: the name of output_dir."
    )
    hub_private_repo: bool = HfArg(
        aliases=["--hub_private"], default=False, help="Make a new repository on the Hub private."
    )
    example: list[str] | None = HfArg(  # noqa: RUF009
        default=None,
        metadata={"action": "extend"},
        help="Texts for which the adapter's card shows predictions, two for each pair; default: none, as the data may "
        "be private.",
    )

    do_train: bool = HfArg(default=False, help="Train. Without all three of these flags, a recipe does all of it.")
    do_eval: bool = HfArg(
        default=False, help="Evaluate; while training if that is asked for, else what the run in output_dir has saved."
    )
    do_predict: bool = HfArg(default=False, help="Predict the test split, and score it if it has labels.")

    # transformers' flags without effect in a recipe; see NOT_FLAGS.
    greater_is_better: bool | None = field(default=None, init=False)
    remove_unused_columns: bool = field(default=True, init=False)
    label_names: list[str] | None = field(default=None, init=False)
    length_column_name: str = field(default="length", init=False)
    prediction_loss_only: bool = field(default=False, init=False)
    include_for_metrics: list[str] = field(default_factory=list, init=False)
    batch_eval_metrics: bool = field(default=False, init=False)
    eval_do_concat_batches: bool = field(default=True, init=False)
    hub_revision: str | None = field(default=None, init=False)
    hub_strategy: str = field(default="every_save", init=False)
    hub_always_push: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not (self.do_train or self.do_eval or self.do_predict):
            self.do_train = self.do_eval = self.do_predict = True
        if not self.do_eval:
            self.eval_strategy, self.load_best_model_at_end = "no", False
        if self.load_best_model_at_end and self.save_strategy == "steps":
            steps = self.logging_steps if self.eval_steps is None else self.eval_steps
            if self.save_steps != steps:  # the best evaluation might have no checkpoint
                raise RecipeError(
                    f"--load_best_model_at_end needs a checkpoint of each evaluation, every {steps:g} steps, got "
                    f"--save_steps {self.save_steps:g}. Leave it out, or give --save_strategy best, which saves only "
                    "the evaluations that are better than all before, or --load_best_model_at_end false."
                )
        super().__post_init__()
        if self.n_gpu > 1:  # the Trainer would copy the model to all of them in every step, on threads
            self._n_gpu = 1
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
    """HfArgumentParser that checks every value by the recipes' rules.

    The first argument may be a JSON or YAML file of arguments; flags after it override them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._own_defaults: set[str] = set()

    def set_defaults(self, **defaults: Any) -> None:
        """Set defaults that are stronger than those which follow from other flags."""
        self._own_defaults |= defaults.keys()
        super().set_defaults(**defaults)

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, then check all values, before any dataclass does something with them."""
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        values = vars(namespace)
        check_flags(values, {name: self.get_default(name) for name in values})
        return namespace, unknown

    def parse(self, args: Sequence[str] | None = None) -> tuple[Any, ...]:
        """Parse the command line, or `args`, into the dataclasses, in their order.

        Raises:
            RecipeError: If a value breaks its rule, or a file of arguments cannot be read.
        """
        words = list(sys.argv[1:] if args is None else args)
        if words and Path(words[0]).suffix in (".json", ".yaml", ".yml"):
            words[:1] = read_arguments(Path(words[0]))
        advised = self._follow(self.parse_known_args(words)[0])
        try:
            *groups, unknown = self.parse_args_into_dataclasses(words, return_remaining_strings=True)
        # TrainingArguments checks some flags, and imports what others need.
        except (ValueError, TypeError, KeyError, OSError, ImportError, AssertionError, NotImplementedError) as error:
            self.error(str(error))
        for name, remedy in (NOT_FLAGS | FLAGS_OF_EXAMPLES).items():
            if any(word.partition("=")[0] in (f"--{name}", f"--{name.replace('_', '-')}") for word in unknown):
                self.error(f"--{name} is not a flag of the recipes: {remedy}")
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}")
        values = {name: value for group in groups for name, value in vars(group).items()}
        followed = [f"--{name} {str(value).lower()}" for name, value in advised.items() if values[name] == value]
        if followed and args is None:
            log(f"{MINILM} is trained with {' '.join(followed)}, as advised for it; other values override these")
        return tuple(groups)

    def _follow(self, values: argparse.Namespace) -> dict[str, Any]:
        """Set the defaults that follow from other flags, and return those that the packaged encoder brings."""
        if "predict" in values and values.do_predict:
            super().set_defaults(predict=True)
        if "save_steps" in values and values.load_best_model_at_end and values.save_strategy == "steps":
            super().set_defaults(save_steps=values.logging_steps if values.eval_steps is None else values.eval_steps)
        trains = values.do_train or not (values.do_eval or values.do_predict) if "do_train" in values else True
        if getattr(values, "evaluate", None) is not None or not trains:
            known = ("model_name", "max_length", "null_threshold")  # by what is evaluated
            super().set_defaults(**dict.fromkeys(name for name in known if name in values))
        elif "train_pooler" in values and values.model_name == MINILM:
            advised = MINILM_SETTINGS.get(getattr(values, "method", "houlsby"), {})
            advised = {name: value for name, value in advised.items() if name not in self._own_defaults}
            super().set_defaults(**advised)
            return advised
        return {}


def read_arguments(path: Path) -> list[str]:
    """Return the words of a command line that stand for a JSON or YAML file, an object with a value for each flag.

    Raises:
        RecipeError: If the file cannot be read, or does not hold an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            values = json.loads(text)
        else:
            # Only objects get YAML's own types: the flags' types read the rest, so that "no" is no boolean.
            values = yaml.load(text, yaml.BaseLoader)
            values |= {name: value for name, value in yaml.safe_load(text).items() if isinstance(value, dict)}
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{path} must be a file with a value for each flag, such as r: 64; {reason}.") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} must hold an object with a value for each flag, such as r: 64, got {text[:50]!r}.")
    words = []
    for name, value in values.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value not in (None, "", "null"):
            words.append(f"--{name}={json.dumps(value) if isinstance(value, (bool, dict)) else value}")
    return words
