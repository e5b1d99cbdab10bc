"""The whole state in one payload, the same bytes wherever it is made.

The problem: a joiner needs everything once, and every peer that already holds the version should
be able to serve it. The idea: the encoding is canonical, so such a peer builds the publisher's
very chunks from its own state. The exponents of trained weights fill a few values, so each float
is split into exponent and the rest (sign and mantissa, nearly noise); that saves a third of bf16.

Canonical means: with the same zstandard release. Another release may choose other bytes; then the
digest of chunk 0 differs, and a peer that checks it before it serves stays a plain receiver.
"""

from __future__ import annotations

from collections.abc import Iterator

from echo2p2p.errors import IntegrityError
from echo2p2p.weights.blocks import (
    Block,
    BlockReader,
    Content,
    anchor_ranges,
    pack_blocks,
    packed_parts,
    read_blocks,
)
from echo2p2p.weights.cuts import mapped
from echo2p2p.weights.forms import WHOLE_FORMS, Form, decode_block, put_whole
from echo2p2p.weights.layout import DTYPES, Layout, flat_bytes, segments_of
from echo2p2p.weights.streams import StreamWriter


def encode_anchor(
    layout: Layout, state: bytes | bytearray | memoryview, *, threads: int = 1
) -> bytes:
    """Return the payload that holds all of ``state``; same state, same bytes.

    Raises:
        LocalProtocolError: A state of another length than the layout's.
    """
    return pack_blocks(Content.ANCHOR, _coded(layout, state, threads))


def anchor_parts(
    layout: Layout, state: bytes | bytearray | memoryview, *, threads: int = 1
) -> Iterator[bytes | memoryview]:
    """Yield what `encode_anchor` returns, part by part, so that it need not be in memory."""
    yield from packed_parts(Content.ANCHOR, _coded(layout, state, threads))


def _coded(layout: Layout, state: bytes | bytearray | memoryview, threads: int) -> Iterator[Block]:
    flat = flat_bytes(layout, state)

    def code(place: tuple[int, int, int]) -> Block:
        index, first, count = place
        sequence = layout.sequences[index]
        dtype = DTYPES[sequence.dtype]
        segments = segments_of(flat, sequence, first, count)
        out, form = StreamWriter(), Form.PLANES
        put_whole(out, form, dtype, segments)
        if len(out) >= count * dtype.item_bytes:
            out, form = StreamWriter(), Form.RAW
            put_whole(out, form, dtype, segments)
        return Block(index, first, count, form, out.body())

    yield from mapped(code, anchor_ranges(layout), threads)


def decode_anchor(
    layout: Layout,
    payload: bytes | bytearray | memoryview,
    target: memoryview | bytearray,
    *,
    source: str = "local",
    threads: int = 1,
) -> None:
    """Fill ``target``, whatever it held, with the state.

    Raises:
        IntegrityError: The payload is no anchor of this layout, or leaves an element out; blames
            ``source``. If a block's head was wrong, ``target`` is untouched; otherwise it holds
            nothing of use.
        LocalProtocolError: ``target`` is read-only or of another length than the layout's.
    """
    work = AnchorApply(layout, payload, target, source=source, threads=threads)
    _check_cover(layout, payload, source)
    work.advance(len(memoryview(payload).cast("B")))


class AnchorApply:
    """A decoding that goes along with the arrival of the payload.

    As each block is whole it is written, so the target holds nothing of use until `check_end` has
    passed: for a receiver that has nothing to lose. Arguments as of `decode_anchor`, the payload's
    memory filling from the front.
    """

    def __init__(
        self,
        layout: Layout,
        payload: bytes | bytearray | memoryview,
        target: memoryview | bytearray,
        *,
        source: str = "local",
        threads: int = 1,
    ) -> None:
        self._layout = layout
        self._flat = flat_bytes(layout, target, writable=True)
        self._reader = BlockReader(layout, payload, Content.ANCHOR, source=source)
        self._cover = _Cover(layout, source)
        self._source = source
        self._threads = threads

    def advance(self, ready_bytes: int) -> int:
        """Write the further blocks in the payload's first ``ready_bytes``; return how many.

        Raises:
            IntegrityError: As `decode_anchor`.
        """
        blocks = (self._cover.counted(block) for block in self._reader.read(ready_bytes))
        return sum(1 for _ in mapped(self._decode, blocks, self._threads))

    def check_end(self) -> None:
        """Check that the target holds the whole state.

        Raises:
            IntegrityError: An element was left out.
        """
        self._cover.check_end()

    def _decode(self, block: Block) -> None:
        sequence = self._layout.sequences[block.sequence]
        segments = segments_of(self._flat, sequence, block.first, block.count)
        body, dtype = memoryview(block.body), DTYPES[sequence.dtype]
        decode_block(block.form, dtype, body, segments, source=self._source)


class _Cover:
    """Checks that an anchor's blocks, which are ordered and disjoint, hold every element."""

    def __init__(self, layout: Layout, source: str) -> None:
        self._wanted = sum(sequence.elements for sequence in layout.sequences)
        self._held = 0
        self._source = source

    def counted(self, block: Block) -> Block:
        """Return a block that needs no base."""
        if block.form not in WHOLE_FORMS:
            detail = f"anchor: a block of form {block.form.name}"
            raise IntegrityError(detail, source=self._source)
        self._held += block.count
        return block

    def check_end(self) -> None:
        """Check that these were all."""
        if self._held != self._wanted:
            detail = f"anchor: {self._held} elements of {self._wanted}"
            raise IntegrityError(detail, source=self._source)


def _check_cover(layout: Layout, payload: bytes | bytearray | memoryview, source: str) -> None:
    cover = _Cover(layout, source)
    for block in read_blocks(layout, payload, Content.ANCHOR, source=source):
        cover.counted(block)
    cover.check_end()
