"""The command `houlsby-peft`: thin wrappers around functions of the library.

Each command imports what it needs when it runs, so that the help and mistakes in the arguments are shown at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .serving.predictor import Input


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. If it fails, print the error as one line on stderr and exit with status 1."""
    options = _make_parser().parse_args(arguments)
    try:
        options.run(options)
    except (OSError, ValueError) as error:  # HubError and AdapterError are such
        sys.exit(f"error: {error}")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="houlsby-peft", description="Share and use trained Houlsby adapters.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    push = commands.add_parser("push", help="push a saved adapter to the Hub with a generated card")
    push.add_argument("folder", type=Path, help="folder of the adapter")
    push.add_argument("repo_id", help="user/name, or name for the user of the token")
    push.add_argument("--private", action="store_true", default=None, help="create a private repository")
    push.add_argument("--message", help="commit message")
    push.set_defaults(run=_push)

    card = commands.add_parser("card", help="write the card (README.md) into the folder of a saved adapter")
    card.add_argument("folder", type=Path, help="folder of the adapter")
    card.add_argument("repo_id", help="user/name that the adapter will have on the Hub")
    card.set_defaults(run=_card)

    for command in (push, card):
        command.add_argument("--base-model", help="the base model's name on the Hub, if the adapter records a folder")
        command.add_argument("--results", nargs="+", action="extend", help="results.json of a run, or one per seed")
        command.add_argument(
            "--example", nargs="+", action="extend", metavar="TEXT", help="texts for which the card shows predictions"
        )
        command.add_argument("--pairs", action="store_true", help="take the texts of --example in pairs")
        command.add_argument("--license", help="license of the adapter, such as apache-2.0")
        command.add_argument("--language", help="language of the texts, such as en")
        command.add_argument("--metadata", metavar="JSON", help='further metadata, such as \'{"tags": ["reviews"]}\'')

    info = commands.add_parser("info", help="describe an adapter without loading its base model")
    info.set_defaults(run=_info)
    predict = commands.add_parser("predict", help="print predictions for texts, one JSON object per line")
    predict.set_defaults(run=_predict)
    for command in (info, predict):
        command.add_argument("adapter", help="user/name on the Hub, or a folder")
        command.add_argument("--revision", help="branch, tag or commit of the adapter")
    predict.add_argument("texts", nargs="+", help="texts, or - to read one text per line from standard input")
    predict.add_argument("--pairs", action="store_true", help="take the texts, or two tab-separated columns, in pairs")
    predict.add_argument("--base-model", help="name or folder of the base model, instead of the recorded one")

    convert = commands.add_parser("convert", help="convert an adapter from AdapterHub's format, or to it")
    convert.add_argument("source", help="user/name on the Hub, or a folder")
    convert.add_argument("target", type=Path, help="new folder for the converted adapter")
    convert.add_argument("--to", choices=("houlsby", "adapterhub"), default="houlsby", help="format of the target")
    convert.add_argument("--base-model", help="name or folder of the base model, instead of the recorded one")
    convert.add_argument("--revision", help="branch, tag or commit of the source")
    convert.add_argument("--no-head", dest="with_head", action="store_false", help="leave out the prediction head")
    convert.add_argument(
        "--allow-pickle", action="store_true", help="read weights from a pickled file, of whose author you are sure"
    )
    convert.set_defaults(run=_convert)
    return parser


def _convert(options: argparse.Namespace) -> None:
    from .adapterhub.converting import convert

    chosen = {name: value for name, value in vars(options).items() if name not in ("run", "source", "target")}
    print(convert(options.source, options.target, **chosen))


def _push(options: argparse.Namespace) -> None:
    from .hub.push import push_to_hub

    chosen = _card_options(options)
    if options.message is not None:
        chosen["message"] = options.message
    print(push_to_hub(options.folder, options.repo_id, private=options.private, **chosen))


def _card(options: argparse.Namespace) -> None:
    from .hub.card import make_card, merge_cards
    from .hub.push import CARD_FILE, predict_example

    chosen = _card_options(options)
    example = chosen["example"]
    answer = None if example is None else predict_example(options.folder, example, options.base_model)
    card = make_card(options.folder, options.repo_id, answer=answer, **chosen)
    path = options.folder / CARD_FILE
    merge_cards(card, [path] if path.is_file() else []).save(path)
    print(path)


def _info(options: argparse.Namespace) -> None:
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    from .checkpoints.untrusted import check_weights, read_config
    from .hub.card import adapter_rows, base_rows
    from .hub.markdown import one_line
    from .serving.load import find_folder

    folder = find_folder(options.adapter, options.revision)
    config = read_config(folder)
    sizes = check_weights(folder, config)
    rows = adapter_rows(config, sizes, (folder / SAFETENSORS_WEIGHTS_NAME).stat().st_size, total=None)
    base = base_rows(config, config.base_model_name_or_path or "")
    for name, value in [*rows, *((f"base model: {name}", value) for name, value in base)]:
        print(f"{one_line(name):<34}  {one_line(value)}")


def _predict(options: argparse.Namespace) -> None:
    from .serving.load import load

    texts = options.texts
    if texts == ["-"]:
        lines = [line.rstrip("\n") for line in sys.stdin]
        texts = [text for line in lines for text in line.split("\t")] if options.pairs else lines
    inputs = _read_inputs(texts, options.pairs)
    adapter = load(options.adapter, revision=options.revision, base_model=options.base_model)
    for result in adapter.predict(inputs):
        print(json.dumps(result, default=float, ensure_ascii=False))


def _card_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that `push_to_hub` and `make_card` share."""
    example = _read_inputs(options.example or [], options.pairs) or None
    try:
        metadata = json.loads(options.metadata or "{}")
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict):
        raise ValueError(f"--metadata must be a JSON object; got {options.metadata!r}.")
    metadata |= {key: getattr(options, key) for key in ("license", "language") if getattr(options, key) is not None}
    return {
        "base_model": options.base_model,
        "results": options.results,
        "example": example[0] if example and len(example) == 1 else example,
        "metadata": metadata,
    }


def _read_inputs(texts: list[str], pairs: bool) -> list[Input]:
    if not pairs:
        return list(texts)
    if len(texts) % 2:
        raise ValueError(f"--pairs needs an even number of texts, got {len(texts)}.")
    return list(zip(texts[::2], texts[1::2], strict=True))


if __name__ == "__main__":
    main()
