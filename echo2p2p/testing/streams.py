"""A stream around a stream, for tests that change one thing about it."""

from __future__ import annotations

import trio


class PassingStream(trio.abc.Stream):
    """Passes everything on, until something of it is overridden.

    Args:
        inner: Owned from here on.
    """

    def __init__(self, inner: trio.abc.Stream) -> None:
        self.inner = inner

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `trio.abc.SendStream`."""
        await self.inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """See `trio.abc.SendStream`."""
        await self.inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """See `trio.abc.ReceiveStream`."""
        return await self.inner.receive_some(max_bytes)

    async def aclose(self) -> None:
        """See `trio.abc.AsyncResource`."""
        await self.inner.aclose()
