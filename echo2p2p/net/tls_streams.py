"""Relay links in mutual TLS: a `Streams` port around another one.

Both ends show a leaf of the run's authority before the first frame. Which host was dialled says
nothing of who is there, so no host name is checked: the link compares the leaf's owner with the
peer that it dialled, and with the one that the signed hello on top proves. The hello stays, since a
leaf knows neither the incarnation nor the identity key, and since links without TLS need it.

Nothing is read or written before the link asks for it: the TLS handshake is then a part of the
link's own, under the same deadline, and whoever does not get through it is in the same crowd of
strangers. Refused: who shows no certificate, one of another authority, or speaks no TLS.

Rejected: a handshake inside of `dial` and `listen`, where silent strangers would hold places that
nobody counts; ``close_notify`` (RFC 8446 wants it against cut-off messages, but frames carry their
lengths), since who reads no more could make us wait for it.
"""

from __future__ import annotations

import ssl
from contextlib import AbstractAsyncContextManager
from typing import Final

import trio

from echo2p2p.errors import LinkError, RemoteProtocolError, Violation
from echo2p2p.ids import PeerId
from echo2p2p.net.departure import DepartingStream
from echo2p2p.net.ports import Accept, Endpoint, Streams, TlsServer
from echo2p2p.net.tls import link_contexts
from echo2p2p.net.trust import link_owner

RECORD_HEAD_BYTES: Final = 5
"""Kind, version, length of the body (RFC 8446, 5.1)."""


class Records:
    """How much is lacking of the TLS record that is being received. Pure.

    A record can be read when all of it is there. On a slow line it comes in a dozen packets, and
    without this each would wake us for nothing.
    """

    def __init__(self) -> None:
        self._head = b""
        """Of a record of which no more is there."""
        self._lacking = 0

    def lacking(self, data: bytes | bytearray) -> int:
        """Return how many bytes must follow ``data`` before the next record can be read.

        0 where nobody knows: between two records, or in a record's head.
        """
        at = min(self._lacking, len(data))
        self._lacking -= at
        while at < len(data):
            part = bytes(data[at : at + RECORD_HEAD_BYTES - len(self._head)])
            self._head += part
            at += len(part)
            if len(self._head) == RECORD_HEAD_BYTES:
                body = int.from_bytes(self._head[3:], "big")
                self._head = b""
                self._lacking = max(0, body - (len(data) - at))
                at += body
        return self._lacking


class TlsStreams:
    """`Streams` in TLS. It must be the outermost: `shake_hands` knows its streams by their type.

    Args:
        inner: Carries the encrypted bytes.
        material: Our leaf; ``None``: it comes by `show`, and who connects before is sent away.
    """

    def __init__(self, inner: Streams, material: TlsServer | None = None) -> None:
        self._inner = inner
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
        if material is not None:
            self.show(material)

    def show(self, material: TlsServer) -> None:
        """Show this leaf on links from now on.

        Raises:
            ConfigError: The PEM texts are damaged or do not belong together.
        """
        self._contexts = link_contexts(material)

    async def dial(self, endpoint: Endpoint, *, timeout_s: float) -> trio.abc.Stream:
        """Connect, without a handshake yet; not before there is a leaf.

        Raises:
            LinkError: Refused, unreachable or too slow.
        """
        assert self._contexts is not None, "nobody is dialled before we are a member"
        stream = _woken(await self._inner.dial(endpoint, timeout_s=timeout_s))
        return trio.SSLStream(stream, self._contexts[0], https_compatible=True)

    def listen(self, endpoint: Endpoint, accept: Accept) -> AbstractAsyncContextManager[Endpoint]:
        """See `Streams`; ``accept`` gets a stream that has shaken no hands yet."""

        async def secured(stream: trio.abc.Stream, host: str) -> None:
            if self._contexts is not None:
                context = self._contexts[1]
                stream = _woken(stream)
                await accept(
                    trio.SSLStream(stream, context, server_side=True, https_compatible=True), host
                )

        return self._inner.listen(endpoint, secured)


def _woken(stream: trio.abc.Stream) -> trio.abc.Stream:
    """Let a stream wake us for whole records."""
    if isinstance(stream, DepartingStream):
        stream.lacking = Records().lacking
    return stream


async def shake_hands(stream: trio.abc.Stream, expected: PeerId | None) -> PeerId | None:
    """Shake hands in TLS, if the stream is in TLS; return who the hello must be of, if known.

    Waits without limit. Where we dialled, the other end may still refuse our own leaf: TLS 1.3 says
    so by an end or an error of the first read.

    Args:
        stream: From `TlsStreams`, or plain.
        expected: Whom we dialled; ``None``: any member.

    Raises:
        LinkError: The other end has no leaf of the run, or speaks no TLS, or has gone.
        RemoteProtocolError: It has one that is nobody's, or another one's than ``expected``.
    """
    if not isinstance(stream, trio.SSLStream):
        return expected
    try:
        await stream.do_handshake()
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise LinkError(f"no TLS handshake: {_cause(error.__cause__)}") from error
    owner = link_owner(stream.getpeercert(binary_form=True))
    if expected not in {None, owner}:
        detail = f"{owner}'s certificate answers for {expected}"
        raise RemoteProtocolError(Violation.NOT_A_MEMBER, detail)
    return owner


def _cause(error: BaseException | None) -> str:
    """Return the error in words."""
    match error:
        case ssl.SSLCertVerificationError(verify_message=str(message)):
            return message
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError() | ssl.SSLSyscallError():
            return "the connection was closed"
        case ssl.SSLError(reason=str(reason)):
            return reason.lower().replace("_", " ")
        case _:
            return "the connection broke"
