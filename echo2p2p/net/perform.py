"""Effects of the broadcast core as frames on a link."""

from __future__ import annotations

from collections.abc import Callable

from echo2p2p.broadcast.effects import (
    CloseLink,
    Effect,
    SendCancel,
    SendChunk,
    SendHave,
    SendOffer,
    SendReject,
    SendRequest,
    SendWant,
)
from echo2p2p.ids import ManifestId
from echo2p2p.net.link import Link
from echo2p2p.wire.arrays import from_tokens
from echo2p2p.wire.messages import Cancel, Have, Offer, Reject, Request, Signed, Want


def perform_effect(link: Link, effect: Effect, manifest: Callable[[ManifestId], Signed]) -> None:
    """Queue what ``effect`` wants sent on its link; ``manifest`` is asked for what is offered."""
    match effect:
        case SendChunk(manifest_id=key, index=index):
            link.send_chunk_nowait(key, index)
        case SendHave(manifest_id=key, indices=indices, ask=ask):
            numbers = from_tokens(list(indices))
            link.send_nowait(Have(manifest_id=key, indices=numbers, ask=ask))
        case SendRequest(manifest_id=key, index=index):
            link.send_nowait(Request(manifest_id=key, index=index))
        case SendCancel(manifest_id=key, index=index):
            link.send_nowait(Cancel(manifest_id=key, index=index))
        case SendReject(manifest_id=key, index=index, reason=reason):
            link.send_nowait(Reject(manifest_id=key, index=index, reason=reason))
        case SendOffer(manifest_id=key):
            link.send_nowait(Offer(manifest=manifest(key)))
        case SendWant(manifest_id=key):
            link.send_nowait(Want(manifest_id=key))
        case CloseLink(detail=detail):
            link.close(detail)
