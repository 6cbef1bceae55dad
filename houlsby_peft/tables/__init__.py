"""Tables in files: reading and writing them row by row, and the usual names of text columns."""

from .columns import LABEL_COLUMNS, check_number_of_texts, find_text_columns, is_title, match_column
from .content import (
    OTHER_NAMES,
    WRITTEN,
    find_format,
    open_content,
    read_text,
    without_compression,
)
from .reader import Row, TableReader
from .writer import TableWriter


__all__ = [
    "LABEL_COLUMNS",
    "OTHER_NAMES",
    "WRITTEN",
    "Row",
    "TableReader",
    "TableWriter",
    "check_number_of_texts",
    "find_format",
    "find_text_columns",
    "is_title",
    "match_column",
    "open_content",
    "read_text",
    "without_compression",
]
