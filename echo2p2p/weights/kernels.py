"""The loops over elements: a numpy form that is always there, a compiled one once warmed up.

The problem: a codec that is to cost nothing needs loops that numpy does not have, a compiler at
hand is not certain, and compiling takes seconds that no publication may wait for. The idea: each
loop exists twice, here and in `echo2p2p.weights.compiled`, with equal results (tested); nothing is
compiled unless `warm_up` was called, at a program's start. Compiled code is cached on disk.

The compiled form knows two-byte elements, which is what weights are; all others take the numpy
form. A loop works on *segments*, contiguous stretches of a block, and carries its counters from
one to the next.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.weights.layout import Dtype
from echo2p2p.weights.ordered import CLASSES, class_table, differences, exponents, moved

PIECE_ELEMENTS: Final = 1 << 18
"""What the numpy loops take at a time, so that their temporaries stay in a core's cache."""

COMPILED_FROM_BYTES: Final = 1 << 25
"""From states of this size on `warm_up` pays: numpy needs half a second for this one."""

_compiled: Any = None
"""The module of compiled loops, once warmed up."""


def warm_up() -> bool:
    """Load or compile the fast loops: a second from the cache, half a minute the first time.

    Returns:
        Whether they are in use now. False without numba; then the codec is slower and makes the
        same bytes.
    """
    global _compiled  # noqa: PLW0603 - the one switch of this module, set once at start
    if _compiled is None:
        try:
            _compiled = importlib.import_module("echo2p2p.weights.compiled")
        except ImportError:
            return False
    return True


@contextmanager
def numpy_only() -> Iterator[None]:
    """Use the numpy loops inside; for comparing the two. Not for use by several threads."""
    global _compiled  # noqa: PLW0603 - see `warm_up`
    kept, _compiled = _compiled, None
    try:
        yield
    finally:
        _compiled = kept


def _fast(dtype: Dtype, *arrays: NDArray[Any]) -> Any:  # noqa: ANN401 - a module, or nothing
    """Return the compiled loops if they can take these elements."""
    if dtype.item_bytes == 2 and all(array.flags.aligned for array in arrays):
        return _compiled
    return None


@dataclass(frozen=True)
class Found:
    """Changed elements of a stretch, in order.

    Attributes:
        where: ``[m] uint32``, from the stretch's first element.
        zigzag: ``[m]``, differences, unsigned and as wide as the elements.
        exponent: ``[m] uint8``, of the old elements.
    """

    where: NDArray[np.uint32]
    zigzag: NDArray[Any]
    exponent: NDArray[np.uint8]


def find(dtype: Dtype, old: NDArray[Any], new: NDArray[Any]) -> Found:
    """Return the changes from ``old`` to ``new``, ``[n] dtype.bits``, n < 2**32."""
    fast = _fast(dtype, old, new)
    if fast is not None:
        found = fast.find(old, new, dtype.is_float, dtype.exponent_shift, dtype.exponent_mask)
        return Found(*found)
    where = np.flatnonzero(old != new).astype(np.uint32)
    before = old[where]
    return Found(where, differences(dtype, before, new[where]), exponents(dtype, before))


def find_in(dtype: Dtype, old: Sequence[NDArray[Any]], new: Sequence[NDArray[Any]]) -> Found:
    """Return the changes between two lists of segments of the same lengths."""
    origin, parts = 0, []
    for before, after in zip(old, new, strict=True):
        part = find(dtype, before, after)
        parts.append(replace(part, where=part.where + np.uint32(origin)) if origin else part)
        origin += before.size
    if len(parts) == 1:
        return parts[0]
    return Found(
        np.concatenate([part.where for part in parts]),
        np.concatenate([part.zigzag for part in parts]),
        np.concatenate([part.exponent for part in parts]),
    )


@dataclass
class Ranks:
    """Counters by class while a block is walked through.

    Attributes:
        low: See `echo2p2p.weights.ordered`.
        seen: ``[16] int64``, elements of the class so far.
        last: ``[16] int64``, rank in its class of the last change (writing) or of the next one
            (reading).
        at: ``[16] int64``, place in the streams of the class's next change.
        end: ``[16] int64``, where the class's part of the streams ends.
    """

    low: int
    seen: NDArray[np.int64]
    last: NDArray[np.int64]
    at: NDArray[np.int64]
    end: NDArray[np.int64]

    @classmethod
    def start(cls, low: int, changes: NDArray[np.int64]) -> Ranks:
        """Return the counters before a block with these changes, ``[16]``, by class."""
        end = np.cumsum(changes)
        last = np.full(CLASSES, -1, dtype=np.int64)
        return cls(low, np.zeros(CLASSES, dtype=np.int64), last, end - changes, end)


def put_ranks(
    dtype: Dtype,
    old: NDArray[Any],
    where: NDArray[np.uint32],
    zigzag: NDArray[Any],
    origin: int,
    ranks: Ranks,
    gaps: NDArray[np.uint32],
    values: NDArray[Any],
) -> None:
    """Sort one segment's changes by class, and say how far each is from the one before it.

    Args:
        dtype: Of the elements.
        old: ``[n]``, the segment.
        where: Its changes, counted from the block's start.
        zigzag: Their differences.
        origin: Where the segment starts in the block.
        ranks: Moved on.
        gaps: The block's, by class: unchanged elements of the class between two changes. Written.
        values: The block's differences in the same order. Written.
    """
    fast = _fast(dtype, old)
    if fast is not None:
        shape = (dtype.exponent_shift, dtype.exponent_mask)
        state = (ranks.seen, ranks.last, ranks.at)
        fast.put_ranks(old, where, zigzag, origin, ranks.low, *shape, *state, gaps, values)
        return
    table = class_table(ranks.low)
    for start in range(0, old.size, PIECE_ELEMENTS):
        kinds = table[exponents(dtype, old[start : start + PIECE_ELEMENTS])]
        first, past = np.searchsorted(where, (origin + start, origin + start + kinds.size))
        inside = where[first:past].astype(np.int64) - (origin + start)
        changed = kinds[inside]
        for kind in range(CLASSES):
            members = np.flatnonzero(kinds == kind)
            mine = np.flatnonzero(changed == kind)
            if mine.size:
                reached = np.searchsorted(members, inside[mine]) + ranks.seen[kind]
                at = int(ranks.at[kind])
                gaps[at : at + mine.size] = np.diff(reached, prepend=ranks.last[kind]) - 1
                values[at : at + mine.size] = zigzag[first:past][mine]
                ranks.last[kind] = reached[-1]
                ranks.at[kind] += mine.size
            ranks.seen[kind] += members.size


def take_ranks(
    dtype: Dtype,
    target: NDArray[Any],
    ranks: Ranks,
    gaps: NDArray[np.uint32],
    values: NDArray[Any],
) -> None:
    """Undo `put_ranks`: change one segment in place.

    ``ranks.last`` is the rank of each class's next change here; see `first_ranks`.
    """
    fast = _fast(dtype, target)
    if fast is not None:
        shape = (dtype.is_float, dtype.exponent_shift, dtype.exponent_mask)
        state = (ranks.seen, ranks.last, ranks.at, ranks.end)
        fast.take_ranks(target, ranks.low, *shape, *state, gaps, values)
        return
    table = class_table(ranks.low)
    for start in range(0, target.size, PIECE_ELEMENTS):
        piece = target[start : start + PIECE_ELEMENTS]
        kinds = table[exponents(dtype, piece)]
        for kind in range(CLASSES):
            members = np.flatnonzero(kinds == kind)
            at, end = int(ranks.at[kind]), int(ranks.end[kind])
            beyond = int(ranks.seen[kind]) + members.size
            if at < end and ranks.last[kind] < beyond:
                steps = gaps[at + 1 : min(end, at + members.size + 1)].astype(np.int64) + 1
                reached = ranks.last[kind] + np.concatenate(([0], np.cumsum(steps)))
                count = int(np.searchsorted(reached, beyond))
                inside = members[reached[:count] - ranks.seen[kind]]
                piece[inside] = moved(dtype, piece[inside], values[at : at + count])
                ranks.at[kind] = at + count
                if at + count < end:
                    ranks.last[kind] = reached[count - 1] + 1 + int(gaps[at + count])
            ranks.seen[kind] = beyond


def first_ranks(low: int, changes: NDArray[np.int64], gaps: NDArray[np.uint32]) -> Ranks:
    """Return the counters of a reader before the first segment of a block."""
    ranks = Ranks.start(low, changes)
    some = np.flatnonzero(changes)
    ranks.last[some] = gaps[ranks.at[some]]
    return ranks


def put_gaps(where: NDArray[np.uint32], skip: int) -> NDArray[Any]:
    """Return the gaps between ascending places, in as few bytes as ``skip`` (255 or 65535) has.

    An entry of ``skip`` passes so many elements and changes none; any other passes so many and
    changes the next.
    """
    if _compiled is not None:
        coded: NDArray[Any] = _compiled.put_gaps(where, skip)
        return coded if skip > 0xFF else coded.astype(np.uint8)
    gaps = np.diff(where.astype(np.int64), prepend=-1) - 1
    ends = np.cumsum(gaps // skip + 1) - 1
    coded = np.full(int(ends[-1]) + 1, skip, dtype=np.uint8 if skip == 0xFF else np.uint16)
    coded[ends] = gaps % skip
    return coded


def take_gaps(
    coded: NDArray[Any], skip: int, changed: int, elements: int
) -> NDArray[np.uint32] | None:
    """Undo `put_gaps`; ``None`` unless they are ``changed`` places, all below ``elements``."""
    where: NDArray[np.uint32]
    if _compiled is not None:
        where = np.empty(changed, dtype=np.uint32)
        good: bool = _compiled.take_gaps(coded.astype(np.uint16, copy=False), skip, elements, where)
        return where if good else None
    is_end = coded != skip
    reached = np.cumsum(coded.astype(np.int64) + is_end)[is_end] - 1
    if reached.size != changed or not is_end[-1] or reached[-1] >= elements:
        return None
    where = reached.astype(np.uint32)
    return where


def move(
    dtype: Dtype, target: NDArray[Any], where: NDArray[np.uint32], origin: int, zigzag: NDArray[Any]
) -> None:
    """Change one segment's elements at ``where`` (counted from ``origin`` before it) in place."""
    fast = _fast(dtype, target)
    if fast is not None:
        fast.move(target, where, origin, zigzag, dtype.is_float)
        return
    inside = where - np.uint32(origin)
    target[inside] = moved(dtype, target[inside], zigzag)


def put_dense(
    dtype: Dtype,
    old: NDArray[Any],
    new: NDArray[Any],
    ranks: Ranks,
    values: NDArray[Any],
) -> None:
    """Write one segment's differences, unchanged elements included, into ``values`` by class."""
    fast = _fast(dtype, old, new)
    if fast is not None:
        shape = (dtype.is_float, dtype.exponent_shift, dtype.exponent_mask)
        fast.put_dense(old, new, ranks.low, *shape, ranks.at, values)
        return
    kinds = class_table(ranks.low)[exponents(dtype, old)]
    zigzag = differences(dtype, old, new)
    for kind in range(CLASSES):
        mine = zigzag[kinds == kind]
        at = int(ranks.at[kind])
        values[at : at + mine.size] = mine
        ranks.at[kind] += mine.size


def take_dense(dtype: Dtype, target: NDArray[Any], ranks: Ranks, values: NDArray[Any]) -> None:
    """Undo `put_dense`: change one segment in place."""
    fast = _fast(dtype, target)
    if fast is not None:
        shape = (dtype.is_float, dtype.exponent_shift, dtype.exponent_mask)
        fast.take_dense(target, ranks.low, *shape, ranks.at, values)
        return
    kinds = class_table(ranks.low)[exponents(dtype, target)]
    zigzag = np.empty_like(target)
    for kind in range(CLASSES):
        mine = kinds == kind
        at, count = int(ranks.at[kind]), int(np.count_nonzero(mine))
        zigzag[mine] = values[at : at + count]
        ranks.at[kind] += count
    target[:] = moved(dtype, target, zigzag)


def population(dtype: Dtype, bits: NDArray[Any], low: int) -> NDArray[np.int64]:
    """Return ``[16]``: elements of each class."""
    fast = _fast(dtype, bits)
    if fast is not None:
        found: NDArray[np.int64] = fast.population(
            bits, low, dtype.exponent_shift, dtype.exponent_mask
        )
        return found
    counts = np.zeros(CLASSES, dtype=np.int64)
    table = class_table(low)
    for start in range(0, bits.size, PIECE_ELEMENTS):
        kinds = table[exponents(dtype, bits[start : start + PIECE_ELEMENTS])]
        counts += np.bincount(kinds, minlength=CLASSES)
    return counts
