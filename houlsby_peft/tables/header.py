"""The names of columns, of tables whose rows are lists of fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .columns import LABEL_COLUMNS, TEXT_COLUMNS
from .table import Cells, Table


_FEW_VALUES = 20  # of a column of classes
_OTHER_NAMES = ("id", "idx", "index", "date", "datum", "name", "answer", "split")
_USUAL_NAMES = {*sum(TEXT_COLUMNS, ()), *LABEL_COLUMNS, *_OTHER_NAMES}


def name_columns(table: Table, cells: Cells, has_header: bool | None) -> None:
    """Give the fields the names of the header, which may stand in the table again.

    Without a header, the columns are called column_1, column_2 and so on. Of columns with one name,
    the later ones get a number.
    """
    numbered = [(number, row) for number, row in enumerate(cells, start=1) if any(row)]
    if not numbered:
        return
    header = numbered[0][1]
    if has_header is None and _lacks_header([row for _, row in numbered[:1000]]):
        has_header = False
        table.notes.append(
            f"no header: the first row is {', '.join(map(repr, header))[:100]}. If these are the "
            "names of the columns, give --no_header false"
        )
    if has_header is False:
        columns = [f"column_{number + 1}" for number in range(len(header))]
    else:
        columns = _make_unique(table, [name.strip() for name in header])
        repeated = [number for number, row in numbered if row == header][1:]
        for number in repeated:
            table.notes.append(f"row {number} repeats the header and is left out")
        numbered = [(number, row) for number, row in numbered if row != header]
        # Qualtrics writes the questions and the identifiers of the columns below their names.
        if len(numbered) > 1 and any(cell.startswith('{"ImportId"') for cell in numbered[1][1]):
            table.notes.append("the rows below the header with questions and ids are left out")
            numbered = numbered[2:]
    table.columns = columns
    if columns.count("") > 1:  # the empty columns that a spreadsheet adds
        table.columns = list(filter(None, columns))
    for number, row in numbered:
        by_name = dict(zip(columns, row, strict=True))
        table.numbers.append(number)
        table.rows.append({name: by_name[name] for name in table.columns})


def _make_unique(table: Table, names: Sequence[str]) -> list[str]:
    counts: Counter[str] = Counter()
    columns, repeated = [], []
    for name in names:
        counts[name] += bool(name)
        column = name
        if counts[name] > 1:
            column = f"{name}_{counts[name]}"
            repeated.append(column)
        columns.append(column)
    if repeated:
        more = ", ..." * (len(repeated) > 5)
        table.notes.append(f"columns of one name are called {', '.join(repeated[:5])}{more}")
    return columns


def _lacks_header(records: Cells) -> bool:
    """Return whether the first record is data like the others."""
    if len(records) < 4:
        return False
    header, *rows = records
    if any(name.strip().lower() in _USUAL_NAMES for name in header):
        return False
    for name, *values in zip(header, *rows, strict=False):
        if not name.strip():
            continue
        is_class = name in values and len(set(values)) <= min(_FEW_VALUES, len(values) / 2)
        if is_class or (_is_number(name) and all(map(_is_number, values))):
            return True
    return False


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "."))
    except ValueError:
        return False
    return True
