"""TIGHT: changes sorted by the class of the old element, for few changes in as few bytes as can be.

Walk through the block and count, for each class, elements of that class. A changed element gives
two integers: how many unchanged ones of its class came since the last change in it, and the
difference. Within a class both follow one distribution, whatever the others do, and so one table
of bins a class takes them to within 1 % of the entropy, given the old exponents.

Body: number ``low``; 16 numbers, changes by class; a number, the mask of classes that start a new
group; for each group the packed gaps (u32), then the packed differences, class after class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.weights import kernels
from echo2p2p.weights.changes import Changes, joined, pieces_of
from echo2p2p.weights.kernels import Ranks
from echo2p2p.weights.layout import Dtype
from echo2p2p.weights.ordered import CLASSES
from echo2p2p.weights.streams import StreamReader, StreamWriter
from echo2p2p.weights.stretch import (
    Segments,
    Stretch,
    group_slices,
    plan_groups,
    take_groups,
    take_low,
    value_dtype,
    walk,
)

CHANGES_MAX: Final = 1 << 26
"""In one block; bounds what a reader allocates to six bytes for each of them."""


def put_tight(out: StreamWriter, stretch: Stretch) -> None:
    """Append the body of a stretch with 1 to `CHANGES_MAX` changes."""
    dtype, found = stretch.dtype, stretch.found
    changes = stretch.changes_by_class()
    gaps = np.empty(stretch.changed, dtype=np.uint32)
    values = np.empty(stretch.changed, dtype=value_dtype(dtype))
    ranks = Ranks.start(stretch.low, changes)
    for number, origin, part in walk(stretch.old, found.where):
        where, zigzag = found.where[part], found.zigzag[part]
        kernels.put_ranks(dtype, stretch.old[number], where, zigzag, origin, ranks, gaps, values)
    groups = plan_groups(changes)
    for value in (stretch.low, *changes.tolist(), groups):
        out.number(value)
    for part in group_slices(groups, changes):
        out.packed(gaps[part])
        out.packed(values[part])


@dataclass(frozen=True)
class _Streams:
    """A body's content, before it is known where in the block its changes are."""

    ranks: Ranks
    gaps: NDArray[np.uint32]
    values: NDArray[Any]

    @classmethod
    def read(cls, body: StreamReader, dtype: Dtype, count: int) -> _Streams:
        """Read the body of a block of ``count`` elements."""
        low = take_low(body)
        changes = np.array([body.number(count) for _ in range(CLASSES)], dtype=np.int64)
        total = int(changes.sum())
        if not 0 < total <= min(count, CHANGES_MAX):
            raise body.corrupt(f"{total} changes of {count} elements")
        groups = take_groups(body)
        gaps = np.empty(total, dtype=np.uint32)
        values = np.empty(total, dtype=value_dtype(dtype))
        for part in group_slices(groups, changes):
            body.packed(gaps[part])
            body.packed(values[part])
        values = values.astype(dtype.bits, copy=False)
        return cls(kernels.first_ranks(low, changes, gaps), gaps, values)

    def check_end(self, body: StreamReader) -> None:
        """Check that every change found its place."""
        if not np.array_equal(self.ranks.at, self.ranks.end):
            raise body.corrupt("gaps that lead beyond the block")


def take_tight(body: StreamReader, dtype: Dtype, target: Segments) -> None:
    """Change ``target`` in place."""
    streams = _Streams.read(body, dtype, sum(segment.size for segment in target))
    for segment in target:
        kernels.take_ranks(dtype, segment, streams.ranks, streams.gaps, streams.values)
    streams.check_end(body)


def find_tight(body: StreamReader, dtype: Dtype, old: Segments) -> Changes:
    """Return what the block changes; ``old`` is read only."""
    streams = _Streams.read(body, dtype, sum(segment.size for segment in old))
    parts = []
    for origin, piece in pieces_of(old):
        moved = piece.copy()
        kernels.take_ranks(dtype, moved, streams.ranks, streams.gaps, streams.values)
        found = kernels.find(dtype, piece, moved)
        parts.append(Changes(found.where + np.uint32(origin), found.zigzag.copy()))
    streams.check_end(body)
    return joined(parts)
