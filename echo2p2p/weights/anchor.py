"""The whole state in one payload, the same bytes wherever it is made.

The problem: a joiner needs everything once, and every peer that already holds the version should
be able to serve it. The idea: the encoding is canonical, so such a peer builds the publisher's
very chunks from its own state. The exponents of trained weights fill a few values, so each float
is split into exponent and the rest (sign and mantissa, nearly noise); that saves a third of bf16.

Canonical means: with the same zstandard release. Another release may choose other bytes; then the
digest of chunk 0 differs, and a peer that checks it before it serves stays a plain receiver.
"""

from __future__ import annotations

from echo2p2p.errors import IntegrityError
from echo2p2p.weights.blocks import Block, Content, anchor_ranges, pack_blocks, read_blocks
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

    return pack_blocks(Content.ANCHOR, mapped(code, anchor_ranges(layout), threads))


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
    flat = flat_bytes(layout, target, writable=True)
    _check_cover(layout, payload, source)

    def decode(block: Block) -> None:
        sequence = layout.sequences[block.sequence]
        segments = segments_of(flat, sequence, block.first, block.count)
        body = memoryview(block.body)
        decode_block(block.form, DTYPES[sequence.dtype], body, segments, source=source)

    for _ in mapped(decode, read_blocks(layout, payload, Content.ANCHOR, source=source), threads):
        pass


def _check_cover(layout: Layout, payload: bytes | bytearray | memoryview, source: str) -> None:
    """Check that the blocks need no base and hold every element: they are ordered and disjoint."""
    held = 0
    for block in read_blocks(layout, payload, Content.ANCHOR, source=source):
        if block.form not in WHOLE_FORMS:
            raise IntegrityError(f"anchor: a block of form {block.form.name}", source=source)
        held += block.count
    wanted = sum(sequence.elements for sequence in layout.sequences)
    if held != wanted:
        raise IntegrityError(f"anchor: {held} elements of {wanted}", source=source)
