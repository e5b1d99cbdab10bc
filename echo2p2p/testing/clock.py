"""Virtual time: a run that sleeps for a week takes a second, and goes the same way twice.

`run_virtual` is the only user of trio's private scheduling switches. trio is pinned, and a test
shows that two runs of one seed interleave alike and that two seeds do not.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, TypeVarTuple

import trio
from trio._core import _run as trio_internals
from trio.testing import MockClock

T = TypeVar("T")
Args = TypeVarTuple("Args")

EPOCH_S: Final = 1_800_000_000.0
"""Time of day at which every simulation starts: some moment in 2027."""


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


def _make_clock(tick_s: float) -> MockClock:
    """Return a clock that jumps as soon as all sleep, to the end of a tick if there are ticks."""
    clock = MockClock(autojump_threshold=0)
    private: Any = clock
    # As the real clock has no part in it, the time is what the last jump has left.
    private.current_time = lambda: private._virtual_base  # noqa: SLF001

    def jump_to_tick() -> None:
        ahead_s = trio.lowlevel.current_statistics().seconds_to_next_deadline
        if 0 < ahead_s < math.inf:
            now = clock.current_time()
            clock.jump(math.ceil((now + ahead_s) / tick_s) * tick_s - now)

    if tick_s:
        private._autojump = jump_to_tick  # noqa: SLF001
    return clock
