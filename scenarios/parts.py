"""Parts of a fake world without torch, processes or real time: pace, tokenizer, tasks, checkpoints.

The engine and the learner beside them are in `scenarios.fake_engine` and `scenarios.fake_learner`.
All hold to the same ports and the same conformance tests as the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Final

import trio

from coordinator.task_desk import TaskDesk
from coordinator.task_port import Done, Failed, Next, Opening, TaskInfo, TaskSetup, Turn
from echo2p2p.errors import ChildError
from echo2p2p.tasks.base import Prompt
from echo2p2p.tasks.registry import make_task

CHARACTERS: Final = "0123456789+-*=?,.:;()[]<>|# abcdefghijklmnopqrstuvwxyz\n"
"""As the tiny model's tokenizer (`coordinator.model`) has them, from id 4."""

FIRST_CHARACTER: Final = 4
_BOS: Final = 1
_EOS: Final = 2


class CharacterTokenizer:
    """The tiny model's tokenizer in a few lines of Python; messages are not supported."""

    vocab_size: int = 64
    stop_ids: tuple[int, ...] = (_EOS,)
    positions_max: int | None = 128

    def encode(self, prompt: Prompt) -> list[int]:
        """Return BOS and one token a character; unknown ones (found at -1) get the last special."""
        assert prompt.text is not None
        return [_BOS, *(CHARACTERS.find(c) + FIRST_CHARACTER for c in prompt.text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; tokens that are no character show as U+FFFD."""
        shifted = [int(token) - FIRST_CHARACTER for token in tokens]
        return "".join(CHARACTERS[i] if 0 <= i < len(CHARACTERS) else "\ufffd" for i in shifted)


class Pace:
    """How fast a machine works; a scenario slows it down or stops it."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._work: dict[trio.CancelScope, None] = {}
        """Under way; each ends by its deadline."""
        self._running = trio.Event()
        self._running.set()

    @property
    def factor(self) -> float:
        """Durations are so many times as long; what is left of work under way, too."""
        return self._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        for scope in self._work:
            scope.deadline = trio.current_time() + self.left_s(scope) * factor
        self._factor = factor

    def left_s(self, scope: trio.CancelScope) -> float:
        """Return what is left of a `work`, in seconds at a factor of 1."""
        return max(0.0, scope.deadline - trio.current_time()) / self._factor

    @contextmanager
    def work(self, seconds: float) -> Iterator[trio.CancelScope]:
        """Cancel what is inside after so many seconds at a factor of 1."""
        with trio.move_on_after(seconds * self._factor) as scope:
            self._work[scope] = None
            try:
                yield scope
            finally:
                del self._work[scope]

    def stop(self) -> None:
        """Let nothing end from now on, as SIGSTOP would."""
        if self._running.is_set():
            self._running = trio.Event()

    def go_on(self) -> None:
        """Undo `stop`."""
        self._running.set()

    async def wait_running(self) -> None:
        """Wait while it is stopped; endless."""
        await self._running.wait()


class Life:
    """Whether a part still runs; every duration passes through here."""

    def __init__(self, name: str, pace: Pace | None = None) -> None:
        self.name = name
        self.over = trio.Event()
        self.cause = ""
        self.left_s = 0.0
        """Of the last `spend`, if it was cut off."""
        self._pace = pace or Pace()

    def end(self, cause: str) -> None:
        """End now; a call under way raises."""
        if not self.over.is_set():
            self.cause = cause
            self.over.set()

    async def spend(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ChildError: The part ended before or meanwhile.
        """
        self.left_s = seconds  # until it has begun
        await trio.lowlevel.checkpoint()
        with self._pace.work(seconds) as scope:
            try:
                await self.over.wait()
            finally:
                self.left_s = self._pace.left_s(scope)
        await self._pace.wait_running()
        if self.over.is_set():
            raise ChildError(self.name, self.cause)

    async def hang(self, timeout_s: float, call: str) -> None:
        """Do nothing until the caller's deadline, as its client would see it."""
        with trio.move_on_after(timeout_s):  # the client's time, whatever our pace
            await self.over.wait()
        await self.spend(0)
        self.end(f"did not finish {call!r} within {timeout_s} s")
        raise ChildError(self.name, self.cause)


class MemoryShelf:
    """Checkpoints as keys of the dictionary that fake learners write to."""

    def __init__(self, saved: MutableMapping[str, bytes]) -> None:
        self._saved = saved

    def folder(self, step: int) -> Path:
        """Return a free name."""
        name = f"checkpoints/step-{step:06d}"
        self._saved.pop(name, None)
        return Path(name)

    def newest(self) -> Path | None:
        """Return the newest checkpoint."""
        return Path(max(self._saved)) if self._saved else None

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep``."""
        for name in sorted(self._saved)[:-keep]:
            del self._saved[name]


class InlineTaskWorker:
    """A `TaskWorker` in our own process, with `CharacterTokenizer`.

    Args:
        call_s: For any call.
        die_at_call: `open` and `score` calls counted together from 1; ``None``: never.
    """

    def __init__(self, *, call_s: float = 0.0, die_at_call: int | None = None) -> None:
        self._call_s = call_s
        self._die_at = inf if die_at_call is None else die_at_call
        self._calls = 0
        self._life = Life("task worker")
        self._desk: TaskDesk | None = None

    def kill(self) -> None:
        """Die now, as by ``kill -9``."""
        self._life.end("died of SIGKILL")

    async def start(self, setup: TaskSetup) -> TaskInfo:
        """See `TaskWorker`."""
        await self._life.spend(self._call_s)
        self._desk = TaskDesk(make_task(setup.task, setup.options), CharacterTokenizer())
        return self._desk.info()

    async def open(self, seeds: Sequence[int]) -> list[Opening | Failed]:
        """See `TaskWorker`."""
        return (await self._called()).open(seeds)

    async def score(
        self, episodes: Sequence[tuple[int, Sequence[Turn]]]
    ) -> list[Next | Done | Failed]:
        """See `TaskWorker`."""
        desk = await self._called()
        return [desk.advance(seed, turns) for seed, turns in episodes]

    async def close(self) -> None:
        """See `TaskWorker`."""
        await trio.lowlevel.checkpoint()
        self._life.end("it was closed")

    async def _called(self) -> TaskDesk:
        self._calls += 1
        if self._calls >= self._die_at:
            self.kill()
        await self._life.spend(self._call_s)
        if self._desk is None:
            raise ChildError(self._life.name, "it was not started")
        return self._desk
