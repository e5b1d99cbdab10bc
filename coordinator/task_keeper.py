"""Keeps a task worker alive, and finds the item that kills it.

A worker is somebody's own code in a child process. When it dies or hangs it is started again and
the same question is asked once more, item by item, so that one poisonous item costs its own
episode and not the run.

A task whose code fails on *every* item is another matter: nothing would ever be trained on, and
the run would look alive for ever. After so many failures, over so long a time, without a single
good answer in between the keeper gives up and says what the task's code said. (Long, because
answers come from strangers: one of them may find out what makes the code fail, but cannot keep the
good answers of the others away.)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import trio

from coordinator.task_port import Done, Failed, Next, Opening, TaskInfo, TaskSetup, TaskWorker, Turn
from echo2p2p.errors import ChildError
from echo2p2p.net.ports import Journal

TASK_WORKER_LOST: Final = "task_worker.lost"
BACK_OFF_S: Final = (0.1, 0.5, 2.0, 5.0)
FAILURES_MAX: Final = 64
PATIENCE_S: Final = 120.0
"""Both must be passed, without a good answer in between, before a task is given up."""
LOSS_WEIGHT: Final = 8
"""An item that kills its worker counts as so many that only fail."""

Episode = tuple[int, Sequence[Turn]]
Answer = Next | Done | Failed
QuestionT = TypeVar("QuestionT")
AnswerT = TypeVar("AnswerT")


class TaskKeeper:
    """One worker slot; calls queue up and are made one at a time."""

    def __init__(
        self, *, make_worker: Callable[[], TaskWorker], setup: TaskSetup, journal: Journal
    ) -> None:
        self._make_worker = make_worker
        self._setup = setup
        self._journal = journal
        self._busy = trio.Lock()
        self._worker: TaskWorker | None = None
        self._starts_failed = 0
        self._opening = _Patience("no prompt for any item")
        self._scoring = _Patience("no reward for any answer")

    async def start(self) -> TaskInfo:
        """Bring the first worker up.

        Raises:
            ConfigError: No such task or option, or no usable tokenizer.
            ChildError: It did not come up.
        """
        self._worker = self._make_worker()
        return await self._worker.start(self._setup)

    async def close(self) -> None:
        """End the worker. Idempotent."""
        if self._worker is not None:
            await self._worker.close()

    async def open(self, seeds: Sequence[int]) -> list[Opening | Failed]:
        """Return the first prompt of each item.

        Raises:
            ChildError: No worker comes up any more, or the task is good for nothing.
            ConfigError: As `start`, when a worker is started again.
        """

        async def ask(worker: TaskWorker, some: Sequence[int]) -> list[Opening | Failed]:
            return await worker.open(some)

        return await self._ask(seeds, ask, Failed, self._opening)

    async def score(self, episodes: Sequence[Episode]) -> list[Answer]:
        """Step each episode; whatever kills the worker has failed.

        Raises:
            ChildError: No worker comes up any more, or the task is good for nothing.
            ConfigError: As `start`, when a worker is started again.
        """

        async def ask(worker: TaskWorker, some: Sequence[Episode]) -> list[Answer]:
            return await worker.score(some)

        return await self._ask(episodes, ask, Failed, self._scoring)

    async def _ask(
        self,
        questions: Sequence[QuestionT],
        ask: Callable[[TaskWorker, Sequence[QuestionT]], Awaitable[list[AnswerT]]],
        failed: Callable[[str], AnswerT],
        patience: _Patience,
    ) -> list[AnswerT]:
        """Ask all at once and, if that kills the worker, one by one."""
        async with self._busy:
            worker = await self._alive()
            try:
                answers = await ask(worker, questions)
            except ChildError as error:
                await self._lost(error)
            else:
                for answer in answers:
                    patience.see(answer, 1)
                return answers
            answers = []
            for question in questions:
                worker = await self._alive()
                try:
                    (answer,) = await ask(worker, [question])
                    patience.see(answer, 1)
                except ChildError as error:
                    await self._lost(error)
                    answer = failed(str(error))
                    patience.see(answer, LOSS_WEIGHT)
                answers.append(answer)
            return answers

    async def _alive(self) -> TaskWorker:
        """Return a worker that is up, starting one if need be."""
        while self._worker is None:
            worker = self._make_worker()
            try:
                await worker.start(self._setup)
                self._worker, self._starts_failed = worker, 0
            except ChildError:
                self._starts_failed += 1
                if self._starts_failed > len(BACK_OFF_S):
                    raise
            finally:
                if self._worker is None:
                    with trio.CancelScope(shield=True):
                        await worker.close()
            if self._worker is None:
                await trio.sleep(BACK_OFF_S[self._starts_failed - 1])
        return self._worker

    async def _lost(self, error: ChildError) -> None:
        self._journal.event(TASK_WORKER_LOST, detail=str(error))
        if self._worker is not None:
            await self._worker.close()
            self._worker = None


class _Patience:
    """Failures of one kind of question since the last good answer."""

    def __init__(self, complaint: str) -> None:
        self._complaint = complaint
        self._failures = 0
        self._since_s = 0.0

    def see(self, answer: object, weight: int) -> None:
        """Count one answer.

        Raises:
            ChildError: There has been no good one for too long.
        """
        if not isinstance(answer, Failed):
            self._failures = 0
            return
        now = trio.current_time()
        if self._failures == 0:
            self._since_s = now
        self._failures += weight
        waited_s = now - self._since_s
        if self._failures >= FAILURES_MAX and waited_s >= PATIENCE_S:
            raise ChildError(
                "task worker",
                f"its task's code has given {self._complaint} in {waited_s:.0f} s; "
                f"at last: {answer.detail}",
            )
