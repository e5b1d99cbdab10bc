"""How fast something goes while it has work: bytes per busy second, forgetting the past.

Idle time says nothing of a link, so only time with work outstanding counts. A pause in the middle
of work does count: that is what a stalled link looks like.
"""

from __future__ import annotations

from typing import Final

SAMPLE_BUSY_S: Final = 0.25
"""Busy time that makes one sample; shorter ones measure buffers, not links."""

WEIGHT: Final = 0.5
"""Of the newest sample in the moving estimate."""


class BusyRate:
    """A moving estimate of one rate."""

    __slots__ = ("_busy_s", "_bytes", "_since_s", "bytes_per_s")

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        """``None`` until a quarter of a second of work was seen."""
        self._bytes = 0
        self._busy_s = 0.0
        self._since_s: float | None = None

    def start(self, now: float) -> None:
        """There is work from now on."""
        if self._since_s is None:
            self._since_s = now

    def stop(self, now: float) -> None:
        """There is no more work."""
        self._advance(now)
        self._since_s = None

    def add(self, count: int, now: float) -> None:
        """``count`` bytes of the work are done; ignored when there was none."""
        if self._since_s is None:
            return
        self._bytes += count
        self._advance(now)

    def penalise(self) -> None:
        """Work was not done in time: halve the estimate, if there is one."""
        if self.bytes_per_s is not None:
            self.bytes_per_s /= 2

    def _advance(self, now: float) -> None:
        if self._since_s is None:
            return
        self._busy_s += now - self._since_s
        self._since_s = now
        if self._busy_s >= SAMPLE_BUSY_S:
            sample = self._bytes / self._busy_s
            old = self.bytes_per_s
            self.bytes_per_s = sample if old is None else old + WEIGHT * (sample - old)
            self._bytes, self._busy_s = 0, 0.0
