"""Exports of annotation tools: Label Studio, Prodigy and doccano, and SQuAD's own files.

A tool is known by a sign in all rows that no table has. What is read has the columns of any other
table: `text` with `label`, a class or a list of classes, or with `spans`, the marked parts of a
text. A span is an object with the characters `start` and `end`, and its `label`.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
from datasets import Dataset

from houlsby_peft.tables import LABEL_COLUMNS
from run.edge import RecipeError, log
from run.run import WHERE


Row = dict[str, Any]
Span = dict[str, Any]


def read_export(rows: Sequence[Row]) -> tuple[str, list[Row]] | None:
    """Return the name of the tool that has exported some rows, and their texts with labels.

    None: no known tool has.
    """
    tool: str | None = None
    read_row: Callable[[Row], list[Row]] | None = None
    sign = frozenset[str]()
    column = _doccano_column(rows)
    if column is not None:
        tool, read_row = "doccano", partial(_read_doccano, column=column)
    for name, (names, read) in _TOOLS.items():
        if tool is None and any(names <= row.keys() for row in rows):
            tool, read_row, sign = name, read, names
    if tool is None or read_row is None:
        return None
    examples = []
    for row in rows:
        try:
            if not sign <= row.keys():
                raise KeyError(*sorted(sign - row.keys()))
            examples += [{WHERE: row[WHERE], **example} for example in read_row(row)]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise RecipeError(
                f"{row[WHERE]} is not as {tool} exports it: {type(error).__name__} {error}. "
                "Correct it, or leave it out."
            ) from error
    if read_row is _read_label_studio:
        disputed = sum(len(_count_answers(row)) > 1 for row in rows)
        if disputed:
            log(f"note: the annotations of {disputed:,} texts differ; the most frequent counts")
    return tool, examples


def as_span(start: Any, end: Any, label: Any) -> Span:
    """Return a span, whose ends may be text, as "12"."""
    return {"start": int(start), "end": min(int(end), 2**31), "label": str(label)}


# Label Studio: a task has `data`, and `annotations` with results. JSON-MIN and CSV have them side
# by side.


def _read_label_studio(row: Row) -> list[Row]:
    """Return the text of a task with what most of its annotations say."""
    example = {name: value for name, value in row["data"].items() if isinstance(value, str)}
    counts = _count_answers(row)
    if not counts:
        return [example | {"label": None}]
    return [example | json.loads(counts.most_common(1)[0][0])]


def _count_answers(row: Row) -> Counter[str]:
    """Return what the annotations of a task say that were not cancelled, as JSON, and how often."""
    answers: Counter[str] = Counter()
    for annotation in row["annotations"]:
        if not annotation.get("was_cancelled"):
            answers[json.dumps(_read_results(annotation["result"]), sort_keys=True)] += 1
    return answers


def _read_results(results: Sequence[Mapping[str, Any]]) -> Row:
    """Return the labels of an annotation: marked parts, classes, or a number of stars.

    What has no label, such as a comment on a part, is left out.
    """
    answer: Row = {}
    for result in results:
        value = result.get("value", {})
        if "hypertextlabels" in value:
            raise ValueError("marked parts of HTML are not read; export them as plain text")
        if "labels" in value:
            answer.setdefault("spans", []).extend(_spans_of(value))
        elif "choices" in value:
            answer.setdefault("label", []).extend(_list(value["choices"]))
        elif "rating" in value:
            answer["label"] = value["rating"]
    return answer or {"label": []}


def _read_label_studio_min(row: Row) -> list[Row]:
    example: Row = {}
    for name, value in row.items():
        if isinstance(value, str) and value.startswith(('{"choices"', '[{"start"')):
            value = json.loads(value)  # in CSV
        if isinstance(value, Mapping) and "choices" in value:
            example["label"] = _list(value["choices"])
        elif isinstance(value, list) and value and "start" in value[0]:
            example["spans"] = [span for part in value for span in _spans_of(part)]
        else:
            example[name] = value
    return [example]


def _spans_of(part: Mapping[str, Any]) -> list[Span]:
    return [as_span(part["start"], part["end"], label) for label in _list(part.get("labels", []))]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list of labels, got {value!r}")
    return value


# Prodigy: `answer` says whether the annotator has accepted the labels; each row has hashes.


def _read_prodigy(row: Row) -> list[Row]:
    """Return the text of an accepted example; a rejected label is the class "not" and the label."""
    is_accepted = row["answer"] == "accept"
    if row["answer"] == "ignore":
        return []
    if "label" in row:
        label = row["label"] if is_accepted else f"not {row['label']}"
        return [{"text": row["text"], "label": label}]
    if not is_accepted:
        return []
    if "accept" in row:
        return [{"text": row["text"], "label": row["accept"]}]
    spans = [as_span(span["start"], span["end"], span["label"]) for span in row.get("spans", [])]
    return [{"text": row["text"], "spans": spans}]


# doccano: `label`, or in other versions `labels` or `entities`, has [start, end, label], or objects
# with offsets. Where all are empty, nothing tells it from a table.


def _doccano_column(rows: Sequence[Row]) -> str | None:
    """Return the column in which all rows have lists of marked parts, and some of them do."""
    for name in ("entities", "labels", "label"):
        columns = [row.get(name) for row in rows]
        parts = [part for value in columns if isinstance(value, list) for part in value]
        are_lists = all(isinstance(value, list) for value in columns)
        if parts and are_lists and all(map(_is_marked_part, parts)):
            return name
    return None


def _is_marked_part(part: Any) -> bool:
    if isinstance(part, Mapping):
        return "start_offset" in part
    return isinstance(part, list) and len(part) == 3 and isinstance(part[2], str)


def _read_doccano(row: Row, column: str) -> list[Row]:
    spans = []
    for part in row[column]:
        if isinstance(part, Mapping):
            part = (part["start_offset"], part["end_offset"], part["label"])
        spans.append(as_span(*part))
    return [{"text": row["text" if "text" in row else "data"], "spans": spans}]


# SQuAD's own files: articles with paragraphs, which have questions.


def _read_squad(row: Row) -> list[Row]:
    examples = []
    for paragraph in row["paragraphs"]:
        for question in paragraph["qas"]:
            examples.append(
                {
                    "id": question["id"],
                    "title": row.get("title"),
                    "context": paragraph["context"],
                    "question": question["question"],
                    "answers": question.get("answers") or [],
                    WHERE: f"question {question['id']}",
                }
            )
    return examples


# The columns by which an export of a tool is known, and what reads its rows.
_TOOLS: dict[str, tuple[frozenset[str], Callable[[Row], list[Row]]]] = {
    "Label Studio": (frozenset({"data", "annotations"}), _read_label_studio),
    "Label Studio (JSON-MIN)": (frozenset({"annotation_id", "annotator"}), _read_label_studio_min),
    "Prodigy": (frozenset({"_input_hash", "_task_hash", "answer"}), _read_prodigy),
    "SQuAD": (frozenset({"paragraphs"}), _read_squad),
}


# Rows of another form, whose texts or labels are inside of objects.

# The columns of the forms that are read.
_FORMS = {
    "a table": {"text", "label"},
    "Label Studio's export": {"id", "data", "annotations"},
    "Prodigy's export": {"text", "label", "spans", "answer", "_input_hash", "_task_hash"},
    "doccano's export": {"id", "text", "label", "entities"},
    "SQuAD's file": {"title", "paragraphs"},
}
_SAMPLED = 20  # rows


def suggest_table(data: Dataset) -> str:
    """Return what to add to an error about columns: the nearest form that is read, and a line of
    pandas that makes a table; "" if the rows have no objects.
    """
    rows = data.select(range(min(_SAMPLED, len(data)))).to_list()
    lists = [name for name in data.column_names if _holds_objects(rows[0][name])]
    if not lists and not any(isinstance(value, dict) for value in rows[0].values()):
        return ""
    columns = {*rows[0]} - {WHERE}
    shares = {form: len(names & columns) / len(names | columns) for form, names in _FORMS.items()}
    nearest = max(shares, key=shares.__getitem__)
    code, frame = "pandas.read_json(FILE, lines=FILE.endswith('l'))", pd.DataFrame(rows)
    if lists:  # a row for each object
        code, frame = f"{code}.explode({lists[0]!r})", frame.explode(lists[0])
    table = pd.json_normalize(frame.drop(columns=WHERE).to_dict("records"))
    names: dict[str, str] = {}
    for name in sorted(table, key=lambda name: -table[name].astype(str).str.len().mean()):
        parts = {*name.lower().split(".")}
        role = "label" if parts & {*LABEL_COLUMNS} else "text"
        if role not in names.values() and isinstance(table[name].iloc[0], str):
            names[name] = role
    return (
        f" The nearest form that is read is {nearest}, with {', '.join(sorted(_FORMS[nearest]))}. "
        f"To make a table: pandas.json_normalize({code}.to_dict('records'))"
        f".rename(columns={names}).to_csv('table.csv')"
    )


def _holds_objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)
