"""The flat weights of this peer: one block of shared memory, and what is known of its bits.

The engine copies the bits when it loads them, so one block is enough: while the next version is
written into it the engine goes on with its own copy, and one that is started meanwhile waits. The
block is written only under `Weights.lock`, after the engine's keeper has been told, and by work
that nothing can cancel; so it is a whole version of known digest, or it is of no version.

The block does not outlive the process: what a killed peer was writing is not trusted, and the next
life starts from a folder of the user's or from an anchor. Long payloads do: each chunk of them can
be told from garbage by its digest, so that an anchor is not fetched twice.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from echo2p2p.ids import Digest, Version
from echo2p2p.net.ports import SharedMemory, SharedState
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.touched import Places
from peer.touched import TouchLog


class Weights:
    """Survives a change of incarnation.

    Args:
        layout: Of the run's model.
        memory: Gives the block, and room for payloads.
    """

    def __init__(self, layout: Layout, memory: SharedMemory) -> None:
        self.layout = layout
        self._memory = memory
        self.state = memory.allocate("weights", max(1, layout.total_bytes))
        """The block, as the engine is given it."""
        self.version: Version | None = None
        """Whose bits the block holds, whole; ``None``: nobody's."""
        self.digest: Digest | None = None
        """Of these bits."""
        self.touched = TouchLog(memory, layout.total_bytes)
        """What the last deltas have written."""
        self.lock = trio.Lock()
        """Held by who writes the block, and by who reads it for long."""

    @property
    def view(self) -> memoryview:
        """The flat state."""
        return self.state.view[: self.layout.total_bytes]

    def scratch(self, size: int) -> SharedState:
        """Return memory for a payload.

        Raises:
            StoreError: No room.
        """
        return self._memory.scratch(size)

    def keep(self, name: str, size: int) -> SharedState:
        """Return memory for a payload that a later life of this peer may find again.

        Raises:
            StoreError: No room.
        """
        return self._memory.keep(name, size)

    def left(self) -> list[str]:
        """Return the names of payloads that an earlier life, or membership, has left."""
        return self._memory.kept()

    def drop_left(self, names: Iterable[str]) -> None:
        """Remove payloads that nobody will ask for again."""
        for name in names:
            self._memory.drop(name)

    def switch(self, version: Version, digest: Digest, places: Places | None = None) -> None:
        """The block holds this version now.

        Args:
            version: Its number.
            digest: Of its bits.
            places: All that was written since the version before; ``None``: anything.
        """
        if self.version is None:
            self.touched.clear()
        else:
            self.touched.add(self.version, version, places)
        self.version, self.digest = version, digest

    def forget(self) -> None:
        """The block is not to be trusted."""
        self.version = self.digest = None

    def close(self) -> None:
        """Release the block, and what belongs to it."""
        self.state.close()
        self.touched.close()
