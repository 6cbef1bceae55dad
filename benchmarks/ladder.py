"""Measure ladders: one text with many tasks, in PyTorch or exported, and training steps.

python benchmarks/ladder.py --parts tasks
python benchmarks/ladder.py --parts steps --shape minilm
python benchmarks/ladder.py --exported tickets-onnx
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import PeftModel

from houlsby_peft import StateCache
from methods import FLOOR, METHODS, OURS, houlsby
from mixed import evaluate, with_adapters
from models import SHAPES, build, inputs, saved_bytes
from report import Rows
from steps import training_step
from timing import compared, interleaved, keep_freed_memory


# With the encoder's hidden states from a file, as by the recipes' --cache_states.
CACHED = ", kept states"


def by_tasks_of_a_text(
    shape: str,
    length: int,
    widths: list[int],
    numbers: list[int],
    rounds: int,
    at_most: float,
    beneath: int = 0,
) -> Rows:
    """Measure one text with 1 to many ladders, relative to a pass with one task.

    Args:
        shape: A name of `SHAPES`.
        length: Tokens of the text.
        widths: The ladders' widths, of which each has its own model.
        numbers: Numbers of tasks.
        rounds: Number of rounds.
        at_most: See `interleaved`; for each width.
        beneath: Number of adapters of r=64 beneath the ladders. As in a `TaskBank`, there is a pass
            for each, with its part of the tasks. All are equal, which changes no time.

    Returns:
        A row for each width and number.
    """
    text = torch.randint(0, 30522, (1, length))
    rows: Rows = []
    for width in widths:
        options = {"kind": "ladder", "r": width}
        with TemporaryDirectory() as folder:
            if beneath:
                with_adapters(shape, 1, torch.float32).save_pretrained(folder)
                options["beneath"] = str(Path(folder, "task_0"))
            model = with_adapters(shape, max(numbers), torch.float32, "cpu", **options)
        calls: dict[object, Callable[[], object]] = {}
        calls["base model"] = partial(evaluate, model, text, ["__base__"])
        for number in numbers:
            calls[number] = partial(_run_passes, model, text, number, max(1, beneath))
        _check(model, text, max(numbers))
        for number, row in compared(interleaved(calls, rounds, "cpu", at_most), 1).items():
            facts = {"shape": shape, "tokens": length, "r": width, "beneath": beneath}
            rows.append({**facts, "tasks": number, **row})
    return rows


def by_exported_tasks(folder: Path, length: int, rounds: int) -> Rows:
    """Measure one text with one task and with all tasks of an exported folder, relative to its
    encoder, which may also be quantized.
    """
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    encoders, tasks = {}, []
    for file in sorted(folder.glob("*.onnx")):
        session = InferenceSession(file, options)
        if file.stem.startswith("encoder"):
            encoders[file.stem] = session
        else:
            tasks.append(session)
    ids = torch.randint(0, 30522, (1, length))
    inputs_of_text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs_of_text["token_type_ids"] = torch.zeros_like(ids)
    arrays = {name: value.numpy() for name, value in inputs_of_text.items()}

    def answer(encoder: InferenceSession, number: int) -> None:
        names = [output.name for output in encoder.get_outputs()]
        values = arrays | dict(zip(names, encoder.run(names, arrays), strict=True))
        for task in tasks[:number]:
            task.run(None, values)

    calls = {}
    for name, encoder in encoders.items():
        for number in (0, 1, len(tasks)):
            calls[name, number] = partial(answer, encoder, number)
    rows = []
    times = compared(interleaved(calls, rounds), ("encoder", 0))
    for (name, number), row in times.items():
        rows.append({"tokens": length, "encoder": name, "tasks": number, **row})
    return rows


def _run_passes(model: PeftModel, text: torch.Tensor, number: int, passes: int) -> None:
    """Run the tasks of a text, with a part of them in each pass."""
    names = [f"task_{task}" for task in range(number)]
    for part in range(min(passes, number)):
        evaluate(model, text, [names[part::passes]])


def _check(model: PeftModel, text: torch.Tensor, number: int) -> None:
    """Compare the outputs of all tasks of a text with those of each task alone."""
    names = [f"task_{task}" for task in range(number)]
    alone = [evaluate(model, text, [name]) for name in names]
    torch.testing.assert_close(evaluate(model, text, [names]), torch.cat(alone), rtol=0, atol=1e-5)


def steps(shape: str, rows_of_batch: int, length: int, widths: list[int], rounds: int) -> Rows:
    """Measure training steps, relative to one that trains nothing.

    Returns:
        A row for each method, with the bytes that its step keeps for the backward pass.
    """
    methods = {
        FLOOR: METHODS[FLOOR],
        OURS: METHODS[OURS],
        "Houlsby r=64, upper half": METHODS["Houlsby r=64, upper half"],
        "LoRA r=8, all linear layers": METHODS["LoRA r=8, all linear layers"],
        "full fine-tuning": METHODS["full fine-tuning"],
    }
    for width in widths:
        for name in (f"ladder r={width}", f"ladder r={width}{CACHED}"):
            methods[name] = houlsby(r=width, kind="ladder")
    batch = inputs(rows_of_batch, length)
    models = {name: build(shape, method) for name, method in methods.items()}
    rows: Rows = []
    with TemporaryDirectory() as folder:
        for name, model in models.items():
            if name.endswith(CACHED):
                model.train()
                StateCache(model, Path(folder, name))
        # The first passes of a model, after which the states are kept.
        kept = {name: saved_bytes(model, batch) for name, model in models.items()}
        calls = {name: training_step(model, batch) for name, model in models.items()}
        for name, row in compared(interleaved(calls, rounds, "cpu"), FLOOR).items():
            rows.append({"shape": shape, "method": name, "kept_bytes": kept[name], **row})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=("tasks", "steps"), default=["tasks"])
    parser.add_argument("--exported", type=Path, help="Measure this folder in place of the parts.")
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=32, help="Rows of a training step.")
    parser.add_argument("--widths", type=int, nargs="+", default=[96, 192])
    parser.add_argument("--tasks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--beneath", type=int, default=0, help="Number of adapters beneath.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    shape, length, rounds = arguments.shape, arguments.tokens, arguments.rounds
    rows: Rows = []
    if arguments.exported:
        rows, arguments.parts = by_exported_tasks(arguments.exported, length, rounds), []
    if "tasks" in arguments.parts:
        rows += by_tasks_of_a_text(
            shape, length, arguments.widths, arguments.tasks, rounds, 240, arguments.beneath
        )
    if "steps" in arguments.parts:
        rows += steps(shape, arguments.rows, length, arguments.widths, rounds)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
