"""Is the other end of a link alive? Pings when it is quiet, and a limit to silence.

Each side makes sure that the other hears something every two seconds: a side that only receives
says so by pings. Otherwise a side that only sends chunks could not tell a slow reader from a dead
one. Bytes count as life, not only whole messages: a long chunk may take longer than the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PING_IDLE_S: Final = 2.0
PING_EARLY_S: Final = 0.5
"""The dialler may ping so much sooner, so that one timer serves many links: those that were pinged
together once are due together from then on."""
DEAD_SILENT_S: Final = 6.0
ACCEPTOR_PATIENCE: Final = 1.25
"""The side that accepted a link waits so much longer: the dialler's ping, and the answer, then tell
both what they want to know, and half as many pings are sent."""

assert PING_IDLE_S * ACCEPTOR_PATIENCE * 2 < DEAD_SILENT_S


@dataclass(frozen=True, slots=True)
class SendPing:
    """Send a `Ping` with this nonce."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Dead:
    """Nothing was heard for too long: close the link."""

    silent_s: float


class Liveness:
    """Of one link, from the time that it is authenticated.

    Args:
        now: Seconds, monotonic, as in every call.
        ping_idle_s: A ping goes out when nothing was sent, or nothing heard, for so long.
        dead_silent_s: The limit to silence.
        early_s: If `on_time` is called so long before a ping is due, it is sent.
    """

    def __init__(
        self,
        now: float,
        *,
        ping_idle_s: float = PING_IDLE_S,
        dead_silent_s: float = DEAD_SILENT_S,
        early_s: float = 0.0,
    ) -> None:
        self._early_s = early_s
        self._ping_idle_s = ping_idle_s
        self._dead_silent_s = dead_silent_s
        self._heard_s = self._sent_s = self._pinged_s = now
        self._nonce = 0

    def heard(self, now: float) -> None:
        """Bytes came in."""
        self._heard_s = now

    def sent(self, now: float) -> None:
        """Bytes went out."""
        self._sent_s = now

    def pong(self, nonce: int, now: float) -> float | None:
        """Return the round trip in seconds if this answers the last ping."""
        return now - self._pinged_s if nonce == self._nonce and nonce else None

    def next_deadline(self) -> float:
        """Return when `on_time` should be called at the latest."""
        return min(self._ping_due(), self._heard_s + self._dead_silent_s)

    def on_time(self, now: float) -> SendPing | Dead | None:
        """Return what is due."""
        if now >= self._heard_s + self._dead_silent_s:
            return Dead(now - self._heard_s)
        if now >= self._ping_due() - self._early_s:
            self._nonce += 1
            self._pinged_s = self._sent_s = now
            return SendPing(self._nonce)
        return None

    def _ping_due(self) -> float:
        quiet_since_s = min(self._sent_s, max(self._heard_s, self._pinged_s))
        return quiet_since_s + self._ping_idle_s
