"""The arguments of the data, the encoder, the adapter and the method. None is changed after it was
read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from houlsby_peft import HoulsbyConfig
from houlsby_peft.tables import suffix_of
from run.edge import RecipeError, looks_like_a_path
from run.run import LABEL_ISSUES, LABEL_ISSUES_LIST
from run.training_arguments import RecipeTrainingArguments, flag


BERT, MINILM = "google-bert/bert-base-uncased", "minilm"
DATA_FILES = (".csv", ".tsv", ".jsonl", ".parquet")
POOLER = "pooler"  # BERT's layer between the encoder and the head of a classifier
AUTO = "auto"
BaseDtype = Literal["auto", "float32", "bfloat16"]
# What the packaged encoder needs to learn well, by method: its pooler was never pretrained.
MINILM_SETTINGS: dict[str, dict[str, Any]] = {
    "houlsby": {"train_pooler": True, "learning_rate": 1e-3},
    "lora": {"train_pooler": True},
    "ia3": {"train_pooler": True},
    "layer_norm": {"train_pooler": True},
    "linear": {"train_pooler": True},
}
_NORMS: dict[str, bool | Literal["all"]] = {"true": True, "false": False, "all": "all"}


def check_path(name: str, value: str | None) -> None:
    """Raise RecipeError if the value of a flag can only be a path, and there is none: the Hub would
    be asked for it.
    """
    if not value or "{" in value or Path(value).expanduser().exists():
        return
    is_file = "/" not in value and Path(value).suffix in DATA_FILES
    if is_file or looks_like_a_path(value):
        raise RecipeError(
            f"--{name} must be a folder or file that exists, or a name on the Hub, got {value!r}."
        )


@dataclass(frozen=True)
class ReadOptions:
    """How files are read.

    Attributes:
        encoding: The encoding. None: it is detected.
        has_header: Whether the first row of a table has the names of the columns. None: detected.
        has_words: Whether a .txt or .tsv file may have a word and its tags per line.
        word_column: Of such a file, the column of the words, from 1 on. None: it is detected.
        tag_column: The column of the tags, from 1 on. None: it is detected.
    """

    encoding: str | None = None
    has_header: bool | None = None
    has_words: bool = False
    word_column: int | None = None
    tag_column: int | None = None


@dataclass(frozen=True)
class EncoderArguments:
    """The encoder that gets the adapter."""

    model_name: str = flag(
        aliases=["--model_name_or_path"],
        default=BERT,
        help=f"Folder, name on the Hub, or {MINILM!r}, an encoder in a package from PyPI.",
    )
    max_length: int = flag(
        aliases=["--max_seq_length"],
        default=128,
        help="Tokens per example; longer ones are truncated.",
    )
    max_train_samples: int | None = flag(
        default=None, help="Train on a random sample of this many examples."
    )
    evaluate: str | None = flag(
        default=None,
        help="Score this saved adapter or model (its folder, its run's, or a name on the Hub) "
        "instead of training.",
    )
    metric: list[str] | None = flag(
        default=None,
        help="Further scores of the validation split: names of evaluate's metrics on the Hub, "
        "or paths of scripts, such as f1 or my_metric.py. Their code is run.",
    )
    cache_states: str | None = flag(
        default=None,
        help="With --kind ladder: keep the encoder's hidden states in this folder, so that later "
        "epochs, and other tasks on the same texts, run without most of the encoder. Their "
        "size is printed before.",
    )

    def __post_init__(self) -> None:
        check_path("model_name", self.model_name)
        check_path("evaluate", self.evaluate)


@dataclass(frozen=True, kw_only=True)
class DataArguments(EncoderArguments):
    """The encoder and a data set, of your own or on the Hub."""

    _argument_group_name = "data"

    data: str = flag(
        aliases=["--train_file", "--dataset_name"],
        help="A folder with train, validation and test files (.csv, .xlsx, .json, .parquet, ...), "
        "one such file, a folder with a folder of texts for each class, or the name of a data set "
        "on the Hub.",
    )
    more_data: list[str] | None = flag(
        default=None, help="Further files of the training data, with the same columns."
    )
    data_config: str | None = flag(
        aliases=["--dataset_config_name"],
        default=None,
        help="Configuration of the data set on the Hub, if it has several.",
    )
    validation_file: str | None = flag(
        default=None, help="File of the validation split, if not in --data."
    )
    test_file: str | None = flag(default=None, help="File of the test split, if not in --data.")
    encoding: str | None = flag(
        default=None,
        help="Encoding of files with text, such as shift_jis; default: detected.",
    )
    no_header: bool | None = flag(
        default=None,
        help="The first row of .csv, .tsv and spreadsheet files is data; default: detected.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path("validation_file", self.validation_file)
        check_path("test_file", self.test_file)
        if isinstance(self.data, str):  # stream.py has a list
            check_path("data", self.data)
            if Path(self.data).name == LABEL_ISSUES_LIST:
                raise RecipeError(
                    f"{self.data} is a list of doubtful labels. Correct them in the "
                    "data that the run was trained on, and train on these again."
                )

    @property
    def read_options(self) -> ReadOptions:
        """How the files of the data are read."""
        has_header = None if self.no_header is None else not self.no_header
        return ReadOptions(self.encoding, has_header)

    def title_of(self, split: str) -> str:
        """Return what a split is called in messages; an evaluation trains on nothing."""
        return "data" if split == "train" and self.evaluate is not None else split

    @property
    def is_corrected(self) -> bool:
        """Whether the data are a table of label issues that a run has written."""
        path = Path(self.data).expanduser()
        return path.is_file() and path.name.partition(".")[0] == LABEL_ISSUES

    @property
    def name(self) -> str:
        """The name of the data: of a file without its extension, or of a folder."""
        path = Path(self.data).expanduser()
        if path.is_dir():
            name = path.resolve().name
        elif path.is_file():
            name = path.name.removesuffix(path.suffix).removesuffix(suffix_of(path))
            if self.is_corrected:
                name = f"{path.resolve().parent.name}_corrected"
        else:
            name = path.name
        return f"{name}_{self.data_config}" if self.data_config else name


@dataclass(frozen=True, kw_only=True)
class TextArguments(DataArguments):
    """A data set of texts or pairs of texts."""

    text_columns: list[str] | None = flag(
        aliases=["--text_column", "--text_column_name", "--text_column_names"],
        default=None,
        help="Column of the text, or two columns for pairs; default: detected by name.",
    )


@dataclass(frozen=True, kw_only=True)
class LabelArguments(DataArguments):
    """A data set whose labels may be checked."""

    check_labels: Literal["first", "last", "only", "no"] = flag(
        metadata={"nargs": "?", "const": "first"},
        default="last",
        help="When to list the training examples whose label is doubtful, in label_issues.csv: "
        "'last', up to 10,000 rows; 'first', as without a value; 'only': train nothing; or 'no'.",
    )


@dataclass(frozen=True)
class AdapterArguments:
    """The adapter; HoulsbyConfig documents each field."""

    _argument_group_name = "adapter"

    r: int = flag(default=64, help="Width of the bottleneck.")
    share_layers: int = flag(
        default=0,
        help="0: a separate bottleneck at each position; 1: one per layer; k: one per k "
        "consecutive layers.",
    )
    train_layer_norm: Literal["true", "false", "all"] = flag(
        default="true",
        help="Train the layer norms of the adapted layers, none, or all of the model's.",
    )
    activation: str = flag(default="gelu", help="Any activation that transformers knows by name.")
    layers: list[int] | None = flag(
        default=None, help="Layers to adapt, counted from 0; default: all."
    )
    kind: Literal["houlsby", "pfeiffer", "parallel", "ladder"] = flag(
        default="houlsby",
        help="What the bottleneck reads: the sub-layer's output, the normalized sum, or its input; "
        "ladder: a network of width r beside the encoder, which reads its hidden states.",
    )
    beneath: str | None = flag(
        default=None,
        help="With --kind ladder: a saved adapter, frozen, on whose hidden states the ladder is "
        "trained. Loading the ladder needs it as well.",
    )
    positions: list[str] | None = flag(
        default=None,
        help="Sub-layers to adapt: attention, feed_forward; default: those of the kind.",
    )
    extension: Literal["norm", "deep", "gated"] | None = flag(
        default=None,
        help="An extension of the bottleneck (section 3.6 of the paper): a layer norm, a second "
        "hidden layer, or a gate on the branch.",
    )
    dropout: float = flag(default=0.0, help="Dropout inside the bottleneck.")
    init_std: float = flag(default=0.01, help="Standard deviation of the initial projections.")
    init_adapter: str | None = flag(
        default=None, help="Start from the bottlenecks and norms of this adapter; the head is new."
    )

    def __post_init__(self) -> None:
        check_path("init_adapter", self.init_adapter)
        check_path("beneath", self.beneath)
        self.config()  # checks the options before anything is loaded

    def config(self, **fields: Any) -> HoulsbyConfig:
        """Return the PEFT configuration. Further fields, such as task_type, are passed on."""
        return HoulsbyConfig(
            r=self.r,
            share_layers=self.share_layers,
            train_layer_norm=_NORMS[self.train_layer_norm],
            layers_to_transform=self.layers,
            activation=self.activation,
            kind=self.kind,
            beneath=self.beneath,
            extension=self.extension,
            positions=self.positions,  # type: ignore[arg-type]  # None: those of the kind
            dropout=self.dropout,
            init_std=self.init_std,
            **fields,
        )


@dataclass(frozen=True)
class ClassifierArguments(AdapterArguments):
    """The adapter of a text classifier, which may also train the pooler, and have a larger head."""

    train_pooler: bool = flag(
        default=False,
        help="Also train BERT's pooler, as full fine-tuning does. With an encoder whose pooler "
        "was never pretrained, such as minilm, adapters then learn sooner and with every "
        "seed; minilm: true.",
    )

    head: Literal["linear", "two_layer"] = flag(
        default="linear",
        help="One linear layer on the pooled [CLS] vector or, for adapters, a hidden layer with "
        "tanh before it.",
    )

    def config(self, **fields: Any) -> HoulsbyConfig:
        """Return the PEFT configuration, with the pooler among the modules to train and save if
        asked for.
        """
        modules = [POOLER] if self.train_pooler else None
        return super().config(
            modules_to_save=modules, two_layer_head=self.head == "two_layer", **fields
        )


@dataclass(frozen=True)
class MethodArguments:
    """The method, and the options of those that are not adapters."""

    _argument_group_name = "method"

    method: Literal["houlsby", "full", "top_k", "layer_norm", "lora", "ia3", "linear"] = flag(
        default="houlsby",
        help="Train adapters, all weights, the top layers, the layer norms, PEFT's LoRA or IA3, "
        "or only the head. Every method trains the head.",
    )
    base_dtype: BaseDtype = flag(
        default=AUTO,
        help="Data type of the frozen weights; adapters and LoRA are trained in float32. 'auto' "
        "is bfloat16 if this machine multiplies matrices of the model's shape faster in it, which "
        "is measured once, else float32. Other methods, --fp16, DeepSpeed and FSDP need float32.",
    )
    top_k: int | None = flag(
        default=None,
        help="Number of layers that --method top_k trains, from the top; the embeddings stay "
        "frozen.",
    )
    lora_r: int = flag(default=8, help="Rank of LoRA's matrices.")
    lora_alpha: int = flag(default=16, help="LoRA's scale, which is divided by the rank.")
    lora_targets: list[str] | None = flag(
        default=None,
        help="Linear layers that LoRA adapts, by the end of their name; default: PEFT's choice.",
    )

    @property
    def adds_weights(self) -> bool:
        """Whether the method freezes the encoder and adds weights, rather than training the
        encoder's own.
        """
        return self.method in ("houlsby", "lora", "ia3")

    def check(self, adapter: AdapterArguments, training: RecipeTrainingArguments) -> None:
        """Raise RecipeError if an option would silently have no effect with this method, or its
        result is unusable.
        """
        for_adapters = {
            "--push_to_hub": training.push_to_hub,
            "--init_adapter": adapter.init_adapter,
            "--head two_layer": adapter.config().two_layer_head,
        }
        for option, value in for_adapters.items():
            if value and self.method != "houlsby":
                raise RecipeError(f"{option} needs --method houlsby, got {self.method}.")
        if self.base_dtype == "bfloat16" and not self.adds_weights:
            raise RecipeError(
                "--base_dtype bfloat16 is for methods that add weights to a frozen encoder, got "
                f"{self.method}. Leave it out; for speed, give --bf16."
            )
        if (self.method == "top_k") != (self.top_k is not None):
            raise RecipeError(
                f"--method top_k and --top_k need each other, got {self.method} and {self.top_k}."
            )
