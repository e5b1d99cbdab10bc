"""HTTP between simulated machines: the same requests, routes and refusals, in virtual time.

`SimHttp` is the network. A machine is a host name; `server(host)` and `clients(host)` are its
ports. A request takes the latency and its bytes' time each way: over the machines' lines and beside
everything else there, if `SimLinks` are given, and over connections that are opened and kept as a
real client does; else over lines of its own. A machine can be crashed
(whoever waits for it learns so, later callers are refused until it serves again) or two can be cut
from each other (whoever waits, waits until the timeout). TLS is off in simulation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

import trio

from echo2p2p.errors import ConfigError, HttpError
from echo2p2p.net import routing
from echo2p2p.net.ports import Endpoint, Journal, Request, Response, Route, TlsClient
from echo2p2p.testing.links import SEGMENT_BYTES, SimLinks
from echo2p2p.testing.stopping import context_of_now

FIRST_FREE_PORT: Final = 40_000
HEAD_BYTES: Final = 300
"""Of a request or an answer, beside its body; TLS and TCP included."""
IDLE_S: Final = 15.0
"""A client keeps a connection for so long that it does not use."""


@dataclass(eq=False)
class _Exchange:
    """One request under way."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Of the handler."""
    over: trio.Event = field(default_factory=trio.Event)
    response: Response | None = None
    """``None`` when it is over: the connection broke."""

    def finish(self, response: Response | None) -> None:
        """Give the answer; only the first counts."""
        if not self.over.is_set():
            self.response = response
            self.over.set()


@dataclass(eq=False)
class _Listener:
    """One served address."""

    router: routing.Router
    journal: Journal
    context: Context
    """Of the process that listens."""
    nursery: trio.Nursery | None = None
    """Set while it serves."""
    exchanges: dict[_Exchange, None] = field(default_factory=dict)

    def start(self, exchange: _Exchange, found: routing.Match, request: Request) -> None:
        """Start the handler."""
        assert self.nursery is not None
        self.exchanges[exchange] = None
        start = partial(self.nursery.start_soon, name=found.route.path)
        self.context.run(start, self._run, exchange, found, request)

    async def _run(self, exchange: _Exchange, found: routing.Match, request: Request) -> None:
        response: Response | None = routing.closing()
        try:
            with exchange.scope:
                response = await self._run_guarded(found.route, request)
                if (rest := response.rest) is not None:
                    head, response = response, None
                    response = await self._run_rest(found.route, head, rest)
        finally:
            self.exchanges.pop(exchange, None)
            exchange.finish(response)

    async def _run_guarded(self, route: Route, request: Request) -> Response:
        try:
            return await route.handler(request)
        except Exception as error:  # noqa: BLE001 - as in the real server
            routing.note_failed(self.journal, route, error)
            return routing.handler_failed()

    async def _run_rest(
        self, route: Route, head: Response, rest: AsyncGenerator[bytes, None]
    ) -> Response | None:
        """Return an answer with what followed it; here it arrives whole, or breaks off."""
        body = bytearray(head.body)
        try:
            async with aclosing(rest):
                async for piece in rest:
                    body += piece
        except Exception as error:  # noqa: BLE001 - as above
            routing.note_failed(self.journal, route, error)
            return None
        return replace(head, body=bytes(body), rest=None)


class SimHttp:
    """All HTTP of one simulation.

    Args:
        latency_s: One way, between any two machines.
        bytes_per_s: Of one body on its way; bodies do not compete.
        links: The machines' lines, which then decide instead of the other two.
    """

    def __init__(
        self,
        latency_s: float = 0.02,
        bytes_per_s: float = float("inf"),
        *,
        links: SimLinks | None = None,
    ) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self._links = links
        self._listeners: dict[Endpoint, _Listener] = {}
        self._next_port = FIRST_FREE_PORT
        self._cuts: set[frozenset[str]] = set()

    def server(self, host: str, journal: Journal) -> SimHttpServer:
        """Return the server port of machine ``host``."""
        return SimHttpServer(self, host, journal)

    def clients(self, host: str) -> SimHttpClients:
        """Return the client port of machine ``host``."""
        return SimHttpClients(self, host)

    def crash(self, host: str) -> None:
        """Break every connection to ``host`` and refuse new ones until it serves again.

        Its handlers are cancelled. Whatever else runs on the machine is the caller's to cancel.
        """
        for endpoint in [at for at in self._listeners if at.host == host]:
            listener = self._listeners.pop(endpoint)
            for exchange in list(listener.exchanges):
                exchange.finish(None)
                exchange.scope.cancel()

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass between two machines; what was asked before is not answered."""
        self._cuts.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """Undo `cut`, for new requests."""
        self._cuts.discard(frozenset((one, other)))

    def is_cut(self, one: str, other: str) -> bool:
        """Return whether nothing passes between them."""
        return frozenset((one, other)) in self._cuts

    def listener(self, endpoint: Endpoint) -> _Listener | None:
        """Return who serves there now."""
        return self._listeners.get(endpoint)

    def bind(self, endpoint: Endpoint, listener: _Listener) -> Endpoint:
        """Take an address; port 0 becomes a free one.

        Raises:
            ConfigError: Somebody serves there.
        """
        if endpoint.port == 0:
            endpoint = replace(endpoint, port=self._next_port)
            self._next_port += 1
        if endpoint in self._listeners:
            detail = f"cannot listen on {endpoint.host} port {endpoint.port}: another program does"
            raise ConfigError("listen", f"{detail}: stop it, or choose another port (0: any)")
        self._listeners[endpoint] = listener
        return endpoint

    def release(self, endpoint: Endpoint, listener: _Listener) -> None:
        """Give an address back, unless a crash has done so."""
        if self._listeners.get(endpoint) is listener:
            del self._listeners[endpoint]

    async def open(self, client: str, server: str) -> None:
        """Wait until a new connection is there; no time where nobody counts bytes."""
        if self._links is not None:
            links = self._links
            await links.open(links.lane(client, server), links.lane(server, client))

    async def travel(self, sender: str, receiver: str, length: int, *, more: bool = False) -> None:
        """Wait until ``length`` bytes are there; for ever if the two are cut.

        ``more``: they follow their head at once; else the head is counted with them.
        """
        if self._links is not None:
            lane = self._links.lane(sender, receiver, is_under_way=more)
            await self._links.carry(lane, length if more else HEAD_BYTES + length)
        else:
            await trio.sleep(length / self.bytes_per_s + (0.0 if more else self.latency_s))
        if self.is_cut(sender, receiver):
            await trio.sleep_forever()


class SimHttpServer:
    """`HttpServer` of one machine."""

    def __init__(self, network: SimHttp, host: str, journal: Journal) -> None:
        self._network = network
        self._host = host
        self._journal = journal

    @asynccontextmanager
    async def serve(self, routes: tuple[Route, ...], endpoint: Endpoint) -> AsyncIterator[Endpoint]:
        """Serve while the context is open, as this machine, whatever host the endpoint names.

        As with the real server, what the body raises comes out in an `ExceptionGroup`.

        Raises:
            ConfigError: The address is in use.
        """
        await trio.lowlevel.checkpoint()
        listener = _Listener(routing.Router(routes), self._journal, context_of_now())
        bound = self._network.bind(Endpoint(self._host, endpoint.port), listener)
        async with trio.open_nursery() as nursery:
            listener.nursery = nursery
            try:
                yield bound
            finally:
                self._network.release(bound, listener)
                nursery.cancel_scope.cancel()


class SimHttpClients:
    """`HttpClients` of one machine."""

    def __init__(self, network: SimHttp, host: str) -> None:
        self._network = network
        self._host = host

    @asynccontextmanager
    async def connect(self, url: str, tls: TlsClient | None) -> AsyncIterator[SimHttpClient]:
        """Open a client; nothing is sent yet.

        Raises:
            ConfigError: Not an ``http`` URL, or TLS is asked for.
        """
        await trio.lowlevel.checkpoint()
        parts = urlsplit(url)
        if parts.scheme != "http" or tls is not None or parts.hostname is None:
            raise ConfigError("url", f"not http://host:port, which is all that runs here: {url}")
        yield SimHttpClient(self._network, self._host, Endpoint(parts.hostname, parts.port or 80))


class SimHttpClient:
    """`HttpClient` of one machine for one server."""

    def __init__(self, network: SimHttp, host: str, endpoint: Endpoint) -> None:
        self._network = network
        self._host = host
        self._endpoint = endpoint
        self._url = f"http://{endpoint.host}:{endpoint.port}"
        self._idle: list[tuple[float, _Listener]] = []
        """Connections that nobody uses: since when, and to whom."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Response:
        """Return the server's answer. Cancelling, and running out of time, cancel the handler.

        Raises:
            HttpError: No answer, and why.
        """
        parts = urlsplit(path)
        request = Request(
            method=method,
            path=unquote(parts.path),
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers={name.lower(): value for name, value in (headers or {}).items()},
            body=body,
            client=self._host,
        )
        with trio.move_on_after(timeout_s):
            await self._connect()
            response = await self._exchange(request)
            listener = self._network.listener(self._endpoint)
            if listener is not None:
                self._idle.append((trio.current_time(), listener))
            return response
        raise HttpError(f"{self._url}: no answer within {timeout_s:g} s")

    async def _connect(self) -> None:
        """Take a connection that is idle, or open one; one that fails is not used again."""
        listener, since_s = self._network.listener(self._endpoint), trio.current_time() - IDLE_S
        self._idle = [one for one in self._idle if one[0] > since_s and one[1] is listener]
        if self._idle:
            self._idle.pop()
        else:
            await self._network.open(self._host, self._endpoint.host)

    async def _exchange(self, request: Request) -> Response:
        network = self._network
        size = len(request.body)
        short = size <= SEGMENT_BYTES  # it is on its way with its head, whatever becomes of that
        await self._there(size if short else 0)
        listener = network.listener(self._endpoint)
        if listener is None:
            await self._back(0)
            raise HttpError(f"{self._url}: refused: nothing listens there")
        found = listener.router.find(request.method, request.path)
        if isinstance(found, Response):
            return await self._answer(found)
        who = routing.look_at_head(found.route, replace(request, body=b""))
        if isinstance(who, Response):
            return await self._answer(who)
        if size > found.route.body_bytes_max:
            return await self._answer(routing.body_too_long(found.route))
        if not short:
            await self._there(size, more=True)
        if network.listener(self._endpoint) is not listener:
            raise HttpError(f"{self._url}: closed the connection before it had answered")
        request = replace(request, query={**request.query, **found.parts})
        exchange = _Exchange()
        listener.start(exchange, found, request)
        try:
            await exchange.over.wait()
        finally:
            exchange.scope.cancel()
        if exchange.response is None:
            await self._back(0)
            raise HttpError(f"{self._url}: closed the connection before it had answered")
        return await self._answer(exchange.response)

    async def _answer(self, response: Response) -> Response:
        await self._back(len(response.body))
        headers = {name.lower(): value for name, value in response.headers.items()}
        headers["content-type"] = response.content_type
        return replace(response, headers=headers)

    async def _there(self, length: int, *, more: bool = False) -> None:
        await self._network.travel(self._host, self._endpoint.host, length, more=more)

    async def _back(self, length: int) -> None:
        await self._network.travel(self._endpoint.host, self._host, length)
