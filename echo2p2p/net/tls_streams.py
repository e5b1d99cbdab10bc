"""Relay links in mutual TLS: a `Streams` port around another one.

Both ends show a leaf of the run's authority before the first frame. Which host was dialled says
nothing of who is there, so no host name is checked: the link compares the leaf's owner with the
peer that it dialled, and with the one that the signed hello on top proves. The hello stays, since a
leaf knows neither the incarnation nor the identity key, and since links without TLS need it.

Nothing is read or written before the link asks for it: the TLS handshake is then a part of the
link's own, under the same deadline, and whoever does not get through it is in the same crowd of
strangers. Refused: who shows no certificate, one of another authority, or speaks no TLS.

`trio.SSLStream` does the same, for any protocol on top; here one reader and one writer are known to
be all, so that a read is one look at the socket and takes all records that are there. In bursts of
two packets, as shaped lines deliver, reading in TLS costs 1.5 ms a megabyte more than plain, and
3.5 there; and sixteen peers on two cores are at their limit. In either, OpenSSL does all of the
protocol.

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
from echo2p2p.net.ports import Accept, Endpoint, Streams, TlsServer
from echo2p2p.net.tls import link_contexts
from echo2p2p.net.trust import link_owner

READ_BYTES: Final = 64 * 1024
HANDSHAKE_BYTES: Final = 16 * 1024
"""Read at once."""


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
        stream = await self._inner.dial(endpoint, timeout_s=timeout_s)
        return TlsStream(stream, self._contexts[0], server_side=False)

    def listen(self, endpoint: Endpoint, accept: Accept) -> AbstractAsyncContextManager[Endpoint]:
        """See `Streams`; ``accept`` gets a stream that has shaken no hands yet."""

        async def secured(stream: trio.abc.Stream, host: str) -> None:
            if self._contexts is not None:
                await accept(TlsStream(stream, self._contexts[1], server_side=True), host)

        return self._inner.listen(endpoint, secured)


class TlsStream(trio.abc.Stream):
    """TLS over another stream, for one task that reads and one that writes.

    The first read or write shakes hands, if `do_handshake` has not. An end without
    ``close_notify`` is an end like any other.

    Args:
        transport: Owned from here on.
        context: Whose certificates are shown and believed.
        server_side: Whether the other side dialled.
    """

    def __init__(
        self, transport: trio.abc.Stream, context: ssl.SSLContext, *, server_side: bool
    ) -> None:
        self.transport_stream = transport
        """What carries the encrypted bytes."""
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._coming, self._going, server_side=server_side)
        self._is_shaken, self._shaking = False, trio.Lock()
        self._is_more = True
        """Records may be there that were read from the transport, and not by the caller."""

    def certificate(self) -> bytes:
        """Return what the other side has shown, in DER; its context must have asked for it."""
        shown = self._tls.getpeercert(binary_form=True)
        assert shown is not None
        return shown

    async def do_handshake(self) -> None:
        """Shake hands, if that has not been done.

        Raises:
            trio.BrokenResourceError: The other side does not, or not so.
        """
        async with self._shaking:
            while not self._is_shaken:
                done = True
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    done = False
                except ssl.SSLError as error:
                    raise trio.BrokenResourceError from error
                if self._going.pending:
                    await self.transport_stream.send_all(self._going.read())
                self._is_shaken = done
                if not done:
                    await self._refill(HANDSHAKE_BYTES)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `trio.abc.SendStream`."""
        if not self._is_shaken:
            await self.do_handshake()
        view, sent = memoryview(data), 0
        try:
            while sent < len(view):
                sent += self._tls.write(view[sent:])
        except ssl.SSLError as error:
            raise trio.BrokenResourceError from error
        # With what was written goes what TLS itself had to answer since.
        await self.transport_stream.send_all(self._going.read())

    async def wait_send_all_might_not_block(self) -> None:
        """See `trio.abc.SendStream`."""
        await self.transport_stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """See `trio.abc.ReceiveStream`."""
        wanted = READ_BYTES if max_bytes is None else max_bytes
        if wanted < 1:
            raise ValueError("max_bytes must be at least 1")
        if not self._is_shaken:
            await self.do_handshake()
        if self._is_more and (data := self._take(wanted)) is not None:
            await trio.lowlevel.checkpoint()
            return data
        while True:
            await self._refill(min(wanted, READ_BYTES))
            data = self._take(wanted)
            if data is not None:
                return data

    async def _refill(self, count: int) -> None:
        if data := await self.transport_stream.receive_some(count):
            self._coming.write(data)
        else:
            self._coming.write_eof()

    def _take(self, wanted: int) -> bytes | None:
        """Return what is there; empty: it is the end; ``None``: not a whole record."""
        parts, count, at_end = [], 0, False
        self._is_more = True
        try:
            while count < wanted and not at_end:
                part = self._tls.read(wanted - count)
                at_end = not part
                count += len(part)
                parts.append(part)
        except ssl.SSLWantReadError:
            self._is_more = False
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            at_end = True
        except ssl.SSLError as error:
            raise trio.BrokenResourceError from error
        if not count and not at_end:
            return None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def aclose(self) -> None:
        """See `trio.abc.AsyncResource`; without a word to the other side."""
        await self.transport_stream.aclose()


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
    if not isinstance(stream, TlsStream):
        return expected
    try:
        await stream.do_handshake()
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        raise LinkError(f"no TLS handshake: {_cause(error.__cause__)}") from error
    owner = link_owner(stream.certificate())
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
