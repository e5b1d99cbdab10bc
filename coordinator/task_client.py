"""A task worker in a child process: the real form of `coordinator.task_port.TaskWorker`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coordinator.task_calls import (
    OpenedReply,
    ScoredReply,
    SetupCall,
    from_opened,
    from_scored,
    to_call,
)
from coordinator.task_port import Done, Failed, Next, Opening, TaskInfo, TaskSetup, Turn
from echo2p2p.errors import ChildError
from echo2p2p.net.child import ChildProcess


class TaskWorkerProcess:
    """See `coordinator.task_port.TaskWorker`.

    Args:
        item_timeout_s: For one item of `open` or `score`; the task's own code runs in it.
        start_silence_s: `start` has no deadline (the task may load a data set), but the process
            must work or read without a pause of this length.
        memory_max_bytes: See `ChildProcess`.
        log_file: What the task prints is appended here.
    """

    def __init__(
        self,
        *,
        item_timeout_s: float = 60.0,
        start_silence_s: float = 300.0,
        memory_max_bytes: int | None = None,
        log_file: Path | None = None,
    ) -> None:
        self.child = ChildProcess(
            "task worker",
            "coordinator.task_worker",
            log_file=log_file,
            memory_max_bytes=memory_max_bytes,
        )
        self._item_timeout_s = item_timeout_s
        self._start_silence_s = start_silence_s

    async def start(self, setup: TaskSetup) -> TaskInfo:
        """Spawn and set up; see the port."""
        await self.child.start()
        call = SetupCall(str(setup.model_dir), setup.task, dict(setup.options))
        return await self.child.call(
            "start", call, TaskInfo, timeout_s=None, silence_s=self._start_silence_s
        )

    async def open(self, seeds: Sequence[int]) -> list[Opening | Failed]:
        """Return first prompts; see the port."""
        replies = await self.child.call(
            "open",
            list(seeds),
            list[OpenedReply],
            timeout_s=None,
            silence_s=self._item_timeout_s,
        )
        self._check_count(len(replies), len(seeds))
        return [from_opened(reply) for reply in replies]

    async def score(
        self, episodes: Sequence[tuple[int, Sequence[Turn]]]
    ) -> list[Next | Done | Failed]:
        """Step episodes; see the port."""
        calls = [to_call(seed, turns) for seed, turns in episodes]
        replies = await self.child.call(
            "score", calls, list[ScoredReply], timeout_s=None, silence_s=self._item_timeout_s
        )
        self._check_count(len(replies), len(calls))
        return [from_scored(reply) for reply in replies]

    def _check_count(self, found: int, wanted: int) -> None:
        if found != wanted:
            raise ChildError(self.child.name, f"gave {found} answers to {wanted} questions")

    async def close(self) -> None:
        """End it; see the port."""
        await self.child.close()
