"""Tables as JSON: an object per line, a list of objects, or an object of columns."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import AdapterError, shortened
from .content import open_content, read_text


NumberedRow = tuple[int, dict[str, Any]]


def read_json_lines(path: Path, encoding: str) -> Iterator[NumberedRow]:
    """Yield the object on each line, with the number of the line."""
    number = 0
    try:
        # A line may hold the other characters that Python takes for the end of a line.
        with io.TextIOWrapper(open_content(path), encoding=encoding, newline="\n") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield number, _object(json.loads(text))
    except UnicodeDecodeError:
        read_text(path, encoding)  # which names the line
        raise
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}, line {number}: {shortened(str(error))}.") from error


def read_json(path: Path, encoding: str) -> Iterator[NumberedRow]:
    """Yield the objects of a JSON file with their numbers from 1 on.

    The file is a list of objects, an object with one such list (`{"data": [...]}`), an object of
    columns as pandas writes it, or has an object on each line.
    """
    text = read_text(path, encoding)
    try:
        rows = _find_rows(json.loads(text))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from read_json_lines(path, encoding)
            return
        raise AdapterError(f"{path}: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: {shortened(str(error))}.") from error
    yield from enumerate(rows, start=1)


def _find_rows(content: Any) -> list[dict[str, Any]]:
    """Return the rows of the table that a JSON value holds."""
    if isinstance(content, list):
        return list(map(_object, content))
    values = list(content.values()) if isinstance(content, dict) else []
    lists_of_objects = list(filter(_is_list_of_objects, values))
    if len(lists_of_objects) == 1:
        return list(map(_object, lists_of_objects[0]))
    columns = list(map(_values_of, values))
    if not columns or None in columns:
        raise ValueError("must hold a list of objects, such as [{...}, {...}]")
    if {"columns", "data"} <= content.keys():
        return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
    # Lists of unlike length end in zip's own error, a ValueError.
    return [dict(zip(content, row, strict=True)) for row in zip(*columns, strict=True)]


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _values_of(column: Any) -> list[Any] | None:
    """Return the values of a column: a list, or an object by index; None for other values."""
    if isinstance(column, Mapping):
        return list(column.values())
    return column if isinstance(column, list) else None


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {value}")
    return value
