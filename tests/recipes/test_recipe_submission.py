"""GLUE's submission: what is written for synthetic test sets of the official sizes, and what is refused."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from study import reports as glue_reports
from tasks.glue import TASKS
from tasks.submission import FILES, TEST_SETS, pack, problems


SCRIPT = Path(__file__).parents[2] / "recipes" / "submission.py"
# As the benchmark has published them: rows of the test set, and what its server reads.
OFFICIAL = {
    "CoLA.tsv": (1063, {"0", "1"}),
    "SST-2.tsv": (1821, {"0", "1"}),
    "MRPC.tsv": (1725, {"0", "1"}),
    "STS-B.tsv": (1379, None),
    "MNLI-m.tsv": (9796, {"entailment", "neutral", "contradiction"}),
    "MNLI-mm.tsv": (9847, {"entailment", "neutral", "contradiction"}),
    "QNLI.tsv": (5463, {"entailment", "not_entailment"}),
    "RTE.tsv": (3000, {"entailment", "not_entailment"}),
    "WNLI.tsv": (146, {"0", "1"}),
    "QQP.tsv": (390965, {"0", "1"}),
    "AX.tsv": (1104, {"entailment", "neutral", "contradiction"}),
}


@pytest.fixture(scope="module")
def submission(tmp_path_factory):
    """The zip for random outputs of a model, and these by test set; similarities go beyond their range."""
    folder, random = tmp_path_factory.mktemp("submission"), np.random.default_rng(0)
    outputs = {}
    for name, test_set in TEST_SETS.items():
        classes = len(TASKS[test_set.task].labels)
        outputs[name] = random.normal(2.5, 3, (OFFICIAL[f"{name}.tsv"][0], classes)).astype(np.float32)
    glue_reports.write_predictions(str(folder), outputs)
    pack((folder / "submission").glob("*.tsv"), folder / "submission.zip")
    return folder / "submission.zip", outputs


def contents(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_complete_submission(submission):
    path, _ = submission
    assert problems(path) == []
    assert set(contents(path)) == set(OFFICIAL)


@pytest.mark.parametrize("file", OFFICIAL)
def test_what_is_in_a_file(submission, file):
    """Read by another reader, and compared with the outputs by hand."""
    path, outputs = submission
    rows, labels = OFFICIAL[file]
    text = contents(path)[file].decode()
    read = list(csv.DictReader(io.StringIO(text), delimiter="\t"))
    assert text.splitlines()[0] == "index\tprediction"
    assert [row["index"] for row in read] == [str(number) for number in range(rows)]
    output = outputs[file.removesuffix(".tsv")]
    if labels is None:
        scores = np.array([float(row["prediction"]) for row in read])
        assert (scores.min(), scores.max()) == (0, 5)
        inside = (output[:, 0] > 0) & (output[:, 0] < 5)
        assert np.abs(scores - output[:, 0])[inside].max() <= 5.1e-5
    else:
        assert {row["prediction"] for row in read} == labels
        named = TASKS[TEST_SETS[file.removesuffix(".tsv")].task].labels
        for row, logits in zip(read[:50], output, strict=False):
            name = named[int(np.argmax(logits))]
            # The server wants words for entailment in three tasks, and 1 for the second class in the others.
            expected = row["prediction"] if row["prediction"] in named else named[int(row["prediction"])]
            assert expected == name


def replaced(old, new):
    return lambda text: text.replace(old, new, 1)


MUTATIONS = {
    "a column is called otherwise": ("CoLA.tsv", replaced("prediction", "label"), "first line must be"),
    "commas": ("CoLA.tsv", lambda text: text.replace("\t", ","), "first line must be"),
    "no header": ("RTE.tsv", replaced("index\tprediction\n", ""), "first line must be"),
    "a row is missing": ("WNLI.tsv", lambda text: text[: text[:-1].rindex("\n") + 1], "146 predictions, got 145"),
    "a row too many": ("WNLI.tsv", lambda text: text + "146\t0\n", "146 predictions, got 147"),
    "an empty line": ("AX.tsv", lambda text: text + "\n", "1,104 predictions, got 1,105"),
    "counted from 1": ("CoLA.tsv", replaced("\n0\t", "\n1\t"), "line 2 must begin with 0 and a tab"),
    "out of order": ("QNLI.tsv", replaced("\n7\t", "\n8\t"), "line 9 must begin with 7"),
    "numbers for words": (
        "RTE.tsv",
        lambda text: text.replace("not_entailment", "1"),
        "must be one of entailment, not",
    ),
    "words for numbers": (
        "WNLI.tsv",
        lambda text: text.replace("\t1\n", "\tentailment\n"),
        "must be one of 0, 1; got",
    ),
    "hypothesis and premise": ("QNLI.tsv", replaced("entailment\n", "neutral\n"), "must be one of entailment, not"),
    "a capital letter": ("MNLI-m.tsv", replaced("neutral", "Neutral"), "got 'Neutral'"),
    "a space": ("MNLI-mm.tsv", replaced("neutral\n", "neutral \n"), "got 'neutral '"),
    "ends of lines": ("SST-2.tsv", lambda text: text.replace("\n", "\r\n"), "first line must be"),
    "a third column": ("MRPC.tsv", lambda text: text.replace("\t1\n", "\t1\t0.9\n"), r"got '1\t0.9'"),
    "a score above 5": ("STS-B.tsv", replaced("\n3\t", "\n3\t9"), "a number from 0 to 5"),
    "a score below 0": ("STS-B.tsv", replaced("\n3\t", "\n3\t-1"), "a number from 0 to 5"),
    "not a number": (
        "STS-B.tsv",
        lambda text: text.replace("\t5.0000", "\tnan", 1),
        "a number from 0 to 5; got 'nan'",
    ),
    "a word for a score": ("STS-B.tsv", lambda text: text.replace("\t5.0000", "\thigh", 1), "got 'high'"),
    "an empty file": ("AX.tsv", lambda _: "", "first line must be"),
}


@pytest.mark.parametrize(("file", "change", "message"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_changed_file_is_refused(submission, tmp_path, file, change, message):
    files = contents(submission[0])
    before = files[file].decode()
    assert change(before) != before
    with zipfile.ZipFile(tmp_path / "changed.zip", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, change(before) if name == file else content)
    [problem] = problems(tmp_path / "changed.zip")
    assert problem.startswith(f"{file}: ")
    assert message in problem.replace(r"\\t", r"\t")


def test_names_that_are_not_the_elevens(submission, tmp_path):
    files = contents(submission[0])
    with zipfile.ZipFile(tmp_path / "names.zip", "w") as archive:
        for name, content in files.items():
            if name != "AX.tsv":
                archive.writestr("SST2.tsv" if name == "SST-2.tsv" else name, content)
        archive.writestr("glue/AX.tsv", files["AX.tsv"])
    assert problems(tmp_path / "names.zip") == [
        "SST-2.tsv is missing",
        "AX.tsv is missing",
        "SST2.tsv does not belong there",
        "glue/AX.tsv does not belong there",
    ]
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("AX.tsv", files["AX.tsv"])
    assert problems(tmp_path / "twice.zip") == ["AX.tsv is there more than once"]


def test_what_is_no_zip_and_no_text(submission, tmp_path):
    (tmp_path / "no.zip").write_text("index\tprediction\n")
    assert "cannot be read as a zip" in problems(tmp_path / "no.zip")[0]
    assert "cannot be read as a zip" in problems(tmp_path / "absent.zip")[0]
    with zipfile.ZipFile(tmp_path / "latin.zip", "w") as archive:
        for name, content in contents(submission[0]).items():
            archive.writestr(name, b"\xe9" if name == "AX.tsv" else content)
    [problem] = problems(tmp_path / "latin.zip")
    assert problem.startswith("AX.tsv: it must be UTF-8 text")


def test_from_the_command_line(submission, tmp_path):
    files = [submission[0].parent / "submission" / file for file in FILES]
    for chosen, code, said in ((files, 0, "is a valid submission"), (files[1:], 1, "CoLA.tsv is missing")):
        command = [sys.executable, SCRIPT, tmp_path / "made.zip", *chosen]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        assert process.returncode == code
        assert said in process.stdout + process.stderr
        assert "Traceback" not in process.stderr
