"""One-to-many, what `echo2-scenario bench broadcast` compares with, on any `Streams`.

``one-to-many`` is a server as anybody would write it: a stream a peer, the payload on all of them
at once, its digest at the end. Everybody is connected before the clock starts.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Final

import trio

from echo2p2p.errors import EchoError
from echo2p2p.ids import DIGEST_BYTES, digest_of
from echo2p2p.net.ports import Endpoint, Streams

WRITE_BYTES: Final = 64 * 1024
READ_BYTES: Final = 256 * 1024


class OneToMany:
    """The server, with the payload in memory.

    Args:
        payload: What everybody gets.
        peers: How many there are.
    """

    def __init__(self, payload: bytes, peers: int) -> None:
        self._data = memoryview(payload + digest_of(payload))
        self._missing = peers
        self.connected = trio.Event()
        """All peers are there."""
        self.go = trio.Event()
        """For the caller to set."""
        self._ended = trio.Event()

    async def run(
        self,
        streams: Streams,
        endpoint: Endpoint,
        *,
        task_status: trio.TaskStatus[Endpoint] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled; the value given to the starter is where."""
        async with AsyncExitStack() as stack:
            where = await stack.enter_async_context(streams.listen(endpoint, self._serve))
            task_status.started(where)
            await trio.sleep_forever()

    async def _serve(self, stream: trio.abc.Stream, host: str) -> None:
        del host
        self._missing -= 1
        if not self._missing:
            self.connected.set()
        await self.go.wait()
        for start in range(0, len(self._data), WRITE_BYTES):
            await stream.send_all(self._data[start : start + WRITE_BYTES])
        await self._ended.wait()  # the peer closes


async def receive_whole(stream: trio.abc.Stream, payload_bytes: int) -> None:
    """Take a payload from `OneToMany`; waits without limit.

    Raises:
        EchoError: It was cut short, or is not what its digest says.
    """
    got = bytearray()
    while len(got) < payload_bytes + DIGEST_BYTES:
        data = await stream.receive_some(READ_BYTES)
        if not data:
            raise EchoError(f"one-to-many: the stream ended after {len(got)} bytes")
        got += data
    view = memoryview(got)
    if digest_of(view[:payload_bytes]) != bytes(view[payload_bytes:]):
        raise EchoError("one-to-many: the payload is not what its digest says")
