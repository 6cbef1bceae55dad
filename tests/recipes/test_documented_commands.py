"""Commands that start a recipe. Those of recipes/studies/*.sh: a shell runs the scripts with
stand-ins, and every flag is of its recipe. Those of README and docs: the script exists, and --help
knows every flag.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from math import isnan
from pathlib import Path

import pytest

import figure
import no_bert
import study_table
import sweep
from paper_tasks import PaperArguments
from recipe_runs import start
from run.arguments import ClassifierArguments, MethodArguments, TextArguments
from run.edge import RecipeError
from run.presets import preset
from run.training_arguments import RecipeTrainingArguments
from squad import SquadArguments
from sweeping.plan import estimate_hours, tabulate
from sweeping.search import Search
from tasks.classification import ClassificationArguments
from tasks.glue_tasks import GlueArguments, parse_arguments


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "papers.md").read_text()
SCRIPTS = sorted((ROOT / "recipes" / "studies").glob("*.sh"))
# What the flags name need not be there.
FILES = ("--data_dir", "--model_name", "--init_adapter")
OF_GLUE = ("glue.py", "gradient_norms.py")
# The flags of the recipes that are not parsed here, by name.
OTHERS = (MethodArguments, ClassifierArguments, RecipeTrainingArguments)
GROUPS = (
    GlueArguments,
    *OTHERS,
    SquadArguments,
    ClassificationArguments,
    TextArguments,
    PaperArguments,
)
KNOWN = {f"--{field.name}" for group in GROUPS for field in fields(group)} | {"--task"}


@cache
def commands(script: Path) -> list[tuple[str, ...]]:
    """Return the recipe and the flags of each command that a script runs."""
    say = """echo "COMMAND ${0##*/}$(printf ' %q' "$@")" """
    shell = f'python() {{ {say}; }}; accelerate() {{ {say}; }}; . "$1"'
    command = ["bash", "-c", shell, "bash", str(script)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [shlex.split(line) for line in output.splitlines() if line.startswith("COMMAND ")]
    recipes = [line[2:] if line[2] != "launch" else line[3:] for line in lines]
    return [(Path(recipe).name, *flags) for recipe, *flags in recipes]


def values(words: Sequence[str], flag: str) -> list[str]:
    """The values of a flag on a command line."""
    behind = words[words.index(flag) + 1 :]
    return list(itertools.takewhile(lambda word: not word.startswith("--"), behind))


def check_flags(recipe: str, flags: list[str]) -> None:
    if recipe not in OF_GLUE:
        unknown = {flag for flag in flags if flag.startswith("--")} - KNOWN
        assert not unknown, f"{recipe} has no {unknown}"
        return
    of_files = {word for flag in FILES if flag in flags for word in (flag, *values(flags, flag))}
    parse_arguments([word for word in flags if word not in of_files])


def different(lines: list[list[str]]) -> list[list[str]]:
    """Return one of the command lines that differ in their values only."""
    kinds = {}
    for words in lines:
        method = tuple(values(words, "--method")) if "--method" in words else ()
        kinds[words[0], method, tuple(word for word in words if word.startswith("--"))] = words
    return [*kinds.values()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_commands_of_a_paper(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of_recipes: list[list[str]] = []
    for recipe, *flags in different([list(command) for command in commands(script)]):
        if recipe == "sweep.py":
            planned = [run for search in plan(flags) for run in search.left()]
            assert planned
            for run_of_sweep in planned:
                recipe_and_flags = run_of_sweep.arguments
                of_recipes.append([Path(recipe_and_flags[0]).name, *recipe_and_flags[1:]])
        elif recipe == "figure.py":
            # There is no run, and perhaps no WordNet.
            with pytest.raises((RecipeError, OSError)):
                start(figure, *flags)
        elif recipe == "study_table.py":
            with pytest.raises(RecipeError, match="There is no finished run"):
                start(study_table, *flags)
        elif recipe == "no_bert.py":
            no_bert.make_parser().parse_args(flags)
        else:
            of_recipes.append([recipe, *flags])
    for recipe, *flags in different(of_recipes):
        check_flags(recipe, flags)


@pytest.mark.parametrize("status", [0, 1, 130])
def test_a_script_goes_on_after_a_failure_and_stops_when_interrupted(status, tmp_path):
    script = ROOT / "recipes" / "studies" / "mohebbi2020.sh"
    shell = f'python() {{ echo started; return {status}; }}; . "$1"'
    command = ["bash", "-c", shell, "bash", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == status
    assert ended.stdout.count("started") == (1 if status == 130 else len(commands(script)))


def plan(flags: Sequence[str]) -> list[Search]:
    """The searches of a sweep's command line, whose recipe comes first."""
    return sweep.plan(*sweep.parse_arguments([str(ROOT / flags[0]), *flags[1:]]))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_numbers_of_runs_on_the_page(script, tmp_path, monkeypatch):
    """Those of the sweeps, and the single runs that pretrain."""
    monkeypatch.chdir(tmp_path)
    count, hours = 0, 0.0
    for recipe, *flags in commands(script):
        if recipe == "sweep.py":
            table = tabulate(plan(flags))
            count, hours = count + table["runs"].sum(), hours + table["hours"].sum()
        count += recipe == "mlm.py"
    row = re.search(rf"\[{script.name}\].*?\| ([0-9,.]+) \| ([0-9,]+) \|", PAGE)
    if script.stem != "methods":
        on_page = [float(cell.replace(",", "")) for cell in row.groups()]
        assert on_page == [pytest.approx(hours, rel=0.2, abs=0.5), count], (count, hours)


def test_the_estimate_of_a_run():
    """Houlsby et al. 2019 with BERT-large: 2 operations per weight forward, 2 or 4 backward."""
    flags = "recipes/glue.py --task mnli --preset houlsby2019 --output_dir x --num_train_epochs 3"
    of_epoch = 392_702 * 89 * 302e6 / 1e14 / 3600
    for method, operations in (("houlsby", 4), ("full", 6), ("top_k --top_k 12", 2 + 4 * 12 / 24)):
        (search,) = plan(f"{flags} --method {method}".split())
        assert estimate_hours(search.left()[0]) == pytest.approx(3 * operations * of_epoch)
    (search,) = plan(f"{flags} --max_train_samples 1000".split())
    assert estimate_hours(search.left()[0]) == pytest.approx(12 * of_epoch * 1000 / 392_702)
    with pytest.raises(RecipeError, match="for squad; got uva2019"):
        preset("uva2019", "houlsby", 0, "squad")
    (search,) = plan(f"{flags} --model_name user/other".split())
    assert isnan(estimate_hours(search.left()[0]))


def sweeps() -> list[tuple[str, ...]]:
    every = itertools.chain(*map(commands, SCRIPTS))
    return [command for command in every if command[0] == "sweep.py"]


@pytest.mark.parametrize(
    ("folder", "tasks"),
    [
        ("runs/h1/sizes", ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]),
        ("runs/h4", ["mnli", "cola"]),
    ],
)
def test_the_tradeoff_is_over_the_papers_tasks_and_grid(folder, tasks):
    """Houlsby et al. 2019, sections 3.2 and 3.4: no WNLI, and one grid for adapters, top layers and
    norms.
    """
    commands_of_folder = [words for words in sweeps() if values(words, "--output_dir") == [folder]]
    assert commands_of_folder
    for words in commands_of_folder:
        assert values(words, "--task") == tasks
        if values(words, "--method") != ["full"]:
            assert values(words, "--learning_rate") == ["3e-5", "3e-4", "3e-3"]
            assert values(words, "--num_train_epochs") == ["3", "20"]


def test_every_sweep_has_its_papers_preset():
    for words in sweeps():
        assert "--preset" in words or "runs/methods" in " ".join(words)


def test_the_presets_of_other_tasks_than_glue():
    """Houlsby et al. 2019, sections 3.3 and 3.5; Mohebbi and Rajaei 2020, section 6.1."""
    expected = {
        ("paper_tasks", "houlsby2019"): ((1e-4, 50), (3e-5, 20)),
        ("paper_tasks", "mohebbi2020"): ((1e-4, 50), (3e-5, 3)),
        ("squad", "houlsby2019"): ((3e-4, 10), (3e-5, 3)),
    }
    for (recipe, paper), of_methods in expected.items():
        for method, (rate, epochs) in zip(("houlsby", "full"), of_methods, strict=True):
            settings = preset(paper, method, 0, recipe)
            assert (settings["learning_rate"], settings["num_train_epochs"]) == (rate, epochs)
    of_squad = preset("houlsby2019", "houlsby", 0, "squad")
    assert of_squad["model_name"] == "google-bert/bert-large-uncased"
    assert preset("mohebbi2020", "houlsby", 0, "paper_tasks")["head"] == "two_layer"


def test_the_dry_run_of_a_paper_starts_nothing():
    shell = (
        'python() { case "$*" in *--dry_run*) ;; *) echo "$@";; esac; }; '
        'accelerate() { echo "$@"; }; . "$1"'
    )
    for script in SCRIPTS:
        command = ["bash", "-c", shell, "bash", str(script)]
        environment = {**os.environ, "DRY_RUN": "--dry_run"}
        output = subprocess.run(command, capture_output=True, env=environment, check=False).stdout
        assert not output


BLOCK = r"^```(?:bash|sh|console)?\n(.*?)^```"
COMMAND = re.compile(
    r"(?:python|accelerate launch|sbatch)\s[^\n#]*?recipes/([\w/]+\.\w+(?:\s[^\n#]*)?)$"
)
LAUNCHERS = {"--config_file", "--num_processes", "--main_process_port", "--rdzv_backend"}
LAUNCHERS |= {"--max_restarts", "--array", "--debug"}


def commands_of_pages() -> list[str]:
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


@pytest.mark.parametrize("command", commands_of_pages())
def test_a_command_of_a_page(command):
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
