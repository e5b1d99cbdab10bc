"""The loops of `echo2p2p.weights.kernels` for two-byte elements, compiled by numba.

Importing this module compiles it, or loads it from numba's cache; only `kernels.warm_up` does.
The walks take 64 elements at a time: which of them differ, and which are of a class, are vector
comparisons whose outcome is a 64-bit mask, written as LLVM vectors (`differ`, `classes`, `match`)
since no plain loop is turned into them. LLVM makes of them what the machine at hand has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_LANES: Final = 64
_CLASSES: Final = 16
_I8, _I16, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)
_WORDS: Final = ir.VectorType(_I16, _LANES)
_BYTES: Final = ir.VectorType(_I8, _LANES)


def _compiled(signature: Any) -> Callable[[Any], Any]:
    """Compile for ``signature`` alone, and keep the code on disk if there is a place for it."""

    def decorate(function: Any) -> Any:
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except RuntimeError:  # numba found no folder that it may write
            return njit(signature, nogil=True)(function)

    return decorate


# --- vectors ------------------------------------------------------------------------------------


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any, vector: Any) -> Any:
    """Return a pointer to ``vector`` at element ``at`` of a numba array."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer())


def _load(builder: Any, pointer: Any, align: int) -> Any:
    value = builder.load(pointer)
    value.align = align
    return value


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    first = builder.insert_element(
        ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0)
    )
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def _differ(typing: Any, old: Any, new: Any, at: Any) -> Any:
    """Return the mask of those of 64 elements from ``at`` on that are not equal."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sides = [
            _load(builder, _pointer(context, builder, kind, array, arguments[2], _WORDS), 2)
            for kind, array in zip(signature.args[:2], arguments[:2], strict=True)
        ]
        return builder.bitcast(builder.icmp_unsigned("!=", *sides), _I64)

    return types.uint64(old, new, at), generate


differ: Any = intrinsic(_differ)


def _classes(typing: Any, bits: Any, at: Any, low: Any, shift: Any, mask: Any, out: Any) -> Any:
    """Write the classes of 64 elements from ``at`` on into ``out``, ``[64] uint8``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = _load(
            builder,
            _pointer(context, builder, signature.args[0], arguments[0], arguments[1], _WORDS),
            2,
        )
        low_, shift_, mask_ = (
            _splat(builder, builder.trunc(scalar, _I16), _WORDS) for scalar in arguments[2:5]
        )
        zero, one, top = (
            _splat(builder, ir.Constant(_I16, value), _WORDS) for value in (0, 1, _CLASSES - 2)
        )
        exponent = builder.and_(builder.lshr(words, shift_), mask_)
        is_zero = builder.icmp_unsigned("==", exponent, zero)
        high = builder.select(builder.icmp_unsigned(">", exponent, low_), exponent, low_)
        place = builder.sub(high, low_)
        place = builder.select(builder.icmp_unsigned("<", place, top), place, top)
        kinds = builder.select(is_zero, zero, builder.add(place, one))
        target = _pointer(
            context, builder, signature.args[5], arguments[5], ir.Constant(_I64, 0), _BYTES
        )
        builder.store(builder.trunc(kinds, _BYTES), target).align = 1
        return context.get_dummy_value()

    return types.void(bits, at, low, shift, mask, out), generate


classes: Any = intrinsic(_classes)


def _match(typing: Any, kinds: Any, kind: Any) -> Any:
    """Return the mask of those of ``kinds``, ``[64] uint8``, that are ``kind``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = ir.Constant(_I64, 0)
        held = _load(
            builder,
            _pointer(context, builder, signature.args[0], arguments[0], start, _BYTES),
            1,
        )
        wanted = _splat(builder, builder.trunc(arguments[1], _I8), _BYTES)
        return builder.bitcast(builder.icmp_unsigned("==", held, wanted), _I64)

    return types.uint64(kinds, kind), generate


match: Any = intrinsic(_match)


def _ones(typing: Any, mask: Any) -> Any:
    """Return the number of bits that are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


ones: Any = intrinsic(_ones)


def _lowest(typing: Any, mask: Any) -> Any:
    """Return the place of the lowest bit that is set; there must be one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


lowest: Any = intrinsic(_lowest)


# --- loops --------------------------------------------------------------------------------------

_READ16: Final = types.Array(types.uint16, 1, "C", readonly=True)
_READ32: Final = types.Array(types.uint32, 1, "C", readonly=True)
_WRITE8: Final = types.uint8[::1]
_WRITE16: Final = types.uint16[::1]
_WRITE32: Final = types.uint32[::1]
_COUNTS: Final = types.int64[::1]
_I, _B = types.int64, types.boolean
_ZIGZAG: Final = types.uint16(types.uint16, types.uint16, _B)
_MOVE: Final = types.uint16(types.uint16, types.uint16, _B)


@_compiled(_ZIGZAG)
def _zigzag(old: Any, new: Any, is_float: Any) -> Any:
    before, after = np.int32(old), np.int32(new)
    if is_float:
        if before & 0x8000:
            before ^= 0x7FFF
        if after & 0x8000:
            after ^= 0x7FFF
    step = np.int16(after - before)
    return np.uint16((np.int32(step) << 1) ^ (np.int32(step) >> 15))


@_compiled(_MOVE)
def _moved(old: Any, zigzag: Any, is_float: Any) -> Any:
    bits, coded = np.int32(old), np.int32(zigzag)
    if is_float and bits & 0x8000:
        bits ^= 0x7FFF
    bits = (bits + ((coded >> 1) ^ -(coded & 1))) & 0xFFFF
    if is_float and bits & 0x8000:
        bits ^= 0x7FFF
    return np.uint16(bits)


@_compiled(types.int64(_READ16, _READ16, _B, _I, _I, _WRITE32, _WRITE16, _WRITE8))
def _find(
    old: Any, new: Any, is_float: Any, shift: Any, mask: Any, where: Any, zigzag: Any, exponent: Any
) -> Any:
    count = 0
    whole = old.size - old.size % _LANES
    for start in range(0, whole, _LANES):
        bits: Any = differ(old, new, start)
        while bits:
            at = start + lowest(bits)
            where[count] = at
            zigzag[count] = _zigzag(old[at], new[at], is_float)
            exponent[count] = (np.int64(old[at]) >> shift) & mask
            count += 1
            bits &= bits - np.uint64(1)
    for at in range(whole, old.size):
        if old[at] != new[at]:
            where[count] = at
            zigzag[count] = _zigzag(old[at], new[at], is_float)
            exponent[count] = (np.int64(old[at]) >> shift) & mask
            count += 1
    return count


def find(old: Any, new: Any, is_float: bool, shift: int, mask: int) -> Any:
    """See `kernels.find`; returns the three arrays of a `Found`."""
    where = np.empty(old.size, dtype=np.uint32)
    zigzag = np.empty(old.size, dtype=np.uint16)
    exponent = np.empty(old.size, dtype=np.uint8)
    count = _find(old, new, is_float, shift, mask, where, zigzag, exponent)
    return where[:count], zigzag[:count], exponent[:count]


@_compiled(
    types.void(
        _READ16, _READ32, _READ16, _I, _I, _I, _I, _COUNTS, _COUNTS, _COUNTS, _WRITE32, _WRITE16
    )
)
def put_ranks(
    old: Any,
    where: Any,
    zigzag: Any,
    origin: Any,
    low: Any,
    shift: Any,
    mask: Any,
    seen: Any,
    last: Any,
    at: Any,
    gaps: Any,
    values: Any,
) -> None:
    """See `kernels.put_ranks`."""
    kinds = np.empty(_LANES, dtype=np.uint8)
    padded = np.zeros(_LANES, dtype=np.uint16)
    masks = np.empty(_CLASSES, dtype=np.uint64)
    change, changes = 0, where.size
    for start in range(0, old.size, _LANES):
        count = min(_LANES, old.size - start)
        if count == _LANES:
            classes(old, start, low, shift, mask, kinds)
        else:
            padded[:count] = old[start:]
            classes(padded, 0, low, shift, mask, kinds)
            kinds[count:] = _CLASSES
        end = origin + start + count
        if change == changes or where[change] >= end:
            for kind in range(_CLASSES):
                seen[kind] += ones(match(kinds, kind))
            continue
        for kind in range(_CLASSES):
            masks[kind] = match(kinds, kind)
        while change < changes and where[change] < end:
            place = np.int64(where[change]) - origin - start
            kind = kinds[place]
            below = (np.uint64(1) << np.uint64(place)) - np.uint64(1)
            reached = seen[kind] + ones(masks[kind] & below)
            gaps[at[kind]] = reached - last[kind] - 1
            values[at[kind]] = zigzag[change]
            last[kind] = reached
            at[kind] += 1
            change += 1
        for kind in range(_CLASSES):
            seen[kind] += ones(masks[kind])


@_compiled(
    types.void(_WRITE16, _I, _B, _I, _I, _COUNTS, _COUNTS, _COUNTS, _COUNTS, _READ32, _READ16)
)
def take_ranks(
    target: Any,
    low: Any,
    is_float: Any,
    shift: Any,
    mask: Any,
    seen: Any,
    following: Any,
    at: Any,
    end: Any,
    gaps: Any,
    values: Any,
) -> None:
    """See `kernels.take_ranks`."""
    kinds = np.empty(_LANES, dtype=np.uint8)
    padded = np.zeros(_LANES, dtype=np.uint16)
    left = np.empty(_CLASSES, dtype=np.int64)
    for kind in range(_CLASSES):
        left[kind] = following[kind] - seen[kind] if at[kind] < end[kind] else 1 << 62
    for start in range(0, target.size, _LANES):
        count = min(_LANES, target.size - start)
        if count == _LANES:
            classes(target, start, low, shift, mask, kinds)
        else:
            padded[:count] = target[start:]
            classes(padded, 0, low, shift, mask, kinds)
            kinds[count:] = _CLASSES
        for kind in range(_CLASSES):
            members = match(kinds, kind)
            held = ones(members)
            seen[kind] += held
            skip = left[kind]
            if skip < held:
                place = at[kind]
                passed = 0
                while skip < held:
                    while passed < skip:
                        members &= members - np.uint64(1)
                        passed += 1
                    element = start + lowest(members)
                    target[element] = _moved(target[element], values[place], is_float)
                    place += 1
                    skip = skip + 1 + np.int64(gaps[place]) if place < end[kind] else 1 << 62
                at[kind] = place
            left[kind] = skip - held
    for kind in range(_CLASSES):
        following[kind] = seen[kind] + left[kind]


@_compiled(types.int64(_READ32, _I, _WRITE16))
def _put_gaps(where: Any, skip: Any, out: Any) -> Any:
    count, last = 0, np.int64(-1)
    for at in range(where.size):
        gap = np.int64(where[at]) - last - 1
        last = np.int64(where[at])
        while gap >= skip:
            out[count] = skip
            gap -= skip
            count += 1
        out[count] = gap
        count += 1
    return count


def put_gaps(where: Any, skip: int) -> Any:
    """See `kernels.put_gaps`; the entries are two bytes wide."""
    room = where.size + (int(where[-1]) // skip if where.size else 0)
    coded = np.empty(room, dtype=np.uint16)
    return coded[: _put_gaps(where, skip, coded)]


@_compiled(types.boolean(_READ16, _I, _I, _WRITE32))
def take_gaps(coded: Any, skip: Any, elements: Any, where: Any) -> Any:
    """See `kernels.take_gaps`."""
    place, count, ends = np.int64(0), 0, False
    for at in range(coded.size):
        gap = np.int64(coded[at])
        place += gap
        ends = gap != skip
        if ends:
            if count == where.size or place >= elements:
                return False
            where[count] = place
            count += 1
            place += 1
    return ends and count == where.size


@_compiled(types.void(_WRITE16, _READ32, _I, _READ16, _B))
def move(target: Any, where: Any, origin: Any, zigzag: Any, is_float: Any) -> None:
    """See `kernels.move`."""
    for at in range(where.size):
        place = np.int64(where[at]) - origin
        target[place] = _moved(target[place], zigzag[at], is_float)


@_compiled(types.int64(types.uint16, _I, _I, _I))
def _class(bits: Any, low: Any, shift: Any, mask: Any) -> Any:
    exponent = (np.int64(bits) >> shift) & mask
    return 0 if exponent == 0 else min(max(exponent - low, 0), _CLASSES - 2) + 1


@_compiled(types.void(_READ16, _READ16, _I, _B, _I, _I, _COUNTS, _WRITE16))
def put_dense(
    old: Any, new: Any, low: Any, is_float: Any, shift: Any, mask: Any, at: Any, values: Any
) -> None:
    """See `kernels.put_dense`."""
    for place in range(old.size):
        kind = _class(old[place], low, shift, mask)
        values[at[kind]] = _zigzag(old[place], new[place], is_float)
        at[kind] += 1


@_compiled(types.void(_WRITE16, _I, _B, _I, _I, _COUNTS, _READ16))
def take_dense(
    target: Any, low: Any, is_float: Any, shift: Any, mask: Any, at: Any, values: Any
) -> None:
    """See `kernels.take_dense`."""
    for place in range(target.size):
        kind = _class(target[place], low, shift, mask)
        target[place] = _moved(target[place], values[at[kind]], is_float)
        at[kind] += 1


@_compiled(types.void(_READ16, _I, _I, _I, _COUNTS))
def _population(bits: Any, low: Any, shift: Any, mask: Any, counts: Any) -> None:
    kinds = np.empty(_LANES, dtype=np.uint8)
    whole = bits.size - bits.size % _LANES
    for start in range(0, whole, _LANES):
        classes(bits, start, low, shift, mask, kinds)
        for kind in range(_CLASSES):
            counts[kind] += ones(match(kinds, kind))
    for place in range(whole, bits.size):
        counts[_class(bits[place], low, shift, mask)] += 1


def population(bits: Any, low: int, shift: int, mask: int) -> Any:
    """See `kernels.population`."""
    counts = np.zeros(_CLASSES, dtype=np.int64)
    _population(bits, low, shift, mask, counts)
    return counts
