"""The run's first weights from a folder that the volunteer has, instead of from the net.

Its bits are put where the weights belong, and their digest is compared with what signed manifests
say: of version 0, where the cheapest path from it begins, or of an anchor that a joiner would
fetch. If neither has it nothing is lost but the time: the weights are still of no version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from echo2p2p.errors import ConfigError
from echo2p2p.ids import Digest, Version
from echo2p2p.net.ports import Journal, Offload
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.messages import ManifestHeader
from peer.state import Weights

LOCAL_WEIGHTS_USED: Final = "local_weights.used"
LOCAL_WEIGHTS_REJECTED: Final = "local_weights.rejected"
FIRST: Final = Version(0)

ReadModel = Callable[[Layout, memoryview], None]
"""Fills the flat state of a layout; raises `ConfigError` if it cannot."""


class LocalModel:
    """Tried once, while there are no weights.

    Args:
        read: Reads the folder.
        weights: Without a version.
        offload: For reading and digesting.
        journal: Where events go.
    """

    def __init__(
        self, read: ReadModel, *, weights: Weights, offload: Offload, journal: Journal
    ) -> None:
        self._read = read
        self._weights = weights
        self._offload = offload
        self._journal = journal
        self._digest: Digest | None = None

    async def load(self) -> Digest | None:
        """Put the folder's bits into the weights, the first time, and return their digest.

        ``None``, with a line in the journal, if it does not hold this model.
        """
        weights = self._weights
        assert weights.version is None

        def work() -> Digest:
            self._read(weights.layout, weights.view)
            return state_digest(weights.layout, weights.view)

        try:
            if self._digest is None:
                async with weights.lock:
                    self._digest = await self._offload.run(work)
        except ConfigError as error:
            self._rejected(str(error))
        return self._digest

    def adopt(
        self, digest: Digest, from_first: list[ManifestHeader], from_none: list[ManifestHeader]
    ) -> bool:
        """Call the weights by the version that they are; say in the journal if they are none.

        Args:
            digest: Of the weights, as `load` has them.
            from_first: The path from version 0 to the newest.
            from_none: The path for who has nothing.
        """
        for header in (*from_first[:1], *from_none[:1]):
            if (header.base_version, header.base_digest) == (FIRST, digest):
                return self._used(FIRST, digest)
            if header.base_version is None and header.result_digest == digest:
                return self._used(Version(header.version), digest)
        self._rejected("its weights are not those that the run started from, or has an anchor of")
        return False

    def _used(self, version: Version, digest: Digest) -> bool:
        self._weights.switch(version, digest)
        self._journal.event(LOCAL_WEIGHTS_USED, version=version)
        return True

    def _rejected(self, detail: str) -> None:
        self._journal.event(LOCAL_WEIGHTS_REJECTED, detail=f"{detail}: they are downloaded")
