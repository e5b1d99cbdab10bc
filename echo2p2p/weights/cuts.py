"""Where a delta is cut into blocks, and which form each of them gets.

The problem: a block costs tables, so it should be long; it is the unit of parallel work and of
early applying, so it should be short; and its best form is known for certain only once all were
tried. The idea: estimate coded bytes from the entropy given the old exponents, which TIGHT reaches
within a few per cent; cut by that; and try in full only those forms that the estimate, or a
sample of the block, does not rule out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from echo2p2p.weights.blocks import BLOCK_ELEMENTS_MAX
from echo2p2p.weights.forms import WHOLE_FORMS, Form, put_block
from echo2p2p.weights.kernels import Found
from echo2p2p.weights.layout import DTYPES, Sequence, segments_of
from echo2p2p.weights.ordered import CLASSES, class_table, plan_low
from echo2p2p.weights.policy import BLOCK_BYTES, BLOCK_BYTES_MAX, BLOCKS_WANTED, FormPolicy
from echo2p2p.weights.streams import StreamWriter
from echo2p2p.weights.stretch import Segments, Stretch, population
from echo2p2p.weights.tight import CHANGES_MAX

Finder = Callable[[Sequence, int, int], Found]
"""Returns the changes among ``count`` elements of a sequence from ``first`` on."""

FIND_ELEMENTS: Final = 1 << 22
"""Elements that a `Finder` is asked for at a time."""

FIND_BATCH: Final = 8
"""Such parts between two looks at what was found: constant, so that threads change no byte."""

WINDOW_CHANGES: Final = 1 << 22
"""From so many changes on, blocks are cut and coded before more are looked for: bounds memory."""

DENSE_DENSITY_MIN: Final = 0.1
"""Below it DENSE is tried only if nothing else may be."""

WHOLE_SHARE_MIN: Final = 0.6
"""Coded bytes by raw bytes from which the new elements themselves may be shorter."""

_SAMPLE_SLICES: Final = 8
_SAMPLE_CHANGES: Final = 512
_POPULATION_PIECES: Final = 16
_POPULATION_ELEMENTS: Final = 1 << 14
_TABLES_BYTES: Final = 1200
_DOUBT: Final = 1.1
"""An estimate by entropy is trusted no further than this."""

_SAMPLE_DOUBT: Final = 1.005

T = TypeVar("T")
R = TypeVar("R")


def mapped(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Yield ``work(item)`` in order; in so many threads, since the loops let go of the GIL."""
    if threads <= 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(work, items)


@dataclass(frozen=True)
class Window:
    """A run of one sequence whose changes are known.

    Attributes:
        sequence: Of the elements.
        first: Element of the sequence at which it starts.
        count: Elements.
        found: Changes, counted from ``first``.
    """

    sequence: Sequence
    first: int
    count: int
    found: Found


def windows(sequence: Sequence, find: Finder, *, whole: bool, threads: int) -> Iterator[Window]:
    """Yield windows over a sequence, each with changes enough to cut."""
    batch = FIND_BATCH * FIND_ELEMENTS
    changes_max = CHANGES_MAX - batch if whole else WINDOW_CHANGES

    def look(start: int) -> Found:
        return find(sequence, start, min(FIND_ELEMENTS, sequence.elements - start))

    first, parts = 0, []
    for start in range(0, sequence.elements, batch):
        past = min(start + batch, sequence.elements)
        starts = range(start, past, FIND_ELEMENTS)
        for at, found in zip(starts, mapped(look, starts, threads), strict=True):
            parts.append((np.uint32(at - first), found))
        changes = sum(found.where.size for _, found in parts)
        full = changes >= changes_max or past + batch - first > BLOCK_ELEMENTS_MAX
        if full or past == sequence.elements:
            if changes:
                yield Window(sequence, first, past - first, _joined(parts))
            first, parts = past, []


def _joined(parts: list[tuple[np.uint32, Found]]) -> Found:
    if len(parts) == 1:
        return parts[0][1]
    return Found(
        np.concatenate([part.where + offset for offset, part in parts]),
        np.concatenate([part.zigzag for _, part in parts]),
        np.concatenate([part.exponent for _, part in parts]),
    )


@dataclass(frozen=True)
class Piece:
    """What becomes a block: elements of the sequence, and what changes there."""

    sequence: Sequence
    first: int
    stretch: Stretch
    estimate: float
    """Coded bytes, as TIGHT."""


def pieces(
    window: Window, old: NDArray[np.uint8], new: NDArray[np.uint8], policy: FormPolicy
) -> Iterator[Piece]:
    """Cut a window into pieces of about equally many changes.

    Args:
        window: With at least one change.
        old: The flat state before.
        new: The one after.
        policy: Says whether to cut at all.
    """
    dtype = DTYPES[window.sequence.dtype]
    found = window.found
    by_exponent = np.bincount(found.exponent, minlength=256)
    low = plan_low(by_exponent)
    share = _population_share(window, old, low)
    value_bits = _value_bits(found.zigzag)
    estimate = _entropy_bytes(by_exponent, share * window.count, low, value_bits)
    count = 1
    if not policy.whole:
        wanted = min(max(BLOCK_BYTES, estimate / BLOCKS_WANTED), BLOCK_BYTES_MAX)
        count = max(1, min(int(estimate / wanted), found.where.size))
    edges = [found.where.size * cut // count for cut in range(count + 1)]
    for lo, hi in itertools.pairwise(edges):
        start, past = int(found.where[lo]), int(found.where[hi - 1]) + 1
        part = Found(
            found.where[lo:hi] - np.uint32(start), found.zigzag[lo:hi], found.exponent[lo:hi]
        )
        first, elements = window.first + start, past - start
        before, after = (segments_of(flat, window.sequence, first, elements) for flat in (old, new))
        stretch = Stretch(dtype, before, after, part, low)
        changes = np.bincount(part.exponent, minlength=256)
        size = _entropy_bytes(changes, share * elements, low, value_bits)
        yield Piece(window.sequence, first, stretch, size)


def shortest(piece: Piece, policy: FormPolicy) -> tuple[Form, bytes]:
    """Return the permitted form that takes the fewest bytes, and its body."""
    stretch = piece.stretch
    tried = {form: put_block(form, stretch) for form in _candidates(piece, policy)}
    if not tried or min(map(len, tried.values())) >= WHOLE_SHARE_MIN * stretch.raw_bytes:
        for form in (policy.forms | {Form.RAW}) & WHOLE_FORMS:
            tried[form] = put_block(form, stretch)
    form = min(tried, key=lambda form: (len(tried[form]), form))
    return form, tried[form].body()


def _candidates(piece: Piece, policy: FormPolicy) -> list[Form]:
    """Return the forms worth coding the whole piece in."""
    stretch = piece.stretch
    density = stretch.changed / stretch.count
    forms = sorted(policy.forms - WHOLE_FORMS)
    if len(forms) > 1 and density < DENSE_DENSITY_MIN:
        forms = [form for form in forms if form is not Form.DENSE]
    if stretch.changed > CHANGES_MAX:
        forms = [form for form in forms if form is not Form.TIGHT]
    if len(forms) < 2 or stretch.changed <= _SAMPLE_SLICES * _SAMPLE_CHANGES:
        return forms
    sample = _sample(stretch)
    if density < DENSE_DENSITY_MIN:
        fast = _scaled(put_block(Form.FAST, sample), stretch.changed / sample.changed)
        if fast > _DOUBT * piece.estimate:
            return [Form.TIGHT]
    sizes = {}
    for form in forms:
        scale = stretch.changed / sample.changed
        if form is Form.DENSE:
            scale = stretch.count / sample.count
        sizes[form] = _scaled(put_block(form, sample), scale)
    best = min(sizes.values())
    return [form for form in forms if sizes[form] <= _SAMPLE_DOUBT * best]


def _scaled(out: StreamWriter, scale: float) -> float:
    return (len(out) - out.tables_bytes) * scale + out.tables_bytes


def _sample(stretch: Stretch) -> Stretch:
    """Return a shorter stretch like this one: slices from all over it, one after the other."""
    found, count = stretch.found, stretch.changed
    parts: list[Found] = []
    sides: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])
    reached = 0
    for number in range(_SAMPLE_SLICES):
        lo = count * number // _SAMPLE_SLICES
        hi = lo + _SAMPLE_CHANGES
        start = int(found.where[lo - 1]) + 1 if lo else 0
        past = int(found.where[hi - 1]) + 1
        parts.append(
            Found(
                found.where[lo:hi] - np.uint32(start) + np.uint32(reached),
                found.zigzag[lo:hi],
                found.exponent[lo:hi],
            )
        )
        sides[0].extend(_part(stretch.old, start, past))
        sides[1].extend(_part(stretch.new, start, past))
        reached += past - start
    whole = _joined([(np.uint32(0), part) for part in parts])
    joined = [[np.concatenate(side)] for side in sides]
    return Stretch(stretch.dtype, joined[0], joined[1], whole, stretch.low)


def _part(segments: Segments, start: int, past: int) -> Iterator[NDArray[Any]]:
    """Yield elements ``start .. past`` of a stretch."""
    origin = 0
    for segment in segments:
        lo, hi = max(start - origin, 0), min(past - origin, segment.size)
        if lo < hi:
            yield segment[lo:hi]
        origin += segment.size


def _population_share(window: Window, old: NDArray[np.uint8], low: int) -> NDArray[np.float64]:
    """Return ``[16]``: the share of each class among the window's elements, from a sample."""
    dtype = DTYPES[window.sequence.dtype]
    counts = np.ones(CLASSES)
    step = max(_POPULATION_ELEMENTS, window.count // _POPULATION_PIECES)
    for start in range(0, window.count, step):
        elements = min(_POPULATION_ELEMENTS, window.count - start)
        part = segments_of(old, window.sequence, window.first + start, elements)
        counts += population(dtype, part, low)
    shares: NDArray[np.float64] = counts / counts.sum()
    return shares


def _value_bits(zigzag: NDArray[Any]) -> float:
    """Return about how many bits a difference takes, from a sample of them."""
    sample = zigzag[:: max(1, zigzag.size // 4096)]
    return 0.8 + float(np.log2(sample.astype(np.float64)).mean())


def _entropy_bytes(
    changes: NDArray[np.int64], elements: NDArray[np.float64], low: int, value_bits: float
) -> float:
    """Return about how many bytes TIGHT takes.

    Args:
        changes: ``[256]`` by exponent.
        elements: ``[16]`` by class.
        low: See `echo2p2p.weights.ordered`.
        value_bits: Of a difference.
    """
    changed = np.bincount(class_table(low), changes, CLASSES)
    held = np.maximum(elements, changed)
    share = np.clip(changed / np.maximum(held, 1), 1e-12, 1 - 1e-12)
    bits = held * -(share * np.log2(share) + (1 - share) * np.log2(1 - share))
    return float(bits.sum() + changed.sum() * value_bits) / 8 + _TABLES_BYTES
