"""What a process of a live story uses, and how often it does what that goes into.

A `Meter` stands between the real parts and their ports. ``echo2-scenario bench costs`` plays with
it: what a piece and an exchange cost is what processes used, divided by how many there were. A wake
of a process of its own costs more than the same work in a loop of one process, so nothing less
than real processes will do.
"""

from __future__ import annotations

import time  # noqa: TID251 - CPU clocks
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import trio

from echo2p2p.net.ports import HttpClients, Offload, Streams
from scenarios.worked_ports import WorkedClients, WorkedStreams

T = TypeVar("T")

EVERY_S: Final = 0.5


class Usage(msgspec.Struct):
    """Since the process began."""

    at_s: float = 0.0
    """Monotonic, of the machine."""
    main_s: float = 0.0
    """CPU seconds of the main thread."""
    jobs_s: float = 0.0
    """CPU seconds of what was offloaded."""
    all_s: float = 0.0
    """CPU seconds of all threads."""
    pieces: int = 0
    """Writes to relay links and reads from them."""
    requests: int = 0
    """Sent over HTTP."""


class Meter:
    """Counts what a process does; made and run in its main thread.

    Args:
        path: One line of JSON, a `Usage`, every `EVERY_S`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._usage = Usage()

    def streams(self, streams: Streams) -> Streams:
        """Return the same, counted."""
        return WorkedStreams(streams, _dialled, self._piece)

    def clients(self, clients: HttpClients) -> HttpClients:
        """Return the same, counted."""
        return WorkedClients(clients, self._request)

    def offload(self, offload: Offload) -> Offload:
        """Return the same, timed."""
        return _TimedOffload(offload, self._usage)

    async def _piece(self) -> None:
        self._usage.pieces += 1

    async def _request(self) -> None:
        self._usage.requests += 1

    async def run(self) -> None:
        """Write down what was used, until cancelled."""
        while True:
            await trio.sleep(EVERY_S)
            usage = self._usage
            usage.at_s, usage.main_s = time.monotonic(), time.thread_time()
            usage.all_s = time.process_time()
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(usage) + b"\n")


async def _dialled(_: float) -> None:
    """Dials are not counted."""


@dataclass(frozen=True)
class _TimedOffload:
    """`Offload`, timed in its threads."""

    inner: Offload
    usage: Usage

    async def run(self, work: Callable[[], T]) -> T:
        """See `Offload`."""

        def timed() -> tuple[T, float]:
            began_s = time.thread_time()
            result = work()
            return result, time.thread_time() - began_s

        result, seconds = await self.inner.run(timed)
        self.usage.jobs_s += seconds
        return result


def used_between(path: Path, began_s: float, ended_s: float) -> Usage:
    """Return what a process used and did between two moments, as far as it was written down."""
    lines = [msgspec.json.decode(line, type=Usage) for line in path.read_bytes().splitlines()]
    inside = [line for line in lines if began_s <= line.at_s <= ended_s]
    first, last = msgspec.structs.asdict(inside[0]), msgspec.structs.asdict(inside[-1])
    return Usage(**{name: last[name] - first[name] for name in last})
