"""A node of the broadcast on the network: links, payloads, and the core between them.

`RelayNode` keeps the links that the plan names (`connections`), verifies every manifest and every
chunk before anything else happens to it, feeds `echo2p2p.broadcast.swarm` and performs what it
answers. The coordinator's own relay and every peer's are this class; they differ in who they are.

A peer that breaks the protocol, or sends a chunk that does not match its digest, loses its link
and waits for a new one. Failures of links, of whatever kind, end in the link's own task. What we do
not follow is dropped and counted. Nothing here chooses whom to trust but by the run's key.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Final

import trio

from echo2p2p.broadcast.effects import Effect, SendReject
from echo2p2p.broadcast.swarm import Swarm
from echo2p2p.errors import (
    IntegrityError,
    LocalProtocolError,
    RemoteProtocolError,
    Violation,
)
from echo2p2p.ids import SOURCE, ManifestId, PeerId, manifest_id_of
from echo2p2p.limits import Fill
from echo2p2p.net.connections import Connections, targets_of
from echo2p2p.net.payloads import (
    BadChunks,
    Begin,
    Passed,
    Payload,
    RelaySettings,
    RelayStatistics,
    delta_before,
    in_memory,
    open_manifest,
    payload_fills,
)
from echo2p2p.net.perform import perform_effect
from echo2p2p.net.ports import Endpoint, Entropy, Journal, SharedState, Streams
from echo2p2p.weights.assembly import Added, Assembly, Early
from echo2p2p.weights.manifest import check_header, is_step
from echo2p2p.wire.arrays import to_tokens
from echo2p2p.wire.frames import ChunkPayload
from echo2p2p.wire.handshake import Self
from echo2p2p.wire.messages import (
    Address,
    Cancel,
    Have,
    ManifestHeader,
    Neighbour,
    Offer,
    Reject,
    RelayFrame,
    Request,
    Signed,
    Want,
)

CHUNK_REJECTED: Final = "chunk.rejected"
MANIFEST_REFUSED: Final = "manifest.refused"
PAYLOAD_FOLLOWED: Final = "payload.followed"
PAYLOAD_COMPLETED: Final = "payload.completed"


class RelayNode:
    """One node; `run` it once, call everything else from inside the same trio run.

    Args:
        me: Our id; `SOURCE` for the coordinator's relay.
        run_id: The run.
        run_public_key: Raw Ed25519 key that signs manifests and cards.
        sign: Signs with our identity key; with the run's key at the source.
        card: Signed `MemberCard` of this incarnation; ``None`` at the source.
        streams: The network.
        endpoint: Where to listen; ``None``: only dial, and `accept` what the caller listens for.
        dialable: Whether others can dial us; by default if there is an ``endpoint``.
        wants: Whether to follow a verified manifest that a peer offers; synchronous.
        asked: Told, now and again, of an anchor that was offered, that we do not hold, and that a
            peer wants of us; synchronous.
        begin: Makes the assembly of a payload to be followed, and says where it lies.
        journal: Where events go.
        entropy: For nonces.
        rng: For choices among equals, and jitter.
        settings: Tuning.
    """

    def __init__(
        self,
        *,
        me: PeerId,
        run_id: str,
        run_public_key: bytes,
        sign: Callable[[bytes], bytes],
        card: Signed | None,
        streams: Streams,
        endpoint: Endpoint | None,
        dialable: bool | None = None,
        wants: Callable[[ManifestHeader], bool],
        asked: Callable[[Signed, ManifestHeader], None] = lambda _signed, _header: None,
        begin: Begin = in_memory,
        journal: Journal,
        entropy: Entropy,
        rng: random.Random,
        settings: RelaySettings | None = None,
    ) -> None:
        settings = settings or RelaySettings()
        self._tuning = settings
        self._self = Self(me, run_id, run_public_key, card, sign)
        self._streams = streams
        self._endpoint = endpoint
        self._dialable = endpoint is not None if dialable is None else dialable
        self._wants = wants
        self._asked = asked
        self._begin = begin
        self._journal = journal
        self._swarm = Swarm(is_source=me == SOURCE, rng=rng, settings=settings.swarm)
        self._connections = Connections(
            me=self._self,
            owner=self,
            streams=streams,
            nonce=entropy.secret,
            rng=rng,
            journal=journal,
            settings=settings.connections,
        )
        self._payloads: dict[ManifestId, Payload] = {}
        self._passed = Passed()
        self._timer = trio.Event()
        self._timer_s = math.inf
        self._sent_bytes = self._sent_delta_bytes = self._received_bytes = 0
        self._bad_chunks = BadChunks()
        self.relaying = True
        """Whether peers get chunks of us; otherwise we only take what we need."""

    # --- life ---------------------------------------------------------------------------------

    async def run(
        self, *, task_status: trio.TaskStatus[Endpoint | None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until cancelled; the value given to the starter is where we listen.

        Raises:
            ConfigError: The endpoint cannot be bound.
        """
        async with AsyncExitStack() as stack:
            listening = None
            if self._endpoint is not None:
                listening = await stack.enter_async_context(
                    self._streams.listen(self._endpoint, self._connections.accept)
                )
            async with trio.open_nursery() as nursery:
                self._connections.start(nursery)
                task_status.started(listening)
                await self._keep_time()

    async def accept(self, stream: trio.abc.Stream, host: str) -> None:
        """Serve a connection from ``host`` that the caller has accepted, to its end."""
        await self._connections.accept(stream, host)

    def set_neighbours(
        self, neighbours: Iterable[Neighbour], source: Address | None, *, peers: int
    ) -> None:
        """Keep these links from now on, and no other that we dialled.

        ``peers``: how many there are in all; a few are all linked to each other.
        """
        reach, known = self._swarm.reach, list(neighbours)
        reach.peers = peers
        reach.undialable = frozenset(PeerId(one.peer_id) for one in known if one.address is None)
        me = self._self.peer_id
        targets = targets_of(known, source, me=me, dialable=self._dialable)
        self._connections.set_targets(targets)
        self._connections.expect(PeerId(one.peer_id) for one in known)

    def set_uplinks(
        self, uplinks: Mapping[PeerId, float], undialable: frozenset[PeerId] = frozenset()
    ) -> None:
        """Say who the members are, and what the source may count on of each.

        Args:
            uplinks: No more bytes per second than these; 0: it relays nothing.
            undialable: They have no links among each other.
        """
        self._swarm.rates.allowed = dict(uplinks)
        self._swarm.reach.undialable = undialable
        self._connections.expect(uplinks)

    # --- payloads -----------------------------------------------------------------------------

    def publish(
        self, signed: Signed, assembly: Assembly, *, push: bool, memory: SharedState | None = None
    ) -> ManifestId:
        """Offer a payload of which we hold every chunk.

        Args:
            signed: The manifest, believed.
            assembly: Complete; shared, not copied.
            push: Whether the source deals it (deltas from the version before) or it is pulled only
                (anchors, merged deltas).
            memory: Where it lies, ours from here on.
        """
        assert assembly.complete
        manifest_id = manifest_id_of(signed.body)
        known = self._payloads.get(manifest_id)
        if known is None:
            self._add(Payload(signed, assembly.header, assembly, memory), push=push)
            self.rest(manifest_id)
        elif not known.assembly.complete:
            known.assembly = assembly
            now = trio.current_time()
            self._completed(manifest_id, known)
            self._perform(self._swarm.chunks_stored(manifest_id, assembly.held(), now))
        return manifest_id

    def follow(self, signed: Signed, *, push: bool) -> ManifestId:
        """Fetch a payload from whoever has it. Idempotent.

        Raises:
            RemoteProtocolError: The manifest is not the run's, or makes no sense.
        """
        manifest_id = manifest_id_of(signed.body)
        if manifest_id not in self._payloads:
            header = open_manifest(signed, self._self)
            check_header(header)
            assembly, memory = self._begin(manifest_id, header)
            self._add(Payload(signed, header, assembly, memory), push=push)
            self._journal.event(
                PAYLOAD_FOLLOWED,
                manifest_id=manifest_id.hex(),
                version=header.version,
                payload_bytes=header.payload_bytes,
            )
        return manifest_id

    async def wait_grown(self, manifest_id: ManifestId) -> None:
        """Wait without limit until a chunk is verified, the source refuses it all, or it ends."""
        payload = self._payloads.get(manifest_id)
        if payload is not None and not payload.ended.is_set():
            await payload.grown.park()

    def refused(self, manifest_id: ManifestId) -> bool:
        """Return whether the source has said that it has no such payload."""
        return manifest_id in self._payloads and self._payloads[manifest_id].refused

    def rest(self, manifest_id: ManifestId) -> None:
        """Keep a payload for others only, where it takes no memory. No error if it is unknown."""
        payload = self._payloads.get(manifest_id)
        if payload is not None:
            payload.rest()

    def forget(self, manifest_id: ManifestId) -> None:
        """Neither serve nor fetch a payload any longer. No error if it is unknown."""
        payload = self._payloads.pop(manifest_id, None)
        if payload is not None:
            payload.close()
            self._perform(self._swarm.drop_transfer(manifest_id, trio.current_time()))

    def holds(self) -> list[ManifestId]:
        """Return the complete payloads, in the order in which they were added."""
        return [key for key, payload in self._payloads.items() if payload.assembly.complete]

    def headers(self) -> dict[ManifestId, ManifestHeader]:
        """Return what is held or followed."""
        return {key: payload.header for key, payload in self._payloads.items()}

    def assembly(self, manifest_id: ManifestId) -> Assembly | None:
        """Return a payload that is held or followed."""
        payload = self._payloads.get(manifest_id)
        return payload.assembly if payload else None

    def accept_chunk(
        self, manifest_id: ManifestId, index: int, data: bytes | memoryview, source: str
    ) -> None:
        """Take a chunk that came by another way; ignored if its payload is not followed.

        Raises:
            IntegrityError: It is wrong; nothing was kept.
        """
        payload = self._payloads.get(manifest_id)
        if payload is not None:
            self._store(manifest_id, payload, index, data, source)

    def fetching(self) -> list[tuple[PeerId, ManifestId]]:
        """Return which neighbours follow which of our payloads without having them whole."""
        return self._swarm.fetching()

    @property
    def relay_bytes_per_s(self) -> float | None:
        """Mean rate at which relays pass our chunks on, as measured; ``None`` before that."""
        return self._swarm.rates.mean()

    def statistics(self) -> RelayStatistics:
        """Return the counters."""
        swarm = self._swarm.statistics()
        return RelayStatistics(
            links=tuple(self._connections.statistics()),
            relayed_bytes=self._sent_bytes,
            relayed_delta_bytes=self._sent_delta_bytes,
            received_bytes=self._received_bytes,
            duplicate_bytes=swarm.duplicate_bytes,
            unknown_bytes=swarm.unknown_bytes,
            bad_chunks=dict(self._bad_chunks),
            chunks_redealt=swarm.chunks_redealt,
        )

    def fills(self) -> Iterator[Fill]:
        """Yield how full everything is that has a bound; of many alike, the fullest."""
        yield from self._connections.fills()
        longest = self._swarm.statistics().longest_queue
        yield from payload_fills(self._payloads.values(), longest, self._tuning.swarm)

    def _add(self, payload: Payload, *, push: bool) -> None:
        manifest_id = manifest_id_of(payload.signed.body)
        self._payloads[manifest_id] = payload
        assembly = payload.assembly
        if assembly.complete:
            payload.end()
        effects = self._swarm.add_transfer(
            manifest_id,
            count=assembly.count,
            chunk_bytes=payload.header.chunk_bytes,
            held=assembly.held(),
            push=push,
            after=delta_before(self._payloads, payload.header),
            now=trio.current_time(),
        )
        self._perform(effects)

    def _store(
        self,
        manifest_id: ManifestId,
        payload: Payload,
        index: int,
        data: bytes | memoryview,
        source: str,
    ) -> None:
        """Verify one chunk, tell the core, and punish whoever lied.

        Raises:
            IntegrityError: The chunk is wrong.
        """
        now = trio.current_time()
        try:
            outcome = payload.assembly.add(index, data, source=source)
        except IntegrityError:
            self._perform(self._swarm.chunk_lost(manifest_id, index, now))
            raise
        match outcome:
            case Added(indices=indices, bad_sources=liars):
                self._perform(self._swarm.chunks_stored(manifest_id, indices, now))
                payload.grown.unpark_all()
                for liar in liars:
                    self._blame(liar, manifest_id, "a chunk that waited for the index")
                if payload.assembly.complete:
                    self._completed(manifest_id, payload)
            case Early(kept=False):
                self._perform(self._swarm.chunk_lost(manifest_id, index, now))

    def _completed(self, manifest_id: ManifestId, payload: Payload) -> None:
        payload.end()
        self._journal.event(
            PAYLOAD_COMPLETED, manifest_id=manifest_id.hex(), version=payload.header.version
        )

    def _blame(self, source: str, manifest_id: ManifestId, detail: str) -> None:
        """Record a bad chunk, and cut its sender off if it is linked to us."""
        self._bad_chunks.count(source)
        self._journal.event(
            CHUNK_REJECTED, source=source, manifest_id=manifest_id.hex(), detail=detail
        )
        link = self._connections.link(PeerId(source))
        if link is not None:
            link.fail(RemoteProtocolError(Violation.MALFORMED, "chunk of wrong bytes"))

    # --- what links bring ---------------------------------------------------------------------

    def link_opened(self, peer_id: PeerId, rtt_s: float) -> None:
        """A link may be sent to."""
        now = trio.current_time()
        is_source = peer_id == SOURCE
        self._perform(self._swarm.link_opened(peer_id, is_source=is_source, rtt_s=rtt_s, now=now))

    def link_closed(self, peer_id: PeerId) -> None:
        """A link is gone."""
        self._perform(self._swarm.link_closed(peer_id, trio.current_time()))

    def receive_frame(self, peer_id: PeerId, message: RelayFrame) -> None:
        """Feed one frame of a live link to the core.

        Raises:
            RemoteProtocolError: The peer broke the protocol.
        """
        now = trio.current_time()
        swarm = self._swarm
        match message:
            case Offer(manifest=signed):
                self._receive_offer(peer_id, signed)
            case Want(manifest_id=key):
                self._perform(swarm.receive_want(peer_id, ManifestId(key), now))
                passed = self._passed.get(ManifestId(key))
                if passed is not None and peer_id != SOURCE and self.relaying:
                    self._asked(*passed)  # the source only wants to be told who has it
            case Have(manifest_id=key, indices=indices, ask=ask):
                held = to_tokens(indices).tolist()
                self._perform(swarm.receive_have(peer_id, ManifestId(key), held, now, ask=ask))
            case Request(manifest_id=key, index=index) if not self.relaying:
                self._perform([SendReject(peer_id, ManifestId(key), index, "busy")])
            case Request(manifest_id=key, index=index):
                self._perform(swarm.receive_request(peer_id, ManifestId(key), index, now))
            case Reject(manifest_id=key, index=index, reason=reason):
                self._perform(swarm.receive_reject(peer_id, ManifestId(key), index, reason, now))
                if peer_id == SOURCE and reason == "unknown" and key in self._payloads:
                    self._payloads[ManifestId(key)].refuse()
            case Cancel(manifest_id=key, index=index):
                swarm.receive_cancel(peer_id, ManifestId(key), index)
            case _:
                raise LocalProtocolError(f"the link passed on a {type(message).__name__}")

    def _receive_offer(self, peer_id: PeerId, signed: Signed) -> None:
        manifest_id = manifest_id_of(signed.body)
        if manifest_id not in self._payloads:
            header = open_manifest(signed, self._self)
            try:
                check_header(header)
            except RemoteProtocolError as error:  # signed, so not the fault of who passed it on
                self._journal.event(MANIFEST_REFUSED, peer=peer_id, detail=str(error))
                return
        self._swarm.receive_offer(peer_id, manifest_id)
        if manifest_id in self._payloads or self._self.peer_id == SOURCE:
            return  # the source knows what it has published, whatever a peer kept from long ago
        if self._wants(header):
            self.follow(signed, push=is_step(header))
        elif header.base_version is None:
            self._passed.add(manifest_id, signed, header)
        elif is_step(header) and delta_before(self._payloads, header):  # its WANT may stand
            self._perform([SendReject(peer_id, manifest_id, 0, "unknown")])

    def receive_chunk(self, peer_id: PeerId, chunk: ChunkPayload) -> None:
        """Verify one chunk of a live link and feed it to the core.

        Raises:
            RemoteProtocolError: It is wrong; the peer that sends it lies, or its memory does.
        """
        size = len(chunk.data)
        self._received_bytes += size
        now = trio.current_time()
        self._perform(self._swarm.chunk_arrived(peer_id, chunk.manifest_id, chunk.index, size, now))
        payload = self._payloads.get(chunk.manifest_id)
        if payload is None:
            return
        try:
            self._store(chunk.manifest_id, payload, chunk.index, chunk.data, peer_id)
        except IntegrityError as error:
            self._blame(peer_id, chunk.manifest_id, error.detail)
            raise RemoteProtocolError(Violation.MALFORMED, error.detail) from error

    def read_chunk(self, manifest_id: ManifestId, index: int) -> memoryview | None:
        """Return a verified chunk, if its payload is still there and we relay."""
        payload = self._payloads.get(manifest_id) if self.relaying else None
        return payload.assembly.chunk(index) if payload else None

    def sent_chunk(
        self, peer_id: PeerId, manifest_id: ManifestId, index: int, *, size: int | None
    ) -> None:
        """Count a chunk that left (``size`` bytes), or was skipped."""
        self._sent_bytes += size or 0
        payload = self._payloads.get(manifest_id)
        if payload is not None and is_step(payload.header):
            self._sent_delta_bytes += size or 0
        now = trio.current_time()
        sent = size is not None
        self._perform(self._swarm.chunk_sent(peer_id, manifest_id, index, now, sent=sent))

    # --- effects and time ---------------------------------------------------------------------

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            link = self._connections.link(effect.link)
            if link is not None:
                perform_effect(link, effect, lambda key: self._payloads[key].signed)
        if self._swarm.next_deadline() < self._timer_s:
            self._timer.set()

    async def _keep_time(self) -> None:
        """Call the core when it wants to be called."""
        while True:
            self._timer = trio.Event()
            self._timer_s = self._swarm.next_deadline()
            with trio.move_on_at(self._timer_s):
                await self._timer.wait()
            now = trio.current_time()
            if now >= self._swarm.next_deadline():
                self._perform(self._swarm.on_time(now))
