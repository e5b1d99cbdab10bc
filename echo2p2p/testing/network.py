"""A network of machines in virtual time: `SimNetwork.node(name)` is a `Streams` port.

Each machine has an uplink and a downlink, both first-in first-out at a rate, and a distance to
the middle of the network. A stream is cut into segments; a segment waits for its sender's uplink,
travels both distances, waits for the receiver's downlink, and is then there. That is what decides
a broadcast's speed; congestion control and loss are left out. A stream never has more than a
window of bytes unread on its way, nor more than two segments waiting for the uplink (trio asks the
kernel for as much, TCP_NOTSENT_LOWAT). Everything follows from the calls made: no randomness.

`SimNetwork.run` must run in the background; it carries the segments.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import operator
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from echo2p2p.errors import ConfigError, LinkError
from echo2p2p.net.ports import Accept, Endpoint

SEGMENT_BYTES: Final = 16 * 1024
WINDOW_BYTES: Final = 256 * 1024
UNSENT_BYTES: Final = 2 * SEGMENT_BYTES
PORT_FIRST: Final = 49152


@dataclass(frozen=True)
class Traffic:
    """Bytes of all streams of one machine since the start."""

    sent_bytes: int
    """Put on its uplink."""
    received_bytes: int
    """Off its downlink."""


@dataclass(eq=False)
class _Node:
    name: str
    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float
    up_free_s: float = 0.0
    down_free_s: float = 0.0
    alive: bool = True
    refuses: bool = False
    sent_bytes: int = 0
    received_bytes: int = 0
    listeners: dict[int, tuple[Accept, trio.Nursery]] = field(default_factory=dict)
    streams: set[SimStream] = field(default_factory=set)
    ports: itertools.count[int] = field(default_factory=lambda: itertools.count(PORT_FIRST))


class SimNetwork:
    """The machines and what is on the way between them."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._earlier = trio.Event()
        self._cuts: set[tuple[str, str]] = set()
        self._held: dict[tuple[str, str], list[Callable[[], None]]] = {}

    # --- what a scenario does -----------------------------------------------------------------

    def add_node(
        self,
        name: str,
        *,
        up_bytes_per_s: float = math.inf,
        down_bytes_per_s: float = math.inf,
        latency_s: float = 0.0,
    ) -> None:
        """Add a machine; ``latency_s`` is one way, to the middle of the network."""
        assert name not in self._nodes, name
        self._nodes[name] = _Node(name, up_bytes_per_s, down_bytes_per_s, latency_s)

    def node(self, name: str) -> SimStreams:
        """Return the machine's `Streams` port; its host name is ``name``."""
        return SimStreams(self, self._nodes[name])

    def set_rates(self, name: str, *, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """Change a machine's rates for the segments that come from now on."""
        node = self._nodes[name]
        node.up_bytes_per_s, node.down_bytes_per_s = up_bytes_per_s, down_bytes_per_s

    def cut(self, sender: str, receiver: str) -> None:
        """Hold back all that ``sender`` sends to ``receiver``; one way, silent."""
        self._cuts.add((sender, receiver))

    def heal(self, sender: str, receiver: str) -> None:
        """End a cut; what was held back goes on, in order."""
        self._cuts.discard((sender, receiver))
        for arrive in self._held.pop((sender, receiver), []):
            self.after(0.0, arrive)

    def refuse(self, name: str, *, refuses: bool = True) -> None:
        """Let ``name`` refuse new connections, or accept them again."""
        self._nodes[name].refuses = refuses

    def crash(self, name: str) -> None:
        """Kill the process: its streams break at both ends, its ports are closed.

        The tasks that play the machine are the scenario's to cancel. For a machine that vanishes
        without a word use `cut` both ways with everybody.
        """
        node = self._nodes[name]
        node.alive = False
        node.listeners.clear()
        for stream in sorted(node.streams, key=lambda s: s.number):
            stream.break_now()
            other = stream.other
            self._travel(node, other.node, 0, other.break_now)
        node.streams.clear()

    def restart(self, name: str) -> None:
        """Let a crashed machine dial and listen again."""
        self._nodes[name].alive = True

    def traffic(self, name: str) -> Traffic:
        """Return the machine's counters."""
        node = self._nodes[name]
        return Traffic(node.sent_bytes, node.received_bytes)

    async def run(self) -> None:
        """Carry segments until cancelled."""
        while True:
            now = trio.current_time()
            while self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2]()
            self._earlier = trio.Event()
            with trio.move_on_at(self._events[0][0] if self._events else math.inf):
                await self._earlier.wait()

    # --- what streams do ----------------------------------------------------------------------

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run ``action`` in ``delay_s`` seconds."""
        when = trio.current_time() + delay_s
        if not self._events or when < self._events[0][0]:
            self._earlier.set()
        heapq.heappush(self._events, (when, next(self._order), action))

    def _travel(
        self, sender: _Node, receiver: _Node, size: int, deliver: Callable[[], None]
    ) -> float:
        """Bring ``size`` bytes over; ``deliver`` runs when the last of them is there.

        Returns:
            Seconds until they have left.
        """
        now = trio.current_time()
        sender.sent_bytes += size
        sender.up_free_s = max(now, sender.up_free_s) + size / sender.up_bytes_per_s

        def arrive() -> None:
            if (sender.name, receiver.name) in self._cuts:
                self._held.setdefault((sender.name, receiver.name), []).append(arrive)
                return
            now = trio.current_time()
            start = max(now, receiver.down_free_s)
            receiver.down_free_s = start + size / receiver.down_bytes_per_s
            receiver.received_bytes += size
            self.after(receiver.down_free_s - now, deliver)

        self.after(sender.up_free_s - now + sender.latency_s + receiver.latency_s, arrive)
        return sender.up_free_s - now

    def travel(self, sender: SimStream, size: int, deliver: Callable[[], None]) -> float:
        """Bring ``size`` bytes of ``sender`` to its other end; return when they have left."""
        return self._travel(sender.node, sender.other.node, size, deliver)

    async def connect(self, node: _Node, endpoint: Endpoint) -> trio.abc.Stream | None:
        """Return our end of a new stream, or ``None`` if it is refused."""
        other = self._nodes.get(endpoint.host)
        if other is None or not node.alive:
            await trio.lowlevel.checkpoint()
            return None
        for sender, receiver in ((node, other), (other, node)):
            arrived = trio.Event()
            self._travel(sender, receiver, 0, arrived.set)
            await arrived.wait()
        listener = other.listeners.get(endpoint.port)
        if not (listener and other.alive and node.alive) or other.refuses:
            return None
        accept, nursery = listener
        ours, theirs = SimStream(self, node), SimStream(self, other)
        ours.other, theirs.other = theirs, ours
        node.streams.add(ours)
        other.streams.add(theirs)
        nursery.start_soon(_serve, accept, theirs)
        return ours


async def _serve(accept: Accept, stream: SimStream) -> None:
    try:
        await accept(stream, stream.other.node.name)
    finally:
        await trio.aclose_forcefully(stream)


class SimStreams:
    """`Streams` of one machine."""

    def __init__(self, network: SimNetwork, node: _Node) -> None:
        self._network = network
        self._node = node

    async def dial(self, endpoint: Endpoint, *, timeout_s: float) -> trio.abc.Stream:
        """Connect to ``endpoint.host``, which is a machine's name.

        Raises:
            LinkError: Refused, unreachable or too slow.
        """
        stream: trio.abc.Stream | None = None
        with trio.move_on_after(timeout_s) as scope:
            stream = await self._network.connect(self._node, endpoint)
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
        node = self._node
        port = endpoint.port or next(node.ports)
        if port in node.listeners:
            raise ConfigError("relay.listen", f"port {port} is taken; choose another")
        async with trio.open_nursery() as nursery:
            node.listeners[port] = mine = (accept, nursery)
            try:
                yield Endpoint(node.name, port)
            finally:
                if node.listeners.get(port) is mine:
                    del node.listeners[port]
                nursery.cancel_scope.cancel()


class SimStream(trio.abc.HalfCloseableStream):
    """One end of a stream."""

    _numbers = itertools.count()
    other: SimStream

    def __init__(self, network: SimNetwork, node: _Node) -> None:
        self._network = network
        self.node = node
        self.number = next(self._numbers)
        self._arrived: deque[memoryview] = deque()
        self._eof = self._eof_sent = False
        self._broken = self._closed = self._other_closed = False
        self._unread_bytes = self._unsent_bytes = 0
        self._sending = self._receiving = False
        self._readable, self._writable = trio.Event(), trio.Event()

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
            self._network.travel(self, 0, self.other.take_eof)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return what is there, waiting for something; ``b""`` at the end."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving")
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError("max_bytes must be >= 1")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint()
            while not self._arrived:
                if self._closed:
                    raise trio.ClosedResourceError
                if self._broken:
                    raise trio.BrokenResourceError("the other end is gone")
                if self._eof:
                    return b""
                self._readable = trio.Event()
                await self._readable.wait()
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
            self.node.streams.discard(self)
            if not self._broken:
                self._network.travel(self, 0, self.other.take_close)
        await trio.lowlevel.checkpoint()

    # --- called by the other end, after the way ------------------------------------------------

    def take(self, segment: memoryview) -> None:
        """A segment is there."""
        if self._closed or self._broken:
            return
        self._arrived.append(segment)
        self._readable.set()

    def take_eof(self) -> None:
        """The other end will send nothing more."""
        self._eof = True
        self._readable.set()

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

    def _wake(self) -> None:
        self._readable.set()
        self._writable.set()

    def _check_sendable(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError
        if self._broken or self._other_closed:
            raise trio.BrokenResourceError("the other end is gone")
        if self._eof_sent:
            raise trio.ClosedResourceError("sending after the end")

    async def _wait_window(self) -> None:
        while self._unread_bytes >= WINDOW_BYTES or self._unsent_bytes >= UNSENT_BYTES:
            self._check_sendable()
            self._writable = trio.Event()
            await self._writable.wait()
        self._check_sendable()

    def _send_segment(self, segment: memoryview) -> None:
        self._unread_bytes += len(segment)
        self._unsent_bytes += len(segment)
        other = self.other
        leaves_s = self._network.travel(self, len(segment), lambda: other.take(segment))
        self._network.after(leaves_s, lambda: self._left(len(segment)))

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
