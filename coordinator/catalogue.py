"""The payloads that can be fetched now: blob on disk, row in the store, payload at the relay.

The three are one set, and this is the only place that changes it. A payload is served once its row
is committed; its blob is on disk before that, so a crash in between leaves an orphan blob, which
the next start sweeps (`coordinator.payloads`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.book import Book
from coordinator.config import WeightsSection
from coordinator.payloads import Kept, blob_name
from coordinator.schema import PayloadRow
from echo2p2p.errors import IntegrityError, StoreError
from echo2p2p.ids import DIGEST_BYTES, Digest, Generation, ManifestId, RunId, Step, Version
from echo2p2p.net.ports import Blobs, Offload
from echo2p2p.net.relay import RelayNode
from echo2p2p.weights import chain, chunks
from echo2p2p.weights.assembly import Assembly
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.manifest import build_header, manifest_id
from echo2p2p.wire.messages import ManifestHeader, Signed
from echo2p2p.wire.signing import open_record, sign_record

PATHS_MAX: Final = 1024
"""Paths that are remembered."""


@dataclass(frozen=True)
class PublishedState:
    """The bits of a version; they do not change any more."""

    version: Version
    step: Step
    generation: Generation
    digest: Digest
    bits: bytearray


@dataclass(frozen=True)
class Written:
    """A payload whose blob is on disk, and which no row speaks of yet."""

    row: PayloadRow
    assembly: Assembly


class Catalogue:
    """All payloads of the run that are still kept."""

    def __init__(
        self,
        *,
        book: Book,
        blobs: Blobs,
        offload: Offload,
        relay: RelayNode,
        key: Ed25519PrivateKey,
        run_id: str,
        settings: WeightsSection,
    ) -> None:
        self._book = book
        self._blobs = blobs
        self._offload = offload
        self._relay = relay
        self._key = key
        self._run_id = run_id
        self._settings = settings
        self._links: dict[ManifestId, chain.Link] = {}
        self._signed: dict[ManifestId, Signed] = {}
        self._paths: dict[tuple[Version | None, Version], tuple[chain.Link, ...]] = {}

    @property
    def links(self) -> list[chain.Link]:
        """Everything that leads from version to version."""
        return list(self._links.values())

    def open(self, signed: Signed) -> ManifestHeader:
        """Return the header of a manifest of this run.

        Raises:
            IntegrityError, RemoteProtocolError: It is not.
        """
        return open_record(signed, self._key.public_key().public_bytes_raw(), ManifestHeader)

    def path(self, have: Version | None, target: Version) -> tuple[chain.Link, ...]:
        """Return the cheapest path; empty if there is none, or nothing to go.

        Remembered until something changes: all peers ask at once, and most from the same version.
        """
        path = self._paths.get((have, target))
        if path is None:
            if len(self._paths) >= PATHS_MAX:
                self._paths.clear()
            path = chain.plan_path(self._links.values(), have, target) or ()
            self._paths[have, target] = path
        return path

    def manifests(self, path: Iterable[chain.Link]) -> list[Signed]:
        """Return the manifests of links of ours."""
        return [self._signed[link.manifest_id] for link in path]

    async def write(
        self,
        layout: Layout,
        payload: bytes,
        state: PublishedState,
        base: tuple[Version, Digest] | None,
    ) -> Written:
        """Sign a payload that leads to ``state`` and put it on disk.

        Args:
            layout: Of the state.
            payload: An anchor or a delta.
            state: What it leads to.
            base: What it must be applied to; ``None``: an anchor.

        Raises:
            StoreError: The disk refused, or gives back other bytes.
        """
        header = self._header(layout, payload, state, base)
        signed = sign_record(self._key, header)
        identity = manifest_id(signed)
        await self._blobs.put(blob_name(identity), payload)
        # Served from the disk: in memory it would only stand in the way of everything else.
        stored = await self._blobs.find(blob_name(identity))
        try:
            assembly = await self._offload.run(partial(Assembly.stored, header, stored))
        except IntegrityError as error:
            detail = f"the disk gives back other bytes than were written ({error})"
            raise StoreError(f"{detail}: look at the system's log") from error
        size = header.index_bytes + header.payload_bytes
        row = PayloadRow(identity, state.version, None if base is None else base[0], signed, size)
        return Written(row, assembly)

    def _header(
        self,
        layout: Layout,
        payload: bytes,
        state: PublishedState,
        base: tuple[Version, Digest] | None,
    ) -> ManifestHeader:
        return build_header(
            content="model",
            run_id=RunId(self._run_id),
            version=state.version,
            chain_id=layout.digest.hex()[:16],
            step=state.step,
            generation=state.generation,
            base=base,
            result_digest=state.digest,
            layout=layout,
            chunked=chunks.split(payload, self._chunk_bytes(len(payload))),
        )

    def _chunk_bytes(self, payload_bytes: int) -> int:
        return chunks.chunk_bytes_for(
            payload_bytes,
            chunk_bytes_min=self._settings.chunk_bytes_min,
            chunk_bytes_max=self._settings.chunk_bytes_max,
        )

    def wire_bytes(self, payload_bytes: int) -> int:
        """Return what a payload of this length takes with its index."""
        count = -(-payload_bytes // self._chunk_bytes(payload_bytes))
        return payload_bytes + count * DIGEST_BYTES

    async def add(
        self,
        layout: Layout,
        payload: bytes,
        state: PublishedState,
        base: tuple[Version, Digest] | None,
    ) -> chain.Link:
        """Write and serve another payload of a version that exists; arguments as for `write`.

        Raises:
            StoreError: The disk refused.
        """
        with trio.CancelScope(shield=True):  # memory and disk agree on what there is
            written = await self.write(layout, payload, state, base)
            await self._book.add_payload(written.row)
        return self.serve(written, push=False)

    def serve(self, written: Written, *, push: bool) -> chain.Link:
        """Offer a payload whose row is committed; returns its link.

        Args:
            written: What `write` returned.
            push: Whether every peer is about to need it; otherwise only who asks gets it.
        """
        row = written.row
        identity = ManifestId(row.manifest_id)
        link = chain.Link(identity, row.version, row.base_version, row.wire_bytes)
        self._add(link, row.signed, written.assembly, push=push)
        return link

    def restore(self, kept: Kept) -> None:
        """Offer a payload of an earlier life; whoever needs it asks."""
        self._add(kept.link, kept.signed, kept.assembly, push=False)

    def _add(self, link: chain.Link, signed: Signed, assembly: Assembly, *, push: bool) -> None:
        self._links[link.manifest_id], self._signed[link.manifest_id] = link, signed
        self._paths.clear()
        self._relay.publish(signed, assembly, push=push)

    async def keep_only(self, wanted: Iterable[chain.Link]) -> None:
        """Forget all others: at once for whoever asks, then in the store, then on disk."""
        keep = {link.manifest_id for link in wanted}
        gone = [identity for identity in self._links if identity not in keep]
        if not gone:
            return
        for identity in gone:  # before anything is waited for: nobody is told of them any more
            del self._links[identity], self._signed[identity]
            self._relay.forget(identity)
        self._paths.clear()
        await self._book.forget_payloads(gone)
        for identity in gone:
            await self._blobs.delete(blob_name(identity))
