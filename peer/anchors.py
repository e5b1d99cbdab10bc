"""An anchor that we never received, built from the weights that we hold, for whoever lacks it.

Making one takes seconds of a core for each gigabyte and the weights' lock, so it is made only when
a neighbour wants it of us, only while we hold its very version, and once a version. All that a
neighbour can name is a manifest that the run has signed. It lies in a file, as long payloads do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import trio

from echo2p2p.errors import StoreError
from echo2p2p.ids import ManifestId, Version
from echo2p2p.net.ports import Journal, Offload
from echo2p2p.net.relay import RelayNode
from echo2p2p.weights.manifest import manifest_id
from echo2p2p.weights.rebuild import rebuild_anchor
from echo2p2p.wire.messages import ManifestHeader, Signed
from peer.state import Weights

ANCHOR_REBUILT: Final = "anchor.rebuilt"
ANCHOR_DROPPED: Final = "anchor.dropped"


class AnchorMaker:
    """Of one incarnation.

    Args:
        weights: Read under their lock.
        relay: Serves what was made.
        made: Told of it, to keep it.
        offload: For the work.
        journal: Where events go.
    """

    def __init__(
        self,
        *,
        weights: Weights,
        relay: RelayNode,
        made: Callable[[ManifestId], None],
        offload: Offload,
        journal: Journal,
    ) -> None:
        self._weights = weights
        self._relay = relay
        self._made = made
        self._offload = offload
        self._journal = journal
        self._tried: Version | None = None
        self._wanted: tuple[Signed, ManifestHeader] | None = None
        self._woken = trio.Event()

    def asked(self, signed: Signed, header: ManifestHeader) -> None:
        """A neighbour wants this anchor of us."""
        if self._suits(header) and self._tried != header.version:
            self._tried = Version(header.version)
            self._wanted = signed, header
            self._woken.set()

    async def run(self) -> None:
        """Make what is asked for, until cancelled."""
        while True:
            await self._woken.wait()
            self._woken = trio.Event()
            wanted, self._wanted = self._wanted, None
            if wanted is not None:
                await self._make(*wanted)

    def _suits(self, header: ManifestHeader) -> bool:
        weights = self._weights
        return (
            header.base_version is None
            and header.layout_digest == weights.layout.digest
            and header.version == weights.version
            and header.result_digest == weights.digest
        )

    async def _make(self, signed: Signed, header: ManifestHeader) -> None:
        weights, identity = self._weights, manifest_id(signed)
        began = trio.current_time()
        async with weights.lock:
            if not self._suits(header) or self._relay.assembly(identity) is not None:
                return
            try:
                memory = weights.scratch(header.payload_bytes)
            except StoreError as error:
                self._journal.event(ANCHOR_DROPPED, version=header.version, detail=str(error))
                return
            work = partial(rebuild_anchor, header, weights.layout, weights.view, memory.view)
            assembly = await self._offload.run(work)
        if assembly is None:
            memory.close()
            detail = "our bytes are others than the publisher's"
            self._journal.event(ANCHOR_DROPPED, version=header.version, detail=detail)
            return
        self._relay.publish(signed, assembly, push=False, memory=memory)
        self._made(identity)
        self._journal.event(
            ANCHOR_REBUILT,
            version=header.version,
            bytes=header.payload_bytes,
            seconds=round(trio.current_time() - began, 4),
        )
