"""Tables in JSON, of the forms in which people have them."""

from __future__ import annotations

import json
import re
from typing import Any

from .table import Row


_NO_BLANK = re.compile(r"\S")


def _read_values(text: str) -> list[Any]:
    """Return the JSON values in a text, one after the other, such as one per line."""
    decoder, values, position = json.JSONDecoder(), [], 0
    while begin := _NO_BLANK.search(text, position):
        position = begin.start()
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {error.lineno}: {error.msg}") from error
        values.append(value)
    return values


def rows_of_json(text: str, are_lines: bool) -> list[Row]:
    """Return the objects in a JSON text: one per line, a list, an object with one such list
    (`{"data": [...]}`), or an object of columns, as pandas writes it.

    Several lists of objects, or of pairs of a text and a label, are splits: their rows have the
    list's name in the column `split`.
    """
    content = _read_values(text)
    if len(content) == 1 and (not are_lines or isinstance(content[0], list)):
        [content] = content
    if isinstance(content, dict):
        content = _rows_of_object(content)
    if not isinstance(content, list):
        raise ValueError("must hold a list of objects, such as [{...}, {...}]")
    return list(map(_object, content))


def _rows_of_object(content: Row) -> list[Any]:
    """Return the rows in the lists of an object; if it has other values, it is a row itself."""
    lists = [name for name, value in content.items() if _are_objects(value)]
    if "columns" in content and "data" in content:
        return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
    if len(lists) == 1:
        return list(content[lists[0]])
    if lists == list(content):
        return [{**_object(row), "split": name} for name in lists for row in content[name]]
    columns = []
    for value in content.values():
        if not isinstance(value, (list, dict)):
            return [content]
        columns.append(list(value.values()) if isinstance(value, dict) else value)
    return [dict(zip(content, row, strict=True)) for row in zip(*columns, strict=True)]


def _are_objects(value: Any) -> bool:
    """Return whether a value is a list of objects, or of pairs of a text and a label."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(row, dict) or _is_pair(row) for row in value)


def _is_pair(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 2 and isinstance(row[0], str)


def _object(row: Any) -> Row:
    """Return an object, or a pair of a text and its label as one; spaCy's pairs have an object with
    `entities`.
    """
    if isinstance(row, dict):
        return row
    if not _is_pair(row):
        raise ValueError(f"must be a JSON object, got {row}")
    text, label = row
    return {"text": text, **label} if isinstance(label, dict) else {"text": text, "label": label}
