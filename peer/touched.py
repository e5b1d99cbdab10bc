"""What the last deltas have changed, in memory that the engine can read.

The problem: a delta of a thousandth of the model must not cost the engine a whole load, and it may
be one or several versions behind. The idea: beside the weights lies a list of the elements that
each delta has written, the newest at the end; an engine that uses the bits of version v needs
those from v on, which is the list's end. The list is bounded: what does not fit starts it anew, and
whoever is further behind loads everything.

It is written under the same rule as the weights (`peer.state`): under their lock, after the
engine's keeper was told. Nothing believes it: an engine proves what it has loaded by bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from echo2p2p.errors import StoreError
from echo2p2p.ids import Version
from echo2p2p.net.ports import SharedMemory, SharedState
from echo2p2p.weights.touched import Places

SHARE: Final = 1 / 64
"""Of the model's bytes, for the list: 0.4 % of the elements of a bf16 model, three versions of 0.12
%. With what makes the list it is less than the changes of such a delta may take (`peer.apply`)."""
_ITEM: Final = np.dtype("<i8")


@dataclass(frozen=True)
class Touched:
    """Elements that differ at most between the bits of version ``base`` and the state offered."""

    base: Version
    memory: SharedState
    first: int
    """Of the memory's numbers, the first that counts."""
    count: int

    @property
    def places(self) -> Places:
        """Where they are; a view of the memory."""
        numbers = np.frombuffer(self.memory.view, dtype=_ITEM)
        return numbers[self.first : self.first + self.count]


class TouchLog:
    """The list.

    Args:
        memory: Gives the room, once there is a delta to be noted.
        total_bytes: Of the model.
    """

    def __init__(self, memory: SharedMemory, total_bytes: int) -> None:
        self._shared = memory
        self.room = max(1, int(SHARE * total_bytes) // _ITEM.itemsize)
        """Elements that it can hold."""
        self._memory: SharedState | None = None
        self._refused = False
        self._starts: dict[Version, int] = {}
        self._newest: Version | None = None
        self._end = 0

    def clear(self) -> None:
        """Forget everything: the weights have come another way."""
        self._starts.clear()
        self._newest, self._end = None, 0

    def add(self, base: Version, version: Version, places: Places | None) -> None:
        """Note what the step from ``base`` to ``version`` has written; ``None``: anything."""
        if places is None or places.size > self.room or not self._has_memory():
            self.clear()
            return
        if base != self._newest or self._end + places.size > self.room:
            self.clear()
        assert self._memory is not None
        past = self._end + places.size
        np.frombuffer(self._memory.view, dtype=_ITEM)[self._end : past] = places
        self._starts[base] = self._end
        self._newest, self._end = version, past

    def since(self, base: Version) -> Touched | None:
        """Return what has been written since ``base``; ``None``: nobody knows."""
        first = self._starts.get(base)
        if first is None or self._memory is None:
            return None
        return Touched(base, self._memory, first, self._end - first)

    def close(self) -> None:
        """Give the memory back."""
        self.clear()
        if self._memory is not None:
            self._memory.close()

    def _has_memory(self) -> bool:
        """Whether there is memory; where there is no room for it, engines load everything."""
        if self._memory is None and not self._refused:
            try:
                self._memory = self._shared.allocate("touched", self.room * _ITEM.itemsize)
            except StoreError:
                self._refused = True
        return self._memory is not None
