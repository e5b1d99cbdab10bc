"""A stretch of one sequence between two states: what an encoder makes a block of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.weights import kernels
from echo2p2p.weights.kernels import Found
from echo2p2p.weights.layout import Dtype
from echo2p2p.weights.ordered import CLASSES, class_table, plan_low
from echo2p2p.weights.streams import StreamReader

Segments = Sequence[NDArray[Any]]
"""Contiguous parts of a stretch, ``dtype.bits``, in order."""

GROUP_MIN: Final = 384
"""Neighbouring classes with fewer entries share a stream: its tables cost about 60 bytes."""


@dataclass(frozen=True)
class Stretch:
    """Old and new elements of a stretch, and what changed.

    Attributes:
        dtype: Of the elements.
        old: Segments.
        new: Segments of the same lengths.
        found: The changes, counted from the stretch's start.
        low: Which exponents have classes of their own.
    """

    dtype: Dtype
    old: Segments
    new: Segments
    found: Found
    low: int

    @classmethod
    def of(cls, dtype: Dtype, old: NDArray[Any], new: NDArray[Any]) -> Stretch:
        """Return the stretch between two arrays, with the classes that suit it."""
        found = kernels.find(dtype, old, new)
        low = plan_low(np.bincount(found.exponent, minlength=256))
        return cls(dtype, [old], [new], found, low)

    @property
    def count(self) -> int:
        """Elements."""
        return sum(segment.size for segment in self.old)

    @property
    def changed(self) -> int:
        """Elements that changed."""
        return int(self.found.where.size)

    @property
    def raw_bytes(self) -> int:
        """Of the new elements."""
        return self.count * self.dtype.item_bytes

    def changes_by_class(self) -> NDArray[np.int64]:
        """Return ``[16]``."""
        by_exponent = np.bincount(self.found.exponent, minlength=256)
        return np.bincount(class_table(self.low), by_exponent, CLASSES).astype(np.int64)


def population(dtype: Dtype, segments: Segments, low: int) -> NDArray[np.int64]:
    """Return ``[16]``: elements of each class."""
    counts = np.zeros(CLASSES, dtype=np.int64)
    for segment in segments:
        counts += kernels.population(dtype, segment, low)
    return counts


def walk(segments: Segments, where: NDArray[np.uint32]) -> Iterator[tuple[int, int, slice]]:
    """Yield for each segment its number, its first element's place, and its part of ``where``."""
    ends = np.cumsum([segment.size for segment in segments])
    cuts = [0, *np.searchsorted(where, ends).tolist()]
    origins = [0, *ends.tolist()]
    for number, (first, past) in enumerate(itertools.pairwise(cuts)):
        yield number, origins[number], slice(first, past)


def value_dtype(dtype: Dtype) -> np.dtype[Any]:
    """Return what differences are packed as: the elements' width, at least two bytes."""
    return np.dtype(f"<u{max(2, dtype.item_bytes)}")


def plan_groups(entries: NDArray[np.int64]) -> int:
    """Return which classes start a new stream, as a mask, for so many entries by class."""
    mask, here, rest = 0, 0, int(entries.sum())
    for kind in range(CLASSES):
        if here >= GROUP_MIN and rest >= GROUP_MIN:
            mask |= 1 << kind
            here = 0
        here += int(entries[kind])
        rest -= int(entries[kind])
    return mask


def group_slices(mask: int, entries: NDArray[np.int64]) -> list[slice]:
    """Return each group's part of the entries, which are in order of class."""
    reached = np.concatenate(([0], np.cumsum(entries)))
    starts = [kind for kind in range(CLASSES) if kind == 0 or mask >> kind & 1]
    edges = [*reached[starts].tolist(), int(reached[-1])]
    return [slice(first, past) for first, past in itertools.pairwise(edges)]


def take_low(body: StreamReader) -> int:
    """Read which exponents have classes of their own."""
    return body.number(0xFF)


def take_groups(body: StreamReader) -> int:
    """Read which classes start a new stream."""
    return body.number((1 << CLASSES) - 1)
