"""Room for the bodies of requests that are in memory at once, in all and of each client."""

from __future__ import annotations

from collections import Counter

from echo2p2p.net import routing
from echo2p2p.net.ports import Response


class BodyRoom:
    """What bodies of one kind may take together.

    Args:
        most: Bytes in all; beyond that 503.
        each: Bytes of whoever `Route.admit` has named; beyond that 429.
    """

    def __init__(self, most: int, each: int) -> None:
        self._most = most
        self._each = each
        self._taken = 0
        self._taken_of: Counter[str] = Counter()

    def refusal(self, who: str, taken: int, more: int) -> Response | None:
        """Return the answer if a body that has taken so much cannot have more now.

        One by itself may be as long as its route says.
        """
        if self._taken + more > self._most:
            detail = "too many bodies at once: send it again later"
            return routing.refusal(503, routing.REASON_BUSY, detail, retry_after_s=2.0)
        others = self._taken_of[who] - taken if who else 0
        if others and others + taken + more > self._each:
            return routing.too_much_at_once()
        return None

    def change(self, who: str, by: int) -> None:
        """Count so many bytes in, or out."""
        self._taken += by
        self._taken_of[who] += by
        if not self._taken_of[who]:
            del self._taken_of[who]


class Body:
    """One body's part of a room, from its first byte to the end of the answer."""

    def __init__(self, room: BodyRoom, who: str) -> None:
        self._room = room
        self._who = who
        self._taken = 0

    def look(self, length: int) -> Response | None:
        """Return the refusal if a body of this length would find no room now; takes nothing."""
        return self._room.refusal(self._who, self._taken, length - self._taken)

    def grow(self, length: int) -> Response | None:
        """Take what is lacking for so many bytes; return the refusal if there is no room."""
        if length <= self._taken:
            return None
        refused = self.look(length)
        if refused is None:
            self.fit(length)
        return refused

    def fit(self, length: int) -> None:
        """It is so long after all; 0: it is gone."""
        self._room.change(self._who, length - self._taken)
        self._taken = length
