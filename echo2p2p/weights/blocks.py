"""The payload: a preamble, then blocks that say themselves what they change.

The problem: a payload must be decodable block by block, in any order and by several threads, and
must not be able to make us write outside a tensor or allocate at a stranger's word. The idea:
each block names its sequence (all elements of one dtype, see `echo2p2p.weights.layout`), its range
of elements, its form and its coded length; blocks stand in ascending order, so that overlaps show
at once. Allocation follows the *target's* size only.

The preamble tells delta from anchor and carries the format's number; so a payload is never empty,
not even the delta between equal states, and a manifest always has at least one chunk of payload.

Layout, little-endian: ``b"EW"``, content (``b"D"`` or ``b"A"``), format ``0``; then for each
block: sequence u8, first element u64, elements u32, form u8, body bytes u32, body.
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

BLOCK_ELEMENTS_MAX: Final = 1 << 28
"""A block in which one element of ten thousand changed is still long enough to fill 64 KiB."""

ANCHOR_BLOCK_ELEMENTS: Final = 1 << 18
"""What `encode_anchor` makes: fits a core's cache. Deltas are cut by coded bytes instead."""

_PREAMBLE: Final = struct.Struct("<2scB")
_HEAD: Final = struct.Struct("<BQIBI")
_MAGIC: Final = b"EW"


class Content(enum.Enum):
    """What a payload's blocks amount to."""

    DELTA = b"D"
    ANCHOR = b"A"


@dataclass(frozen=True)
class Block:
    """Elements ``first .. first + count`` of a sequence, coded.

    Attributes:
        sequence: Index into the layout's.
        first: Element of the sequence, not byte.
        count: At least 1.
        form: How ``body`` is coded.
        body: Shares the payload's memory when read.
    """

    sequence: int
    first: int
    count: int
    form: Form
    body: bytes | memoryview

    @property
    def coded_bytes(self) -> int:
        """What it takes in a payload, head included."""
        return _HEAD.size + len(self.body)


def anchor_ranges(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """Yield ``(sequence, first, count)`` of each block that an anchor has, in order."""
    for index, sequence in enumerate(layout.sequences):
        for first in range(0, sequence.elements, ANCHOR_BLOCK_ELEMENTS):
            yield index, first, min(ANCHOR_BLOCK_ELEMENTS, sequence.elements - first)


def packed_parts(content: Content, blocks: Iterable[Block]) -> Iterator[bytes | memoryview]:
    """Yield the payload of ``blocks``, which must be in ascending order, part by part."""
    yield _PREAMBLE.pack(_MAGIC, content.value, FORMAT)
    for block in blocks:
        yield _HEAD.pack(block.sequence, block.first, block.count, block.form, len(block.body))
        yield block.body


def pack_blocks(content: Content, blocks: Iterable[Block]) -> bytes:
    """Return the payload of ``blocks``, which must be in ascending order."""
    payload = bytearray()
    for part in packed_parts(content, blocks):
        payload += part
    return bytes(payload)


class BlockReader:
    """Reads a payload's blocks in order, as far as its bytes are there.

    Each block is checked against the layout and its forerunner; bodies are not looked at. Nothing
    but the place is held, so that going through once just to check the whole frame before a first
    block is decoded costs next to nothing.
    """

    def __init__(
        self,
        layout: Layout,
        payload: bytes | bytearray | memoryview,
        content: Content,
        *,
        source: str = "local",
    ) -> None:
        self._layout = layout
        self._view = memoryview(payload).cast("B")
        self._content = content
        self._source = source
        self._at = 0
        self._free = (0, 0)

    @property
    def complete(self) -> bool:
        """Whether the last block was read."""
        return 0 < self._at == len(self._view)

    def read(self, ready_bytes: int) -> Iterator[Block]:
        """Yield the blocks that follow and lie within the payload's first ``ready_bytes``.

        Raises:
            IntegrityError: Not such a payload: another content or format, a range outside its
                sequence or out of order, an unknown form, an end inside a block. Blames the
                source.
        """
        if self._at == 0:
            if ready_bytes < min(_PREAMBLE.size, len(self._view)):
                return
            if self._view[: _PREAMBLE.size] != _PREAMBLE.pack(_MAGIC, self._content.value, FORMAT):
                raise self._corrupt(f"not of content {self._content.name} and format {FORMAT}")
            self._at = _PREAMBLE.size
        while self._at < len(self._view):
            block = self._next(ready_bytes)
            if block is None:
                return
            yield block

    def _next(self, ready_bytes: int) -> Block | None:
        start = self._at + _HEAD.size
        if start > len(self._view):
            raise self._corrupt("it ends inside a block's head")
        if start > ready_bytes:
            return None
        index, first, count, tag, body_bytes = _HEAD.unpack_from(self._view, self._at)
        if index >= len(self._layout.sequences):
            raise self._corrupt(f"sequence {index} of {len(self._layout.sequences)}")
        held = self._layout.sequences[index].elements
        if not 0 < count <= BLOCK_ELEMENTS_MAX or first + count > held:
            raise self._corrupt(f"elements {first}+{count} of sequence {index}")
        if (index, first) < self._free:
            raise self._corrupt(f"a block at {index}:{first}, before {self._free}")
        if body_bytes > len(self._view) - start:
            raise self._corrupt("it ends inside a block")
        try:
            form = Form(tag)
        except ValueError as error:
            raise self._corrupt(f"unknown form {tag}") from error
        if start + body_bytes > ready_bytes:
            return None
        self._at = start + body_bytes
        self._free = (index, first + count)
        return Block(index, first, count, form, self._view[start : self._at])

    def _corrupt(self, detail: str) -> IntegrityError:
        return IntegrityError(f"payload: {detail}", source=self._source)


def read_blocks(
    layout: Layout,
    payload: bytes | bytearray | memoryview,
    content: Content,
    *,
    source: str = "local",
) -> Iterator[Block]:
    """Yield all blocks of a payload that is whole.

    Raises:
        IntegrityError: See `BlockReader.read`.
    """
    reader = BlockReader(layout, payload, content, source=source)
    yield from reader.read(len(memoryview(payload).cast("B")))
