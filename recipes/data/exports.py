"""Exports of annotation tools: Label Studio, Prodigy and doccano, and SQuAD's own files.

What is read from them has the columns of any other table: `text` with `label`, a class or a list
of classes, or with `spans`, the marked parts of a text. A span is an object with the characters
`start` and `end`, and its `label`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from run.edge import RecipeError
from run.run import WHERE


Row = dict[str, Any]
Span = dict[str, Any]

# What a text is called in the tasks of Label Studio and in doccano's older exports.
_TEXTS = ("text", "data")


def read_export(rows: Sequence[Row]) -> tuple[str, list[Row]] | None:
    """Return the name of the tool that has exported some rows, and their texts with labels.

    None: no known tool has.
    """
    for tool, is_its_row, read_row in _TOOLS:
        if any(is_its_row(row) for row in rows[:_SAMPLED]):
            return tool, list(_read_rows(rows, read_row))
    return None


def _read_rows(rows: Sequence[Row], read_row: Callable[[Row], list[Row]]) -> Iterator[Row]:
    for row in rows:
        try:
            examples = read_row(row)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise RecipeError(
                f"{row[WHERE]} is not like the others of this export: it lacks {error}. Correct "
                "it, or leave it out."
            ) from error
        for example in examples:
            yield {**example, WHERE: row[WHERE]}


# Label Studio: a task has `data`, and `annotations` with results. JSON-MIN has them side by side.


def _is_label_studio(row: Row) -> bool:
    return isinstance(row.get("data"), Mapping) and "annotations" in row


def _read_label_studio(row: Row) -> list[Row]:
    """Return the text of a task with its first annotation that has not been cancelled."""
    example = {name: value for name, value in row["data"].items() if isinstance(value, str)}
    for annotation in row["annotations"]:
        if not annotation.get("was_cancelled"):
            return [example | _read_results(annotation["result"])]
    return [example | {"label": None}]


def _read_results(results: Sequence[Mapping[str, Any]]) -> Row:
    """Return the labels of an annotation: marked parts, classes, or a number of stars."""
    spans: list[Span] = []
    classes: list[str] = []
    for result in results:
        value = result.get("value", {})
        if "start" in value:
            spans += _spans_of(value, value["labels"])
        elif "choices" in value:
            classes += value["choices"]
        elif "rating" in value:
            return {"label": value["rating"]}
    if spans:
        return {"spans": spans}
    return {"label": classes}


def _is_label_studio_min(row: Row) -> bool:
    return "annotation_id" in row and "annotator" in row


def _read_label_studio_min(row: Row) -> list[Row]:
    example: Row = {}
    for name, value in row.items():
        if _is_choices(value):
            example["label"] = value["choices"]
        elif _are_spans(value):
            example["spans"] = [span for part in value for span in _spans_of(part, part["labels"])]
        else:
            example[name] = value
    return [example]


def _is_choices(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("choices"), list)


def _are_spans(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and "labels" in value[0] and "start" in value[0]


def _spans_of(part: Mapping[str, Any], labels: Sequence[str]) -> list[Span]:
    return [{"start": part["start"], "end": part["end"], "label": label} for label in labels]


# Prodigy: `answer` says whether the annotator has accepted the labels.


def _is_prodigy(row: Row) -> bool:
    return row.get("answer") in ("accept", "reject", "ignore") and "text" in row


def _read_prodigy(row: Row) -> list[Row]:
    """Return the text of an accepted example; a rejected label is the class "not" and the label."""
    if row["answer"] == "ignore":
        return []
    if "spans" in row and "label" not in row and "accept" not in row:
        spans = []
        for span in row["spans"]:
            spans.append({name: span[name] for name in ("start", "end", "label")})
        return [{"text": row["text"], "spans": spans}] if row["answer"] == "accept" else []
    if "accept" in row:
        return [{"text": row["text"], "label": row["accept"]}] if row["answer"] == "accept" else []
    label = row["label"] if row["answer"] == "accept" else f"not {row['label']}"
    return [{"text": row["text"], "label": label}]


# doccano: `label` has [start, end, label], `entities` has objects with offsets.


def _is_doccano_spans(row: Row) -> bool:
    return bool(_doccano_spans(row))


def _read_doccano_spans(row: Row) -> list[Row]:
    (text,) = [row[name] for name in _TEXTS if name in row]
    return [{"text": text, "spans": _doccano_spans(row)}]


def _doccano_spans(row: Row) -> list[Span]:
    spans = []
    parts = row.get("entities") or row.get("labels") or row.get("label")
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, Mapping) and "start_offset" in part:
            labels = [part["label"]]
            spans += _spans_of({"start": part["start_offset"], "end": part["end_offset"]}, labels)
        elif isinstance(part, list) and len(part) == 3 and isinstance(part[0], int):
            start, end, label = part
            spans.append({"start": start, "end": end, "label": label})
    return spans


# SQuAD's own files: articles with paragraphs, which have questions.


def _is_squad(row: Row) -> bool:
    return isinstance(row.get("paragraphs"), list)


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
                }
            )
    return examples


_SAMPLED = 100  # rows by which a tool is recognized
_TOOLS: tuple[tuple[str, Callable[[Row], bool], Callable[[Row], list[Row]]], ...] = (
    ("Label Studio", _is_label_studio, _read_label_studio),
    ("Label Studio (JSON-MIN)", _is_label_studio_min, _read_label_studio_min),
    ("Prodigy", _is_prodigy, _read_prodigy),
    ("doccano", _is_doccano_spans, _read_doccano_spans),
    ("SQuAD", _is_squad, _read_squad),
)
