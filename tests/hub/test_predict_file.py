"""`houlsby-peft predict --file`: tables of every format, in and out, with all columns and the predictions."""

from __future__ import annotations

import csv
import json
import shutil
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from peft import get_peft_model
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import houlsby_peft
from houlsby_peft import AdapterError, HoulsbyConfig
from houlsby_peft.tables import TableReader, TableWriter, find_text_columns
from houlsby_peft_cli import main
from hub_models import LABELS, TEXTS, make_adapter, make_base
from tiny_models import perturb


ROWS = [
    {"id": "7", "Message": 'The soup was "cold",\nand late.', "created": "2024-01-02"},
    {"id": "007", "Message": "Is there a menu?", "created": ""},
    {"id": "8", "Message": "", "created": "é"},
    {"id": "9", "Message": "Best bread\rin town", "created": "x"},
]
WITH_TEXT = [row["Message"] for row in ROWS if row["Message"]]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("adapter"), base, str(base))


@pytest.fixture(scope="module")
def expected(adapter):
    return houlsby_peft.load(adapter).predict(WITH_TEXT)


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
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    text = path.read_bytes().decode("utf-8-sig")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.split("\n") if line]
    return list(csv.DictReader(text.splitlines(keepends=True), delimiter=separator))


def predict(adapter: Path, source: Path, target: Path, *flags: object) -> list[dict]:
    main(["predict", str(adapter), "--file", str(source), "--output", str(target), *map(str, flags)])
    assert not target.with_name(f"{target.name}.part").exists()
    return read(target, "\t" if target.suffix == ".tsv" else ",")


@pytest.mark.parametrize("target", ["out.csv", "out.tsv", "out.jsonl", "out.parquet"])
@pytest.mark.parametrize("source", ["in.csv", "in.tsv", "in.jsonl", "in.parquet"])
def test_every_format_keeps_the_columns_and_adds_the_predictions(source, target, adapter, expected, tmp_path, capsys):
    options = {"delimiter": "\t"} if source == "in.tsv" else {}
    found = predict(adapter, write(tmp_path / source, ROWS, **options), tmp_path / target, "--batch_size", 2)
    assert [{name: row[name] for name in ROWS[0]} for row in found] == ROWS
    assert list(found[0]) == [*ROWS[0], "label", "score"]
    rated = [row for row in found if row["Message"]]
    assert [row["label"] for row in rated] == [result["label"] for result in expected]
    assert [float(row["score"]) for row in rated] == pytest.approx([each["score"] for each in expected], abs=2e-6)
    assert (found[2]["label"] or None, found[2]["score"] or None) == (None, None)
    said = capsys.readouterr()
    assert said.out == ""
    assert "text: Message" in said.err
    assert "1 of 4 rows have no text" in said.err


def test_types_of_parquet_and_json_are_kept(adapter, tmp_path):
    table = pa.table({"text": ["a", "b"], "n": pa.array([1, None], pa.int32()), "when": pa.array([0, 1], pa.date32())})
    pq.write_table(table, tmp_path / "in.parquet")
    predict(adapter, tmp_path / "in.parquet", tmp_path / "out.parquet")
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert [schema.field(name).type for name in table.column_names] == table.schema.types
    rows = [{"text": "a", "n": 1, "tags": ["x"], "big": 1.5, "id": 2**63}, {"text": "b", "n": 2, "other": True}]
    source = write(tmp_path / "in.jsonl", rows)
    kept = predict(adapter, source, tmp_path / "out.jsonl")
    assert [{name: row[name] for name in given} for given, row in zip(rows, kept, strict=True)] == rows
    typed = predict(adapter, source, tmp_path / "typed.parquet")
    assert [(row["n"], row["tags"], row["big"], row["id"], row["other"]) for row in typed] == [
        (1, '["x"]', 1.5, str(2**63), None),
        (2, None, None, None, True),
    ]


def test_the_best_classes(adapter, tmp_path):
    source = write(tmp_path / "in.csv", ROWS[:2])
    whole = houlsby_peft.load(adapter).predict(WITH_TEXT[:2], top_k=3)
    assert [len(result) for result in whole] == [3, 3]
    wide = predict(adapter, source, tmp_path / "out.csv", "--top_k", 2)
    assert list(wide[0])[3:] == ["label_1", "score_1", "label_2", "score_2"]
    listed = predict(adapter, source, tmp_path / "out.jsonl", "--top-k", 9)
    for result, row, line in zip(whole, wide, listed, strict=True):
        assert [row["label_1"], row["label_2"]] == [item["label"] for item in result[:2]]
        assert [item["label"] for item in line["predictions"]] == [item["label"] for item in result]
        assert [item["score"] for item in line["predictions"]] == pytest.approx(
            [item["score"] for item in result], abs=2e-6
        )


def test_a_column_that_is_there_already_is_not_overwritten(adapter, tmp_path):
    rows = [{"text": "a", "Label": "mine", "score": "5"}]
    (row,) = predict(adapter, write(tmp_path / "in.csv", rows), tmp_path / "out.csv")
    assert list(row) == ["text", "Label", "score", "predicted_label", "predicted_score"]
    assert (row["Label"], row["score"]) == ("mine", "5")
    with pytest.raises(SystemExit, match="column 'predicted_label', which the file has already"):
        predict(adapter, tmp_path / "out.csv", tmp_path / "again.csv")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_and_the_encoding_are_found(encoding, separator, tmp_path):
    rows = [{"id": str(i), "text": f"größe, {i}; a|b\nc"} for i in range(5)]
    quoting = csv.QUOTE_ALL
    table = TableReader(write(tmp_path / "in.csv", rows, delimiter=separator, encoding=encoding, quoting=quoting))
    assert (table.separator, table.encoding, table.count) == (separator, encoding, 5)
    (part,) = table.parts(9)
    assert part == (rows, None)


@pytest.mark.parametrize("name", ["in.csv", "in.tsv"])
def test_columns_without_a_name(name, tmp_path):
    """The index of a data frame is kept, and the empty columns that a spreadsheet adds are left out."""
    (tmp_path / name).write_text(",text\n0,a\n")
    table = TableReader(tmp_path / name)
    assert (table.columns, list(table.rows())) == (["", "text"], [(2, {"": "0", "text": "a"})])
    (tmp_path / name).write_text("id, text ,,\n1, a,,\n")
    table = TableReader(tmp_path / name)
    assert (table.columns, list(table.rows())) == (["id", "text"], [(2, {"id": "1", "text": " a"})])


def test_pairs_come_from_two_columns(adapter, tmp_path):
    texts = [text for text, _ in TEXTS[:4]]
    rows = [{"Sentence2": texts[1], "sentence1": texts[0]}, {"Sentence2": texts[3], "sentence1": texts[2]}]
    source = write(tmp_path / "in.csv", rows)
    expected = houlsby_peft.load(adapter).predict([(texts[0], texts[1]), (texts[2], texts[3])])
    for flags in ([], ["--text_column", "sentence1", "SENTENCE2"]):
        found = predict(adapter, source, tmp_path / f"out{len(flags)}.csv", *flags)
        assert [float(row["score"]) for row in found] == pytest.approx([e["score"] for e in expected], abs=2e-6)


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl"])
def test_a_pair_needs_one_of_its_texts(name, adapter, tmp_path, capsys):
    texts = [text for text, _ in TEXTS[:2]]
    missing = None if name == "in.jsonl" else " "
    pairs = [(texts[0], ""), ("", texts[1]), (missing, texts[0]), ("", missing)]
    source = write(tmp_path / name, [dict(zip(("sentence1", "sentence2"), pair, strict=True)) for pair in pairs])
    expected = houlsby_peft.load(adapter).predict([(first or "", second) for first, second in pairs[:3]])
    found = predict(adapter, source, tmp_path / "out.csv")
    assert [row["label"] for row in found] == [*(result["label"] for result in expected), ""]
    assert [float(row["score"]) for row in found[:3]] == pytest.approx([e["score"] for e in expected], abs=2e-6)
    assert "1 of 4 rows have no text" in capsys.readouterr().err


def with_record(adapter: Path, folder: Path, *columns: str) -> Path:
    """A copy of an adapter that records the columns of its training."""
    shutil.copytree(adapter, folder)
    path = folder / "adapter_config.json"
    fields = json.loads(path.read_text())
    fields["recorded"]["text_columns"] = list(columns)
    path.write_text(json.dumps(fields))
    return folder


def test_the_columns_of_the_training_are_read(adapter, tmp_path, capsys):
    texts = [text for text, _ in TEXTS[:3]]
    source = write(tmp_path / "in.csv", [dict(zip(("text", "Body", "title"), texts, strict=True))])
    pairs = with_record(adapter, tmp_path / "pairs", "title", "body")
    single = with_record(adapter, tmp_path / "single", "Title")
    for folder, inputs in ((pairs, (texts[2], texts[1])), (single, texts[2])):
        (expected,) = houlsby_peft.load(adapter).predict([inputs])
        (row,) = predict(folder, source, tmp_path / f"{folder.name}.csv")
        assert float(row["score"]) == pytest.approx(expected["score"], abs=2e-6)
    said = capsys.readouterr().err
    assert "text: title, Body\n" in said
    assert "text: title\n" in said
    # What the user names comes first.
    predict(single, source, tmp_path / "named.csv", "--text-column", "body")
    assert "text: Body\n" in capsys.readouterr().err


def test_another_number_of_texts_than_in_the_training_is_refused(adapter, tmp_path):
    texts = [text for text, _ in TEXTS[:3]]
    source = write(tmp_path / "in.csv", [dict(zip(("text", "sentence1", "sentence2"), texts, strict=True))])
    pairs = with_record(adapter, tmp_path / "pairs", "title", "body\x1b[2J")
    for flags, columns in (([], "text"), (["--text-column", "sentence1"], "sentence1")):
        with pytest.raises(SystemExit) as exit_:
            predict(pairs, source, tmp_path / "out.csv", *flags)
        assert str(exit_.value) == (
            "error: This adapter must read pairs of texts, as it was trained on 'title' and 'body\\x1b[2J'; got "
            f"{columns}. Name two columns with --text-column."
        )
    single = with_record(adapter, tmp_path / "single", "body")
    with pytest.raises(SystemExit, match=r"must read single texts, .* on 'body'; got sentence1, sentence2. Name one"):
        predict(single, source, tmp_path / "out.csv", "--pairs")
    assert not (tmp_path / "out.csv").exists()
    for folder, flags in ((pairs, ["--pairs"]), (pairs, ["--text-column", "text", "sentence1"]), (single, [])):
        assert len(predict(folder, source, tmp_path / "out.csv", "--overwrite", *flags)) == 1


def test_texts_on_the_command_line_are_pairs_if_those_of_the_training_were(adapter, tmp_path, capsys, monkeypatch):
    texts = [text for text, _ in TEXTS[:2]]
    pairs = with_record(adapter, tmp_path / "pairs", "title", "body\x1b[2J")
    single = with_record(adapter, tmp_path / "single", "body")
    for folder, flags, inputs in ((pairs, ["--pairs"], [tuple(texts)]), (single, [], texts), (adapter, [], texts)):
        main(["predict", str(folder), *flags, *texts])
        printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert printed == houlsby_peft.load(adapter).predict(inputs)
    # Even before the lines are read, and before the model is loaded.
    monkeypatch.setattr("houlsby_peft.serving.load.load", None)
    for given in (texts, texts[:1], ["-"]):
        with pytest.raises(SystemExit) as exit_:
            main(["predict", str(pairs), *given])
        assert str(exit_.value) == (
            "error: This adapter must read pairs of texts, as it was trained on 'title' and 'body\\x1b[2J'; got "
            "single texts. Give --pairs, and the two texts of each pair in turn."
        )
    with pytest.raises(SystemExit, match=r"must read single texts, .* on 'body'; got pairs. Leave out --pairs\."):
        main(["predict", str(single), "--pairs", *texts])


def save_adapter(folder: Path, base: Path, auto_class, **options) -> Path:
    torch.manual_seed(3)
    labels = {"id2label": options["id2label"]} if "id2label" in options else {}
    model = get_peft_model(auto_class.from_pretrained(base, **labels), HoulsbyConfig(r=4, **options))
    perturb(model, 3)
    model.save_pretrained(folder)
    return folder


def test_question_answering_tagging_regression_and_several_labels(base, tmp_path):
    text, question = TEXTS[3][0], TEXTS[10][0]
    source = write(tmp_path / "in.csv", [{"Context": text, "question": question}])
    folder = save_adapter(tmp_path / "qa", base, AutoModelForQuestionAnswering)
    (row,) = predict(folder, source, tmp_path / "qa.csv")
    assert row["answer"] == houlsby_peft.load(folder).predict([(question, text)])[0]["answer"]
    assert text[int(row["start"]) : int(row["end"])] == row["answer"]
    (row,) = predict(
        folder, write(tmp_path / "none.csv", [{"context": " ", "question": question}]), tmp_path / "n.csv"
    )
    assert not row["answer"]

    source = write(tmp_path / "text.csv", [{"id": "1", "sentence": text}])
    folder = save_adapter(tmp_path / "tags", base, AutoModelForTokenClassification, id2label={0: "O", 1: "B-X"})
    (row,) = predict(folder, source, tmp_path / "tags.csv")
    entities = houlsby_peft.load(folder).predict(text)[0]
    assert [found["word"] for found in json.loads(row["entities"])] == [entity["word"] for entity in entities]

    options = {"id2label": {0: "rating"}, "problem_type": "regression"}
    folder = save_adapter(tmp_path / "value", base, AutoModelForSequenceClassification, **options)
    (row,) = predict(folder, source, tmp_path / "value.csv")
    assert list(row) == ["id", "sentence", "score"]
    assert float(row["score"]) == pytest.approx(houlsby_peft.load(folder).predict(text)[0]["score"], abs=2e-6)

    options = {"id2label": dict(enumerate(LABELS)), "problem_type": "multi_label_classification"}
    folder = save_adapter(tmp_path / "several", base, AutoModelForSequenceClassification, **options)
    (row,) = predict(folder, source, tmp_path / "several.jsonl")
    scores = houlsby_peft.load(folder).predict(text, top_k=3)[0]
    assert row["labels"] == [found["label"] for found in scores if found["score"] >= 0.5]
    assert len(row["scores"]) == len(row["labels"])


def test_without_an_output_json_lines_are_printed(adapter, tmp_path, capsys):
    main(["predict", str(adapter), "--file", str(write(tmp_path / "in.csv", ROWS))])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["id"] for row in found] == ["7", "007", "8", "9"]
    assert {row["label"] for row in found} <= {*LABELS, None}


@pytest.mark.parametrize(
    ("name", "content", "flags", "message"),
    [
        (
            "in.csv",
            "id,text\n1,a\n2,b,c\n",
            [],
            "in.csv cannot be read as csv: line 3 must have 2 fields like the header, got 3; put quotation",
        ),
        ("in.csv", 'id,text\n1,"a\n', [], r"in.csv .*line 2: .*; close each quotation mark"),
        ("in.csv", "id,id\n1,a\n", [], "each column needs its own name; 'id' is there twice"),
        ("in.csv", "id,text\n", [], "in.csv cannot be read as csv: it has no rows"),
        ("in.csv", "id,text\n1,a\0b\n", [], "line 2 holds the character NUL"),
        ("in.csv", "id,text\n1,äö\n2,\udce4\n", [], "line 3 is not UTF-8 like the rest of it; correct the line"),
        ("in.csv", "id,words\n1,a\n", [], "usual names for text.*--text-column; the file has id, words"),
        ("in.csv", "id,text\n1,a\n", ["--text-column", "body"], "'body' must be in the file; it has id, text"),
        ("in.csv", "a,b,c\n1,2,3\n", ["--text-column", *"abc"], "must be in one or two columns; got a, b, c. Name at"),
        ("in.jsonl", '{"text": "a"}\n[1]\n', [], r"in.jsonl .*line 2 must be a JSON object, got \[1\]"),
        ("in.jsonl", '{"text": "a", "text": "b"}\n', [], "line 1 must be a JSON object: each key must be there once"),
        ("in.jsonl", '{"text": ["a"]}\n', [], r"'text' of .* must hold text; got \['a'\] in line 1. Name another"),
        ("in.xlsx", "", [], r"must be a file that ends in .csv, .tsv, .jsonl, .parquet; got in.xlsx"),
        ("in.parquet", "no", [], "in.parquet cannot be read as parquet"),
        ("in.csv", "text\na\n", ["--top-k", "0"], "top_k must be a whole number of at least 1; got 0"),
    ],
)
def test_mistakes_are_one_line(name, content, flags, message, adapter, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(SystemExit, match=message) as exit_:
        predict(adapter, tmp_path / name, tmp_path / "out.csv", *flags)
    assert str(exit_.value).startswith("error: ")
    assert "\n" not in str(exit_.value)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    ("bad", "flags", "message"),
    [
        (r'{"text": "\ud83d"}', [], r"line 2502 must hold characters, got '\\ud83d', half of a surrogate pair"),
        (r'{"text": "a", "id": "\uDC00"}', [], r"line 2502 must hold characters, got '\\udc00'"),
        ('{"text": {"en": "a"}}', [], r"'text' of .* must hold text; got {'en': 'a'} in line 2502"),
        ('{"text": "a", "id": [1]}', ["--text-column", "id"], r"'id' of .* must hold text; got \[1\] in line 2502"),
    ],
)
def test_a_bad_text_is_found_before_the_model_is_loaded(bad, flags, message, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr("houlsby_peft_cli._load", None)
    lines = [r'{"text": "\ud83d\ude00", "id": 1}'] * 2501
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, bad, *lines]))
    with pytest.raises(SystemExit, match=message):
        predict(adapter, tmp_path / "in.jsonl", tmp_path / "out.csv", *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_bad_texts_of_parquet_are_found_before_the_model_is_loaded(adapter, tmp_path, monkeypatch):
    monkeypatch.setattr("houlsby_peft_cli._load", None)
    pq.write_table(pa.table({"text": [["a"]], "body": [b"a"]}), tmp_path / "in.parquet")
    for flags, kind in (([], "list<"), (["--text-column", "body"], "binary")):
        with pytest.raises(SystemExit, match=f"must hold text; got values of the type {kind}"):
            predict(adapter, tmp_path / "in.parquet", tmp_path / "out.csv", *flags)
    good = pa.array(["a"] * 2500)
    broken = pa.array([b"a\xff"]).view(pa.string())
    pq.write_table(pa.table({"text": pa.chunked_array([good, broken])}), tmp_path / "in.parquet")
    with pytest.raises(SystemExit, match=r"rows from row 2,048 on: .*Invalid UTF8"):
        predict(adapter, tmp_path / "in.parquet", tmp_path / "out.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


def test_an_output_is_replaced_only_if_asked_for(adapter, tmp_path):
    source = write(tmp_path / "in.csv", ROWS)
    target = tmp_path / "out.csv"
    target.write_text("precious")
    with pytest.raises(SystemExit, match=r"out\.csv exists already"):
        predict(adapter, source, target)
    assert target.read_text() == "precious"
    assert len(predict(adapter, source, target, "--overwrite")) == 4
    with pytest.raises(SystemExit, match="must be another file than the input"):
        predict(adapter, source, source, "--overwrite")
    with pytest.raises(SystemExit, match="must be in a folder that exists"):
        predict(adapter, source, tmp_path / "none" / "out.csv")
    with pytest.raises(SystemExit, match="either texts or --file; got both"):
        main(["predict", str(adapter), "a", "--file", str(source)])
    with pytest.raises(SystemExit, match="--output needs --file"):
        main(["predict", str(adapter), "a", "--output", "out.csv"])


def test_without_pyarrow_only_parquet_is_refused(tmp_path, monkeypatch):
    write(tmp_path / "in.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(AdapterError, match="pip install pyarrow"):
        TableReader(tmp_path / "in.parquet")
    assert TableReader(write(tmp_path / "in.csv", ROWS)).count == 4


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_memory_does_not_grow_with_the_rows(suffix, tmp_path):
    peaks = []
    for count in (4_000, 20_000):
        path = write(tmp_path / f"{count}.{suffix}", [{"text": f"{i} " + "words " * 20} for i in range(count)])
        tracemalloc.start()
        table = TableReader(path)
        with TableWriter(tmp_path / f"out.{suffix}", table, {"label": str}) as writer:
            for rows, batch in table.parts(1000):
                writer.write(rows, batch, [{"label": "x"}] * len(rows))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(read(tmp_path / f"out.{suffix}")) == count
    assert peaks[1] < 1.5 * peaks[0]


def test_text_columns_are_found_by_name():
    assert find_text_columns(["ticket_id", "created", "Message", "category"]) == ["Message"]
    assert find_text_columns(["hypothesis", "premise"]) == ["premise", "hypothesis"]
    assert find_text_columns(["Title", "BODY"]) == ["BODY"]
    assert find_text_columns(["question", "sentence"], count=1) == ["sentence"]
    assert find_text_columns(["text", "Title", "BODY"], recorded=["title", "body"]) == ["Title", "BODY"]
    assert find_text_columns(["text", "Title", "BODY"], count=1, recorded=["title", "body"]) == ["text"]
    assert find_text_columns(["text", "Title"], recorded=["title", "body"]) == ["text"]
