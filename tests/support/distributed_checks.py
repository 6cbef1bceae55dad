"""What must hold of a run under any strategy, compared with the same run in one process."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from distributed_runs import ROWS, STEPS, Run, Strategy


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import houlsby_peft  # noqa: F401  (makes the method known to PEFT)
from memory import Sizes, strategies


TOLERANCE = 1e-4
# Tiny BERT: the bottlenecks of four layers, each with two places, by the flag --share_layers.
BOTTLENECKS = {0: 8, 1: 4, 3: 2}


def two_processes(run: Run, one: Run, strategy: Strategy, inputs: Path) -> None:
    """Launches that silently run one process, or several that do not know of each other, would pass
    other checks.
    """
    assert len(run.records) == 2
    for record in run.records:
        assert record["processes"] == 2
        assert record["type"] == strategy.distributed_type
        assert record["wrapper"].startswith(strategy.wrapper)
    assert one.records[0]["processes"] == len(one.records) == 1


def losses(run: Run, one: Run, strategy: Strategy, inputs: Path) -> None:
    assert one.records[0]["steps"] == list(range(1, STEPS + 1))
    for record in run.records:
        assert record["steps"] == one.records[0]["steps"]
        assert record["losses"] == pytest.approx(one.records[0]["losses"], abs=TOLERANCE)


def gradients(run: Run, one: Run, strategy: Strategy, inputs: Path) -> None:
    """Adam hides a gradient that is multiplied by a number; its norm does not."""
    expected = pytest.approx(one.records[0]["gradient_norms"], rel=TOLERANCE)
    for record in run.records:
        assert record["gradient_norms"] == expected


def saved_adapter(run: Run, one: Run, strategy: Strategy, inputs: Path) -> None:
    """Shared bottlenecks once and whole, norms and head, all as one process has trained them."""
    bottlenecks = [key for key in run.adapter if ".houlsby_adapter." in key]
    norms = [key for key in run.adapter if ".houlsby_norm." in key]
    assert len(bottlenecks) == 4 * BOTTLENECKS[run.results["arguments"]["share_layers"]]
    assert len(norms) == 2 * 2 * 4
    assert len(run.adapter) == len(bottlenecks) + len(norms) + 2
    for key in norms:
        initial = torch.full_like(run.adapter[key], float("weight" in key))
        assert not torch.equal(run.adapter[key], initial), key
    torch.testing.assert_close(run.adapter, one.adapter, atol=TOLERANCE, rtol=0)


def plain_process(run: Run, one: Run, strategy: Strategy, inputs: Path) -> None:
    """The saved adapter, loaded without any launcher, predicts what the run has; no row is lost or
    scored twice.
    """
    base = AutoModelForSequenceClassification.from_pretrained(inputs / "model", num_labels=3)
    model = PeftModel.from_pretrained(base, run.output / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(run.output / "adapter")
    epochs = {entry["epoch"]: entry for entry in run.results["epochs"]}
    best = epochs[run.results["best_epoch"]]
    for split in ("matched", "mismatched"):
        lines = (inputs / "data" / "mnli" / f"validation_{split}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == ROWS[f"validation_{split}"]
        texts = [[row[column] for row in rows] for column in ("premise", "hypothesis")]
        with torch.no_grad():
            logits = model(**tokenizer(*texts, padding=True, return_tensors="pt")).logits.numpy()
        if split == "matched":
            np.testing.assert_allclose(run.predictions, logits, atol=TOLERANCE)
        labels = torch.tensor([row["label"] for row in rows])
        right = logits.argmax(-1) == labels.numpy()
        assert best[f"{split}_accuracy"] == pytest.approx(right.mean(), abs=1e-12)
        loss = torch.nn.functional.cross_entropy(torch.tensor(logits), labels)
        assert best[f"{split}_loss"] == pytest.approx(loss.item(), abs=TOLERANCE)


def one_writer(run: Run, one: Run, strategy: Strategy, inputs: Path) -> None:
    """Process 1, whose files the group may write, has written its parts of checkpoints only."""
    files = [path for path in run.output.rglob("*") if path.is_file()]
    assert any(path.name == "results.json" for path in files)
    by_process_1 = [path for path in files if path.stat().st_mode & stat.S_IWGRP]
    assert by_process_1, "not even the state of its random numbers"
    for path in by_process_1:
        assert "checkpoint-" in str(path), path
        assert path.name == "rng_state_1.pth" or "rank_1" in path.name, path


def results_json(run: Run, one: Run, strategy: Strategy, inputs: Path) -> None:
    strategy_of_run = {"type": strategy.kind, "processes": 2, "mixed_precision": "no"}
    assert run.results["strategy"] == strategy_of_run
    assert one.results["strategy"] == {"type": "none", "processes": 1, "mixed_precision": "no"}
    assert run.results["trainable_parameters"] == one.results["trainable_parameters"]
    assert run.results["total_parameters"] == one.results["total_parameters"]


def ungathered_save(run: Run, one: Run, strategy: Strategy, inputs: Path) -> None:
    for record in run.records:
        error = record["ungathered"]
        assert ("must be gathered" in error) if strategy.splits_weights else error is None


def exchange(run: Run, one: Run, strategy: Strategy, inputs: Path) -> None:
    """DDP sends the gradients of the trained parameters, once per step, and does not search for
    unused ones.
    """
    for record in run.records:
        if strategy.kind == "DDP":
            assert record["exchanged_per_step"] == 4 * run.results["trainable_parameters"]
            assert record["find_unused_parameters"] is False


def memory(run: Run, one: Run, strategy: Strategy, inputs: Path) -> None:
    """What the processes hold on average is what benchmarks/memory.py computes; ZeRO fills up to
    equal parts.
    """
    totals = (one.results["total_parameters"], one.results["trainable_parameters"])
    computed = strategies(Sizes(*totals, largest_unit=0), 2)[strategy.kind]
    held = {}
    for name in ("weights", "moments", "masters"):
        held[name] = sum(record[name] for record in run.records) / 2
    assert held["weights"] == pytest.approx(computed["weights"], rel=1e-3)
    assert held["moments"] + held["masters"] == pytest.approx(computed["optimizer"], rel=1e-3)


def end_printed_once(run: Run, one: Run, strategy: Strategy, inputs: Path) -> None:
    """The scores by class are of all processes' examples."""
    if not (run.folder / "log.txt").exists():  # of two launchers, each with its own output
        return
    once = ("By class, on the validation (mismatched) split", " epoch: ")
    for of_run in (run, one):
        log = (of_run.folder / "log.txt").read_text()
        for words in (*once, "Adapter: ", "Predict: ", "Share: "):
            assert log.count(words) == 1, words
        scores = of_run.results["per_class"]["scores"]
        assert scores.keys() == one.results["per_class"]["scores"].keys()
        supports = [of_class["support"] for of_class in scores.values()]
        assert sum(supports) == ROWS["validation_mismatched"]


CHECKS = (
    end_printed_once,
    two_processes,
    losses,
    gradients,
    saved_adapter,
    plain_process,
    one_writer,
    results_json,
    ungathered_save,
    exchange,
    memory,
)
