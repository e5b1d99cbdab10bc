"""What changed between two states of one layout, bit for bit.

The problem: reinforcement learning moves few bits of a weight at a time, and every peer must
receive every move over a slow link. The idea: both sides hold the base, so only differences
travel, block by block, each in whichever form of `echo2p2p.weights.forms` is shortest; blocks
without a change are left out. Nothing is lost or rounded: the result is compared by digest.

An apply works in place and is not undone on failure; the caller checks the base's digest before
and the result's after, and rebuilds from anchor and chain if either disagrees.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.weights.blocks import Block, Content, pack_blocks, ranges, read_blocks
from echo2p2p.weights.forms import Form, decode_block, encode_block
from echo2p2p.weights.layout import DTYPES, Dtype, Layout, elements_of, flat_bytes

FAST_DENSITY_MAX: Final = 0.05
"""Above it FAST is not even tried: the two forms meet at 1.2 % on trained weights (measured)."""

DENSE_DENSITY_MIN: Final = 0.002
"""Below it DENSE is not tried."""

WHOLE_SHARE_MIN: Final = 0.6
"""Coded bytes by raw bytes from which the new elements themselves may be shorter."""


def encode_delta(
    layout: Layout,
    base: bytes | bytearray | memoryview,
    result: bytes | bytearray | memoryview,
) -> bytes:
    """Return the payload that turns ``base`` into ``result``; same states, same bytes.

    Raises:
        LocalProtocolError: A state of another length than the layout's.
    """
    old, new = flat_bytes(layout, base), flat_bytes(layout, result)
    blocks = []
    for tensor, first, count in ranges(layout):
        entry = layout.tensors[tensor]
        before = elements_of(old, entry)[first : first + count]
        after = elements_of(new, entry)[first : first + count]
        changed = int(np.count_nonzero(before != after))
        if changed:
            form, body = _shortest(DTYPES[entry.dtype], before, after, changed / count)
            blocks.append(Block(tensor, first, count, form, body))
    return pack_blocks(Content.DELTA, blocks)


def apply_delta(
    layout: Layout,
    payload: bytes | bytearray | memoryview,
    target: memoryview | bytearray,
    *,
    source: str = "local",
) -> None:
    """Turn ``target``, a copy of the base, into the result in place.

    A wrong base is not noticed here: the state's digest is the proof, before and after.

    Raises:
        IntegrityError: The payload is no delta of this layout; blames ``source``. If a block's
            head was wrong, ``target`` is untouched; otherwise it must be built anew.
        LocalProtocolError: ``target`` is read-only or of another length than the layout's.
    """
    flat = flat_bytes(layout, target, writable=True)
    for _ in read_blocks(layout, payload, Content.DELTA, source=source):
        pass
    for block in read_blocks(layout, payload, Content.DELTA, source=source):
        entry = layout.tensors[block.tensor]
        elements = elements_of(flat, entry)[block.first : block.first + block.count]
        body = memoryview(block.body)
        decode_block(block.form, DTYPES[entry.dtype], body, elements, source=source)


def _shortest(
    dtype: Dtype, old: NDArray[Any], new: NDArray[Any], density: float
) -> tuple[Form, bytes]:
    """Return the form that takes the fewest bytes, and its body."""
    tried = {}
    if density <= FAST_DENSITY_MAX:
        tried[Form.FAST] = encode_block(Form.FAST, dtype, old, new)
    if density >= DENSE_DENSITY_MIN:
        tried[Form.DENSE] = encode_block(Form.DENSE, dtype, old, new)
    if min(map(len, tried.values())) >= WHOLE_SHARE_MIN * new.nbytes:
        tried[Form.PLANES] = encode_block(Form.PLANES, dtype, old, new)
        tried[Form.RAW] = encode_block(Form.RAW, dtype, old, new)
    form = min(tried, key=lambda form: (len(tried[form]), form))
    return form, tried[form]
