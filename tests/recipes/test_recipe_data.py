"""What the GLUE recipe reads: every format alike, with an error for what the task cannot use."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd
import pytest
from datasets import Dataset

from tasks.glue import TASKS, find_tasks, load_splits, numeric_labels
from training.data import check_columns
from training.errors import RecipeError
from training.tables import read_split


REAL_DATA = Path(__file__).parents[3] / "shared" / "data" / "glue"

TRICKY_TEXTS = ['He said "no", twice.', "None", "NA", "007", "1e5", "2001-01-01", "naïve café", "tab-free; it's fine"]


def write(folder: Path, split: str, ending: str, frame: pd.DataFrame) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}{ending}"
    if ending == ".parquet":
        frame.to_parquet(path)
    elif ending == ".csv":
        frame.to_csv(path, index=False)
    elif ending == ".tsv":  # by hand: tab-separated values have no quoting
        lines = ["\t".join(map(str, row)) for row in [frame.columns, *frame.to_numpy().tolist()]]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        frame.to_json(path, orient="records", lines=True)
    return path


class TestReading:
    @pytest.mark.parametrize("ending", [".parquet", ".csv", ".tsv", ".jsonl"])
    def test_every_format_gives_the_same_rows(self, tmp_path, ending):
        frame = pd.DataFrame({"sentence": TRICKY_TEXTS, "label": [0, 1] * 4, "idx": range(8)})
        write(tmp_path, "train", ending, frame)
        data = read_split(tmp_path, "train")
        check_columns(data, "it", ["sentence"])
        data = numeric_labels(data, "it", 2)
        assert data["sentence"] == TRICKY_TEXTS
        assert data["label"] == [0, 1] * 4

    @pytest.mark.parametrize("ending", [".parquet", ".csv", ".tsv", ".jsonl"])
    def test_scores_stay_real(self, tmp_path, ending):
        write(tmp_path, "train", ending, pd.DataFrame({"sentence": ["a", "b", "c"], "label": [0.0, 2.75, 5.0]}))
        data = numeric_labels(read_split(tmp_path, "train"), "it", 1)
        assert data["label"] == [0.0, 2.75, 5.0]
        assert data.features["label"].dtype == "float32"

    def test_a_carriage_return_and_a_line_break_survive_csv(self, tmp_path):
        with (tmp_path / "train.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["sentence", "label"], ["two\nlines", 1], ["a, b", 0]])
        assert read_split(tmp_path, "train")["sentence"] == ["two\nlines", "a, b"]

    def test_missing_folder(self, tmp_path):
        with pytest.raises(RecipeError, match=r"no folder .*absent"):
            read_split(tmp_path / "absent", "train")

    def test_missing_split_names_what_is_there(self, tmp_path):
        write(tmp_path, "dev", ".csv", pd.DataFrame({"a": [1]}))
        with pytest.raises(RecipeError, match=r"no split 'validation': expected validation\{.*\}, found dev.csv"):
            read_split(tmp_path, "validation")

    @pytest.mark.parametrize(
        ("name", "content"), [("train.parquet", b"no parquet"), ("train.csv", b""), ("train.jsonl", b"{")]
    )
    def test_a_broken_file(self, tmp_path, name, content):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecipeError, match=f"{name} cannot be read as {name.split('.')[1]}"):
            read_split(tmp_path, "train")

    def test_no_rows(self, tmp_path):
        write(tmp_path, "train", ".csv", pd.DataFrame({"sentence": [], "label": []}))
        with pytest.raises(RecipeError, match="has no rows"):
            read_split(tmp_path, "train")

    def test_missing_column_names_what_is_there(self):
        data = Dataset.from_dict({"text": ["a"], "label": [0]})
        with pytest.raises(RecipeError, match=r"cola train lacks the column 'sentence': .* and has text, label"):
            check_columns(data, "cola train", ["sentence"])

    def test_missing_label_column(self):
        with pytest.raises(RecipeError, match="lacks the column 'label'"):
            check_columns(Dataset.from_dict({"sentence": ["a"]}), "cola train", ["sentence"])

    def test_text_that_is_no_text(self):
        data = Dataset.from_dict({"sentence": ["a", None], "label": [0, 1]})
        with pytest.raises(RecipeError, match="column 'sentence' must hold text, row 1 has None"):
            check_columns(data, "cola train", ["sentence"])

    @pytest.mark.parametrize(
        ("labels", "num_labels", "message"),
        [
            ([0, 1, 2], 2, "a whole number from 0 to 1, row 2 has 2"),
            ([0, -1], 2, r"row 1 has -1. Unlabelled rows \(-1\)"),
            ([1.0, 0.5], 3, "a whole number from 0 to 2, row 1 has 0.5"),
            (["entailment", "0"], 2, "row 0 has 'entailment'"),
            (["", "0"], 2, "row 0 has ''"),
            ([None, 1], 2, "row 0 has None"),
            ([5.0, 5.1], 1, "a number from 0 to 5, row 1 has 5.1"),
            ([float("nan"), 5.0], 1, "row 0 has nan"),
        ],
    )
    def test_labels_out_of_range(self, labels, num_labels, message):
        with pytest.raises(RecipeError, match=message):
            numeric_labels(Dataset.from_dict({"label": labels}), "it", num_labels)


class TestTasks:
    def test_unknown_task_names_the_known_ones(self):
        with pytest.raises(RecipeError, match=r"one of cola, .*, minimal_pairs, all, got 'mrcp'"):
            find_tasks("mrcp")

    def test_mnli_has_two_validation_splits(self, tmp_path):
        frame = pd.DataFrame({"premise": ["a"] * 3, "hypothesis": ["b"] * 3, "label": [0, 1, 2]})
        for split in ("train", "validation_matched", "validation_mismatched"):
            write(tmp_path / "mnli", split, ".jsonl", frame)
        splits = load_splits(TASKS["mnli"], str(tmp_path))
        assert list(splits) == ["train", "validation_matched", "validation_mismatched"]
        assert TASKS["mnli"].main_score == "matched_accuracy"

    def test_an_error_says_which_split(self, tmp_path):
        write(tmp_path / "rte", "train", ".csv", pd.DataFrame({"sentence1": ["a"], "sentence2": ["b"], "label": [1]}))
        write(tmp_path / "rte", "validation", ".csv", pd.DataFrame({"sentence1": ["a"], "label": [1]}))
        with pytest.raises(RecipeError, match="rte validation lacks the column 'sentence2'"):
            load_splits(TASKS["rte"], str(tmp_path))

    @pytest.mark.slow
    @pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"needs GLUE's files in {REAL_DATA}, which are not here")
    @pytest.mark.parametrize("task", [name for name in TASKS if name != "minimal_pairs"])
    def test_real_data_load(self, task):
        splits = load_splits(TASKS[task], str(REAL_DATA))
        validation = splits[TASKS[task].validation_splits[0]]
        if task != "stsb":
            assert set(validation["label"]) == set(range(len(TASKS[task].labels)))
        else:
            assert (min(validation["label"]), max(validation["label"])) == (0.0, 5.0)
