"""A payload cut into chunks, the unit of transfer, hashing, relay and retry.

The problem: a relay must be able to verify a chunk before it passes it on, without the rest of
the payload. The idea: chunk 0, the index, is the list of the other chunks' digests; its own
digest stands in the signed header. All other chunks are byte ranges of the payload, of one length
but the last, so that offsets follow from the index number and never from a peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo2p2p.errors import LocalProtocolError
from echo2p2p.ids import DIGEST_BYTES, Digest, digest_of
from echo2p2p.limits import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, CHUNKS_MAX

CHUNKS_WANTED: Final = 400
"""Enough that every peer of a fleet has something the others lack; few enough for small indexes."""


@dataclass(frozen=True)
class Chunked:
    """A payload and its index.

    Attributes:
        index: Digests of chunks 1.., 32 bytes each; chunk 0.
        payload: Chunks 1.. in one piece.
        chunk_bytes: Length of every chunk but 0 and the last.
    """

    index: bytes
    payload: memoryview
    chunk_bytes: int

    @property
    def count(self) -> int:
        """Number of chunks, chunk 0 included."""
        return 1 + len(self.index) // DIGEST_BYTES

    @property
    def index_digest(self) -> Digest:
        """Digest of chunk 0, as in the manifest."""
        return digest_of(self.index)

    def chunk(self, index: int) -> memoryview:
        """Return chunk ``index``, 0 being the index, sharing memory.

        Raises:
            LocalProtocolError: There is no such chunk.
        """
        if not 0 <= index < self.count:
            raise LocalProtocolError(f"chunk {index} of {self.count}")
        if index == 0:
            return memoryview(self.index)
        return self.payload[(index - 1) * self.chunk_bytes : index * self.chunk_bytes]


def chunk_bytes_for(payload_bytes: int, *, chunk_bytes_min: int, chunk_bytes_max: int) -> int:
    """Return the chunk length for a payload: about `CHUNKS_WANTED` chunks, between the two bounds.

    A payload that would then have over `CHUNKS_MAX` chunks gets longer ones, whatever the user's
    upper bound.

    Raises:
        LocalProtocolError: Bounds crossed or outside the protocol's, or a payload of over 4 TiB.
    """
    if not CHUNK_BYTES_MIN <= chunk_bytes_min <= chunk_bytes_max <= CHUNK_BYTES_MAX:
        raise LocalProtocolError(f"chunk lengths from {chunk_bytes_min} to {chunk_bytes_max}")
    wanted = min(max(-(-payload_bytes // CHUNKS_WANTED), chunk_bytes_min), chunk_bytes_max)
    needed = -(-payload_bytes // CHUNKS_MAX)
    if needed > CHUNK_BYTES_MAX:
        raise LocalProtocolError(f"a payload of {payload_bytes} bytes fits no manifest")
    return max(wanted, needed)


def split(payload: bytes | bytearray | memoryview, chunk_bytes: int) -> Chunked:
    """Cut ``payload``, which is shared and must not change, into chunks and digest them.

    Raises:
        LocalProtocolError: Nothing to cut (no payload is empty, see `echo2p2p.weights.blocks`),
            or a length that the protocol forbids.
    """
    view = memoryview(payload).cast("B").toreadonly()
    if not CHUNK_BYTES_MIN <= chunk_bytes <= CHUNK_BYTES_MAX:
        raise LocalProtocolError(f"chunks of {chunk_bytes} bytes")
    if not 0 < len(view) <= CHUNKS_MAX * chunk_bytes:
        raise LocalProtocolError(f"a payload of {len(view)} bytes in chunks of {chunk_bytes}")
    starts = range(0, len(view), chunk_bytes)
    index = b"".join(digest_of(view[start : start + chunk_bytes]) for start in starts)
    return Chunked(index, view, chunk_bytes)
