"""Changes that another process has found, as it hands them over in shared memory.

The problem: a learner on a GPU holds both states where memory is ten times as fast, and so finds
what changed in no time; the process that encodes is another one. The idea: `encode_delta` asks for
changes window by window in a fixed order (`echo2p2p.weights.cuts`), so the finder runs through the
same windows and leaves behind a table of counts and then each window's three arrays.

This is no wire format: both ends are one installation on one machine. Lengths are checked
nevertheless, because a delta of too few changes would be a wrong one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.errors import IntegrityError
from echo2p2p.weights.cuts import FIND_ELEMENTS, Finder
from echo2p2p.weights.kernels import Found
from echo2p2p.weights.layout import DTYPES, Layout, Sequence

FOUND_SHARE: Final = 0.25
"""Room for changes, in states: 7 % of bf16 elements at 7 bytes each. Where more has changed, the
encoder takes so much longer than the search that it may as well do that too."""

_COUNT: Final = np.dtype("<u8")


def room_for(layout: Layout) -> int:
    """Return the bytes of memory in which changes are handed over."""
    table = len(list(_windows(layout))) * _COUNT.itemsize
    return table + int(FOUND_SHARE * layout.total_bytes) + 1


def _windows(layout: Layout) -> Iterator[tuple[Sequence, int, int]]:
    """Yield sequence, first element and number of elements of each window."""
    for sequence in layout.sequences:
        for first in range(0, sequence.elements, FIND_ELEMENTS):
            yield sequence, first, min(FIND_ELEMENTS, sequence.elements - first)


def write_found(layout: Layout, find: Finder, memory: NDArray[np.uint8]) -> int | None:
    """Write all that ``find`` finds.

    Args:
        layout: Of both states.
        find: Asked window by window.
        memory: ``[room] uint8``, as `room_for` says or larger.

    Returns:
        How many bytes were written; ``None``: it is more than there is room for.
    """
    spans = list(_windows(layout))
    at = len(spans) * _COUNT.itemsize
    counts = np.zeros(len(spans), _COUNT)
    for index, span in enumerate(spans):
        found = find(*span)
        counts[index] = found.where.size
        for array in (found.where, found.zigzag, found.exponent):
            raw = np.ascontiguousarray(array).view(np.uint8)
            if at + raw.size > memory.size:
                return None
            memory[at : at + raw.size] = raw
            at += raw.size
    memory[: counts.nbytes] = counts.view(np.uint8)
    return at


class FoundElsewhere:
    """What `write_found` has written; callable as `echo2p2p.weights.cuts.Finder`.

    Args:
        layout: Of both states.
        memory: ``[n] uint8``: what was written and nothing else. Shared; must not change.

    Raises:
        IntegrityError: It is not what `write_found` writes for this layout.
    """

    def __init__(self, layout: Layout, memory: NDArray[np.uint8]) -> None:
        spans = list(_windows(layout))
        table = len(spans) * _COUNT.itemsize
        if memory.size < table:
            raise IntegrityError(f"changes in {memory.size} bytes, the table takes {table}")
        counts = memory[:table].view(_COUNT).tolist() if table else []
        sizes = [
            count * (5 + DTYPES[sequence.dtype].item_bytes)
            for count, (sequence, _, _) in zip(counts, spans, strict=True)
        ]
        over = [c for c, (_, _, elements) in zip(counts, spans, strict=True) if c > elements]
        if over or table + sum(sizes) != memory.size:
            raise IntegrityError(f"changes in {memory.size} bytes, by the table {sum(sizes)}")
        starts = list(itertools.accumulate(sizes, initial=table))
        self._memory = memory
        self._places = {
            (sequence.dtype, first, elements): (start, count)
            for (sequence, first, elements), start, count in zip(
                spans, starts[:-1], counts, strict=True
            )
        }

    def __call__(self, sequence: Sequence, first: int, count: int) -> Found:
        """Return the changes of one window."""
        start, changes = self._places[sequence.dtype, first, count]
        width = DTYPES[sequence.dtype].item_bytes

        def take(kind: str) -> NDArray[Any]:
            nonlocal start
            dtype = np.dtype(kind)
            part = self._memory[start : start + changes * dtype.itemsize]
            start += part.size
            # Copied: parts begin at any byte, and the compiled loops want them aligned.
            return part.copy().view(dtype)

        return Found(take("<u4"), take(f"<u{width}"), take("u1"))
