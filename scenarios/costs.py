"""What work costs on the machine that plays a live story, for the virtual world to charge as well.

In virtual time work takes none: only lines, distance and the scripted models do. A live story has
all its processes on a few cores, where each must start, shake hands, encode and apply. `Cores` are
those cores: whoever works has one, others wait; and a `Process` does one thing after another, but
for what it offloads. Every duration here is CPU time, so that a machine that is busy with other
things has not spoilt it; ``echo2-scenario bench costs`` measures them all.

Rejected: a factor on every duration, which would fit one story and say nothing of the next; and to
charge what the work takes while it is played, by which a seed would no longer be one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import trio

from echo2p2p.net.ports import HttpClients, HttpServer, Streams
from echo2p2p.testing.links import Framing
from scenarios import namespaces
from scenarios.worked_ports import WorkedClients, WorkedServer, WorkedStreams

T = TypeVar("T")

SLICE_S: Final = 0.004
"""For so long a core is had before others get their turn, by Linux at 250 ticks a second. With
whole turns a first version that was due while peers started came out more than a second late."""


@dataclass(frozen=True)
class Costs:
    """CPU seconds of what a process does, and how many cores there are."""

    cores: int
    start_s: float
    """From the start of a process until it does something."""
    exchange_s: float
    """Of an HTTP request in TLS and its answer, with what both ends do for it; half at each."""
    piece_s: float
    """Of what is written to a relay link in TLS at once, or read from it, with all that is done
    with it: digests, decisions, announcements, a chunk's way to the disk."""
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
    exchange_s=0.0045,
    piece_s=0.00033,
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
                await self.spend(self._costs.job_s + (more.of(self._state_mb) if more else 0.0))
        await trio.lowlevel.checkpoint_if_cancelled()
        return result

    async def spend(self, seconds: float) -> None:
        """Have a core for so long, in turn with whoever else wants one."""
        while True:
            async with self._free:
                await trio.sleep(min(seconds, SLICE_S))
            if seconds <= SLICE_S:
                return
            seconds -= SLICE_S

    @property
    def framing(self) -> Framing | None:
        """What the machine's lines are, if its work costs anything: those of the test-bed."""
        return None if self._costs is None else namespaces.framing()

    async def start_process(self) -> Process:
        """Let another process come up on these cores."""
        if self._costs is not None:
            await self.spend(self._costs.start_s)
        return Process(self, self._costs)


class Process:
    """One process: its main thread does one thing at a time.

    Args:
        cores: Of its machine.
        costs: Of what it does; ``None``: nothing costs anything.
    """

    def __init__(self, cores: Cores, costs: Costs | None) -> None:
        self._cores = cores
        self._costs = costs
        self._thread = trio.Lock()

    def streams(self, streams: Streams) -> Streams:
        """Return the same, with a TLS handshake at the beginning of each, and work in each."""
        if self._costs is None:
            return streams
        return WorkedStreams(streams, self._shake_hands, partial(self.work, self._costs.piece_s))

    def clients(self, clients: HttpClients) -> HttpClients:
        """Return the same, with what each request costs."""
        if self._costs is None:
            return clients
        return WorkedClients(clients, partial(self.work, self._costs.exchange_s / 2))

    def server(self, server: HttpServer) -> HttpServer:
        """Return the same, with what each answer costs."""
        if self._costs is None:
            return server
        return WorkedServer(server, partial(self.work, self._costs.exchange_s / 2))

    async def _shake_hands(self, dial_s: float) -> None:
        """Make a connection a TLS one."""
        assert self._costs is not None
        await trio.sleep(dial_s)  # TLS 1.3: one round trip more, as TCP took
        await self.work(self._costs.handshake_s)

    async def work(self, seconds: float) -> None:
        """Work in the main thread; not to be cancelled, as work is not."""
        with trio.CancelScope(shield=True):
            async with self._thread:
                await self._cores.spend(seconds)
