"""A TCP stream that knows what has left, and when it is worth waking up.

Bytes handed to the kernel are not bytes on their way.

The problem: a node with many links sends on few of them at a time, so that each chunk is whole at
the other end soon. But a kernel takes bytes much faster than an uplink: on each link as many as the
congestion window allows, and that grows for as long as the router in front of a slow uplink has
room. All links together then have a megabyte waiting there, half a second at 20 Mbit/s, in front of
every chunk, announcement and cancellation.

The idea: ask the kernel how much of what it took is not acknowledged yet (SIOCOUTQ), and count a
chunk as sent only when no more than the link's bandwidth times its shortest round trip is (both by
the kernel's own measurement, TCP_INFO), or `FEW_BYTES`. Chunks are written on top of that, so a
faster path is found as quickly as TCP itself finds it. One timer asks for all links of a node: with
one for each, questions were a fifth of what a relay did at 20 Mbit/s.

The other way round, who knows what an arriving piece lacks (`DepartingStream.lacking`) is not woken
for each packet of it.

Rejected: small send buffers, which bound far and fast links; another congestion control, which is
the machine's owner's to choose, and not to be had everywhere. Where the kernel cannot be asked, all
that it took counts as sent.
"""

from __future__ import annotations

import fcntl
import math
import socket as sockets
import struct
import termios
from collections import deque
from collections.abc import Callable
from typing import Final, NoReturn

import trio

FEW_BYTES: Final = 4 * 1024
"""Three packets, much less than a chunk: with 32 KiB, a chunk of 16 had left each link when it was
written, and fifteen links together had half a megabyte in front of an uplink."""
POLL_MIN_S: Final = 0.004
POLL_MAX_S: Final = 0.02
"""Between two questions."""

WAKE_BYTES_MIN: Final = 3 * 1024
"""It is not worth two system calls to sleep for less: that is two packets."""

_INFO_BYTES: Final = 168
_MIN_RTT_US_AT: Final = 148
_BYTES_PER_S_AT: Final = 160
"""Both in Linux's ``struct tcp_info``."""


class DepartingStream(trio.abc.HalfCloseableStream):
    """A `trio.SocketStream`, owned from here on, that can be asked what has left.

    Args:
        inner: Connected.
    """

    def __init__(self, inner: trio.SocketStream) -> None:
        self._inner = inner
        self.socket = inner.socket
        self.position = 0
        """Bytes that the kernel has taken since the start."""
        self.lacking: Callable[[bytes | bytearray], int] | None = None
        """Told what was received, returns how many bytes more it takes to make anything of it."""
        self._wakes_at = 1

    def departs_in_s(self, position: int) -> float:
        """Return 0 if all bytes before ``position`` are on their way, else when to ask again.

        As far as the kernel can tell: but for what the path has room for.
        """
        waiting = self._unacknowledged() - (self.position - position)
        if waiting <= FEW_BYTES:
            return 0.0
        rtt_s, bytes_per_s = self._path()
        excess = waiting - max(FEW_BYTES, rtt_s * bytes_per_s)
        if excess <= 0:
            return 0.0
        wait_s = excess / bytes_per_s / 2 if bytes_per_s else POLL_MIN_S
        return min(max(wait_s, POLL_MIN_S), POLL_MAX_S)

    def _unacknowledged(self) -> int:
        """Return how many bytes the kernel holds until the other side has them.

        They may be more than `position` knows of, while a part of them is being sent.
        """
        try:
            answer = fcntl.ioctl(self.socket.fileno(), termios.TIOCOUTQ, bytes(4))
        except (OSError, ValueError):  # closed, or no such question here
            return 0
        return int(struct.unpack("i", answer)[0])

    def _path(self) -> tuple[float, float]:
        """Return the shortest round trip, in seconds, and the rate, in bytes per second."""
        try:
            info = self.socket.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _INFO_BYTES)
            (rtt_us,) = struct.unpack_from("I", info, _MIN_RTT_US_AT)
            (bytes_per_s,) = struct.unpack_from("Q", info, _BYTES_PER_S_AT)
        except (OSError, struct.error):
            return 0.0, 0.0
        return rtt_us / 1e6, float(bytes_per_s)

    # --- the stream itself --------------------------------------------------------------------

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `trio.abc.SendStream`."""
        await self._inner.send_all(data)
        self.position += len(data)

    async def wait_send_all_might_not_block(self) -> None:
        """See `trio.abc.SendStream`."""
        await self._inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """See `trio.abc.ReceiveStream`."""
        data = await self._inner.receive_some(max_bytes)
        if self.lacking is not None:
            self._wake_at(self.lacking(data))
        return data

    def _wake_at(self, count: int) -> None:
        """Let the kernel wake us when so many bytes are there, or the connection has ended."""
        count = count if count >= WAKE_BYTES_MIN else 1
        if count == self._wakes_at:
            return
        try:
            self.socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVLOWAT, count)
            self._wakes_at = count
        except OSError:  # closed, or not to be had here
            self.lacking = None

    async def send_eof(self) -> None:
        """See `trio.abc.HalfCloseableStream`."""
        await self._inner.send_eof()

    async def aclose(self) -> None:
        """See `trio.abc.AsyncResource`."""
        await self._inner.aclose()


class Departures:
    """Tells of writes when they have left, for all links of a node. `run` it once."""

    def __init__(self) -> None:
        self._waiting: dict[DepartingStream, deque[tuple[int, Callable[[], None]]]] = {}
        self._due_s = math.inf
        self._sooner = trio.Event()

    def expect(self, stream: DepartingStream, left: Callable[[], None]) -> None:
        """Call ``left`` once all that was written until now has left; maybe at once."""
        queue = self._waiting.get(stream)
        wait_s = 0.0 if queue else stream.departs_in_s(stream.position)
        if queue is None and not wait_s:
            left()
            return
        self._waiting.setdefault(stream, deque()).append((stream.position, left))
        if trio.current_time() + wait_s < self._due_s - POLL_MIN_S and not queue:
            self._sooner.set()

    def forget(self, stream: DepartingStream) -> None:
        """Expect nothing more of a stream."""
        self._waiting.pop(stream, None)

    async def run(self) -> NoReturn:
        """Ask while there is something to wait for, until cancelled."""
        while True:
            self._sooner = trio.Event()
            self._due_s = trio.current_time() + self._ask()
            with trio.move_on_at(self._due_s):
                await self._sooner.wait()

    def _ask(self) -> float:
        """Tell of what has left; return after how long to ask again."""
        next_s = math.inf
        for stream, queue in list(self._waiting.items()):
            wait_s = 0.0
            while queue and not (wait_s := stream.departs_in_s(queue[0][0])):
                queue.popleft()[1]()
            if queue:
                next_s = min(next_s, wait_s)
            else:
                self._waiting.pop(stream, None)
        return next_s
