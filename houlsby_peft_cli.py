"""The command `houlsby-peft`: thin wrappers around functions of the library.

This module is not part of the package `houlsby_peft`, whose import registers the method with PEFT
and takes seconds. Each command imports what it needs when it runs. The help and mistakes in the
arguments are thus shown at once.

To add a command, write a function that runs it, and its parser's block in `_make_parser`.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from houlsby_peft.checkpoints.saved import SavedAdapter
    from houlsby_peft.serving.task_bank import TaskBank
    from houlsby_peft.tables import TableReader

_CHECKED = ("text_classification", "token_classification")  # whose labels `check` knows
_RECIPES = (*_CHECKED, "squad", "mlm")
# Of names that can only be files.
_EXTENSIONS = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".xlsx", ".ods", ".gz", ".conll")
_TRAIN_FLAGS = """\
flags of the recipe, after the data:
  --model_name NAME           encoder: a name on the Hub, a folder, or minilm, which needs no
                              download from the Hub
  --output_dir FOLDER         where the run goes; default: runs/ and the name of the data or the
                              recipe
  --text_columns A [B]        column of the texts, or two for pairs; default: detected
  --label_columns A [...]     column of the label, or one 0/1 column per class; default: detected
  --check_labels              first list the training examples whose label is probably wrong
  --validation_file FILE      validation data; default: a tenth of the training examples
  --metric NAME [...]         further metrics: names on the Hub or local scripts
  --num_train_epochs N        passes over the data
  --learning_rate RATE        1e-4 to 1e-3 are usual for adapters
  --r N                       width of the bottleneck; default: 64
  --layers N [N ...]          layers to adapt, counted from 0; default: all
  --push_to_hub true          share the adapter on the Hub at the end
"""
_CHECK_FLAGS = """\
flags of the recipe, after the data:
  --model_name NAME           encoder: a name on the Hub, a folder, or minilm, which needs no
                              download from the Hub
  --output_dir FOLDER         where label_issues.csv goes; default: runs/ and the name of the data
  --text_columns A [B]        column of the texts, or two for pairs; default: detected
  --label_columns A [...]     column of the label, or one 0/1 column per class; default: detected
"""
_EVALUATE_FLAGS = """\
flags of the recipe, after the data:
  --metric NAME [...]         further metrics: names on the Hub or local scripts, as evaluate.load
                              takes them
  --output_dir FOLDER         where evaluation.json goes; default: the run's folder
  --text_columns A [B]        column of the texts, or two for pairs; default: as in the training
  --label_columns A [...]     column of the label, or one 0/1 column per class; default: detected
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. If it fails, print the error as one line on stderr and exit with status 1.

    Flags may be written with hyphens or, like those of the recipes, with underscores. With
    `--debug`, or the environment variable HOULSBY_DEBUG=1, an error shows its traceback.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    words = _with_hyphens(arguments)
    has_file = any(word.partition("=")[0] == "--file" for word in words)
    parser = _make_parser(has_file)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A label may have letters that the console's encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    options, unknown = parser.parse_known_args(words)
    if unknown:
        hint = " (a recipe's flags follow the data)" * ("flags" in options)
        parser.error(f"unknown: {' '.join(unknown)}{hint}")
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


def _make_parser(has_file: bool) -> argparse.ArgumentParser:
    """Return the parser of all commands. With --file, `predict` takes no texts."""
    parser = argparse.ArgumentParser(
        prog="houlsby-peft", description="Train, share and serve Houlsby adapters."
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {version('houlsby-peft')}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], None], help: str
    ) -> argparse.ArgumentParser:
        # Without abbreviations: the --r of train is the recipe's.
        command = commands.add_parser(name, help=help, allow_abbrev=False)
        command.set_defaults(run=run)
        command.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )
        return command

    def metadatum(text: str) -> tuple[str, str]:
        key, is_given, value = text.partition("=")
        if not is_given:
            raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")
        return key, value

    train = add("train", _train, "train an adapter for your own data")
    train.add_argument(
        "data",
        nargs="?",
        help="file (.csv, .xlsx, .json, .parquet, .conll, ...), folder, or name on the Hub",
    )
    check = add("check", _check, "list the training examples whose label is probably wrong")
    check.add_argument("data", nargs="?", help="as for train")
    evaluate = add("evaluate", _evaluate, "score a trained adapter or model on other data")
    evaluate.add_argument(
        "trained", metavar="run", nargs="?", help="folder of the run, or an adapter"
    )
    evaluate.add_argument("data", nargs="?", help="as for train")
    train.set_defaults(recipes=_RECIPES)
    check.set_defaults(recipes=_CHECKED)
    evaluate.set_defaults(recipes=_RECIPES)
    train.usage = "%(prog)s [options] DATA [flags of the recipe]"
    train.epilog = _TRAIN_FLAGS
    check.usage = "%(prog)s [options] DATA [flags of the recipe]"
    check.epilog = _CHECK_FLAGS
    evaluate.usage = "%(prog)s [options] RUN DATA [flags of the recipe]"
    evaluate.epilog = _EVALUATE_FLAGS
    for command in (train, check, evaluate):
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        command.add_argument(
            "--recipe",
            choices=command.get_default("recipes"),
            help="kind of the task; default: by the data, or the run's",
        )
        command.add_argument("--help-all", action="store_true", help="show all flags of the recipe")

    push = add("push", _push, "push a saved adapter to the Hub with a generated card")
    push.add_argument("folder", type=Path, help="folder of the adapter")
    push.add_argument("repo_id", help="user/name, or name for the user of the token")
    push.add_argument(
        "--private", action="store_true", default=None, help="create a private repository"
    )

    card = add("card", _card, "write the card (README.md) into the folder of a saved adapter")
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
            type=metadatum,
            metavar="KEY=VALUE",
            help="metadata of the card, such as license=apache-2.0 language=en",
        )

    predict = add(
        "predict", _predict, "predict for texts or for the rows of a file, with one adapter or many"
    )
    export = add("export", _export, "export an adapter with its base model to ONNX")
    predict.add_argument(
        "adapter",
        help="user/name on the Hub, or a folder; or a folder of adapters or runs, of which each "
        "answers",
    )
    export.add_argument("adapter", help="user/name on the Hub, or a folder")
    for command in (predict, export):
        command.add_argument("--revision", help="branch, tag or commit of the adapter")
    if not has_file:
        predict.add_argument(
            "texts", nargs="+", help="texts, - to read one per line from standard input, or --file"
        )
    predict.add_argument(
        "--file",
        type=Path,
        help="table with a text per row: .csv, .tsv, .xlsx, .json, .jsonl, .parquet, ...",
    )
    predict.add_argument(
        "--pairs",
        action="store_true",
        help="take the texts, or two tab-separated columns, in pairs",
    )
    predict.add_argument(
        "--output",
        type=Path,
        help="file for the rows of --file and their predictions, such as .csv or, for Excel, "
        ".xlsx; default: JSON lines on stdout",
    )
    predict.add_argument("--overwrite", action="store_true", help="replace --output if it exists")
    predict.add_argument(
        "--text-column",
        nargs="+",
        help="column of --file with the texts, or two: pairs, or questions and contexts; default: "
        "as in the training, or by name",
    )
    predict.add_argument(
        "--encoding", help="encoding of --file, such as shift_jis; default: detected"
    )
    predict.add_argument(
        "--no-header", action="store_true", help="the first row of --file is data, not a header"
    )
    predict.add_argument(
        "--top-k", type=int, help="show this many classes, the best first; default: the best one"
    )
    predict.add_argument(
        "--batch-size", type=int, default=32, help="texts to predict at once; default: %(default)s"
    )
    export.add_argument(
        "output", type=Path, help="folder to write the model, its labels and the tokenizer to"
    )
    export.add_argument(
        "--int8", action="store_true", help="also write a model quantized to 8-bit integers"
    )
    for command in (predict, export):
        command.add_argument(
            "--other-base",
            choices=["refuse", "warn"],
            default="refuse",
            help="what to do with another base model",
        )
        command.add_argument(
            "--base-model", help="name or folder of the base model, instead of the recorded one"
        )
    predict.add_argument("--device", help="where to compute, such as cuda; default: the CPU")

    serve = add("serve", _serve, "serve a folder or a list of adapters over HTTP")
    serve.add_argument(
        "--adapters",
        required=True,
        metavar="FOLDER_OR_LIST",
        help="folder of adapters or runs, one of these, or a YAML or JSON list",
    )
    serve.add_argument(
        "--base-model", help="name or folder of the base model, instead of the recorded one"
    )
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    serve.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    serve.add_argument(
        "--batch-size", type=int, default=32, help="rows that are predicted at once (default: 32)"
    )
    serve.add_argument(
        "--cpus",
        type=int,
        help="cores that predict, in each process (default: all but one, at most 8; on Ray, at "
        "most 4)",
    )
    serve.add_argument("--gpus", type=float, default=0, help="GPUs that predict (default: 0)")
    serve.add_argument(
        "--compile", action="store_true", help="repeat the model's layers on a GPU as CUDA graphs"
    )
    serve.add_argument(
        "--ray", action="store_true", help="predict in replicas, which Ray starts and restarts"
    )
    serve.add_argument(
        "--replicas", type=int, help="replicas under load, on Ray (default: as the cores allow)"
    )
    serve.add_argument(
        "--max-queued", type=int, default=512, help="requests that may wait (default: 512)"
    )
    serve.add_argument(
        "--max-rows",
        type=int,
        default=1024,
        help="rows of a request, counted once per task (default: 1024)",
    )
    serve.add_argument(
        "--max-characters",
        type=int,
        default=200_000,
        help="characters of the texts of a request (default: 200000)",
    )
    serve.add_argument(
        "--watch",
        type=float,
        default=5,
        help="seconds between looks at the adapters; 0: never look",
    )
    serve.add_argument(
        "--tokens", metavar="FILE", help="file with the tokens of clients; see docs/serving.md"
    )
    serve.add_argument("--open", action="store_true", help="let other machines ask without a token")
    serve.add_argument(
        "--log", choices=("text", "json"), default="text", help="form of the log (default: text)"
    )
    serve.add_argument("--access-log", action="store_true", help="log each request")
    serve.add_argument(
        "--print-config",
        action="store_true",
        help="print the deployment file for a Ray cluster instead",
    )

    convert = add("convert", _convert, "convert an adapter from AdapterHub's format, or to it")
    convert.add_argument("source", help="user/name on the Hub, or a folder")
    convert.add_argument("target", type=Path, help="new folder for the converted adapter")
    convert.add_argument(
        "--to", choices=("houlsby", "adapterhub"), default="houlsby", help="format of the target"
    )
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
    return parser


def _train(options: argparse.Namespace) -> None:
    _launch(options, options.recipe, ["--data", options.data])


def _check(options: argparse.Namespace) -> None:
    # Without an evaluation, no validation split is taken from the examples.
    _launch(
        options, options.recipe, ["--data", options.data, "--check_labels", "only", "--do_train"]
    )


def _evaluate(options: argparse.Namespace) -> None:
    words, recipe = ["--evaluate", options.trained, "--data", options.data], options.recipe
    run = _find_run(Path(options.trained or "").expanduser())
    if run is not None:
        # Beside what the run has written, unless a flag follows.
        words += ["--output_dir", str(run)]
        recipe = recipe or _recipe_of(run)
    _launch(options, recipe, words)


def _find_run(path: Path) -> Path | None:
    """Return the folder of the run that a path names, or whose adapter it names."""
    for folder in (path, path.parent):
        if (folder / "results.json").exists():
            return folder
    return None


def _recipe_of(run: Path) -> str | None:
    """Return the recipe that has trained a run."""
    command = json.loads((run / "results.json").read_text())["command"]
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
    """Return the recipe for data, by the extension of the file."""
    words = (".conll", ".conllu", ".bio", ".iob", ".iob2")
    return "token_classification" if data.endswith(words) else "text_classification"


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
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"Training needs {package}: pip install 'houlsby-peft[recipes]'")
    folder = Path(__file__).parent / "houlsby_peft" / "recipes"
    if not folder.exists():  # in a checkout, they are beside the package
        folder = Path(__file__).parent / "recipes"
    if options.help_all:
        words, options.flags = ["--help"], []
    elif None in words:
        raise ValueError("The data are missing; houlsby-peft train --help shows what to give.")
    if "debug" in options:
        options.flags.append("--debug")
    command = [sys.executable, str(folder / f"{recipe}.py"), *map(str, words), *options.flags]
    os.execv(sys.executable, command)


def _check_device(device: str | None) -> None:
    """Refuse a device that this machine or this PyTorch lacks, for which it has other errors."""
    if device is None:
        return
    import torch

    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"--device must be one that PyTorch has; got {device!r}: {error}"
        ) from error


def _push(options: argparse.Namespace) -> None:
    from houlsby_peft.hub.push import push_to_hub

    card_options = _card_options(options)
    print(push_to_hub(options.folder, options.repo_id, private=options.private, **card_options))


def _card(options: argparse.Namespace) -> None:
    from houlsby_peft.checkpoints.saved import SavedAdapter
    from houlsby_peft.hub.card import write_card
    from houlsby_peft.hub.push import predict_example

    card_options, answer = _card_options(options), None
    if card_options["example"] is not None:
        saved = SavedAdapter.open(options.folder)
        answer = predict_example(saved, card_options["example"], options.base_model)
    print(write_card(options.folder, options.repo_id, answer=answer, **card_options))


def _predict(options: argparse.Namespace) -> None:
    """Check files, columns and texts before the model is loaded, then predict."""
    _check_path(options.adapter)
    _check_path(options.file)
    _check_device(options.device)
    from houlsby_peft.checkpoints.saved import SavedAdapter, adapter_of_run
    from houlsby_peft.serving.adapter_list import find_adapters
    from houlsby_peft.serving.task_bank import TaskBank

    _hide_messages()
    folder = adapter_of_run(Path(options.adapter).expanduser())
    sources: dict[str, Any] = {}
    if not (folder / "adapter_config.json").exists():
        sources.update(find_adapters(folder))
    # A single adapter is a task without a name.
    sources = sources or {"": options.adapter}
    adapters = {}
    for task, source in sources.items():
        adapters[task] = SavedAdapter.open(source, options.revision)
    bank = TaskBank(
        adapters,
        base_model=options.base_model,
        device=options.device,
        other_base=options.other_base,
    )
    if options.file is None:
        _predict_texts(options, bank)
    else:
        _predict_table(options, bank, list(adapters.values()))


def _predict_texts(options: argparse.Namespace, bank: TaskBank) -> None:
    from houlsby_peft.serving.files import json_line

    if options.texts != ["-"]:
        inputs = _read_inputs(list(map(_as_utf8, options.texts)), options.pairs)
    else:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        inputs = [line.rstrip("\n") for line in sys.stdin]
        if options.pairs:
            inputs = [tuple(line.split("\t")) for line in inputs]
    tasks = "" if bank.tasks == ("",) else bank.tasks
    requests = [(tasks, text) for text in inputs]
    for result in bank.predict(requests, options.batch_size, options.top_k):
        print(json_line(result))


def _predict_table(
    options: argparse.Namespace, bank: TaskBank, adapters: Sequence[SavedAdapter]
) -> None:
    from houlsby_peft.errors import shortened
    from houlsby_peft.serving.files import predict_file
    from houlsby_peft.tables import WRITTEN, TableReader, find_format

    if options.output is not None:
        find_format(options.output, WRITTEN)
        if options.output.exists() and not options.overwrite:
            raise ValueError(
                f"{options.output} exists already. Give another --output, or --overwrite to "
                "replace it."
            )
    table = TableReader(options.file, options.encoding, False if options.no_header else None)
    columns = _find_columns(options, table, adapters)
    facts = f"{table.count:,} rows"
    if not table.encoding.startswith("utf"):
        facts += f", encoding {table.encoding}"
    names = shortened(", ".join(columns))
    print(f"{options.file}: {facts}; text: {names}", file=sys.stderr)
    for note in table.notes:
        print(f"note: {shortened(note)}", file=sys.stderr)
    without_text = predict_file(
        bank, table, columns, options.output, batch_size=options.batch_size, top_k=options.top_k
    )
    if without_text:
        print(
            f"{without_text:,} of {table.count:,} rows have no text and thus no prediction.",
            file=sys.stderr,
        )
    if options.output:
        print(f"Predictions: {options.output}", file=sys.stderr)


def _find_columns(
    options: argparse.Namespace, table: TableReader, adapters: Sequence[SavedAdapter]
) -> list[str]:
    """Return the columns of a table that hold the texts, as many as in the training."""
    from houlsby_peft.tables import check_number_of_texts, find_text_columns

    pipelines = {saved.task.pipeline for saved in adapters}
    count: int | None = 1
    if options.pairs or pipelines == {"question-answering"}:
        count = 2
    elif pipelines == {"text-classification"}:
        count = None
    trained_on = []
    for saved in adapters:
        if saved.record.text_columns:
            trained_on.append(saved.record.text_columns)
    # Adapters that were trained on columns of other names read what the first one reads.
    recorded = trained_on[0] if trained_on else None
    columns = find_text_columns(table.columns, options.text_column, count, recorded)
    for columns_of_training in trained_on:
        check_number_of_texts(columns, columns_of_training, "--text-column", "This adapter")
    table.check_texts(columns)
    return columns


def _export(options: argparse.Namespace) -> None:
    from houlsby_peft.export import export_onnx
    from houlsby_peft.serving.load import load

    _hide_messages()
    adapter = load(
        options.adapter,
        revision=options.revision,
        base_model=options.base_model,
        other_base=options.other_base,
    )
    for path, difference in export_onnx(adapter, options.output, int8=options.int8).items():
        size = path.stat().st_size / 1e6
        print(f"{path}  {size:,.1f} MB, differs from PyTorch by at most {difference:.2g}")


def _serve(options: argparse.Namespace) -> None:
    from houlsby_peft.serving.options import ServiceOptions

    base_model = options.base_model
    if base_model and Path(base_model).expanduser().is_dir():
        base_model = str(Path(base_model).expanduser().absolute())
    on_ray = options.ray or options.replicas is not None or options.print_config
    cores = os.cpu_count() or 1
    cpus = options.cpus
    if cpus is None:
        # One is left for HTTP.
        cpus = min(cores, 4) if on_ray else min(max(1, cores - 1), 8)
    replicas = options.replicas
    if replicas is None:
        replicas = max(1, cores // max(1, cpus))
    service_options = ServiceOptions(
        # Not resolved: a link may lead to another folder later.
        adapters=str(Path(options.adapters).expanduser().absolute()),
        base_model=base_model,
        batch_size=options.batch_size,
        cpus=cpus,
        gpus=options.gpus,
        compile=options.compile,
        max_queued=options.max_queued,
        max_rows=options.max_rows,
        max_characters=options.max_characters,
        max_replicas=replicas,
        tokens=options.tokens,
        watch=options.watch,
    )
    if options.print_config:
        from houlsby_peft.serving.ray_engine import deployment_file

        print(deployment_file(service_options, options.host, options.port), end="")
        return
    from houlsby_peft.serving.server import run

    _hide_messages()
    run(
        service_options,
        options.host,
        options.port,
        on_ray=on_ray,
        is_open=options.open,
        log=options.log,
        access_log=options.access_log,
    )


def _convert(options: argparse.Namespace) -> None:
    from houlsby_peft.adapterhub.convert import convert

    folder = convert(
        options.source,
        options.target,
        to=options.to,
        base_model=options.base_model,
        revision=options.revision,
        with_head=options.with_head,
        allow_pickle=options.allow_pickle,
    )
    print(folder)


def _hide_messages() -> None:
    """Hide messages of PEFT and transformers that users of the command cannot act on."""
    import warnings

    import transformers

    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    transformers.utils.logging.disable_progress_bar()


def _card_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that `push_to_hub` and `write_card` share."""
    example: Any = _read_inputs(options.example or [], options.pairs) or None
    if example is not None:
        _hide_messages()
        if len(example) == 1:
            example = example[0]
    return {
        "base_model": options.base_model,
        "results": options.results,
        "example": example,
        "metadata": dict(options.metadata or ()),
    }


def _as_utf8(argument: str) -> str:
    """Return an argument of the command line as UTF-8, whatever the locale."""
    return os.fsencode(argument).decode("utf-8", "replace")


def _read_inputs(texts: Sequence[str], pairs: bool) -> list[Any]:
    if not pairs:
        return list(texts)
    return [tuple(texts[i : i + 2]) for i in range(0, len(texts), 2)]


if __name__ == "__main__":
    main()
