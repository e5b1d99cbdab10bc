"""Keeps a task worker alive, and finds the item that kills it.

A worker is somebody's own code in a child process. When it dies or hangs it is started again and
the same question is asked once more, item by item, so that one poisonous item costs its own
episode and not the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import trio

from coordinator.task_port import Done, Failed, Next, Opening, TaskInfo, TaskSetup, TaskWorker, Turn
from echo2p2p.errors import ChildError
from echo2p2p.net.ports import Journal

TASK_WORKER_LOST: Final = "task_worker.lost"
BACK_OFF_S: Final = (0.1, 0.5, 2.0, 5.0)

Episode = tuple[int, Sequence[Turn]]
Answer = Next | Done | Failed


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
            ChildError: No worker comes up any more.
        """
        async with self._busy:
            worker = await self._alive()
            try:
                return await worker.open(seeds)
            except ChildError as error:
                await self._lost(error)
            answers: list[Opening | Failed] = []
            for seed in seeds:
                worker = await self._alive()
                try:
                    answers.extend(await worker.open([seed]))
                except ChildError as error:
                    await self._lost(error)
                    answers.append(Failed(str(error)))
            return answers

    async def score(self, episodes: Sequence[Episode]) -> list[Answer]:
        """Step each episode; whatever kills the worker has failed.

        Raises:
            ChildError: No worker comes up any more.
        """
        async with self._busy:
            worker = await self._alive()
            try:
                return await worker.score(episodes)
            except ChildError as error:
                await self._lost(error)
            answers: list[Answer] = []
            for episode in episodes:
                worker = await self._alive()
                try:
                    answers.extend(await worker.score([episode]))
                except ChildError as error:
                    await self._lost(error)
                    answers.append(Failed(str(error)))
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
