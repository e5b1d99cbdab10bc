"""How fast something can go: bytes per busy second, the best of the last few samples.

Idle time says nothing of a link, so only time with work outstanding counts. A pause in the middle
of work does count: that is what a stalled link looks like. The best sample is taken because work
that trickles in makes samples too low, and nothing makes one too high for long.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SAMPLE_BUSY_S: Final = 0.25
"""Busy time that makes one sample; shorter ones measure buffers, not links."""

SAMPLES: Final = 4


class BusyRate:
    """A moving estimate of one rate.

    Args:
        sample_s: Busy time that makes one sample.
    """

    __slots__ = ("_busy_s", "_bytes", "_sample_s", "_samples", "_since_s")

    def __init__(self, sample_s: float = SAMPLE_BUSY_S) -> None:
        self._sample_s = sample_s
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._bytes = 0
        self._busy_s = 0.0
        self._since_s: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """The estimate; ``None`` before the second sample, as the first has the start in it."""
        return max(self._samples) if len(self._samples) > 1 else None

    def start(self, now: float) -> None:
        """There is work from now on."""
        if self._since_s is None:
            self._since_s = now

    def stop(self, now: float) -> None:
        """There is no more work."""
        self.tick(now)
        self._since_s = None

    def add(self, count: int, now: float) -> None:
        """``count`` bytes of the work are done; ignored when there was none."""
        if self._since_s is None:
            return
        self._bytes += count
        self.tick(now)

    def tick(self, now: float) -> None:
        """Count the time until now, in which perhaps nothing was done."""
        if self._since_s is None:
            return
        self._busy_s += now - self._since_s
        self._since_s = now
        if self._busy_s >= self._sample_s:
            self._samples.append(self._bytes / self._busy_s)
            self._bytes, self._busy_s = 0, 0.0

    def at_least(self, bytes_per_s: float) -> None:
        """Some work was done so fast, with the way there and back: raise what is known if needed.

        A rate that was penalised would otherwise stay low, as who is given little is never busy for
        long enough to be measured.
        """
        known = self.bytes_per_s
        if known is not None and known < bytes_per_s:
            self._samples.append(bytes_per_s)

    def penalise(self, assumed: float) -> None:
        """Work was not done in time: halve the estimate, or what was assumed instead of one."""
        rate = self.bytes_per_s
        half = (assumed if rate is None else rate) / 2
        self._samples = deque([half] * SAMPLES, maxlen=SAMPLES)
