"""Where every trajectory is: issued = trained + queued + in flight + rejected, at any moment.

Each event moves a number of trajectories; each term has a counter of its own that only its own
events touch, so that the equation is a check and not a definition. The store keeps the same
counters and can recount them from its rows (`coordinator.book`).
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from echo2p2p.rollouts.trajectory import Reason


class Place(enum.StrEnum):
    """Where a trajectory can be; the name of its counter and of its fate in the store."""

    IN_FLIGHT = "in_flight"
    QUEUED = "queued"
    TRAINED = "trained"
    REJECTED = "rejected"


@dataclass(frozen=True)
class Moved:
    """An event: ``count`` trajectories went from one place to another.

    ``source`` is ``None`` when they are issued; ``reason`` is set if and only if the target is
    `Place.REJECTED`.
    """

    count: int
    source: Place | None
    target: Place
    reason: Reason | None = None

    def __post_init__(self) -> None:
        assert self.count > 0
        assert (self.source, self.target) in _ALLOWED, (self.source, self.target)
        assert (self.reason is not None) == (self.target is Place.REJECTED)


_ALLOWED = {
    (None, Place.IN_FLIGHT),
    (Place.IN_FLIGHT, Place.QUEUED),
    (Place.IN_FLIGHT, Place.REJECTED),
    (Place.QUEUED, Place.TRAINED),
    (Place.QUEUED, Place.REJECTED),
    (Place.TRAINED, Place.REJECTED),
}
"""The last: a rollback took the step that had consumed them."""


@dataclass(frozen=True)
class Balance:
    """A snapshot, comparable with a recount of the store."""

    issued: int
    trained: int
    queued: int
    in_flight: int
    rejected: dict[str, int] = field(default_factory=dict)

    @property
    def balances(self) -> bool:
        """Whether every issued trajectory is somewhere, exactly once."""
        there = self.trained + self.queued + self.in_flight + sum(self.rejected.values())
        return self.issued == there


class Ledger:
    """The counters in memory."""

    def __init__(self, start: Balance | None = None) -> None:
        self._issued = start.issued if start else 0
        self._places: Counter[Place] = Counter()
        self._rejected: Counter[Reason] = Counter()
        if start is not None:
            self._places[Place.IN_FLIGHT] = start.in_flight
            self._places[Place.QUEUED] = start.queued
            self._places[Place.TRAINED] = start.trained
            self._rejected.update({Reason(name): n for name, n in start.rejected.items()})

    def apply(self, event: Moved) -> None:
        """Count one event."""
        if event.source is None:
            self._issued += event.count
        else:
            self._places[event.source] -= event.count
            assert self._places[event.source] >= 0, f"{event} takes what is not there"
        if event.reason is not None:
            self._rejected[event.reason] += event.count
        else:
            self._places[event.target] += event.count

    def statistics(self) -> Balance:
        """Return the counters as they are now."""
        return Balance(
            issued=self._issued,
            trained=self._places[Place.TRAINED],
            queued=self._places[Place.QUEUED],
            in_flight=self._places[Place.IN_FLIGHT],
            rejected={reason.value: n for reason, n in sorted(self._rejected.items()) if n},
        )
