"""Follows the versions: asks for the path, lets the relay fetch it, has it applied, keeps it.

Nothing is applied that the run's key has not signed, nothing is handed to the engine whose digest
is not the manifest's (`peer.apply`). What turns out to be damaged, in a payload or in our own
memory, is reported and fetched again from an anchor.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Final

import trio

from echo2p2p.errors import IntegrityError, LinkError, RefusedError, StoreError
from echo2p2p.ids import ManifestId, Version
from echo2p2p.net.ports import Journal, Offload, SharedState
from echo2p2p.net.relay import RelayNode
from echo2p2p.weights.assembly import Assembly
from echo2p2p.weights.manifest import is_step, manifest_id
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.messages import ManifestHeader, Signed
from echo2p2p.wire.signing import open_record
from peer.apply import Apply
from peer.coordinator_client import BusyError, CoordinatorClient
from peer.keeper import EngineKeeper, offer_of
from peer.local import FIRST, LocalModel, ReadModel
from peer.state import Weights

PAYLOAD_TAKEN_UP: Final = "payload.taken_up"
VERSION_APPLIED: Final = "version.applied"
VERSION_REFUSED: Final = "version.refused"
MEMORY_CORRUPT: Final = "memory.corrupt"
PAYLOAD_FILE_REFUSED: Final = "payload.file_refused"
CHUNKS_OVER_HTTP: Final = "chunks.over_http"
CHUNK_REFUSED: Final = "chunk.refused"
"""The coordinator, or somebody on the way to it, has sent other bytes over HTTP."""
POLL_S: Final = 25.0
"""Long poll for manifests."""
REFUSED_S: Final = 1.0
"""A payload that the source says it does not have, and that has made no progress for so long, makes
us ask whether there is another path; each time after twice as long, and with the stall timeout the
end of it. A coordinator that starts has not loaded its payloads yet, so its word is no command."""
PAYLOADS_KEPT: Final = 8
KEPT_SHARE: Final = 0.5
"""Deltas kept for others after they were applied here, and their bytes as a share of the model; the
newest is kept whatever its size, and so is one anchor beside them."""
PAYLOADS_AHEAD: Final = 8
AHEAD_SHARE: Final = 1.0
"""Offered payloads that are fetched before those before them are applied. A peer whose downlink is
slower than the run lets the rest pass, and asks for a shorter path when it has come so far."""
IN_MEMORY_SHARE: Final = 0.005
IN_MEMORY_BYTES: Final = 1 << 18
"""Payloads up to this share of the model, or this length, are put together in memory, longer ones
in files: so 16 of them take at most 8 % of a model of 50 MB and more."""


class Follower:
    """One incarnation's way from version to version."""

    def __init__(
        self,
        *,
        client: CoordinatorClient,
        relay: RelayNode,
        weights: Weights,
        keeper: EngineKeeper | None,
        run_public_key: bytes,
        offload: Offload,
        journal: Journal,
        stall_timeout_s: float,
        local: ReadModel | None = None,
    ) -> None:
        self._client = client
        self._relay = relay
        self._weights = weights
        self._keeper = keeper
        self._run_public_key = run_public_key
        self._offload = offload
        self._journal = journal
        self._stall_timeout_s = stall_timeout_s
        self._local = local and LocalModel(local, weights=weights, offload=offload, journal=journal)
        self._target: Version | None = weights.version
        self._kept: deque[tuple[ManifestId, int]] = deque()
        self._anchor: ManifestId | None = None
        self._left = frozenset(weights.left())
        self._begun: dict[ManifestId, tuple[Assembly, SharedState]] = {}
        self._asking = trio.CancelScope()
        self.applied = trio.lowlevel.ParkingLot()
        """Unparked after each version."""

    def wants(self, header: ManifestHeader) -> bool:
        """Whether a manifest that a neighbour offers continues what we hold or fetch."""
        if header.base_version is None or header.layout_digest != self._weights.layout.digest:
            return False
        wanted = self._target is not None and header.base_version == self._target
        if wanted and not self._has_room(header.payload_bytes):
            return False
        if wanted:
            self._target = Version(header.version)
        return wanted

    def _has_room(self, payload_bytes: int) -> bool:
        """Whether another payload may be fetched beside those that are not applied yet."""
        kept = {identity for identity, _ in self._kept} | {self._anchor}
        ahead = [h.payload_bytes for i, h in self._relay.headers().items() if i not in kept]
        room = AHEAD_SHARE * self._weights.layout.total_bytes
        return len(ahead) < PAYLOADS_AHEAD and sum(ahead) + payload_bytes <= room

    def begin(
        self, identity: ManifestId, header: ManifestHeader
    ) -> tuple[Assembly, SharedState | None]:
        """Return what there is of a payload that is to be fetched, and where it lies."""
        begun = self._begun.pop(identity, None)
        if begun is not None:
            return begun
        memory = self._memory_for(identity, header)
        return Assembly(header, None if memory is None else memory.view), memory

    def _memory_for(self, identity: ManifestId, header: ManifestHeader) -> SharedState | None:
        """Return a file's memory for a long payload; ``None``: it needs none, or finds no room."""
        share = IN_MEMORY_SHARE * self._weights.layout.total_bytes
        if header.payload_bytes <= max(share, IN_MEMORY_BYTES):
            return None
        try:
            return self._weights.keep(identity.hex(), header.payload_bytes + header.index_bytes)
        except StoreError as error:
            detail = f"{error} (version {header.version} is put together in memory)"
            self._journal.event(PAYLOAD_FILE_REFUSED, detail=detail)
            return None

    async def run(self) -> None:
        """Follow until cancelled.

        Raises:
            RefusedError: We are no member any more.
        """
        self._offer_current()
        async with trio.open_nursery() as nursery:
            if self._keeper is not None:
                nursery.start_soon(self._heed_doubts, self._keeper)
            while True:
                try:
                    if self._local is not None and self._weights.version is None:
                        await self._take_local(self._local)
                        continue
                    with trio.CancelScope() as self._asking:
                        path = await self._client.manifests(self._weights.version, POLL_S)
                    if not self._asking.cancelled_caught:
                        await self._follow(path)
                except BusyError as busy:
                    await trio.sleep(busy.retry_after_s)
                except LinkError:
                    await trio.sleep(1.0)

    def _offer_current(self) -> None:
        """Let the engine have what we hold; an earlier incarnation may have ended before that."""
        if self._keeper is not None and self._weights.version is not None:
            self._keeper.offer(offer_of(self._weights))

    async def _take_local(self, local: LocalModel) -> None:
        """Begin with the volunteer's folder, if the run has a path from what it holds."""
        found = await local.load()
        if found is not None:
            from_none = await self._client.manifests(None, POLL_S)
            if not from_none:
                return  # nothing is published yet
            from_first = await self._client.manifests(FIRST, 0.0)
            local.adopt(found, *(list(map(self._open, path)) for path in (from_first, from_none)))
            self._target = self._weights.version
            self._offer_current()
        self._local = None

    async def _heed_doubts(self, keeper: EngineKeeper) -> None:
        """Look at our own memory whenever an engine has read other bits than it was offered."""
        while True:
            doubted = await keeper.wait_doubted()
            if doubted.version == self._weights.version and not await self._is_sound():
                self._weights.forget()
                self._target = None
                self._asking.cancel()
                await keeper.withdraw()
                self._offer_current()  # if there is something better by now

    async def _is_sound(self) -> bool:
        """Compare our memory with what it should hold; say in the journal if it does not."""
        weights = self._weights
        async with weights.lock:
            version, digest = weights.version, weights.digest
            work = partial(state_digest, weights.layout, weights.view)
            sound = version is None or await self._offload.run(work) == digest
        if not sound:
            detail = f"the weights of version {version} have changed in memory"
            self._journal.event(MEMORY_CORRUPT, version=version, detail=detail)
        return sound

    async def _follow(self, path: list[Signed]) -> None:
        headers = list(map(self._open, path))
        if headers and (self._target is None or headers[-1].version > self._target):
            self._target = Version(headers[-1].version)
        for signed, header in zip(path, headers, strict=True):
            await self._take_up(manifest_id(signed), header)
            self._relay.follow(signed, push=is_step(header))
        self._drop_left()
        for number, (signed, header) in enumerate(zip(path, headers, strict=True)):
            # Again: it may have been one that we kept for others, and let go for one before it.
            identity = self._relay.follow(signed, push=is_step(header))
            try:
                apply = await self._fetch(identity, header)
                if apply is None:  # too old by now: ask for another path
                    self._target = self._weights.version
                    return
                after, began = path[number + 1 :][:1], trio.current_time()
                await apply.finish(offer=not any(map(self._is_whole, after)))
            except IntegrityError as error:
                # Every chunk was verified, so this is the publisher's fault or our memory's:
                # take the whole state afresh and blame nobody.
                self._journal.event(VERSION_REFUSED, version=header.version, detail=str(error))
                await self._is_sound()
                self._weights.forget()
                self._target = None
                await trio.sleep(1.0)
                return
            self._note_applied(header, began)
            self._keep(identity, header)

    async def _take_up(self, identity: ManifestId, header: ManifestHeader) -> None:
        """Look for what an earlier life of this peer has left of a payload."""
        if identity.hex() not in self._left or self._relay.assembly(identity) is not None:
            return
        memory = self._memory_for(identity, header)
        if memory is None:
            return
        assembly = Assembly(header, memory.view)
        self._begun[identity] = assembly, memory
        count = await self._offload.run(assembly.take_up)
        self._journal.event(
            PAYLOAD_TAKEN_UP, version=header.version, chunks=count, of=assembly.count
        )

    def _drop_left(self) -> None:
        """Remove what earlier lives have left and nobody has asked for."""
        followed = {identity.hex() for identity in self._relay.headers()}
        self._weights.drop_left(name for name in self._left if name not in followed)
        self._left = frozenset()

    def _open(self, signed: Signed) -> ManifestHeader:
        return open_record(signed, self._run_public_key, ManifestHeader)

    def _note_applied(self, header: ManifestHeader, began_s: float) -> None:
        digest = self._weights.digest
        self._journal.event(
            VERSION_APPLIED,
            version=header.version,
            digest="" if digest is None else digest.hex()[:16],
            anchor=header.base_version is None,
            bytes=header.index_bytes + header.payload_bytes,
            seconds=round(trio.current_time() - began_s, 4),
        )
        self.applied.unpark_all()

    def _is_whole(self, signed: Signed) -> bool:
        assembly = self._relay.assembly(manifest_id(signed))
        return assembly is not None and assembly.complete

    async def _fetch(self, identity: ManifestId, header: ManifestHeader) -> Apply | None:
        """Wait for the relay, working on what comes; fetch over HTTP what makes no progress.

        Returns ``None`` if nobody has the payload any more.

        Raises:
            IntegrityError: See `Apply`.
        """
        assembly = self._relay.assembly(identity)
        if assembly is None:
            return None
        apply = Apply(
            header,
            assembly,
            weights=self._weights,
            keeper=self._keeper,
            offload=self._offload,
        )
        stall_s, ask_s, since_s = self._stall_timeout_s, REFUSED_S, trio.current_time()
        while not assembly.complete:
            before, refused = self._held(identity), self._relay.refused(identity)
            with trio.move_on_at(since_s + (min(ask_s, stall_s) if refused else stall_s)) as quiet:
                while self._lacks(identity, assembly) and self._relay.refused(identity) == refused:
                    if not await apply.advance():
                        await self._relay.wait_grown(identity)
            if self._relay.assembly(identity) is not assembly:
                return None
            if self._held(identity) != before:
                since_s = trio.current_time()
            elif quiet.cancelled_caught:
                if trio.current_time() < since_s + stall_s:
                    gone = await self._is_passed_by(identity)
                else:
                    gone = not await self._fetch_over_http(identity)
                    since_s = trio.current_time()
                if gone:
                    self._relay.forget(identity)
                    return None
                ask_s *= 2
        return apply

    def _lacks(self, identity: ManifestId, assembly: Assembly) -> bool:
        """Whether a payload, still the same, has chunks to come."""
        return not assembly.complete and self._relay.assembly(identity) is assembly

    async def _is_passed_by(self, identity: ManifestId) -> bool:
        """Whether the coordinator, as far as it can be asked, leads us another way by now."""
        try:
            path = await self._client.manifests(self._weights.version, 0.0)
        except LinkError:
            return False
        return bool(path) and identity not in map(manifest_id, path)

    def _held(self, identity: ManifestId) -> int:
        assembly = self._relay.assembly(identity)
        return 0 if assembly is None else len(assembly.held())

    async def _fetch_over_http(self, identity: ManifestId) -> bool:
        """Fetch what is missing; return whether the coordinator has it."""
        assembly = self._relay.assembly(identity)
        if assembly is None:
            return False
        missing = list(assembly.missing())
        self._journal.event(CHUNKS_OVER_HTTP, manifest=identity.hex(), chunks=len(missing))
        for index in missing:
            if assembly.chunk(index) is None:
                try:
                    data = await self._client.chunk(identity, index)
                    self._relay.accept_chunk(identity, index, data, "coordinator")
                except RefusedError as error:
                    if error.reason != "no_such_chunk":
                        raise
                    return False
                except IntegrityError as error:  # nothing was kept, and nothing of ours is wrong
                    self._journal.event(
                        CHUNK_REFUSED, manifest=identity.hex(), index=index, detail=str(error)
                    )
                    return True
        return True

    def keep_anchor(self, identity: ManifestId) -> None:
        """Keep an anchor for others, instead of the one before it."""
        if self._anchor is not None and self._anchor != identity:
            self._relay.forget(self._anchor)
        self._anchor = identity

    def _keep(self, identity: ManifestId, header: ManifestHeader) -> None:
        """Keep an applied payload for others, and forget what is of no use any more."""
        self._relay.rest(identity)
        if header.base_version is None:
            self.keep_anchor(identity)
        else:
            self._kept.append((identity, header.payload_bytes))
        room = KEPT_SHARE * self._weights.layout.total_bytes
        while len(self._kept) > 1 and (
            len(self._kept) > PAYLOADS_KEPT or sum(size for _, size in self._kept) > room
        ):
            self._relay.forget(self._kept.popleft()[0])
        kept = {each for each, _ in self._kept} | {self._anchor}
        held = self._weights.version
        for each, header in self._relay.headers().items():
            if each not in kept and held is not None and header.version <= held:
                self._relay.forget(each)  # we got past it by another way
