"""`houlsby-peft predict --file`: tables of every format, in and out, with all columns and the
predictions.
"""

from __future__ import annotations

import csv
import json
import shutil
from codecs import BOM_UTF8
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification

import houlsby_peft
from edited_json import edited_json
from houlsby_peft.tables import read_table, write_table
from houlsby_peft_cli import main
from hub_models import LABELS, TEXTS, make_adapter, save_adapter


ROWS = [
    {"id": "7", "Message": 'The soup was "cold",\nand late.', "created": "2024-01-02"},
    {"id": "007", "Message": "Is there a menu?", "created": ""},
    {"id": "8", "Message": "", "created": "é"},
    {"id": "9", "Message": "NA", "created": "x"},
]
WITH_TEXT = [row["Message"] for row in ROWS if row["Message"]]


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("adapter"), base, str(base))


@pytest.fixture(scope="module")
def predictor(adapter):
    return houlsby_peft.load(adapter)


def write(path: Path, rows: list[dict], **options) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    else:
        with path.open("w", newline="", encoding=options.pop("encoding", "utf-8")) as file:
            writer = csv.DictWriter(file, list(rows[0]), **options)
            writer.writeheader()
            writer.writerows(rows)
    return path


def read(path: Path, separator: str = ",") -> list[dict]:
    text = path.read_bytes().decode("utf-8-sig")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.split("\n") if line]
    return list(csv.DictReader(text.splitlines(keepends=True), delimiter=separator))


def predict(adapter: Path, source: Path, target: Path, *flags: object) -> list[dict]:
    words = ["--file", str(source), "--output", str(target), *map(str, flags)]
    main(["predict", str(adapter), *words])
    assert not target.with_name(f"{target.name}.part").exists()
    return read(target, "\t" if target.suffix == ".tsv" else ",")


def assert_alike(rows, results):
    for row, result in zip(rows, results, strict=True):
        assert row["label"] == result["label"]
        assert float(row["score"]) == pytest.approx(result["score"], abs=2e-6)


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("in.csv", "out.tsv"),
        ("in.tsv", "out.jsonl"),
        ("in.jsonl", "out.tsv"),
        ("in.parquet", "out.csv"),
    ],
)
def test_every_format_keeps_the_columns_and_adds_the_predictions(
    source, target, adapter, predictor, tmp_path, capsys
):
    options = {"delimiter": "\t"} if source == "in.tsv" else {}
    written = write(tmp_path / source, ROWS, **options)
    rows = predict(adapter, written, tmp_path / target, "--batch_size", 2)
    assert [without(row, "label", "score") for row in rows] == ROWS
    assert list(rows[0]) == [*ROWS[0], "label", "score"]
    assert_alike([row for row in rows if row["Message"]], predictor.predict(WITH_TEXT))
    assert not rows[2]["label"]
    assert not rows[2]["score"]
    output = capsys.readouterr()
    assert output.out == ""
    assert "text: Message" in output.err
    assert "1 of 4 rows" in output.err


def test_types_of_json_lines_are_kept(adapter, tmp_path):
    rows = [
        {"text": "a", "n": 1, "tags": ["x"], "big": 1.5, "id": 2**60},
        {"text": "b", "n": 2, "other": True},
    ]
    typed = predict(adapter, write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    for typed_row, row in zip(typed, rows, strict=True):
        assert typed_row | row == typed_row
    first, second = predict(adapter, tmp_path / "in.jsonl", tmp_path / "out.csv")
    assert (first["n"], first["tags"], first["big"], first["other"]) == ("1", '["x"]', "1.5", "")
    assert (second["n"], second["tags"], second["other"]) == ("2", "", "true")


def test_the_best_classes(adapter, predictor, tmp_path):
    source = write(tmp_path / "in.csv", ROWS[:2])
    whole = predictor.predict(WITH_TEXT[:2], top_k=3)
    wide = predict(adapter, source, tmp_path / "out.csv", "--top_k", 2)
    assert list(wide[0])[3:] == ["label_1", "score_1", "label_2", "score_2"]
    listed = predict(adapter, source, tmp_path / "out.jsonl", "--top-k", 9)
    for result, row, line in zip(whole, wide, listed, strict=True):
        labels = [item["label"] for item in result]
        assert [row["label_1"], row["label_2"]] == labels[:2]
        assert [item["label"] for item in line["predictions"]] == labels


def test_a_column_that_is_there_already_is_not_overwritten(adapter, tmp_path):
    rows = [{"text": "a", "Label": "mine", "score": "5"}]
    (row,) = predict(adapter, write(tmp_path / "in.csv", rows), tmp_path / "out.csv")
    assert list(row) == ["text", "Label", "score", "predicted_label", "predicted_score"]
    assert (row["Label"], row["score"]) == ("mine", "5")
    for task in ("Label", "Label_score"):
        shutil.copytree(adapter, tmp_path / "bank" / task)
    (row,) = predict(tmp_path / "bank", tmp_path / "in.csv", tmp_path / "bank.csv")
    predicted = ["predicted_Label", "Label_score", "predicted_Label_score", "Label_score_score"]
    assert list(row)[3:] == predicted
    assert row["Label"] == "mine"


def test_a_label_is_not_a_formula_of_a_spreadsheet(tmp_path):
    labels = ["=cmd|' /C calc'!A0", "@SUM(1)", "-", "=1", "- 5"]
    table = read_table(write(tmp_path / "in.csv", [{"text": "=1+(1)"}] * len(labels)))
    rows = [{"text": "=1+(1)", "label": label} for label in labels]
    write_table(tmp_path / "out.csv", rows, table, ["label"])
    escaped = ["'=cmd|' /C calc'!A0", "'@SUM(1)", "-", "=1", "- 5"]
    for row, label in zip(read(tmp_path / "out.csv"), escaped, strict=True):
        assert row == {"text": "=1+(1)", "label": label}, "the user's own column is kept"


def test_a_large_table_keeps_its_quotation_marks_and_any_end_of_lines(tmp_path):
    text = "".join(f'{number}\t"I {"x" * 300}," he said\n' for number in range(2_000))
    (tmp_path / "in.tsv").write_text(f"id\ttext\n{text}")
    assert read_table(tmp_path / "in.tsv").rows[1_999]["text"] == f'"I {"x" * 300}," he said'
    (tmp_path / "in.csv").write_bytes(b"id;text\r1;a, b\r2;c, d\r")
    assert read_table(tmp_path / "in.csv").rows[1] == {"id": "2", "text": "c, d"}


@pytest.mark.parametrize(
    ("separator", "prices", "written"),
    [
        (";", ("3,50", "-1,25"), "0,75"),  # as Excel has them where ; separates
        (";", ("3,50", "1.25"), "0.75"),
        (";", ("3", "4"), "0.75"),
        (",", ('"3,50"', '"-1,25"'), "0.75"),
    ],
)
def test_decimals_are_written_as_the_table_has_them(separator, prices, written, tmp_path):
    lines = [f"text{separator}price", *(f"a{separator}{price}" for price in prices)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    table = read_table(tmp_path / "a.csv")
    for row in table.rows:
        row["score"] = 0.75
    write_table(tmp_path / "b.csv", table.rows, table, ["score"])
    again = read(tmp_path / "b.csv", separator)
    assert [row["score"] for row in again] == [written] * 2
    assert [row["price"] for row in again] == [price.strip('"') for price in prices]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_and_the_encoding_are_found(encoding, separator, tmp_path):
    """What is written is UTF-8, which Excel recognizes unless the table was without a mark."""
    rows = [{"id": str(i), "text": f"größe, {i}; a|b\nc"} for i in range(5)]
    options = {"delimiter": separator, "encoding": encoding, "quoting": csv.QUOTE_ALL}
    table = read_table(write(tmp_path / "in.csv", rows, **options))
    assert (table.separator, table.encoding, table.rows) == (separator, encoding, rows)
    write_table(tmp_path / "out.csv", table.rows, table, [])
    assert (tmp_path / "out.csv").read_bytes().startswith(BOM_UTF8) == (encoding != "utf-8")
    assert read_table(tmp_path / "out.csv").rows == rows


@pytest.mark.parametrize(
    ("text", "expected"),
    [('a "b" c', 'a "b" c'), ('"a', '"a'), ('"a ""b"""', 'a "b"'), ('"a\nb"', "a\nb")],
)
def test_quotation_marks_of_tab_separated_files_are_text_unless_they_quote(
    text, expected, tmp_path
):
    (tmp_path / "in.tsv").write_text(f"id\ttext\n1\t{text}\n")
    assert read_table(tmp_path / "in.tsv").rows == [{"id": "1", "text": expected}]


def test_columns_without_a_name(tmp_path):
    """The index of a data frame is kept, and the empty columns that a spreadsheet adds are left
    out.
    """
    (tmp_path / "in.csv").write_text(",text\n0,a\n")
    assert read_table(tmp_path / "in.csv").rows == [{"": "0", "text": "a"}]
    (tmp_path / "in.csv").write_text("id, text ,,\n1, a,,\n")
    assert read_table(tmp_path / "in.csv").rows == [{"id": "1", "text": " a"}]


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl"])
def test_a_pair_comes_from_two_columns_and_needs_one_of_its_texts(
    name, adapter, predictor, tmp_path, capsys
):
    texts = [text for text, _ in TEXTS[:2]]
    pairs = [(texts[0], texts[1]), ("", texts[1]), (None, texts[0]), ("", " ")]
    rows = [{"Sentence2": second, "sentence1": first} for first, second in pairs]
    source = write(tmp_path / name, rows)
    expected = predictor.predict([*pairs[:2], ("", texts[0])])
    for flags in ([], ["--text_column", "sentence1", "SENTENCE2"]):
        rows = predict(adapter, source, tmp_path / f"out{len(flags)}.csv", *flags)
        assert_alike(rows[:3], expected)
    assert "1 of 4 rows" in capsys.readouterr().err


def with_record(adapter: Path, folder: Path, *columns: str) -> Path:
    """A copy of an adapter that records the columns of its training."""
    shutil.copytree(adapter, folder)
    with edited_json(folder / "adapter_config.json") as config:
        config["recorded"]["text_columns"] = list(columns)
    return folder


def test_the_columns_of_the_training_are_read(adapter, predictor, tmp_path, capsys):
    texts = [text for text, _ in TEXTS[:3]]
    source = write(tmp_path / "in.csv", [dict(zip(("text", "Body", "title"), texts, strict=True))])
    pairs = with_record(adapter, tmp_path / "pairs", "title", "body")
    single = with_record(adapter, tmp_path / "single", "Title")
    for folder, inputs in ((pairs, (texts[2], texts[1])), (single, texts[2])):
        rows = predict(folder, source, tmp_path / f"{folder.name}.csv")
        assert_alike(rows, predictor.predict([inputs]))
    # What the user names comes first.
    capsys.readouterr()
    predict(single, source, tmp_path / "named.csv", "--text-column", "body")
    assert "text: Body\n" in capsys.readouterr().err


def test_words_are_texts_or_pairs_as_in_the_training(adapter, tmp_path, capsys):
    texts = [text for text, _ in TEXTS[:2]]
    pairs = with_record(adapter, tmp_path / "pairs", "title", "body")
    single = with_record(adapter, tmp_path / "single", "body")
    for folder, flags, inputs in (
        (pairs, ["--pairs"], [tuple(texts)]),
        (single, [], texts),
        (adapter, [], texts),
    ):
        main(["predict", str(folder), *flags, *texts])
        printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert printed == houlsby_peft.load(adapter).predict(inputs)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (("title", "body\x1b[2J"), ["a", "b"]),
        (("title", "body\x1b[2J"), ["--file", "in.csv"]),
        (("title", "body\x1b[2J"), ["--file", "in.csv", "--text-column", "sentence1"]),
        (("body",), ["--pairs", "a", "b"]),
        (("body",), ["--pairs", "--file", "in.csv"]),
    ],
)
def test_another_number_of_texts_than_in_the_training_is_refused(
    columns, words, adapter, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write(Path("in.csv"), [{"text": "a", "sentence1": "b", "sentence2": "c"}])
    folder = with_record(adapter, tmp_path / "adapter", *columns)
    with pytest.raises(SystemExit, match=r"pairs of texts|single texts") as error:
        main(["predict", str(folder), *words])
    assert "\x1b" not in str(error.value)


TEXT, QUESTION = TEXTS[3][0], TEXTS[10][0]


@pytest.fixture
def text_file(tmp_path):
    return write(tmp_path / "text.csv", [{"id": "1", "sentence": TEXT}])


def test_question_answering(base, tmp_path):
    rows = [{"Context": TEXT, "question": QUESTION}, {"Context": " ", "question": QUESTION}]
    folder = tmp_path / "adapter"
    save_adapter(folder, base, AutoModelForQuestionAnswering)
    row, without_context = predict(folder, write(tmp_path / "in.csv", rows), tmp_path / "out.csv")
    assert row["answer"] == houlsby_peft.load(folder).predict([(QUESTION, TEXT)])[0]["answer"]
    assert TEXT[int(row["start"]) : int(row["end"])] == row["answer"]
    assert not without_context["answer"]


def test_tagging(base, text_file, tmp_path):
    head = {"id2label": {0: "O", 1: "B-X"}}
    save_adapter(tmp_path / "adapter", base, AutoModelForTokenClassification, head)
    [row] = predict(tmp_path / "adapter", text_file, tmp_path / "out.csv")
    [entities] = houlsby_peft.load(tmp_path / "adapter").predict(TEXT)
    words = [entity["word"] for entity in json.loads(row["entities"])]
    assert words == [entity["word"] for entity in entities]


def test_regression(base, text_file, tmp_path):
    head = {"id2label": {0: "rating"}, "problem_type": "regression"}
    save_adapter(tmp_path / "adapter", base, head=head)
    [row] = predict(tmp_path / "adapter", text_file, tmp_path / "out.csv")
    assert list(row) == ["id", "sentence", "score"]
    [result] = houlsby_peft.load(tmp_path / "adapter").predict(TEXT)
    assert float(row["score"]) == pytest.approx(result["score"], abs=2e-6)


def test_several_labels(base, text_file, tmp_path):
    head = {"id2label": dict(enumerate(LABELS)), "problem_type": "multi_label_classification"}
    save_adapter(tmp_path / "adapter", base, head=head)
    [row] = predict(tmp_path / "adapter", text_file, tmp_path / "out.jsonl")
    [labels] = houlsby_peft.load(tmp_path / "adapter").predict(TEXT, top_k=3)
    assert row["labels"] == [label["label"] for label in labels if label["score"] >= 0.5]
    assert len(row["scores"]) == len(row["labels"])


def test_without_an_output_json_lines_are_printed(adapter, tmp_path, capsys):
    main(["predict", str(adapter), "--file", str(write(tmp_path / "in.csv", ROWS))])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["id"] for row in rows] == ["7", "007", "8", "9"]
    assert {row["label"] for row in rows} <= {*LABELS, None}


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("in.csv", "id,text\n1,a\n2,b,c\n", "line 3"),
        ("in.csv", "id,text\n1,b,c\n", "line 2"),
        ("in.csv", b"text\n\xc3\xa9\n\xe9\n", "line 3 is not UTF-8"),
        ("in.csv", "id,text\n", "no rows"),
        ("in.csv", "id,words\n1,a\n", "id, words"),
        ("in.jsonl", '{"text": "a"}\n[1]\n', "JSON object"),
        ("in.jsonl", '{"text": "a"}\n{"text":\n', "line 3"),
        ("in.jsonl", '{"text": "b"}\n{"text": ["a"]}\n', "must hold text"),
        ("in.xlsx", "", "no rows"),
        ("in.conll", "Ada B-PER\n", "evaluate"),
        ("in.json", '[{"id": "a", "paragraphs": [{"context": "b"}]}]', "evaluate"),
        ("in.parquet", "no", "damaged"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line_before_the_model_is_loaded(
    name, content, word, adapter, tmp_path, monkeypatch
):
    monkeypatch.setattr("houlsby_peft.predict.held_adapters.load_saved", None)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit, match=word) as error:
        predict(adapter, tmp_path / name, tmp_path / "out.csv")
    assert str(error.value).startswith("error: ")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_pandas_makes_a_table_of_an_export(adapter, predictor, tmp_path, monkeypatch):
    """The line of the error does what it says."""
    monkeypatch.chdir(tmp_path)
    rows = [{"id": 1, "data": {"text": text}, "annotations": []} for text in WITH_TEXT]
    path = write(tmp_path / "in.jsonl", rows)
    with pytest.raises(SystemExit, match="in data, annotations") as error:
        predict(adapter, path, tmp_path / "out.csv")
    exec(str(error.value).partition("objects: ")[2], {"pandas": pd, "FILE": str(path)})
    flags = "--text_columns", "data.text"
    table = predict(adapter, tmp_path / "table.csv", tmp_path / "out.csv", *flags)
    assert_alike(table, predictor.predict(WITH_TEXT))


def test_an_output_is_replaced_only_if_asked_for(adapter, tmp_path):
    source, target = write(tmp_path / "in.csv", ROWS), tmp_path / "out.csv"
    target.write_text("precious")
    with pytest.raises(SystemExit, match=r"out\.csv exists already"):
        predict(adapter, source, target)
    assert target.read_text() == "precious"
    assert len(predict(adapter, source, target, "--overwrite")) == 4


def test_the_folder_of_an_output_is_made(adapter, tmp_path):
    """So that a long prediction is not lost."""
    source = write(tmp_path / "in.csv", ROWS)
    assert len(predict(adapter, source, tmp_path / "new" / "folder" / "out.csv")) == 4


def test_a_column_for_each_task_of_a_folder(adapter, base, tmp_path, capsys):
    adapters = {"mood": adapter, "topic": make_adapter(tmp_path / "other", base, str(base), 3)}
    folder = tmp_path / "tasks"
    for name, source in adapters.items():
        shutil.copytree(source, folder / name / "adapter")
        (folder / name / "results.json").touch()  # a run of a recipe
    (folder / "scores.csv").touch()  # of all runs
    source = write(tmp_path / "new.csv", ROWS)
    rows = predict(folder, source, tmp_path / "all.csv")
    assert list(rows[0]) == [*ROWS[0], "mood", "mood_score", "topic", "topic_score"]
    for name, adapter_of_task in adapters.items():
        alone = predict(adapter_of_task, source, tmp_path / f"{name}.csv")
        assert [row[name] for row in rows] == [row["label"] for row in alone]
    main(["predict", str(folder), *WITH_TEXT])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    labels = [row["topic"] for row in rows if row["topic"]]
    assert [line["topic"]["label"] for line in lines] == labels
