"""The digest that says two flat states are the same.

The problem: a state of gigabytes is proved by one digest in a manifest, but a decoder that works
block by block wants to find a wrong block when it is written, not at the end. The idea: digest
fixed blocks of the flat state, and digest the list of those with the layout's digest before it:
equal bits under another table are another state, as a delta never crosses layouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from echo2p2p.errors import LocalProtocolError
from echo2p2p.ids import Digest, digest_of
from echo2p2p.limits import MIB
from echo2p2p.weights.layout import Layout

STATE_BLOCK_BYTES: Final = 1 * MIB
"""Part of the protocol. Block i holds bytes from ``i * STATE_BLOCK_BYTES``; the last is short."""

_DOMAIN: Final = b"echo2p2p state 0\x00"


def state_digest(layout: Layout, state: bytes | bytearray | memoryview) -> Digest:
    """Return the digest that manifests carry.

    Raises:
        LocalProtocolError: A state of another length than the layout's.
    """
    return root_digest(layout, block_digests(layout, state))


def block_digests(layout: Layout, state: bytes | bytearray | memoryview) -> tuple[Digest, ...]:
    """Return the digest of each block, in order; none for an empty state.

    Raises:
        LocalProtocolError: A state of another length than the layout's.
    """
    view = memoryview(state).cast("B")
    if len(view) != layout.total_bytes:
        raise LocalProtocolError(f"state of {len(view)} bytes, layout of {layout.total_bytes}")
    return tuple(
        digest_of(view[start : start + STATE_BLOCK_BYTES])
        for start in range(0, len(view), STATE_BLOCK_BYTES)
    )


def root_digest(layout: Layout, digests: Iterable[Digest]) -> Digest:
    """Return the state digest of a state with these block digests, in order."""
    return digest_of(b"".join((_DOMAIN, layout.digest, *digests)))
