"""Settings of the process that several threads change for a moment, and find again as they were."""

from __future__ import annotations

import logging
import os
import threading
import warnings

import pytest
import transformers

from houlsby_peft.serving.process_state import set_environment, set_verbosity


NAME = "HOULSBY_PEFT_TEST"


@pytest.mark.parametrize(
    "change",
    [lambda: set_verbosity(logging.CRITICAL), lambda: set_environment(NAME, "x")],
    ids=["verbosity", "environment"],
)
def test_a_thread_waits_for_another_to_put_things_back(change):
    entered = threading.Event()

    def enter():
        with change():
            entered.set()

    thread = threading.Thread(target=enter)
    with change():
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    thread.join()


@pytest.mark.parametrize("before", [None, "mine"])
def test_threads_that_overlap_leave_all_as_it_was(before, monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    level, filters = transformers.logging.get_verbosity(), list(warnings.filters)
    seen, start = [], threading.Barrier(4)

    def change(number):
        start.wait()
        for _ in range(50):
            with set_verbosity(logging.CRITICAL + number), set_environment(NAME, str(number)):
                seen.append((transformers.logging.get_verbosity() - logging.CRITICAL, int(os.environ[NAME]), number))
                with pytest.raises(UserWarning, match=f"of {number}"):
                    warnings.warn(f"of {number}", stacklevel=1)

    threads = [threading.Thread(target=change, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 200
    assert all(len(set(found)) == 1 for found in seen)
    assert transformers.logging.get_verbosity() == level
    assert os.environ.get(NAME) == before
    assert warnings.filters == filters
