"""FAST: gaps between changed elements, and differences, as bytes for zstd.

A third larger than TIGHT or more, but several times as fast: for links that are faster than the
encoder, and for blocks with so few changes that TIGHT's tables outweigh them.

Body: number m of changes, at least 1; number g, 1 or 2, bytes of a gap; number k of gaps; their
byte planes; the byte planes of the m differences, each less 1.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from echo2p2p.weights import kernels
from echo2p2p.weights.changes import Changes
from echo2p2p.weights.layout import Dtype
from echo2p2p.weights.streams import StreamReader, StreamWriter
from echo2p2p.weights.stretch import Segments, Stretch

GAP_WIDE_BELOW: Final = 1 / 400
"""Density under which gaps take two bytes."""

_GAP_BYTES_MAX: Final = 2


def put_fast(out: StreamWriter, stretch: Stretch) -> None:
    """Append the body of a stretch with at least one change."""
    changed = stretch.changed
    width = _GAP_BYTES_MAX if changed < GAP_WIDE_BELOW * stretch.count else 1
    coded = kernels.put_gaps(stretch.found.where, (1 << 8 * width) - 1)
    for value in (changed, width, coded.size):
        out.number(value)
    out.planes(coded)
    out.planes(stretch.found.zigzag - stretch.dtype.bits.type(1))


def read_fast(body: StreamReader, dtype: Dtype, count: int) -> Changes:
    """Return what a block of ``count`` elements changes; the old ones are not needed."""
    changed = body.number(count)
    width = body.number(_GAP_BYTES_MAX)
    if not changed or not width:
        raise body.corrupt(f"{changed} changes with gaps of {width} bytes")
    skip = (1 << 8 * width) - 1
    coded = body.planes(body.number(changed + count // skip), np.dtype(f"<u{width}"))
    where = kernels.take_gaps(coded, skip, changed, count) if coded.size else None
    if where is None:
        raise body.corrupt("gaps that do not fit the block")
    return Changes(where, body.planes(changed, dtype.bits) + dtype.bits.type(1))


def take_fast(body: StreamReader, dtype: Dtype, target: Segments) -> None:
    """Change ``target`` in place."""
    read_fast(body, dtype, sum(segment.size for segment in target)).move(dtype, target)
