"""The published payloads on disk, looked at when a run is taken up: verified, mended or dropped.

Blobs can be damaged (a bad sector, a careless copy) or missing while the database is well. Every
payload is compared with its signed manifest before it is served to anybody. A damaged one is made
again if the states at its two ends can be had from others: the codec gives the same bytes for the
same states. Otherwise it is dropped, and peers go another way, at worst over an anchor. If the
newest state cannot be rebuilt at all, the chain begins anew: the next version, under the next
number, is an anchor of the learner's checkpoint.

Blobs that no row speaks of are what a crash has left between blob and row; they are deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from coordinator.book import Book
from coordinator.schema import PayloadRow
from echo2p2p.errors import IntegrityError, LocalProtocolError, RemoteProtocolError, StoreError
from echo2p2p.ids import Digest, ManifestId, Version
from echo2p2p.net.ports import Blobs, Journal, Offload
from echo2p2p.weights import anchor, chain, chunks, delta
from echo2p2p.weights.assembly import Assembly
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.policy import QUICKEST, SMALLEST
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.messages import ManifestHeader, Signed

PAYLOAD_DAMAGED: Final = "payload.corrupt"
PAYLOAD_MENDED: Final = "payload.mended"
PAYLOAD_DROPPED: Final = "payload.dropped"
PREFIX: Final = "payload-"


def blob_name(identity: ManifestId) -> str:
    """Return the name of a payload's blob."""
    return f"{PREFIX}{identity.hex()}"


@dataclass(frozen=True)
class Kept:
    """A payload that is whole and verified."""

    link: chain.Link
    signed: Signed
    header: ManifestHeader
    assembly: Assembly


@dataclass(frozen=True)
class _Damaged:
    """A payload whose manifest is all that is left."""

    link: chain.Link
    signed: Signed
    header: ManifestHeader | None
    """``None``: the manifest is damaged too."""
    detail: str


class PayloadStore:
    """Reads, mends and drops.

    Args:
        open_manifest: Verifies a signed manifest; raises `IntegrityError` or
            `RemoteProtocolError`.
        threads: How many to decode and encode in.
    """

    def __init__(
        self,
        *,
        book: Book,
        blobs: Blobs,
        offload: Offload,
        layout: Layout,
        open_manifest: Callable[[Signed], ManifestHeader],
        journal: Journal,
        threads: int = 1,
    ) -> None:
        self._book = book
        self._blobs = blobs
        self._offload = offload
        self._layout = layout
        self._open_manifest = open_manifest
        self._journal = journal
        self._threads = threads

    async def load(self) -> list[Kept]:
        """Return all payloads that are whole, in order of version, after mending.

        Raises:
            StoreError: The disk refuses writes.
        """
        rows = await self._book.payloads()
        known = {blob_name(ManifestId(row.manifest_id)) for row in rows}
        for name in await self._blobs.names():
            if name.startswith(PREFIX) and name not in known:
                await self._blobs.delete(name)
        kept: list[Kept] = []
        damaged: list[_Damaged] = []
        for row in rows:
            found = await self._look_at(row)
            if isinstance(found, Kept):
                kept.append(found)
            else:
                damaged.append(found)
        for item in damaged:
            version = item.link.version
            self._journal.event(PAYLOAD_DAMAGED, version=version, detail=item.detail)
            whole = await self._mend(item, kept)
            if whole is not None:
                kept.append(whole)
                self._journal.event(PAYLOAD_MENDED, version=version)
            else:
                await self._book.forget_payloads([item.link.manifest_id])
                await self._blobs.delete(blob_name(item.link.manifest_id))
                self._journal.event(PAYLOAD_DROPPED, version=version)
        return sorted(kept, key=lambda item: (item.link.version, _place(item.link.base_version)))

    async def _look_at(self, row: PayloadRow) -> Kept | _Damaged:
        identity = ManifestId(row.manifest_id)
        link = chain.Link(identity, row.version, row.base_version, row.wire_bytes)
        header: ManifestHeader | None = None
        try:
            header = self._open_manifest(row.signed)
            stored = await self._blobs.find(blob_name(identity))
            assembly = await self._offload.run(partial(Assembly.stored, header, stored))
        except (StoreError, IntegrityError, RemoteProtocolError) as error:
            return _Damaged(link, row.signed, header, str(error))
        return Kept(link, row.signed, header, assembly)

    async def _mend(self, item: _Damaged, kept: list[Kept]) -> Kept | None:
        """Make a payload again from the states at its ends; ``None`` if that cannot be done."""
        header, layout, link = item.header, self._layout, item.link
        if header is None:
            return None
        result = await self.state(kept, link.version)
        if result is None:
            return None
        threads = self._threads
        if link.base_version is None:
            works = [partial(anchor.encode_anchor, layout, result, threads=threads)]
        else:
            base = await self.state(kept, link.base_version)
            if base is None:
                return None
            works = [
                partial(delta.encode_delta, layout, base, result, policy=policy, threads=threads)
                for policy in (SMALLEST, QUICKEST)  # which of them it was is not written down
            ]
        name = blob_name(link.manifest_id)
        for work in works:
            payload = await self._offload.run(work)
            try:
                await self._offload.run(partial(_check, header, payload))
            except IntegrityError:
                continue
            await self._blobs.put(name, payload)
            stored = await self._blobs.find(name)
            assembly = await self._offload.run(partial(Assembly.stored, header, stored))
            return Kept(link, item.signed, header, assembly)
        return None  # another release of the codec made it

    async def state(self, kept: Sequence[Kept], version: Version) -> bytearray | None:
        """Return a version's bits, whose digest was verified; ``None`` if nothing leads there."""
        of_link = {item.link: item for item in kept}
        path = chain.plan_path(list(of_link), None, version)
        if path is None:
            return None
        items = [of_link[link] for link in path]
        wanted = Digest(items[-1].header.result_digest)
        try:
            bits = await self._offload.run(partial(_decode, self._layout, items, self._threads))
        except IntegrityError:
            return None
        digest = await self._offload.run(partial(state_digest, self._layout, bits))
        return bits if digest == wanted else None


def _check(header: ManifestHeader, payload: bytes) -> None:
    """Compare a payload with its manifest.

    Raises:
        IntegrityError: It is another one.
    """
    try:
        index = chunks.split(payload, header.chunk_bytes).index
    except LocalProtocolError as error:
        raise IntegrityError(str(error)) from error
    Assembly.whole(header, payload, index)


def _place(base: Version | None) -> int:
    return -1 if base is None else base


def _decode(layout: Layout, path: Sequence[Kept], threads: int) -> bytearray:
    bits = bytearray(layout.total_bytes)
    for item in path:
        payload = item.assembly.payload()
        if item.link.base_version is None:
            anchor.decode_anchor(layout, payload, memoryview(bits), threads=threads)
        else:
            delta.apply_delta(layout, payload, memoryview(bits), threads=threads)
    return bits
