"""Parts of a flat state: elements that have changed, and a window over everything else.

The problem: after a small delta nobody wants to read a whole model back to know that it is in
place, but one look at what was written says nothing of what was not. The idea: a `Selection` is
all elements that were to change and a window of rows that moves on with each proof; whoever holds a
state, flat or in an engine's layers, puts the selected bits together in one order, and two digests
of them are equal only if the bits are.

Elements are named by the place of their first byte in the flat state: one number for all dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.ids import Digest, digest_of
from echo2p2p.limits import MIB
from echo2p2p.weights.layout import Layout, elements_of, flat_bytes

TURNS: Final = 64
"""So many windows that follow each other see all of a state."""
WINDOW_BYTES_MIN: Final = 1 * MIB
"""A window of a smaller state is that large, so that fewer of them do."""

_DOMAIN: Final = b"echo2p2p selection 0\x00"

Places = NDArray[np.int64]
"""``[n]``, of first bytes in the flat state, in any order, perhaps more than once."""


@dataclass(frozen=True)
class Window:
    """Bytes ``first`` to ``past`` of the flat state, and the rows that they lie in."""

    first: int
    past: int


@dataclass(frozen=True)
class Part:
    """Selected elements of one tensor.

    Attributes:
        tensor: Its number in the layout.
        elements: Which of its elements, ascending; a slice is of whole rows.
    """

    tensor: int
    elements: NDArray[np.int64] | slice

    @property
    def count(self) -> int:
        """Elements."""
        if isinstance(self.elements, slice):
            return int(self.elements.stop - self.elements.start)
        return int(self.elements.size)


def next_window(layout: Layout, turn: int) -> Window:
    """Return the window of the ``turn``-th proof, counted from 0."""
    size = max(WINDOW_BYTES_MIN, -(-layout.total_bytes // TURNS))
    windows = max(1, -(-layout.total_bytes // size))
    first = turn % windows * size
    return Window(first, min(layout.total_bytes, first + size))


def touched_parts(layout: Layout, places: Places) -> Iterator[Part]:
    """Yield the elements at ``places``, each once, tensor after tensor."""
    ordered = _ascending(places)
    for number, tensor in enumerate(layout.tensors):
        ends = (tensor.offset, tensor.offset + tensor.bytes)
        first, past = np.searchsorted(ordered, ends).tolist()
        if first < past:
            yield Part(number, (ordered[first:past] - tensor.offset) // tensor.item_bytes)


def _ascending(places: Places) -> Places:
    """Return each place once; those of one delta mostly ascend already."""
    if np.all(places[1:] > places[:-1]):
        return places
    ordered = np.sort(places)
    first = np.concatenate((np.ones(min(1, ordered.size), np.bool_), ordered[1:] > ordered[:-1]))
    ascending: Places = ordered[first]
    return ascending


def selected_parts(layout: Layout, places: Places, window: Window) -> list[Part]:
    """Return all parts of a selection, in the order in which they are digested."""
    parts = list(touched_parts(layout, places))
    for number, tensor in enumerate(layout.tensors):
        first, past = window.first - tensor.offset, window.past - tensor.offset
        if past <= 0 or first >= tensor.bytes or not tensor.elements:
            continue
        shape = layout.table.tensors[number].shape
        row = max(1, math.prod(shape[1:]))
        row_bytes = row * tensor.item_bytes
        rows = slice(max(0, first) // row_bytes, -(-min(tensor.bytes, past) // row_bytes))
        parts.append(Part(number, slice(rows.start * row, rows.stop * row)))
    return parts


def selection_bytes(layout: Layout, parts: list[Part]) -> int:
    """Return the length of these parts' bits."""
    return sum(part.count * layout.tensors[part.tensor].item_bytes for part in parts)


def selection_digest(layout: Layout, bits: bytes | bytearray | memoryview) -> Digest:
    """Return the digest of selected bits, one part after the other."""
    return digest_of(b"".join((_DOMAIN, layout.digest, bits)))


def digest_selected(
    layout: Layout, state: bytes | bytearray | memoryview, places: Places, window: Window
) -> Digest:
    """Return the digest of what is selected of a flat state."""
    flat = flat_bytes(layout, state)
    parts = selected_parts(layout, places, window)
    bits = [elements_of(flat, layout.tensors[part.tensor])[part.elements] for part in parts]
    return selection_digest(layout, b"".join(each.tobytes() for each in bits))
