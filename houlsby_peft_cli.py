"""The command `houlsby-peft`: its command line, and the recipes that it starts.

This module is not part of the package `houlsby_peft`, whose import registers the method with PEFT
and takes seconds. The help and mistakes in the arguments are thus shown at once.

To add a command, write a function of its name in `houlsby_peft/commands.py`, and add its arguments
in `_make_parser`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from houlsby_peft_serve import add_flags, read_options


_CHECKED = ("text_classification", "token_classification")  # whose labels `check` knows
_RECIPES = (*_CHECKED, "squad", "mlm")
# Of names that can only be files.
_EXTENSIONS = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".xlsx", ".ods", ".gz", ".conll")
# Other names of a recipe's flags, as people know them.
_ALIASES = {
    "model": "model_name",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "target_column": "label_columns",
}
_EXAMPLES = {
    "check": "check tickets.xlsx --model minilm",
    "train": "train tickets.xlsx --model minilm",
    "evaluate": "evaluate runs/tickets new.csv",
    "predict": "predict runs/tickets --file new.csv --output answers.xlsx",
    "serve": "serve --adapters runs/tickets",
    "push": "push runs/tickets user/tickets",
    "card": "card runs/tickets/adapter",
    "export": "export runs/tickets onnx",
    "convert": "convert AdapterHub/name folder",
}
_FLAGS = "flags of the recipe, after the data:\n"
_MODEL_FLAG = """\
  --model_name NAME           encoder: a name on the Hub, a folder, or minilm, which needs no
                              download from the Hub
"""
_COLUMN_FLAGS = """\
  --text_columns A [B]        column of the texts, or two for pairs; default: {default}
  --label_columns A [...]     column of the label; several: a task each, or of 0 and 1 one class
                              each of one task; default: detected
"""
_TRAIN_FLAGS = f"""\
{_FLAGS}{_MODEL_FLAG}\
  --output_dir FOLDER         where the run goes; default: runs/ and the name of the data or the
                              recipe
{_COLUMN_FLAGS.format(default="detected")}\
  --check_labels              first list the training examples whose label is doubtful
  --validation_file FILE      validation data; default: a tenth of the training examples, a
                              fifth of fewer than 1,000
  --metric NAME [...]         further metrics: names on the Hub or local scripts
  --num_train_epochs N        passes over the data
  --learning_rate RATE        1e-4 to 1e-3 are usual for adapters
  --r N                       width of the bottleneck; default: 64
  --layers N [N ...]          layers to adapt, counted from 0; default: all
  --push_to_hub true          share the adapter on the Hub at the end
"""
_CHECK_FLAGS = f"""\
{_FLAGS}{_MODEL_FLAG}\
  --output_dir FOLDER         where label_issues.csv goes; default: runs/ and the name of the data
{_COLUMN_FLAGS.format(default="detected")}"""
_EVALUATE_FLAGS = f"""\
{_FLAGS}\
  --metric NAME [...]         further metrics: names on the Hub or local scripts, as evaluate.load
                              takes them
  --output_dir FOLDER         where evaluation.json goes; default: the run's folder
{_COLUMN_FLAGS.format(default="as in the training")}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. If it fails, print the error as one line on stderr and exit with status 1.

    Flags may be written with hyphens or, like those of the recipes, with underscores. With
    `--debug`, or the environment variable HOULSBY_DEBUG=1, an error shows its traceback.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    escape_other_letters()
    options = _parse(_with_hyphens(arguments))
    try:
        options.run(options)
        # At its end, the interpreter would print a traceback for a pipe that is closed.
        print(end="", flush=True)
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit("error: interrupted")
    except Exception as error:
        shows_traceback = "debug" in options or os.environ.get("HOULSBY_DEBUG") == "1"
        if shows_traceback or not _is_known(error):
            raise
        message = " ".join(str(error).split())
        if isinstance(error, ImportError):
            message += ". Install it, or the extra serve, ray, export or tables"
        sys.exit(f"error: {message}")


def _with_hyphens(words: Sequence[str]) -> list[str]:
    """Write flags with hyphens. The flags of a recipe, and what follows --, stay as they are."""
    words = list(words)
    if words[:1] in (["train"], ["check"], ["evaluate"]):
        return words
    end = words.index("--") if "--" in words else len(words)
    for number in range(end):
        words[number] = re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), words[number])
    return words


def _is_known(error: Exception) -> bool:
    """Return whether an error is ours, of files, JSON or the Hub, or a missing package.

    The message of others means nothing without their traceback. safetensors has a class of its own.
    """
    is_of_safetensors = "safetensors" in type(error).__module__
    return isinstance(error, (OSError, ValueError, ImportError)) or is_of_safetensors


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line."""
    has_file = any(word.partition("=")[0] == "--file" for word in words)
    parser = _make_parser(has_file)
    if words and not words[0].startswith("-") and words[0] not in _EXAMPLES:
        parser.error(f"there is no command {words[0]!r}{_closest(words[0], _EXAMPLES)}")
    options, unknown = parser.parse_known_args(words)
    if unknown:
        hint = " (a recipe's flags follow the data)" * ("flags" in options)
        known = re.findall(r"--[\w-]+", options.usage())
        parser.error(f"unknown: {' '.join(unknown)}{hint or _closest(unknown[0], known)}")
    return options


def _closest(word: str, known: Iterable[str]) -> str:
    """Return a question for the word that is meant, if one is close."""
    matches = get_close_matches(word, [*known], 1)
    return f"; did you mean {matches[0]}?" if matches else ""


def _run_in_library(options: argparse.Namespace) -> None:
    """Run a command with the library, whose import takes seconds."""
    if options.command == "predict":
        _check_path(options.adapter)
        _check_path(options.file)
    commands = import_module("houlsby_peft.commands")
    getattr(commands, options.command)(options)


_Add = Callable[..., argparse.ArgumentParser]


def _make_parser(has_file: bool) -> argparse.ArgumentParser:
    """Return the parser of all commands. With --file, `predict` takes no texts."""
    parser = argparse.ArgumentParser(
        prog="houlsby-peft", description="Train, share and serve Houlsby adapters."
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {version('houlsby-peft')}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, help: str, run: Callable[[argparse.Namespace], None] = _run_in_library
    ) -> argparse.ArgumentParser:
        # Without abbreviations: the --r of train is the recipe's.
        command = commands.add_parser(
            name,
            help=help,
            allow_abbrev=False,
            description=f"Example: houlsby-peft {_EXAMPLES[name]}",
        )
        command.set_defaults(run=run, usage=command.format_help)
        command.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )
        return command

    _add_training(add)
    _add_prediction(add, has_file)
    add_flags(add("serve", "serve a folder or a list of adapters over HTTP", _serve))
    _add_sharing(add)
    _add_formats(add)
    return parser


def _add_training(add: _Add) -> None:
    """Add the commands that start a recipe."""
    check = add("check", "list the training examples whose label is doubtful", _check)
    check.add_argument("data", nargs="?", help="as for train")
    train = add("train", "train an adapter for your own data", _train)
    train.add_argument(
        "data",
        nargs="?",
        help="file (.csv, .xlsx, .json, .parquet, .conll, ...), or several, a folder, or a name on "
        "the Hub",
    )
    evaluate = add("evaluate", "score a trained adapter or model on other data", _evaluate)
    evaluate.add_argument(
        "trained", metavar="run", nargs="?", help="folder of a run or of several, or an adapter"
    )
    evaluate.add_argument("data", nargs="?", help="as for train")
    usage = "%(prog)s [options] DATA [flags of the recipe]"
    train.usage = check.usage = usage
    evaluate.usage = usage.replace("DATA", "RUN DATA")
    for command, recipes, epilog in (
        (train, _RECIPES, _TRAIN_FLAGS),
        (check, _CHECKED, _CHECK_FLAGS),
        (evaluate, _RECIPES, _EVALUATE_FLAGS),
    ):
        command.set_defaults(recipes=recipes)
        command.epilog = epilog
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        command.add_argument(
            "--recipe",
            choices=recipes,
            help="kind of the task; default: by the data, or the run's",
        )
        command.add_argument("--help-all", action="store_true", help="show all flags of the recipe")


def _add_sharing(add: _Add) -> None:
    """Add the commands that write a card."""
    push = add("push", "push a saved adapter to the Hub with a generated card")
    push.add_argument("folder", type=Path, help="folder of the adapter")
    push.add_argument("repo_id", help="user/name, or name for the user of the token")
    push.add_argument(
        "--private", action="store_true", default=None, help="create a private repository"
    )
    push.add_argument(
        "--beneath",
        help="the name on the Hub of the adapter beneath a ladder, if the ladder records a folder",
    )

    card = add("card", "write the card (README.md) into the folder of a saved adapter")
    card.add_argument("folder", type=Path, help="folder of the adapter")
    card.add_argument(
        "repo_id", nargs="?", help="user/name that the adapter will have on the Hub, if it is known"
    )

    for command in (push, card):
        command.add_argument(
            "--base-model", help="the base model's name on the Hub, if the adapter records a folder"
        )
        command.add_argument(
            "--results",
            nargs="+",
            action="extend",
            help="results.json of a run, or one per seed; default: that of the recipe's run that "
            "saved the adapter",
        )
        command.add_argument(
            "--example",
            nargs="+",
            action="extend",
            metavar="TEXT",
            help="texts for which the card shows predictions",
        )
        command.add_argument(
            "--pairs", action="store_true", help="take the texts of --example in pairs"
        )
        command.add_argument(
            "--metadata",
            nargs="+",
            action="extend",
            type=_metadatum,
            metavar="KEY=VALUE",
            help="metadata of the card, such as license=apache-2.0 language=en",
        )


def _metadatum(text: str) -> tuple[str, str]:
    key, is_given, value = text.partition("=")
    if not is_given:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")
    return key, value


def _add_prediction(add: _Add, has_file: bool) -> None:
    predict = add(
        "predict", "predict for texts or for the rows of a file, with one adapter or many"
    )
    predict.add_argument(
        "adapter",
        help="user/name on the Hub, or a folder; or a folder of adapters or runs, of which each "
        "answers",
    )
    _add_base(predict)
    if not has_file:
        predict.add_argument(
            "texts", nargs="+", help="texts, - to read one per line from standard input, or --file"
        )
    _add_table(
        predict,
        "--file",
        "table with a text per row: .csv, .tsv, .xlsx, .json, .jsonl, .parquet, ...",
    )
    predict.add_argument(
        "--output",
        type=Path,
        help="file for the rows of --file and their predictions, such as .csv or, for Excel, "
        ".xlsx; default: JSON lines on stdout",
    )
    predict.add_argument("--overwrite", action="store_true", help="replace --output if it exists")
    predict.add_argument(
        "--top-k", type=int, help="show this many classes, the best first; default: the best one"
    )
    predict.add_argument(
        "--batch-size", type=int, default=32, help="texts to predict at once; default: %(default)s"
    )
    predict.add_argument("--device", help="where to compute, such as cuda; default: the CPU")


def _add_formats(add: _Add) -> None:
    """Add the commands that write or read another format."""
    export = add("export", "export an adapter, or many ladders, with the base model to ONNX")
    export.add_argument(
        "adapters",
        metavar="adapter",
        nargs="+",
        help="user/name on the Hub, or a folder; of ladders, several or a folder of them, which "
        "share one encoder",
    )
    export.add_argument(
        "output", type=Path, help="folder to write the models, their labels and the tokenizer to"
    )
    export.add_argument(
        "--int8", action="store_true", help="also write a model quantized to 8-bit integers"
    )
    _add_table(
        export, "--check", "table with a text per row: as --int8, and count the answers that change"
    )
    _add_base(export)

    convert = add("convert", "convert an adapter from AdapterHub's format")
    convert.add_argument("source", help="user/name on the Hub, or a folder")
    convert.add_argument("target", type=Path, help="new folder for the converted adapter")
    convert.add_argument(
        "--base-model", help="name or folder of the base model, instead of the recorded one"
    )
    convert.add_argument("--revision", help="branch, tag or commit of the source")
    convert.add_argument(
        "--no-head", dest="with_head", action="store_false", help="leave out the prediction head"
    )
    convert.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read weights from a pickled file, of whose author you are sure",
    )


def _add_table(command: argparse.ArgumentParser, flag: str, help: str) -> None:
    """Add the flag of a table, and those that tell how to read it."""
    command.add_argument(flag, dest="file", metavar="FILE", type=Path, help=help)
    command.add_argument(
        "--pairs",
        action="store_true",
        help="take the texts, or two tab-separated columns, in pairs",
    )
    command.add_argument(
        "--text-columns",
        "--text-column",
        dest="text_column",
        nargs="+",
        help=f"column of {flag} with the texts, or two: pairs, or questions and contexts; default: "
        "as in the training, or by name",
    )
    command.add_argument(
        "--encoding", help=f"encoding of {flag}, such as shift_jis; default: detected"
    )
    command.add_argument(
        "--no-header", action="store_true", help=f"the first row of {flag} is data, not a header"
    )


def _add_base(command: argparse.ArgumentParser) -> None:
    """Add what tells an adapter's version and its base model."""
    command.add_argument("--revision", help="branch, tag or commit of the adapter")
    command.add_argument(
        "--other-base",
        choices=["refuse", "warn"],
        default="refuse",
        help="what to do with another base model",
    )
    command.add_argument(
        "--base-model", help="name or folder of the base model, instead of the recorded one"
    )


def _serve(options: argparse.Namespace) -> None:
    """Check the options of the service before the library is imported."""
    options.service = read_options(options)
    _run_in_library(options)


def _train(options: argparse.Namespace) -> None:
    words = ["--data", options.data]
    if {"--do_predict", "--do_eval"} & {*options.flags}:  # which alone would train nothing
        words.append("--do_train")
    _launch(options, options.recipe, words)


def _check(options: argparse.Namespace) -> None:
    # Without an evaluation, no validation split is taken from the examples.
    _launch(
        options, options.recipe, ["--data", options.data, "--check_labels", "only", "--do_train"]
    )


def _evaluate(options: argparse.Namespace) -> None:
    words, recipe = ["--evaluate", options.trained, "--data", options.data], options.recipe
    path = Path(options.trained or "").expanduser()
    # Of the run that the path names or whose adapter it names, or of all runs in a folder.
    for folder, pattern in ((path, ""), (path.parent, ""), (path, "*/")):
        results = sorted(folder.glob(f"{pattern}results.json"))
        if results:
            # Beside what the run has written, unless a flag follows.
            words += ["--output_dir", str(folder)]
            recipe = recipe or _recipe_of(results[0])
            break
    _launch(options, recipe, words)


def _recipe_of(results: Path) -> str | None:
    """Return the recipe of the run that has these results."""
    command = json.loads(results.read_text(encoding="utf-8"))["command"]
    for recipe in _RECIPES:
        if f"recipes/{recipe}.py" in command:
            return recipe
    return None


def _take_recipe(flags: list[str], recipes: Sequence[str]) -> str | None:
    """Remove --recipe from the flags after the data, and return its value."""
    for number, flag in enumerate(flags):
        name, is_joined, value = flag.partition("=")
        if name == "--recipe":
            if not is_joined:
                value = "".join(flags[number + 1 : number + 2])
            del flags[number : number + (1 if is_joined else 2)]
            if value not in recipes:
                raise ValueError(f"--recipe must be one of {', '.join(recipes)}; got {value!r}.")
            return value
    return None


def _recipe_for(data: str) -> str:
    """Return the recipe for data, by the extension of the file or of those in a folder."""
    words = (".conll", ".conllu", ".bio", ".iob", ".iob2", ".bilou")
    path = Path(data).expanduser()
    names = [data, *(file.name for file in path.iterdir())] if path.is_dir() else [data]
    if any(name.lower().endswith(words) for name in names):
        return "token_classification"
    return "text_classification"


def _spell_flags(flags: Sequence[str], folder: Path, recipe: str) -> list[str]:
    """Return a recipe's flags as it spells them; refuse one that it has not.

    Its flags are the fields of the dataclasses in its files, which are not imported: that would
    take seconds.
    """
    files = [folder / f"{recipe}.py", folder / "tasks" / "classification.py"]
    files += sorted((folder / "run").glob("*arguments.py"))
    spec = find_spec("transformers")
    for location in (spec and spec.submodule_search_locations) or ():
        files.append(Path(location, "training_args.py"))
    known = {"help", "debug"}
    for file in files:
        for names in re.findall(
            r'^    (\w+): |"--(\w+)"', file.read_text(encoding="utf-8"), re.MULTILINE
        ):
            known |= {*names}
    spelled = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        if name.startswith("--") and len(name) > 2:
            name = name[2:].replace("-", "_")
            name = _ALIASES.get(name, name)
            if name not in known and name.removeprefix("no_") not in known:
                close = _closest(name, [*known, *_ALIASES]).replace("mean ", "mean --")
                raise ValueError(f"unknown flag --{name}{close or '; --help-all lists all'}")
            flag = f"--{name}{equals}{value}"
        spelled.append(flag)
    return spelled


def escape_other_letters() -> None:
    """Let the output have escapes for the letters that its encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _check_path(name: str | Path | None) -> None:
    """Refuse a path to nothing before the libraries are imported, which takes seconds.

    A name on the Hub has at most one slash.
    """
    path = Path(name or ".").expanduser()
    is_path = path.is_absolute() or str(name).startswith((".", "~")) or len(path.parts) > 2
    if (is_path or path.suffix.lower() in _EXTENSIONS) and not path.exists():
        raise ValueError(f"{name} is no file or folder that exists.")


def _launch(options: argparse.Namespace, recipe: str | None, words: list[str | None]) -> None:
    """Become the recipe, by default that of the data. On several GPUs, `accelerate launch` starts
    it instead.
    """
    recipe = (
        _take_recipe(options.flags, options.recipes) or recipe or _recipe_for(str(options.data))
    )
    _check_path(options.data)
    for package in ("datasets", "sklearn"):
        if find_spec(package) is None:
            raise ImportError(f"Training needs {package}: pip install 'houlsby-peft[recipes]'")
    folder = Path(__file__).parent / "houlsby_peft" / "recipes"
    if not folder.exists():  # in a checkout, they are beside the package
        folder = Path(__file__).parent / "recipes"
    further = list(takewhile(lambda word: not word.startswith("-"), options.flags))
    if further:
        words += ["--more_data", *further]
    options.flags = _spell_flags(options.flags[len(further) :], folder, recipe)
    if options.help_all:
        words, options.flags = ["--help"], []
    elif None in words:
        raise ValueError(
            f"The data are missing; houlsby-peft {options.command} --help shows what to give."
        )
    if "debug" in options:
        options.flags.append("--debug")
    command = [sys.executable, str(folder / f"{recipe}.py"), *map(str, words), *options.flags]
    if sys.platform == "win32":  # where the shell would not wait for the new process
        sys.exit(subprocess.call(command))
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
