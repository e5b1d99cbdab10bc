"""How long the newest versions took to reach the peers, as their heartbeats told.

A core: plain calls, `now` in seconds of the coordinator's wall clock. A peer has reached a version
when its engine has proved it (or, without an engine, its relay holds it whole). A peer's first
version says nothing of the broadcast: it may have joined long after the publication, so it is not
counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from echo2p2p.ids import PeerId, Version

VERSIONS_MAX: Final = 120
"""Newest versions that are remembered."""
PEERS_MAX: Final = 64
"""Peers whose arrivals are kept one by one, the earliest ones, for each version."""


@dataclass
class Arrival:
    """One publication and who has it."""

    version: Version
    step: int
    published_s: float
    peers: int = 0
    """All that have reached exactly this version."""
    last_after_s: float = 0.0
    """When the last of them had, after the publication."""
    after_s: dict[PeerId, float] = field(default_factory=dict)
    """Of the first `PEERS_MAX` of them."""


class Arrivals:
    """The newest publications, bounded by `VERSIONS_MAX`."""

    def __init__(self) -> None:
        self._rows: OrderedDict[Version, Arrival] = OrderedDict()
        self._at: dict[PeerId, Version] = {}

    def look(
        self, latest: Version | None, step: int, peers: Mapping[PeerId, Version | None], now: float
    ) -> None:
        """Compare with the last look.

        Args:
            latest: Newest publication, if any.
            step: Its step.
            peers: What each live member has proved.
            now: Wall clock, seconds.
        """
        if latest is not None and latest not in self._rows:
            self._rows[latest] = Arrival(latest, step, now)
            while len(self._rows) > VERSIONS_MAX:
                self._rows.popitem(last=False)
        for peer_id, version in peers.items():
            before = self._at.get(peer_id)
            if version is None or version == before:
                continue
            if before is not None and (row := self._rows.get(version)) is not None:
                row.peers += 1
                row.last_after_s = now - row.published_s
                if len(row.after_s) < PEERS_MAX:
                    row.after_s[peer_id] = row.last_after_s
        self._at = {peer: version for peer, version in peers.items() if version is not None}

    def rows(self) -> list[Arrival]:
        """Return them, ascending."""
        return list(self._rows.values())
