"""Byte streams between simulated machines: `SimNetwork.streams(name)` is a `Streams` port.

A stream is cut into segments, which travel as `echo2p2p.testing.links` says. It never has more than
a window of bytes unread on its way, nor more than a segment waiting for the uplink: trio leaves as
much to the kernel unsent (TCP_NOTSENT_LOWAT), and relays count as sent what has left.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
from collections import deque
from collections.abc import AsyncIterator
from contextvars import Context
from dataclasses import dataclass, field
from typing import Final

import trio

from echo2p2p.errors import ConfigError, LinkError
from echo2p2p.net.ports import Accept, Endpoint
from echo2p2p.testing.links import SEGMENT_BYTES, Framing, Lane, SimLinks, Traffic
from echo2p2p.testing.stopping import context_of_now

__all__ = ["SEGMENT_BYTES", "UNSENT_BYTES", "WINDOW_BYTES", "SimNetwork", "SimStream", "Traffic"]

WINDOW_BYTES: Final = 256 * 1024
UNSENT_BYTES: Final = SEGMENT_BYTES
PORT_FIRST: Final = 49152


@dataclass(eq=False, frozen=True)
class _Listener:
    """One open port."""

    accept: Accept
    nursery: trio.Nursery
    context: Context
    """Of the process that listens."""


@dataclass(eq=False)
class _Machine:
    """What one machine's processes have open."""

    name: str
    alive: bool = True
    refuses: bool = False
    listeners: dict[int, _Listener] = field(default_factory=dict)
    streams: set[SimStream] = field(default_factory=set)
    ports: itertools.count[int] = field(default_factory=lambda: itertools.count(PORT_FIRST))


class SimNetwork(SimLinks):
    """The machines, their lines and their streams."""

    def __init__(self, rng: random.Random | None = None, *, framing: Framing | None = None) -> None:
        super().__init__(rng, framing=framing)
        self._machines: dict[str, _Machine] = {}
        self._numbers = itertools.count()

    def streams(self, name: str) -> SimStreams:
        """Return the machine's `Streams` port; its host name is ``name``."""
        return SimStreams(self, self._machine(name))

    def refuse(self, name: str, *, refuses: bool = True) -> None:
        """Let ``name`` refuse new connections, or accept them again."""
        self._machine(name).refuses = refuses

    def crash(self, name: str) -> None:
        """Kill the process: its streams break at both ends, its ports are closed.

        The tasks that play the machine are the scenario's to cancel. For a machine that vanishes
        without a word use `freeze`.
        """
        machine = self._machine(name)
        machine.alive = False
        machine.listeners.clear()
        for stream in sorted(machine.streams, key=lambda s: s.number):
            # As a kernel does it: what was written still arrives, unless there was more to read.
            ending = stream.other.break_now if stream.has_unread else stream.other.take_close
            stream.break_now()
            self.travel(stream.lane, 0, ending)
        machine.streams.clear()

    def restart(self, name: str) -> None:
        """Let a crashed machine dial and listen again."""
        self._machine(name).alive = True

    async def connect(self, machine: _Machine, endpoint: Endpoint) -> trio.abc.Stream | None:
        """Return our end of a new stream, or ``None`` if it is refused."""
        if self.node(endpoint.host) is None or not machine.alive:
            await trio.lowlevel.checkpoint()
            return None
        other = self._machine(endpoint.host)
        out, back = self.lane(machine.name, other.name), self.lane(other.name, machine.name)
        await self.open(out, back)
        listener = other.listeners.get(endpoint.port)
        if not (listener and other.alive and machine.alive) or other.refuses:
            return None
        ours = SimStream(self, machine, out, next(self._numbers))
        theirs = SimStream(self, other, back, next(self._numbers))
        ours.other, theirs.other = theirs, ours
        machine.streams.add(ours)
        other.streams.add(theirs)
        listener.context.run(listener.nursery.start_soon, _serve, listener.accept, theirs)
        return ours

    def _machine(self, name: str) -> _Machine:
        assert self.node(name) is not None, f"there is no machine {name}"
        return self._machines.setdefault(name, _Machine(name))


async def _serve(accept: Accept, stream: SimStream) -> None:
    try:
        await accept(stream, stream.other.host)
    finally:
        await trio.aclose_forcefully(stream)


class SimStreams:
    """`Streams` of one machine."""

    def __init__(self, network: SimNetwork, machine: _Machine) -> None:
        self._network = network
        self._machine = machine

    async def dial(self, endpoint: Endpoint, *, timeout_s: float) -> trio.abc.Stream:
        """Connect to ``endpoint.host``, which is a machine's name.

        Raises:
            LinkError: Refused, unreachable or too slow.
        """
        stream: trio.abc.Stream | None = None
        with trio.move_on_after(timeout_s) as scope:
            stream = await self._network.connect(self._machine, endpoint)
        if stream is None:
            why = "timed out" if scope.cancelled_caught else "refused"
            raise LinkError(f"connecting to {endpoint.host}:{endpoint.port}: {why}")
        return stream

    @contextlib.asynccontextmanager
    async def listen(self, endpoint: Endpoint, accept: Accept) -> AsyncIterator[Endpoint]:
        """Listen on ``endpoint.port`` of this machine, whatever the host says.

        Raises:
            ConfigError: The port is taken.
        """
        machine = self._machine
        port = endpoint.port or next(machine.ports)
        if port in machine.listeners:
            raise ConfigError("relay.listen", f"port {port} is taken; choose another")
        async with trio.open_nursery() as nursery:
            mine = _Listener(accept, nursery, context_of_now())
            machine.listeners[port] = mine
            try:
                yield Endpoint(machine.name, port)
            finally:
                if machine.listeners.get(port) is mine:
                    del machine.listeners[port]
                nursery.cancel_scope.cancel()


class SimStream(trio.abc.HalfCloseableStream):
    """One end of a stream."""

    other: SimStream

    def __init__(self, network: SimNetwork, machine: _Machine, lane: Lane, number: int) -> None:
        self._network = network
        self._machine = machine
        self.host = machine.name
        self.lane = lane
        """Of what we send."""
        self.number = number
        self._arrived: deque[memoryview] = deque()
        self._eof = self._eof_sent = False
        self._broken = self._closed = self._other_closed = False
        self._unread_bytes = self._unsent_bytes = 0
        self._sending = self._receiving = False
        self._reader: trio.lowlevel.Task | None = None
        """Waits for something to read."""
        self._writable = trio.Event()
        """Set while nobody waits to write."""
        self._writable.set()
        self._in_line = False
        """Among those who wait for a line that is full."""
        self._is_admitted = False
        """Its turn has come."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send; returns when all bytes are queued on the uplink."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            self._check_sendable()
            rest = memoryview(bytes(data))
            while rest:
                await self._wait_window()
                self._send_segment(rest[:SEGMENT_BYTES])
                rest = rest[SEGMENT_BYTES:]
        finally:
            self._sending = False

    def send_nowait(self, data: bytes | bytearray | memoryview) -> bool:
        """Send all of it if it can be queued at once, else nothing; the caller is to checkpoint.

        A task step less than `send_all`, which must give way to other tasks even then.
        """
        fits = len(data) <= SEGMENT_BYTES and not self._sending
        ended = self._closed or self._broken or self._other_closed or self._eof_sent
        if not fits or ended or self._is_full() or not self._network.is_free(self.lane):
            return False
        self._send_segment(memoryview(bytes(data)))
        return True

    async def wait_send_all_might_not_block(self) -> None:
        """Wait for room in the window."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            if self._closed:
                raise trio.ClosedResourceError
            if not self._broken:
                with contextlib.suppress(trio.BrokenResourceError):
                    await self._wait_window()
        finally:
            self._sending = False

    async def send_eof(self) -> None:
        """Tell the other end that nothing follows."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending")
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise trio.ClosedResourceError
        if not self._eof_sent:
            self._eof_sent = True
            self._network.travel(self.lane, 0, self.other.take_eof)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return what is there, waiting for something; ``b""`` at the end."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving")
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError("max_bytes must be >= 1")
        self._receiving = True
        try:
            if self._arrived or self._closed or self._broken or self._eof:
                await trio.lowlevel.checkpoint()  # else the wait is one
            while not self._arrived:
                if self._closed:
                    raise trio.ClosedResourceError
                if self._broken:
                    raise trio.BrokenResourceError("the other end is gone")
                if self._eof:
                    return b""
                self._reader = trio.lowlevel.current_task()  # an event would cost as much as a step
                await trio.lowlevel.wait_task_rescheduled(self._stop_reading)
            if self._closed:
                raise trio.ClosedResourceError
            return self._take(max_bytes)
        finally:
            self._receiving = False

    async def aclose(self) -> None:
        """Close both ways; the other end reads to the end of what was sent."""
        if not self._closed:
            self._closed = True
            self._wake()
            self._machine.streams.discard(self)
            if not self._broken:
                self._network.travel(self.lane, 0, self.other.take_close)
        await trio.lowlevel.checkpoint()

    @property
    def has_unread(self) -> bool:
        """Whether something has arrived that nobody has read."""
        return bool(self._arrived)

    # --- called by the other end, after the way ------------------------------------------------

    def take(self, segment: memoryview) -> None:
        """A segment is there."""
        if self._closed or self._broken:
            return
        self._arrived.append(segment)
        self._wake_reader()

    def take_eof(self) -> None:
        """The other end will send nothing more."""
        self._eof = True
        self._wake_reader()

    def take_close(self) -> None:
        """The other end takes nothing more either."""
        self._eof = True
        self._other_closed = True
        self._wake()

    def break_now(self) -> None:
        """One of the two machines is gone."""
        self._broken = True
        self._arrived.clear()
        self._wake()

    def take_credit(self, count: int) -> None:
        """The other end has read ``count`` of our bytes."""
        self._unread_bytes -= count
        self._writable.set()

    # --- inside -------------------------------------------------------------------------------

    def _stop_reading(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _wake_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            trio.lowlevel.reschedule(reader)

    def _wake(self) -> None:
        self._wake_reader()
        self._writable.set()

    def _check_sendable(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError
        if self._broken or self._other_closed:
            raise trio.BrokenResourceError("the other end is gone")
        if self._eof_sent:
            raise trio.ClosedResourceError("sending after the end")

    async def _wait_window(self) -> None:
        while self._is_full() or not self._may_go():
            self._check_sendable()
            self._writable = trio.Event()
            if not self._is_full() and not self._in_line:
                self._in_line = True
                self._network.when_free(self.lane, self._admit)
            try:
                await self._writable.wait()
            finally:
                self._writable.set()
        self._is_admitted = False
        self._check_sendable()

    def _may_go(self) -> bool:
        if self._is_admitted:
            return not self._network.full_for(self.lane)
        return self._network.is_free(self.lane)

    def _is_full(self) -> bool:
        return self._unread_bytes >= WINDOW_BYTES or self._unsent_bytes >= UNSENT_BYTES

    def _send_segment(self, segment: memoryview) -> None:
        self._unread_bytes += len(segment)
        self._unsent_bytes += len(segment)
        other = self.other
        leaves_s = self._network.travel(self.lane, len(segment), lambda: other.take(segment))
        if leaves_s:
            self._network.after(leaves_s, lambda: self._left(len(segment)))
        else:
            self._unsent_bytes -= len(segment)

    def _admit(self) -> bool:
        """It is our turn on a line that was full; returns whether somebody waits for it."""
        self._is_admitted, self._in_line = not self._writable.is_set(), False
        self._writable.set()
        return self._is_admitted

    def _left(self, count: int) -> None:
        self._unsent_bytes -= count
        self._writable.set()

    def _take(self, max_bytes: int | None) -> bytes:
        parts: list[memoryview] = []
        room = max_bytes if max_bytes is not None else SEGMENT_BYTES
        while self._arrived and room:
            part = self._arrived.popleft()
            if len(part) > room:
                self._arrived.appendleft(part[room:])
                part = part[:room]
            parts.append(part)
            room -= len(part)
        data = b"".join(parts)
        self.other.take_credit(len(data))
        return data
