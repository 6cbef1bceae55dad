"""Imports between the modules of the library go one way, those for annotations and those on first
use included.
"""

from __future__ import annotations

import ast
from pathlib import Path

import houlsby_peft


PACKAGE = Path(houlsby_peft.__file__).parent
# Modules of one name only: `houlsby_peft/__init__.py` offers what all others make, so it stands
# above them.
MODULES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
    if file != PACKAGE / "__init__.py"
}


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
