"""Compare the time that two versions of the library take to load an adapter of 10 MB on BERT-base, or for a step.

    python benchmarks/versions.py ../before . --rounds 20
    python benchmarks/versions.py ../before . --rounds 50 --calls train eval

A step is one of training or evaluation, on 8 texts of 32 tokens, with a plain adapter on a BERT of MiniLM's shape.

Each version runs in a process of its own, with random weights. The two processes take turns, so that a change in the
machine's speed affects both. Times are processor times on one thread.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from timing import compared


LOADS = ("beside", "alone")
CALLS = (*LOADS, "train", "eval")
_ANSWER = "seconds: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="checkout of the version to compare with")
    parser.add_argument("after", type=Path, help="checkout of the other version")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=LOADS)
    args = parser.parse_args()
    workers = {
        name: start(folder.resolve(), args.calls) for name, folder in vars(args).items() if isinstance(folder, Path)
    }
    for call in args.calls:
        times: dict[str, list[float]] = {name: [] for name in workers}
        for round_ in range(args.rounds):
            for name in list(workers)[:: 1 if round_ % 2 else -1]:
                times[name].append(ask(workers[name], call))
        found = compared(times, "before")
        print(
            f"{call}: before {found['before']['median_s']:.3f} s, after {found['after']['median_s']:.3f} s; "
            f"ratio of the minima {found['after']['ratio_of_minima']:.3f}, "
            f"median of the ratios {found['after']['median_ratio']:.3f}"
        )


def start(checkout: Path, calls: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker", *calls]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    for call in calls:  # which warms the caches up
        ask(worker, call)
    return worker


def ask(worker: subprocess.Popen[str], call: str) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(call, file=worker.stdin, flush=True)
    # Other libraries may print warnings.
    answer = next(line for line in worker.stdout if line.startswith(_ANSWER))
    return float(answer.removeprefix(_ANSWER))


def work() -> None:
    """Run each call that is read, and print its time."""
    import transformers
    from peft import get_peft_model
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    import houlsby_peft
    from models import SHAPES, inputs
    from steps import PHASES

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        calls: dict[str, Callable[[], object]] = {}
        if set(LOADS) & set(sys.argv):
            base, adapter = Path(folder, "base"), Path(folder, "adapter")
            BertForSequenceClassification(BertConfig()).save_pretrained(base)
            BertTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}).save_pretrained(base)
            model = BertForSequenceClassification.from_pretrained(base)
            get_peft_model(model, houlsby_peft.HoulsbyConfig(r=64, task_type="SEQ_CLS")).save_pretrained(adapter)
            first = houlsby_peft.load(adapter)

            def beside() -> None:
                second = houlsby_peft.load(adapter, beside=first)
                second.model.delete_adapter(second.name)

            calls |= {"beside": beside, "alone": lambda: houlsby_peft.load(adapter)}
        for phase in set(PHASES) & set(sys.argv):
            small = BertForSequenceClassification(BertConfig(**SHAPES["minilm"]))
            calls[phase] = PHASES[phase](get_peft_model(small, houlsby_peft.HoulsbyConfig(r=64)), inputs(8, 32))
        for line in sys.stdin:
            begin = time.process_time()
            calls[line.strip()]()
            print(f"{_ANSWER}{time.process_time() - begin}", flush=True)


if __name__ == "__main__":
    work() if "--worker" in sys.argv else main()
