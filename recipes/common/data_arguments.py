"""The arguments of the data and of the encoder. None is changed after it was read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.flags import check_path, flag
from houlsby_peft.tables import without_compression


BERT, MINILM = "google-bert/bert-base-uncased", "minilm"


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


# RUF009 takes a list type for a mutable default, which `flag` is not.
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
    metric: list[str] | None = flag(  # noqa: RUF009
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

    @property
    def read_options(self) -> ReadOptions:
        """How the files of the data are read."""
        has_header = None if self.no_header is None else not self.no_header
        return ReadOptions(self.encoding, has_header)

    @property
    def name(self) -> str:
        """The name of the data: of a file without its extension, or of a folder."""
        path = Path(self.data).expanduser()
        if path.is_dir():
            name = path.resolve().name
        elif path.is_file():
            name = without_compression(path).stem
        else:
            name = path.name
        return f"{name}_{self.data_config}" if self.data_config else name


@dataclass(frozen=True, kw_only=True)
class TextArguments(DataArguments):
    """A data set of texts or pairs of texts."""

    text_columns: list[str] | None = flag(  # noqa: RUF009
        aliases=["--text_column", "--text_column_name", "--text_column_names"],
        default=None,
        help="Column of the text, or two columns for pairs; default: detected by name.",
    )


@dataclass(frozen=True, kw_only=True)
class LabelArguments(DataArguments):
    """A data set whose labels may be checked."""

    check_labels: Literal["first", "only"] | None = flag(
        metadata={"nargs": "?", "const": "first"},
        default=None,
        help="First list the training examples whose label is probably wrong, in label_issues.csv; "
        "'only': train nothing.",
    )
