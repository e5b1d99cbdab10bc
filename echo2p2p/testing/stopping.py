"""Stops the tasks of one simulated process, as SIGSTOP does, and lets them go on.

A frozen machine's code must not run: not its timers either, which on a real machine all expire
at once when the process goes on. Tasks know by a context variable whose they are, and inherit it;
what becomes runnable while its process is stopped is put aside in the place of trio's queue. That
is the only thing of trio that is touched, and only once somebody stops a process.

Who lets a task of another machine begin (a connection is accepted, a request handled) must start
it in that machine's context, see `context_of_now`.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio
from trio._core import _run as trio_internals

_PROCESS: contextvars.ContextVar[SimProcess | None] = contextvars.ContextVar(
    "process", default=None
)


class SimProcess:
    """The tasks of one machine; begin them `inside`."""

    def __init__(self) -> None:
        self._stops = 0
        self._held: list[trio.lowlevel.Task] = []

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let this task, and those that it starts from now on, be the process's."""
        token = _PROCESS.set(self)
        try:
            yield
        finally:
            _PROCESS.reset(token)

    def stop(self) -> None:
        """Let none of its tasks take another step; as often as it is stopped it has to go on."""
        runner: Any = trio_internals.GLOBAL_RUN_CONTEXT.runner
        self._stops += 1
        runner.runq = _Queue(runner.runq)  # those of this process that are in it are put aside

    def go_on(self) -> None:
        """Let its tasks go on, with all that has come for them meanwhile."""
        assert self._stops, "it is not stopped"
        self._stops -= 1
        if not self._stops:
            runner: Any = trio_internals.GLOBAL_RUN_CONTEXT.runner
            held, self._held = self._held, []
            runner.runq.extend(held)

    def holds(self, task: trio.lowlevel.Task) -> bool:
        """Put a runnable task aside if the process is stopped."""
        if self._stops:
            self._held.append(task)
        return bool(self._stops)


class _Queue(deque[trio.lowlevel.Task]):
    """trio's queue of runnable tasks, without those of stopped processes."""

    def __init__(self, tasks: deque[trio.lowlevel.Task]) -> None:
        super().__init__()
        for task in tasks:
            self.append(task)

    def append(self, task: trio.lowlevel.Task) -> None:
        """Add a task that can run."""
        process = task.context.get(_PROCESS)
        if process is None or not process.holds(task):
            super().append(task)


def context_of_now() -> contextvars.Context:
    """Return the context in which to start tasks for the process that runs now."""
    return contextvars.copy_context()
