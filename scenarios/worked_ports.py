"""Ports that let something happen with each use: for who charges for work, or counts it.

Each does what the port does that it stands before. `scenarios.costs` lets work take time in the
virtual world, `scenarios.live_usage` counts what a real process does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

import trio

from echo2p2p.net.ports import (
    Accept,
    Endpoint,
    Handler,
    HttpClient,
    HttpClients,
    HttpServer,
    Request,
    Response,
    Route,
    Streams,
    TlsClient,
)

Work = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class WorkedStreams:
    """`Streams` with work in them."""

    inner: Streams
    dialled: Callable[[float], Awaitable[None]]
    """After a dial, told how many seconds it took."""
    piece: Work
    """Before whatever is written at once, and after whatever is read at once."""

    async def dial(self, endpoint: Endpoint, *, timeout_s: float) -> trio.abc.Stream:
        """See `Streams`."""
        began_s = trio.current_time()
        stream = await self.inner.dial(endpoint, timeout_s=timeout_s)
        try:
            await self.dialled(trio.current_time() - began_s)
        except trio.Cancelled:
            await trio.aclose_forcefully(stream)
            raise
        return _WorkedStream(stream, self.piece)

    def listen(self, endpoint: Endpoint, accept: Accept) -> AbstractAsyncContextManager[Endpoint]:
        """See `Streams`."""
        return self.inner.listen(
            endpoint, lambda stream, host: accept(_WorkedStream(stream, self.piece), host)
        )


class _WorkedStream(trio.abc.Stream):
    """One connection."""

    def __init__(self, stream: trio.abc.Stream, piece: Work) -> None:
        self._stream = stream
        self._piece = piece

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Work, then send."""
        await self._piece()
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """See `trio.abc.SendStream`."""
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Read, then work."""
        data = await self._stream.receive_some(max_bytes)
        with trio.CancelScope(shield=True):  # what was read must not be lost
            await self._piece()
        return data

    async def aclose(self) -> None:
        """Close the real one."""
        await self._stream.aclose()


@dataclass(frozen=True)
class WorkedClients:
    """`HttpClients` with work before each request."""

    inner: HttpClients
    work: Work

    @asynccontextmanager
    async def connect(self, url: str, tls: TlsClient | None) -> AsyncIterator[HttpClient]:
        """See `HttpClients`."""
        async with self.inner.connect(url, tls) as client:
            yield _WorkedClient(client, self.work)


@dataclass(frozen=True)
class _WorkedClient:
    """`HttpClient` of one server."""

    inner: HttpClient
    work: Work

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Response:
        """See `HttpClient`."""
        await self.work()
        return await self.inner.request(
            method, path, body=body, headers=headers, timeout_s=timeout_s
        )


@dataclass(frozen=True)
class WorkedServer:
    """`HttpServer` with work before each answer."""

    inner: HttpServer
    work: Work

    def serve(
        self, routes: tuple[Route, ...], endpoint: Endpoint
    ) -> AbstractAsyncContextManager[Endpoint]:
        """See `HttpServer`."""
        worked = tuple(replace(route, handler=self._worked(route.handler)) for route in routes)
        return self.inner.serve(worked, endpoint)

    def _worked(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            await self.work()
            return await handler(request)

        return handle
