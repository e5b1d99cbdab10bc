"""A payload's way into the weights: worked on as it arrives, whole or not at all.

The problem: blocks arrive over seconds or minutes, a second copy of the model is dear, and a
version must appear whole. The idea: a delta's changes are worked out beside the weights as its
blocks come, and written when all have come, in a fraction of a second during which the engine reads
nothing and nobody can cancel. If the rest never comes the old version is still there. An anchor
needs no old version: who has none writes it block by block as it comes, who has one waits for the
last chunk.

The result's digest decides. If it is not the manifest's, the weights are forgotten and nothing is
offered to the engine; no neighbour is blamed, as every chunk was verified. Rejected: building in a
second block (twice the model), and undoing a write that went wrong (an anchor does that as well).
"""

from __future__ import annotations

from typing import Final

import trio

from echo2p2p.errors import IntegrityError
from echo2p2p.ids import Digest, Version
from echo2p2p.net.ports import Offload
from echo2p2p.weights.anchor import AnchorApply
from echo2p2p.weights.assembly import Assembly
from echo2p2p.weights.delta import DeltaApply
from echo2p2p.weights.kernels import COMPILED_FROM_BYTES, warm_up
from echo2p2p.weights.state import state_digest
from echo2p2p.weights.touched import Places
from echo2p2p.wire.messages import ManifestHeader
from peer.keeper import EngineKeeper, offer_of
from peer.state import Weights

CHANGES_SHARE: Final = 0.05
"""Memory of what is worked out ahead, as a share of the model. The rest waits in the payload."""


class Apply:
    """One payload.

    Args:
        header: Of its manifest, verified.
        assembly: Its chunks, as far as they have come.
        weights: To be changed.
        keeper: Of the engine that reads them, if there is one.
        offload: For the work.

    Raises:
        IntegrityError: It is for another layout, or from a base that we do not hold.
    """

    def __init__(
        self,
        header: ManifestHeader,
        assembly: Assembly,
        *,
        weights: Weights,
        keeper: EngineKeeper | None,
        offload: Offload,
    ) -> None:
        if header.layout_digest != weights.layout.digest:
            raise IntegrityError("the manifest is for another model layout")
        self._header = header
        self._assembly = assembly
        self._weights = weights
        self._keeper = keeper
        self._offload = offload
        self._check_base()
        self._seen_bytes = 0
        layout, payload, target = weights.layout, assembly.memory, weights.view
        self._anchor = self._delta = None
        if header.base_version is None:
            self._anchor = AnchorApply(layout, payload, target)
        else:
            room = int(CHANGES_SHARE * layout.total_bytes)
            self._delta = DeltaApply(layout, payload, target, changes_bytes_max=room)

    async def advance(self) -> bool:
        """Work on the chunks that have come since the last call; return whether there were any.

        Cancel-safe: what is written meanwhile is of no version.

        Raises:
            IntegrityError: The payload does not decode.
        """
        ready = self._assembly.ready_bytes
        if ready == self._seen_bytes:
            return False
        self._seen_bytes = ready
        if self._delta is not None:
            delta = self._delta

            def work_out() -> None:
                if self._weights.layout.total_bytes >= COMPILED_FROM_BYTES:
                    warm_up()  # not before: who joins has an anchor to fetch first
                delta.advance(ready)

            await self._offload.run(work_out)
        elif self._weights.version is None and self._anchor is not None:
            anchor = self._anchor
            async with self._weights.lock:
                await self._let_go()
                await self._offload.run(lambda: anchor.advance(ready))
        return True

    async def finish(self, *, offer: bool = True) -> None:
        """Write what is left, check the digest, and offer the version to the engine.

        Args:
            offer: Whether the engine should have it; not if the next one is there already.

        Raises:
            IntegrityError: The base is gone, or the result is not the manifest's: then we hold no
                version, and the engine is offered none.
        """
        await self.advance()
        header, weights = self._header, self._weights
        async with weights.lock:
            self._check_base()
            await self._let_go()
            with trio.CancelScope(shield=True):  # a write ends, however soon we are no member
                digest, places = await self._written()
            if digest != header.result_digest:
                weights.forget()
                raise IntegrityError(f"version {header.version} does not match its digest")
            weights.switch(Version(header.version), digest, places)
            if offer and self._keeper is not None:
                self._keeper.offer(offer_of(weights))

    async def _written(self) -> tuple[Digest, Places | None]:
        """Write; return the result's digest and, of a delta, where it has written."""
        weights, size = self._weights, len(self._assembly.payload())

        def write() -> tuple[Digest, Places | None]:
            places = None
            if self._anchor is not None:
                self._anchor.advance(size)
                self._anchor.check_end()
            elif self._delta is not None:
                self._delta.write()
                places = self._delta.touched(weights.touched.room) if self._keeper else None
            return state_digest(weights.layout, weights.view), places

        try:
            return await self._offload.run(write)
        except BaseException:
            weights.forget()
            raise

    def _check_base(self) -> None:
        header, weights = self._header, self._weights
        if header.base_version is not None and (
            header.base_version != weights.version or header.base_digest != weights.digest
        ):
            held = "none" if weights.version is None else weights.version
            raise IntegrityError(f"delta from version {header.base_version}, we hold {held}")

    async def _let_go(self) -> None:
        if self._keeper is not None:
            await self._keeper.withdraw()
