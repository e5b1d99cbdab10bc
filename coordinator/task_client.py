"""A task worker in a child process: the real form of `coordinator.task_port.TaskWorker`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coordinator.task_calls import (
    InfoReply,
    OpenedReply,
    ScoredReply,
    SetupCall,
    from_opened,
    from_scored,
    to_call,
)
from coordinator.task_port import Done, Failed, Next, Opening, TaskInfo, TaskSetup, Turn
from echo2p2p.errors import ChildError, ConfigError
from echo2p2p.net.child import ChildProcess


class TaskWorkerProcess:
    """See `coordinator.task_port.TaskWorker`.

    Args:
        call_timeout_s: For one `open` or `score`; the task's own code runs in it.
        start_timeout_s: From spawning to readiness.
        log_file: What the task prints is appended here.
    """

    def __init__(
        self,
        *,
        call_timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
        log_file: Path | None = None,
    ) -> None:
        self.child = ChildProcess("task worker", "coordinator.task_worker", log_file=log_file)
        self._call_timeout_s = call_timeout_s
        self._start_timeout_s = start_timeout_s

    async def start(self, setup: TaskSetup) -> TaskInfo:
        """Spawn and set up; see the port."""
        await self.child.start()
        call = SetupCall(str(setup.model_dir), setup.task, dict(setup.options))
        reply = await self.child.call("start", call, InfoReply, timeout_s=self._start_timeout_s)
        if reply.config_path is not None:
            raise ConfigError(reply.config_path, reply.config_detail)
        return TaskInfo(reply.vocab_size, reply.stop_ids, reply.turns_max, reply.positions_max)

    async def open(self, seeds: Sequence[int]) -> list[Opening | Failed]:
        """Return first prompts; see the port."""
        replies = await self.child.call(
            "open", list(seeds), list[OpenedReply], timeout_s=self._call_timeout_s
        )
        self._check_count(len(replies), len(seeds))
        return [from_opened(reply) for reply in replies]

    async def score(
        self, episodes: Sequence[tuple[int, Sequence[Turn]]]
    ) -> list[Next | Done | Failed]:
        """Step episodes; see the port."""
        calls = [to_call(seed, turns) for seed, turns in episodes]
        replies = await self.child.call(
            "score", calls, list[ScoredReply], timeout_s=self._call_timeout_s
        )
        self._check_count(len(replies), len(calls))
        return [from_scored(reply) for reply in replies]

    def _check_count(self, found: int, wanted: int) -> None:
        if found != wanted:
            raise ChildError(self.child.name, f"gave {found} answers to {wanted} questions")

    async def close(self) -> None:
        """End it; see the port."""
        await self.child.close()
