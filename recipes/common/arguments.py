"""The command line that the recipes share: data, encoder, method, adapter, and transformers'
TrainingArguments.
"""

import copy
import itertools
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import HfArg

from common.edge import RecipeError, looks_like_a_path
from common.run import lower_is_better
from houlsby_peft import HoulsbyConfig


BERT, MINILM = "google-bert/bert-base-uncased", "minilm"
POOLER = "pooler"  # BERT's layer between the encoder and the head of a classifier
MAIN_METRIC = "main"
AUTO = "auto"
_OF_TASK = (
    "output_dir",
    "model_name",
    "evaluate",
    "init_adapter",
    "hub_model_id",
    "data",
)  # may contain {task}
# What the packaged encoder needs to learn well, by method: its pooler was never pretrained.
MINILM_SETTINGS: dict[str, dict[str, Any]] = {
    "houlsby": {"train_pooler": True, "learning_rate": 1e-3},
    **{method: {"train_pooler": True} for method in ("lora", "ia3", "layer_norm", "linear")},
}

Defaults = Callable[[Namespace], Mapping[str, Any]]


def check_path(flag: str, name: str | None) -> None:
    """Raise RecipeError if a value can only be a path, and there is none: the Hub would be asked
    for it.
    """
    is_file = (
        name is not None
        and "/" not in name
        and Path(name).suffix in (".csv", ".tsv", ".jsonl", ".parquet")
    )
    if (
        name
        and "{" not in name
        and (is_file or looks_like_a_path(name))
        and not Path(name).expanduser().exists()
    ):
        raise RecipeError(
            f"--{flag} must be a folder or file that exists, or a name on the Hub, got {name!r}."
        )


# Fields with a list type and HfArg need the exception from RUF009, which takes the type for a
# mutable default.
@dataclass
class EncoderArguments:
    """The encoder that gets the adapter."""

    model_name: str = HfArg(
        aliases=["--model_name_or_path"],
        default=BERT,
        help=f"Folder, name on the Hub, or {MINILM!r}, an encoder in a package from PyPI.",
    )
    max_length: int = HfArg(
        aliases=["--max_seq_length"],
        default=128,
        help="Tokens per example; longer ones are truncated.",
    )
    max_train_samples: int | None = HfArg(
        default=None, help="Train on a random sample of this many examples."
    )
    evaluate: str | None = HfArg(
        default=None,
        help="Score this saved adapter or model (its folder, its run's, or a name on the Hub) instead of training.",
    )

    def __post_init__(self) -> None:
        check_path("model_name", self.model_name)
        check_path("evaluate", self.evaluate)


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
    validation_file: str | None = HfArg(
        default=None, help="File of the validation split, if not in --data."
    )
    test_file: str | None = HfArg(default=None, help="File of the test split, if not in --data.")
    encoding: str | None = HfArg(
        default=None,
        help="Encoding of .csv, .tsv and .jsonl files, such as shift_jis; default: detected.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag in ("data", "validation_file", "test_file"):
            if isinstance(value := getattr(self, flag), str):
                check_path(flag, value)

    @property
    def name(self) -> str:
        """The name of the data: of a file without its extension, or of a folder."""
        path = Path(self.data).expanduser()
        name = path.resolve().name if path.is_dir() else path.stem if path.is_file() else path.name
        return name + (f"_{self.data_config}" if self.data_config else "")


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
        default="true",
        help="Train the layer norms of the adapted layers, none, or all of the model's.",
    )
    activation: str = HfArg(default="gelu", help="Any activation that transformers knows by name.")
    layers: list[int] | None = HfArg(  # noqa: RUF009
        default=None, help="Layers to adapt, counted from 0; default: all."
    )
    kind: Literal["houlsby", "pfeiffer", "parallel"] = HfArg(
        default="houlsby",
        help="What the bottleneck reads: the sub-layer's output, the normalized sum, or its input.",
    )
    positions: list[str] | None = HfArg(  # noqa: RUF009
        default=None,
        help="Sub-layers to adapt: attention, feed_forward; default: those of the kind.",
    )
    dropout: float = HfArg(default=0.0, help="Dropout inside the bottleneck.")
    init_std: float = HfArg(default=0.01, help="Standard deviation of the initial projections.")
    init_adapter: str | None = HfArg(
        default=None, help="Start from the bottlenecks and norms of this adapter; the head is new."
    )

    def __post_init__(self) -> None:
        check_path("init_adapter", self.init_adapter)
        self.config()  # checks the options before anything is loaded

    def config(self, **fields: Any) -> HoulsbyConfig:
        """Return the PEFT configuration. Further fields, such as task_type, are passed on."""
        return HoulsbyConfig(
            r=self.r,
            share_layers=self.share_layers,
            train_layer_norm={"true": True, "false": False, "all": "all"}[self.train_layer_norm],
            layers_to_transform=self.layers,
            activation=self.activation,
            kind=self.kind,
            positions=self.positions,
            dropout=self.dropout,
            init_std=self.init_std,
            **fields,
        )


@dataclass
class ClassifierArguments(AdapterArguments):
    """The adapter of a text classifier, which may also train the pooler, and have a larger head."""

    train_pooler: bool = HfArg(
        default=False,
        help="Also train BERT's pooler, as full fine-tuning does. With an encoder whose pooler was never pretrained, "
        "such as minilm, adapters then learn sooner and with every seed; minilm: true.",
    )

    head: Literal["linear", "two_layer"] = HfArg(
        default="linear",
        help="One linear layer on the pooled [CLS] vector or, for adapters, a hidden layer with tanh before it.",
    )

    def config(self, **fields: Any) -> HoulsbyConfig:
        """Return the PEFT configuration, with the pooler among the modules to train and save if
        asked for.
        """
        modules = [POOLER] if self.train_pooler else None
        return super().config(
            modules_to_save=modules, two_layer_head=self.head == "two_layer", **fields
        )


@dataclass
class MethodArguments:
    """The method, and the options of those that are not adapters."""

    _argument_group_name = "method"

    method: Literal["houlsby", "full", "top_k", "layer_norm", "lora", "ia3", "linear"] = HfArg(
        default="houlsby",
        help="Train adapters, all weights, the top layers, the layer norms, PEFT's LoRA or IA3, or only the head. "
        "Every method trains the head.",
    )
    base_dtype: Literal["auto", "float32", "bfloat16"] = HfArg(
        default=AUTO,
        help="Data type of the frozen weights; adapters and LoRA are trained in float32. 'auto' is bfloat16 if this "
        "device multiplies matrices of the model's shape faster in it, else float32. Other methods, --fp16, DeepSpeed "
        "and FSDP need float32.",
    )
    top_k: int | None = HfArg(
        default=None,
        help="Number of layers that --method top_k trains, from the top; the embeddings stay frozen.",
    )
    lora_r: int = HfArg(default=8, help="Rank of LoRA's matrices.")
    lora_alpha: int = HfArg(default=16, help="LoRA's scale, which is divided by the rank.")
    lora_targets: list[str] | None = HfArg(  # noqa: RUF009
        default=None,
        help="Linear layers that LoRA adapts, by the end of their name; default: PEFT's choice.",
    )

    @property
    def adds_weights(self) -> bool:
        """Whether the method freezes the encoder and adds weights, rather than training the
        encoder's own.
        """
        return self.method in ("houlsby", "lora", "ia3")

    def check(self, adapter: AdapterArguments, training: "RecipeTrainingArguments") -> None:
        """Raise RecipeError if an option would silently have no effect with this method, or its
        result is unusable.
        """
        for_adapters = {
            "--push_to_hub": training.push_to_hub,
            "--init_adapter": adapter.init_adapter,
            "--head two_layer": adapter.config().two_layer_head,
        }
        given = [flag for flag, value in for_adapters.items() if value]
        if given and self.method != "houlsby":
            raise RecipeError(f"{given[0]} needs --method houlsby, got {self.method}.")
        if self.base_dtype == "bfloat16" and not self.adds_weights:
            raise RecipeError(
                f"--base_dtype bfloat16 is for methods that add weights to a frozen encoder, got {self.method}. "
                "Leave it out; for speed, give --bf16."
            )
        if (self.method == "top_k") != (self.top_k is not None):
            raise RecipeError(
                f"--method top_k and --top_k need each other, got {self.method} and {self.top_k}."
            )


@dataclass
class RecipeTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments with the defaults of Houlsby et al. 2019: Adam (AdamW without
    decay), batches of 32, linear warm-up over a tenth of the steps and linear decay to zero, best
    epoch by the validation score.
    """

    _argument_group_name = "training (arguments of transformers' TrainingArguments)"

    output_dir: str = HfArg(
        default="runs/{task}", help="Folder of checkpoints, adapter and results.json."
    )
    learning_rate: float = HfArg(
        default=3e-4,
        help="Peak learning rate, reached after the warm-up; to classify with minilm and adapters: 1e-3.",
    )
    num_train_epochs: float = HfArg(default=10, help="Number of passes over the training data.")
    per_device_train_batch_size: int = HfArg(
        default=32, help="Examples per training step on each device."
    )
    per_device_eval_batch_size: int = HfArg(
        default=64, help="Examples per evaluation step on each device."
    )
    warmup_steps: float = HfArg(
        default=0.1, help="Steps of linear warm-up; below 1: share of all steps."
    )
    lr_scheduler_type: str = HfArg(
        default="linear", help="Learning rate after the warm-up: linear, cosine, constant ..."
    )
    train_sampling_strategy: str = HfArg(
        default="group_by_length",
        help="'group_by_length', which needs the least padding, or 'random'.",
    )
    eval_strategy: str = HfArg(default="epoch", help="When to evaluate: 'epoch', 'steps' or 'no'.")
    save_strategy: str = HfArg(
        default="epoch", help="When to save a checkpoint: 'epoch', 'steps', 'best' or 'no'."
    )
    save_total_limit: int | None = HfArg(
        default=1, help="Number of checkpoints to keep besides the best."
    )
    # Without an accelerator, every run would warn about pinned memory.
    dataloader_pin_memory: bool = HfArg(
        default=torch.accelerator.is_available(), help="Pin batches in memory."
    )
    # Every step uses all trained weights, and the buffers of a frozen encoder never change.
    ddp_find_unused_parameters: bool = HfArg(
        default=False, help="Let DDP search for unused parameters."
    )
    ddp_broadcast_buffers: bool | None = HfArg(
        default=False, help="Let DDP send the buffers before every step."
    )
    logging_steps: float = HfArg(default=50, help="Steps between two reports of the loss.")
    load_best_model_at_end: bool = HfArg(
        default=True, help="End with the weights of the best epoch, not the last."
    )
    metric_for_best_model: str = HfArg(
        default=MAIN_METRIC, help="Score that chooses the best epoch; 'main' is the task's own."
    )
    early_stopping_patience: int | None = HfArg(
        default=None, help="Stop after this many evaluations without improvement; default: never."
    )
    adapter_drop: bool = HfArg(
        default=False,
        help="In each step, skip the adapters of the lowest layers, a random number of them, so that the trained "
        "adapter also works without them (AdapterDrop).",
    )
    # Early stopping must go on counting after a crash.
    restore_callback_states_from_checkpoint: bool = HfArg(
        default=True, help="Also restore the state of the callbacks when resuming."
    )
    overwrite_output_dir: bool = HfArg(
        default=False,
        help="Start over in a folder that holds another run, and delete its checkpoints and results.",
    )
    resume_from_checkpoint: Literal["last"] | None = HfArg(
        default=None,
        help="Resume from the last complete checkpoint in output_dir with other arguments, for example more epochs; "
        "default: only with the same arguments.",
    )
    hub_private_repo: bool = HfArg(
        aliases=["--hub_private"], default=False, help="Make a new repository on the Hub private."
    )
    do_train: bool = HfArg(
        default=False, help="Train. Without all three of these flags, a recipe does all of it."
    )

    def __post_init__(self) -> None:
        if not (self.do_train or self.do_eval or self.do_predict):
            self.do_train = self.do_eval = self.do_predict = True
        if not self.do_eval:
            self.eval_strategy, self.load_best_model_at_end = "no", False
        if self.disable_tqdm is None:
            self.disable_tqdm = not sys.stderr.isatty()
        self.ddp_find_unused_parameters |= self.adapter_drop
        super().__post_init__()
        if (
            self.n_gpu > 1
        ):  # the Trainer would copy the model to all of them in every step, on threads
            self._n_gpu = 1

    def choose_by(self, scores: Sequence[str]) -> None:
        """Let the first of a task's scores choose the best epoch, unless the command line names
        another.
        """
        named = self.metric_for_best_model.removeprefix("eval_")
        if named == "accuracy":  # MNLI has two, and STS-B none
            named = next((name for name in scores if name.endswith(named)), MAIN_METRIC)
        if named not in (MAIN_METRIC, *scores):
            raise RecipeError(
                f"--metric_for_best_model must be one of {', '.join([MAIN_METRIC, *scores])}, got {named!r}."
            )
        self.metric_for_best_model = scores[0] if named == MAIN_METRIC else named
        self.greater_is_better = not lower_is_better(self.metric_for_best_model)


class Command(NamedTuple):
    """The groups of a command line: the task with its data and encoder, the method, the adapter,
    the training.
    """

    arguments: Any
    method: MethodArguments
    adapter: AdapterArguments
    training: RecipeTrainingArguments

    def be_of_several(self) -> None:
        """Put {task} into the names of the folder and of the repository, as each of several tasks
        needs its own.
        """
        training = self.training
        if "{task}" not in training.output_dir:
            training.output_dir += "/{task}"
        if "{task}" not in (training.hub_model_id or "{task}"):
            training.hub_model_id += "-{task}"

    def for_task(self, name: str) -> "Command":
        """Return a copy with a task's name in place of {task}."""
        own = Command(*map(copy.copy, self))
        for group, argument in itertools.product(own, _OF_TASK):
            if isinstance(value := getattr(group, argument, None), str):
                setattr(group, argument, value.replace("{task}", name))
        return own


def resolve_defaults(given: Namespace) -> dict[str, Any]:
    """Return the defaults that follow from other flags, for the flags that the command line leaves
    out.
    """
    values, defaults = vars(given), {}
    if values.get("save_strategy") == "steps" and values.get("load_best_model_at_end"):
        defaults["save_steps"] = (
            given.eval_steps or given.logging_steps
        )  # a checkpoint of each evaluation
    if values.get("do_predict") and "predict" in values:
        defaults["predict"] = True
    trains = values.get("do_train", True) or not (values.get("do_eval") or values.get("do_predict"))
    if values.get("evaluate") is not None or not trains:
        known = ("model_name", "max_length", "null_threshold")  # by what is evaluated
        defaults |= dict.fromkeys(name for name in known if name in values)
    elif values.get("model_name") == MINILM and "train_pooler" in values:
        defaults |= MINILM_SETTINGS.get(values.get("method", "houlsby"), {})
    return defaults


def parse_command(
    kind: type,
    adapter: type[AdapterArguments] = AdapterArguments,
    args: Sequence[str] | None = None,
    more_defaults: Defaults | None = None,
) -> Command:
    """Parse the command line, or `args`: `kind` is the recipe's own group. The first argument may
    be a JSON or YAML file of arguments, which flags after it override.

    The defaults that depend on flags are resolved once, before the dataclasses are made. The
    recipe's own, such as a preset's, are stronger than resolve_defaults'.
    """
    groups = (kind, MethodArguments, adapter, RecipeTrainingArguments)
    parser = HfArgumentParser(
        groups, usage="accelerate launch recipes/%(prog)s [flags]", allow_abbrev=False
    )
    words = list(sys.argv[1:] if args is None else args)
    if words and Path(words[0]).suffix in (".json", ".yaml", ".yml"):
        words[:1] = read_arguments(Path(words[0]))
    own = more_defaults(parser.parse_known_args(words)[0]) if more_defaults else {}
    parser.set_defaults(**own)
    followed = resolve_defaults(parser.parse_known_args(words)[0])
    parser.set_defaults(
        **{name: value for name, value in followed.items() if name not in own or value is None}
    )
    return Command(*parser.parse_args_into_dataclasses(words))


def read_arguments(path: Path) -> list[str]:
    """Return the words of a command line that stand for a JSON or YAML file, an object with a value
    for each flag.
    """
    text = path.read_text(encoding="utf-8")
    # The flags' types read the values, so that "no" is no boolean, and 1e-3 is a number.
    values = yaml.load(text, yaml.BaseLoader)
    typed = yaml.safe_load(text)  # for objects
    words = []
    for name, value in values.items():
        if isinstance(value, list):
            words += [f"--{name}", *value]
        elif value not in ("", "null"):
            words.append(
                f"--{name}={json.dumps(typed[name]) if isinstance(value, dict) else value}"
            )
    return words


def merge(groups: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of several dataclasses as one dictionary, as JSON holds them."""
    merged: dict[str, Any] = {}
    for group in groups:
        # TrainingArguments.to_dict hides tokens, which asdict would reveal.
        merged |= group.to_dict() if isinstance(group, TrainingArguments) else asdict(group)
    return json.loads(json.dumps(merged))


def defaults_of(groups: Sequence[Any]) -> dict[str, Any]:
    """Return the defaults of the flags, as far as they are in JSON."""
    defaults = {field.name: field.default for group in groups for field in fields(group)}
    return {
        name: value
        for name, value in defaults.items()
        if isinstance(value, (str, int, float, bool, type(None)))
    }
