"""What a source knows of its relays: uplinks, whom they reach, and whether trying them is worth it.

It outlives payloads, which may be of one or two chunks each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Final

from echo2p2p.broadcast.rates import BusyRate
from echo2p2p.broadcast.reach import Reach
from echo2p2p.ids import PeerId

RATE_ASSUMED_BYTES_PER_S: Final = 1024.0 * 1024.0
"""Of a relay, before any relay was measured: an uplink of 8 Mbit/s."""

RATE_FLOOR: Final = 0.25
"""Share of the mean rate below which a relay's slowness buys it no more time."""

SAMPLE_BUSY_S: Final = 0.5
"""Longer than announcements come in bursts."""

TRY_AGAIN_S: Final = 1.0
"""A relay that seems slow, and has nothing to do, gets a chunk so often all the same."""
TRY_EVERY: Final = 8
"""Outside a full mesh no more than one deal of so many is such a try: with a hundred relays all
would be."""
TRIES_DOUBLED: Final = 6
"""One that has passed nothing on is tried half as often each time, so many times. It may lie to the
other peers, who have cut it off, or be cut off from them, and everybody waits for each try."""

QUICK_MAX: Final = 4.0
"""A relay that is not measured yet is taken to be at most so many times as fast as the others, or
as slow, by what its first copies took."""


def mean_of(before: float, now: float) -> float:
    """Return the moving mean; infinity before the first."""
    return now if before == math.inf else before + (now - before) / 8


class RelayRates:
    """Measured uplinks of relays, and whom they reach; outlives payloads."""

    def __init__(self, reach: Reach | None = None) -> None:
        self.reach = reach or Reach()
        self._rates: dict[PeerId, BusyRate] = {}
        self._leaving_s_per_byte = math.inf
        self._copying: dict[PeerId, float] = {}
        """How fast copies were made, the way there and back included: of deals to relays without
        work, bytes per second."""
        self._usual = 0.0
        """The mean of these; estimates are made for each relay and each deal."""
        self._next_try_s: dict[PeerId, float] = {}
        self._deals_since_try = 0
        self._in_vain: Counter[PeerId] = Counter()
        self._failed_s: dict[PeerId, float] = {}
        """When its last try failed."""
        self.redealt = 0
        """Chunks that were dealt again, of all payloads."""
        self.allowed: Mapping[PeerId, float] = {}
        """What its owner lets a relay send, bytes per second, where that is known."""

    def of(self, relay: PeerId) -> BusyRate:
        """Return the relay's meter."""
        return self._rates.setdefault(relay, BusyRate(SAMPLE_BUSY_S))

    def forget(self, relay: PeerId) -> None:
        """The relay left."""
        self._rates.pop(relay, None)
        if self._copying.pop(relay, None):
            self._average()
        self._next_try_s.pop(relay, None)
        self._in_vain.pop(relay, None)
        self._failed_s.pop(relay, None)

    def left(self, took_s: float, chunk_bytes: int) -> None:
        """A deal took so long to leave."""
        self._leaving_s_per_byte = mean_of(self._leaving_s_per_byte, took_s / chunk_bytes)

    def leaving_s(self, chunk_bytes: int) -> float:
        """Return what a deal takes to leave, on average; infinite before the first has left."""
        return self._leaving_s_per_byte * chunk_bytes

    def copied(self, relay: PeerId, took_s: float, count: int) -> None:
        """It has made copies of ``count`` bytes in all, of a chunk dealt when it had no work."""
        self._copying[relay] = mean_of(self._copying.get(relay, math.inf), count / took_s)
        self._average()

    def _average(self) -> None:
        self._usual = sum(self._copying.values()) / max(1, len(self._copying))

    def is_to_try(self, relay: PeerId, now: float) -> bool:
        """Return whether to deal to it, if it has nothing to do, however slow it seems."""
        return now >= self._next_try_s.get(relay, -math.inf)

    @property
    def may_try(self) -> bool:
        """Whether the next deal may be a try, if there are many relays."""
        return self._deals_since_try >= TRY_EVERY - 1

    def dealt(self, relay: PeerId, now: float, *, is_try: bool) -> None:
        """It was dealt a chunk; ``is_try``: only because it `is_to_try`."""
        self._deals_since_try = 0 if is_try else self._deals_since_try + 1
        pause_s = TRY_AGAIN_S * 2 ** min(self._in_vain[relay], TRIES_DOUBLED)
        self._next_try_s[relay] = now + pause_s

    def has_failed(self, relay: PeerId) -> bool:
        """Return whether what it was dealt last came to nobody."""
        return self._in_vain[relay] > 0

    def passed_on(self, relay: PeerId) -> None:
        """Somebody has a chunk that it was dealt."""
        self._in_vain[relay] = 0

    def in_vain(self, relay: PeerId, dealt_s: float, now: float) -> None:
        """Nobody has a chunk that it was dealt at ``dealt_s``.

        All that were under way when a try failed are one try: a line that breaks down takes several
        with it, and would be left alone for a minute after it has recovered.
        """
        if dealt_s >= self._failed_s.get(relay, -math.inf):
            self._in_vain[relay] += 1
            self._failed_s[relay] = now

    def mean(self) -> float | None:
        """Return the mean of the measured, bytes per second; ``None`` before the first."""
        known = [rate.bytes_per_s for rate in self._rates.values() if rate.bytes_per_s is not None]
        return sum(known) / len(known) if known else None

    def estimate(self, relay: PeerId) -> float:
        """Return bytes per second, above 0: measured, or the others' mean, or assumed.

        Before it is measured, no more than it is allowed.
        """
        mean = self.mean() or RATE_ASSUMED_BYTES_PER_S
        own = self.of(relay).bytes_per_s
        if own is None:
            own = mean * self._quickness(relay)
            own = min(own, self.allowed.get(relay, own))
        return max(own, mean / 1000)

    def _quickness(self, relay: PeerId) -> float:
        """Return how many times as fast as the others a relay seems that is not measured yet."""
        own = self._copying.get(relay)
        if own is None:
            return 1.0
        return min(QUICK_MAX, max(1 / QUICK_MAX, own / self._usual))

    def relays(self, relay: PeerId) -> bool:
        """Return whether it passes anything on; one of which nothing is known does."""
        return self.allowed.get(relay, 1.0) > 0

    def patient(self, relay: PeerId) -> float:
        """Return the rate by which its lateness is judged, bytes per second."""
        return max(self.estimate(relay), RATE_FLOOR * (self.mean() or RATE_ASSUMED_BYTES_PER_S))
