"""The real `Streams` port: TCP by trio, dialled with happy eyeballs, without Nagle's delay."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator
from typing import Final

import trio

from echo2p2p.errors import ConfigError, LinkError
from echo2p2p.net.departure import DepartingStream
from echo2p2p.net.ports import Accept, Endpoint

_PATH: Final = "relay.listen"

_MENDS: Final = {
    errno.EADDRINUSE: "choose another port, or stop the process that has it",
    errno.EACCES: "choose a port above 1023",
    errno.EADDRNOTAVAIL: "use an address of this machine, or 0.0.0.0 for all",
}


class TcpStreams:
    """`Streams` over TCP.

    Args:
        receive_buffer_bytes: What the kernel takes in for a stream before it is read, about; by
            default it decides by itself. Small buffers let a slow reader slow the sender down.
    """

    def __init__(self, *, receive_buffer_bytes: int | None = None) -> None:
        self._receive_buffer_bytes = receive_buffer_bytes

    async def dial(self, endpoint: Endpoint, *, timeout_s: float) -> trio.abc.Stream:
        """Connect; of several addresses the first that answers is taken.

        Raises:
            LinkError: Refused, unreachable, unknown or too slow.
        """
        where = _show(endpoint)
        try:
            with trio.fail_after(timeout_s):
                stream = await trio.open_tcp_stream(endpoint.host, endpoint.port)
                self._limit(stream.socket)
                return DepartingStream(stream)
        except trio.TooSlowError as error:
            raise LinkError(f"connecting to {where}: no answer in {timeout_s:g} s") from error
        except (OSError, ValueError) as error:
            raise LinkError(f"connecting to {where}: {_cause(error)}") from error

    @contextlib.asynccontextmanager
    async def listen(self, endpoint: Endpoint, accept: Accept) -> AsyncIterator[Endpoint]:
        """Listen on ``endpoint``; an empty host means all IPv4 and IPv6 addresses.

        With port 0 the system chooses; a host with several addresses then listens on one only.

        Raises:
            ConfigError: The address cannot be bound.
        """
        listeners = await _bind(endpoint)
        for listener in listeners:
            self._limit(listener.socket)  # accepted streams inherit it

        async def serve(stream: trio.SocketStream) -> None:
            async with stream:
                await accept(DepartingStream(stream), _remote_host(stream))

        async with contextlib.AsyncExitStack() as stack:
            for listener in listeners:
                await stack.enter_async_context(listener)
            nursery = await stack.enter_async_context(trio.open_nursery())
            nursery.start_soon(trio.serve_listeners, serve, listeners)
            yield Endpoint(endpoint.host, listeners[0].socket.getsockname()[1])
            nursery.cancel_scope.cancel()

    def _limit(self, socket: trio.socket.SocketType) -> None:
        if self._receive_buffer_bytes is not None:
            size = self._receive_buffer_bytes
            socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, size)


def _remote_host(stream: trio.SocketStream) -> str:
    """Return the other side's address; empty if it has gone already."""
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return ""


async def _bind(endpoint: Endpoint) -> list[trio.SocketListener]:
    try:
        listeners = await trio.open_tcp_listeners(endpoint.port, host=endpoint.host or None)
    except (OSError, ValueError, OverflowError) as error:
        mend = _MENDS.get(getattr(error, "errno", None) or 0, "choose another address")
        detail = f"cannot listen on {_show(endpoint)}: {_cause(error)}; {mend}"
        raise ConfigError(_PATH, detail) from error
    if endpoint.port == 0:
        for listener in listeners[1:]:
            await listener.aclose()
        del listeners[1:]
    return listeners


def _show(endpoint: Endpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{host}:{endpoint.port}"


def _cause(error: Exception) -> str:
    """Return the error in words, lower case; trio wraps one that several addresses agree on."""
    causes = [error, *getattr(error.__cause__, "exceptions", ()), error.__cause__]
    numbers = [cause.errno for cause in causes if isinstance(cause, OSError) and cause.errno]
    if numbers and numbers[0] > 0:
        return os.strerror(numbers[0]).lower()
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split()).lower()
