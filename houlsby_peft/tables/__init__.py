"""Tables in files: what is read from them and written to them, and the usual names of columns."""

from .columns import LABEL_COLUMNS, check_number_of_texts, find_text_columns, is_title, match_column
from .content import read_content, read_text, suffix_of
from .reader import read_table
from .table import OTHER_NAMES, READ, Row, Table
from .writer import WRITTEN, check_written, defused, write_table


__all__ = [
    "LABEL_COLUMNS",
    "OTHER_NAMES",
    "READ",
    "WRITTEN",
    "Row",
    "Table",
    "check_number_of_texts",
    "check_written",
    "defused",
    "find_text_columns",
    "is_title",
    "match_column",
    "read_content",
    "read_table",
    "read_text",
    "suffix_of",
    "write_table",
]
