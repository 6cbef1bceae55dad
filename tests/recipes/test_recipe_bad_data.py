"""Data that no recipe can learn from: each file is refused in one line, which names what is wrong and where."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from pyarrow.parquet import write_table

import glue
import mlm
import squad
import text_classification
import token_classification
from tasks.labels import find_labels
from training.errors import RecipeError, end_with_one_line
from training.tables import WHERE, read_file


GOOD = "text,label\n" + "good,yes\nbad,no\n" * 5
SQUAD = {"id": "q", "question": "who", "context": "ada lived", "answers": {"text": ["ada"], "answer_start": [0]}}


def lines(*rows: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def labelled(*labels: object) -> str:
    return lines(*({"text": f"text {number}", "label": label} for number, label in enumerate(labels)))


def words(**changes: object) -> str:
    return lines({"tokens": ["a", "b"], "tags": ["X", "Y"], **changes}, {"tokens": ["a", "b"], "tags": ["X", "Y"]})


def question(**changes: object) -> str:
    return lines({**SQUAD, "id": "p"}, {**SQUAD, **changes})


# The recipe, the file, its content, and what the message must say.
FILES = [
    (text_classification, "a.csv", "", "a.csv cannot be read as csv: it has no rows"),
    (text_classification, "a.csv", "\n\n", "it has no rows"),
    (text_classification, "a.csv", "text,label\n", "it has no rows"),
    (text_classification, "a.tsv", "", "it has no rows"),
    (text_classification, "a.jsonl", "", "it has no rows"),
    (text_classification, "a.jsonl", "\n", "it has no rows"),
    (text_classification, "a.parquet", b"", "a.parquet cannot be read as parquet"),
    (text_classification, "a.parquet", b"PAR1", "a.parquet cannot be read as parquet"),
    (text_classification, "a.csv", "text,label\na,1\nb, c,2\n", "line 3 must have 2 fields like the header, got 3"),
    (text_classification, "a.csv", "text,label\nb, c,2\nd, e,1\n", "line 2 must have 2 fields like the header, got 3"),
    (text_classification, "a.csv", "text,label\na,1\nb\n", "line 3 must have 2 fields like the header, got 1"),
    (text_classification, "a.tsv", "text\tlabel\na\t1\nb\n", "line 3 must have 2 fields like the header, got 1"),
    (text_classification, "a.csv", 'text,label\na,1\n"b,2\nc,1\n', "close each quotation mark"),
    (text_classification, "a.csv", 'text,label\n"a"b,1\n', "line 2: "),
    (text_classification, "a.csv", "text,label,label\na,1,2\n", "'label' is there twice"),
    (text_classification, "a.csv", "text,text,label\na,b,2\n", "'text' is there twice"),
    (text_classification, "a.csv", "text,label\na,1\nb\0,2\n", "line 3 holds the character NUL"),
    (text_classification, "a.csv", GOOD.encode("utf-16")[:-1], "must be UTF-8 text"),
    (text_classification, "a.csv", GOOD.encode("utf-16-le"), "line 1 holds the character NUL"),
    (
        text_classification,
        "a.csv",
        "text,label\n\u00e9\u00e8,1\n".encode() + b"\xe9,2\n",
        "line 3 is not UTF-8 like the rest",
    ),
    (text_classification, "a.jsonl", labelled(1).encode("utf-16")[:-1], "must be UTF-8 text"),
    (text_classification, "a.jsonl", "{", "line 1 must be a JSON object"),
    (text_classification, "a.jsonl", lines([1, 2]), "line 1 must be a JSON object, got [1, 2]"),
    (text_classification, "a.jsonl", labelled("a") + "not json\n", "line 2 must be a JSON object"),
    (text_classification, "a.jsonl", '{"text": "a", "label": 1, "label": 2}\n', "each key must be there once"),
    (text_classification, "a.jsonl", labelled("a", 1, "a"), "line 2 has 1 as 'label', which other lines have as text"),
    (
        text_classification,
        "a.jsonl",
        labelled(1, True),
        "True as 'label', which other lines have as a number",
    ),
    (text_classification, "a.jsonl", labelled("a", ["a"]), "line 2 has ['a'] as 'label'"),
    (text_classification, "a.jsonl", labelled([1], ["a"]), "cannot be read as jsonl"),
    (text_classification, "a.jsonl", labelled({"a": 1}, {"a": 2}), "must be texts or numbers"),
    (text_classification, "a.json", labelled("a", "b"), "must end in one of .parquet"),
    (text_classification, "a.xlsx", b"PK", "must end in one of .parquet"),
    # Texts
    (text_classification, "a.csv", "one,label\na,1\nb,2\n", "No column has one of the usual names for text"),
    (text_classification, "a.jsonl", lines({"text": 5, "label": "a"}, {"text": 6, "label": "b"}), "line 1 has 5"),
    (text_classification, "a.jsonl", lines({"text": "x", "label": "a"}, {"label": "b"}), "line 2 has None"),
    (text_classification, "a.csv", "text,label\n,yes\n  ,no\n", "all its 2 rows are empty"),
    # Labels
    (text_classification, "a.csv", "text\na\nb\n", "There is no column with one of the names label"),
    (text_classification, "a.csv", "text,label\n" + "a,yes\n" * 9, "examples of two classes; .* has only yes"),
    (text_classification, "a.csv", "text,label\na,\nb, \n", "must have labels; 'label' is empty in all its 2 rows"),
    (text_classification, "a.csv", "text,label\na,1\nb,inf\nc,2\nd,1\n", "finite numbers, or words, got 'inf'"),
    (text_classification, "a.csv", "text,label\na,1\nb,nan\nc,2\nd,1\n", "finite numbers, or words, got 'nan'"),
    (text_classification, "a.jsonl", labelled(1.5, float("inf"), 2.5), "finite numbers, or words, got 'inf'"),
    (text_classification, "a.csv", "text,label\na,1\nb,1.0\nc,0\nd,0\n", "'1' and '1.0' .* way to write a number"),
    (
        text_classification,
        "a.csv",
        "text,label\n" + "".join(f"t,c{n}\n" for n in range(9)),
        "9 of the 9 rows have a label in 'label' that no other row has",
    ),
    (text_classification, "a.csv", "text,label\na,yes\nb,no\n", "No validation split can be made of 2"),
    (token_classification, "a.conll", "", "it has no rows"),
    (token_classification, "a.conll", "Ada X\nvisits\n", "line 2 must have a word and a tag"),
    (token_classification, "a.conll", "Ada\0 X\n", "line 1 holds the character NUL"),
    (token_classification, "a.csv", GOOD, "There is no column named tokens or words"),
    (token_classification, "a.jsonl", words(tags=["X"]), "line 1 must have a list of words and one of as many tags"),
    (token_classification, "a.jsonl", words(tokens=["a", None]), "line 1 must have texts as words, got None"),
    (token_classification, "a.jsonl", words(tags=["X", None]), "1 of 2 have none in 'tags', .* line 1"),
    (token_classification, "a.jsonl", words(tags=["X", ""]), "1 of 2 have none in 'tags', .* line 1"),
    (token_classification, "a.jsonl", lines({"tokens": ["a"], "tags": ["X"]}), "two classes; .* has only X"),
    (token_classification, "a.jsonl", lines({"tokens": "a b", "tags": "X Y"}), "list of words|two classes"),
    (squad, "a.csv", GOOD, "must have a split 'validation'"),
    (mlm, "a.txt", "", "it has no rows"),
    (mlm, "a.txt", "one\n", "No validation split can be made of 1"),
    (mlm, "a.txt", b"one\n\xff\n", "must be UTF-8 text"),
    (mlm, "a.txt", "one\n\0\n", "line 2 holds the character NUL"),
    (mlm, "a.csv", "id,label\n1,2\n", "No column has one of the usual names for text"),
]
# Files beside a good training file: what validation or test must not have.
OTHERS = [
    (text_classification, "validation.csv", "text,label\na,maybe\n", "validation: line 2 has the label 'maybe'"),
    (text_classification, "test.csv", "text,label\na,yes\nb,maybe\n", "test: line 3 has the label 'maybe'"),
    (
        text_classification,
        "validation.csv",
        "text\na\n",
        "validation lacks the column 'label': .* Name others with --text_columns or --label_columns, or rename",
    ),
    (text_classification, "validation.csv", "label\nyes\n", "validation lacks the column 'text'"),
    (text_classification, "validation.csv", "", "it has no rows"),
]
QUESTIONS = [
    (question(id=None), "line 2 must have texts as id"),
    (question(id="p"), "each question must have its own id, line 2 has 'p' again"),
    (question(context=None), "line 2 must have texts as id, question and context"),
    (question(answers=None), "line 2 must have .* answers with lists"),
    (question(answers={"text": ["ada"], "answer_start": []}), "line 2 must have .* of equal length"),
    (question(answers={"text": ["ada"], "answer_start": [4]}), "line 2 has the answer 'ada' at character 4"),
    (question(answers={"text": ["ada"], "answer_start": [-9]}), "line 2 has the answer 'ada' at character -9"),
    (question(answers={"text": [""], "answer_start": [0]}), "line 2 must have"),
    (lines({"id": "q", "question": "who", "context": "ada"}), "lacks the column 'answers'"),
]


def loaded(*_: object, **__: object) -> None:
    raise AssertionError("a model was loaded before the mistake was found")


def refusal(recipe, *flags):
    """What a recipe says at its end, which must be a single line."""
    with (
        patch.object(sys, "argv", [f"{recipe.__name__}.py", *map(str, flags)]),
        patch("training.model.AutoConfig.from_pretrained", loaded),
        pytest.raises(SystemExit) as end,
    ):
        end_with_one_line(recipe.main)
    message = end.value.code
    assert isinstance(message, str), "the status is 1"
    assert message.startswith("error: ")
    assert "\n" not in message
    return message.replace("\\t", "\t")


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def matches(message: str, expected: str) -> bool:
    """Whether the parts of the expected message, which ` .* ` divides, are there in their order."""
    for option in expected.split("|"):
        position = 0
        for part in option.replace("\\t", "\t").split(".*"):
            position = message.find(part.strip(), position)
            if position < 0:
                break
        else:
            return True
    return False


@pytest.mark.parametrize(
    ("recipe", "name", "content", "expected"), FILES, ids=[f"{row[0].__name__}-{row[3][:40]}" for row in FILES]
)
def test_bad_files(tmp_path, recipe, name, content, expected):
    data = write(tmp_path / name, content)
    message = refusal(recipe, "--data", data, "--output_dir", tmp_path / "run")
    assert matches(message, expected), message


@pytest.mark.parametrize(("recipe", "name", "content", "expected"), OTHERS)
def test_bad_files_beside_a_good_one(tmp_path, recipe, name, content, expected):
    write(tmp_path / "data" / "train.csv", GOOD)
    write(tmp_path / "data" / name, content)
    message = refusal(recipe, "--data", tmp_path / "data", "--output_dir", tmp_path / "run")
    assert matches(message, expected), message


@pytest.mark.parametrize(("content", "expected"), QUESTIONS)
def test_bad_questions(tmp_path, content, expected):
    write(tmp_path / "data" / "train.jsonl", lines(SQUAD))
    write(tmp_path / "data" / "validation.jsonl", content)
    message = refusal(squad, "--data", tmp_path / "data", "--output_dir", tmp_path / "run")
    assert matches(message, f"validation .* {expected}" if "lacks" in expected else expected), message


@pytest.mark.parametrize(
    ("label", "expected"),
    [("2", "line 3 has '2'"), ("", "line 3 has ''"), ("yes", "line 3 has 'yes'"), ("inf", "line 3 has 'inf'"),
     ("0.5", "line 3 has '0.5'"), ("-1", "line 3 has '-1'")],
)  # fmt: skip
def test_bad_labels_of_glue(tmp_path, label, expected):
    for split in ("train", "validation"):
        write(tmp_path / "cola" / f"{split}.csv", f"sentence,label\na,1\nb,{label}\nc,0\n")
    assert expected in refusal(glue, "--task", "cola", "--data_dir", tmp_path, "--output_dir", tmp_path / "run")


@pytest.mark.parametrize("value", ["2", "", "yes", "0.5", "nan"])
def test_bad_columns_of_classes(tmp_path, value):
    """Anything but 1 was taken for 0."""
    data = write(tmp_path / "a.csv", f"text,sad,glad\na,0,1\nb,1,0\nc,{value},1\n")
    flags = ("--data", data, "--label_columns", "sad", "glad", "--output_dir", tmp_path / "run")
    message = refusal(text_classification, *flags)
    assert f"each must hold 0 or 1, line 4 has {value!r} as 'sad'" in message


def test_a_parquet_file_with_two_columns_of_one_name(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    write_table(table, tmp_path / "a.parquet")
    with pytest.raises(RecipeError, match=r"cannot be read as parquet: Multiple matches for .*\(text\)"):
        read_file(tmp_path / "a.parquet")


def test_a_number_that_no_declared_class_has():
    features = Features({"label": ClassLabel(names=["no", "yes"])})
    data = Dataset.from_dict({"label": [0, 1, 1]}, features=features)
    broken = Dataset(data.data.table.set_column(0, "label", pa.array([0, 1, 7])), info=data.info)
    with pytest.raises(RecipeError, match="train: row 2 has the label '7'"):
        find_labels(data, None, None).encode(broken, "train")


class TestGoodData:
    """What looks strange and is right."""

    def test_a_column_named_encoded_and_one_named_like_an_input_of_the_model(self, tmp_path):
        frame = pd.DataFrame(
            {"text": ["a", "b"] * 5, "label": ["x", "y"] * 5, "encoded": ["1"] * 10, "position_ids": ["2"] * 10}
        )
        data = Dataset.from_pandas(frame, preserve_index=False)
        assert find_labels(data, None, None).encode(data, "train")["label"] == [0, 1] * 5

    @pytest.mark.parametrize("end", ["\n", "\r\n"])
    @pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
    def test_line_ends_and_a_byte_order_mark(self, tmp_path, end, mark):
        write(tmp_path / "a.csv", mark + f'text,label{end}"a, ""b""",1{end}{end}c,2{end}'.encode())
        rows = read_file(tmp_path / "a.csv")
        assert rows.to_dict() == {"text": ['a, "b"', "c"], "label": ["1", "2"], WHERE: ["line 2", "line 4"]}

    def test_json_lines_in_the_encoding_of_windows_shells(self, tmp_path):
        write(tmp_path / "a.jsonl", '{"text": "caf\u00e9"}\n'.encode("utf-16"))
        assert read_file(tmp_path / "a.jsonl")["text"] == ["caf\u00e9"]

    def test_words_that_pandas_takes_for_missing_values(self, tmp_path):
        write(tmp_path / "a.tsv", 'text\tlabel\nNA\tnan\n"quoted\tnull\n')
        assert read_file(tmp_path / "a.tsv").to_dict() == {
            "text": ["NA", '"quoted'],
            "label": ["nan", "null"],
            WHERE: ["line 2", "line 3"],
        }

    def test_numbers_whole_and_not_and_what_is_missing(self, tmp_path):
        write(tmp_path / "a.jsonl", lines({"a": 1, "b": "x"}, {"a": 2.5}, {"a": None, "b": None}))
        rows = read_file(tmp_path / "a.jsonl")
        assert rows.remove_columns(WHERE).to_dict() == {"a": [1.0, 2.5, None], "b": ["x", None, None]}
        assert rows.features == Features({"a": Value("float64"), "b": Value("string"), WHERE: Value("string")})
