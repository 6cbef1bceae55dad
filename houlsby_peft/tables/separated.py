"""Separated values: which separator and which quotation marks a file has, and its records."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import AdapterError, shortened
from .content import open_content, read_text


# What stands in a record, with the number of its line.
Record = tuple[int, list[str]]

_SAMPLED = 1000  # lines by which the separator is found
_LONGEST_FIELD = 2**31 - 1
_QUOTED = re.compile(r'(^|\t)"[^\t]*""[^\t]*"(\t|$)')


class SeparatedFile:
    """The records of a .csv or .tsv file.

    Args:
        path: The file.
        encoding: Its encoding.
        usual_separator: The separator that its extension tells.

    Attributes:
        separator: The one of , ; tab | that divides most lines into as many fields as the first.
        notes: What the user should know of its quotation marks.
    """

    def __init__(self, path: Path, encoding: str, usual_separator: str) -> None:
        self.path, self.encoding = path, encoding
        self.notes: list[str] = []
        with self._open() as file:
            lines = list(_lines_of(file, _SAMPLED))
        self.separator = _find_separator(lines, usual_separator)
        self._dialect = _find_dialect(lines, self.separator, usual_separator)
        self._check_quotes()

    def _open(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(open_content(self.path), encoding=self.encoding, newline="")

    def _check_quotes(self) -> None:
        """Read the file once; let backslashes escape quotation marks if it cannot be read else."""
        try:
            self._note_long_records()
        except AdapterError:
            if not self._has_escaped_quotes():
                raise
            self.notes.clear()
            self._dialect |= {"escapechar": "\\", "doublequote": False}
            self._note_long_records()

    def _has_escaped_quotes(self) -> bool:
        with open_content(self.path) as file:
            return any(b'\\"' in line for line in file)

    def _note_long_records(self) -> None:
        """Note records of several lines, each of which looks like a record of its own."""
        width = 0
        for first_line, last_line, fields, text in self._read():
            width = width or len(fields)
            lines = text.splitlines()
            separators = [line.count(self.separator) for line in lines]
            if len(lines) > 1 and width > 1 and set(separators) == {width - 1}:
                self.notes.append(
                    f"lines {first_line} to {last_line} are one row, as quotation marks enclose "
                    "them. If they are several, write each quotation mark twice, or save the table "
                    "again with a spreadsheet"
                )

    def records(self) -> Iterator[Record]:
        """Yield the fields of each record that is not empty, with the line on which it begins."""
        for line, _, fields, _ in self._read():
            yield line, fields

    def _read(self) -> Iterator[tuple[int, int, list[str], str]]:
        """Yield the first and the last line of each record, its fields, and its text."""
        csv.field_size_limit(_LONGEST_FIELD)
        line, text = 1, ""

        def read_lines(file: io.TextIOWrapper) -> Iterator[str]:
            nonlocal text
            for text_of_line in file:
                text += text_of_line
                yield text_of_line

        with self._open() as file:
            reader = csv.reader(read_lines(file), strict=True, **self._dialect)
            try:
                for fields in reader:
                    if fields:  # an empty line has none
                        yield line, reader.line_num, fields, text
                    line, text = reader.line_num + 1, ""
            except UnicodeDecodeError:
                read_text(self.path, self.encoding)  # which names the line
                raise
            except csv.Error as error:
                raise AdapterError(
                    f"{self.path}, line {line}: its quotation marks do not match "
                    f"({shortened(str(error))}). Put a field that holds some between quotation "
                    "marks, and write those inside it twice."
                ) from error


def _lines_of(file: io.TextIOWrapper, count: int) -> Iterator[str]:
    """Yield the first lines of a file as far as they can be decoded; reading all tells the rest."""
    try:
        yield from islice(file, count)
    except UnicodeDecodeError:
        return


def _find_separator(lines: Sequence[str], usual: str) -> str:
    # The usual separator comes first, because the first of equals is taken.
    separators = (usual, ",", ";", "\t", "|")
    return max(separators, key=lambda separator: _share_like_first(lines, separator))


def _share_like_first(lines: Sequence[str], separator: str) -> float:
    """Return the share of lines that a separator divides into as many fields as the first."""
    counts = [len(fields) for fields in csv.reader(lines, delimiter=separator) if fields]
    if not counts or counts[0] == 1:
        return 0.0
    return counts.count(counts[0]) / len(counts)


def _find_dialect(lines: Sequence[str], separator: str, usual: str) -> dict[str, Any]:
    header: list[str] = []
    for fields in csv.reader(lines, delimiter=separator):
        if fields:
            header = fields
            break
    quoting = csv.QUOTE_MINIMAL
    if separator == usual == "\t" and not _has_quotes(lines, len(header)):
        quoting = csv.QUOTE_NONE
    # As in "id, text, label".
    begin_with_blanks = all(name.startswith(" ") for name in header[1:])
    return {
        "delimiter": separator,
        "quoting": quoting,
        "skipinitialspace": len(header) > 1 and begin_with_blanks,
    }


def _has_quotes(lines: Sequence[str], columns: int) -> bool:
    """Return whether quotation marks quote fields of a table that is separated by tabs.

    In many such tables, as in GLUE's own, a quotation mark is part of the text.
    """
    if lines and lines[0].startswith('"'):
        return True
    for line in lines:
        if not line.strip("\r\n"):
            continue
        if line.count("\t") != columns - 1 or _QUOTED.search(line.rstrip()):
            return True
    return False
