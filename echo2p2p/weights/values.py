"""Small unsigned integers as bytes that a Huffman coder likes.

The problem: most values of a group are 0, 1 or 2, and a Huffman code spends at least one bit on
each, where half a bit is due. The idea: put k of them, as digits to a base r with r**k <= 256,
into one byte, so that the code sees them together; the top digit means "at least r - 1", and what
is above follows as a shorter list of values, coded in the same way. Wide values are split into
byte planes instead. The writer tries the ways on a sample; the reader is told.

Rejected: an arithmetic coder. It would gain the last few per cent and needs a loop per value,
which numpy does not have.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.weights.streams import StreamReader, StreamWriter

_RADIX: Final = {1: 256, 2: 16, 3: 6, 4: 4, 8: 2}
"""Digits a byte: their base. Part of the format."""

_PLANES: Final = 0
"""In place of a count of digits: whole values, byte plane by byte plane, low first."""

_LEVELS_MAX: Final = 4
"""Lists of excess values below each other; the last is planes."""

_FEW: Final = 24
"""Values not worth a trial."""

_SAMPLE: Final = 4096
"""Values that the writer tries the ways on; all of them would gain a thousandth."""

_SAMPLE_OF_ZEROS: Final = 8 * _SAMPLE
"""The same where nearly all are zero: little is left of them when eight share a byte."""


def put_values(out: StreamWriter, values: NDArray[Any], level: int = 0) -> None:
    """Append ``values``, ``[n]`` of an unsigned dtype; the reader must know n."""
    if not values.size:
        return
    digits = _PLANES if level == _LEVELS_MAX else _best_way(out, values)
    out.number(digits)
    if digits == _PLANES:
        put_planes(out, values)
        return
    top = _RADIX[digits] - 1
    out.stream(_packed(values, digits))
    put_values(out, values[values >= top] - values.dtype.type(top), level + 1)


def take_values(
    body: StreamReader, count: int, dtype: np.dtype[Any], level: int = 0
) -> NDArray[Any]:
    """Return the next ``count`` values as ``dtype`` (unsigned), in an array of their own.

    Raises:
        IntegrityError: They are not there.
    """
    if count == 0:
        return np.zeros(0, dtype=dtype)
    digits = body.number(max(_RADIX))
    if digits == _PLANES:
        return take_planes(body, count, dtype)
    if digits not in _RADIX or level == _LEVELS_MAX:
        raise body.corrupt(f"values of kind {digits} at level {level}")
    packed = body.stream(-(-count // digits))
    if int(packed.max()) >= _RADIX[digits] ** digits:
        raise body.corrupt("a byte that holds no digits")
    unpacked = _UNPACK[digits].take(packed, axis=0).reshape(-1)[:count]
    values = unpacked.astype(dtype)
    above = np.flatnonzero(unpacked == _RADIX[digits] - 1)
    if above.size:
        values[above] += take_values(body, above.size, dtype, level + 1)
    return values


def put_planes(out: StreamWriter, values: NDArray[Any]) -> None:
    """Append each byte plane of ``values``, low first, as a stream."""
    for plane in _planes(values):
        out.stream(plane)


def take_planes(body: StreamReader, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return ``count`` values of ``dtype`` from their byte planes.

    Raises:
        IntegrityError: They are not there.
    """
    values = np.empty((count, dtype.itemsize), dtype=np.uint8)
    for place in range(dtype.itemsize):
        values[:, place] = body.stream(count)
    return values.reshape(-1).view(dtype)


def _planes(values: NDArray[Any]) -> list[NDArray[np.uint8]]:
    table = np.ascontiguousarray(values).view(np.uint8).reshape(values.size, values.itemsize)
    return [np.ascontiguousarray(table[:, place]) for place in range(values.itemsize)]


def _packed(values: NDArray[Any], digits: int) -> NDArray[np.uint8]:
    """Return ``values`` clipped to digits, as many a byte as asked; zeros fill the last."""
    radix = _RADIX[digits]
    clipped = np.zeros(-(-values.size // digits) * digits, dtype=np.uint8)
    np.minimum(values, radix - 1, out=clipped[: values.size], casting="unsafe")
    table = clipped.reshape(-1, digits)
    packed = table[:, 0].copy()
    for place in range(1, digits):
        packed *= np.uint8(radix % 256)
        packed += table[:, place]
    return packed


def _best_way(out: StreamWriter, values: NDArray[Any]) -> int:
    """Return the number of digits a byte (0: planes) that makes a sample of them shortest."""
    if values.size <= _FEW:
        return _PLANES
    sample = values[:_SAMPLE]
    if 5 * np.count_nonzero(sample) < sample.size:
        sample = values[:_SAMPLE_OF_ZEROS]
    best, best_bytes = _PLANES, sum(out.measure(plane) for plane in _planes(sample))
    for digits, radix in _RADIX.items():
        above = sample[sample >= radix - 1]
        cost = out.measure(_packed(sample, digits))
        cost += sum(out.measure(plane) for plane in _planes(above)) if above.size else 0
        if cost > best_bytes and digits > 1:
            break  # more digits a byte would only cut off more
        if cost < best_bytes:
            best, best_bytes = digits, cost
    return best


def _unpack_table(digits: int, radix: int) -> NDArray[np.uint8]:
    """Return ``[256, digits]``: the digits of each byte, first digit first."""
    powers = radix ** np.arange(digits - 1, -1, -1)
    return (np.arange(256)[:, None] // powers % radix).astype(np.uint8)


_UNPACK: Final = {digits: _unpack_table(digits, radix) for digits, radix in _RADIX.items()}
