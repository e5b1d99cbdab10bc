"""The HTTP server: aiohttp parses, a trio task answers.

Refused before it costs memory: what the route does not admit (`Route.admit`), bodies longer than
their route allows, more bodies at once than `HttpLimits` has room for, in all or of one client,
anything compressed, connections beyond a number, clients that send or read too slowly.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import aiohttp
import trio
from aiohttp import web

from echo2p2p.errors import ConfigError
from echo2p2p.limits import HTTP_CONTROL_BYTES_MAX, KIB, MIB
from echo2p2p.net import routing, tls
from echo2p2p.net.aio.bodies import Body, BodyRoom
from echo2p2p.net.aio.doorway import Doorway
from echo2p2p.net.aio.thread import AioThread
from echo2p2p.net.ports import Endpoint, Journal, Request, Response, Route, TlsServer

REQUEST_REFUSED: Final = "http.request_refused"
PIECE_BYTES: Final = 64 * KIB
"""Of an answer, handed to the connection at once."""


@dataclass(frozen=True)
class HttpLimits:
    """What a server puts up with."""

    connections_max: int = 8192
    """A newer one takes the place of the oldest, of the address that has most of them. A peer has
    up to eight, most of them in long polls; whoever serves makes sure that so many files may be
    open (`echo2p2p.net.open_files`)."""
    bodies_bytes_max: int = 512 * MIB
    """Bodies of uploads in memory at once, as long as they are announced to be; beyond that 503."""
    bodies_bytes_max_each: int = 96 * MIB
    """The same of whoever `Route.admit` has named, beyond that 429: one of the longest fits."""
    short_bytes_max: int = HTTP_CONTROL_BYTES_MAX
    """Routes that take no more than this have room of their own, or whoever announces many uploads,
    or waits in many long polls, would have everybody's heartbeats refused."""
    short_bodies_bytes_max: int = 128 * MIB
    """Bodies of these routes at once, as much of them as has come."""
    short_bodies_bytes_max_each: int = 4 * MIB
    """The same of one: a few of the longest, many of the usual ones."""
    idle_s: float = 30.0
    """A connection on which no whole request head arrives for this long is closed; clients of ours
    let go after 15 s, so that they never use a connection that is being closed."""
    transfer_s: float = 30.0
    """A body, or an answer, may take this long plus its length at ``transfer_bytes_per_s_min``."""
    transfer_bytes_per_s_min: float = 16.0 * KIB
    handshake_s: float = 10.0
    """A TLS handshake takes three packets."""
    close_s: float = 1.0
    """Time for answers under way when the server closes."""


class _BodyTooLongError(Exception):
    """The client sent more than its route takes."""


class _NoRoomError(Exception):
    """There is no room for the rest of a body now."""

    def __init__(self, refused: Response) -> None:
        super().__init__()
        self.refused = refused


class _CountedServer(web.Server):
    """aiohttp's server, which tells the doorway of connections that have ended."""

    doorway: Doorway

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:  # noqa: ANN401
        """Pass it on."""
        super().connection_lost(handler, exc)
        self.doorway.lost(handler)


class _ComplaintHandler(logging.Handler):
    """What aiohttp has to say (requests that are no HTTP, mostly) becomes an event."""

    def __init__(self, aio: AioThread, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self._aio = aio
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        """Pass it on."""
        cause = record.getMessage()
        if record.exc_info is not None and record.exc_info[1] is not None:
            cause += f": {' '.join(str(record.exc_info[1]).split())[:200]}"
        self._aio.tell_trio(lambda: self._journal.event(REQUEST_REFUSED, cause=cause))


class _Exchange:
    """One request on its way to a trio task and back."""

    def __init__(self, route: Route, request: Request, answer: asyncio.Future[Response]) -> None:
        self.route = route
        self.request = request
        self.answer = answer
        self.scope = trio.CancelScope()
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        """What follows the answer's body; ``None``: that was all."""
        self.broke_off = False

    def resolve(self, response: Response) -> None:
        """In the loop's thread: answer, unless the client has gone."""
        if not self.answer.done():
            self.answer.set_result(response)

    async def pass_on(self, piece: bytes) -> None:
        """In the loop's thread: give a piece of the rest, and wait until it is on its way."""
        self.pieces.put_nowait(piece)
        await self.pieces.join()

    def end(self, *, whole: bool) -> None:
        """In the loop's thread: no piece follows."""
        self.broke_off = not whole
        self.pieces.put_nowait(None)


class _Serving:
    """One listening socket, its connections, and the nursery of its handlers."""

    def __init__(
        self, aio: AioThread, router: routing.Router, journal: Journal, limits: HttpLimits
    ) -> None:
        self._aio = aio
        self._router = router
        self._journal = journal
        self._limits = limits
        self._long = BodyRoom(limits.bodies_bytes_max, limits.bodies_bytes_max_each)
        self._short = BodyRoom(limits.short_bodies_bytes_max, limits.short_bodies_bytes_max_each)
        self._web: _CountedServer | None = None
        self.nursery: trio.Nursery | None = None
        """Set while handlers may be started."""

    async def bind(self, endpoint: Endpoint, context: ssl.SSLContext | None) -> Endpoint:
        """Take the address; connections are accepted only after `accept`."""
        # Not from the global tree: it belongs to this server and its journal alone.
        logger = logging.Logger("echo2p2p.http")  # noqa: LOG001
        logger.addHandler(_ComplaintHandler(self._aio, self._journal))
        self._web = _CountedServer(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            logger=logger,
            keepalive_timeout=self._limits.idle_s,
            lingering_time=self._limits.close_s,
            auto_decompress=False,
        )
        self._web.doorway = Doorway(
            self._aio.loop,
            self._web,
            connections_max=self._limits.connections_max,
            context=context,
            handshake_s=self._limits.handshake_s,
            close_s=self._limits.close_s,
        )
        try:
            host, port = await self._web.doorway.bind(endpoint.host, endpoint.port)
        except OSError as error:
            raise _bind_error(endpoint, error) from error
        return Endpoint(host, port)

    async def accept(self) -> None:
        """Accept connections."""
        assert self._web is not None
        self._web.doorway.accept()

    async def close(self) -> None:
        """Stop accepting, let answers under way out for a moment, cut what is left."""
        if self._web is not None:
            await self._web.doorway.close()
            transports = [connection.transport for connection in self._web.connections]
            self._web.pre_shutdown()
            await self._web.shutdown(self._limits.close_s)
            for transport in transports:
                if transport is not None:
                    transport.abort()
            # Twice round the loop: `abort` closes in the next round, TLS in the one after.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        found = self._router.find(request.method, request.path)
        if isinstance(found, Response):
            return await self._send(request, found)
        route = found.route
        head = _head(request, found)
        who = routing.look_at_head(route, head)
        if isinstance(who, Response):
            return await self._send(request, who)
        allowed, announced = route.body_bytes_max, request.content_length
        if announced is None:
            announced = allowed if request.can_read_body else 0
        elif announced > allowed:
            return await self._send(request, routing.body_too_long(route))
        is_short = allowed <= self._limits.short_bytes_max
        taken = Body(self._short if is_short else self._long, who)
        # What is long is refused before it is sent; what is short counts when it is there.
        refused = taken.look(announced) if is_short else taken.grow(announced)
        if refused is not None:
            return await self._send(request, refused)
        try:
            return await self._answer(request, route, head, taken)
        finally:
            taken.fit(0)

    async def _answer(
        self, request: web.BaseRequest, route: Route, head: Request, taken: Body
    ) -> web.StreamResponse:
        try:
            body = await self._read(request, route.body_bytes_max, taken)
        except _BodyTooLongError:
            return await self._send(request, routing.body_too_long(route))
        except _NoRoomError as error:
            return await self._send(request, error.refused)
        except TimeoutError:
            detail = "the body came too slowly: send less at a time"
            slow = routing.refusal(408, routing.REASON_BODY_TOO_SLOW, detail, retry_after_s=1.0)
            return await self._send(request, slow)
        except aiohttp.ClientError as error:
            raise ConnectionResetError("the body broke off") from error
        answer: asyncio.Future[Response] = self._aio.loop.create_future()
        exchange = _Exchange(route, replace(head, body=body), answer)
        self._aio.tell_trio(functools.partial(self._start, exchange))
        try:
            response = await exchange.answer
            if response.rest is None:
                return await self._send(request, response)
            return await self._send_pieces(request, response, exchange)
        except BaseException:  # the client has gone, or does not read: nobody waits any more
            self._aio.tell_trio(exchange.scope.cancel)
            raise

    async def _read(self, request: web.BaseRequest, allowed: int, taken: Body) -> bytes:
        if not request.can_read_body:
            return b""
        begun = self._aio.loop.time()
        chunks: list[bytes] = []
        length = 0
        async with asyncio.timeout(self._limits.transfer_s) as patience:
            while chunk := await request.content.readany():
                chunks.append(chunk)
                length += len(chunk)
                if length > allowed:
                    raise _BodyTooLongError
                if (refused := taken.grow(length)) is not None:
                    raise _NoRoomError(refused)
                patience.reschedule(begun + self._transfer_s(length))
        taken.fit(length)
        return b"".join(chunks)

    async def _send(self, request: web.BaseRequest, answer: Response) -> web.StreamResponse:
        body, headers = memoryview(answer.body), _headers_of(answer)
        response: web.StreamResponse
        if len(body) <= PIECE_BYTES:  # leaves in one write, with its head
            response = web.Response(status=answer.status, body=answer.body, headers=headers)
            pieces = range(0)
        else:  # what the client does not read yet is not copied for it
            response = web.StreamResponse(status=answer.status, headers=headers)
            response.content_length = len(body)
            pieces = range(0, len(body), PIECE_BYTES)
        if not request.content.is_eof():
            response.force_close()
        async with self._in_time(request, len(body)):
            await response.prepare(request)
            for start in pieces:
                await response.write(body[start : start + PIECE_BYTES])
            await response.write_eof()
        return response

    async def _send_pieces(
        self, request: web.BaseRequest, answer: Response, exchange: _Exchange
    ) -> web.StreamResponse:
        """Send an answer whose rest comes piece by piece; how long it may take nobody says."""
        response = web.StreamResponse(status=answer.status, headers=_headers_of(answer))
        async with self._in_time(request, len(answer.body)):
            await response.prepare(request)
            if answer.body:
                await response.write(answer.body)
        while (piece := await exchange.pieces.get()) is not None:
            async with self._in_time(request, len(piece)):
                await response.write(piece)
            exchange.pieces.task_done()
        if exchange.broke_off:  # whoever broke it off has said why
            _abort(request)
            return response
        async with self._in_time(request, 0):
            await response.write_eof()
        return response

    @asynccontextmanager
    async def _in_time(self, request: web.BaseRequest, length: int) -> AsyncIterator[None]:
        """Bound how long the client may take to read so many bytes, and hang up if it does."""
        try:
            async with asyncio.timeout(self._transfer_s(length)):
                yield
        except TimeoutError as error:
            _abort(request)
            raise ConnectionAbortedError("the client reads too slowly") from error

    def _transfer_s(self, length: int) -> float:
        return self._limits.transfer_s + length / self._limits.transfer_bytes_per_s_min

    def _start(self, exchange: _Exchange) -> None:
        """In trio's thread: start the handler."""
        if self.nursery is None:
            self._finish(exchange, routing.closing())
        else:
            self.nursery.start_soon(self._run_handler, exchange, name=exchange.route.path)

    async def _run_handler(self, exchange: _Exchange) -> None:
        response: Response | None = None
        whole = False
        try:
            with exchange.scope:
                response = await self._run_guarded(exchange)
                if response.rest is not None:
                    self._finish(exchange, response)
                    whole = await self._run_rest(exchange, response.rest)
        finally:
            self._finish(exchange, response or routing.closing())
            self._aio.tell_loop(functools.partial(exchange.end, whole=whole))

    async def _run_guarded(self, exchange: _Exchange) -> Response:
        try:
            return await exchange.route.handler(exchange.request)
        except Exception as error:  # noqa: BLE001 - one bad request must not end the server
            routing.note_failed(self._journal, exchange.route, error)
            return routing.handler_failed()

    async def _run_rest(self, exchange: _Exchange, rest: AsyncGenerator[bytes, None]) -> bool:
        """Pass on what follows an answer's body; return whether that was all of it."""
        try:
            async with aclosing(rest):
                async for piece in rest:
                    await self._aio.call(functools.partial(exchange.pass_on, piece))
        except Exception as error:  # noqa: BLE001 - as above
            routing.note_failed(self._journal, exchange.route, error)
            return False
        return True

    def _finish(self, exchange: _Exchange, response: Response) -> None:
        self._aio.tell_loop(functools.partial(exchange.resolve, response))


class AioHttpServer:
    """`HttpServer` on aiohttp."""

    def __init__(
        self,
        aio: AioThread,
        tls_server: TlsServer | None,
        journal: Journal,
        limits: HttpLimits | None = None,
    ) -> None:
        self._aio = aio
        self._tls = tls_server
        self._journal = journal
        self._limits = limits or HttpLimits()

    @asynccontextmanager
    async def serve(self, routes: tuple[Route, ...], endpoint: Endpoint) -> AsyncIterator[Endpoint]:
        """Serve while the context is open; see `HttpServer`.

        At its end handlers are cancelled and answered with 503, within about a second; answers of
        which a part is on its way break off. Handlers
        run in a nursery of this context: what its body raises comes out in an `ExceptionGroup`.

        Raises:
            ConfigError: The address cannot be bound, or the TLS material is damaged.
        """
        context = None if self._tls is None else tls.server_context(self._tls)
        serving = _Serving(self._aio, routing.Router(routes), self._journal, self._limits)
        try:
            bound = await self._aio.call(lambda: serving.bind(endpoint, context))
            async with trio.open_nursery() as nursery:
                serving.nursery = nursery
                try:
                    await self._aio.call(serving.accept)
                    yield bound
                finally:
                    serving.nursery = None
                    nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._aio.call(serving.close)


def _headers_of(answer: Response) -> dict[str, str]:
    return {**answer.headers, "Content-Type": answer.content_type}


def _abort(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


def _head(request: web.BaseRequest, found: routing.Match) -> Request:
    ssl_object = request.get_extra_info("ssl_object")
    return Request(
        method=request.method,
        path=request.path,
        query={**request.query, **found.parts},
        headers={name.lower(): value for name, value in request.headers.items()},
        client=request.remote or "",
        client_certificate=None if ssl_object is None else ssl_object.getpeercert(True),
    )


def _bind_error(endpoint: Endpoint, error: OSError) -> ConfigError:
    where = f"cannot listen on {endpoint.host} port {endpoint.port}"
    if isinstance(error, socket.gaierror):
        return ConfigError("listen", f"{where}: no such host name: use an address of this machine")
    mends = {
        errno.EADDRINUSE: "another program does: stop it, or choose another port (0: any)",
        errno.EADDRNOTAVAIL: "not an address of this machine: use one that is, or 0.0.0.0",
        errno.EACCES: "not allowed: choose a port above 1023",
    }
    # Python 3.13 tries all addresses of a host, passes over those that are not this machine's, and
    # then raises an error without a number.
    number = errno.EADDRNOTAVAIL if error.errno is None else error.errno
    return ConfigError("listen", f"{where}: {mends.get(number, str(error))}")
