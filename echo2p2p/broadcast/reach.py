"""Who can be linked to whom: two peers that cannot be dialled never are."""

from __future__ import annotations

from dataclasses import dataclass

from echo2p2p.ids import PeerId


@dataclass(slots=True)
class Reach:
    """What a node was told of the links of all."""

    peers: int | None = None
    """How many there are; ``None``: not told."""
    undialable: frozenset[PeerId] = frozenset()

    def links(self, one: PeerId, other: PeerId) -> bool:
        """Return whether one can push to the other."""
        return one not in self.undialable or other not in self.undialable
