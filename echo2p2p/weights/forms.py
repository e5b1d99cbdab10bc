"""The coded forms of one block: what a body holds, and how it becomes elements again.

* TIGHT, FAST, DENSE: differences to the old elements; see the modules of these names.
* PLANES: the new elements themselves, exponents apart from mantissas. Anchors use it.
* RAW: the new elements as they are.

An unchanged block (EMPTY) is not written at all. A reader that does not know a tag refuses the
payload.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.weights.changes import Changes
from echo2p2p.weights.dense import put_dense, take_dense
from echo2p2p.weights.fast import put_fast, read_fast, take_fast
from echo2p2p.weights.layout import Dtype
from echo2p2p.weights.streams import StreamReader, StreamWriter
from echo2p2p.weights.stretch import Segments, Stretch
from echo2p2p.weights.tight import find_tight, put_tight, take_tight


class Form(enum.IntEnum):
    """How a block is coded; the number is its tag on the wire."""

    RAW = 0
    TIGHT = 1
    FAST = 2
    DENSE = 3
    PLANES = 4


WHOLE_FORMS: Final = frozenset({Form.RAW, Form.PLANES})
"""Forms that do not need the old elements; the only ones of an anchor."""


def put_block(form: Form, stretch: Stretch) -> StreamWriter:
    """Return the body of ``stretch``; TIGHT and FAST want at least one change."""
    out = StreamWriter()
    match form:
        case Form.TIGHT:
            put_tight(out, stretch)
        case Form.FAST:
            put_fast(out, stretch)
        case Form.DENSE:
            put_dense(out, stretch)
        case Form.PLANES | Form.RAW:
            put_whole(out, form, stretch.dtype, stretch.new)
    return out


def put_whole(out: StreamWriter, form: Form, dtype: Dtype, new: Segments) -> None:
    """Append the body of new elements in one of `WHOLE_FORMS`."""
    elements = new[0] if len(new) == 1 else np.concatenate(new)
    if form is Form.RAW:
        out.raw(elements)
    else:
        out.planes(_rotated_left(dtype, elements))


def encode_block(form: Form, dtype: Dtype, old: NDArray[Any], new: NDArray[Any]) -> bytes:
    """Return the body that turns ``old`` into ``new``, ``[n] dtype.bits``, n > 0."""
    return put_block(form, Stretch.of(dtype, old, new)).body()


def decode_block(
    form: Form, dtype: Dtype, body: memoryview, target: Segments, *, source: str
) -> None:
    """Turn ``target``, the old elements, into the new ones in place.

    Needs up to six times the block's own bytes beside it for DENSE and PLANES; for TIGHT and FAST
    twelve bytes a changed element.

    Raises:
        IntegrityError: The body is not a block of this form and size. A part of ``target`` may
            have been changed: it must be built anew.
    """
    reader = StreamReader(body, source=source)
    match form:
        case Form.TIGHT:
            take_tight(reader, dtype, target)
        case Form.FAST:
            take_fast(reader, dtype, target)
        case Form.DENSE:
            take_dense(reader, dtype, target)
        case Form.PLANES | Form.RAW:
            count = sum(segment.size for segment in target)
            if form is Form.RAW:
                new = reader.raw(count, dtype.bits)
            else:
                new = _rotated_right(dtype, reader.planes(count, dtype.bits))
            at = 0
            for segment in target:
                segment[:] = new[at : at + segment.size]
                at += segment.size
    reader.end()


def find_changes(
    form: Form, dtype: Dtype, body: memoryview, old: Segments, *, source: str
) -> Changes | None:
    """Return what a block changes; ``old`` is read only.

    ``None`` for forms that say something of every element: `decode_block` needs no more memory for
    them than a list would. Nothing of their bodies is looked at.

    Raises:
        IntegrityError: The body is not a block of this form and size.
    """
    reader = StreamReader(body, source=source)
    match form:
        case Form.TIGHT:
            changes = find_tight(reader, dtype, old)
        case Form.FAST:
            changes = read_fast(reader, dtype, sum(segment.size for segment in old))
        case Form.DENSE | Form.PLANES | Form.RAW:
            return None
    reader.end()
    return changes


def _rotated_left(dtype: Dtype, bits: NDArray[Any]) -> NDArray[Any]:
    """Move a float's sign below its mantissa: the top byte of a bf16 is then its exponent."""
    return bits << 1 | bits >> (8 * dtype.item_bytes - 1) if dtype.is_float else bits


def _rotated_right(dtype: Dtype, bits: NDArray[Any]) -> NDArray[Any]:
    return bits >> 1 | bits << (8 * dtype.item_bytes - 1) if dtype.is_float else bits
