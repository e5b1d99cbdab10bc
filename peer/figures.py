"""What a peer can say of itself: where it stands, what it did, and what became of its work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from echo2p2p.wire.messages import Outcome

PeerState = Literal["joining", "resting", "warming", "ready"]


@dataclass
class Tally:
    """Work and bytes of one or several incarnations. Work is counted in leases."""

    accepted: int = 0
    """Checked and kept by the coordinator; what becomes of it is told later."""
    trained: int = 0
    """A step of the learner has consumed it."""
    rejected: dict[str, int] = field(default_factory=dict)
    """By reason: at once, or after it had been accepted."""
    relayed_bytes: int = 0
    received_bytes: int = 0

    def note(self, outcomes: Iterable[Outcome]) -> None:
        """Count what a heartbeat's answer told."""
        for outcome in outcomes:
            if outcome.accepted:
                self.trained += 1
            else:
                self.reject(outcome.reason or "unknown", 1)

    def reject(self, reason: str, count: int) -> None:
        """Count rejected leases."""
        self.rejected[reason] = self.rejected.get(reason, 0) + count

    def plus(self, other: Tally) -> Tally:
        """Return the sum, as a new tally."""
        total = Tally(
            self.accepted + other.accepted,
            self.trained + other.trained,
            dict(self.rejected),
            self.relayed_bytes + other.relayed_bytes,
            self.received_bytes + other.received_bytes,
        )
        for reason, count in other.rejected.items():
            total.reject(reason, count)
        return total

    def with_uploads(self, accepted: int, rejected: Mapping[str, int]) -> Tally:
        """Return it with what the coordinator said when work was handed in."""
        return self.plus(Tally(accepted=accepted, rejected=dict(rejected)))


@dataclass(frozen=True)
class PeerFigures:
    """A peer, now."""

    state: PeerState = "joining"
    incarnation: int | None = None
    version: int | None = None
    """Proved by the engine (relay only: whole)."""
    latest_version: int | None = None
    """Published, as far as we were told."""
    tokens_per_s: float = 0.0
    tokens_generated: int = 0
    leases_held: int = 0
    links: int = 0
    silent_s: float = 0.0
    """Since the coordinator last answered."""
    tally: Tally = field(default_factory=Tally)
    """Of the process's whole life."""
