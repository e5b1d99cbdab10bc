"""How long to wait before a link is dialled again; pure."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RedialSettings:
    """Back-off between attempts."""

    first_s: float = 0.25
    longest_s: float = 30.0
    settled_s: float = 1.0
    """A link that lived so long starts the back-off afresh: it carried something, and a line that
    breaks every few seconds is worth little more waiting. Refusals take a round trip."""
    quarantine_s: float = 120.0
    """After a violation or a bad chunk."""
    quarantine_source_s: float = 5.0
    """The same for the source: without it there is nothing to relay."""


class Backoff:
    """Doubles from attempt to attempt.

    Each wait is drawn between half and all of it, so that peers that lost the same neighbour do
    not come back in step.
    """

    def __init__(self, settings: RedialSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._next_s = settings.first_s

    def wait_s(self, *, lived_s: float | None) -> float:
        """Return how long to wait after an attempt.

        Args:
            lived_s: How long the link lived; ``None`` if it was not opened.
        """
        if lived_s is not None and lived_s >= self._settings.settled_s:
            self._next_s = self._settings.first_s
        wait_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(self._settings.longest_s, 2 * self._next_s)
        return wait_s
