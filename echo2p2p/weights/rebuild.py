"""A payload that a peer makes by itself from the state it holds, to serve it to others.

An anchor is never sent to a peer that holds its version: the encoding is canonical, so the peer
builds the publisher's very chunks. Whether it did is known before a byte is served, from the
digest of chunk 0 in the signed header.
"""

from __future__ import annotations

from echo2p2p.errors import IntegrityError
from echo2p2p.weights.anchor import anchor_parts
from echo2p2p.weights.assembly import Assembly
from echo2p2p.weights.chunks import split
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.messages import ManifestHeader


def rebuild_anchor(
    header: ManifestHeader,
    layout: Layout,
    state: bytes | bytearray | memoryview,
    memory: memoryview | None = None,
    *,
    threads: int = 1,
) -> Assembly | None:
    """Return the complete assembly of a checked header's anchor, or ``None`` if it cannot be.

    It cannot if the header is a delta's, if ``state`` is another version's, or if our release of
    zstd chooses other bytes than the publisher's: the chunks must then come from others.

    Args:
        header: Of the anchor.
        layout: Of the state.
        state: Must not change meanwhile.
        memory: Where to put the payload, at least as long as that; default: our own.
        threads: How many to work in.
    """
    if header.base_version is not None or header.layout_digest != layout.digest:
        return None
    if state_digest(layout, state) != header.result_digest:
        return None
    payload = memoryview(bytearray(header.payload_bytes)) if memory is None else memory
    payload, at = payload[: header.payload_bytes], 0
    for part in anchor_parts(layout, state, threads=threads):
        if at + len(part) > len(payload):
            return None
        payload[at : at + len(part)] = part
        at += len(part)
    try:
        return Assembly.whole(header, payload[:at], split(payload[:at], header.chunk_bytes).index)
    except IntegrityError:
        return None
