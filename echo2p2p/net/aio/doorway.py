"""Connections from the moment they are accepted, so that none of them is uncounted.

asyncio's own server shows a connection only after its TLS handshake. Until then it holds an open
file, and enough strangers that never finish theirs would leave none for the store. So connections
are accepted here, and count from then on; when there are too many, one gives way
(`echo2p2p.net.crowd`): of the address that has most, the oldest, in whatever state it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Callable
from typing import Final

from echo2p2p.net.crowd import Crowd

BACKLOG: Final = 512
NO_FILES_PAUSE_S: Final = 0.1
"""Before accepting again when the system has refused: it has no files left, for us or at all."""


class _Connection:
    """One of them, in its handshake or after."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.protocol: asyncio.Protocol | None = None
        self.opening: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None

    def cut(self) -> None:
        """End it now; whoever speaks on it hears of that in the usual way."""
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()


class Doorway:
    """The listening sockets of one server and the connections that came through them.

    All calls belong to the loop's thread.

    Args:
        loop: The running loop.
        make_protocol: Makes what speaks on a connection; it calls `lost` with itself at the end.
        connections_max: How many there may be.
        context: TLS, or ``None``.
        handshake_s: How long a TLS handshake may take.
        close_s: How long a TLS connection may take to end.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        connections_max: int,
        context: ssl.SSLContext | None,
        handshake_s: float,
        close_s: float,
    ) -> None:
        self._loop = loop
        self._make_protocol = make_protocol
        self._context = context
        self._handshake_s = None if context is None else handshake_s
        self._close_s = None if context is None else close_s
        self._crowd: Crowd[_Connection] = Crowd(connections_max)
        self._by_protocol: dict[asyncio.BaseProtocol, _Connection] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []

    async def bind(self, host: str, port: int) -> tuple[str, int]:
        """Take the address; return the real one.

        Raises:
            OSError: It cannot be had.
        """
        # asyncio knows how to bind a name with several addresses; it only must not accept.
        server = await self._loop.create_server(asyncio.Protocol, host, port, start_serving=False)
        self._listeners = [each.dup() for each in server.sockets]
        server.close()
        for listener in self._listeners:
            listener.setblocking(False)
        at: tuple[str, int] = self._listeners[0].getsockname()[:2]
        return at

    def accept(self) -> None:
        """Accept connections from now on."""
        for listener in self._listeners:
            listener.listen(BACKLOG)
            self._accepting.append(self._loop.create_task(self._accept_all(listener)))

    def lost(self, protocol: asyncio.BaseProtocol) -> None:
        """Forget a connection that has ended."""
        connection = self._by_protocol.pop(protocol, None)
        if connection is not None:
            self._crowd.leave(connection)

    async def close(self) -> None:
        """Accept no more, and cut what is still in its handshake."""
        tasks = [*self._accepting, *self._opening]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for listener in self._listeners:
            listener.close()

    async def _accept_all(self, listener: socket.socket) -> None:
        while True:
            try:
                stream, address = await self._loop.sock_accept(listener)
            except ConnectionError:
                continue
            except OSError:
                await asyncio.sleep(NO_FILES_PAUSE_S)
                continue
            connection = _Connection(stream)
            in_the_way = self._crowd.enter(connection, address[0])
            if in_the_way is not None:
                in_the_way.cut()
            task = connection.opening = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(functools.partial(self._opened, connection))

    async def _open(self, connection: _Connection) -> None:
        """Shake hands, and hand the connection over; failures are the other side's business."""

        def make() -> asyncio.Protocol:
            protocol = connection.protocol = self._make_protocol()
            self._by_protocol[protocol] = connection
            return protocol

        with contextlib.suppress(OSError):
            connection.transport, _ = await self._loop.connect_accepted_socket(
                make,
                connection.stream,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=self._close_s,
            )

    def _opened(self, connection: _Connection, task: asyncio.Task[None]) -> None:
        """Clean up after a connection that came to nothing; others end in `lost`."""
        self._opening.discard(task)
        if connection.transport is None:
            self._crowd.leave(connection)
            if connection.protocol is None:
                connection.stream.close()  # cancelled before asyncio had it
            else:
                self._by_protocol.pop(connection.protocol, None)
