"""What work costs on the machine that plays a live story, for the virtual world to charge as well.

In virtual time work takes none: only lines, distance and the scripted models do. A live story has
all its processes on a few cores, where each must start, shake hands, encode and apply. `Cores` are
those cores: whoever works has one, others wait. Every duration here is CPU time, so that a machine
that is busy with other things has not spoilt it; ``echo2-scenario bench costs`` measures them all.
What is not here (the kernel's part of a packet, a chunk on its way) was too small to show.

Rejected: a factor on every duration, which would fit one story and say nothing of the next; and to
charge what the work takes while it is played, by which a seed would no longer be one run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import trio

from echo2p2p.net.ports import (
    Accept,
    Endpoint,
    HttpClient,
    HttpClients,
    Response,
    Streams,
    TlsClient,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Costs:
    """CPU seconds of what a process does, and how many cores there are."""

    cores: int
    start_s: float
    """From the start of a process until it does something."""
    exchange_s: float
    """Of an HTTP request in TLS and its answer, both ends together."""
    handshake_s: float
    """Of a new relay link in TLS, both ends together."""
    job_s: float
    """Of any work that is offloaded: two changes of thread."""
    work: Mapping[str, PerMb]
    """And of what takes longer, by the name of its function."""
    step: PerMb
    """What the scripted learner needs for a step, beside its `step_s`."""


@dataclass(frozen=True)
class PerMb:
    """CPU seconds that depend on the model's size."""

    s: float
    s_per_mb: float
    """For each megabyte of the state."""

    def of(self, state_mb: float) -> float:
        """Return what it is for a model."""
        return self.s + self.s_per_mb * state_mb


MEASURED: Final = Costs(
    cores=2,
    start_s=1.06,
    exchange_s=0.0006,
    handshake_s=0.003,
    job_s=0.0001,
    work={
        "encode_delta": PerMb(0.0028, 0.017),
        "encode_anchor": PerMb(0.0002, 0.0016),
        "Apply._written.<locals>.write": PerMb(0.0, 0.0113),
    },
    step=PerMb(0.00015, 0.0044),
)
"""One core of an AMD EPYC, Python 3.11, 2026-11-30; where one weight in ten changes."""


def name_of(work: Callable[[], object]) -> str:
    """Return the name of the function behind a piece of work."""
    inner = work.func if isinstance(work, partial) else work
    return getattr(inner, "__qualname__", "")


class Cores:
    """The cores of one machine, on which all processes of a story run.

    Args:
        costs: Of what they do; ``None``: nothing costs anything.
        state_mb: Of the model, in megabytes.
    """

    def __init__(self, costs: Costs | None, state_mb: float) -> None:
        self._costs = costs
        self._state_mb = state_mb
        self._free = trio.Semaphore(costs.cores if costs else 1)

    async def start_process(self) -> None:
        """Let a process come up."""
        if self._costs is not None:
            await self._spend(self._costs.start_s)

    def step_s(self, step_s: float) -> float:
        """Return what a learner's step takes in all."""
        return step_s + (self._costs.step.of(self._state_mb) if self._costs else 0.0)

    async def run(self, work: Callable[[], T]) -> T:
        """See `Offload`."""
        await trio.lowlevel.checkpoint()
        result = work()
        if self._costs is not None:
            with trio.CancelScope(shield=True):  # a thread is waited for
                more = self._costs.work.get(name_of(work))
                await self._spend(self._costs.job_s + (more.of(self._state_mb) if more else 0.0))
        await trio.lowlevel.checkpoint_if_cancelled()
        return result

    def streams(self, streams: Streams) -> Streams:
        """Return the same, with a TLS handshake at the beginning of each."""
        return streams if self._costs is None else _Shaken(streams, self)

    def clients(self, clients: HttpClients) -> HttpClients:
        """Return the same, with what each request costs."""
        return clients if self._costs is None else _Charged(clients, self)

    async def shake_hands(self) -> None:
        """Let two processes make a TLS connection."""
        if self._costs is not None:
            await self._spend(self._costs.handshake_s)

    async def exchange(self) -> None:
        """Let two processes read and write a request."""
        if self._costs is not None:
            await self._spend(self._costs.exchange_s)

    async def _spend(self, seconds: float) -> None:
        async with self._free:
            await trio.sleep(seconds)


class _Shaken:
    """`Streams` whose connections take a round trip more, and work."""

    def __init__(self, streams: Streams, cores: Cores) -> None:
        self._streams = streams
        self._cores = cores

    async def dial(self, endpoint: Endpoint, *, timeout_s: float) -> trio.abc.Stream:
        """See `Streams`."""
        began_s = trio.current_time()
        stream = await self._streams.dial(endpoint, timeout_s=timeout_s)
        try:
            await trio.sleep(trio.current_time() - began_s)  # TLS 1.3: one more of what TCP took
            await self._cores.shake_hands()
        except trio.Cancelled:
            await trio.aclose_forcefully(stream)
            raise
        return stream

    def listen(self, endpoint: Endpoint, accept: Accept) -> AbstractAsyncContextManager[Endpoint]:
        """See `Streams`."""
        return self._streams.listen(endpoint, accept)


class _Charged:
    """`HttpClients` whose requests are work."""

    def __init__(self, clients: HttpClients, cores: Cores) -> None:
        self._clients = clients
        self._cores = cores

    @asynccontextmanager
    async def connect(self, url: str, tls: TlsClient | None) -> AsyncIterator[HttpClient]:
        """See `HttpClients`."""
        async with self._clients.connect(url, tls) as client:
            yield _ChargedClient(client, self._cores)


class _ChargedClient:
    """`HttpClient` of one server."""

    def __init__(self, client: HttpClient, cores: Cores) -> None:
        self._client = client
        self._cores = cores

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
        await self._cores.exchange()
        return await self._client.request(
            method, path, body=body, headers=headers, timeout_s=timeout_s
        )
