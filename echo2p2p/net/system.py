"""The real clock, the real randomness, and worker threads."""

from __future__ import annotations

import datetime
import random
import secrets
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


class SystemClock:
    """`WallClock` of the machine."""

    def time(self) -> float:
        """Return seconds since 1970 UTC."""
        return datetime.datetime.now(datetime.UTC).timestamp()


class SystemEntropy:
    """`Entropy` of the operating system."""

    def secret(self, count: int) -> bytes:
        """Return ``count`` bytes fit for keys."""
        return secrets.token_bytes(count)

    def rng(self, purpose: str) -> random.Random:
        """Return a freshly seeded generator; ``purpose`` names it in simulations only."""
        del purpose
        # Not for secrets: cores draw choices (which chunk, which neighbour) from it.
        return random.Random(secrets.randbits(256))  # noqa: S311


class ThreadOffload:
    """`Offload` onto worker threads of its own allowance.

    Apart from trio's default allowance, so that slow disks cannot starve encoding or the reverse.
    """

    def __init__(self, threads: int = 2) -> None:
        self._limiter = trio.CapacityLimiter(threads)

    async def run(self, work: Callable[[], T]) -> T:
        """Return ``work()``; waits while all threads are busy.

        Cancelled while waiting: ``work`` never starts. Cancelled while it runs: waits for its
        end, because the thread cannot be stopped and may write to memory of the caller, then
        raises `trio.Cancelled`; the result is lost.
        """
        result = await trio.to_thread.run_sync(work, limiter=self._limiter)
        await trio.lowlevel.checkpoint_if_cancelled()
        return result
