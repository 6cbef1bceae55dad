"""The command `houlsby-peft`: thin covers over the functions of the library."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import AdapterError, HubError
from .hub.card import adapter_rows, base_rows, make_card, merge_cards
from .hub.push import CARD_FILE, predict_example, push_to_hub
from .inference.adapter_files import WEIGHTS_FILE, check_weights, read_config
from .inference.load import find_folder, load
from .inference.predictor import Input


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a mistake in what was asked is one line on stderr and the exit status 1."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (AdapterError, HubError, ValueError) as error:
        sys.exit(f"error: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="houlsby-peft", description="Share and use trained Houlsby adapters.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    push = commands.add_parser("push", help="upload a saved adapter with a card to the Hub")
    push.add_argument("folder", type=Path, help="folder of the adapter")
    push.add_argument("repo_id", help="user/name, or name for your own")
    push.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    _add_card_options(push)
    push.set_defaults(run=_push)

    card = commands.add_parser("card", help="write README.md into the folder of a saved adapter, to look at first")
    card.add_argument("folder", type=Path, help="folder of the adapter")
    card.add_argument("repo_id", help="user/name that it will have")
    _add_card_options(card)
    card.set_defaults(run=_card)

    info = commands.add_parser("info", help="say what an adapter is, without loading its base model")
    info.add_argument("adapter", help="user/name on the Hub, or a folder")
    info.add_argument("--revision", help="branch, tag or commit")
    info.set_defaults(run=_info)

    predict = commands.add_parser("predict", help="predict for texts; one JSON object per line")
    predict.add_argument("adapter", help="user/name on the Hub, or a folder")
    predict.add_argument("texts", nargs="+", help="texts, or - for the lines of standard input")
    predict.add_argument("--pairs", action="store_true", help="take two texts, or two columns (tab), as one input")
    predict.add_argument("--revision", help="branch, tag or commit")
    predict.add_argument("--base-model", help="folder or name of the base model, in place of the recorded one")
    predict.set_defaults(run=_predict)
    return parser


def _add_card_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-model", help="the base model's name on the Hub, where the adapter records a folder")
    parser.add_argument("--results", nargs="+", help="results.json of a run, or of a run per seed")
    parser.add_argument("--example", nargs="+", metavar="TEXT", help="texts to show what the adapter gives")
    parser.add_argument("--pairs", action="store_true", help="take two texts of --example as one input")
    parser.add_argument("--license", help="of the adapter, such as apache-2.0")
    parser.add_argument("--language", help="of the texts, such as en")


def _push(options: argparse.Namespace) -> None:
    print(push_to_hub(options.folder, options.repo_id, private=options.private, **_card_options(options)))


def _card(options: argparse.Namespace) -> None:
    chosen = _card_options(options)
    example = chosen["example"]
    answer = None if example is None else predict_example(options.folder, example, options.base_model)
    card = make_card(options.folder, options.repo_id, answer=answer, **chosen)
    path = options.folder / CARD_FILE
    merge_cards(card, [path] if path.is_file() else []).save(path)
    print(path)


def _info(options: argparse.Namespace) -> None:
    folder = find_folder(options.adapter, options.revision)
    config = read_config(folder)
    sizes = check_weights(folder, config)
    rows = adapter_rows(config, sizes, (folder / WEIGHTS_FILE).stat().st_size, total=None)
    base = base_rows(config, config.base_model_name_or_path or "")
    for name, value in [*rows, *((f"base model: {name}", value) for name, value in base)]:
        print(f"{name.replace('`', ''):<34}  {value}")


def _predict(options: argparse.Namespace) -> None:
    adapter = load(options.adapter, revision=options.revision, base_model=options.base_model)
    from_stdin = options.texts == ["-"]
    texts = [line.rstrip("\n") for line in sys.stdin] if from_stdin else options.texts
    if from_stdin and options.pairs:
        texts = [part for line in texts for part in line.split("\t")]
    for result in adapter.predict(_inputs(texts, options.pairs)):
        print(json.dumps(result, default=float, ensure_ascii=False))


def _inputs(texts: list[str], pairs: bool) -> list[Input]:
    if not pairs:
        return list(texts)
    if len(texts) % 2:
        raise ValueError(f"--pairs needs an even number of texts, got {len(texts)}.")
    return list(zip(texts[::2], texts[1::2], strict=True))


def _card_options(options: argparse.Namespace) -> dict[str, Any]:
    example = options.example and _inputs(options.example, options.pairs)
    metadata = {"license": options.license, "language": options.language}
    return {
        "base_model": options.base_model,
        "results": options.results,
        "example": example[0] if example and len(example) == 1 else example,
        "metadata": {name: value for name, value in metadata.items() if value is not None},
    }


if __name__ == "__main__":
    main()
