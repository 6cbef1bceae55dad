"""`Schedule`: which rows of which requests a bank predicts next, so that none waits for another's
long text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import islice

from ..predict.forward import Batcher
from ..predict.questions import Question, Row
from ..predict.task_bank import TaskBank


# The seconds that a batch should take, as a short text may have to wait for one.
_SECONDS = 0.2
# Tokens of a batch before any has been timed.
_FIRST_TOKENS = 1024
# Batches of questions that are encoded and not yet predicted. Their adapters are all in memory.
_MOST_BATCHES = 4
# Characters that are encoded between two batches, unless a single text has more.
_MOST_CHARACTERS = 20_000
_CHARACTERS_OF_A_TOKEN = 4


class Job:
    """The questions of a request. `future` is done when all of them have a result."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self.future: Future[None] = Future()
        self.waiting = deque(question for question in questions if question.result is None)
        self.encoded: deque[Question] = deque()
        # Those of encoded questions that have not run.
        self.rows: deque[Row] = deque()
        # About the number of tokens that have not run.
        self.tokens_left = 0
        for question in self.waiting:
            self.tokens_left += question.characters // _CHARACTERS_OF_A_TOKEN

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.future.cancelled() or not (self.waiting or self.encoded)


class Schedule:
    """Chooses the rows of each batch, so that short texts wait for long ones no longer than for a
    batch or two.

    A batch has at most `batch_size` rows, and about as many tokens as the model reads in a fifth of
    a second. A text in many windows thus needs many batches. Every other batch begins with the job
    that has the fewest tokens left, the others with the job that has waited longest since its last
    row. One thread at a time may use it.

    Attributes:
        batches, batch_rows: Batches that have run, and their rows.
    """

    def __init__(self, bank: TaskBank, batch_size: int) -> None:
        self._bank = bank
        self._batch_size = batch_size
        self._jobs: deque[Job] = deque()
        self._most_tokens: float = _FIRST_TOKENS
        # The jobs of the last batch.
        self._served: list[Job] = []
        self._is_turn_of_oldest = False
        self.batches = 0
        self.batch_rows = 0

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._jobs

    def add(self, job: Job) -> None:
        """Put a job behind the others."""
        self._jobs.append(job)

    def step(self) -> list[Job]:
        """Predict one batch; return the jobs that are finished."""
        # Behind those that have arrived meanwhile.
        for job in self._served:
            if job in self._jobs:
                self._jobs.remove(job)
                self._jobs.append(job)
        jobs = self._order_jobs()
        self._encode(jobs)
        rows = self._choose_rows(jobs)
        if rows:
            self._run(rows)
        return self._take_finished()

    def drop_all(self) -> list[Job]:
        """Take out all jobs, none of which is finished."""
        dropped = list(self._jobs)
        self._jobs.clear()
        return dropped

    def _order_jobs(self) -> list[Job]:
        """Return the jobs in the order in which they may give rows, without those whose client is
        gone.
        """
        jobs = [job for job in self._jobs if not job.is_finished]
        is_turn_of_oldest = self._is_turn_of_oldest
        # A job that is alone has its turn in any case.
        self._is_turn_of_oldest = not is_turn_of_oldest and len(jobs) > 1
        if not is_turn_of_oldest:
            jobs.sort(key=lambda job: job.tokens_left)
        return jobs

    def _encode(self, jobs: Iterable[Job]) -> None:
        """Encode questions of jobs that have no rows left: one, and others if there is room."""
        chosen: list[tuple[Job, Question]] = []
        characters = 0
        room = _MOST_BATCHES * self._batch_size
        for job in self._jobs:
            room -= len(job.encoded)
        for job in jobs:
            if job.rows:
                continue
            for question in islice(job.waiting, self._batch_size):
                characters += question.characters
                if chosen and (characters > _MOST_CHARACTERS or len(chosen) >= room):
                    break
                chosen.append((job, question))
        if not chosen:
            return
        self._bank.encode([question for _, question in chosen])
        for job, question in chosen:
            job.waiting.popleft()
            job.encoded.append(question)
            job.rows.extend(question.rows)
            job.tokens_left -= question.characters // _CHARACTERS_OF_A_TOKEN
            job.tokens_left += sum(row.tokens for row in question.rows)

    def _choose_rows(self, jobs: Sequence[Job]) -> list[Row]:
        """Take the rows of the next batch."""
        waiting: list[Row] = []
        for job in jobs:
            waiting += islice(job.rows, self._batch_size)
        rows = Batcher(waiting, self._batch_size, self._most_tokens).take()
        chosen = set(map(id, rows))
        self._served = []
        for job in jobs:
            left = deque(row for row in job.rows if id(row) not in chosen)
            if len(left) < len(job.rows):
                self._served.append(job)
                job.tokens_left -= sum(row.tokens for row in job.rows if id(row) in chosen)
                job.rows = left
        return rows

    def _run(self, rows: Sequence[Row]) -> None:
        start = time.perf_counter()
        try:
            self._bank.run(rows)
        except Exception as error:
            if len(rows) == 1:
                self._fail(rows[0], error)
                return
            # The model fails for one of them, which is then alone.
            for row in rows:
                if not row.outputs:
                    self._run([row])
            return
        self.batches += 1
        self.batch_rows += len(rows)
        tokens = len(rows) * max(row.tokens for row in rows)
        # The time of a small batch does not tell how fast the model reads.
        if tokens >= self._most_tokens / 2:
            most_tokens = _SECONDS * tokens / (time.perf_counter() - start)
            # Less at once, more by and by.
            self._most_tokens = min(most_tokens, (self._most_tokens + most_tokens) / 2)

    def _fail(self, row: Row, error: Exception) -> None:
        """Let the question of a row have an error as its result."""
        for job in self._jobs:
            for question in job.encoded:
                if row in question.rows:
                    job.rows = deque(item for item in job.rows if item not in question.rows)
                    question.close(error)

    def _take_finished(self) -> list[Job]:
        """Decode the questions all of whose rows have run; take out the jobs without others."""
        for job in self._jobs:
            while job.encoded and all(row.outputs for row in job.encoded[0].rows):
                self._bank.decode(job.encoded.popleft())
        finished = [job for job in self._jobs if job.is_finished]
        for job in finished:
            self._jobs.remove(job)
        return finished
