"""Whole frames over any trio stream: the shell around `echo2p2p.wire.frames`."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Final, Self

import trio

from echo2p2p.errors import LinkError, RemoteProtocolError, Violation
from echo2p2p.ids import ManifestId
from echo2p2p.limits import LINK_SEND_TIMEOUT_S
from echo2p2p.net.departure import DepartingStream
from echo2p2p.net.shaping import SLICE_BYTES_MAX, Shaper
from echo2p2p.wire.frames import Event, FrameDecoder, encode_frame
from echo2p2p.wire.messages import Chunk, RelayFrame

READ_BYTES: Final = 256 * 1024
SLICE_BYTES: Final = SLICE_BYTES_MAX
"""A long chunk is written in such parts, shorter ones where the uplink is limited."""


class FrameStream:
    """One reader task and one writer task at a time.

    Args:
        stream: Owned from here on: closing this closes it.
        send_timeout_s: Bytes that the remote does not take within this time mean a dead link.
        shaper: Whose limits hold; waiting for them is not part of ``send_timeout_s``.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        *,
        send_timeout_s: float = LINK_SEND_TIMEOUT_S,
        shaper: Shaper | None = None,
    ) -> None:
        self._stream = stream
        below = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
        self.departing = below if isinstance(below, DepartingStream) else None
        """What carries the stream, if it knows when bytes have left and not only been taken."""
        self._decoder = FrameDecoder()
        self._send_timeout_s = send_timeout_s
        self._shaper = shaper
        self._slice_bytes = SLICE_BYTES if shaper is None else shaper.write_bytes_max
        self._read_bytes = READ_BYTES if shaper is None else shaper.read_bytes_max
        self._writing_bytes = 0
        self._write_until_s = math.inf
        self.is_watched = False
        """Whether somebody compares `write_until_s` with the time, and ends a stream that is late.
        Else each write has a timer of its own, which is a tenth of what a link costs."""
        self._is_torn = False
        """A write has begun and is not through: nothing may follow what it has left."""
        self.heard_s = self.sent_s = trio.current_time()
        """When bytes last came in, and went out."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await trio.aclose_forcefully(self._stream)

    def write_until_s(self) -> float:
        """Return when the remote must have taken what is being written; infinity: nothing is."""
        return self._write_until_s

    def too_slow(self) -> LinkError:
        """Return what is wrong with a remote that did not."""
        return LinkError(
            f"the other side took none of {self._writing_bytes} bytes in {self._send_timeout_s:g} s"
        )

    async def send(self, *messages: RelayFrame) -> None:
        """Write messages, none of them a `Chunk`. A cancelled send leaves the stream unusable.

        They do not wait for the shaper: a link whose control frames are late is a dead link.

        Raises:
            LinkError: The remote is gone, or did not take them in time.
        """
        data = b"".join(map(encode_frame, messages))
        self._begin_write()
        if self._shaper is not None:
            self._shaper.charge_sent(len(data))
        await self._write(data)
        self._is_torn = False

    async def send_chunk(self, manifest_id: ManifestId, index: int, data: memoryview) -> None:
        """Write one chunk with its frame, without copying most of it. Not cancel-safe, as `send`.

        Raises:
            LinkError: The remote is gone, or did not take a part of it in time.
        """
        frame = Chunk(manifest_id=manifest_id, index=index, payload_bytes=len(data))
        head = encode_frame(frame)
        self._begin_write()
        for start in range(0, len(data), self._slice_bytes):
            part = data[start : start + self._slice_bytes]
            if self._shaper is not None:
                await self._shaper.before_sending(len(head) + len(part))
            await self._write(b"".join((head, part)) if head else part)
            head = b""
        self._is_torn = False

    async def receive(self) -> Event | None:
        """Wait for the next event; ``None`` once the remote closed cleanly. Cancel-safe.

        Waits without limit: the caller watches `heard_s`.

        Raises:
            RemoteProtocolError: The remote sent what is no frame.
            LinkError: The connection broke.
        """
        while (event := self._next_event()) is None and not self._decoder.ended:
            try:
                data = await self._stream.receive_some(self._read_bytes)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise LinkError("the connection broke while receiving") from error
            self.heard_s = trio.current_time()
            self._decoder.receive_data(data)
            if self._shaper is not None:
                await self._shaper.after_receiving(len(data))
        return event

    def _next_event(self) -> Event | None:
        try:
            return self._decoder.next_event()
        except RemoteProtocolError as error:
            if error.violation is not Violation.TRUNCATED:
                raise
            # A process that is killed, or told to close, stops wherever it is: nobody's fault.
            raise LinkError("the connection ended in the middle of a frame") from error

    def _begin_write(self) -> None:
        if self._is_torn:
            raise LinkError("an earlier write was cut off in the middle of a frame")
        self._is_torn = True

    async def _write(self, data: bytes | memoryview) -> None:
        self._writing_bytes = len(data)
        self._write_until_s = trio.current_time() + self._send_timeout_s
        try:
            if self.is_watched:
                await self._stream.send_all(data)
            else:
                with trio.fail_at(self._write_until_s):
                    await self._stream.send_all(data)
        except trio.TooSlowError as error:
            raise self.too_slow() from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkError("the connection broke while sending") from error
        finally:
            self._write_until_s = math.inf
        self.sent_s = trio.current_time()
