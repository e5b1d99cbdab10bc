"""What the broadcast core wants done, as values; the shell performs them in order. And counters.

A link is named by the peer at its other end: there is at most one between two peers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from echo2p2p.ids import ManifestId, PeerId


@dataclass(frozen=True, slots=True)
class SendOffer:
    """Show the manifest; always before the first chunk of it on the link."""

    link: PeerId
    manifest_id: ManifestId


@dataclass(frozen=True, slots=True)
class SendWant:
    """Ask to be told what the other side holds, now and later."""

    link: PeerId
    manifest_id: ManifestId


@dataclass(frozen=True, slots=True)
class SendHave:
    """Announce verified chunks."""

    link: PeerId
    manifest_id: ManifestId
    indices: tuple[int, ...]
    """Ascending, at most `HAVE_INDICES_MAX`."""
    ask: bool = False
    """Nobody pushes them to the other side."""


@dataclass(frozen=True, slots=True)
class SendRequest:
    """Ask for one chunk."""

    link: PeerId
    manifest_id: ManifestId
    index: int


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Send one chunk that we hold; report it with `Swarm.chunk_sent` when it is off."""

    link: PeerId
    manifest_id: ManifestId
    index: int


@dataclass(frozen=True, slots=True)
class SendReject:
    """Refuse a request."""

    link: PeerId
    manifest_id: ManifestId
    index: int
    reason: Literal["not_held", "busy", "unknown"]


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Take a request back."""

    link: PeerId
    manifest_id: ManifestId
    index: int


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Give up on a link that promises chunks and does not deliver."""

    link: PeerId
    detail: str


Effect = (
    SendOffer | SendWant | SendHave | SendRequest | SendChunk | SendReject | SendCancel | CloseLink
)


@dataclass(frozen=True, slots=True)
class SwarmStatistics:
    """Counters since the start."""

    duplicate_bytes: int
    """Received though held, or though on its way to being verified."""
    unknown_bytes: int
    """Received of payloads that are not followed."""
    chunks_pushed: int
    """Queued unasked."""
    chunks_requested: int
    chunks_redealt: int
    longest_queue: int
    """Chunks that wait for one link now, at most `SwarmSettings.queue_chunks_max` and a window."""
