"""The links of one relay node: dialled as planned, accepted from any member, one for each peer.

`Connections` owns every link from its handshake to its end and tells its `Owner` of both. A link
fails in its own task, never in anybody else's. A peer that broke the protocol is not linked again
for a while; others are dialled again with a growing, jittered pause.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import trio

from echo2p2p.errors import LinkError, RemoteProtocolError
from echo2p2p.ids import SOURCE, Incarnation, ManifestId, PeerId
from echo2p2p.limits import NEIGHBOURS_MAX, Fill
from echo2p2p.net.crowd import Crowd
from echo2p2p.net.departure import Departures
from echo2p2p.net.link import Link, LinkSettings, open_link, watch_links
from echo2p2p.net.ports import Endpoint, Journal, Streams
from echo2p2p.net.redial import Backoff, RedialSettings
from echo2p2p.wire.frames import ChunkPayload
from echo2p2p.wire.handshake import NONCE_BYTES, Self
from echo2p2p.wire.messages import Address, Neighbour, RelayFrame

LINK_OPENED: Final = "link.opened"
LINK_CLOSED: Final = "link.closed"
LINK_REFUSED: Final = "link.refused"
LINK_VIOLATED: Final = "link.violated"
DIAL_RETRIED: Final = "dial.retried"
"""It failed, and will be tried again."""


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Bounds on the links of one node."""

    link: LinkSettings = field(default_factory=LinkSettings)
    redial: RedialSettings = field(default_factory=RedialSettings)
    dial_timeout_s: float = 5.0
    links_max: int = NEIGHBOURS_MAX
    handshakes_max: int = 64
    """Connections from outside that may be busy proving who they are; a newer one takes the place
    of the oldest, of the address that has most of them."""


def targets_of(
    neighbours: Iterable[Neighbour], source: Address | None, *, me: PeerId, dialable: bool
) -> dict[PeerId, Endpoint]:
    """Return whom we should dial, and where.

    Of two peers that can both be dialled the one with the smaller id dials; otherwise the one that
    cannot be dialled does. Everybody dials the source.
    """
    targets: dict[PeerId, Endpoint] = {}
    for neighbour in neighbours:
        peer_id, address = PeerId(neighbour.peer_id), neighbour.address
        if peer_id != me and address is not None and (not dialable or me < peer_id):
            targets[peer_id] = Endpoint(address.host, address.port)
    if source is not None and me != SOURCE:
        targets[SOURCE] = Endpoint(source.host, source.port)
    return targets


NOT_PLANNED: Final = "no link is planned"
GONE_MAX: Final = 4096
"""Peers that are remembered as gone; beyond it the first are forgotten."""


class LinkStatistics(NamedTuple):
    """One link that is up."""

    peer_id: PeerId
    rtt_s: float
    sent_bytes: int
    """Of chunk payload."""
    received_bytes: int


class Owner(Protocol):
    """What a node does with its links. Calls come between `link_opened` and `link_closed` only."""

    def link_opened(self, peer_id: PeerId, rtt_s: float) -> None:
        """A link may be sent to."""
        ...

    def link_closed(self, peer_id: PeerId) -> None:
        """It is gone."""
        ...

    def receive_frame(self, peer_id: PeerId, message: RelayFrame) -> None:
        """A frame came; a raised `RemoteProtocolError` ends the link."""
        ...

    def receive_chunk(self, peer_id: PeerId, chunk: ChunkPayload) -> None:
        """A chunk came; a raised `RemoteProtocolError` ends the link."""
        ...

    def read_chunk(self, manifest_id: ManifestId, index: int) -> memoryview | None:
        """Return a chunk that is to be sent, or ``None`` to skip it."""
        ...

    def sent_chunk(
        self, peer_id: PeerId, manifest_id: ManifestId, index: int, *, size: int | None
    ) -> None:
        """A chunk of ``size`` bytes left, or was skipped."""
        ...


class Connections:
    """The links of one node.

    Args:
        me: Our identity, shown in every handshake.
        owner: Told of all that happens.
        streams: The network.
        nonce: Draws fresh random bytes.
        rng: For jitter.
        journal: Where events go.
        settings: Bounds.
    """

    def __init__(
        self,
        *,
        me: Self,
        owner: Owner,
        streams: Streams,
        nonce: Callable[[int], bytes],
        rng: random.Random,
        journal: Journal,
        settings: ConnectionSettings,
    ) -> None:
        self._me = me
        self._owner = owner
        self._streams = streams
        self._nonce = nonce
        self._rng = rng
        self._journal = journal
        self._settings = settings
        self._sessions: dict[PeerId, _Session] = {}
        self._targets: dict[PeerId, Endpoint] = {}
        self._diallers: dict[PeerId, trio.CancelScope] = {}
        self._quarantined: dict[PeerId, float] = {}
        self._expected: frozenset[PeerId] = frozenset()
        self._incarnations: dict[PeerId, Incarnation] = {}
        """Of those that are expected, as last linked."""
        self._gone: dict[PeerId, Incarnation | None] = {}
        """Who was expected once and is not now, and its last life, if we have met it."""
        self._departures = Departures()
        self._strangers: Crowd[trio.CancelScope] = Crowd(settings.handshakes_max)
        self._nursery: trio.Nursery | None = None

    def start(self, nursery: trio.Nursery) -> None:
        """Dial from now on, and look after all links, in tasks of ``nursery``."""
        self._nursery = nursery
        nursery.start_soon(watch_links, self._links)
        nursery.start_soon(self._departures.run)
        for peer_id in self._targets:
            self._start_dialling(peer_id)

    def set_targets(self, targets: Mapping[PeerId, Endpoint]) -> None:
        """Dial these peers, and nobody else; links that we dialled otherwise are closed."""
        before, self._targets = self._targets, dict(targets)
        for peer_id, endpoint in before.items():
            if self._targets.get(peer_id) != endpoint and peer_id in self._diallers:
                self._diallers.pop(peer_id).cancel()
        for peer_id in self._targets:
            self._start_dialling(peer_id)

    def expect(self, peers: Iterable[PeerId]) -> None:
        """Say with whom links are planned.

        Whoever was among them and is no longer has left or was evicted, or is no neighbour now: its
        link is closed, and it is refused until it is planned again or comes in another life.
        Strangers, whom no plan has named yet, are served: they may have joined a moment ago.
        """
        before, self._expected = self._expected, frozenset(peers)
        for peer_id, session in self._sessions.items():
            if peer_id in self._expected:
                self._incarnations[peer_id] = session.link.peer.incarnation
        for peer_id in self._expected & self._gone.keys():
            del self._gone[peer_id]
        for peer_id in sorted(before - self._expected):
            self._gone[peer_id] = self._incarnations.pop(peer_id, None)
            if (link := self.link(peer_id)) is not None:
                link.close(NOT_PLANNED)
        while len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]

    def link(self, peer_id: PeerId) -> Link | None:
        """Return the live link to a peer."""
        session = self._sessions.get(peer_id)
        return session.link if session else None

    def _links(self) -> list[Link]:
        return [session.link for session in self._sessions.values()]

    def statistics(self) -> Iterator[LinkStatistics]:
        """Yield the counters of each live link."""
        for session in self._sessions.values():
            yield LinkStatistics(
                session.peer_id, session.link.rtt_s, session.sent_bytes, session.received_bytes
            )

    def fills(self) -> Iterator[Fill]:
        """Yield how full everything is that has a bound; of many alike, the fullest."""
        settings = self._settings
        waiting = [session.link.waiting for session in self._sessions.values()]
        yield Fill("links", len(self._sessions), settings.links_max)
        yield Fill("handshakes", len(self._strangers), settings.handshakes_max)
        yield Fill(
            "control frames of a link",
            max((frames for frames, _ in waiting), default=0),
            settings.link.queue_frames_max,
        )
        yield Fill(
            "bytes of control frames of a link",
            max((size for _, size in waiting), default=0),
            settings.link.queue_bytes_max,
        )

    async def accept(self, stream: trio.abc.Stream, host: str) -> None:
        """Serve a connection that somebody at ``host`` opened to us, until it ends."""
        if len(self._sessions) >= self._settings.links_max:
            return
        with trio.CancelScope() as scope:
            oldest = self._strangers.enter(scope, host)
            if oldest is not None:
                oldest.cancel()
            try:
                link = await self._open(stream, None)
            finally:
                self._strangers.leave(scope)
        if scope.cancelled_caught:
            self._journal.event(LINK_REFUSED, peer="", detail="gave way to newer connections")
        elif link is not None:
            await self._serve(link)

    def _start_dialling(self, peer_id: PeerId) -> None:
        if self._nursery is not None and peer_id not in self._diallers:
            scope = self._diallers[peer_id] = trio.CancelScope()
            self._nursery.start_soon(self._keep_link, peer_id, self._targets[peer_id], scope)

    async def _keep_link(
        self, peer_id: PeerId, endpoint: Endpoint, scope: trio.CancelScope
    ) -> None:
        """Dial, serve, wait, and again, until the plan changes."""
        backoff = Backoff(self._settings.redial, self._rng)
        with scope:
            while True:
                session = self._sessions.get(peer_id)
                if session is not None:
                    await session.ended.wait()
                await trio.sleep_until(self._quarantined.get(peer_id, -math.inf))
                lived_s = None
                try:
                    stream = await self._streams.dial(
                        endpoint, timeout_s=self._settings.dial_timeout_s
                    )
                    link = await self._open(stream, peer_id)
                    lived_s = None if link is None else await self._serve(link)
                except LinkError as error:
                    self._journal.event(DIAL_RETRIED, peer=peer_id, detail=str(error))
                await trio.sleep(backoff.wait_s(lived_s=lived_s))

    async def _open(self, stream: trio.abc.Stream, expected: PeerId | None) -> Link | None:
        """Shake hands; return nothing, but an event, if that fails."""
        try:
            return await open_link(
                stream,
                self._me,
                nonce=self._nonce(NONCE_BYTES),
                expected=expected,
                settings=self._settings.link,
            )
        except (RemoteProtocolError, LinkError) as error:
            self._journal.event(LINK_REFUSED, peer=expected or "", detail=str(error))
            return None

    async def _serve(self, link: Link) -> float | None:
        """Run one connection to its end; return how long it was a link, if ever."""
        session = _Session(self._owner, link)
        refusal = self._register(session)
        start_s = trio.current_time()
        try:
            if refusal is not None:
                session.ended.set()  # what it has sent right behind its proof is not heard
                link.close(refusal)
            await self._run(session)
        finally:
            self._unregister(session)
        return trio.current_time() - start_s if refusal is None else None

    async def _run(self, session: _Session) -> None:
        try:
            why = await session.link.run(session, self._departures)
        except LinkError as error:
            why = str(error)
        except RemoteProtocolError as error:
            why = str(error)
            self._quarantine(session.peer_id)
            self._journal.event(
                LINK_VIOLATED, peer=session.peer_id, violation=error.violation.value
            )
        self._journal.event(LINK_CLOSED, peer=session.peer_id, detail=why)

    def _quarantine(self, peer_id: PeerId) -> None:
        redial = self._settings.redial
        pause_s = redial.quarantine_source_s if peer_id == SOURCE else redial.quarantine_s
        now = trio.current_time()
        live = {peer: until for peer, until in self._quarantined.items() if until > now}
        self._quarantined = live | {peer_id: now + pause_s}

    def _register(self, session: _Session) -> str | None:
        """Make a link part of the node; return why not, if not."""
        now = trio.current_time()
        peer_id = session.peer_id
        old = self._sessions.get(peer_id)
        if self._quarantined.get(peer_id, now) > now:
            return "quarantined"
        incarnation = session.link.peer.incarnation
        if peer_id in self._gone:
            last = self._gone[peer_id]
            if last is None or incarnation <= last:
                return NOT_PLANNED
        if old is not None and old.link.peer.incarnation > incarnation:
            return "a newer incarnation is linked"
        if old is None and len(self._sessions) >= self._settings.links_max:
            return "too many links"
        if old is not None:
            old.link.close("replaced by a newer link")
            self._unregister(old)
        self._sessions[peer_id] = session
        if peer_id in self._expected:
            self._incarnations[peer_id] = incarnation
        self._journal.event(LINK_OPENED, peer=peer_id, rtt_s=session.link.rtt_s)
        self._owner.link_opened(peer_id, session.link.rtt_s)
        return None

    def _unregister(self, session: _Session) -> None:
        if self._sessions.get(session.peer_id) is session:
            del self._sessions[session.peer_id]
            self._owner.link_closed(session.peer_id)
        session.ended.set()


class _Session:
    """One live link as `LinkHandler`; deaf once it is unregistered."""

    def __init__(self, owner: Owner, link: Link) -> None:
        self._owner = owner
        self.link = link
        self.peer_id = link.peer.peer_id
        self.ended = trio.Event()
        self.sent_bytes = self.received_bytes = 0
        self._writing_bytes: deque[int] = deque()
        """Of each chunk that was read and has not left."""

    def frame(self, message: RelayFrame) -> None:
        if not self.ended.is_set():
            self._owner.receive_frame(self.peer_id, message)

    def chunk(self, payload: ChunkPayload) -> None:
        if not self.ended.is_set():
            self.received_bytes += len(payload.data)
            self._owner.receive_chunk(self.peer_id, payload)

    def read_chunk(self, manifest_id: ManifestId, index: int) -> memoryview | None:
        data = None if self.ended.is_set() else self._owner.read_chunk(manifest_id, index)
        if data is not None:
            self._writing_bytes.append(len(data))
        return data

    def chunk_sent(self, manifest_id: ManifestId, index: int, *, sent: bool) -> None:
        if not self.ended.is_set():
            size = self._writing_bytes.popleft() if sent else None
            self.sent_bytes += size or 0
            self._owner.sent_chunk(self.peer_id, manifest_id, index, size=size)
