"""The recipes' layout: imports go one way, scripts stand alone, and what is started often starts
soon.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import houlsby_peft


RECIPES = Path(__file__).parents[2] / "recipes"
STUDIES = RECIPES / "studies"
OF_STUDIES = {path.stem for path in STUDIES.iterdir()}
SCRIPTS = {path.stem for folder in (RECIPES, STUDIES) for path in folder.glob("*.py")}
SCRIPTS -= {"recipes_path"}
# What the recipes must do just as the library does: find columns, entities, answers and base
# models, load whole models, write cards.
COMMON = (
    "houlsby_peft.saved.downloads", "houlsby_peft.hub.card", "houlsby_peft.predict.answers",
    "houlsby_peft.predict.base_model", "houlsby_peft.predict.tagging", "houlsby_peft.tables",
)  # fmt: skip


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of every import, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


@pytest.mark.parametrize(
    "path", sorted(RECIPES.rglob("*.py")), ids=lambda path: str(path.relative_to(RECIPES))
)
def test_imports(path):
    for module, name in imports(path):
        top = module.partition(".")[0]
        assert top not in SCRIPTS, "a script is launched, never imported"
        assert path.is_relative_to(STUDIES) or top not in OF_STUDIES, "training needs no study"
        if top == "houlsby_peft" and module not in COMMON:
            assert module == "houlsby_peft"
            assert not name or name in houlsby_peft.__all__


def test_no_folder_shadows_a_library():
    """Whoever has recipes/ on the path still imports the libraries."""
    names = {path.name for folder in (RECIPES, STUDIES) for path in folder.iterdir()}
    libraries = ("accelerate", "deepspeed", "datasets", "evaluate", "transformers", "peft", "torch")
    assert not names & {*libraries}


def test_few_files_stand_behind_glue():
    seen, to_read = set(), {"glue"}
    while to_read:
        name = to_read.pop()
        seen.add(name)
        for module, item in imports(RECIPES / f"{name.replace('.', '/')}.py"):
            for imported in {module, f"{module}.{item}"} - seen:
                if (RECIPES / f"{imported.replace('.', '/')}.py").is_file():
                    to_read.add(imported)
    assert len(seen) <= 27, sorted(seen)


def test_what_needs_no_torch_does_not_import_it():
    code = "import study_table, sweep, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=STUDIES, check=False).returncode == 0
