"""Which bytes of the flat state belong to which tensor.

The problem: publisher and peer must agree on every offset before any payload makes sense, and the
table arrives over the wire. The idea: the state is one run of bytes, tensor after tensor in the
table's order, without gaps or padding; so a table is either exactly right or refused, and its
digest stands for it in every manifest. Tied names share one entry: sent once, updated together.

It refuses alignment: padding would be bytes that no tensor owns, and numpy and torch both read
unaligned views.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.errors import LocalProtocolError, RemoteProtocolError, Violation
from echo2p2p.ids import Digest, digest_of
from echo2p2p.limits import CHUNK_BYTES_MAX, CHUNKS_MAX, MESSAGE_ITEMS_MAX
from echo2p2p.wire import codec
from echo2p2p.wire.messages import LayoutTable, TensorSpec

TENSORS_MAX: Final = MESSAGE_ITEMS_MAX
"""The table is one MessagePack array."""

DIMENSIONS_MAX: Final = 8
"""More than any layer has; keeps the product of hostile dimensions small."""

NAME_CHARACTERS_MAX: Final = 1024

STATE_BYTES_MAX: Final = CHUNK_BYTES_MAX * CHUNKS_MAX
"""An uncompressed anchor must fit into one payload."""


@dataclass(frozen=True)
class Dtype:
    """How the bits of one element are read.

    Attributes:
        item_bytes: Size of an element.
        bits: Unsigned little-endian integer of that size.
        signed: The signed one.
        is_float: Sign and magnitude (IEEE or bfloat) rather than two's complement.
        exponent_shift: Bits below the exponent, of a float.
        exponent_mask: All ones, as wide as the exponent; 0 for integers.
    """

    item_bytes: int
    bits: np.dtype[Any]
    signed: np.dtype[Any]
    is_float: bool
    exponent_shift: int
    exponent_mask: int


def _dtype(item_bytes: int, exponent_shift: int = 0, exponent_mask: int = 0) -> Dtype:
    return Dtype(
        item_bytes,
        np.dtype(f"<u{item_bytes}"),
        np.dtype(f"<i{item_bytes}"),
        exponent_mask != 0,
        exponent_shift,
        exponent_mask,
    )


DTYPES: Final[dict[str, Dtype]] = {
    "bf16": _dtype(2, 7, 0xFF),
    "f16": _dtype(2, 10, 0x1F),
    "f32": _dtype(4, 23, 0xFF),
    "i8": _dtype(1),
    "i16": _dtype(2),
    "i32": _dtype(4),
    "i64": _dtype(8),
}
"""Every dtype of a `TensorSpec`."""


@dataclass(frozen=True)
class Tensor:
    """One entry of a checked layout; ``offset`` and ``bytes`` are into the flat state."""

    name: str
    dtype: str
    item_bytes: int
    elements: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class Extent:
    """A contiguous part of a `Sequence`: elements ``first ..`` of it are at byte ``offset``."""

    first: int
    elements: int
    offset: int


@dataclass(frozen=True)
class Sequence:
    """All elements of one dtype, tensor after tensor: what the codec walks through.

    A tensor alone is too short a stretch to code: its tables would outweigh its changes. So
    stretches run on from tensor to tensor, past those of other dtypes.
    """

    dtype: str
    elements: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True)
class Layout:
    """A checked table. Built only by `from_table` or `plan_layout`.

    Attributes:
        table: As it travels.
        tensors: Its entries, in order of offset.
        sequences: Its dtypes' elements, by first appearance.
        total_bytes: Length of the flat state.
        digest: Of the table's canonical encoding.
    """

    table: LayoutTable
    tensors: tuple[Tensor, ...]
    sequences: tuple[Sequence, ...]
    total_bytes: int
    digest: Digest

    @classmethod
    def from_table(cls, table: LayoutTable) -> Layout:
        """Check ``table``, which may be a stranger's, and index it.

        Raises:
            RemoteProtocolError: Gaps or overlaps, an unknown dtype, a name twice, a negative or
                absurd size. Whoever sent the table cannot be followed.
        """
        if len(table.tensors) > TENSORS_MAX:
            raise _malformed(f"{len(table.tensors)} tensors, at most {TENSORS_MAX}")
        names: set[str] = set()
        tensors = []
        offset = 0
        for spec in table.tensors:
            tensor = _checked(spec, offset, names)
            tensors.append(tensor)
            offset += tensor.bytes
        if offset != table.total_bytes:
            raise _malformed(f"tensors take {offset} bytes, the table says {table.total_bytes}")
        digest = digest_of(codec.encode(table))
        return cls(table, tuple(tensors), _sequences(tensors), offset, digest)


def plan_layout(
    entries: Iterable[tuple[str, str, tuple[int, ...], tuple[str, ...]]],
) -> Layout:
    """Lay out ``(name, dtype, shape, tied names)`` one after the other, in the given order.

    Raises:
        RemoteProtocolError: As `Layout.from_table`; here it means that the model's own names or
            dtypes cannot be published.
    """
    specs = []
    offset = 0
    for name, dtype, shape, tied in entries:
        if dtype not in DTYPES:
            raise _malformed(f"tensor {name!r} has dtype {dtype!r}; known: {', '.join(DTYPES)}")
        specs.append(
            TensorSpec(name=name, dtype=dtype, shape=list(shape), offset=offset, tied=list(tied))
        )
        offset += math.prod(shape) * DTYPES[dtype].item_bytes
    return Layout.from_table(LayoutTable(tensors=specs, total_bytes=offset))


def flat_bytes(
    layout: Layout, state: bytes | bytearray | memoryview, *, writable: bool = False
) -> NDArray[np.uint8]:
    """Return ``state`` as ``[total_bytes] uint8``, sharing its memory.

    Raises:
        LocalProtocolError: Another length than the layout's, or read-only where we must write.
    """
    view = memoryview(state)
    if not (writable or view.c_contiguous):
        view = memoryview(view.tobytes())
    flat = np.frombuffer(view, dtype=np.uint8)
    if flat.size != layout.total_bytes:
        raise LocalProtocolError(f"state of {flat.size} bytes, layout of {layout.total_bytes}")
    if writable and not flat.flags.writeable:
        raise LocalProtocolError("the state to be changed is read-only")
    return flat


def elements_of(flat: NDArray[np.uint8], tensor: Tensor) -> NDArray[Any]:
    """Return the tensor's elements as unsigned integers, sharing memory with ``flat``."""
    return flat[tensor.offset : tensor.offset + tensor.bytes].view(DTYPES[tensor.dtype].bits)


def segments_of(
    flat: NDArray[np.uint8], sequence: Sequence, first: int, count: int
) -> list[NDArray[Any]]:
    """Return elements ``first .. first + count`` of a sequence, sharing memory with ``flat``."""
    dtype = DTYPES[sequence.dtype]
    return [
        flat[start : start + taken * dtype.item_bytes].view(dtype.bits)
        for start, taken in stretches_of(sequence, first, count)
    ]


def stretches_of(sequence: Sequence, first: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield where elements ``first .. first + count`` of a sequence lie: first byte and number."""
    item_bytes = DTYPES[sequence.dtype].item_bytes
    at = bisect.bisect_right(sequence.extents, first, key=lambda extent: extent.first) - 1
    while count:
        extent = sequence.extents[at]
        taken = min(count, extent.first + extent.elements - first)
        yield extent.offset + (first - extent.first) * item_bytes, taken
        first, count, at = first + taken, count - taken, at + 1


def _sequences(tensors: list[Tensor]) -> tuple[Sequence, ...]:
    extents: dict[str, list[Extent]] = {}
    for tensor in tensors:
        if not tensor.elements:
            continue
        held = extents.setdefault(tensor.dtype, [])
        first = held[-1].first + held[-1].elements if held else 0
        if held and held[-1].offset + held[-1].elements * tensor.item_bytes == tensor.offset:
            last = held.pop()
            held.append(Extent(last.first, last.elements + tensor.elements, last.offset))
        else:
            held.append(Extent(first, tensor.elements, tensor.offset))
    return tuple(
        Sequence(dtype, held[-1].first + held[-1].elements, tuple(held))
        for dtype, held in extents.items()
    )


def _checked(spec: TensorSpec, offset: int, names: set[str]) -> Tensor:
    """Check one entry, which must start at ``offset``, and add its names to ``names``."""
    shown = spec.name[:80]
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise _malformed(f"tensor {shown!r} has an unknown dtype {spec.dtype[:20]!r}")
    for name in (spec.name, *spec.tied):
        if not 0 < len(name) <= NAME_CHARACTERS_MAX:
            raise _malformed(f"a name of {len(name)} characters")
        if name in names:
            raise _malformed(f"the name {name[:80]!r} appears twice")
        names.add(name)
    if len(spec.shape) > DIMENSIONS_MAX or any(size < 0 for size in spec.shape):
        raise _malformed(f"tensor {shown!r} has the shape {spec.shape[:DIMENSIONS_MAX]}")
    elements = math.prod(spec.shape)
    if spec.offset != offset:
        raise _malformed(f"tensor {shown!r} starts at byte {spec.offset} instead of {offset}")
    if offset + elements * dtype.item_bytes > STATE_BYTES_MAX:
        raise _malformed(f"tensor {shown!r} ends beyond {STATE_BYTES_MAX} bytes")
    return Tensor(
        spec.name, spec.dtype, dtype.item_bytes, elements, offset, elements * dtype.item_bytes
    )


def _malformed(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError(Violation.MALFORMED, f"layout: {detail}")
