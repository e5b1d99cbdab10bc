"""What the peer and its engine process say to each other, beyond the port's own values."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from echo2p2p.ids import Digest, Version
from echo2p2p.net.memory import map_state
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.state import state_digest
from echo2p2p.weights.touched import Part, Places, Window, selected_parts, selection_digest
from echo2p2p.wire.messages import Lease
from peer.engine.base import Generated, Selection
from peer.touched import Touched


class TouchedFile(msgspec.Struct, frozen=True):
    """`peer.touched.Touched` for another process."""

    base: Version
    path: str
    bytes: int
    first: int
    count: int

    @classmethod
    def of(cls, touched: Touched | None) -> TouchedFile | None:
        """Return its description."""
        if touched is None or not touched.memory.path:
            return None
        size = len(touched.memory.view)
        return cls(touched.base, touched.memory.path, size, touched.first, touched.count)

    def places(self) -> Places:
        """Return the numbers, copied."""
        mapped = map_state(self.path, self.bytes, writable=False)
        numbers: Places = np.frombuffer(mapped, "<i8", self.count, 8 * self.first).copy()
        mapped.close()
        return numbers


class LoadCall(msgspec.Struct, frozen=True):
    """`Engine.load`."""

    version: int
    path: str
    """The shared state's file."""
    touched: TouchedFile | None = None


class ProveCall(msgspec.Struct, frozen=True):
    """`Engine.prove`."""

    touched: TouchedFile | None = None
    """``None``: everything is read back."""
    first: int = 0
    """Of the window."""
    past: int = 0

    @classmethod
    def of(cls, selection: Selection | None) -> ProveCall:
        """Return the call for a selection."""
        if selection is None:
            return cls()
        window = selection.window
        return cls(TouchedFile.of(selection.touched), window.first, window.past)

    @property
    def window(self) -> Window:
        """As the library has it."""
        return Window(self.first, self.past)


EVERYTHING: Final = ProveCall()


def parts_of(layout: Layout, call: ProveCall) -> list[Part]:
    """Return what a proof has to read back, in order; all of it is the flat state itself."""
    if call.touched is None:
        return [Part(n, slice(0, each.elements)) for n, each in enumerate(layout.tensors)]
    return selected_parts(layout, call.touched.places(), call.window)


def proof_of(layout: Layout, call: ProveCall, bits: bytearray | memoryview) -> Digest:
    """Return the digest of what was read back."""
    if call.touched is None:
        return state_digest(layout, bits)
    return selection_digest(layout, bits)


class BatchCall(msgspec.Struct, frozen=True):
    """`Engine.generate`."""

    leases: list[Lease]
    heard: bool = False
    """Whether to tell how samples grow, by a progress message a turn: a list of `Grown`."""


class BatchReply(msgspec.Struct, frozen=True):
    """`Engine.generate`, or as far as it came before it was interrupted."""

    answers: list[Generated] | None
    """``None``: it stands still, until it is to go on."""


class PhaseReply(msgspec.Struct, frozen=True):
    """A sign of life while the engine starts."""

    phase: str
