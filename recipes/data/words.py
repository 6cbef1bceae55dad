"""Words and their tags from a data set: lists of words, lists as text, texts with marked spans."""

import re
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from datasets import Dataset, List, Value

from data.data import (
    check_columns,
    columns_of,
    find_column,
    keep_rows,
    locate,
    locate_first,
    rows_of,
)
from data.exports import as_span
from data.label_column import LabelColumn, declared_classes, read_list
from data.tag_dialects import as_iob2, is_iob
from houlsby_peft.tables import match_column
from run.edge import RecipeError, log
from run.run import WHERE


WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("tags", "ner_tags", "pos_tags", "upos", "labels")
_SPANS = "spans"
# Usual names, in lower case, of the columns of a table with a word per row.
_COLUMNS_OF_WORDS = (
    ("sentence #", "sentence_id", "sentence id", "sent_id", "sentence"),
    ("word", "token"),
    ("tag", "ner", "ner_tag", "label"),
)
_WORD = re.compile(r"\w+|[^\w\s]")
_LIST = List(Value("string"))


def read_words(
    splits: Mapping[str, Dataset],
    word_column: str | None = None,
    tag_column: str | None = None,
    tag_names: Sequence[str] | None = None,
    title_of: Callable[[str], str] = str,
) -> tuple[dict[str, Dataset], tuple[str, ...]]:
    """Return the splits with the `words` of each sentence and their `tags`, which are names.

    Return also the names of all tags, if the data set declares them. Tags that mark entities are
    in IOB2.

    Args:
        splits: The splits.
        word_column: The column of the words. None: it has a usual name.
        tag_column: The column of the tags. None: it has a usual name.
        tag_names: The names of tags that are numbers.
        title_of: Returns what a split is called in messages.
    """
    splits = {name: _gather_words(split, title_of(name)) for name, split in splits.items()}
    train = splits["train"]
    if _SPANS in columns_of(train):
        return {name: _read_spans(split, title_of(name)) for name, split in splits.items()}, ()
    columns = (
        find_column(train, word_column, WORD_COLUMNS, "--word_column"),
        find_column(train, tag_column, TAG_COLUMNS, "--tag_column"),
    )
    declared = declared_classes(train, columns[1])
    words = {}
    for name, split in splits.items():
        words[name] = _read_lists(split, title_of(name), columns, tag_names)
    numbers_of_tags = {tag for tags in words["train"]["tags"] for tag in tags}
    if not declared and not tag_names and all(map(str.isdecimal, numbers_of_tags)):
        log("note: the tags are numbers; give their names with --tag_names")
    return words, declared if is_iob(declared) else ()


def _gather_words(data: Dataset, split: str) -> Dataset:
    """Return the sentences of a table with a word per row; other data as they are.

    A row without the number or name of its sentence belongs to the sentence before.
    """
    columns = columns_of(data)
    names = []
    for usual_names in _COLUMNS_OF_WORDS:
        matches = [match_column(columns, name) for name in usual_names]
        names += list(filter(None, matches))[:1]
    if len(names) < len(_COLUMNS_OF_WORDS):
        return data
    rows: list[dict[str, Any]] = []
    last_sentence = None
    for number, (sentence, word, tag) in enumerate(rows_of(data, names)):
        if not rows or sentence not in (None, "", last_sentence):
            rows.append({"tokens": [], "tags": [], WHERE: locate(data, number)})
            last_sentence = sentence
        if tag in (None, ""):
            raise RecipeError(
                f"{split}: each word must have a tag; {locate(data, number)} has none for "
                f"{str(word)[:100]!r}. Correct it, or leave the row out."
            )
        rows[-1]["tokens"].append(str(word))
        rows[-1]["tags"].append(str(tag))
    log(f"{len(rows):,} sentences, by the column {names[0]!r}")
    return Dataset.from_list(rows)


def _read_lists(
    data: Dataset, name: str, columns: tuple[str, str], tag_names: Sequence[str] | None
) -> Dataset:
    """Return the lists of words and of tags of the split `name`."""
    check_columns(data, name, (), columns)
    for column in columns:
        if data.features[column] == Value("string"):  # as a .csv file has lists
            lists = []
            for value in data[column]:
                items = read_list(value)
                lists.append(value.split() if items is None else list(map(str, items)))
            data = data.remove_columns(column).add_column(column, lists, feature=_LIST)
    words = data[columns[0]]
    tags = LabelColumn((columns[1],)).read(data, name)
    named = []
    for row, (words_of_row, tags_of_row) in enumerate(zip(words, tags, strict=True)):
        tags_there = tags_of_row if isinstance(tags_of_row, tuple) else ()
        is_list = isinstance(words_of_row, list) and None not in words_of_row
        if not is_list or tags_there != tags_of_row or len(words_of_row) != len(tags_there):
            raise RecipeError(
                f"{name}: each row must have a list of words and one of as many tags; "
                f"{locate(data, row)} has {str(words_of_row)[:100]} and {str(tags_of_row)[:100]}. "
                "Correct it, or leave the row out."
            )
        named.append(_name_tags(tags_there, tag_names))
    return _make_data(data, list(words), as_iob2(named, name))


def _name_tags(tags: Sequence[str], names: Sequence[str] | None) -> list[str]:
    """Return tags by their names, if they are numbers."""
    if not names:
        return list(tags)
    named = []
    for tag in tags:
        if tag.isdecimal() and int(tag) >= len(names):
            raise RecipeError(
                f"--tag_names must name all tags; got {len(names)} names, and a tag {tag}."
            )
        named.append(names[int(tag)] if tag.isdecimal() else tag)
    return named


def _make_data(data: Dataset, words: list[list[str]], tags: list[list[str]]) -> Dataset:
    read = Dataset.from_dict({"words": words, "tags": tags})
    read = read.cast_column("words", _LIST).cast_column("tags", _LIST)
    if WHERE in data.column_names:
        read = read.add_column(WHERE, list(data[WHERE]))
    return read


def _read_spans(data: Dataset, name: str) -> Dataset:
    """Return the words of texts, of which marked spans are entities.

    A span that begins or ends within a word marks the whole word. Of spans that overlap or share a
    word, the first counts; those that mark no word, or end beyond their text, are left out.
    """
    check_columns(data, name, (), ("text", _SPANS))
    rows = [row for row, text in enumerate(data["text"]) if text and text.strip()]
    data = keep_rows(data, rows, name, "without text")
    words, tags = [], []
    rows_of_notes: dict[str, list[int]] = {}  # by what is noted: the row of each span
    for row, (text, spans) in enumerate(zip(data["text"], data[_SPANS], strict=True)):
        matches = list(_WORD.finditer(text))
        words.append([match[0] for match in matches])
        try:
            marked = [as_span(span["start"], span["end"], span["label"]) for span in spans or []]
        except (KeyError, TypeError, ValueError) as error:
            raise RecipeError(
                f"{name}: a span must have the characters start and end, and a label; "
                f"{locate(data, row)} has {str(spans)[:100]}. Correct it, or leave the row out."
            ) from error
        named, notes = _mark(text, matches, marked)
        tags.append(named)
        for note in notes:
            rows_of_notes.setdefault(note, []).append(row)
    for note, noted in rows_of_notes.items():
        log(f"{name}: spans that {note}: {len(noted):,} ({locate_first(data, noted)})")
    return _make_data(data, words, tags)


def _mark(
    text: str, words: Sequence[re.Match[str]], spans: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """Return the tags of the words of a text in IOB2, and what to note of its spans."""
    tags, notes = ["O"] * len(words), []
    for span in sorted(spans, key=itemgetter("start")):
        covered = []
        for number, word in enumerate(words):
            if word.start() < span["end"] and word.end() > span["start"]:
                covered.append(number)
        if not covered:
            notes.append("mark no word of their text and are left out")
            continue
        if span["end"] > len(text):
            notes.append("end beyond their text and are left out")
            continue
        if {tags[number] for number in covered} - {"O"}:
            notes.append("overlap earlier ones or share a word with one and are left out")
            continue
        if span["start"] > words[covered[0]].start() or span["end"] < words[covered[-1]].end():
            notes.append("begin or end within a word, and mark the whole word")
        for number in covered:
            tags[number] = f"I-{span['label']}"
        for number in covered[:1]:
            tags[number] = f"B-{span['label']}"
    return tags, notes
