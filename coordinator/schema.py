"""The store's tables, and what its rows are in Python; `coordinator.book` works on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, cast

from echo2p2p.errors import RemoteProtocolError, StoreError
from echo2p2p.ids import (
    Digest,
    Generation,
    Incarnation,
    LeaseId,
    PeerId,
    Step,
    Version,
    digest_of,
)
from echo2p2p.wire import codec
from echo2p2p.wire.messages import Lease, Message, Signed, Upload

MessageT = TypeVar("MessageT", bound=Message)

LEASE_ROWS_KEPT: Final = 100_000
"""Ended leases (without their bodies) that still answer a late or repeated upload by name."""

RELAYED_BYTES_MAX: Final = 2**53
"""Nine petabytes; exact in JSON and far from what a row's integer overflows at."""

MIGRATIONS: Final[tuple[str, ...]] = (
    """
    CREATE TABLE run (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
    CREATE TABLE members (
        peer_id TEXT PRIMARY KEY, incarnation INTEGER NOT NULL, name TEXT NOT NULL,
        credential BLOB NOT NULL, join_body BLOB NOT NULL, live INTEGER NOT NULL,
        relayed_bytes INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE TABLE versions (
        version INTEGER PRIMARY KEY, step INTEGER NOT NULL, generation INTEGER NOT NULL,
        dead INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE TABLE payloads (
        manifest_id BLOB PRIMARY KEY, version INTEGER NOT NULL, base_version INTEGER,
        signed BLOB NOT NULL, wire_bytes INTEGER NOT NULL, retained INTEGER NOT NULL DEFAULT 1
    ) STRICT;
    CREATE TABLE leases (
        lease_id TEXT PRIMARY KEY, peer_id TEXT NOT NULL, incarnation INTEGER NOT NULL,
        seed INTEGER NOT NULL, samples INTEGER NOT NULL, lease BLOB NOT NULL,
        fate TEXT NOT NULL, reason TEXT, step INTEGER, upload BLOB
    ) STRICT;
    CREATE INDEX leases_by_fate ON leases (fate, step);
    CREATE TABLE steps (step INTEGER PRIMARY KEY, record BLOB NOT NULL) STRICT;
    CREATE TABLE archive (
        peer_id TEXT NOT NULL, fate TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL,
        PRIMARY KEY (peer_id, fate, reason)
    ) STRICT;
    CREATE TABLE ledger (
        source TEXT NOT NULL, target TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL,
        PRIMARY KEY (source, target, reason)
    ) STRICT;
    """,
    """
    ALTER TABLE leases ADD COLUMN lease_digest BLOB;
    ALTER TABLE leases ADD COLUMN upload_digest BLOB;
    """,
)
"""A row from before a column was there has NULL in it: nothing to compare with."""


def stored(data: bytes, kind: type[MessageT]) -> MessageT:
    """Return a message that we have stored ourselves.

    Raises:
        StoreError: It is damaged. SQLite notices damaged pages, but not a wrong byte in a value;
            where that could be trained on, digests do.
    """
    try:
        return codec.decode(data, kind)
    except RemoteProtocolError as error:
        detail = f"the database holds a damaged {kind.__name__} ({error.detail[:60]})"
        raise StoreError(f"{detail}: put a copy of the whole folder in its place") from error


@dataclass(frozen=True)
class MemberRow:
    """A member as the store has it."""

    peer_id: PeerId
    incarnation: Incarnation
    name: str
    credential: bytes
    """Digest of the credential, never the credential itself."""
    join_body: bytes
    """Empty once it is gone: another incarnation sends its own."""
    live: bool
    relayed_bytes: int = 0


@dataclass(frozen=True)
class Standing:
    """What a peer did in all its lives, and what became of it."""

    peer_id: PeerId
    name: str
    relayed_bytes: int
    """In the lives that are over."""
    fates: dict[str, int]
    """Trajectories by `echo2p2p.rollouts.ledger.Place`."""
    reasons: dict[str, int]
    """The rejected ones by reason."""


@dataclass(frozen=True)
class VersionRow:
    """A publication."""

    version: Version
    step: Step
    generation: Generation
    dead: bool


@dataclass(frozen=True)
class PayloadRow:
    """An anchor or a delta whose bytes are in the blobs."""

    manifest_id: bytes
    version: Version
    base_version: Version | None
    signed: Signed
    wire_bytes: int


@dataclass(frozen=True)
class QueuedRow:
    """An accepted upload that no step has consumed yet."""

    lease: Lease
    peer_id: PeerId
    seed: int
    upload: Upload


@dataclass(frozen=True)
class OpenLease:
    """A lease that is in flight."""

    lease: Lease
    peer_id: PeerId
    incarnation: Incarnation
    seed: int


@dataclass(frozen=True)
class DamagedRow:
    """A lease in flight or queued, of which a byte is not what was written."""

    lease_id: LeaseId
    peer_id: PeerId
    seed: int
    samples: int


def lease_digest(lease: bytes, seed: int) -> Digest:
    """Return what is stored beside a lease's encoding and its item's seed."""
    return digest_of(lease + seed.to_bytes(8, "little", signed=True))


OPEN_ROWS: Final = (
    "SELECT lease_id, peer_id, seed, samples, lease, lease_digest, incarnation "
    "FROM leases WHERE fate = 'in_flight' ORDER BY rowid"
)
QUEUED_ROWS: Final = (
    "SELECT lease_id, peer_id, seed, samples, lease, lease_digest, upload, upload_digest "
    "FROM leases WHERE fate = 'queued' ORDER BY rowid"
)


def read_open(row: Sequence[object]) -> OpenLease | DamagedRow:
    """Return a lease in flight, from `OPEN_ROWS`."""
    damaged, data, digest = _read_named(row)
    if digest is not None and digest != lease_digest(data, damaged.seed):
        return damaged
    incarnation = cast("Incarnation", row[6])
    return OpenLease(stored(data, Lease), damaged.peer_id, incarnation, damaged.seed)


def read_queued(row: Sequence[object]) -> QueuedRow | DamagedRow:
    """Return an accepted upload, from `QUEUED_ROWS`."""
    damaged, data, digest = _read_named(row)
    upload, upload_digest = cast("tuple[bytes, bytes | None]", row[6:])
    if (digest is not None and digest != lease_digest(data, damaged.seed)) or (
        upload_digest is not None and upload_digest != digest_of(upload)
    ):
        return damaged
    lease, answer = stored(data, Lease), stored(upload, Upload)
    return QueuedRow(lease, damaged.peer_id, damaged.seed, answer)


def _read_named(row: Sequence[object]) -> tuple[DamagedRow, bytes, bytes | None]:
    lease_id, peer_id, seed, samples, data, digest = cast(
        "tuple[LeaseId, PeerId, int, int, bytes, bytes | None]", row[:6]
    )
    return DamagedRow(lease_id, peer_id, seed, samples), data, digest
