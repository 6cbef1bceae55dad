"""What is read from the file of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import AdapterError, shortened


Row = dict[str, Any]
Cells = list[list[str]]


class Cell(str):
    """The text of a cell in a spreadsheet that has a number, a date or a truth value.

    Attributes:
        value: What the cell has, of which a whole number has no decimal point.
    """

    __slots__ = ("value",)
    value: Any

    def __new__(cls, value: Any) -> Cell:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        cell = super().__new__(cls, value)
        cell.value = value
        return cell


# The formats by their usual extensions, in the order in which one of several files of a name is
# preferred.
SEPARATED, SHEETS = {".csv": ",", ".tsv": "\t"}, (".xlsx", ".xlsm", ".xls", ".ods")
READ = (".parquet", *SEPARATED, ".jsonl", ".json", *SHEETS, ".txt")
OTHER_NAMES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl", ".tab": ".tsv", ".pq": ".parquet"}


@dataclass
class Table:
    """A table in a file.

    Attributes:
        path: The file.
        format: Its format as its usual extension, one of READ, by its content or else its name.
        columns: The names of the columns. Several columns without a name are left out.
        rows: The rows by the names of the columns.
        numbers: The number of each row: that of a spreadsheet, whose header is row 1, or, without
            a header, from 1 on.
        separator: What separates the values.
        encoding: The encoding of a text.
        notes: What the user should know of how the table was read.
    """

    path: Path
    format: str
    columns: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    separator: str = ","
    encoding: str = "utf-8"
    notes: list[str] = field(default_factory=list)

    def nested_columns(self) -> list[str]:
        """Return the columns with lists, objects or bytes, which cannot be read as texts."""
        nested = []
        for column in self.columns:
            if any(isinstance(row.get(column), (list, dict, bytes)) for row in self.rows):
                nested.append(column)
        return nested

    def check_texts(self, columns: Sequence[str]) -> None:
        """Refuse to read texts from nested columns."""
        for column in self.nested_columns():
            if column in columns:
                raise AdapterError(
                    f"The column {column!r} of {self.path} must hold text in each row."
                )

    def check_is_flat(self) -> None:
        """Refuse nested columns, in which the texts may be, as in an annotation tool's export."""
        nested = self.nested_columns()
        if nested:
            raise AdapterError(
                "predict needs a column of texts, which --text_columns names; "
                f"{self.path} has {shortened(', '.join(self.columns))}, with lists or objects in "
                f"{shortened(', '.join(nested))}. houlsby-peft evaluate reads the export of an "
                "annotation tool and SQuAD's file as they are. To make a table of objects: "
                "pandas.json_normalize(pandas.read_json(FILE, lines=FILE.endswith('l'))"
                ".to_dict('records')).to_csv('table.csv')"
            )
