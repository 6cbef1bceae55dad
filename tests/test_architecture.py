"""The figure in docs/architecture.md shows the imports of the library, and these go one way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import houlsby_peft


PACKAGE = Path(houlsby_peft.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
COMMAND = PACKAGE.with_name("houlsby_peft_cli.py")
# Modules that the figure leaves out, as the page says, or that another box stands for.
OMITTED = {"errors", "hub_cards"}
BOXES = {"houlsby_peft_cli": "cli", "__init__": "init", "config_rules": "config"} | dict.fromkeys(
    ("prefix_cache", "prefix_layers", "prefix_keys", "prefix_store", "frozen_prefix"), "prefix"
)


def box(module: tuple[str, ...]) -> str:
    """Return the box of the figure that a module, relative to the package, is in."""
    if module[:2] == ("checkpoints", "untrusted"):
        return "untrusted"
    return BOXES.get(module[0], module[0])


def imported_modules(file: Path) -> Iterator[tuple[str, ...]]:
    """Yield the modules of the package that a file imports when it runs, so not those for annotations only."""
    folders = () if file == COMMAND else file.relative_to(PACKAGE).parts[:-1]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    blocks = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    for_annotations = {inner for block in blocks for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and node not in for_annotations:
            above = folders[: len(folders) - node.level + 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from (above + tuple(name.split(".")) for name in names)
        elif isinstance(node, ast.ImportFrom) and node not in for_annotations:
            package, *parts = str(node.module).split(".")
            if package in (PACKAGE.name, COMMAND.stem):
                yield tuple(parts) or (COMMAND.stem if package == COMMAND.stem else "__init__",)


def real_imports() -> set[tuple[str, str]]:
    imports = {
        (box(file.relative_to(file.parent if file == COMMAND else PACKAGE).with_suffix("").parts), box(module))
        for file in [COMMAND, *PACKAGE.rglob("*.py")]
        if "hub_cards" not in file.parts
        for module in imported_modules(file)
    }
    return {(one, other) for one, other in imports if one != other and not {one, other} & OMITTED}


def drawn_imports() -> dict[str, set[str]]:
    figure = PAGE.read_text(encoding="utf-8").partition("flowchart TD\n")[2].partition("```")[0]
    arrow = re.compile(r'^ *(\w+)(?:\["[^"]+"\])? (?:-->|-\. "on first use" \.->) (\w+)(?:\["[^"]+"\])?$')
    arrows = [arrow.match(line) for line in figure.splitlines()]
    assert all(arrows), "a line of the figure is not an arrow"
    drawn: dict[str, set[str]] = {}
    for one, other in (found.groups() for found in arrows if found):
        drawn.setdefault(one, set()).add(other)
    return drawn


def reachable(start: str, drawn: dict[str, set[str]]) -> set[str]:
    found, open_ = set(), [start]
    while open_:
        new = drawn.get(open_.pop(), set()) - found
        found |= new
        open_ += new
    return found


def test_every_import_follows_the_arrows():
    drawn = drawn_imports()
    imports = real_imports()
    assert len(imports) > 20
    assert not sorted((one, other) for one, other in imports if other not in reachable(one, drawn))


def test_every_arrow_is_an_import():
    # Imported by name on first use (PEP 562).
    on_first_use = {("init", "adapterhub"), ("init", "prefix"), ("init", "export")}
    arrows = {(one, other) for one, others in drawn_imports().items() for other in others}
    assert not sorted(arrows - real_imports() - on_first_use)


def test_imports_go_one_way():
    drawn = drawn_imports()
    assert not [one for one in drawn if one in reachable(one, drawn)]
