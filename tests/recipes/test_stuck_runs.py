"""The study of stuck runs: each run is glue.py's, its stages change nothing, and its records have
the right values.
"""

from __future__ import annotations

import json

import pandas as pd
import pytest

import figure
import glue
import stuck_runs
from recipe_runs import results_of, run


@pytest.fixture(scope="module")
def flags(encoder, glue_data):
    names = {"task": "cola", "model_name": encoder, "data_dir": glue_data}
    values = {"num_train_epochs": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-2}
    named = [word for name, value in (names | values).items() for word in (f"--{name}", value)]
    return [*named, "--r", 4, "--use_cpu", "--logging_steps", 1]


def study(folder, cells, flags):
    """Run the study's cells; return the table and a run's lines by its name."""
    folder.mkdir(exist_ok=True)
    (folder / "cells.txt").write_text("\n".join(cells))
    output = ["--output_dir", folder / "runs"]
    run(stuck_runs, folder / "cells.txt", folder / "table.csv", *flags, *output)
    table = pd.read_csv(folder / "table.csv")
    return table, {path.stem: pd.read_csv(path) for path in (folder / "table").glob("*.csv")}


def test_a_run_in_stages_is_that_of_glue(tmp_path, flags):
    run(glue, *flags, "--seed", 3, "--output_dir", tmp_path / "glue")
    study(tmp_path / "study", ["reference 3 30"], flags)
    table, lines = study(tmp_path / "study", ["reference 3 30", "reference 3  # whole"], flags)
    last = results_of(tmp_path / "glue")["epochs"][-1]
    assert [*table["steps"]] == [30, 36]
    for name, score in (("accuracy", "accuracy"), ("score", "matthews_correlation")):
        assert table[name].iloc[-1] == round(last[score], 4)
    assert table["loss"].iloc[-1] == round(last["loss"], 4)
    assert [*lines["reference-3"]["step"]] == [*range(1, 37)]


def test_the_records_have_the_right_values(tmp_path, flags):
    _, lines = study(tmp_path, ["reference 0 20", "slow_norms 0 20"], flags)
    [state] = (tmp_path / "runs" / "reference-0").glob("checkpoint-20/trainer_state.json")
    logged = json.loads(state.read_text())["log_history"]
    total = lines["reference-0"].filter(like="gradient_").pow(2).sum(axis=1).pow(0.5)
    norms = [entry["grad_norm"] for entry in logged if "grad_norm" in entry]
    assert [*total] == pytest.approx(norms, rel=0.01)
    # The first step has the rate 0, so both runs have the same gradients in the second one.
    moved = {name: of_run["moved_norm"][2] for name, of_run in lines.items()}
    assert moved["slow_norms-0"] == pytest.approx(0.1 * moved["reference-0"], rel=0.01)
    assert (lines["reference-0"].filter(like="spread_") > 0).all(axis=None)
    # Both projections are drawn with 1e-2, so the first adapters add little.
    assert lines["reference-0"].filter(like="added_").iloc[0].between(0, 0.1).all()


def test_the_figure_shows_means_over_the_last_steps(tmp_path):
    for seed, factor in ((0, 1), (1, 3)):
        spreads = [factor * step for step in range(1, 11)]
        columns = {"step": range(1, 11), "spread_1": 0.0, "spread_2": spreads}
        columns |= {"added_1": [2 * spread for spread in spreads], "added_2": 1.0}
        pd.DataFrame(columns).to_csv(tmp_path / f"slow_up-{seed}.csv", index=False)
    run(figure, "first_steps", tmp_path)
    lines = (tmp_path / "first_steps.jsonl").read_text().splitlines()
    points = list(map(json.loads, lines))
    # After step 5, the last five have the means 3 and 9, and after step 10, 8 and 24.
    expected = {("spread", 5): 6, ("spread", 10): 16, ("added", 5): 12, ("added", 10): 32}
    drawn = {(point["panel"], point["step"]): point["middle"] for point in points}
    assert drawn == pytest.approx(expected)
    assert (tmp_path / "first_steps.png").stat().st_size > 10_000


def test_a_stuck_reference_names_the_seeds(tmp_path):
    table = stuck_runs.Table(tmp_path / "table.csv")
    empty = dict.fromkeys(stuck_runs.COLUMNS, 0)
    for setting, seed, steps, is_stuck in (
        ("reference", 5, 120, True),
        ("reference", 2, 120, True),
        ("reference", 5, 200, False),
        ("identity", 7, 120, True),
    ):
        table.add(empty | {"setting": setting, "seed": seed, "steps": steps, "stuck": is_stuck})
    (tmp_path / "cells.txt").write_text("identity stuck 120\nreference 1\n")
    cells = stuck_runs.read_cells(tmp_path / "cells.txt", table)
    assert cells == [stuck_runs.Cell("identity", 2, 120), stuck_runs.Cell("reference", 1)]
