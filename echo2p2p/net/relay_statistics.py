"""What a relay node has counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo2p2p.net.connections import LinkStatistics


@dataclass(frozen=True, slots=True)
class RelayStatistics:
    """What a node has done since its start."""

    links: tuple[LinkStatistics, ...]
    relayed_bytes: int
    """Chunk payload, as are all bytes here: sent over links that are up and links that were."""
    relayed_delta_bytes: int
    """The part of it that belongs to deltas from the version before, which all peers need."""
    received_bytes: int
    duplicate_bytes: int
    unknown_bytes: int
    """Received of payloads that we do not follow."""
    bad_chunks: Mapping[str, int]
    """By source."""
    chunks_redealt: int
