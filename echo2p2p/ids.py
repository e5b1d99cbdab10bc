"""Distinct types for what is otherwise a string or a number, and how each is made.

`NewType` costs nothing at run time; mypy refuses a step where a version is meant.
"""

from __future__ import annotations

from typing import Final, NewType

from blake3 import blake3

RunId = NewType("RunId", str)
"""Hex; drawn when the run's folder is made."""

PeerId = NewType("PeerId", str)
"""Hex digest of the peer's identity key: cannot be chosen, survives restarts."""

Incarnation = NewType("Incarnation", int)
"""Counts a peer's joins, from 1."""

Version = NewType("Version", int)
"""Publication number, from 0; never reused, whatever happens to the learner."""

Step = NewType("Step", int)
"""Optimizer steps that the learner has taken."""

Generation = NewType("Generation", int)
"""Counts the learner's restarts from a checkpoint, from 0."""

LeaseId = NewType("LeaseId", str)
"""Hex; names one generation call for ever."""

ManifestId = NewType("ManifestId", bytes)
"""16 bytes of the digest of a signed manifest header: names one payload on the relay links."""

ChunkIndex = NewType("ChunkIndex", int)

Digest = NewType("Digest", bytes)
"""32 bytes of BLAKE3."""

DIGEST_BYTES: Final = 32
MANIFEST_ID_BYTES: Final = 16
SOURCE: Final = PeerId("source")
"""How the coordinator's own relay calls itself; no key hashes to it."""


def digest_of(data: bytes | bytearray | memoryview) -> Digest:
    """Return the 32-byte BLAKE3 digest of ``data``."""
    return Digest(blake3(data).digest())


def peer_id_of(public_key: bytes) -> PeerId:
    """Return the id of the peer whose raw 32-byte Ed25519 identity key this is."""
    return PeerId(blake3(b"echo2p2p peer 0" + public_key).hexdigest(length=16))


def manifest_id_of(body: bytes) -> ManifestId:
    """Return the short name of the manifest header with this encoding."""
    return ManifestId(blake3(body).digest(length=MANIFEST_ID_BYTES))
