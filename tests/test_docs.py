"""The Python snippets of the README and the docs run, in order, and print what the page says."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

import houlsby_peft
from snippets import run_snippets


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder_with_bert(tmp_path_factory):
    """A folder in which the name of the model on the Hub is a local path to a BERT-base of random weights."""
    folder = tmp_path_factory.mktemp("docs")
    path = folder / "google-bert" / "bert-base-uncased"
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig()).to(torch.bfloat16).save_pretrained(path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *["a", "fine", "film", ".", "he", "said", "so", "hello"]]
    (path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path)
    return folder


@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning")
@pytest.mark.parametrize(
    "page", ["README.md", "docs/python.md", "docs/coming_from.md", "docs/languages.md", "docs/serving.md"]
)
def test_snippets_run_and_print_what_the_page_says(page, folder_with_bert, monkeypatch):
    monkeypatch.chdir(folder_with_bert)
    text = (ROOT / page).read_text()
    assert "```python" in text
    run_snippets(text)


def test_the_notebook_runs_and_prints_what_it_shows(tmp_path, monkeypatch):
    # DeepSpeed, where it is installed, prints that it has found no accelerator.
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    shown = nbformat.read(ROOT / "docs" / "quickstart.ipynb", as_version=4)
    ran = nbclient.NotebookClient(
        copy.deepcopy(shown), timeout=300, resources={"metadata": {"path": tmp_path}}
    ).execute()
    for before, now in zip(shown.cells, ran.cells, strict=True):
        assert _printed(now) == _printed(before), before.source


def _printed(cell):
    outputs = cell.get("outputs", [])
    return "".join(
        output.data["text/plain"] if "data" in output else output.text
        for output in outputs
        if output.get("name") != "stderr"
    )


def test_the_reference_has_all_public_names():
    page = (ROOT / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^\.\. auto\w+:: houlsby_peft\.(\w+)", page, re.MULTILINE)) == sorted(
        houlsby_peft.__all__
    )


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_files_that_commands_name_are_there():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for file in re.findall(r"\b(?:recipes|benchmarks|tests)/[\w/.]+", block):
                assert (ROOT / file).exists(), f"{page.name} names {file}"
