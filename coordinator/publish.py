"""Turns the learner's weights into versions: delta, chunks, signed manifest, first uploads.

A delta is always taken against the last *published* bits, whatever the learner did in between
(DESIGN §4, "Chain"): so numbers are never reused and nobody who follows needs an anchor, not even
after the learner restarted from an older checkpoint. Only where so much has changed that an anchor
is shorter, it takes the delta's place. The published bits are durable as the newest anchor and the
deltas after it; after a restart they are rebuilt from those and checked by digest.

A version exists once its row is committed. What else there is to do about it comes after that: old
payloads are forgotten, and merged deltas made (`coordinator.merges`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.book import Book
from coordinator.catalogue import Catalogue, PublishedState
from coordinator.config import WeightsSection
from coordinator.merges import Merger
from coordinator.payloads import PayloadStore
from coordinator.promises import Promises
from coordinator.run_state import RunState
from coordinator.schema import VersionRow
from echo2p2p.ids import Digest, Generation, ManifestId, PeerId, Step, Version
from echo2p2p.net.ports import Blobs, Journal, Offload
from echo2p2p.net.relay import RelayNode
from echo2p2p.weights import anchor, chain, delta, kernels
from echo2p2p.weights.cuts import Finder
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.policy import PolicyChooser
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.messages import Signed

VERSION_PUBLISHED: Final = "version.published"
VERSIONS_RESTORED: Final = "versions.restored"
CHAIN_LOST: Final = "chain.lost"
CHAIN_DELTAS_MAX: Final = 128
"""Deltas after which an anchor is made whatever their size: they are all kept until then."""
VERSIONS_KEPT: Final = 8
"""Newest versions whose payloads are all kept: somebody may be in the middle of fetching one."""
SPARE_ANCHORS: Final = 4
"""Default of ``weights.spare_bytes``, in anchors."""
RETURN_S: Final = 60.0
"""Nothing is forgotten for so long after a restart: members must be heard and linked again (links
are dialled after 30 s at the latest) before it is known what they hold and what they fetch."""


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
    """The published bits and everything that leads to them.

    Args:
        threads: How many to encode in.
    """

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
        threads: int = 1,
    ) -> None:
        self._book = book
        self._blobs = blobs
        self._offload = offload
        self._relay = relay
        self._state = state
        self._settings = settings
        self._journal = journal
        self._threads = threads
        self._catalogue = Catalogue(
            book=book,
            blobs=blobs,
            offload=offload,
            relay=relay,
            key=key,
            run_id=state.run_id,
            settings=settings,
        )
        self._promises = Promises()
        self._layout: Layout | None = None
        self._merger: Merger | None = None
        self._loaded = trio.Event()
        self._published: PublishedState | None = None
        self._forget_from_s = 0.0
        self._deltas, self._delta_bytes, self._delta_inverses = 0, 0, 0.0
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
        sent = await self._book.get("source_bytes")
        if sent is not None:
            self._source_bytes_before = msgspec.json.decode(sent, type=tuple[int, int])
        versions = await self._book.versions()
        for row in versions:
            self._state.add_version(row.version, row.step, dead=row.dead)
        sizes = await self._book.delta_sizes()
        self._deltas, self._delta_bytes, self._delta_inverses = sizes
        spans = self._settings.skip_spans
        self._merger = Merger(
            layout=layout,
            spans=chain.spans_for(layout.total_bytes) if spans is None else spans,
            catalogue=self._catalogue,
            offload=self._offload,
            journal=self._journal,
        )
        if versions:
            self._forget_from_s = trio.current_time() + RETURN_S
            await self._restore(layout, versions[-1])
        if self._published is not None:
            self._merger.published(self._published)
        self._loaded.set()

    async def _restore(self, layout: Layout, newest: VersionRow) -> None:
        stored = PayloadStore(
            book=self._book,
            blobs=self._blobs,
            offload=self._offload,
            layout=layout,
            open_manifest=self._catalogue.open,
            journal=self._journal,
            threads=self._threads,
        )
        kept = await stored.load()
        for item in kept:
            self._catalogue.restore(item)
        bits = await stored.state(kept, newest.version)
        if bits is None:
            detail = "nothing whole leads to the newest version; the next one is an anchor"
            self._journal.event(CHAIN_LOST, version=newest.version, detail=detail)
            return
        digest = await self._offload.run(partial(state_digest, layout, bits))
        self._published = PublishedState(
            newest.version, newest.step, newest.generation, digest, bits
        )
        self._journal.event(VERSIONS_RESTORED, latest=newest.version, digest=digest.hex()[:16])

    async def run(self) -> None:
        """Make merged deltas beside the publications; runs until cancelled.

        Raises:
            StoreError: The disk refused.
        """
        await self._loaded.wait()
        assert self._merger is not None
        await self._merger.run()

    # --- publishing ---------------------------------------------------------------------------

    def has_published(self, bits: bytearray | None) -> bool:
        """Return whether this very object is the newest version."""
        return self._published is not None and self._published.bits is bits

    async def publish(
        self,
        bits: bytearray,
        step: Step,
        generation: Generation,
        find: Finder | None = None,
    ) -> Published:
        """Make the next version of ``bits`` (owned from here on) and offer it to the relays.

        Args:
            bits: The state.
            step: Of the learner.
            generation: Of the learner.
            find: Finds what changed since the newest version, if somebody knows already.

        Raises:
            StoreError: The disk refused; there is no new version.
        """
        assert self._merger is not None
        self._merger.give_up()
        layout, old = self.layout, self._published
        began = trio.current_time()
        latest = self._state.latest
        version = Version(0 if latest is None else latest + 1)
        digest = await self._offload.run(lambda: state_digest(layout, bits))
        new = PublishedState(version, step, generation, digest, bits)
        payloads, anchor_due = await self._payloads(old, bits, find)
        links = await self._commit(new, payloads)
        seconds = trio.current_time() - began
        if anchor_due:
            links.append(await self._catalogue.add(layout, await self._anchor(bits), new, None))
        sizes = {link.base_version is None: link.wire_bytes for link in links}
        published = Published(
            version=version,
            anchor_bytes=sizes.get(True),
            delta_bytes=sizes.get(False),
            state_bytes=layout.total_bytes,
            changed_seconds=seconds,
        )
        self._journal.event(
            VERSION_PUBLISHED,
            version=version,
            step=step,
            generation=generation,
            digest=digest.hex()[:16],
            delta_bytes=published.delta_bytes,
            anchor_bytes=published.anchor_bytes,
            forms=self._chooser.choice.why,
        )
        await self._retain()
        await self._book.put("source_bytes", msgspec.json.encode(self.source_bytes))
        self._merger.published(new)
        return published

    async def _payloads(
        self, old: PublishedState | None, bits: bytearray, find: Finder | None
    ) -> tuple[list[tuple[bytes, tuple[Version, Digest] | None]], bool]:
        """Return what is published at once, each with its base, and whether an anchor follows.

        An anchor is due at the beginning, and when the deltas after the last one have grown or
        become many. Nobody waits for it, unless the delta is so long that it may be no shorter
        than the anchor: then the shorter of the two is published, for joiners always the anchor.
        """
        if old is None:
            return [(await self._anchor(bits), None)], False
        tail = chain.tail_of(self._catalogue.links)
        made = (await self._encode(old.bits, bits, find), (old.version, old.digest))
        size = len(made[0])
        if not (
            chain.anchor_due(tail.delta_bytes + size, tail.anchor_bytes)
            or tail.deltas + 1 >= CHAIN_DELTAS_MAX
        ):
            return [made], False
        if size < tail.anchor_bytes / 2:
            return [made], True
        payload = await self._anchor(bits)
        return ([made] if size < len(payload) else []) + [(payload, None)], False

    async def _anchor(self, bits: bytearray) -> bytes:
        work = partial(anchor.encode_anchor, self.layout, bits, threads=self._threads)
        return await self._offload.run(work)

    async def _encode(self, old: bytearray, bits: bytearray, find: Finder | None) -> bytes:
        """Return the delta, in the forms that the measured links and our own speed call for."""
        layout, began = self.layout, trio.current_time()
        policy = self._chooser.choose(layout.total_bytes, self._relay.relay_bytes_per_s).policy
        work = partial(
            delta.encode_delta,
            layout,
            old,
            bits,
            policy=policy,
            threads=self._threads,
            find=find,
        )
        payload = await self._offload.run(work)
        seconds = trio.current_time() - began
        self._chooser.learn(
            raw_bytes=layout.total_bytes, coded_bytes=len(payload), encode_s=seconds
        )
        return payload

    async def _commit(
        self,
        new: PublishedState,
        payloads: list[tuple[bytes, tuple[Version, Digest] | None]],
    ) -> list[chain.Link]:
        """Make the version durable and serve it."""
        catalogue = self._catalogue
        row = VersionRow(new.version, new.step, new.generation, dead=False)
        with trio.CancelScope(shield=True):  # memory and disk agree on what is published
            written = [await catalogue.write(self.layout, p, new, base) for p, base in payloads]
            await self._book.add_version(row, [each.row for each in written])
            links = [catalogue.serve(w, push=w.row.base_version is not None) for w in written]
            self._published = new
            self._state.add_version(new.version, new.step)
        for link in links:
            if link.is_step:
                self._deltas += 1
                self._delta_bytes += link.wire_bytes
                self._delta_inverses += 1 / link.wire_bytes
        return links

    async def _retain(self) -> None:
        """Forget payloads that no member, no joiner and nobody who is away needs any more."""
        now = trio.current_time()
        if now < self._forget_from_s:
            return
        members, links = self._state.members.live(), self._catalogue.links
        spare = self._settings.spare_bytes
        if spare is None:
            spare = SPARE_ANCHORS * chain.tail_of(links).anchor_bytes
        keep = chain.retained(
            links,
            {member.version for member in members} | {None},
            fetching=self._promises.fetching(members, links, self._relay.fetching(), now),
            spare_bytes=spare,
        )
        recent = (self._state.latest or 0) - VERSIONS_KEPT
        await self._catalogue.keep_only([*keep, *(link for link in links if link.version > recent)])

    # --- answers ------------------------------------------------------------------------------

    async def path(self, member: PeerId, have: Version | None, wait_s: float) -> list[Signed]:
        """Return the cheapest path from ``have`` to the newest version, for a member.

        What it is told is kept until it asks again or has said that it got there. Waits up to
        ``wait_s`` seconds while there is nothing newer; then returns an empty list.
        """
        path = self._path(have)
        self._promises.told(member, path)
        with trio.move_on_after(wait_s):
            while not path:
                await self._state.published.park()
                path = self._path(have)
                self._promises.told(member, path)
        return self._catalogue.manifests(path)

    def _path(self, have: Version | None) -> tuple[chain.Link, ...]:
        latest = self._state.latest
        # Nothing leads there while a lost chain waits for its new anchor.
        return () if latest is None else self._catalogue.path(have, latest)

    def chunk(self, identity: ManifestId, index: int) -> memoryview | None:
        """Return a chunk for the HTTP last resort, or ``None`` if there is none."""
        assembly = self._relay.assembly(identity)
        return None if assembly is None else assembly.chunk(index)

    def statistics(self) -> WeightBytes:
        """Return sizes so far."""
        return WeightBytes(
            anchor_bytes=chain.tail_of(self._catalogue.links).anchor_bytes,
            deltas=self._deltas,
            delta_bytes=self._delta_bytes,
            delta_inverses=self._delta_inverses,
            state_bytes=0 if self._layout is None else self._layout.total_bytes,
        )
