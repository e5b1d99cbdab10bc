"""What changed between two states of one layout, bit for bit.

The problem: reinforcement learning moves few bits of a weight at a time, and every peer must
receive every move over a slow link. The idea: both sides hold the base, so only differences
travel, block by block, each in whichever form of `echo2p2p.weights.forms` is shortest; what does
not change is left out. Nothing is lost or rounded: the result is compared by digest.

An apply works out the changes first and then writes them in place; a write is not undone. The
caller checks the base's digest before and the result's after, and rebuilds from anchor and chain if
either disagrees.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo2p2p.weights import kernels
from echo2p2p.weights.blocks import Block, BlockReader, Content, pack_blocks
from echo2p2p.weights.changes import Changes
from echo2p2p.weights.cuts import Finder, Piece, mapped, pieces, shortest, windows
from echo2p2p.weights.forms import decode_block, find_changes
from echo2p2p.weights.kernels import Found
from echo2p2p.weights.layout import (
    DTYPES,
    Dtype,
    Layout,
    Sequence,
    flat_bytes,
    segments_of,
    stretches_of,
)
from echo2p2p.weights.policy import SMALLEST, FormPolicy
from echo2p2p.weights.stretch import walk
from echo2p2p.weights.touched import Places

Bytes = bytes | bytearray | memoryview


def encode_delta(
    layout: Layout,
    base: Bytes,
    result: Bytes,
    *,
    policy: FormPolicy = SMALLEST,
    threads: int = 1,
    find: Finder | None = None,
) -> bytes:
    """Return the payload that turns ``base`` into ``result``; same states, same bytes.

    Args:
        layout: Of both.
        base: Need not be contiguous, nor need ``result``; then they are copied.
        result: The state to be reached.
        policy: Which forms may be used.
        threads: How many to work in; the bytes do not depend on it.
        find: Finds the changes elsewhere, as on a GPU that holds both states; they must be right.

    Raises:
        LocalProtocolError: A state of another length than the layout's.
    """
    old, new = flat_bytes(layout, base), flat_bytes(layout, result)

    def look(sequence: Sequence, first: int, count: int) -> Found:
        dtype = DTYPES[sequence.dtype]
        sides = (segments_of(flat, sequence, first, count) for flat in (old, new))
        return kernels.find_in(dtype, *sides)

    def code(item: tuple[int, Piece]) -> Block:
        index, piece = item
        form, body = shortest(piece, policy)
        return Block(index, piece.first, piece.stretch.count, form, body)

    blocks: list[Block] = []
    for index, sequence in enumerate(layout.sequences):
        for window in windows(sequence, find or look, whole=policy.whole, threads=threads):
            cut = [(index, piece) for piece in pieces(window, old, new, policy)]
            blocks += mapped(code, cut, threads)
    return pack_blocks(Content.DELTA, blocks)


def apply_delta(
    layout: Layout,
    payload: Bytes,
    target: memoryview | bytearray,
    *,
    source: str = "local",
    threads: int = 1,
) -> None:
    """Turn ``target``, a copy of the base, into the result in place.

    A wrong base is not noticed here: the state's digest is the proof, before and after. Beside
    target and payload it needs a few MiB a thread.

    Raises:
        IntegrityError: The payload is no delta of this layout; blames ``source``. If a block's
            head was wrong, ``target`` is untouched; otherwise it must be built anew.
        LocalProtocolError: ``target`` is read-only or of another length than the layout's.
    """
    DeltaApply(layout, payload, target, source=source, threads=threads).write()


class DeltaApply:
    """An apply that goes along with the arrival of the payload, and writes when all is there.

    The payload's memory is there from the start and fills from the front, as an `Assembly`'s does.
    `advance` works out what each whole block changes and leaves the target alone, so that the
    target is a whole version until `write`, and still is one if the payload's end never comes.
    What is worked out takes memory (`Changes`); blocks beyond the allowance, and those that say
    something of every element, are decoded by `write` itself.

    Args:
        layout: Of the target.
        payload: All of its memory, however little of it has arrived.
        target: As for `apply_delta`; must not change between the first `advance` and `write`.
        changes_bytes_max: For what is worked out ahead.
        source: To blame.
        threads: How many to work in.

    Raises:
        LocalProtocolError: ``target`` is read-only or of another length than the layout's.
    """

    def __init__(
        self,
        layout: Layout,
        payload: Bytes,
        target: memoryview | bytearray,
        *,
        changes_bytes_max: int = 0,
        source: str = "local",
        threads: int = 1,
    ) -> None:
        self._layout = layout
        self._flat = flat_bytes(layout, target, writable=True)
        self._payload_bytes = len(memoryview(payload).cast("B"))
        self._reader = BlockReader(layout, payload, Content.DELTA, source=source)
        self._changes_bytes_max = changes_bytes_max
        self._full = changes_bytes_max == 0
        self._source = source
        self._threads = threads
        self._blocks: list[tuple[Block, Changes | None]] = []
        self.changes_bytes = 0
        """Memory of what is worked out."""

    def advance(self, ready_bytes: int) -> int:
        """Work out the further blocks in the payload's first ``ready_bytes``; return how many.

        Raises:
            IntegrityError: As `apply_delta`; the target is untouched.
        """
        before = len(self._blocks)
        for block, changes in mapped(self._work_out, self._reader.read(ready_bytes), self._threads):
            if changes is not None and self.changes_bytes + changes.bytes > self._changes_bytes_max:
                self._full = True
            kept = None if self._full else changes
            self.changes_bytes += 0 if kept is None else kept.bytes
            self._blocks.append((block, kept))
        return len(self._blocks) - before

    def write(self) -> None:
        """Change the target; the payload is all there.

        Raises:
            IntegrityError: As `apply_delta`.
        """
        self.advance(self._payload_bytes)
        for _ in mapped(self._write, self._blocks, self._threads):
            pass

    def touched(self, places_max: int) -> Places | None:
        """Return where elements were written, the very places and no other.

        ``None``: they are more than ``places_max``, or were not worked out for all blocks.
        """
        worked_out = [(block, each) for block, each in self._blocks if each is not None]
        count = sum(changes.where.size for _, changes in worked_out)
        if count > places_max or len(worked_out) < len(self._blocks):
            return None
        found: list[Places] = []
        for block, changes in worked_out:
            sequence = self._layout.sequences[block.sequence]
            starts = [at for at, _ in stretches_of(sequence, block.first, block.count)]
            for number, origin, part in walk(self._segments(block), changes.where):
                where = changes.where[part].astype(np.int64) - origin
                found.append(starts[number] + where * self._dtype(block).item_bytes)
        places: Places = np.concatenate([np.zeros(0, dtype=np.int64), *found])
        return places

    def _segments(self, block: Block) -> list[NDArray[Any]]:
        sequence = self._layout.sequences[block.sequence]
        return segments_of(self._flat, sequence, block.first, block.count)

    def _dtype(self, block: Block) -> Dtype:
        return DTYPES[self._layout.sequences[block.sequence].dtype]

    def _work_out(self, block: Block) -> tuple[Block, Changes | None]:
        if self._full:
            return block, None
        body, old = memoryview(block.body), self._segments(block)
        changes = find_changes(block.form, self._dtype(block), body, old, source=self._source)
        return block, changes

    def _write(self, item: tuple[Block, Changes | None]) -> None:
        block, changes = item
        if changes is not None:
            changes.move(self._dtype(block), self._segments(block))
            return
        body, target = memoryview(block.body), self._segments(block)
        decode_block(block.form, self._dtype(block), body, target, source=self._source)
