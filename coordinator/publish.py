"""Turns the learner's weights into versions: delta, chunks, signed manifest, first uploads.

A delta is always taken against the last *published* bits, whatever the learner did in between
(DESIGN §4, "Chain"): so numbers are never reused and nobody who follows needs an anchor, not even
after the learner restarted from an older checkpoint. The published bits are durable as the newest
anchor and the deltas after it; after a restart they are rebuilt from those and checked by digest.

A version exists once its row is committed. Its payload is on disk before that, so a crash in
between leaves an orphan file and the number free.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.book import Book
from coordinator.config import WeightsSection
from coordinator.payloads import PayloadStore, blob_name
from coordinator.run_state import RunState
from coordinator.schema import PayloadRow, VersionRow
from echo2p2p.errors import IntegrityError, StoreError
from echo2p2p.ids import Digest, Generation, ManifestId, RunId, Step, Version
from echo2p2p.net.ports import Blobs, Journal, Offload
from echo2p2p.net.relay import RelayNode
from echo2p2p.weights import anchor, chain, chunks, delta, kernels
from echo2p2p.weights.assembly import Assembly
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.manifest import build_header, manifest_id
from echo2p2p.weights.policy import PolicyChooser
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.messages import ManifestHeader, Signed
from echo2p2p.wire.signing import open_record, sign_record

VERSION_PUBLISHED: Final = "version.published"
VERSIONS_RESTORED: Final = "versions.restored"
CHAIN_LOST: Final = "chain.lost"
CHAIN_DELTAS_MAX: Final = 128
"""Deltas after which an anchor is made whatever their size: they are all kept until then."""
VERSIONS_KEPT: Final = 8
"""Newest versions whose payloads are all kept: somebody may be in the middle of fetching one."""


@dataclass(frozen=True)
class Published:
    """What one publication made."""

    version: Version
    anchor_bytes: int | None
    """Wire bytes (index and payload) of the anchor, if one was made."""
    delta_bytes: int | None
    """Wire bytes of the delta; ``None`` for the first version of a chain."""
    state_bytes: int
    changed_seconds: float
    """From the copied weights to the durable version."""


@dataclass(frozen=True)
class WeightBytes:
    """Sizes over the run so far, in wire bytes."""

    anchor_bytes: int
    """Of the newest anchor."""
    deltas: int
    delta_bytes: int
    """Of all of them."""
    delta_inverses: float
    """Sum over deltas of 1 / bytes."""
    state_bytes: int

    @property
    def delta_bytes_mean(self) -> float:
        """Mean wire bytes of a delta; 0 before the first."""
        return self.delta_bytes / self.deltas if self.deltas else 0.0

    @property
    def ratio_mean(self) -> float:
        """Mean over deltas of raw bytes by wire bytes; 0 before the first."""
        return self.state_bytes * self.delta_inverses / self.deltas if self.deltas else 0.0


class Publisher:
    """The published bits and everything that leads to them."""

    def __init__(
        self,
        *,
        book: Book,
        blobs: Blobs,
        offload: Offload,
        relay: RelayNode,
        key: Ed25519PrivateKey,
        state: RunState,
        settings: WeightsSection,
        journal: Journal,
    ) -> None:
        self._book = book
        self._blobs = blobs
        self._offload = offload
        self._relay = relay
        self._key = key
        self._state = state
        self._settings = settings
        self._journal = journal
        self._layout: Layout | None = None
        self._chain_id = ""
        self._bits: bytearray | None = None
        self._digest: Digest | None = None
        self._links: dict[ManifestId, chain.Link] = {}
        self._signed: dict[ManifestId, Signed] = {}
        self._since_anchor_bytes = 0
        self._anchor_bytes = 0
        self._deltas, self._delta_bytes, self._delta_inverses = 0, 0, 0.0
        self._since_anchor = 0
        self._source_bytes_before = (0, 0)
        self._chooser = PolicyChooser()

    @property
    def layout(self) -> Layout:
        """The layout of the chain; set by `load`."""
        assert self._layout is not None
        return self._layout

    @property
    def source_bytes(self) -> tuple[int, int]:
        """Chunk bytes that this relay has sent, and those of deltas alone; earlier lives too."""
        now = self._relay.statistics()
        before = self._source_bytes_before
        return before[0] + now.relayed_bytes, before[1] + now.relayed_delta_bytes

    async def load(self, layout: Layout) -> None:
        """Take the learner's layout, and rebuild the published bits if there are any.

        What is damaged on disk is mended or left out (`coordinator.payloads`).

        Raises:
            StoreError: The disk refused.
        """
        self._layout = layout
        if layout.total_bytes >= kernels.COMPILED_FROM_BYTES:
            await self._offload.run(kernels.warm_up)
        self._chain_id = layout.digest.hex()[:16]
        sent = await self._book.get("source_bytes")
        if sent is not None:
            self._source_bytes_before = msgspec.json.decode(sent, type=tuple[int, int])
        for row in await self._book.versions():
            self._state.add_version(row.version, row.step, dead=row.dead)
        stored = PayloadStore(
            book=self._book,
            blobs=self._blobs,
            offload=self._offload,
            layout=layout,
            open_manifest=self._open,
            journal=self._journal,
        )
        kept = await stored.load()
        for item in kept:
            identity = item.link.manifest_id
            self._links[identity], self._signed[identity] = item.link, item.signed
            self._count(item.link)
            self._relay.publish(item.signed, item.assembly, push=False)
        sizes = await self._book.delta_sizes()
        self._deltas, self._delta_bytes, self._delta_inverses = sizes
        latest = self._state.latest
        if latest is None:
            return
        self._bits = await stored.state(kept, latest)
        if self._bits is None:
            detail = "nothing whole leads to the newest version; the next one is an anchor"
            self._journal.event(CHAIN_LOST, version=latest, detail=detail)
            return
        self._digest = await self._offload.run(partial(state_digest, layout, self._bits))
        self._journal.event(VERSIONS_RESTORED, latest=latest)

    # --- publishing ---------------------------------------------------------------------------

    async def publish(self, bits: bytearray, step: Step, generation: Generation) -> Published:
        """Make the next version of ``bits`` (owned from here on) and offer it to the relays.

        Raises:
            StoreError: The disk refused; there is no new version.
        """
        layout = self.layout
        began = trio.current_time()
        latest = self._state.latest
        version = Version(0 if latest is None else latest + 1)
        digest = await self._offload.run(lambda: state_digest(layout, bits))
        made: list[tuple[Signed, bytes]] = []
        delta_bytes: int | None = None
        old = self._bits
        if latest is not None and old is not None:
            payload = await self._encode(old, bits)
            made.append(self._sign(payload, version, step, generation, digest, latest))
            delta_bytes = len(payload)
        due = old is None or chain.anchor_due(
            self._since_anchor_bytes + (delta_bytes or 0), self._anchor_bytes
        )
        due = due or self._since_anchor + 1 >= CHAIN_DELTAS_MAX
        if due:
            payload = await self._offload.run(lambda: anchor.encode_anchor(layout, bits))
            made.append(self._sign(payload, version, step, generation, digest, None))
        with trio.CancelScope(shield=True):  # memory and disk agree on what is published
            await self._commit(version, step, generation, made)
            self._bits, self._digest = bits, digest
            self._state.add_version(version, step)
        sizes = {s is None: n for s, n in self._sizes(version)}
        published = Published(
            version=version,
            anchor_bytes=sizes.get(True),
            delta_bytes=sizes.get(False),
            state_bytes=layout.total_bytes,
            changed_seconds=trio.current_time() - began,
        )
        self._journal.event(
            VERSION_PUBLISHED,
            version=version,
            step=step,
            generation=generation,
            delta_bytes=published.delta_bytes,
            anchor_bytes=published.anchor_bytes,
            forms=self._chooser.choice.why,
        )
        await self._retain()
        await self._book.put("source_bytes", msgspec.json.encode(self.source_bytes))
        return published

    async def _encode(self, old: bytearray, bits: bytearray) -> bytes:
        """Return the delta, in the forms that the measured links and our own speed call for."""
        layout, began = self.layout, trio.current_time()
        policy = self._chooser.choose(layout.total_bytes, self._relay.relay_bytes_per_s).policy
        work = partial(delta.encode_delta, layout, old, bits, policy=policy)
        payload = await self._offload.run(work)
        seconds = trio.current_time() - began
        self._chooser.learn(
            raw_bytes=layout.total_bytes, coded_bytes=len(payload), encode_s=seconds
        )
        return payload

    def _sizes(self, version: Version) -> list[tuple[Version | None, int]]:
        return [
            (link.base_version, link.wire_bytes)
            for link in self._links.values()
            if link.version == version
        ]

    def _sign(
        self,
        payload: bytes,
        version: Version,
        step: Step,
        generation: Generation,
        digest: Digest,
        base: Version | None,
    ) -> tuple[Signed, bytes]:
        settings = self._settings
        split = chunks.split(
            payload,
            chunks.chunk_bytes_for(
                len(payload),
                chunk_bytes_min=settings.chunk_bytes_min,
                chunk_bytes_max=settings.chunk_bytes_max,
            ),
        )
        base_digest = self._digest
        assert base is None or base_digest is not None
        header = build_header(
            content="model",
            run_id=RunId(self._state.run_id),
            version=version,
            chain_id=self._chain_id,
            step=step,
            generation=generation,
            base=None if base is None or base_digest is None else (base, base_digest),
            result_digest=digest,
            layout=self.layout,
            chunked=split,
        )
        return sign_record(self._key, header), payload

    async def _commit(
        self,
        version: Version,
        step: Step,
        generation: Generation,
        made: list[tuple[Signed, bytes]],
    ) -> None:
        rows: list[PayloadRow] = []
        assemblies: list[Assembly] = []
        for signed, payload in made:
            identity, header = manifest_id(signed), self._open(signed)
            await self._blobs.put(blob_name(identity), payload)
            # Served from the disk: in memory it would only stand in the way of everything else.
            stored = await self._blobs.find(blob_name(identity))
            try:
                assemblies.append(await self._offload.run(partial(Assembly.stored, header, stored)))
            except IntegrityError as error:
                detail = f"the disk gives back other bytes than were written ({error})"
                raise StoreError(f"{detail}: look at the system's log") from error
            base = None if header.base_version is None else Version(header.base_version)
            size = header.index_bytes + header.payload_bytes
            rows.append(PayloadRow(identity, version, base, signed, size))
        await self._book.add_version(VersionRow(version, step, generation, dead=False), rows)
        for row, assembly in zip(rows, assemblies, strict=True):
            identity, signed = ManifestId(row.manifest_id), row.signed
            link = chain.Link(
                manifest_id=identity,
                version=row.version,
                base_version=row.base_version,
                wire_bytes=row.wire_bytes,
            )
            self._links[identity], self._signed[identity] = link, signed
            self._count(link)
            self._relay.publish(signed, assembly, push=link.base_version is not None)

    def _open(self, signed: Signed) -> ManifestHeader:
        return open_record(signed, self._key.public_key().public_bytes_raw(), ManifestHeader)

    def _count(self, link: chain.Link) -> None:
        if link.base_version is None:
            self._anchor_bytes, self._since_anchor_bytes = link.wire_bytes, 0
            self._since_anchor = 0
        else:
            self._since_anchor_bytes += link.wire_bytes
            self._since_anchor += 1
            self._deltas += 1
            self._delta_bytes += link.wire_bytes
            self._delta_inverses += 1 / link.wire_bytes

    async def _retain(self) -> None:
        """Forget payloads that no member and no joiner needs any more."""
        holders = {member.version for member in self._state.members.live()}
        links = list(self._links.values())
        keep = {link.manifest_id for link in chain.retained(links, holders | {None})}
        recent = (self._state.latest or 0) - VERSIONS_KEPT
        keep |= {link.manifest_id for link in links if link.version > recent}
        gone = [identity for identity in self._links if identity not in keep]
        if not gone:
            return
        await self._book.forget_payloads(gone)
        for identity in gone:
            del self._links[identity], self._signed[identity]
            self._relay.forget(identity)
            await self._blobs.delete(blob_name(identity))

    # --- answers ------------------------------------------------------------------------------

    async def path(self, have: Version | None, wait_s: float) -> list[Signed]:
        """Return the cheapest path from ``have`` to the newest version.

        Waits up to ``wait_s`` seconds while there is nothing newer; then returns an empty list.
        """
        path = self._path(have)
        with trio.move_on_after(wait_s):
            while not path:
                await self._state.published.park()
                path = self._path(have)
        return [self._signed[link.manifest_id] for link in path]

    def _path(self, have: Version | None) -> tuple[chain.Link, ...]:
        latest = self._state.latest
        if latest is None or latest == have:
            return ()
        # Nothing leads there while a lost chain waits for its new anchor.
        return chain.plan_path(list(self._links.values()), have, latest) or ()

    def chunk(self, identity: ManifestId, index: int) -> memoryview | None:
        """Return a chunk for the HTTP last resort, or ``None`` if there is none."""
        assembly = self._relay.assembly(identity)
        return None if assembly is None else assembly.chunk(index)

    def statistics(self) -> WeightBytes:
        """Return sizes so far."""
        return WeightBytes(
            anchor_bytes=self._anchor_bytes,
            deltas=self._deltas,
            delta_bytes=self._delta_bytes,
            delta_inverses=self._delta_inverses,
            state_bytes=0 if self._layout is None else self._layout.total_bytes,
        )
