"""The payload: a preamble, then blocks that say themselves what they change.

The problem: a payload must be decodable block by block, in any order and by several threads, and
must not be able to make us write outside a tensor or allocate at a stranger's word. The idea:
each block names its tensor, its range of elements, its form and its coded length; blocks stand in
ascending order, so that overlaps show at once. Allocation follows the *target's* size only.

The preamble tells delta from anchor and carries the format's number; so a payload is never empty,
not even the delta between equal states, and a manifest always has at least one chunk of payload.

Layout, little-endian: ``b"EW"``, content (``b"D"`` or ``b"A"``), format ``0``; then for each
block: tensor u32, first element u64, elements u32, form u8, body bytes u32, body.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from echo2p2p.errors import IntegrityError
from echo2p2p.weights.forms import Form
from echo2p2p.weights.layout import Layout

FORMAT: Final = 0

BLOCK_ELEMENTS_MAX: Final = 1 << 24
"""Decoding needs memory in proportion to the block; a sparse block is still long enough to fill
64 KiB at a five-hundredth of its size."""

BLOCK_ELEMENTS: Final = 1 << 18
"""What the encoder makes now: fits a core's cache."""

_PREAMBLE: Final = struct.Struct("<2scB")
_HEAD: Final = struct.Struct("<IQIBI")
_MAGIC: Final = b"EW"


class Content(enum.Enum):
    """What a payload's blocks amount to."""

    DELTA = b"D"
    ANCHOR = b"A"


@dataclass(frozen=True)
class Block:
    """Elements ``first .. first + count`` of a tensor, coded.

    Attributes:
        tensor: Index into the layout.
        first: Element of the tensor, not byte.
        count: At least 1.
        form: How ``body`` is coded.
        body: Shares the payload's memory when read.
    """

    tensor: int
    first: int
    count: int
    form: Form
    body: bytes | memoryview

    @property
    def coded_bytes(self) -> int:
        """What it takes in a payload, head included."""
        return _HEAD.size + len(self.body)


def ranges(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """Yield ``(tensor, first, count)`` of each block that the encoders make, in order."""
    for index, tensor in enumerate(layout.tensors):
        for first in range(0, tensor.elements, BLOCK_ELEMENTS):
            yield index, first, min(BLOCK_ELEMENTS, tensor.elements - first)


def pack_blocks(content: Content, blocks: Iterable[Block]) -> bytes:
    """Return the payload of ``blocks``, which must be in ascending order."""
    payload = bytearray(_PREAMBLE.pack(_MAGIC, content.value, FORMAT))
    for block in blocks:
        payload += _HEAD.pack(block.tensor, block.first, block.count, block.form, len(block.body))
        payload += block.body
    return bytes(payload)


def read_blocks(
    layout: Layout,
    payload: bytes | bytearray | memoryview,
    content: Content,
    *,
    source: str = "local",
) -> Iterator[Block]:
    """Yield the payload's blocks in order, each checked against ``layout`` and its forerunner.

    Bodies are not looked at. Nothing but the block at hand is held, so going through once just to
    check the whole frame before a first block is decoded costs next to nothing.

    Raises:
        IntegrityError: Not such a payload: another content or format, a range outside its tensor
            or out of order, an unknown form, a cut-off end. Blames ``source``.
    """
    view = memoryview(payload).cast("B")
    if view[: _PREAMBLE.size] != _PREAMBLE.pack(_MAGIC, content.value, FORMAT):
        raise _corrupt(f"not of content {content.name} and format {FORMAT}", source)
    at = _PREAMBLE.size
    free = (0, 0)
    while at < len(view):
        if len(view) - at < _HEAD.size:
            raise _corrupt("it ends inside a block's head", source)
        tensor, first, count, tag, body_bytes = _HEAD.unpack_from(view, at)
        at += _HEAD.size
        if tensor >= len(layout.tensors):
            raise _corrupt(f"tensor {tensor} of {len(layout.tensors)}", source)
        if not 0 < count <= BLOCK_ELEMENTS_MAX or first + count > layout.tensors[tensor].elements:
            raise _corrupt(f"elements {first}+{count} of tensor {tensor}", source)
        if (tensor, first) < free:
            raise _corrupt(f"a block at {tensor}:{first}, before {free[0]}:{free[1]}", source)
        if body_bytes > len(view) - at:
            raise _corrupt("it ends inside a block", source)
        try:
            form = Form(tag)
        except ValueError as error:
            raise _corrupt(f"unknown form {tag}", source) from error
        yield Block(tensor, first, count, form, view[at : at + body_bytes])
        at += body_bytes
        free = (tensor, first + count)


def _corrupt(detail: str, source: str) -> IntegrityError:
    return IntegrityError(f"payload: {detail}", source=source)
