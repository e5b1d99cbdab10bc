"""One authenticated relay link: handshake, reader, writer, pings, and an orderly end.

The link decides nothing. It hands frames and chunks to a `LinkHandler`, and writes what it is
given: control frames first, then chunks, whose bytes are read from the handler only when their
turn comes. Handlers are synchronous, so that what a frame causes is queued before the next frame
is read, and nobody waits for a slow remote but its own writer.

A remote that breaks the protocol is told its violation and cut off; one that does not read, or is
silent for too long, is cut off without a word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn, Protocol

import trio

from echo2p2p.broadcast.liveness import (
    ACCEPTOR_PATIENCE,
    DEAD_SILENT_S,
    PING_EARLY_S,
    PING_IDLE_S,
    Dead,
    Liveness,
    SendPing,
)
from echo2p2p.errors import LinkError, RemoteProtocolError, Violation
from echo2p2p.ids import ManifestId, PeerId
from echo2p2p.limits import LINK_SEND_TIMEOUT_S, MIB
from echo2p2p.net import tls_streams
from echo2p2p.net.departure import Departures
from echo2p2p.net.shaping import Shaper
from echo2p2p.net.stream import FrameStream
from echo2p2p.wire.frames import ChunkPayload
from echo2p2p.wire.handshake import Authenticated, Handshake, Self
from echo2p2p.wire.messages import Goodbye, Have, Hello, Offer, Ping, Pong, Proof, RelayFrame

WATCH_EVERY_S: Final = 0.25
"""Links are looked at no more often than this."""
FRAME_BYTES: Final = 256
"""Of a frame in memory, beside what it carries."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Bounds of one link."""

    handshake_timeout_s: float = 10.0
    send_timeout_s: float = LINK_SEND_TIMEOUT_S
    ping_idle_s: float = PING_IDLE_S
    dead_silent_s: float = DEAD_SILENT_S
    goodbye_timeout_s: float = 1.0
    queue_frames_max: int = 4096
    queue_bytes_max: int = 16 * MIB
    """Control frames that wait for a remote that does not read, and their bytes; more end the
    link."""
    shaper: Shaper | None = None
    """Whose bytes this link's are."""


class LinkHandler(Protocol):
    """What a link's owner does with it, synchronously and quickly.

    A raised `RemoteProtocolError` ends the link with that violation; anything else is a bug.
    """

    def frame(self, message: RelayFrame) -> None:
        """A frame came in, of a kind that is not the link's own business."""
        ...

    def chunk(self, payload: ChunkPayload) -> None:
        """A chunk came in, unverified."""
        ...

    def read_chunk(self, manifest_id: ManifestId, index: int) -> memoryview | None:
        """Return the bytes of a chunk whose turn has come; ``None``: skip it."""
        ...

    def chunk_sent(self, manifest_id: ManifestId, index: int, *, sent: bool) -> None:
        """A chunk given to `Link.send_chunk_nowait` has left, in their order, or was skipped."""
        ...


async def open_link(
    stream: trio.abc.Stream,
    me: Self,
    *,
    nonce: bytes,
    expected: PeerId | None = None,
    settings: LinkSettings | None = None,
) -> Link:
    """Authenticate both ends. The stream is the link's if this returns; else it is closed.

    In TLS the certificate must be that of the member which the hello proves: else whoever got hold
    of another's key and card could use them from a connection of its own.

    Raises:
        RemoteProtocolError: The other end is not whom it should be; it was told.
        LinkError: The connection broke, or the handshake took too long.
    """
    settings = settings or LinkSettings()
    shaper = settings.shaper
    frames = FrameStream(stream, send_timeout_s=settings.send_timeout_s, shaper=shaper)
    opened = False
    try:
        with trio.fail_after(settings.handshake_timeout_s):
            wanted = await tls_streams.shake_hands(stream, expected)
            peer, rtt_s = await _shake_hands(frames, Handshake(me, nonce=nonce, expected=wanted))
        opened = True
    except trio.TooSlowError as error:
        raise LinkError(f"no handshake in {settings.handshake_timeout_s:g} s") from error
    except RemoteProtocolError as error:
        await _say_goodbye(frames, error.violation.value, settings)
        raise
    finally:
        if not opened:
            await trio.aclose_forcefully(stream)
    return Link(frames, peer, rtt_s, settings, is_dialler=expected is not None)


async def _shake_hands(frames: FrameStream, handshake: Handshake) -> tuple[Authenticated, float]:
    """Return who is there, and the round trip: our hello's until the proof that answers it."""
    start_s = trio.current_time()
    await frames.send(handshake.start())
    while True:
        event = await frames.receive()
        if event is None:
            raise LinkError("closed during the handshake")
        if isinstance(event, ChunkPayload):
            raise RemoteProtocolError(Violation.UNEXPECTED, "chunk during the handshake")
        if isinstance(event.message, Goodbye):
            raise LinkError(f"refused by the other side: {event.message.reason[:100]}")
        step = handshake.receive(event.message)
        if isinstance(step, Authenticated):
            return step, trio.current_time() - start_s
        await frames.send(step)


async def _say_goodbye(frames: FrameStream, reason: str, settings: LinkSettings) -> None:
    """Tell the other side why, if it listens."""
    with trio.move_on_after(settings.goodbye_timeout_s, shield=True):
        try:
            await frames.send(Goodbye(reason=reason))
        except LinkError:
            return


class Link:
    """One link, from its handshake to its end; `run` once, send any time."""

    def __init__(
        self,
        frames: FrameStream,
        peer: Authenticated,
        rtt_s: float,
        settings: LinkSettings,
        *,
        is_dialler: bool,
    ) -> None:
        self.peer = peer
        self.rtt_s = rtt_s
        """As measured by the handshake."""
        self._frames = frames
        self._settings = settings
        self._control: deque[RelayFrame] = deque()
        self._control_bytes = 0
        self._chunks: deque[tuple[ManifestId, int]] = deque()
        self._wake = trio.Event()
        self._ended = trio.CancelScope()
        self._failure: RemoteProtocolError | LinkError | None = None
        self._goodbye: str | None = None
        self._liveness = Liveness(
            trio.current_time(),
            ping_idle_s=settings.ping_idle_s * (1.0 if is_dialler else ACCEPTOR_PATIENCE),
            dead_silent_s=settings.dead_silent_s,
            early_s=PING_EARLY_S if is_dialler else 0.0,
        )

    @property
    def waiting(self) -> tuple[int, int]:
        """Control frames that wait for the remote to read, and their bytes."""
        return len(self._control), self._control_bytes

    def send_nowait(self, message: RelayFrame) -> None:
        """Queue a control frame. A full queue ends the link: the remote does not read."""
        settings = self._settings
        self._control_bytes += _size_of(message)
        if (
            len(self._control) >= settings.queue_frames_max
            or self._control_bytes > settings.queue_bytes_max
        ):
            self.fail(LinkError(f"{len(self._control)} frames wait; the other side does not read"))
            return
        self._control.append(message)
        self._wake.set()

    def send_chunk_nowait(self, manifest_id: ManifestId, index: int) -> None:
        """Queue a chunk; the caller bounds how many, and learns of each by `chunk_sent`."""
        self._chunks.append((manifest_id, index))
        self._wake.set()

    def fail(self, error: RemoteProtocolError | LinkError) -> None:
        """End the link as if ``error`` had come from inside; `run` raises it. The first wins."""
        if self._failure is None and self._goodbye is None:
            self._failure = error
        self._ended.cancel()

    def close(self, reason: str) -> None:
        """End the link with a goodbye; `run` returns."""
        if self._failure is None:
            self._goodbye = self._goodbye or reason
        self._ended.cancel()

    def look(self, now: float) -> float:
        """Ping if it is time, end the link if the remote is gone; return when to look again."""
        frames, liveness = self._frames, self._liveness
        if frames.is_watched and now >= frames.write_until_s():
            self.fail(frames.too_slow())
        liveness.heard(frames.heard_s)
        liveness.sent(frames.sent_s)
        match liveness.on_time(now):
            case SendPing(nonce=nonce):
                self.send_nowait(Ping(nonce=nonce))
            case Dead(silent_s=silent_s):
                self.fail(LinkError(f"silent for {silent_s:.1f} s"))
            case None:
                pass
        return min(liveness.next_deadline(), frames.write_until_s())

    async def run(self, handler: LinkHandler, departures: Departures) -> str:
        """Serve the link until it ends, then close it.

        Somebody must `watch_links` and run ``departures`` meanwhile.

        Returns:
            Why it ended: our reason or the remote's.

        Raises:
            RemoteProtocolError: The remote broke the protocol; it was told.
            LinkError: It is gone, silent, or does not read.
        """
        self._frames.is_watched = True
        async with self._frames:
            try:
                with self._ended:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._guarded, partial(self._read, handler))
                        nursery.start_soon(self._guarded, partial(self._write, handler, departures))
            finally:
                if self._frames.departing is not None:
                    departures.forget(self._frames.departing)
            if isinstance(self._failure, RemoteProtocolError):
                await _say_goodbye(self._frames, self._failure.violation.value, self._settings)
            elif self._failure is None and self._goodbye is not None:
                await _say_goodbye(self._frames, self._goodbye, self._settings)
        if self._failure is not None:
            raise self._failure
        return self._goodbye or "closed by the other side"

    async def _guarded(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a part of the link; its end, good or bad, is the link's."""
        try:
            await task()
        except (RemoteProtocolError, LinkError) as error:
            self.fail(error)
        self._ended.cancel()

    async def _read(self, handler: LinkHandler) -> None:
        while (event := await self._frames.receive()) is not None:
            if isinstance(event, ChunkPayload):
                handler.chunk(event)
                continue
            match event.message:
                case Ping(nonce=nonce):
                    self.send_nowait(Pong(nonce=nonce))
                case Pong(nonce=nonce):
                    self._liveness.pong(nonce, trio.current_time())
                case Goodbye(reason=reason):
                    self.fail(LinkError(f"the other side says goodbye: {reason[:100]}"))
                case Hello() | Proof():
                    raise RemoteProtocolError(Violation.UNEXPECTED, "a second handshake")
                case message:
                    handler.frame(message)

    async def _write(self, handler: LinkHandler, departures: Departures) -> NoReturn:
        stream = self._frames.departing
        while True:
            if self._control:
                messages = tuple(self._control)
                self._control.clear()
                self._control_bytes = 0
                await self._frames.send(*messages)
            elif self._chunks:
                manifest_id, index = self._chunks.popleft()
                data = handler.read_chunk(manifest_id, index)
                if data is not None:
                    await self._frames.send_chunk(manifest_id, index, data)
                left = partial(handler.chunk_sent, manifest_id, index, sent=data is not None)
                if data is not None and stream is not None:
                    departures.expect(stream, left)  # the next one is written behind it
                else:
                    left()
            else:
                self._wake = trio.Event()
                await self._wake.wait()


async def watch_links(links: Callable[[], Iterable[Link]]) -> NoReturn:
    """Look after all links of a node, with one timer.

    A timer for each link was a fifth of what a node with idle links did. Those that it dialled are
    pinged together, as each may be pinged a little early.
    """
    while True:
        now = trio.current_time()
        due_s = min([now + PING_IDLE_S, *(link.look(now) for link in links())])
        await trio.sleep_until(max(due_s, now + WATCH_EVERY_S))


def _size_of(message: RelayFrame) -> int:
    """Return about how much memory a frame takes that waits."""
    match message:
        case Have(indices=indices):
            return FRAME_BYTES + len(indices.data)
        case Offer(manifest=signed):
            return FRAME_BYTES + len(signed.body)
        case _:
            return FRAME_BYTES
