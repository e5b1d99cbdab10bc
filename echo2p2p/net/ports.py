"""The ports: everything that a peer or a coordinator needs from the world, as protocols.

Each has a real form (in this package) and a simulated one (in `echo2p2p.testing`), held to one
conformance suite. Time inside trio is `trio.current_time`, which the simulation replaces through
trio's own clock argument; so is sleeping. Only `app.py` chooses which form is used.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")


class WallClock(Protocol):
    """Time of day, for certificates, file names and people; never for deadlines."""

    def time(self) -> float:
        """Return seconds since 1970 UTC."""
        ...


class Entropy(Protocol):
    """Randomness. Everything that is drawn anywhere comes from here."""

    def secret(self, count: int) -> bytes:
        """Return ``count`` bytes fit for keys, nonces and credentials."""
        ...

    def rng(self, purpose: str) -> random.Random:
        """Return a generator of its own for ``purpose``."""
        ...


class Journal(Protocol):
    """Where events go: structured logs in production, the trace in simulation."""

    def event(self, name: str, /, **fields: object) -> None:
        """Record ``name`` (a constant of `echo2p2p.log`) with plain values."""
        ...

    def bind(self, **fields: object) -> Journal:
        """Return a journal that adds ``fields`` to each event."""
        ...


class Offload(Protocol):
    """CPU work over a millisecond: a worker thread in production, inline in simulation."""

    async def run(self, work: Callable[[], T]) -> T:
        """Return ``work()``. Cancelling waits for the work, then raises."""
        ...


# --- byte streams -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """A host and a port; IPv6 literals without brackets."""

    host: str
    port: int


Accept = Callable[[trio.abc.Stream, str], Awaitable[None]]
"""Serves a connection from the host of this address, to its end."""


class Streams(Protocol):
    """Byte streams between machines, for relay links."""

    async def dial(self, endpoint: Endpoint, *, timeout_s: float) -> trio.abc.Stream:
        """Connect.

        Raises:
            LinkError: Refused, unreachable or too slow.
        """
        ...

    def listen(self, endpoint: Endpoint, accept: Accept) -> AbstractAsyncContextManager[Endpoint]:
        """Listen while the context is open; its value is the real address (port 0 resolved).

        ``accept`` runs once a connection, in a task that ends with the context; the stream is
        closed when it returns.

        Raises:
            ConfigError: The address cannot be bound; says how to mend that.
        """
        ...


# --- HTTP -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One HTTP request, read whole."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    """Names in lower case."""
    body: bytes = b""
    client: str = ""
    """Address of the other side, for logs and limits."""
    client_certificate: bytes | None = None
    """DER of the verified TLS leaf, if one was shown."""


@dataclass(frozen=True)
class Response:
    """One HTTP answer."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/msgpack"
    rest: AsyncGenerator[bytes, None] | None = None
    """What comes after ``body``, piece by piece; of handlers only, as clients read answers whole.
    It runs in a task of the server, is asked for a piece when the one before is on its way, and is
    closed when the client has gone. One that raises is a bug: the answer then breaks off."""


Handler = Callable[[Request], Awaitable[Response]]

Admit = Callable[[Request], "str | Response"]
"""Whose bytes a body counts towards while it is in memory, or the refusal that needs no body."""


@dataclass(frozen=True)
class Route:
    """One path that a server answers."""

    method: str
    path: str
    """Literal, or with ``{name}`` parts, which arrive in `Request.query`."""
    handler: Handler
    body_bytes_max: int
    """A longer body is refused with 413 before it is read."""
    admit: Admit | None = None
    """Asked with the head alone, before the body is read; ``None``: whoever asks. It runs in the
    server's own thread, so it only looks things up, each by one atomic step."""


class HttpServer(Protocol):
    """Serves trio handlers."""

    def serve(
        self, routes: tuple[Route, ...], endpoint: Endpoint
    ) -> AbstractAsyncContextManager[Endpoint]:
        """Serve while the context is open; its value is the real address.

        A handler that raises is a bug: it is journalled, and answered with 500.

        Raises:
            ConfigError: The address cannot be bound.
        """
        ...


class HttpClient(Protocol):
    """Asks one server."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Response:
        """Return the server's answer, whatever its status.

        Raises:
            HttpError: No answer: refused, reset, too slow, or not verified.
        """
        ...


class HttpClients(Protocol):
    """Opens clients; the TLS form is given by the trust material."""

    def connect(self, url: str, tls: TlsClient | None) -> AbstractAsyncContextManager[HttpClient]:
        """Open a client with a connection pool for ``url`` (scheme, host, port)."""
        ...


@dataclass(frozen=True)
class TlsClient:
    """How a client verifies the server and shows itself. PEM everywhere."""

    authority: bytes | None
    """Certificate of the run's authority; ``None``: do not verify (only for ``/ca``)."""
    certificate: bytes | None = None
    private_key: bytes | None = None


@dataclass(frozen=True)
class TlsServer:
    """Our own leaf, at the coordinator or of a relay, and the authority of all others. PEM."""

    authority: bytes
    certificate: bytes
    private_key: bytes


# --- disk -------------------------------------------------------------------------------------


class Rows(Protocol):
    """The part of `sqlite3.Connection` that transactions use."""

    def execute(self, sql: str, parameters: tuple[object, ...] = (), /) -> Cursor:
        """Run one statement."""
        ...


class Cursor(Protocol):
    """The part of `sqlite3.Cursor` that transactions use."""

    @property
    def rowcount(self) -> int:
        """Rows changed."""
        ...

    def fetchone(self) -> tuple[object, ...] | None:
        """Return the next row."""
        ...

    def fetchall(self) -> list[tuple[object, ...]]:
        """Return all other rows."""
        ...


class Store(Protocol):
    """Rows on disk. Whatever `transact` returned is safe; nothing else is."""

    async def transact(self, work: Callable[[Rows], T]) -> T:
        """Run ``work`` in a transaction of its own and return its value once it is durable.

        ``work`` may run in another thread, runs alone, and must touch nothing but its argument; it
        may be undone and run again.
        Several calls may share one fsync. If ``work`` raises, its changes are undone, the others'
        are not, and the exception comes out here.

        Raises:
            StoreError: The disk refused; nothing of this call was kept.
        """
        ...


class StoredBytes(Protocol):
    """Bytes that stay on the disk until they are wanted."""

    @property
    def length(self) -> int:
        """In bytes."""
        ...

    def read(self, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start`` on; from the system's cache that takes no time.

        Raises:
            StoreError: The disk refused, or they are not there any more.
        """
        ...


class Blobs(Protocol):
    """Whole files under plain names, written at once and durably."""

    async def put(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Write or replace; on return it is on disk under its name, or not at all.

        Raises:
            StoreError: The disk refused.
        """
        ...

    async def get(self, name: str) -> bytes:
        """Return the whole content.

        Raises:
            StoreError: There is none, or the disk refused.
        """
        ...

    async def find(self, name: str) -> StoredBytes:
        """Return the content without loading it.

        Raises:
            StoreError: There is none, or the disk refused.
        """
        ...

    async def names(self) -> list[str]:
        """Return all names, sorted."""
        ...

    async def delete(self, name: str) -> None:
        """Forget it; no error if there is none."""
        ...


class SharedState(Protocol):
    """A block of memory that a child process can map; the flat state of a model."""

    @property
    def path(self) -> str:
        """File that a child may map; empty in simulation."""
        ...

    @property
    def view(self) -> memoryview:
        """All of it, writable. Released by `close`."""
        ...

    def rest(self) -> None:
        """Say that it will not be looked at soon: its pages need not stay in memory."""
        ...

    def close(self) -> None:
        """Unmap and remove. Idempotent."""
        ...


class SharedMemory(Protocol):
    """Makes shared states."""

    def allocate(self, name: str, size: int) -> SharedState:
        """Return a zeroed block of ``size`` bytes; an old one of this name is replaced.

        Raises:
            StoreError: No room.
        """
        ...

    def scratch(self, size: int) -> SharedState:
        """Return a zeroed block that no other process can map, and that none inherits.

        On disk where the others are, so that the system can drop its pages for want of memory.

        Raises:
            StoreError: No room.
        """
        ...

    def keep(self, name: str, size: int) -> SharedState:
        """Return a block that outlives this process, until it is closed.

        It is as an earlier life has left it if that had one of this name and size, else zeroed. A
        crash may have left any bytes in it.

        Raises:
            StoreError: No room.
        """
        ...

    def kept(self) -> list[str]:
        """Return the names of all blocks that `keep` has made and nobody has closed, sorted."""
        ...

    def drop(self, name: str) -> None:
        """Remove a kept block; no error if there is none."""
        ...
