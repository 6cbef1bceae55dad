"""The commands of docs/recipes.md that fill the papers' tables and figures: every flag is one of its recipe."""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from recipe_runs import run


pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra 'recipes', which is not installed")
from analysis.grid import FILES, OF_GLUE, _without
from squad import SquadArguments
from study.presets import GlueArguments, parse_arguments
from tasks.classification import ClassificationArguments
from training.arguments import TextArguments
from training.errors import RecipeError


ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "recipes.md").read_text()
SECTION = TEXT.partition("## The papers, cell by cell")[2].partition("\n## ")[0]
SEQUENCE = re.compile(r"\$\(seq ([\d ]+)\)")
COMMAND = re.compile(r"(?:accelerate launch|python) recipes/(.*)")
# The flags of the recipes that are not parsed here, by name.
_, *OTHERS = get_type_hints(parse_arguments)["return"].__args__
GROUPS = (GlueArguments, *OTHERS, SquadArguments, ClassificationArguments, TextArguments)
KNOWN = {field.name for group in GROUPS for field in fields(group)} | {"task"}


def numbers(match: re.Match[str]) -> str:
    """What seq prints."""
    values = [*map(int, match[1].split())]
    first, step, last = values if len(values) == 3 else (1, 1, values[0])
    return " ".join(map(str, range(first, last + 1, step)))


def commands() -> list[str]:
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)).replace("\\\n", "")
    cells = "\n".join(re.findall(r"`(python [^`]+)`", SECTION))
    found = [match[1] for line in f"{blocks}\n{cells}".splitlines() if (match := COMMAND.match(line.strip()))]
    return [SEQUENCE.sub(numbers, command).replace("$task", "cola") for command in found]


def check_flags(recipe: str, flags: list[str]) -> None:
    if recipe in OF_GLUE:
        at = flags.index("--variant") if "--variant" in flags else len(flags)
        parse_arguments(_without(FILES, [*flags[:at], *flags[at + 2 :]]))
    else:
        unknown = {flag for flag in flags if flag.startswith("--")} - {f"--{name}" for name in KNOWN}
        assert not unknown, f"{recipe} has no {unknown}"


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_papers(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe, *flags = shlex.split(command)
    if recipe in ("no_bert.py", "submission.py"):
        source = (ROOT / "recipes" / recipe).read_text()
        assert all(f'"{flag}"' in source for flag in flags if flag.startswith("--"))
    elif recipe in ("glue.py", "mlm.py"):
        check_flags(recipe, flags)
    elif recipe in ("study_table.py", "learning_curves.py", "time_to_score.py") or "--draw_only" in flags:
        with pytest.raises(RecipeError, match="run"):  # there is none
            run(importlib.import_module(recipe.removesuffix(".py")), *flags)
    elif recipe in ("ablation.py", "robustness.py"):
        for folder in (flag for flag in flags if flag.startswith("runs/")):
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, "results.json").write_text(RESULTS)
        run(importlib.import_module(recipe.removesuffix(".py")), *flags, "--dry_run")
        assert capsys.readouterr().out.startswith("runs/")
    else:
        flags = [str(ROOT / flag) if flag.startswith("recipes/") else flag for flag in flags]
        run(importlib.import_module(recipe.removesuffix(".py")), *flags, "--dry_run")
        different = {}
        for line in capsys.readouterr().out.splitlines():
            words = shlex.split(line)
            script = next(word for word in words if word.endswith(".py"))
            rest = words[words.index(script) + 1 :]
            names = tuple(word for word in rest if word.startswith("--"))
            method = rest[rest.index("--method") + 1] if "--method" in rest else None
            different[Path(script).name, names, method] = rest
        assert different
        for (script, *_), rest in different.items():
            check_flags(script, rest)


def values(words: list[str], flag: str) -> list[str]:
    """The values of a flag on a command line."""
    return list(itertools.takewhile(lambda word: not word.startswith("--"), words[words.index(flag) + 1 :]))


@pytest.mark.parametrize(
    ("folder", "tasks"), [("runs/h3", ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]),
                          ("runs/h4", ["mnli", "cola"])]
)  # fmt: skip
def test_the_tradeoff_is_over_the_papers_tasks_and_grid(folder, tasks):
    """Houlsby et al. 2019, sections 3.2 and 3.4: no WNLI, and one grid for adapters, top layers and norms."""
    sweeps = [shlex.split(command) for command in commands() if command.startswith("sweep.py")]
    sweeps = [words for words in sweeps if values(words, "--output_dir") == [folder]]
    assert sweeps
    for words in sweeps:
        assert values(words, "--task") == tasks
        if values(words, "--method") != ["full"]:
            assert values(words, "--learning_rate") == ["3e-5", "3e-4", "3e-3"]
            assert values(words, "--num_train_epochs") == ["3", "20"]


def test_runs_without_a_preset_also_read_the_examples_in_random_order():
    """The recipes' default groups them by length, which none of the papers does."""
    sweeps = [shlex.split(command) for command in commands() if command.startswith("sweep.py")]
    sweeps = [words for words in sweeps if "--preset" not in words]
    assert {words[1] for words in sweeps} == {"recipes/paper_tasks.py", "recipes/squad.py"}
    for words in sweeps:
        assert "--train_sampling_strategy" in words, words
        assert values(words, "--train_sampling_strategy") == ["random"]


def test_the_ablations_show_the_accuracy():
    """As the captions of both papers say."""
    ablations = [command for command in commands() if command.startswith("ablation.py")]
    assert len(ablations) == 2
    assert not [command for command in ablations if "--score" in command]


RESULTS = '{"task": "cola", "method": "houlsby", "model": "bert", "arguments": {"init_adapter": null}}'


def test_every_table_and_figure_has_a_row():
    parts = dict(zip(*[iter(re.split(r"### (.*)\n", SECTION)[1:])] * 2, strict=True))
    rows = {paper: " ".join(re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)) for paper, text in parts.items()}
    wanted = {
        "Houlsby et al. 2019": ["Table 1", "Table 2", *(f"Figure {n}" for n in (3, 4, 5, 6)), "Figures 1"],
        "Mohebbi and Rajaei 2020": ["Tables 1 and 2", "Table 3", "Figure 8"],
        "Whritenour and Schoch 2019": ["MRPC and CoLA", "111,863,042"],
        "Han et al. 2021": [
            "Table 1",
            "Figures 1 and 4",
            "Figures 2 and 3",
            "Figure 5",
            "Figures 9, 10 and 13",
            "MNLI",
        ],
    }
    assert not [(paper, cell) for paper, cells in wanted.items() for cell in cells if cell not in rows[paper]]


def test_every_folder_of_a_cell_is_made_by_a_command():
    made = set(re.findall(r"--output_dir runs/(\w+)", "\n".join(re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL))))
    assert {*re.findall(r"runs/(\w+)", SECTION)} - made <= {"cola"}, "runs/$task-text"
