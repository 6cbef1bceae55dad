"""What the commands of `houlsby-peft` do with the library.

`houlsby_peft_cli.py` reads the command line, and calls the function of the command's name.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import torch
import transformers

from .adapterhub.convert import convert as convert_adapter
from .errors import AdapterError, shortened
from .export.check import count_changed
from .export.onnx_files import export_onnx
from .hub.card import write_card
from .hub.push import predict_example, push_to_hub
from .predict.adapter_list import find_adapters
from .predict.files import json_line, predict_file, read_input
from .predict.load import load_saved
from .predict.predictor import Predictor
from .predict.questions import Input
from .predict.task_bank import TaskBank
from .saved.adapter import SavedAdapter, adapter_of_run
from .tables import (
    Table,
    check_number_of_texts,
    check_written,
    find_text_columns,
    read_table,
)


def push(options: argparse.Namespace) -> None:
    """Push a saved adapter with its card, and print the address of the commit."""
    card_options = _card_options(options)
    card_options |= {"beneath": options.beneath, "private": options.private}
    print(push_to_hub(options.folder, options.repo_id, **card_options))


def card(options: argparse.Namespace) -> None:
    """Write the card of a saved adapter, and print its path."""
    card_options, answer = _card_options(options), None
    if card_options["example"] is not None:
        saved = SavedAdapter.open(options.folder)
        answer = predict_example(saved, card_options["example"], options.base_model)
    print(write_card(options.folder, options.repo_id, answer=answer, **card_options))


def predict(options: argparse.Namespace) -> None:
    """Predict for texts or a table. Files and columns are checked before the model is loaded."""
    _check_device(options.device)
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


def _check_device(device: str | None) -> None:
    """Refuse a device that this machine or this PyTorch lacks, for which it has other errors."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"--device must be one that PyTorch has; got {device!r}: {error}"
        ) from error


def _predict_texts(options: argparse.Namespace, bank: TaskBank) -> None:
    if options.texts != ["-"]:
        inputs = _read_inputs(list(map(_as_utf8, options.texts)), options.pairs)
    else:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        inputs = [line.rstrip("\n") for line in sys.stdin]
        if options.pairs:
            inputs = [tuple(line.split("\t")) for line in inputs]
    tasks = "" if bank.tasks == ("",) else bank.tasks
    # As in a file, what has no text has no prediction.
    has_text = [bool("".join(text).strip()) for text in inputs]
    requests = [(tasks, text) for text in compress(inputs, has_text)]
    results = iter(bank.predict(requests, options.batch_size, options.top_k))
    for is_predicted in has_text:
        print(json_line(next(results) if is_predicted else None))


def _predict_table(
    options: argparse.Namespace, bank: TaskBank, adapters: Sequence[SavedAdapter]
) -> None:
    if options.output is not None:
        check_written(options.output)
        if options.output.exists() and not options.overwrite:
            raise ValueError(
                f"{options.output} exists already. Give another --output, or --overwrite to "
                "replace it."
            )
    table, columns = _read_texts(options, adapters)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
    without_text = predict_file(
        bank, table, columns, options.output, batch_size=options.batch_size, top_k=options.top_k
    )
    if without_text:
        print(
            f"{without_text:,} of {len(table.rows):,} rows have no text and thus no prediction.",
            file=sys.stderr,
        )
    if options.output:
        print(f"Predictions: {options.output}", file=sys.stderr)


def _read_texts(
    options: argparse.Namespace, adapters: Sequence[SavedAdapter]
) -> tuple[Table, list[str]]:
    """Return the table of a command, and its columns of texts; print what was read."""
    has_header = False if options.no_header else None  # None: detected
    table = read_table(options.file, options.encoding, has_header)
    columns = _find_columns(options, table, adapters)
    facts = f"{len(table.rows):,} rows"
    if not table.encoding.startswith("utf"):
        facts += f", encoding {table.encoding}"
    names = shortened(", ".join(columns))
    print(f"{options.file}: {facts}; text: {names}", file=sys.stderr)
    for note in table.notes:
        print(f"note: {shortened(note)}", file=sys.stderr)
    return table, columns


def _find_columns(
    options: argparse.Namespace, table: Table, adapters: Sequence[SavedAdapter]
) -> list[str]:
    """Return the columns of a table that hold the texts, as many as in the training."""
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
    try:
        columns = find_text_columns(table.columns, options.text_column, count, recorded)
    except AdapterError:
        if not options.text_column:
            table.check_is_flat()
        raise
    for columns_of_training in trained_on:
        check_number_of_texts(columns, columns_of_training, "--text_columns", "This adapter")
    table.check_texts(columns)
    return columns


def export(options: argparse.Namespace) -> None:
    """Write ONNX files, and print their sizes, how far they are from PyTorch and, with a table, how
    many answers change in 8-bit integers.
    """
    _hide_messages()
    adapters: dict[str, SavedAdapter] = {}
    for name in options.adapters:
        path = Path(name).expanduser()
        for task, source in (find_adapters(path) or {path.name: name}).items():
            if task in adapters:
                raise ValueError(f"Two adapters are called {task!r}. Rename the folder of one.")
            adapters[task] = SavedAdapter.open(source, options.revision)
    texts: list[Input] = []
    if options.file is not None:
        table, columns = _read_texts(options, [*adapters.values()])
        for row in table.rows:
            text = read_input(row, columns)
            parts = [text] if isinstance(text, str) else text
            if all(map(str.strip, parts)):
                texts.append(text)
    bases: Any = {"base_model": options.base_model, "other_base": options.other_base}
    exported: TaskBank | Predictor
    if len(adapters) == 1:
        [saved] = adapters.values()
        exported = load_saved(saved, **bases)
    else:
        exported = TaskBank(adapters, **bases)
    int8 = options.int8 or options.file is not None
    for path, difference in export_onnx(exported, options.output, int8=int8).items():
        size = path.stat().st_size / 1e6
        print(f"{path}  {size:,.1f} MB, differs from PyTorch by at most {difference:.2g}")
    if options.file is not None:
        for task, changed in count_changed(exported, options.output, texts).items():
            name = f"{task}: " if task else ""
            print(f"{name}{changed:,} of {len(texts):,} answers change in 8-bit integers")


def serve(options: argparse.Namespace) -> None:
    """Serve adapters until a signal ends it, or print the file that lets a Ray cluster do so."""
    if options.print_config:
        from .service.ray_engine import deployment_file

        print(deployment_file(options.service), end="")
        return
    from .service.server import run

    _hide_messages()
    run(options.service)


def convert(options: argparse.Namespace) -> None:
    """Convert an adapter, and print its new folder."""
    folder = convert_adapter(
        options.source,
        options.target,
        base_model=options.base_model,
        revision=options.revision,
        with_head=options.with_head,
        allow_pickle=options.allow_pickle,
    )
    print(folder)


def _hide_messages() -> None:
    """Hide messages of PEFT and transformers that users of the command cannot act on."""
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
