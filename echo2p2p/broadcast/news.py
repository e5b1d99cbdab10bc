"""When a node announces what it has stored: soon to those who wait for it, later to the others.

An announcement costs both ends a wake-up. The source measures relays by them, and who gets chunks
by asking cannot ask before; but in a full mesh chunks come by themselves, so there they wait for
company.
"""

from __future__ import annotations

import math

from echo2p2p.broadcast.settings import SwarmSettings


class NewsTimer:
    """Of one node, for all payloads.

    Args:
        settings: How long announcements wait.
    """

    def __init__(self, settings: SwarmSettings) -> None:
        self._settings = settings
        self._soon_s = self._all_s = math.inf

    def stored(self, now: float, *, mesh: bool, links: int) -> None:
        """There is something to announce."""
        self._soon_s = min(self._soon_s, now + self._settings.batch_s(mesh=mesh))
        if mesh:
            self._all_s = min(self._all_s, now + self._settings.mesh_batch_s(links))

    def next_deadline(self) -> float:
        """Return when something is due; infinity: nothing is."""
        return min(self._soon_s, self._all_s)

    def take(self, now: float, *, mesh: bool) -> bool:
        """Those who wait are being told now; return whether all others should be, too."""
        self._soon_s = math.inf
        everybody = not mesh or now >= self._all_s
        if everybody:
            self._all_s = math.inf
        return everybody
