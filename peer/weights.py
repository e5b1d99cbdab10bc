"""Follows the versions: asks for the path, lets the relay fetch it, applies, checks, hands over.

Two blocks of shared memory take turns: the next version is built in one while the engine may
still read the other, so a version appears all at once or not at all. Nothing is applied that the
run's key has not signed, nothing is handed to the engine whose digest is not the manifest's.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import trio

from echo2p2p.errors import IntegrityError, LinkError, RefusedError
from echo2p2p.ids import Digest, ManifestId, Version
from echo2p2p.net.ports import Journal, Offload, SharedMemory, SharedState
from echo2p2p.net.relay import RelayNode
from echo2p2p.weights.anchor import decode_anchor
from echo2p2p.weights.assembly import Assembly
from echo2p2p.weights.delta import apply_delta
from echo2p2p.weights.kernels import COMPILED_FROM_BYTES, warm_up
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.manifest import manifest_id
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.messages import ManifestHeader, Signed
from echo2p2p.wire.signing import open_record
from peer.coordinator_client import BusyError, CoordinatorClient
from peer.keeper import EngineKeeper, WeightState

VERSION_APPLIED: Final = "version.applied"
VERSION_REFUSED: Final = "version.refused"
CHUNKS_OVER_HTTP: Final = "chunks.over_http"
POLL_S: Final = 25.0
"""Long poll for manifests."""
PAYLOADS_KEPT: Final = 8
KEPT_SHARE: Final = 0.5
"""Payloads kept for others after they were applied here, and their bytes as a share of the model;
the newest is kept whatever its size."""
PAYLOADS_AHEAD: Final = 8
AHEAD_SHARE: Final = 1.0
"""Offered payloads that are fetched before those before them are applied. A peer whose downlink is
slower than the run lets the rest pass, and asks for a shorter path when it has come so far."""


class Weights:
    """The flat state of this peer; survives a change of incarnation."""

    def __init__(self, layout: Layout, memory: SharedMemory) -> None:
        self.layout = layout
        self.version: Version | None = None
        self.digest: Digest | None = None
        size = max(1, layout.total_bytes)
        self._blocks = deque(
            [memory.allocate("weights-a", size), memory.allocate("weights-b", size)]
        )

    @property
    def current(self) -> SharedState:
        """Memory of `version`."""
        return self._blocks[0]

    @property
    def spare(self) -> SharedState:
        """Memory in which the next version is built."""
        return self._blocks[1]

    def switch(self, version: Version, digest: Digest) -> None:
        """The spare memory holds a whole version now."""
        self._blocks.rotate(1)
        self.version, self.digest = version, digest

    def forget(self) -> None:
        """The current memory is not to be trusted."""
        self.version = self.digest = None

    def close(self) -> None:
        """Release both blocks."""
        for block in self._blocks:
            block.close()


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
    ) -> None:
        self._client = client
        self._relay = relay
        self._weights = weights
        self._keeper = keeper
        self._run_public_key = run_public_key
        self._offload = offload
        self._journal = journal
        self._stall_timeout_s = stall_timeout_s
        self._target: Version | None = weights.version
        self._kept: deque[tuple[ManifestId, int]] = deque()
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
        kept = {identity for identity, _ in self._kept}
        ahead = [h.payload_bytes for i, h in self._relay.headers().items() if i not in kept]
        room = AHEAD_SHARE * self._weights.layout.total_bytes
        return len(ahead) < PAYLOADS_AHEAD and sum(ahead) + payload_bytes <= room

    async def run(self) -> None:
        """Follow until cancelled.

        Raises:
            RefusedError: We are no member any more.
        """
        while True:
            try:
                path = await self._client.manifests(self._weights.version, POLL_S)
                await self._follow(path)
            except BusyError as busy:
                await trio.sleep(busy.retry_after_s)
            except LinkError:
                await trio.sleep(1.0)

    async def _follow(self, path: list[Signed]) -> None:
        headers = [open_record(signed, self._run_public_key, ManifestHeader) for signed in path]
        if headers and (self._target is None or headers[-1].version > self._target):
            self._target = Version(headers[-1].version)
        for signed, header in zip(path, headers, strict=True):
            self._relay.follow(signed, push=header.base_version is not None)
        for signed, header in zip(path, headers, strict=True):
            assembly = await self._fetch(signed, header)
            if assembly is None:  # too old by now: ask for another path
                self._target = self._weights.version
                return
            try:
                await self._apply(header, assembly)
            except IntegrityError as error:
                # Every chunk was verified, so this is the publisher's fault or our memory's:
                # take the whole state afresh and blame nobody.
                self._journal.event(VERSION_REFUSED, version=header.version, detail=str(error))
                self._weights.forget()
                self._target = None
                await trio.sleep(1.0)
                return
            self._keep(manifest_id(signed), header.payload_bytes)

    async def _fetch(self, signed: Signed, header: ManifestHeader) -> Assembly | None:
        """Wait for the relay; what makes no progress for too long comes over HTTP.

        Returns ``None`` if nobody has the payload any more.
        """
        # Again: it may have been one that we kept for others, and let go for one before it.
        identity = self._relay.follow(signed, push=header.base_version is not None)
        while True:
            before = self._held(identity)
            with trio.move_on_after(self._stall_timeout_s):
                return await self._relay.wait_complete(identity)
            if self._held(identity) == before:
                try:
                    await self._fetch_over_http(identity)
                except RefusedError as error:
                    if error.reason != "no_such_chunk":
                        raise
                    self._relay.forget(identity)
                    return None

    def _held(self, identity: ManifestId) -> int:
        assembly = self._relay.assembly(identity)
        return 0 if assembly is None else len(assembly.held())

    async def _fetch_over_http(self, identity: ManifestId) -> None:
        assembly = self._relay.assembly(identity)
        if assembly is None:
            return
        missing = list(assembly.missing())
        self._journal.event(CHUNKS_OVER_HTTP, manifest=identity.hex(), chunks=len(missing))
        for index in missing:
            if assembly.chunk(index) is None:
                data = await self._client.chunk(identity, index)
                self._relay.accept_chunk(identity, index, data, "coordinator")

    async def _apply(self, header: ManifestHeader, assembly: Assembly) -> None:
        """Build the version in the spare memory and hand it over.

        Raises:
            IntegrityError: Wrong base or wrong result; nothing was handed over.
        """
        weights, began = self._weights, trio.current_time()
        if header.layout_digest != weights.layout.digest:
            raise IntegrityError("the manifest is for another model layout")
        if header.base_version is not None and (
            header.base_version != weights.version or header.base_digest != weights.digest
        ):
            raise IntegrityError(
                f"delta from version {header.base_version}, we hold {weights.version}"
            )
        if self._keeper is not None:
            await self._keeper.wait_unused(weights.spare)
        spare, current, layout = weights.spare, weights.current, weights.layout
        size = layout.total_bytes

        def build() -> Digest:
            if size >= COMPILED_FROM_BYTES:  # the first payload is an anchor, which needs no loop
                warm_up()
            target = spare.view[:size]
            if header.base_version is None:
                decode_anchor(layout, assembly.payload(), target)
            else:
                target[:] = current.view[:size]
                apply_delta(layout, assembly.payload(), target)
            return state_digest(layout, target)

        digest = await self._offload.run(build)
        if digest != header.result_digest:
            raise IntegrityError(f"version {header.version} does not match its digest")
        version = Version(header.version)
        weights.switch(version, digest)
        if self._keeper is not None:
            self._keeper.offer(WeightState(version, digest, weights.current))
        self._journal.event(
            VERSION_APPLIED,
            version=version,
            anchor=header.base_version is None,
            bytes=header.index_bytes + header.payload_bytes,
            seconds=round(trio.current_time() - began, 4),
        )
        self.applied.unpark_all()

    def _keep(self, identity: ManifestId, payload_bytes: int) -> None:
        """Keep an applied payload for others, and forget what is of no use any more."""
        self._kept.append((identity, payload_bytes))
        room = KEPT_SHARE * self._weights.layout.total_bytes
        while len(self._kept) > 1 and (
            len(self._kept) > PAYLOADS_KEPT or sum(size for _, size in self._kept) > room
        ):
            self._relay.forget(self._kept.popleft()[0])
        kept = {each for each, _ in self._kept}
        held = self._weights.version
        for each, header in self._relay.headers().items():
            if each not in kept and held is not None and header.version <= held:
                self._relay.forget(each)  # we got past it by another way
