"""Imports between the modules of the library go down, from floor to floor, those for annotations
and those on first use included.
"""

from __future__ import annotations

import ast
from pathlib import Path

import data
import houlsby_peft


PACKAGE = Path(houlsby_peft.__file__).parent
# Modules of one name only: `houlsby_peft/__init__.py` offers what all others make, so it stands
# above them.
MODULES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
    if file != PACKAGE / "__init__.py"
}
# From the ground up. A module stands on the floor of the longest name that it begins with, and
# imports from its own floor and from those beneath.
FLOORS = (
    ("errors", "registration", "tables"),
    ("saved.record", "saved.naming", "saved.weights", "saved.fingerprint"),
    ("config",),
    ("kernels",),
    ("method",),
    ("heads",),
    ("saved",),
    ("placement", "batching"),
    ("derive", "training"),
    ("undo", "beneath", "model"),
    ("predict",),
    ("service", "hub", "export"),
    ("adapterhub",),
    ("commands",),
)


# What Windows lacks, so that the modules of these files must not need it to be imported.
NOT_ON_WINDOWS = {"fcntl", "grp", "pwd", "resource", "termios"}


def floor_of(name: str) -> int:
    """Return the number of the floor on which a module or package stands."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        for number, rooms in enumerate(FLOORS):
            if ".".join(parts[:length]) in rooms:
                return number
    raise AssertionError(f"{name} stands on no floor")


def imported_modules(name: str) -> set[str]:
    """Return the modules of the package that a module imports."""
    file = MODULES[name]
    folders = file.relative_to(PACKAGE).parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            start = [*folders[: len(folders) - node.level + 1], *(node.module or "").split(".")]
            module = ".".join(part for part in start if part)
            found |= {f"{module}.{alias.name}".lstrip(".") for alias in node.names} | {module}
    return found & MODULES.keys()


def test_imports_go_one_way():
    imports = {name: imported_modules(name) - {name} for name in MODULES}
    assert sum(map(len, imports.values())) > 50
    while free := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in free:
            del imports[name]
    assert not {name: sorted(others & imports.keys()) for name, others in imports.items()}


def test_no_import_goes_up():
    for name in MODULES:
        for imported in imported_modules(name):
            assert floor_of(imported) <= floor_of(name), f"{name} imports {imported}"


def test_windows_can_import_what_it_runs():
    """Sweeps, which it does not run, aside."""
    recipes = Path(data.__file__).parents[1]
    files = [*MODULES.values(), *PACKAGE.parent.glob("houlsby_peft_*.py")]
    files += [file for file in recipes.rglob("*.py") if "sweeping" not in file.parts]
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                assert not NOT_ON_WINDOWS & {alias.name for alias in node.names}, file


def test_every_room_is_there():
    rooms = {name for floor in FLOORS for name in floor}
    assert rooms <= MODULES.keys()
