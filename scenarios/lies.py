"""What a lying peer does: the real peer's code behind a port that twists what goes out.

A liar runs everything that an honest peer runs; only its `Streams` and its `HttpClients` are
wrapped. So its lies are protocol-aware (frames are taken apart and put together again) and come at
the moments at which the real code speaks. Several lies can be told at once, and each can begin and
end at any time: frames that were begun honestly are ended honestly.

The same wrapper shows every frame and every upload of every machine to whoever watches, for the
checkers.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final

import trio

from echo2p2p.errors import RemoteProtocolError
from echo2p2p.ids import ManifestId, manifest_id_of
from echo2p2p.net.ports import Accept, Endpoint, Streams
from echo2p2p.testing.network import SimStream
from echo2p2p.weights.manifest import chunk_count
from echo2p2p.wire import codec
from echo2p2p.wire.arrays import from_tokens
from echo2p2p.wire.frames import HEADER, ChunkPayload, Event, Frame, FrameDecoder, encode_frame
from echo2p2p.wire.messages import (
    Chunk,
    Goodbye,
    Have,
    Hello,
    ManifestHeader,
    Offer,
    Ping,
    Pong,
    Proof,
    Reject,
)

CORRUPT: Final = "corrupt"
"""Half of the chunks have a wrong byte."""
WITHHOLD: Final = "withhold"
"""Chunks are announced and asked for, but never sent, and nothing is rejected."""
LYING_HAVE: Final = "lying-have"
"""Everything is announced, whatever is held."""
GARBAGE: Final = "garbage"
"""Random bytes between frames, now and then."""
DUPLICATE: Final = "duplicate"
"""Everything comes twice."""
REORDER: Final = "reorder"
"""Frames overtake each other."""
REPLAY: Final = "replay"
"""Old announcements and chunks come again."""
SLOW_READER: Final = "slow-reader"
"""What others send is read a little every few seconds."""
RELAY_LIES: Final = (
    CORRUPT,
    WITHHOLD,
    LYING_HAVE,
    GARBAGE,
    DUPLICATE,
    REORDER,
    REPLAY,
    SLOW_READER,
)

GARBAGE_SHARE: Final = 0.02
GARBAGE_BYTES: Final = 64
REMEMBERED: Final = 16
SLOW_READ_S: Final = 3.0
SLOW_READ_BYTES: Final = 4096
_TOLD: Final = (b"\xa1t\xa5offer", b"\xa1t\xa5chunk")
"""How the frames go on that are shown to whoever watches, after the first byte: the tag."""
_NEVER_TWISTED: Final = (Hello, Proof, Ping, Pong, Goodbye)


@dataclass
class Lies:
    """What one machine lies about now.

    Attributes:
        told: Names from `RELAY_LIES` and `scenarios.false_uploads.UPLOAD_LIES`.
        rng: Decides when, for lies that are told now and then.
    """

    rng: random.Random
    told: set[str] = field(default_factory=set)

    @property
    def on_links(self) -> bool:
        """Whether frames are to be twisted."""
        return any(lie in self.told for lie in RELAY_LIES if lie != SLOW_READER)


Seen = Callable[[Event], None]
"""Called with each offer and each chunk before it is sent, as the honest code meant it; with other
frames perhaps."""


class WatchedStreams:
    """`Streams` of one machine whose outgoing frames are watched, and twisted while it lies.

    Args:
        inner: The machine's real port.
        lies: Of the machine.
        seen: Told of every honest frame and chunk.
        hides: Whether the machine is behind NAT: it listens, but has no address to give.
    """

    def __init__(self, inner: Streams, lies: Lies, seen: Seen, *, hides: bool = False) -> None:
        self._inner = inner
        self._lies = lies
        self._seen = seen
        self._hides = hides

    async def dial(self, endpoint: Endpoint, *, timeout_s: float) -> trio.abc.Stream:
        """See `Streams`."""
        return self._watch(await self._inner.dial(endpoint, timeout_s=timeout_s))

    def listen(self, endpoint: Endpoint, accept: Accept) -> AbstractAsyncContextManager[Endpoint]:
        """See `Streams`."""

        @contextlib.asynccontextmanager
        async def listening() -> AsyncIterator[Endpoint]:
            async with self._inner.listen(endpoint, lambda s, h: accept(self._watch(s), h)) as real:
                yield Endpoint("", real.port) if self._hides else real

        return listening()

    def _watch(self, stream: trio.abc.Stream) -> trio.abc.Stream:
        return _WatchedStream(stream, _Twister(self._lies), self._lies, self._seen)


class _WatchedStream(trio.abc.Stream):
    """A stream whose frames are taken apart on their way out."""

    def __init__(self, inner: trio.abc.Stream, twister: _Twister, lies: Lies, seen: Seen) -> None:
        self._inner = inner
        self._twister = twister
        self._lies = lies
        self._seen = seen
        self._decoder = FrameDecoder()
        self._twists = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send what was meant, or something else."""
        if not self._decoder.mid_frame:
            self._twists = self._lies.on_links
        if not (self._twists or self._decoder.mid_frame) and _tells_nothing(data):
            await self._send(data)
            return
        self._decoder.receive_data(data)
        out: list[bytes] = []
        while (event := self._decoder.next_event()) is not None:
            if not self._twists:
                self._seen(event)
            else:
                out += self._twister.twist(event)
        await self._send(b"".join(out) if self._twists else data)

    async def _send(self, data: bytes | bytearray | memoryview) -> None:
        """Send without a task step if the line takes it at once, as it does nearly always."""
        if isinstance(self._inner, SimStream):
            await trio.lowlevel.checkpoint_if_cancelled()
            if self._inner.send_nowait(data):
                return
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """See `trio.abc.SendStream`."""
        await self._inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Read, at leisure if the machine is a slow reader."""
        if SLOW_READER in self._lies.told:
            await trio.sleep(SLOW_READ_S)
            max_bytes = min(max_bytes or SLOW_READ_BYTES, SLOW_READ_BYTES)
        return await self._inner.receive_some(max_bytes)

    async def aclose(self) -> None:
        """Close the real one."""
        await self._inner.aclose()


def _tells_nothing(data: bytes | bytearray | memoryview) -> bool:
    """Return whether these are whole frames that nobody who watches wants to see.

    Most are: to parse each of them would cost as much as all that their receiver does with them.
    """
    at = 0
    while at + HEADER.size <= len(data):
        body = at + HEADER.size
        if bytes(data[body + 1 : body + 1 + len(_TOLD[0])]).startswith(_TOLD):
            return False
        at = body + HEADER.unpack_from(data, at)[0]
    return at == len(data)


class _Twister:
    """Makes the bytes of one stream from its events."""

    def __init__(self, lies: Lies) -> None:
        self._lies = lies
        self._recent: deque[bytes] = deque(maxlen=REMEMBERED)
        self._counts: dict[ManifestId, int] = {}
        self._overtaken = b""

    def twist(self, event: Event) -> list[bytes]:
        """Return what is sent instead."""
        told, rng = self._lies.told, self._lies.rng
        if isinstance(event, Frame) and isinstance(event.message, Offer):
            self._note(event.message)
        data = self._changed(event)
        if isinstance(event, Frame) and isinstance(event.message, _NEVER_TWISTED):
            return [self._flush(), data]
        if not data:
            return []
        out = [data]
        if DUPLICATE in told:
            out.append(data)
        if REPLAY in told:
            if self._recent:
                out.append(rng.choice(self._recent))
            self._recent.append(data)
        if GARBAGE in told and rng.random() < GARBAGE_SHARE:
            out.append(rng.randbytes(GARBAGE_BYTES))
        if REORDER in told:
            if not self._overtaken:
                self._overtaken = b"".join(out)
                return []
            return [*out, self._flush()]
        return out

    def _flush(self) -> bytes:
        held, self._overtaken = self._overtaken, b""
        return held

    def _changed(self, event: Event) -> bytes:
        told, rng = self._lies.told, self._lies.rng
        if isinstance(event, ChunkPayload):
            if WITHHOLD in told:
                return b""
            data = bytearray(event.data)
            if CORRUPT in told and rng.random() < 0.5:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            head = Chunk(manifest_id=event.manifest_id, index=event.index, payload_bytes=len(data))
            return encode_frame(head) + bytes(data)
        message = event.message
        if isinstance(message, Reject) and WITHHOLD in told:
            return b""
        if isinstance(message, Have) and told & {LYING_HAVE, WITHHOLD}:
            count = self._counts.get(ManifestId(message.manifest_id))
            if count is not None:
                everything = from_tokens(list(range(count)))
                return encode_frame(
                    Have(manifest_id=message.manifest_id, indices=everything, ask=message.ask)
                )
        return encode_frame(message)

    def _note(self, offer: Offer) -> None:
        with contextlib.suppress(RemoteProtocolError):
            header = codec.decode(offer.manifest.body, ManifestHeader)
            self._counts[manifest_id_of(offer.manifest.body)] = chunk_count(header)
