"""Cut the byte stream of a relay link into messages and chunk payloads, and back.

A frame is a 4-byte big-endian length and that many bytes of MessagePack. After a `Chunk` frame
come its ``payload_bytes`` raw bytes, outside of any frame: so a payload is copied once, straight
into its own buffer, and never passes through the parser.

Sans-IO: bytes in, events out. Refused, with `RemoteProtocolError` and for good: a length over
`FRAME_BYTES_MAX` (from its four bytes alone), an empty frame, a message that is no `RelayFrame`,
a manifest id or chunk index out of shape, a payload over its bound, a stream that ends half-way.
Rejected alternative: payload inside the frame; it must then be parsed, copied and bounded twice.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, cast

from echo2p2p.errors import LocalProtocolError, RemoteProtocolError, Violation
from echo2p2p.ids import DIGEST_BYTES, MANIFEST_ID_BYTES, ManifestId
from echo2p2p.limits import CHUNK_BYTES_MAX, CHUNKS_MAX, FRAME_BYTES_MAX
from echo2p2p.wire import codec
from echo2p2p.wire.messages import (
    Cancel,
    Chunk,
    Have,
    Reject,
    RelayFrame,
    Request,
    Want,
)

HEADER: Final = struct.Struct(">I")
INDEX_BYTES_MAX: Final = DIGEST_BYTES * CHUNKS_MAX
"""Chunk 0 holds one digest for each other chunk, so it alone may be longer than a chunk."""

_RELAY_FRAME: Final = cast("type[RelayFrame]", RelayFrame)


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole message; never a `Chunk`, which arrives as a `ChunkPayload`."""

    message: RelayFrame


@dataclass(frozen=True, slots=True)
class ChunkPayload:
    """One whole chunk, unverified."""

    manifest_id: ManifestId
    index: int
    data: memoryview
    """Read-only; owns its memory, so it may be kept."""


Event = Frame | ChunkPayload


def encode_frame(message: RelayFrame) -> bytes:
    """Return ``message`` behind its length. After a `Chunk` the caller must send its payload.

    Raises:
        LocalProtocolError: It is longer than the other side would accept.
    """
    body = codec.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise LocalProtocolError(f"a {type(message).__name__} of {len(body)} bytes")
    return HEADER.pack(len(body)) + body


class FrameDecoder:
    """Turn arbitrary splits of a byte stream back into events.

    Between calls the buffer holds at most one unfinished frame plus what the caller fed and did
    not take. After an error every later call raises that error again.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._chunk: Chunk | None = None
        self._payload = bytearray()
        self._filled = 0
        self._ended = False
        self._error: RemoteProtocolError | None = None

    @property
    def ended(self) -> bool:
        """Whether the stream has ended, cleanly as far as is known."""
        return self._ended

    @property
    def mid_frame(self) -> bool:
        """Whether bytes were fed that no event has come of yet."""
        return bool(self._buffer) or self._chunk is not None

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Add what was read, in stream order; ``b""`` means that the stream ended.

        ``data`` is copied, so the caller may reuse its buffer.

        Raises:
            RemoteProtocolError: An earlier call found the stream broken.
            LocalProtocolError: Data after the end.
        """
        if self._error is not None:
            raise self._error
        if not data:
            self._ended = True
            return
        if self._ended:
            raise LocalProtocolError("data after the end of the stream")
        view = memoryview(data)
        if self._chunk is not None and not self._buffer:
            view = view[self._fill(view) :]
        self._buffer += view

    def next_event(self) -> Event | None:
        """Take the next event, or return ``None`` when more bytes are needed (or none will come).

        Raises:
            RemoteProtocolError: The other side broke the protocol; see the module's header.
        """
        if self._error is not None:
            raise self._error
        try:
            return self._next_event()
        except RemoteProtocolError as error:
            self._error = error
            self._buffer.clear()
            self._payload = bytearray()
            raise

    def _next_event(self) -> Event | None:
        while True:
            if self._chunk is not None:
                self._drain_into_payload()
                if self._filled == len(self._payload):
                    return self._take_chunk(self._chunk)
                break
            message = self._next_message()
            if message is None:
                break
            if not isinstance(message, Chunk):
                return Frame(message)
            _check_payload_length(message)
            self._chunk, self._payload, self._filled = message, bytearray(message.payload_bytes), 0
        if self._ended and (self._buffer or self._chunk is not None):
            raise RemoteProtocolError(Violation.TRUNCATED, "the stream ended inside a frame")
        return None

    def _next_message(self) -> RelayFrame | None:
        if len(self._buffer) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self._buffer)
        if length > FRAME_BYTES_MAX:
            raise RemoteProtocolError(Violation.FRAME_TOO_LONG, f"{length} > {FRAME_BYTES_MAX}")
        end = HEADER.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[HEADER.size : end])
        del self._buffer[:end]
        message = codec.decode(body, _RELAY_FRAME)
        _check_shape(message)
        return message

    def _fill(self, view: memoryview) -> int:
        count = min(len(view), len(self._payload) - self._filled)
        memoryview(self._payload)[self._filled : self._filled + count] = view[:count]
        self._filled += count
        return count

    def _drain_into_payload(self) -> None:
        if self._buffer:
            with memoryview(self._buffer) as view:
                count = self._fill(view)
            del self._buffer[:count]

    def _take_chunk(self, chunk: Chunk) -> ChunkPayload:
        data = memoryview(self._payload).toreadonly()
        self._chunk, self._payload, self._filled = None, bytearray(), 0
        return ChunkPayload(ManifestId(chunk.manifest_id), chunk.index, data)


# Made once: a union made in each call costs more than the check.
_OF_A_PAYLOAD: Final = (Want, Have, Request, Chunk, Reject, Cancel)
_OF_ALL_CHUNKS: Final = (Want, Have)


def _check_shape(message: RelayFrame) -> None:
    if isinstance(message, _OF_A_PAYLOAD):
        if len(message.manifest_id) != MANIFEST_ID_BYTES:
            raise RemoteProtocolError(
                Violation.MALFORMED, f"manifest id of {len(message.manifest_id)} bytes"
            )
        index = 0 if isinstance(message, _OF_ALL_CHUNKS) else message.index
        if not 0 <= index <= CHUNKS_MAX:
            raise RemoteProtocolError(Violation.MALFORMED, f"chunk index {index}")


def _check_payload_length(chunk: Chunk) -> None:
    bytes_max = INDEX_BYTES_MAX if chunk.index == 0 else CHUNK_BYTES_MAX
    if chunk.payload_bytes <= 0:
        raise RemoteProtocolError(Violation.MALFORMED, f"chunk of {chunk.payload_bytes} bytes")
    if chunk.payload_bytes > bytes_max:
        raise RemoteProtocolError(
            Violation.FRAME_TOO_LONG, f"chunk of {chunk.payload_bytes} > {bytes_max}"
        )
