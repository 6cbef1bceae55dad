"""Fixtures of the recipes' tests: a tiny encoder, a task for it, and float32 on every machine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo import minimal_pairs
from recipe_runs import save_tiny_encoder
from run import model
from tasks import scores


@pytest.fixture(scope="session", autouse=True)
def plain_runs() -> Iterator[None]:
    """Let --base_dtype auto be float32, as tests compare scores with those of a float32 model.

    What takes most of the time of a short run is left out: samples for the intervals of scores, and
    the search for garbage in what was imported, at the end of each training.
    """
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_choose_dtype", lambda *_: "float32")
        patch.setattr(scores, "_RESAMPLES", 10)
        yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def encoder(tmp_path_factory) -> Path:
    """The folder of a tiny random BERT of four layers, whose vocabulary is that of the generated
    sentences.
    """
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def glue_data(tmp_path_factory) -> Path:
    """A folder with the task cola: 96 and 48 generated sentences, to be told by whether they have
    two clauses.
    """
    folder = tmp_path_factory.mktemp("glue")
    (folder / "cola").mkdir()
    for split, rows in (("train", 48), ("validation", 24)):
        frame = minimal_pairs()[split].to_pandas()
        frame["label"] = frame["phenomenon"].str.contains("across").astype(int)
        frame = frame.groupby("label").sample(rows, random_state=0)
        frame[["sentence", "label"]].to_csv(folder / "cola" / f"{split}.csv", index=False)
    return folder
