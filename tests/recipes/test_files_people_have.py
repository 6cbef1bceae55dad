"""Training files as people have them: exports, spreadsheets, odd encodings, folders and tags."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zipfile
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import ClassVar

import openpyxl
import pandas as pd
import pytest
from datasets import Dataset, DatasetDict
from python_calamine import CalamineWorkbook

import token_classification
from data import reading
from data.data import commit_of
from data.reading import load_data, read_file
from houlsby_peft import AdapterError
from houlsby_peft.predict.tagging import find_entities
from houlsby_peft.tables import Table, read_table, write_table
from recipe_runs import labels_of, load_texts, write
from run.arguments import DataArguments, ReadOptions
from run.edge import RecipeError
from run.training_arguments import RecipeTrainingArguments
from tasks.classification import ClassificationArguments
from token_classification import TaggingArguments


TEXTS = [f"Text number {number} about a parcel, or a bill." for number in range(20)]
EXAMPLES = [{"text": text, "label": "xy"[row % 2]} for row, text in enumerate(TEXTS)]
ROWS = [{"text": "Größe 12, falsch", "label": "a"}, {"text": "=1+2 für 3 €", "label": "b"}]
CSV = pd.DataFrame(ROWS).to_csv(index=False)
LINES = "\n".join(map(json.dumps, ROWS))
IN_COLUMNS = {"text": {"0": ROWS[0]["text"], "1": ROWS[1]["text"]}, "label": ["a", "b"]}
IN_LISTS = {"columns": ["text", "label"], "data": [list(row.values()) for row in ROWS]}
PARAGRAPH = {"context": "Ada sang", "answers": [{"text": "Ada", "answer_start": 0}]}
OF_SQUAD = {
    "version": "1",
    "data": [
        {
            "title": "t",
            "paragraphs": [
                {
                    "context": "Ada sang",
                    "qas": [{"id": "1", "question": "Who?", "answers": PARAGRAPH["answers"]}],
                }
            ],
        }
    ],
}


def zipped(**texts: str) -> bytes:
    """An archive of CSV files."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, text in texts.items():
            file.writestr(f"{name}/data.csv", text)
    return archive.getvalue()


def write_content(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_json(path: Path, content: object) -> Path:
    return write_content(path, json.dumps(content))


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.json", json.dumps(ROWS, indent=1), ROWS),
        ("a.json", json.dumps({"data": [*ROWS, None], "version": 1}), ROWS),
        ("a.json", json.dumps(IN_COLUMNS), ROWS),
        ("a.json", json.dumps(IN_LISTS), ROWS),
        ("a.json", json.dumps(dict(zip("xy", ROWS, strict=True))), ROWS),
        ("a.json", '[{"text": "a", "label": NaN}, {"text": "b", "label": "x"}]',
         [{"text": "a", "label": None}, {"text": "b", "label": "x"}]),
        ("a.json", json.dumps(OF_SQUAD), [PARAGRAPH]),
        ("a.json", LINES, ROWS),
        ("a.ndjson", LINES, ROWS),
        ("a.jsonl", '{\n "text": "a",\n "label": "x"\n}\n{"text": "b"}',
         [{"text": "a", "label": "x"}, {"text": "b", "label": None}]),
        ("a.csv.gz", gzip.compress(CSV.encode()), ROWS),
        ("a.csv", gzip.compress(CSV.encode()), ROWS),
        ("a.csv", zipped(inner=CSV, __MACOSX=""), ROWS),
        ("a.xls", "text\tlabel\nan a\tx\n", [{"text": "an a", "label": "x"}]),
        ("a.csv", "sep=;\ntext;label\nan, a;x\n", [{"text": "an, a", "label": "x"}]),
        ("a.csv", "text,label,label\na,x,1\ntext,label,label\nb,y,2\n",
         [{"label": "x", "label_2": "1"}, {"label": "y", "label_2": "2"}]),
        ("a.csv", 'Q1,Q2\nText?,Class?\n"{""ImportId"":""1""}",b\nx,y\n', [{"Q1": "x", "Q2": "y"}]),
        ("a.csv", 'text,n\n"He said \\"hi\\", twice",a\nb,b\n',
         [{"text": 'He said "hi", twice'}, {"text": "b"}]),
        ("a.csv", 'text,n\n"one\nline",a\n', [{"text": "one\nline"}]),
        ("a.csv", f"text,n\n{'a' * 200_000},b\n", [{"text": "a" * 200_000}]),
        ("a.txt", "__label__x a text\n__label__y b\n",
         [{"text": "a text", "label": "x"}, {"text": "b", "label": "y"}]),
    ],
)  # fmt: skip
def test_a_table(name, content, rows, tmp_path):
    read = read_file(write_content(tmp_path / name, content))
    assert read.select_columns([*rows[0]]).to_list() == rows


@pytest.mark.parametrize(
    ("encoding", "text", "named"),
    [
        ("utf-16-le", "Größe", None),
        ("gbk", "这个产品很好用我非常喜欢这个产品", None),
        ("cp1251", "Счёт неправильный, проверьте пожалуйста", None),
        ("shift_jis", "請求書", "shift_jis"),
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "a.txt"])
def test_encodings(encoding, text, named, name, tmp_path):
    (tmp_path / name).write_bytes(f'text\n"{text}"\n'.encode(encoding))
    assert read_file(tmp_path / name, ReadOptions(named))["text"][-1].strip('"') == text


@pytest.mark.parametrize("line", ["{},billing", "billing,{}", "7,{},billing"])
def test_no_header(line, tmp_path):
    lines = []
    for number, text in enumerate(TEXTS):
        of_row = line.replace("7", str(number)).replace("billing", "ab"[number % 2])
        lines.append(of_row.format(f'"{text}"'))
    (tmp_path / "a.csv").write_text("\n".join(lines))
    task = load_texts(tmp_path / "a.csv")
    assert len(labels_of(task)) == 20
    assert task.kind.names == ("a", "b")
    assert len(read_table(tmp_path / "a.csv", has_header=True).rows) == 19


def test_a_short_file_without_a_header(tmp_path):
    (tmp_path / "a.csv").write_text("It is late,x\nIt is wrong,y\n")
    rows = read_file(tmp_path / "a.csv", ReadOptions(has_header=False))
    assert rows["column_2"][:] == ["x", "y"]


def test_what_is_not_used_may_be_anything(tmp_path):
    rows = [{**row, "n": number} for number, row in enumerate(EXAMPLES)]
    rows[3] |= {"n": {"a": [1]}, "text": None}
    rows[4] |= {"n": "text", "more": 2**70, "text": 12}
    task = load_texts(write_json(tmp_path / "a.json", rows))
    assert len(labels_of(task)) == 19
    assert "12" in {*task.splits["train"]["text"], *task.splits["validation"]["text"]}


def sheet(path: Path) -> Path:
    write_table(path, ROWS, Table(path, ".xlsx", columns=["text", "label"]), [])
    return path


def cells_of(path: Path) -> list[tuple]:
    """The values of a spreadsheet, with their kinds and how they are shown."""
    cells = []
    for row in openpyxl.load_workbook(path).active.iter_rows():
        cells += [(cell.value, cell.data_type, cell.number_format) for cell in row]
    return cells


# As LibreOffice ends each sheet.
_ODS_EMPTY = '<table:table-cell table:number-columns-repeated="{}"/>'
_ODS_CELL = '<table:table-cell office:value-type="string"><text:p>{}</text:p></table:table-cell>'


def write_ods(path: Path, last_row: str) -> Path:
    """A sheet with a header, a row, a million empty rows and a last one."""
    names = ""
    for name in ("office", "table", "text"):
        names += f' xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"'
    rows = ""
    for cells in (("text", "label"), ("a", "b")):
        rows += f"<table:table-row>{''.join(map(_ODS_CELL.format, cells))}</table:table-row>"
    empty = _ODS_EMPTY.format(16_384)
    rows += f'<table:table-row table:number-rows-repeated="1048570">{empty}</table:table-row>'
    rows += f"<table:table-row>{last_row}</table:table-row>"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        archive.writestr("META-INF/manifest.xml", "<manifest:manifest/>")
        archive.writestr(
            "content.xml",
            f"<office:document-content{names}><office:body><office:spreadsheet>"
            f'<table:table table:name="s">{rows}</table:table>'
            "</office:spreadsheet></office:body></office:document-content>",
        )
    return path


class TestSpreadsheets:
    @pytest.mark.parametrize("name", ["a.xlsx", "a.csv"])
    def test_the_content_counts(self, name, tmp_path):
        path = sheet(tmp_path / "b.xlsx").rename(tmp_path / name)
        assert read_file(path).select_columns(["text", "label"]).to_list() == ROWS
        written = CalamineWorkbook.from_path(str(path)).get_sheet_by_index(0).to_python()
        assert written[2] == ["=1+2 für 3 €", "b"], "no formula"

    def test_other_sheets_and_a_title(self, tmp_path):
        rows = [["Export of May", None], ["text", "label"], ["a", "x"], ["b", "y"]]
        with pd.ExcelWriter(tmp_path / "a.xlsx") as book:
            pd.DataFrame({"nothing": []}).to_excel(book, sheet_name="empty", index=False)
            pd.DataFrame(rows).to_excel(book, sheet_name="data", index=False, header=False)
        assert read_file(tmp_path / "a.xlsx")["label"][:] == ["x", "y"]

    def test_merged_cells_are_filled_and_hidden_rows_said(self, tmp_path, capsys):
        book = openpyxl.Workbook()
        for row in [["text", "label"], ["a", "x"], ["b", None], ["c", "y"]]:
            book.active.append(row)
        book.active.merge_cells("B2:B3")
        book.active.row_dimensions[4].hidden = True
        book.save(tmp_path / "a.xlsx")
        assert read_file(tmp_path / "a.xlsx")["label"][:] == ["x", "x", "y"]
        assert "1 rows are hidden" in capsys.readouterr().out

    def test_a_copy_has_numbers_dates_and_truth_values(self, tmp_path):
        """They are read as texts, and written as they were, unless they are corrected."""
        at = datetime(2024, 3, 1, 5, 30)
        source = openpyxl.Workbook()
        for row in [
            ["Export of May"],
            ["text", "id", "price", "paid", "day", "at", "time", "lasts"],
            ["007", 7, 3.5, True, at.date(), at, at.time(), timedelta(hours=30)],
            ["=1", -8, 2.5, False, None, None, None, None],
        ]:
            source.active.append(row)
        source.active["A4"].data_type = "s"
        source.save(tmp_path / "a.xlsx")
        table = read_table(tmp_path / "a.xlsx")
        texts = ["007", "7", "3.5", "True", "2024-03-01", "2024-03-01 05:30:00", "05:30:00"]
        assert [*table.rows[0].values()][:-1] == texts
        table.rows[1] |= {"price": "4", "score": 0.5}
        write_table(tmp_path / "b.xlsx", table.rows, table, ["score"])
        source.active.delete_rows(1)
        source.active["C3"].value = "4"
        source.active["I1"].value, source.active["I3"].value = "score", 0.5
        source.save(tmp_path / "a.xlsx")
        assert cells_of(tmp_path / "b.xlsx") == cells_of(tmp_path / "a.xlsx")

    def test_what_other_formats_have_is_written(self, tmp_path):
        at = datetime(2024, 3, 1, tzinfo=timezone.utc)
        row = {"at": at, "paid": True, "tags": ["a"], "empty": "", "control": "a\x07"}
        write_table(tmp_path / "a.xlsx", [row], Table(tmp_path, ".parquet", columns=[*row]), [])
        [_, written] = openpyxl.load_workbook(tmp_path / "a.xlsx").active.values
        assert written == ("2024-03-01 00:00:00+00:00", True, '["a"]', None, "a\ufffd")

    def test_a_usual_end_of_a_sheet(self, tmp_path):
        path = write_ods(tmp_path / "a.ods", _ODS_EMPTY.format(16_384))
        assert read_file(path)["label"][:] == ["b"]

    def test_what_would_fill_the_memory(self, tmp_path):
        with zipfile.ZipFile(sheet(tmp_path / "a.xlsx")) as source:
            parts = {name: source.read(name) for name in source.namelist()}
        with zipfile.ZipFile(tmp_path / "far.xlsx", "w") as target:
            for name, content in parts.items():
                target.writestr(name, content.replace(b'r="B3"', b'r="XFD1048576"'))
        write_ods(tmp_path / "far.ods", _ODS_EMPTY.format(16_383) + _ODS_CELL.format("x"))
        for name in ("far.xlsx", "far.ods"):
            with pytest.raises(AdapterError, match=r"1,048,\d+ rows and 16,384 columns"):
                read_file(tmp_path / name)


STUDIO = {
    "id": 3,
    "data": {"text": "Ada sang"},
    "annotations": [
        {"was_cancelled": True, "result": []},
        {"result": [{"value": {"choices": ["good", "loud"]}, "type": "choices"}]},
    ],
}
MARKED = [{"result": [{"value": {"start": 0, "end": 3, "labels": ["PER"]}}]}]
SPAN = {"start": 0, "end": 3, "label": "PER"}
OFFSETS = {"start_offset": 0, "end_offset": 3, "label": "PER"}
ADA = {"text": "Ada sang"}
PRODIGY = {**ADA, "_input_hash": 1, "_task_hash": 2, "answer": "accept"}


@pytest.mark.parametrize(
    ("rows", "column", "value"),
    [
        ([STUDIO], "label", ["good", "loud"]),
        ([{**STUDIO, "annotations": []}, STUDIO], "label", None),
        ([{**STUDIO, "annotations": MARKED}], "spans", [SPAN]),
        ([{**ADA, "annotator": 1, "annotation_id": 2, "mood": {"choices": ["good"]}}],
         "label", ["good"]),
        ([{**ADA, "id": 1, "label": [[0, 3, "PER"]]}], "spans", [SPAN]),
        ([{**ADA, "entities": [OFFSETS]}], "spans", [SPAN]),
        ([{**ADA, "label": ["good"]}], "label", ["good"]),
        ([{**PRODIGY, "label": "good"}], "label", "good"),
        ([{**PRODIGY, "label": "good", "answer": "reject"}], "label", "not good"),
        # A table, whose column is called as Prodigy's.
        ([{**ADA, "label": "good", "answer": "reject"}], "label", "good"),
        ([{**PRODIGY, "accept": ["x"], "answer": "ignore"}, {**PRODIGY, "accept": ["good"]}],
         "label", ["good"]),
        ([{**PRODIGY, "spans": [{**SPAN, "token_end": 0}]}], "spans", [SPAN]),
    ],
)  # fmt: skip
def test_exports(rows, column, value, tmp_path):
    table = read_file(write_json(tmp_path / "a.json", rows))
    assert table["text"][0] == "Ada sang"
    assert table[column][0] == value


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("a.xls", "<html><table></table></html>", "HTML"),
        ("a.parquet", "PAR1 no table", "damaged"),
        ("a.csv.gz", gzip.compress(b"text,label\n" * 99, mtime=0)[:-9], "unpacked"),
        ("a.ods", b"PK\x03\x04 no archive", "unpacked"),
        ("a.csv", zipped(inner=CSV, other=CSV), "one file"),
        ("a.csv", 'text,label\n"a,b\nc,d\n', "row 2"),
        ("a.json", "[" * 100_000, "recursion|nest"),
        ("a.json", "1", "JSON object"),
        ("a.conll", "Ada B-PER\nvisits\n", "line 2"),
        ("a.docx", "PK", "parquet"),
        ("a.json", json.dumps([STUDIO, {"data": {"text": "a"}}]), "row 2 is not as Label Studio"),
        ("a.json", json.dumps([{**ADA, "entities": [[0, "three", "PER"]]}]), "row 1 .* doccano"),
    ],
)
def test_files_that_are_refused(name, content, word, tmp_path):
    with pytest.raises((AdapterError, RecipeError), match=word):
        read_file(write_content(tmp_path / name, content))


def test_an_encoding_that_does_not_fit(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text,label\na,b\n\xff\x81,c\n")
    with pytest.raises(AdapterError, match="--encoding"):
        read_file(tmp_path / "a.csv", ReadOptions("cp1252"))


def test_what_would_never_end(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    for name in ("pipe.csv", "zero.csv"):
        with pytest.raises(AdapterError, match="must be a file"):
            read_file(tmp_path / name)


def test_pandas_makes_a_table_of_an_unknown_form(tmp_path, monkeypatch):
    """The line of the error does what it says."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for row in EXAMPLES:
        answers = [{"label": {"value": row["label"]}, "by": "a"}]
        rows.append({"id": "1", "data": {"text": row["text"]}, "responses": answers})
    path = write_json(tmp_path / "a.json", rows)
    with pytest.raises(AdapterError, match="To make a table: ") as error:
        load_texts(path)
    line = str(error.value).partition("To make a table: ")[2]
    exec(line, {"pandas": pd, "FILE": str(path)})
    labels = dict(zip(TEXTS, "xy" * 10, strict=True))
    task = load_texts(tmp_path / "table.csv", text_columns=["text"])
    assert labels_of(task) == [labels[text] for text in sorted(TEXTS)]


def splits_of(task) -> dict[str, int]:
    return {name: len(split) for name, split in task.splits.items()}


class TestSplits:
    """Test rows are never trained on, however the splits are written."""

    SPLITS: ClassVar = {"train": 20, "validation": 5, "test": 4}

    @pytest.mark.parametrize(
        "names",
        [
            ("train-00000-of-00001.parquet", "validation-0.parquet", "test-00000-of-00001.parquet"),
            ("data/train.parquet", "data/dev-1.parquet", "data/test.parquet"),
            ("tickets_train.csv", "tickets_dev.csv", "tickets_test.csv"),
            ("Train.CSV", "val.csv", "test.csv"),
            ("en-ud-train.csv", "en-ud-dev.csv", "en-ud-test.csv"),
            ("train.tsv", "devel.tsv", "test.tsv"),
            ("train/a.csv", "valid/a.csv", "test/a.csv"),
            ("tickets.csv", "dev.csv", "test.csv"),
        ],
    )
    def test_names_of_files(self, names, tmp_path):
        for name, count in zip(names, self.SPLITS.values(), strict=True):
            write(tmp_path / name, text=TEXTS[:count], label=[*"xy" * 10][:count])
        for name in (".~lock.train.csv#", "._train.csv", ".DS_Store"):
            (tmp_path / name).write_bytes(b"\0")
        assert splits_of(load_texts(tmp_path, keep_repeated=True)) == self.SPLITS

    def test_a_column(self, tmp_path):
        rows = [{**row, "Split": "train"} for row in EXAMPLES[:16]]
        rows += [{**row, "Split": "test"} for row in EXAMPLES[16:]]
        task = load_texts(write_json(tmp_path / "a.json", rows))
        assert splits_of(task) == {"train": 13, "validation": 3, "test": 4}
        rows[3]["Split"] = "unlabeled"
        with pytest.raises(RecipeError, match="row 4 has 'unlabeled'"):
            load_texts(write_json(tmp_path / "b.json", rows))

    @pytest.mark.parametrize("make", [dict, lambda row: list(row.values())])
    def test_an_object_of_objects_or_pairs(self, make, tmp_path):
        rows = list(map(make, EXAMPLES))
        parts = {"train": rows[:16], "dev": rows[:5], "test": rows[16:]}
        task = load_texts(write_json(tmp_path / "a.json", parts), keep_repeated=True)
        assert splits_of(task) == {"train": 16, "validation": 5, "test": 4}

    def test_what_the_library_datasets_has_saved(self, tmp_path):
        whole = Dataset.from_list(EXAMPLES)
        DatasetDict({"train": whole, "test": whole}).save_to_disk(tmp_path / "several")
        assert splits_of(load_texts(tmp_path / "several"))["test"] == 20
        whole.save_to_disk(tmp_path / "one")
        assert sum(splits_of(load_texts(tmp_path / "one")).values()) == 20

    def test_a_folder_for_each_class(self, tmp_path):
        for number, text in enumerate(TEXTS):
            folder = tmp_path / "train" / ("billing", "angry")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.txt").write_text(text)
        for path in (tmp_path, tmp_path / "train"):
            task = load_texts(path)
            assert task.kind.names == ("angry", "billing")
            assert len(labels_of(task)) == 20

    def test_files_of_one_format(self, tmp_path):
        for name in ("part1.csv", "part2.csv"):
            write(tmp_path / name, text=TEXTS, label=["x", "y"] * 10)
        assert len(load_texts(tmp_path, keep_repeated=True).undivided) == 40
        (tmp_path / "part2.csv").rename(tmp_path / "other.csv")
        with pytest.raises(RecipeError, match="different names"):
            load_texts(tmp_path)
        task = load_texts(tmp_path / "part1.csv", more_data=[str(tmp_path / "other.csv")])
        assert len(task.undivided) == 40

    def test_what_is_not_used_is_said(self, tmp_path, capsys):
        for name in ("train.csv", "dev.csv", "other.csv"):
            write(tmp_path / name, text=TEXTS, label=["x", "y"] * 10)
        load_texts(tmp_path)
        assert f"not used in {tmp_path}: other.csv" in capsys.readouterr().out

    @pytest.mark.parametrize("names", [(), ("dev.csv",)], ids=["no file", "no training file"])
    def test_a_folder_without_training_examples(self, names, tmp_path):
        for name in names:
            write(tmp_path / name, text=["c"])
        with pytest.raises(RecipeError, match="no split 'train'"):
            load_texts(tmp_path)

    def test_data_on_the_hub_without_a_split_to_train_on(self, monkeypatch):
        splits = {"dev": Dataset.from_dict({"text": ["a"]})}
        monkeypatch.setattr(reading, "load_dataset", lambda name, config: splits)
        with pytest.raises(RecipeError, match="it has dev"):
            load_texts("user/data")

    def test_the_commit_of_data_on_the_hub_is_known_of_what_is_left_of_them(
        self, tmp_path, monkeypatch
    ):
        rows = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
        assert commit_of(rows) is None
        commit = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
        folder = tmp_path / "user___data" / "default" / "0.0.0" / commit
        rows.save_to_disk(folder)
        splits = {"train": Dataset.load_from_disk(folder)}
        monkeypatch.setattr(reading, "load_dataset", lambda name, config: splits)
        splits = load_data(DataArguments(data="user/data"), RecipeTrainingArguments(use_cpu=True))
        assert commit_of(splits["train"].select([1]).remove_columns("label")) == commit

    def test_a_file_that_is_not_there_is_no_name_on_the_hub(self):
        with pytest.raises(RecipeError, match=r"'none\.csv'"):
            ClassificationArguments(data="none.csv")


def write_sentences(path: Path, *lines: str) -> Path:
    """Write four equal sentences, or a single one of other lines."""
    path.write_text("\n".join([*lines, ""] * 4) + "\n")
    return path


def read_tagged(path: Path, **options: object):
    """The words and tags of each sentence, in order, and the task."""
    arguments = TaggingArguments(data=str(path), **options)
    task = token_classification.load_task(arguments, RecipeTrainingArguments(use_cpu=True), None)
    sentences = []
    for split in task.splits.values():
        for words, tags in zip(split["words"], split["tags"], strict=True):
            sentences.append((words, [task.labels[tag] for tag in tags]))
    return sorted(sentences), task


SENTENCE = ["Ada", "Byron", "saw", "Oslo"]
IOB2 = ["B-PER", "I-PER", "O", "B-LOC"]
DIALECTS = {
    "IOB1": ["I-PER", "I-PER", "O", "I-LOC"],
    "IOBES": ["B-PER", "E-PER", "O", "S-LOC"],
    "BILOU": ["B-PER", "L-PER", "O", "U-LOC"],
    "BMES": ["B-PER", "E-PER", "O", "S-LOC"],
    "BMEWO": ["B-PER", "E-PER", "O", "W-LOC"],
    "underscore": ["B_PER", "I_PER", "O", "B_LOC"],
    "letter behind": ["PER-B", "PER-I", "O", "LOC-B"],
    "lower case": ["b-PER", "i-PER", "o", "b-LOC"],
}
SPANS = [
    {"start": 14, "end": 17, "label": "LOC"},
    {"start": 0, "end": 9, "label": "PER"},
    {"start": 4, "end": 9, "label": "LOC"},
]


class TestTags:
    @pytest.mark.parametrize("tags", DIALECTS.values(), ids=list(DIALECTS))
    def test_schemes(self, tags, tmp_path):
        lines = [f"{word} {tag}" for word, tag in zip(SENTENCE, tags, strict=True)]
        sentences, task = read_tagged(write_sentences(tmp_path / "a.conll", *lines))
        assert sentences == [(SENTENCE, IOB2)] * 4
        assert task.are_entities

    def test_a_kind_called_o(self, tmp_path):
        _, task = read_tagged(write_sentences(tmp_path / "a.conll", "Ada B-O", "saw O"))
        assert task.labels == ("B-O", "O")
        assert find_entities(["B-O", "O"]) == [("O", 0, 0)]

    @pytest.mark.parametrize(
        ("name", "lines", "options"),
        [
            ("a.conllu", ["# text = Ada saw", "1-2\tAdasaw" + "\t_" * 8,
                          "1\tAda\tada\tB-PER" + "\t_" * 6, "2\tsaw\tsee\tO" + "\t_" * 6], {}),
            ("a.tsv", ["#\thttp://a.de/x=1 [2009]", "1\tAda\tB-PER\tO", "2\tsaw\tO\tO"], {}),
            ("a.conll", ["# id = 3 domain=en", "Ada _ B-PER", "saw _ O"], {}),
            ("a.conll", ["B-PER Ada", "O saw"], {"word_column": "2", "tag_column": "1"}),
            ("a.txt", ["Ada NNP B-PER", "saw VBD O"], {}),
            ("a.bio", ["Ada\tB-PER", "saw\tO"], {}),
        ],
    )  # fmt: skip
    def test_columns(self, name, lines, options, tmp_path):
        sentences, _ = read_tagged(write_sentences(tmp_path / name, *lines), **options)
        assert (["Ada", "saw"], ["B-PER", "O"]) in sentences
        assert not any("1" in words for words, _ in sentences)

    def test_words_that_look_like_a_comment(self, tmp_path):
        (tmp_path / "a.conll").write_text("Ada _ B-PER\n# a=b O\n\n# _ O\n1 _ O\n")
        rows = read_file(tmp_path / "a.conll")
        assert rows["tokens"][:] == [["Ada", "#"], ["#", "1"]]
        assert rows["tags"][:] == [["B-PER", "O"], ["O", "O"]]

    @pytest.mark.parametrize(
        ("line", "options", "word"),
        [
            ("x{0} word{1}", {}, "more words than tags"),
            ("x{0} word{1}", {"tag_column": "3"}, "from 1 to 2"),
            ("word{1} O", {}, "two tags, they have O"),
        ],
    )
    def test_what_is_asked_for(self, line, options, word, tmp_path):
        lines = [line.format(number % 2, number) for number in range(20)]
        (tmp_path / "a.conll").write_text("\n".join(lines))
        with pytest.raises(RecipeError, match=word):
            read_tagged(tmp_path / "a.conll", **options)

    def test_a_word_with_a_blank(self, tmp_path):
        """As in predictions, it is two words, of one entity."""
        lines = ["-DOCSTART- (doc_1)\tO", "", "New York\tB-LOC", "sleeps\tO"]
        sentences, _ = read_tagged(write_sentences(tmp_path / "a.conll", *lines))
        assert sentences == [(["New", "York", "sleeps"], ["B-LOC", "I-LOC", "O"])] * 4

    @pytest.mark.parametrize(
        ("row", "options"),
        [
            ({"tokens": str(SENTENCE), "tags": str(IOB2)}, {}),
            ({"tokens": " ".join(SENTENCE), "tags": " ".join(IOB2)}, {}),
            ({"words": SENTENCE, "ner_tags": [0, 1, 2, 3]}, {"tag_names": [*IOB2]}),
            ({"text": " ".join(SENTENCE), "spans": SPANS, "answer": "accept"}, {}),
        ],
    )
    def test_other_forms(self, row, options, tmp_path):
        sentences, _ = read_tagged(write_json(tmp_path / "a.json", [row] * 4), **options)
        assert sentences == [(SENTENCE, IOB2)] * 4

    @pytest.mark.parametrize(
        ("spans", "tags", "note"),
        [
            # The first counts.
            ([(3, 5), (8, 10)], ["B-PER", "O"], "overlap earlier ones or share a word with one"),
            # As of tools that count characters as JavaScript does.
            ([(2, 12)], ["B-PER", "I-PER"], "begin or end within a word, and mark the whole word"),
            ([(0, 99)], ["O", "O"], "end beyond their text"),
            ([(10, 11)], ["O", "O"], "mark no word of their text"),
        ],
    )
    def test_spans_that_do_not_fit(self, spans, tags, note, tmp_path, capsys):
        marked = [{**SPAN, "start": start, "end": end} for start, end in spans]
        row = {"text": "IUX94Rgc83 sings", "spans": marked, "answer": "accept"}
        right = {"text": "Ada", "spans": [{**SPAN, "start": 0, "end": 3}], "answer": "accept"}
        sentences, _ = read_tagged(write_json(tmp_path / "a.json", [row] * 4 + [right]))
        assert (["IUX94Rgc83", "sings"], tags) in sentences
        [listed] = re.findall(f"spans that {note}.*: (.*)", capsys.readouterr().out)
        assert listed == "4 (row 1, row 2, row 3, row 4)"

    def test_a_word_per_row(self, tmp_path):
        rows = []
        for number in range(4):
            for position, (word, tag) in enumerate(zip(SENTENCE, IOB2, strict=True)):
                sentence = "" if position else f"Sentence: {number}"
                rows.append({"Sentence #": sentence, "Word": word, "POS": "X", "Tag": tag})
        pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
        assert read_tagged(tmp_path / "a.csv")[0] == [(SENTENCE, IOB2)] * 4

    def test_a_word_without_a_tag(self, tmp_path):
        rows = {"sentence_id": ["1", "1"], "word": ["Ada", "saw"], "tag": ["B-PER", ""]}
        pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
        with pytest.raises(RecipeError, match="row 3 has none for 'saw'"):
            read_tagged(tmp_path / "a.csv")
