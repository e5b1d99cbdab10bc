"""Virtual time: a run that sleeps for a week takes a second, and goes the same way twice.

`run_virtual` is the only user of trio's private scheduling switches. trio is pinned, and a test
shows that two runs of one seed interleave alike and that two seeds do not.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn, Protocol, TypeVar, TypeVarTuple

import trio
from trio._core import _run as trio_internals
from trio.testing import MockClock

T = TypeVar("T")
Args = TypeVarTuple("Args")

EPOCH_S: Final = 1_800_000_000.0
"""Time of day at which every simulation starts: some moment in 2027."""


class Timed(Protocol):
    """Things that happen by themselves, each at its time.

    Attributes:
        wake: Whose deadline is to be moved forward when something earlier comes.
    """

    wake: trio.CancelScope

    def next_due_s(self) -> float:
        """Return when something is to happen next; infinity: never."""
        ...

    def run_due(self, now: float) -> None:
        """Let happen what is due; synchronous, and no task's work."""
        ...


class SimClock:
    """`WallClock` on virtual time.

    Attributes:
        skew_s: How far this machine's clock is ahead; may be changed at any time.
    """

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s

    def time(self) -> float:
        """Return seconds since 1970 UTC."""
        return EPOCH_S + self.skew_s + trio.current_time()


def run_virtual(
    async_fn: Callable[[*Args], Awaitable[T]], *args: *Args, seed: int, tick_s: float = 0.0
) -> T:
    """Run ``async_fn(*args)`` under trio in virtual time and return its value.

    Same function, same arguments, same seed and same ``PYTHONHASHSEED``: same interleaving. The
    clock jumps as soon as every task sleeps, so threads and real sockets must not be used inside.
    Virtual time starts at 0.

    Args:
        async_fn: What to run.
        args: Its arguments.
        seed: Decides the order of tasks that could run at the same time.
        tick_s: Timers are late by less than this, a power of two, as they are on a real machine;
            what is due within one tick then costs one round of the scheduler. 0: they are exact.
    """
    internals: Any = trio_internals
    before = internals._ALLOW_DETERMINISTIC_SCHEDULING  # noqa: SLF001 - see the module's header
    internals._ALLOW_DETERMINISTIC_SCHEDULING = True  # noqa: SLF001
    internals._r.seed(seed)  # noqa: SLF001
    try:
        return trio.run(async_fn, *args, clock=_make_clock(tick_s))
    finally:
        internals._ALLOW_DETERMINISTIC_SCHEDULING = before  # noqa: SLF001


async def run_due(timed: Timed) -> NoReturn:
    """Let things happen in their time until cancelled.

    Under `run_virtual` the clock itself sees to it, once all tasks sleep: for a task of its own a
    simulated network would be woken in each tick, by a timer and an exception.
    """
    clock: Any = trio.lowlevel.current_clock()
    drives = getattr(clock, "drives", None)
    if drives is not None:
        drives.append(timed)
        try:
            await trio.sleep_forever()
        finally:
            drives.remove(timed)
    while True:
        timed.run_due(trio.current_time())
        with trio.CancelScope(deadline=timed.next_due_s()) as timed.wake:
            await trio.sleep_forever()


def _make_clock(tick_s: float) -> MockClock:
    """Return a clock that jumps as soon as all sleep, to the end of a tick if there are ticks."""
    clock = MockClock(autojump_threshold=0)
    private: Any = clock
    drives: list[Timed] = []
    private.drives = drives
    # As the real clock has no part in it, the time is what the last jump has left.
    private.current_time = lambda: private._virtual_base  # noqa: SLF001

    def jump() -> None:
        deadlines = trio_internals.GLOBAL_RUN_CONTEXT.runner.deadlines
        due_s = min([deadlines.next_deadline(), *(timed.next_due_s() for timed in drives)])
        if due_s == math.inf:
            return
        if due_s > private._virtual_base:  # noqa: SLF001
            to_s = math.ceil(due_s / tick_s) * tick_s if tick_s else due_s
            private._virtual_base = to_s  # noqa: SLF001
        for timed in drives:
            timed.run_due(private._virtual_base)  # noqa: SLF001

    private._autojump = jump  # noqa: SLF001
    return clock
