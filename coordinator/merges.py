"""Merged deltas: one payload over 4 or 16 versions, for peers that are behind.

The problem: what changes back and forth is sent again with each version, so a peer that was away
for eight gets twice of what it needs; but encoding must not keep those waiting who are not behind.
The idea: `echo2p2p.weights.chain` says which versions to join, so that few states are held; each
merged delta is made after its version was published, one at a time and in one thread, and given up
if the next publication begins first. It is announced and not pushed: who asks gets it. One that is
no shorter than what leads there already is not kept.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Final

import trio

from coordinator.catalogue import Catalogue, PublishedState
from echo2p2p.ids import Digest, Version
from echo2p2p.net.ports import Journal, Offload
from echo2p2p.weights.chain import SkipBases
from echo2p2p.weights.delta import encode_delta
from echo2p2p.weights.layout import Layout

DELTA_MERGED: Final = "delta.merged"
MERGE_SKIPPED: Final = "delta.merge_skipped"
BEHIND: Final = "the next version was due first"
NO_SHORTER: Final = "no shorter than what leads there already"

_Due = tuple[PublishedState, tuple[Version, Digest, bytearray]]
"""What a merged delta leads to, and what it starts from."""


class Merger:
    """Makes merged deltas beside the publications.

    Args:
        spans: Versions that they span; none: nothing is made, and nothing held.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        spans: tuple[int, ...],
        catalogue: Catalogue,
        offload: Offload,
        journal: Journal,
    ) -> None:
        self._layout = layout
        self._bases = SkipBases(spans)
        self._catalogue = catalogue
        self._offload = offload
        self._journal = journal
        self._due: deque[_Due] = deque()
        self._woken = trio.lowlevel.ParkingLot()

    def published(self, state: PublishedState) -> None:
        """Take note of a version, after all that matters of its publication was done."""
        self._due += [(state, base) for base in self._bases.due(state.version)]
        self._bases.published(state.version, state.digest, state.bits)
        if self._due:
            self._woken.unpark_all()

    def give_up(self) -> None:
        """The next publication begins: what has not been begun is not made any more."""
        while self._due:
            state, (base, _, _) = self._due.popleft()
            self._journal.event(MERGE_SKIPPED, version=state.version, base=base, detail=BEHIND)

    async def run(self) -> None:
        """Make what is due; runs until cancelled.

        Raises:
            StoreError: The disk refused.
        """
        while True:
            while not self._due:
                await self._woken.park()
            await self._merge(*self._due.popleft())

    async def _merge(self, state: PublishedState, base: tuple[Version, Digest, bytearray]) -> None:
        layout, (start, digest, bits) = self._layout, base
        payload = await self._offload.run(partial(encode_delta, layout, bits, state.bits))
        steps = self._catalogue.path(start, state.version)
        size = sum(link.wire_bytes for link in steps)
        if steps and self._catalogue.wire_bytes(len(payload)) >= size:
            self._journal.event(MERGE_SKIPPED, version=state.version, base=start, detail=NO_SHORTER)
            return
        link = await self._catalogue.add(layout, payload, state, (start, digest))
        self._journal.event(
            DELTA_MERGED,
            version=state.version,
            base=start,
            bytes=link.wire_bytes,
            instead_of=size or None,
        )
