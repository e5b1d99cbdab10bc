"""The signed table of contents of one payload: how it is made, and when it is believable.

The problem: everything a peer allocates, requests and verifies follows from the header, which
arrives over the wire. The signature says that the run's publisher wrote it (see
`echo2p2p.wire.signing`); this module says that it makes sense. Only a header that passed
`check_header` may reach an `Assembly`.
"""

from __future__ import annotations

import math
from typing import Final, Literal

from echo2p2p.errors import LocalProtocolError, RemoteProtocolError, Violation
from echo2p2p.ids import (
    DIGEST_BYTES,
    Digest,
    Generation,
    ManifestId,
    RunId,
    Step,
    Version,
    manifest_id_of,
)
from echo2p2p.limits import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, CHUNKS_MAX, PROTOCOL
from echo2p2p.weights.chunks import Chunked
from echo2p2p.weights.layout import Layout
from echo2p2p.wire.messages import ManifestHeader, Signed

NAME_CHARACTERS_MAX: Final = 128
"""Of a run id or chain id; ours have 32."""

COUNTER_MAX: Final = (1 << 63) - 1
"""Of versions, steps and generations: what a database column holds."""


def build_header(
    *,
    content: Literal["model", "adapter"],
    run_id: RunId,
    version: Version,
    chain_id: str,
    step: Step,
    generation: Generation,
    base: tuple[Version, Digest] | None,
    result_digest: Digest,
    layout: Layout,
    chunked: Chunked,
    expires_at_s: float = 0.0,
) -> ManifestHeader:
    """Return the header of a payload that is at hand, ready to be signed.

    Args:
        content: What the state is.
        run_id: The run.
        version: Publication number.
        chain_id: As in `ManifestHeader`.
        step: Optimizer steps behind the weights.
        generation: Learner restarts before them.
        base: Version and state digest that a delta applies to; ``None`` for an anchor.
        result_digest: State digest after decoding.
        layout: Of the state.
        chunked: The payload.
        expires_at_s: In the coordinator's clock; 0: never.

    Raises:
        LocalProtocolError: The parts contradict each other.
    """
    header = ManifestHeader(
        protocol=PROTOCOL,
        content=content,
        run_id=run_id,
        version=version,
        chain_id=chain_id,
        step=step,
        generation=generation,
        base_version=None if base is None else base[0],
        base_digest=None if base is None else base[1],
        result_digest=result_digest,
        layout_digest=layout.digest,
        index_digest=chunked.index_digest,
        index_bytes=len(chunked.index),
        payload_bytes=len(chunked.payload),
        chunk_bytes=chunked.chunk_bytes,
        expires_at_s=expires_at_s,
    )
    try:
        check_header(header)
    except RemoteProtocolError as error:
        raise LocalProtocolError(f"our own header: {error.detail}") from error
    return header


def check_header(header: ManifestHeader) -> None:
    """Check that the header's fields fit each other and the protocol's limits.

    Signature, run, chain and expiry are the caller's to compare.

    Raises:
        RemoteProtocolError: Another protocol, or nonsense; since the header is signed, the
            publisher is at fault and not the peer that passed it on.
    """
    if header.protocol != PROTOCOL:
        raise RemoteProtocolError(
            Violation.WRONG_PROTOCOL, f"manifest of protocol {header.protocol}, ours is {PROTOCOL}"
        )
    for name in (header.run_id, header.chain_id):
        if not 0 < len(name) <= NAME_CHARACTERS_MAX:
            raise _malformed(f"a run or chain id of {len(name)} characters")
    for counter in (header.version, header.step, header.generation):
        if not 0 <= counter <= COUNTER_MAX:
            raise _malformed(f"version, step or generation {counter}")
    if not (math.isfinite(header.expires_at_s) and header.expires_at_s >= 0):
        raise _malformed(f"expiry {header.expires_at_s}")
    _check_digests(header)
    _check_sizes(header)


def is_step(header: ManifestHeader) -> bool:
    """Return whether it leads from the version before: all peers need that, as soon as can be."""
    return header.base_version is not None and header.base_version + 1 == header.version


def chunk_count(header: ManifestHeader) -> int:
    """Return the number of chunks of a checked header, chunk 0 included."""
    return 1 + header.index_bytes // DIGEST_BYTES


def chunk_length(header: ManifestHeader, index: int) -> int:
    """Return the bytes of chunk ``index`` of a checked header.

    Raises:
        LocalProtocolError: There is no such chunk.
    """
    if not 0 <= index < chunk_count(header):
        raise LocalProtocolError(f"chunk {index} of {chunk_count(header)}")
    if index == 0:
        return header.index_bytes
    return min(header.chunk_bytes, header.payload_bytes - (index - 1) * header.chunk_bytes)


def manifest_id(signed: Signed) -> ManifestId:
    """Return the payload's name on the relay links; the signature has no part in it."""
    return manifest_id_of(signed.body)


def _check_digests(header: ManifestHeader) -> None:
    if (header.base_version is None) != (header.base_digest is None):
        raise _malformed("a base version and its digest go together")
    if header.base_version is not None and not 0 <= header.base_version < header.version:
        raise _malformed(f"version {header.version} on base {header.base_version}")
    digests = [header.result_digest, header.layout_digest, header.index_digest]
    if header.base_digest is not None:
        digests.append(header.base_digest)
    if any(len(digest) != DIGEST_BYTES for digest in digests):
        raise _malformed(f"digests of {[len(digest) for digest in digests]} bytes")


def _check_sizes(header: ManifestHeader) -> None:
    if not CHUNK_BYTES_MIN <= header.chunk_bytes <= CHUNK_BYTES_MAX:
        raise _malformed(f"chunks of {header.chunk_bytes} bytes")
    if not 0 < header.payload_bytes <= CHUNKS_MAX * header.chunk_bytes:
        raise _malformed(
            f"a payload of {header.payload_bytes} bytes in chunks of {header.chunk_bytes}"
        )
    if header.index_bytes != DIGEST_BYTES * -(-header.payload_bytes // header.chunk_bytes):
        raise _malformed(f"an index of {header.index_bytes} bytes for {header.payload_bytes}")


def _malformed(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError(Violation.MALFORMED, f"manifest: {detail}")
