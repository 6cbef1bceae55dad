"""Training files as people have them: exports, spreadsheets, odd encodings, labels and headers.

Each case is a small file; what is read from it and what the log says of it are compared.
"""

from __future__ import annotations

import gzip
import json
import os
import time
import zipfile
from pathlib import Path
from typing import ClassVar

import openpyxl
import pandas as pd
import pytest
from datasets import Dataset, DatasetDict
from python_calamine import CalamineWorkbook

import token_classification
from data.labels import MULTI, REGRESSION, SINGLE
from data.reading import read_file
from houlsby_peft import AdapterError
from houlsby_peft.predict.tagging import find_entities
from houlsby_peft.tables import Table, read_table, write_table
from run.arguments import ReadOptions
from run.edge import RecipeError
from run.training_arguments import RecipeTrainingArguments
from tasks.classification import ClassificationArguments, load_task
from token_classification import TaggingArguments


TEXTS = [f"Text number {number} about a parcel, or a bill." for number in range(20)]


def load(path: Path, **options: object):
    arguments = ClassificationArguments(data=str(path), **options)
    return load_task(arguments, RecipeTrainingArguments(use_cpu=True))


def labels_of(task) -> list[str]:
    """The labels of the training and validation examples, in the order of their texts."""
    rows = []
    for split in ("train", "validation"):
        data = task.splits[split]
        texts = list(zip(*(data[name] for name in task.text_columns), strict=True))
        rows += zip(texts, task.kind.decode(data["label"]), strict=True)
    return [label for _, label in sorted(rows)]


def write_csv(
    folder: Path, labels: list[object], name: str = "data.csv", **options: object
) -> Path:
    texts = sorted(TEXTS)[: len(labels)]
    pd.DataFrame({"text": texts, "label": labels}).to_csv(folder / name, index=False, **options)
    return folder / name


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    return path


class TestLabels:
    @pytest.mark.parametrize(
        ("labels", "problem_type", "names", "said"),
        [
            (["['billing', 'angry']", "['billing']"] * 10, MULTI, "angry billing", "lists"),
            (['["a"]', '["b", "a"]'] * 10, MULTI, "a b", "lists of labels"),
            (['{"choices": ["a", "b"]}', "b", "a"] * 6, MULTI, "a b", "lists of labels"),
            (["billing, angry", "billing", "angry"] * 6, MULTI, "angry billing", "by ','"),
            (["a;b", "b", "a"] * 6, MULTI, "a b", "separated by ';'"),
            (["a|b", "b", "a|c", "c", "a"] * 4, MULTI, "a b c", "separated by '|'"),
            (["Health, Beauty", "Toys"] * 10, SINGLE, "Health, Beauty|Toys", ""),
            (["[1, 1, 0]", "[0, 0, 1]"] * 10, MULTI, "class_0 class_1 class_2", "--class_names"),
            (["3.5", "4", "n/a", "2.5", "5"] * 4, REGRESSION, "label", "(n/a) left out"),
            (["1", "2", "n/a", "2"] * 5, SINGLE, "1 2", "left out"),
            (["1", "1.0", "2", "2"] * 5, SINGLE, "1|1.0|2", ""),
        ],
    )
    def test_several_in_a_cell_and_marks(self, labels, problem_type, names, said, tmp_path, capsys):
        task = load(write_csv(tmp_path, labels))
        assert task.kind.problem_type == problem_type
        separator = "|" if "|" in names else None
        if "," not in names or separator:
            assert list(task.kind.names) == names.split(separator)
        assert said in capsys.readouterr().out

    def test_which_classes_a_list_has(self, tmp_path):
        task = load(write_csv(tmp_path, ["[1, 0]", "[1, 1]", "[0, 0]"] * 5), class_names=["x", "y"])
        assert labels_of(task) == ["x", "x; y", ""] * 5
        rows = [{"text": text, "labels": [1, 0, 1]} for text in TEXTS]
        rows[0]["labels"] = [0, 1, 0]
        task = load(write_jsonl(tmp_path / "a.jsonl", rows))
        assert task.kind.names == ("class_0", "class_1", "class_2")
        assert sorted(set(labels_of(task))) == ["class_0; class_2", "class_1"]

    def test_a_joined_label_is_said(self, tmp_path, capsys):
        """A part is a class by itself, but too few are to split the others."""
        task = load(write_csv(tmp_path, ["billing, angry", "billing", "other"] * 5))
        assert task.kind.problem_type == SINGLE
        assert "Give --label_separator ','" in capsys.readouterr().out

    def test_many_columns(self, tmp_path):
        """Looking for the labels takes no time that grows with the square of the columns."""
        names = ["text", *(f"c{number}" for number in range(1_000))]
        lines = [",".join(names)]
        lines += [",".join([text.replace(",", ""), *"z" * 1_000]) for text in TEXTS]
        (tmp_path / "a.csv").write_text("\n".join(lines))
        begin = time.perf_counter()
        with pytest.raises(RecipeError, match="Name the label"):
            load(tmp_path / "a.csv")
        assert time.perf_counter() - begin < 60

    def test_spellings_are_said_and_merged_on_request(self, tmp_path, capsys):
        path = write_csv(tmp_path, ["billing", "Billing ", "billing", "other"] * 5)
        assert load(path).kind.names == ("Billing", "billing", "other")
        assert "give --merge_labels" in capsys.readouterr().out
        assert load(path, merge_labels=True).kind.names == ("billing", "other")

    def test_files_with_other_forms_of_a_number(self, tmp_path, capsys):
        write_csv(tmp_path, ["1", "2"] * 8, "train.csv")
        write_csv(tmp_path, ["1.0", "2.0", "3.0"], "validation.csv")
        task = load(tmp_path, keep_repeated=True)
        assert task.splits["validation"]["label"] == [0, 1]
        assert "1 row with a class that no training example has ('3.0')" in capsys.readouterr().out

    def test_flags_that_were_not_judged(self, tmp_path, capsys):
        rows = {"text": TEXTS, "toxic": [1, 0, -1, 0] * 5, "spam": [0, 1, 0, ""] * 5}
        pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
        task = load(tmp_path / "a.csv", label_columns=["toxic", "spam"])
        assert sorted(set(labels_of(task))) == ["spam", "toxic"]
        assert "10 rows without a label" in capsys.readouterr().out

    def test_names_beside_numbers(self, tmp_path):
        rows = [
            {"text": text, "label": number % 2, "label_text": ["no", "yes"][number % 2]}
            for number, text in enumerate(TEXTS)
        ]
        assert load(write_jsonl(tmp_path / "a.jsonl", rows)).kind.names == ("no", "yes")


class TestColumns:
    @pytest.mark.parametrize(
        ("columns", "texts"),
        [
            (("text_a", "text_b"), ("text_a", "text_b")),
            (("question", "answer"), ("question", "answer")),
            (("sentence_A", "sentence_B"), ("sentence_A", "sentence_B")),
            (("Title", "Review Text"), ("Review Text",)),
            (("Subject", "id"), ("Subject",)),
        ],
    )
    def test_texts(self, columns, texts, tmp_path, capsys):
        first, second = columns
        rows = {
            first: [f"A title of {number}" for number in range(20)],
            second: range(20) if second == "id" else TEXTS,
            "label": ["x", "y"] * 10,
        }
        pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
        assert load(tmp_path / "a.csv").text_columns == texts
        assert f"texts: {', '.join(texts)};" in capsys.readouterr().out

    @pytest.mark.parametrize("line", ["{},billing", "billing,{}", "7,{},billing"])
    def test_no_header(self, line, tmp_path, capsys):
        lines = [line.format(f'"{text}"').replace("7", str(n)) for n, text in enumerate(TEXTS)]
        lines = [text.replace("billing", "ab"[n % 2]) for n, text in enumerate(lines)]
        (tmp_path / "a.csv").write_text("\n".join(lines))
        task = load(tmp_path / "a.csv")
        assert len(labels_of(task)) == 20
        assert task.kind.names == ("a", "b")
        assert "no header: the first row is" in capsys.readouterr().out
        assert len(read_table(tmp_path / "a.csv", has_header=True).rows) == 19

    def test_a_short_file_without_a_header(self, tmp_path):
        (tmp_path / "a.csv").write_text("It is late,x\nIt is wrong,y\n")
        data = read_file(tmp_path / "a.csv", ReadOptions(has_header=False))
        assert data["column_2"][:] == ["x", "y"]

    def test_a_header_again_and_a_name_twice(self, tmp_path, capsys):
        (tmp_path / "a.csv").write_text("text,label,label\na,x,1\ntext,label,label\nb,y,2\n")
        data = read_file(tmp_path / "a.csv")
        assert data["label"][:] == ["x", "y"]
        assert data["label_2"][:] == ["1", "2"]
        assert "rows that repeat the header are left out: 1" in capsys.readouterr().out

    def test_what_is_not_used_may_be_anything(self, tmp_path):
        rows = [{"text": text, "label": "xy"[n % 2], "n": n} for n, text in enumerate(TEXTS)]
        rows[3] |= {"n": {"a": [1]}, "text": None}
        rows[4] |= {"n": "text", "more": 2**70, "text": 12}
        task = load(write_jsonl(tmp_path / "a.jsonl", rows))
        assert len(labels_of(task)) == 19
        assert "12" in {*task.splits["train"]["text"], *task.splits["validation"]["text"]}


def sheet(path: Path, rows: list[dict[str, object]]) -> Path:
    write_table(path, rows, Table(path, ".xlsx", columns=list(rows[0])), [])
    return path


ROWS_OF_ODS = (("text", "label"), ("a", "b"))


def write_ods(path: Path, rows: str) -> Path:
    namespaces = {"office": "office", "table": "table", "text": "text"}
    names = " ".join(
        f'xmlns:{key}="urn:oasis:names:tc:opendocument:xmlns:{value}:1.0"'
        for key, value in namespaces.items()
    )
    kind = "application/vnd.oasis.opendocument.spreadsheet"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", kind)
        archive.writestr("META-INF/manifest.xml", "<manifest:manifest/>")
        archive.writestr(
            "content.xml",
            f"<office:document-content {names}><office:body><office:spreadsheet>"
            f'<table:table table:name="s">{rows}</table:table>'
            "</office:spreadsheet></office:body></office:document-content>",
        )
    return path


ROWS = [{"text": "Größe 12, falsch", "label": "a"}, {"text": "=1+2 für 3 €", "label": "b"}]


class TestFormats:
    def read(self, path: Path) -> list[dict[str, object]]:
        return read_file(path).select_columns(["text", "label"]).to_list()

    def test_a_spreadsheet(self, tmp_path):
        path = sheet(tmp_path / "a.xlsx", ROWS)
        assert self.read(path) == ROWS
        assert CalamineWorkbook.from_path(str(path)).get_sheet_by_index(0).to_python()[2] == [
            "=1+2 für 3 €", "b"
        ]  # fmt: skip
        path.rename(tmp_path / "b.csv")
        assert self.read(tmp_path / "b.csv") == ROWS

    def test_a_spreadsheet_with_other_sheets_and_a_title(self, tmp_path, capsys):
        with pd.ExcelWriter(tmp_path / "a.xlsx") as book:
            pd.DataFrame({"nothing": []}).to_excel(book, sheet_name="empty", index=False)
            rows = [["Export of May", None], ["text", "label"], ["a", "x"], ["b", "y"]]
            pd.DataFrame(rows).to_excel(book, sheet_name="data", index=False, header=False)
        expected = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
        assert self.read(tmp_path / "a.xlsx") == expected
        output = capsys.readouterr().out
        assert "the sheet 'data' is read" in output
        assert "the table begins in row 2, below a title" in output
        (tmp_path / "b.ods").write_bytes(b"PK\x03\x04 no archive")
        with pytest.raises(AdapterError, match="cannot be unpacked"):
            read_file(tmp_path / "b.ods")

    @pytest.mark.parametrize(
        "content",
        [
            ROWS,
            {"data": ROWS, "version": 1},
            {"text": {"0": ROWS[0]["text"], "1": ROWS[1]["text"]}, "label": ["a", "b"]},
            {"columns": ["text", "label"], "data": [list(row.values()) for row in ROWS]},
        ],
    )
    def test_json(self, content, tmp_path):
        (tmp_path / "a.json").write_text(json.dumps(content, indent=1))
        assert self.read(tmp_path / "a.json") == ROWS

    @pytest.mark.parametrize("name", ["a.json", "a.ndjson", "a.jsonl"])
    def test_an_object_per_line(self, name, tmp_path):
        assert self.read(write_jsonl(tmp_path / name, ROWS)) == ROWS

    @pytest.mark.parametrize("name", ["a.csv.gz", "a.csv"])
    def test_compressed(self, name, tmp_path):
        text = pd.DataFrame(ROWS).to_csv(index=False)
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        assert self.read(tmp_path / name) == ROWS
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("inner/data.csv", text)
            archive.writestr("__MACOSX/data.csv", "")
        assert self.read(tmp_path / name) == ROWS
        with zipfile.ZipFile(tmp_path / name, "a") as archive:
            archive.writestr("other.csv", text)
        with pytest.raises(
            AdapterError, match=r"must hold one file, it holds inner/data\.csv, oth"
        ):
            read_file(tmp_path / name)

    @pytest.mark.parametrize(
        ("encoding", "text"),
        [
            ("utf-16", "Größe"),
            ("utf-16-le", "Größe"),
            ("cp1252", "Die Größe ist für 3 €"),
            ("gbk", "这个产品很好用我非常喜欢这个产品"),
            ("cp1251", "Счёт неправильный, проверьте пожалуйста"),
        ],
    )
    def test_encodings(self, encoding, text, tmp_path):
        (tmp_path / "a.csv").write_bytes(f'text,label\n"{text}",a\nb,c\n'.encode(encoding))
        assert read_file(tmp_path / "a.csv")["text"][0] == text

    def test_an_encoding_that_does_not_fit(self, tmp_path):
        (tmp_path / "a.csv").write_bytes(b"text,label\na,b\n\xff\x81,c\n")
        with pytest.raises(AdapterError, match="Name the encoding with --encoding"):
            read_file(tmp_path / "a.csv", ReadOptions("cp1252"))

    @pytest.mark.parametrize(
        ("rows", "expected", "said"),
        [
            ('"He said \\"hi\\", twice",a\nb,b', 'He said "hi", twice', ""),
            ('"one\nline",a\nb,b', "one\nline", ""),
            ('"a,b\nc,d', None, "EOF inside string starting at row 2.*write those inside it"),
            ('"lone,a\nb,b\nc",b\n', "lone,a\nb,b\nc", "row 2 is 3 lines, as quotation"),
        ],
    )
    def test_quotation_marks(self, rows, expected, said, tmp_path, capsys):
        (tmp_path / "a.csv").write_text(f"text,label\n{rows}\n")
        if expected is None:
            with pytest.raises(AdapterError, match=said):
                read_file(tmp_path / "a.csv")
        else:
            assert read_file(tmp_path / "a.csv")["text"][0] == expected
            assert said in capsys.readouterr().out

    def test_a_field_of_any_length(self, tmp_path):
        (tmp_path / "a.csv").write_text(f"text,label\n{'a' * 200_000},b\n")
        assert len(read_file(tmp_path / "a.csv")["text"][0]) == 200_000


STUDIO = {
    "id": 3,
    "data": {"text": "Ada sang"},
    "annotations": [
        {"was_cancelled": True, "result": []},
        {"result": [{"value": {"choices": ["good", "loud"]}, "type": "choices"}]},
    ],
}
SPAN = {"start": 0, "end": 3, "label": "PER"}
PRODIGY = {"text": "Ada sang", "_input_hash": 1, "_task_hash": 2, "answer": "accept"}


class TestExports:
    @pytest.mark.parametrize(
        ("rows", "column", "value"),
        [
            ([STUDIO], "label", ["good", "loud"]),
            ([{**STUDIO, "annotations": []}, STUDIO], "label", None),
            (
                [
                    {
                        **STUDIO,
                        "annotations": [
                            {"result": [{"value": {"start": 0, "end": 3, "labels": ["PER"]}}]}
                        ],
                    }
                ],
                "spans",
                [SPAN],
            ),
            (
                [
                    {
                        "text": "Ada sang",
                        "annotator": 1,
                        "annotation_id": 2,
                        "mood": {"choices": ["good", "loud"]},
                    }
                ],
                "label",
                ["good", "loud"],
            ),
            ([{"id": 1, "text": "Ada sang", "label": [[0, 3, "PER"]]}], "spans", [SPAN]),
            (
                [
                    {
                        "text": "Ada sang",
                        "entities": [{"start_offset": 0, "end_offset": 3, "label": "PER"}],
                    }
                ],
                "spans",
                [SPAN],
            ),
            ([{"text": "Ada sang", "label": ["good"]}], "label", ["good"]),
            ([{**PRODIGY, "label": "good"}], "label", "good"),
            ([{**PRODIGY, "label": "good", "answer": "reject"}], "label", "not good"),
            # A table, whose column is called as Prodigy's.
            ([{"text": "Ada sang", "label": "good", "answer": "reject"}], "label", "good"),
            (
                [{**PRODIGY, "accept": ["x"], "answer": "ignore"}, {**PRODIGY, "accept": ["good"]}],
                "label",
                ["good"],
            ),
            ([{**PRODIGY, "spans": [{**SPAN, "token_end": 0}]}], "spans", [SPAN]),
        ],
    )
    def test_rows(self, rows, column, value, tmp_path):
        (tmp_path / "a.json").write_text(json.dumps(rows))
        data = read_file(tmp_path / "a.json")
        assert data["text"][0] == "Ada sang"
        assert data[column][0] == value

    def test_squads_own_file(self, tmp_path):
        answers = [{"text": "Ada", "answer_start": 0}]
        paragraph = {
            "context": "Ada sang", "qas": [{"id": "1", "question": "Who?", "answers": answers}]
        }  # fmt: skip
        content = {"version": "1", "data": [{"title": "t", "paragraphs": [paragraph]}]}
        (tmp_path / "a.json").write_text(json.dumps(content))
        (row,) = read_file(tmp_path / "a.json").select_columns(["context", "answers"]).to_list()
        assert row == {"context": "Ada sang", "answers": answers}


def splits_of(task) -> dict[str, int]:
    return {name: len(split) for name, split in task.splits.items()}


class TestSplits:
    """Test rows are never trained on, however the splits are written."""

    SPLITS: ClassVar = {"train": 20, "validation": 5, "test": 4}
    ROWS: ClassVar = [{"text": text, "label": "xy"[row % 2]} for row, text in enumerate(TEXTS)]

    @pytest.mark.parametrize(
        "names",
        [
            ("train-00000-of-00001.parquet", "validation-0.parquet", "test-00000-of-00001.parquet"),
            ("data/train.parquet", "data/dev-1.parquet", "data/test.parquet"),
            ("tickets_train.csv", "tickets_dev.csv", "tickets_test.csv"),
            ("Train.CSV", "val.csv", "test.csv"),
            ("en-ud-train.csv", "en-ud-dev.csv", "en-ud-test.csv"),
            ("train/a.csv", "valid/a.csv", "test/a.csv"),
        ],
    )
    def test_names_of_files(self, names, tmp_path):
        for name, count in zip(names, self.SPLITS.values(), strict=True):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            frame = pd.DataFrame(self.ROWS[:count])
            if path.suffix == ".parquet":
                frame.to_parquet(path)
            else:
                frame.to_csv(path, index=False)
        for name in (".~lock.train.csv#", "._train.csv", ".DS_Store"):
            (tmp_path / name).write_bytes(b"\0")
        assert splits_of(load(tmp_path, keep_repeated=True)) == self.SPLITS

    def test_a_column_and_an_object(self, tmp_path, capsys):
        rows = [{**row, "Split": "train" if n < 16 else "test"} for n, row in enumerate(self.ROWS)]
        task = load(write_jsonl(tmp_path / "a.jsonl", rows))
        assert splits_of(task) == {"train": 13, "validation": 3, "test": 4}
        assert "the column 'Split' names the splits" in capsys.readouterr().out
        rows[3]["Split"] = "unlabeled"
        with pytest.raises(RecipeError, match="row 4 has 'unlabeled'"):
            load(write_jsonl(tmp_path / "b.jsonl", rows))
        for make in (dict, lambda row: list(row.values())):
            parts = {"train": self.ROWS[:16], "dev": self.ROWS[:5], "test": self.ROWS[16:]}
            parts = {name: list(map(make, part)) for name, part in parts.items()}
            (tmp_path / "c.json").write_text(json.dumps(parts))
            task = load(tmp_path / "c.json", keep_repeated=True)
            assert splits_of(task) == {"train": 16, "validation": 5, "test": 4}

    def test_what_the_library_datasets_has_saved(self, tmp_path):
        whole = Dataset.from_list(self.ROWS)
        DatasetDict({"train": whole, "test": whole}).save_to_disk(tmp_path / "several")
        assert splits_of(load(tmp_path / "several"))["test"] == 20
        whole.save_to_disk(tmp_path / "one")
        assert sum(splits_of(load(tmp_path / "one")).values()) == 20

    def test_few_rows_and_rare_classes_are_said(self, tmp_path, capsys):
        labels = ["x", "y"] * 9 + ["z", "z"]
        assert splits_of(load(write_csv(tmp_path, labels))) == {"train": 16, "validation": 4}
        said = capsys.readouterr().out
        assert "4 validation examples say little" in said
        assert "no validation example has the class z" in said


class TestRefused:
    """What would be trained on as if it were something else."""

    @pytest.mark.parametrize(
        ("label", "said"),
        [
            ([0.9, 0.1], "probabilities"),
            (["pos", "pos", "neg"], "votes"),
            ("85%", "percentages"),
            ({"name": "x"}, "objects"),
            ({"x": 0.9, "y": 0.1}, "a score for each class"),
        ],
    )
    def test_labels(self, label, said, tmp_path):
        rows = [{"text": text, "label": label} for text in TEXTS]
        with pytest.raises(RecipeError, match=f"row 1 has {said}"):
            load(write_jsonl(tmp_path / "a.jsonl", rows))

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("a.xls", "<html><table></table></html>", "a page in HTML"),
            ("a.parquet", "PAR1 no table", "damaged"),
            ("a.csv.gz", gzip.compress(b"text,label\n" * 99, mtime=0)[:-9], "cannot be unpacked"),
            ("a.json", "[" * 100_000, "recursion|nest"),
        ],
    )
    def test_files(self, name, content, said, tmp_path):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises((AdapterError, RecipeError), match=said):
            load(path)

    def test_what_would_never_end_or_fill_the_memory(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.csv")
        (tmp_path / "zero.csv").symlink_to("/dev/zero")
        for name in ("pipe.csv", "zero.csv"):
            with pytest.raises(AdapterError, match="must be a file"):
                read_file(tmp_path / name)
        path = sheet(tmp_path / "a.xlsx", ROWS)
        far = tmp_path / "far.xlsx"
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(far, "w") as target:
            for name in source.namelist():
                content = source.read(name).replace(b'r="B3"', b'r="XFD1048576"')
                target.writestr(name, content)
        with pytest.raises(AdapterError, match=r"1,048,576 rows and 16,384 columns"):
            read_file(far)
        row = "<table:table-row{}>{}</table:table-row>"
        empty = '<table:table-cell table:number-columns-repeated="{}"/>'
        filled = (
            '<table:table-cell office:value-type="string"><text:p>{}</text:p></table:table-cell>'
        )
        rows_of = {
            "far.ods": row.format("", empty.format(16_383) + filled.format("x")),
            "usual.ods": row.format("", empty.format(16_384)),  # as LibreOffice ends each sheet
        }
        for name, last_row in rows_of.items():
            rows = [row.format("", "".join(map(filled.format, texts))) for texts in ROWS_OF_ODS]
            rows.append(row.format(' table:number-rows-repeated="1048570"', empty.format(16_384)))
            write_ods(tmp_path / name, "".join([*rows, last_row]))
        with pytest.raises(AdapterError, match=r"1,048,573 rows and 16,384 columns"):
            read_file(tmp_path / "far.ods")
        assert read_file(tmp_path / "usual.ods")["label"][:] == ["b"]

    def test_marked_parts_are_for_the_other_recipe(self, tmp_path):
        rows = [{"text": text, "entities": [[0, 4, "X"]]} for text in TEXTS]
        with pytest.raises(RecipeError, match="--recipe token_classification"):
            load(write_jsonl(tmp_path / "a.jsonl", rows))

    def test_pandas_makes_a_table_of_an_unknown_form(self, tmp_path, monkeypatch):
        """The line of the error does what it says."""
        monkeypatch.chdir(tmp_path)
        rows = []
        for number, text in enumerate(TEXTS):
            answers = [{"label": {"value": "xy"[number % 2]}, "by": "a"}]
            rows.append({"id": "1", "data": {"text": text}, "responses": answers})
        path = write_jsonl(tmp_path / "a.jsonl", rows)
        with pytest.raises(AdapterError, match="nearest form that is read is Label Studio's") as e:
            load(path)
        line = str(e.value).partition("To make a table: ")[2]
        exec(line, {"pandas": pd, "FILE": str(path)})
        assert labels_of(load(tmp_path / "table.csv", text_columns=["text"])) == [
            row["responses"][0]["label"]["value"]
            for row in sorted(rows, key=lambda row: row["data"]["text"])
        ]

    def test_a_row_unlike_the_others_of_an_export(self, tmp_path):
        with pytest.raises(RecipeError, match="row 2 is not as Label Studio exports it"):
            read_file(write_jsonl(tmp_path / "a.jsonl", [STUDIO, {"data": {"text": "a"}}]))
        odd = {"text": "Ada sang", "entities": [[0, "three", "PER"]]}
        with pytest.raises(RecipeError, match="row 1 is not as doccano exports it"):
            read_file(write_jsonl(tmp_path / "a.jsonl", [odd]))


class TestSheets:
    def test_merged_cells_are_filled_and_hidden_rows_said(self, tmp_path, capsys):
        book = openpyxl.Workbook()
        for row in [["text", "label"], ["a", "x"], ["b", None], ["c", "y"]]:
            book.active.append(row)
        book.active.merge_cells("B2:B3")
        book.active.row_dimensions[4].hidden = True
        book.save(tmp_path / "a.xlsx")
        assert read_file(tmp_path / "a.xlsx")["label"][:] == ["x", "x", "y"]
        said = capsys.readouterr().out
        assert "merged cells have their value in each row" in said
        assert "1 rows are hidden" in said

    @pytest.mark.parametrize(
        ("name", "text", "column", "value"),
        [
            ("a.xls", "text\tlabel\nan a\tx\n", "label", "x"),
            ("a.csv", "sep=;\ntext;label\nan, a;x\n", "label", "x"),
            ("a.jsonl", '{\n "text": "a",\n "label": "x"\n}\n{"text": "b"}', "label", "x"),
            ("a.txt", "__label__x a text\n__label__y b\n", "label", "x"),
            ("a.csv", 'Q1,Q2\nText?,Class?\n"{""ImportId"":""1""}",b\nx,y\n', "Q2", "y"),
        ],
    )
    def test_read_by_the_content(self, name, text, column, value, tmp_path):
        (tmp_path / name).write_text(text)
        assert read_file(tmp_path / name)[column][0] == value


class TestFolders:
    def test_a_folder_for_each_class(self, tmp_path, capsys):
        for number, text in enumerate(TEXTS):
            folder = tmp_path / "train" / ("billing", "angry")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.txt").write_text(text)
        for path in (tmp_path, tmp_path / "train"):
            task = load(path)
            assert task.kind.names == ("angry", "billing")
            assert len(labels_of(task)) == 20
        assert "train: 20 rows of" in capsys.readouterr().out

    def test_files_of_one_format(self, tmp_path, capsys):
        for name in ("part1.csv", "part2.csv"):
            write_csv(tmp_path, ["x", "y"] * 10, name)
        assert len(load(tmp_path, keep_repeated=True).undivided) == 40
        assert "train: 40 rows of part1.csv, part2.csv" in capsys.readouterr().out
        (tmp_path / "part2.csv").rename(tmp_path / "other.csv")
        with pytest.raises(RecipeError, match=r"other\.csv, part1\.csv have different names"):
            load(tmp_path)
        both = load(tmp_path / "part1.csv", more_data=[str(tmp_path / "other.csv")])
        assert len(both.undivided) == 40
        (tmp_path / "empty").mkdir()
        with pytest.raises(RecipeError, match="has no split"):
            load(tmp_path / "empty")

    def test_the_one_file_beside_other_splits(self, tmp_path):
        write_csv(tmp_path, ["x", "y"] * 10, "tickets.csv")
        write_csv(tmp_path, ["x", "y"] * 2, "dev.csv")
        assert len(load(tmp_path, keep_repeated=True).splits["train"]) == 20


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def read_tagged(path: Path, **options: object):
    arguments = TaggingArguments(data=str(path), **options)
    task = token_classification.load_task(arguments, RecipeTrainingArguments(use_cpu=True), None)
    rows = []
    for split in task.splits.values():
        rows += [
            (words, [task.labels[tag] for tag in tags])
            for words, tags in zip(split["words"], split["tags"], strict=True)
        ]
    return sorted(rows), task


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


class TestTags:
    @pytest.mark.parametrize("tags", DIALECTS.values(), ids=list(DIALECTS))
    def test_schemes(self, tags, tmp_path, capsys):
        lines = [f"{word} {tag}" for word, tag in zip(SENTENCE, tags, strict=True)]
        rows, task = read_tagged(write_lines(tmp_path / "a.conll", *[*lines, ""] * 4))
        assert rows == [(SENTENCE, IOB2)] * 4
        assert task.are_entities
        assert "read as IOB2" in capsys.readouterr().out

    def test_a_kind_called_o(self, tmp_path):
        lines = ["Ada B-O", "saw O", ""] * 4
        _, task = read_tagged(write_lines(tmp_path / "a.conll", *lines))
        assert task.labels == ("B-O", "O")
        assert find_entities(["B-O", "O"]) == [("O", 0, 0)]

    @pytest.mark.parametrize(
        ("name", "lines", "options"),
        [
            (
                "a.conllu",
                [
                    "# text = Ada saw",
                    "1-2\tAdasaw" + "\t_" * 8,
                    "1\tAda\tada\tB-PER" + "\t_" * 6,
                    "2\tsaw\tsee\tO" + "\t_" * 6,
                ],
                {},
            ),
            (
                "a.tsv",
                ["#\thttp://a.de/x=1 [2009]", "1\tAda\tB-PER\tO", "2\tsaw\tO\tO"],
                {},
            ),
            ("a.conll", ["B-PER Ada", "O saw"], {"word_column": "2", "tag_column": "1"}),
            ("a.txt", ["Ada NNP B-PER", "saw VBD O"], {}),
            ("a.bio", ["Ada\tB-PER", "saw\tO"], {}),
        ],
    )
    def test_columns(self, name, lines, options, tmp_path):
        rows, _ = read_tagged(write_lines(tmp_path / name, *[*lines, ""] * 4), **options)
        assert (["Ada", "saw"], ["B-PER", "O"]) in rows
        assert not any("1" in words for words, _ in rows)

    def test_what_is_asked_for(self, tmp_path):
        lines = [f"x{n % 2} word{n}" for n in range(20)]
        path = write_lines(tmp_path / "a.conll", *lines)
        with pytest.raises(RecipeError, match="a file has more words than tags"):
            read_tagged(path)
        with pytest.raises(RecipeError, match="must be from 1 to 2"):
            read_tagged(path, tag_column="3")

    def test_a_word_with_a_blank(self, tmp_path):
        """As in predictions, it is two words, of one entity."""
        lines = ["-DOCSTART- (doc_1)\tO", "", "New York\tB-LOC", "sleeps\tO", ""] * 4
        rows, _ = read_tagged(write_lines(tmp_path / "a.conll", *lines))
        assert rows == [(["New", "York", "sleeps"], ["B-LOC", "I-LOC", "O"])] * 4

    @pytest.mark.parametrize(
        ("row", "options"),
        [
            ({"tokens": str(SENTENCE), "tags": str(IOB2)}, {}),
            ({"tokens": " ".join(SENTENCE), "tags": " ".join(IOB2)}, {}),
            ({"words": SENTENCE, "ner_tags": [0, 1, 2, 3]}, {"tag_names": [*IOB2]}),
            (
                {
                    "text": "Ada Byron saw Oslo",
                    "spans": [
                        {"start": 14, "end": 17, "label": "LOC"},
                        {"start": 0, "end": 9, "label": "PER"},
                        {"start": 4, "end": 9, "label": "LOC"},
                    ],
                    "answer": "accept",
                },
                {},
            ),
        ],
    )
    def test_other_forms(self, row, options, tmp_path):
        rows, _ = read_tagged(write_jsonl(tmp_path / "a.jsonl", [row] * 4), **options)
        assert rows == [(SENTENCE, IOB2)] * 4

    def test_a_word_per_row(self, tmp_path):
        rows = []
        for number in range(4):
            for position, (word, tag) in enumerate(zip(SENTENCE, IOB2, strict=True)):
                sentence = "" if position else f"Sentence: {number}"
                rows.append({"Sentence #": sentence, "Word": word, "POS": "X", "Tag": tag})
        pd.DataFrame(rows).to_csv(tmp_path / "a.csv", index=False)
        assert read_tagged(tmp_path / "a.csv")[0] == [(SENTENCE, IOB2)] * 4

    def test_numbers_are_said(self, tmp_path, capsys):
        row = {"words": SENTENCE, "ner_tags": [0, 1, 2, 3]}
        read_tagged(write_jsonl(tmp_path / "a.jsonl", [row] * 4))
        assert "give their names with --tag_names" in capsys.readouterr().out
