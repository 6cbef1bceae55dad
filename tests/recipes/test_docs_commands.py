"""The commands of README and docs that start a recipe: the script exists, and --help knows every
flag.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from recipe_runs import start


pytest.importorskip(
    "matplotlib", reason="needs matplotlib, of the extra 'recipes', which is not installed"
)

ROOT = Path(__file__).parents[2]
BLOCK = r"^```(?:bash|sh|console)?\n(.*?)^```"
COMMAND = re.compile(
    r"(?:python|accelerate launch|sbatch)\s[^\n#]*?recipes/([\w/]+\.\w+(?:\s[^\n#]*)?)$"
)
LAUNCHERS = {"--config_file", "--num_processes", "--main_process_port", "--rdzv_backend"}
LAUNCHERS |= {"--max_restarts", "--array", "--debug"}


def commands() -> list[str]:
    """Return the commands in the blocks of code, each from the name of the script on."""
    lines = set()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        blocks = re.findall(BLOCK, page.read_text(), re.DOTALL | re.MULTILINE)
        text = "\n".join(blocks).replace("\\\n", " ")
        for line in re.split(r"&&|\||;|\n", text):
            if match := COMMAND.search(line.strip()):
                lines.add(match[0].partition("recipes/")[2])
    return sorted(lines)


@cache
def flags_of(recipe: str) -> set[str]:
    """Return the flags that a recipe's --help lists."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        start(importlib.import_module(recipe), "--help")
    return set(re.findall(r"--[\w-]+", printed.getvalue()))


@pytest.mark.parametrize("command", commands())
def test_a_command(command):
    words = shlex.split(command.replace("$(", "").replace(")", ""), comments=True)
    scripts = [word.removeprefix("recipes/") for word in words if word.startswith("recipes/")]
    scripts.append(words[0])
    assert not [script for script in scripts if not (ROOT / "recipes" / script).exists()]
    recipes = [Path(script).stem for script in scripts if script.endswith(".py")]
    if not recipes:
        return
    flags = set().union(*map(flags_of, recipes)) | LAUNCHERS
    unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - flags
    assert not unknown or recipes == ["figure"], f"{recipes} have no {unknown}"
