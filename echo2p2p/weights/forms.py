"""The coded forms of one block: what a body holds, and how it becomes elements again.

A delta block codes differences between *ordered integers*: the bits of a float, with the lower
ones of a negative number turned over, so that neighbours on the number line differ by one. The
difference modulo 2**bits, zigzagged, is exact for every bit pattern, NaN and -0.0 included.
Integer tensors are ordered as they are.

* FAST: gaps between changed elements, and their differences. For few changes.
* DENSE: a difference for every element, in groups by the exponent of the *old* element, which
  both sides know. A step of one learning rate is many units in the last place of a small weight
  and none of a large one, so each group has its own code. For many changes.
* PLANES: the new elements themselves, exponents apart from mantissas. Anchors use it.
* RAW: the new elements as they are.

An unchanged block (EMPTY) is not written at all. Tag 1 is kept for the form TIGHT of DESIGN.md;
a reader that does not know a tag refuses the payload.
"""

from __future__ import annotations

import enum
import itertools
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.weights.layout import Dtype
from echo2p2p.weights.streams import StreamReader, StreamWriter
from echo2p2p.weights.values import put_planes, put_values, take_planes, take_values

GROUP_ELEMENTS_MIN: Final = 384
"""Exponents with fewer elements share a group: a table of codes costs about 50 bytes."""

GAP_WIDE_BELOW: Final = 1 / 512
"""Density under which gaps take two bytes."""

_EXPONENTS: Final = 256
_GAP_BYTES_MAX: Final = 2


class Form(enum.IntEnum):
    """How a block is coded; the number is its tag on the wire."""

    RAW = 0
    FAST = 2
    DENSE = 3
    PLANES = 4


WHOLE_FORMS: Final = frozenset({Form.RAW, Form.PLANES})
"""Forms that do not need the old elements; the only ones of an anchor."""


def encode_block(form: Form, dtype: Dtype, old: NDArray[Any], new: NDArray[Any]) -> bytes:
    """Return the body that turns ``old`` into ``new``.

    Args:
        form: FAST wants at least one difference.
        dtype: Of the elements.
        old: ``[n] dtype.bits``, n > 0; not looked at by `WHOLE_FORMS`.
        new: ``[n] dtype.bits``.
    """
    if form is Form.RAW:
        return new.tobytes()
    out = StreamWriter()
    match form:
        case Form.FAST:
            _put_fast(out, dtype, old, new)
        case Form.DENSE:
            _put_dense(out, dtype, old, new)
        case Form.PLANES:
            put_planes(out, _rotated_left(dtype, new))
    return out.body()


def decode_block(
    form: Form, dtype: Dtype, body: memoryview, target: NDArray[Any], *, source: str
) -> None:
    """Turn ``target``, ``[n] dtype.bits`` holding the old elements, into the new ones in place.

    Needs about twenty times the block's own bytes beside it, whatever the body says.

    Raises:
        IntegrityError: The body is not a block of this form and size. A part of ``target`` may
            have been changed: it must be built anew.
    """
    reader = StreamReader(body, source=source)
    match form:
        case Form.RAW:
            if len(body) != target.nbytes:
                raise reader.corrupt(f"{len(body)} raw bytes for {target.nbytes}")
            target[:] = np.frombuffer(body, dtype=np.uint8).view(dtype.bits)
            return
        case Form.FAST:
            _take_fast(reader, dtype, target)
        case Form.DENSE:
            _take_dense(reader, dtype, target)
        case Form.PLANES:
            target[:] = _rotated_right(dtype, take_planes(reader, target.size, dtype.bits))
    reader.end()


# --- elements as integers -----------------------------------------------------------------------


def _ordered(dtype: Dtype, bits: NDArray[Any]) -> NDArray[Any]:
    """Map bits to integers in numeric order, or back: it is its own inverse. Keeps the dtype."""
    if not dtype.is_float:
        return bits
    width = 8 * dtype.item_bytes
    sign = bits.view(dtype.signed) >> (width - 1)
    turned: NDArray[Any] = bits ^ (sign.view(dtype.bits) >> 1)
    return turned


def _differences(dtype: Dtype, old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    """Return the zigzagged differences: 0, -1, 1, -2 .. as 0, 1, 2, 3 .., unsigned."""
    step: NDArray[Any] = (_ordered(dtype, new) - _ordered(dtype, old)).view(dtype.signed)
    zigzag: NDArray[Any] = (step << 1) ^ (step >> (8 * dtype.item_bytes - 1))
    return zigzag.view(dtype.bits)


def _moved(dtype: Dtype, old: NDArray[Any], zigzag: NDArray[Any]) -> NDArray[Any]:
    """Undo `_differences`."""
    odd = -(zigzag & 1).view(dtype.signed)
    step = (zigzag >> 1) ^ odd.view(dtype.bits)
    return _ordered(dtype, _ordered(dtype, old) + step)


def _rotated_left(dtype: Dtype, bits: NDArray[Any]) -> NDArray[Any]:
    """Move a float's sign below its mantissa: the top byte of a bf16 is then its exponent."""
    return bits << 1 | bits >> (8 * dtype.item_bytes - 1) if dtype.is_float else bits


def _rotated_right(dtype: Dtype, bits: NDArray[Any]) -> NDArray[Any]:
    return bits >> 1 | bits << (8 * dtype.item_bytes - 1) if dtype.is_float else bits


# --- FAST ---------------------------------------------------------------------------------------


def _put_fast(out: StreamWriter, dtype: Dtype, old: NDArray[Any], new: NDArray[Any]) -> None:
    where = np.flatnonzero(old != new)
    width = _GAP_BYTES_MAX if where.size < GAP_WIDE_BELOW * old.size else 1
    skip = (1 << 8 * width) - 1
    gaps = np.diff(where, prepend=-1) - 1
    ends = np.cumsum(gaps // skip + 1) - 1
    coded = np.full(int(ends[-1]) + 1, skip, dtype=f"<u{width}")
    coded[ends] = gaps % skip
    out.number(where.size)
    out.number(width)
    out.number(coded.size)
    put_planes(out, coded)
    put_values(out, _differences(dtype, old[where], new[where]) - dtype.bits.type(1))


def _take_fast(body: StreamReader, dtype: Dtype, target: NDArray[Any]) -> None:
    changed = body.number(target.size)
    width = body.number(_GAP_BYTES_MAX)
    if not changed or not width:
        raise body.corrupt(f"{changed} changes with gaps of {width} bytes")
    skip = (1 << 8 * width) - 1
    entries = body.number(changed + target.size // skip)
    coded = take_planes(body, entries, np.dtype(f"<u{width}"))
    is_end = coded != skip
    reached = np.cumsum(coded.astype(np.int64) + is_end)
    where = reached[is_end] - 1
    if where.size != changed or not is_end[-1] or where[-1] >= target.size:
        raise body.corrupt("gaps that do not fit the block")
    values = take_values(body, changed, dtype.bits) + dtype.bits.type(1)
    target[where] = _moved(dtype, target[where], values)


# --- DENSE --------------------------------------------------------------------------------------


def _put_dense(out: StreamWriter, dtype: Dtype, old: NDArray[Any], new: NDArray[Any]) -> None:
    zigzag = _differences(dtype, old, new)
    exponents = _exponents(dtype, old)
    population = np.bincount(exponents, minlength=_EXPONENTS)
    bounds = _plan_groups(population)
    out.number(bounds.size)
    for bound in bounds.tolist():
        out.number(bound)
    by_group = zigzag[np.argsort(exponents, kind="stable")]
    for start, end in _group_ranges(population, bounds):
        put_values(out, by_group[start:end])


def _take_dense(body: StreamReader, dtype: Dtype, target: NDArray[Any]) -> None:
    bounds = np.array(
        [body.number(_EXPONENTS - 1) for _ in range(body.number(_EXPONENTS - 1))], dtype=np.int64
    )
    if bounds.size and (bounds[0] == 0 or bool((np.diff(bounds) <= 0).any())):
        raise body.corrupt("groups out of order")
    exponents = _exponents(dtype, target)
    by_group = np.empty_like(target)
    for start, end in _group_ranges(np.bincount(exponents, minlength=_EXPONENTS), bounds):
        by_group[start:end] = take_values(body, end - start, dtype.bits)
    zigzag = np.empty_like(target)
    zigzag[np.argsort(exponents, kind="stable")] = by_group
    target[:] = _moved(dtype, target, zigzag)


def _exponents(dtype: Dtype, bits: NDArray[Any]) -> NDArray[np.uint8]:
    return (bits >> dtype.exponent_shift & dtype.exponent_mask).astype(np.uint8)


def _plan_groups(population: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first exponent of each group but the first, ascending.

    Args:
        population: ``[256]``, elements with each exponent.
    """
    bounds = []
    here, rest = 0, int(population.sum())
    for exponent in np.flatnonzero(population).tolist():
        if here >= GROUP_ELEMENTS_MIN and rest >= GROUP_ELEMENTS_MIN:
            bounds.append(exponent)
            here = 0
        here += int(population[exponent])
        rest -= int(population[exponent])
    return np.array(bounds, dtype=np.int64)


def _group_ranges(
    population: NDArray[np.int64], bounds: NDArray[np.int64]
) -> list[tuple[int, int]]:
    """Return ``(start, end)`` of each group among the elements sorted by exponent."""
    reached = np.concatenate(([0], np.cumsum(population)))
    edges = reached[np.concatenate(([0], bounds, [_EXPONENTS]))].tolist()
    return list(itertools.pairwise(edges))
