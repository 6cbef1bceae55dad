"""The recipes' layout: imports go one way, scripts stand alone, and the library is used by its public names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import houlsby_peft


RECIPES = Path(__file__).parents[2] / "recipes"
# Each package may import itself and those before it.
PACKAGES = ("training", "tasks", "sweeping", "study", "analysis")
SCRIPTS = sorted(path.stem for path in RECIPES.glob("*.py"))
# What the recipes must do just as the library and its command do: find base models, columns and entities, write cards.
COMMON = (
    *("houlsby_peft.checkpoints.downloads", "houlsby_peft.hub.card"),
    *("houlsby_peft.serving.tagging", "houlsby_peft.tables"),
)
ANALYSES = ("ablation", "extensions", "init_scale", "robustness", "stability", "tradeoff")


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of every import, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.py")), ids=lambda path: str(path.relative_to(RECIPES)))
def test_imports(path):
    package = path.parent.name if path.parent != RECIPES else None
    below = PACKAGES[: PACKAGES.index(package) + 1] if package else PACKAGES
    for module, name in imports(path):
        top = module.partition(".")[0]
        assert top not in SCRIPTS or top in PACKAGES, "a script is launched, never imported"
        assert top not in PACKAGES or top in below, f"{package} may not import {module}"
        if top == "houlsby_peft" and module not in COMMON:
            assert module == "houlsby_peft"
            assert not name or name in houlsby_peft.__all__
    assert "sys.path" not in path.read_text()


def test_scripts_and_packages_have_different_names():
    assert not set(SCRIPTS) & set(PACKAGES)


@pytest.mark.parametrize("script", ["sweep", "study_table"])
def test_scripts_that_compute_nothing_do_without_pytorch(script):
    code = f"import sys; sys.path.insert(0, {str(RECIPES)!r}); import {script}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", ANALYSES)
def test_analyses_are_launched_in_either_folder(name):
    assert (RECIPES / f"{name}.py").is_file()
    assert f"python recipes/{name}.py" in (RECIPES / f"{name}.py").read_text()
    assert (RECIPES / "analysis" / f"{name}.py").is_file()


def test_an_analysis_under_its_path_in_the_package():
    command = [sys.executable, RECIPES / "analysis" / "extensions.py", "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--variant" in printed
