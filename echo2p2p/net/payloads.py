"""What a relay keeps of each payload, of those that it was shown and let pass, and of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import trio

from echo2p2p.broadcast.settings import SwarmSettings
from echo2p2p.errors import RemoteProtocolError, Violation
from echo2p2p.ids import ManifestId
from echo2p2p.limits import UNVERIFIED_CHUNKS_MAX, Fill
from echo2p2p.net.connections import ConnectionSettings, LinkStatistics
from echo2p2p.net.ports import SharedState
from echo2p2p.weights.assembly import Assembly
from echo2p2p.weights.manifest import is_step
from echo2p2p.wire.handshake import Self
from echo2p2p.wire.messages import ManifestHeader, Signed
from echo2p2p.wire.signing import open_record

BAD_SOURCES_MAX: Final = 256
OTHERS: Final = "others"
"""Who sent bad chunks is counted by name for so many, and together for the rest."""
PASSED_MAX: Final = 8
"""Manifests that were let pass and are remembered, in case that a neighbour wants them of us."""


Begin = Callable[[ManifestId, ManifestHeader], tuple[Assembly, SharedState | None]]
"""Makes the assembly of a payload, which may hold chunks already, and the memory in which it lies,
if that is not its own."""


def in_memory(manifest_id: ManifestId, header: ManifestHeader) -> tuple[Assembly, None]:
    """Begin a payload in memory of its own."""
    del manifest_id
    return Assembly(header), None


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Tuning and bounds of one node."""

    swarm: SwarmSettings = field(default_factory=SwarmSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)


@dataclass(eq=False, slots=True)
class Payload:
    """One that is held or followed.

    Attributes:
        signed: The manifest, believed.
        header: What it says.
        assembly: As far as it has come.
        memory: Where the assembly lies, if not in memory of its own; closed with this.
        ended: Complete, or forgotten.
        grown: Unparked with each verified chunk, with `refuse`, and at the end.
        refused: The source has said, at least once, that it has no such payload.
    """

    signed: Signed
    header: ManifestHeader
    assembly: Assembly
    memory: SharedState | None = None
    ended: trio.Event = field(default_factory=trio.Event)
    grown: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)
    refused: bool = False

    def end(self) -> None:
        """Wake whoever waits: there is no more to come."""
        self.ended.set()
        self.grown.unpark_all()

    def refuse(self) -> None:
        """Take note that the source has no such payload, and wake whoever waits for it."""
        self.refused = True
        self.grown.unpark_all()

    def rest(self) -> None:
        """Say that we have done with it, and that others will ask for single chunks at most."""
        if self.memory is not None:
            self.memory.rest()

    def close(self) -> None:
        """Give the memory back, once nobody looks into it any more."""
        self.end()
        if self.memory is not None:
            self.memory.close()


def open_manifest(signed: Signed, me: Self) -> ManifestHeader:
    """Return a manifest that our run has signed; `check_header` is the caller's to call.

    Raises:
        RemoteProtocolError: It is not our run's.
    """
    header = open_record(signed, me.run_public_key, ManifestHeader)
    if header.run_id != me.run_id:
        raise RemoteProtocolError(Violation.WRONG_RUN, "manifest of another run")
    return header


def delta_before(
    payloads: Mapping[ManifestId, Payload], header: ManifestHeader
) -> ManifestId | None:
    """Return the delta that leads to where this one begins, if it is among them."""
    for manifest_id, payload in payloads.items():
        if is_step(payload.header) and payload.header.version == header.base_version:
            return manifest_id
    return None


class BadChunks(Counter[str]):
    """How many bad chunks each source has sent."""

    def count(self, source: str) -> None:
        """Count one; by name for so many sources, together for the rest."""
        known = source in self or len(self) < BAD_SOURCES_MAX
        self[source if known else OTHERS] += 1


class Passed:
    """Verified manifests of payloads that we neither hold nor follow; the newest few."""

    def __init__(self) -> None:
        self._kept: dict[ManifestId, tuple[Signed, ManifestHeader]] = {}

    def add(self, manifest_id: ManifestId, signed: Signed, header: ManifestHeader) -> None:
        """Remember one."""
        self._kept.pop(manifest_id, None)
        self._kept[manifest_id] = signed, header
        if len(self._kept) > PASSED_MAX:
            del self._kept[next(iter(self._kept))]

    def get(self, manifest_id: ManifestId) -> tuple[Signed, ManifestHeader] | None:
        """Return one that is remembered."""
        return self._kept.get(manifest_id)


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
    """By source; those beyond `BAD_SOURCES_MAX` as `OTHERS`."""
    chunks_redealt: int


def payload_fills(
    payloads: Iterable[Payload], longest_queue: int, swarm: SwarmSettings
) -> Iterator[Fill]:
    """Yield how full the queues of chunks are; of many alike, the fullest."""
    limit = swarm.queue_chunks_max + swarm.send_window_chunks
    yield Fill("chunks that wait for a link", longest_queue, limit)
    unverified = max((payload.assembly.unverified for payload in payloads), default=0)
    yield Fill("chunks of a payload that wait for chunk 0", unverified, UNVERIFIED_CHUNKS_MAX)
