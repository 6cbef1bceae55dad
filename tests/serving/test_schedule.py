"""The order in which rows of many requests are predicted."""

from __future__ import annotations

import gc

import pytest
from transformers import AutoModelForTokenClassification

from houlsby_peft import TaskBank
from houlsby_peft.predict.questions import Question
from houlsby_peft.service.schedule import Job, Schedule
from hub_models import WORDS, make_adapter, save_adapter


class FailingBank(TaskBank):
    """A bank whose model fails for one text, and that keeps the tasks of its batches."""

    failing = "none"
    batches = ()

    def run(self, rows):
        self.batches = [*self.batches, [row.reader.called for row in rows]]
        texts = [row.reader.tokenizer.decode(row.inputs["input_ids"]) for row in rows]
        if any(self.failing in text for text in texts):
            raise RuntimeError("out of memory")
        super().run(rows)


@pytest.fixture(scope="module")
def bank(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedule")
    tags = {0: "O", 1: "B-PER", 2: "I-PER"}
    save_adapter(folder / "people", base, AutoModelForTokenClassification, {"id2label": tags})
    tasks = {"people": folder / "people"}
    for seed, task in enumerate(("first", "second")):
        tasks[task] = make_adapter(folder / task, base, str(base), seed)
    return FailingBank(tasks)


def make_job(bank, task, *texts):
    questions = [Question(text, task) for text in texts]
    for question in questions:
        bank.accept(question)
    job = Job(questions)
    job.questions = questions
    return job


def spans(entities):
    return [(entity["entity_group"], entity["start"], entity["end"]) for entity in entities]


def test_a_short_text_does_not_wait_for_a_long_one(bank):
    schedule = Schedule(bank, batch_size=4)
    text = " ".join(WORDS * 10)
    long = make_job(bank, "people", text)
    schedule.add(long)
    assert schedule.step() == []
    for task in ("people", "first"):  # also one that the same model reads
        short = make_job(bank, task, WORDS[0])
        schedule.add(short)
        assert short in schedule.step()
    steps = 0
    while not schedule.is_idle:
        schedule.step()
        steps += 1
    assert steps > 2
    assert spans(long.questions[0].result) == spans(bank.predict([("people", text)])[0])


def test_a_short_text_does_not_wait_for_many_long_ones(bank):
    schedule = Schedule(bank, batch_size=4)
    text = " ".join(WORDS * 40)
    long = [make_job(bank, "people", f"{number} {text}") for number in range(30)]
    for job in long:
        schedule.add(job)
    for _ in range(3):
        schedule.step()
        short = make_job(bank, "first", WORDS[0])
        schedule.add(short)
        assert short in [*schedule.step(), *schedule.step()]
    # And a stream of short ones does not keep the long ones waiting forever.
    bank.batches = ()
    for _ in range(4):
        schedule.add(make_job(bank, "first", *WORDS[:8]))
        schedule.step()
    assert sum("people" in tasks for tasks in bank.batches) == 2


def test_texts_of_many_clients_share_batches(bank):
    schedule = Schedule(bank, batch_size=4)
    jobs = [make_job(bank, task, WORDS[0]) for task in ("first", "second") * 4]
    bank.batches = ()
    for job in jobs:
        schedule.add(job)
    finished = [job for _ in range(2) for job in schedule.step()]
    assert [len(tasks) for tasks in bank.batches] == [4, 4]
    assert {*finished} == {*jobs}


def test_a_text_for_which_the_model_fails_spoils_no_other(bank):
    schedule = Schedule(bank, batch_size=8)
    bank.failing = "spotless"  # in WORDS[4]
    jobs = [make_job(bank, "first", text) for text in WORDS[:6]]
    jobs.append(make_job(bank, "nothing", "a"))
    for job in jobs:
        schedule.add(job)
    while not schedule.is_idle:
        schedule.step()
    bank.failing = "none"
    results = [job.questions[0].result for job in jobs]
    failed = [number for number, result in enumerate(results) if isinstance(result, Exception)]
    assert failed == [4, 6]
    assert "out of memory" in str(results[4])


def test_what_cannot_be_answered_keeps_no_removed_task(base, tmp_path):
    """Not until a garbage collection: an error would hold the question, and the question the
    error.
    """
    bank = TaskBank({"task": make_adapter(tmp_path / "task", base, str(base))})
    schedule = Schedule(bank, batch_size=4)
    gc.disable()
    try:
        job = make_job(bank, "task", WORDS[0], "\ud800")
        schedule.add(job)
        while not schedule.is_idle:
            schedule.step()
        result, error = [question.result for question in job.questions]
        assert result["label"]
        assert isinstance(error, ValueError)
        bank.remove("task")
        assert bank.held == ()
    finally:
        gc.enable()


def test_a_client_that_is_gone_is_not_answered(bank):
    schedule = Schedule(bank, batch_size=4)
    job = make_job(bank, "people", " ".join(WORDS * 10))
    schedule.add(job)
    schedule.step()
    job.future.cancel()
    assert schedule.step() == [job]
    assert schedule.is_idle
