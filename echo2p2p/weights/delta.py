"""What changed between two states of one layout, bit for bit.

The problem: reinforcement learning moves few bits of a weight at a time, and every peer must
receive every move over a slow link. The idea: both sides hold the base, so only differences
travel, block by block, each in whichever form of `echo2p2p.weights.forms` is shortest; what does
not change is left out. Nothing is lost or rounded: the result is compared by digest.

An apply works in place and is not undone on failure; the caller checks the base's digest before
and the result's after, and rebuilds from anchor and chain if either disagrees.
"""

from __future__ import annotations

from echo2p2p.weights import kernels
from echo2p2p.weights.blocks import Block, BlockReader, Content, pack_blocks, read_blocks
from echo2p2p.weights.cuts import Finder, Piece, mapped, pieces, shortest, windows
from echo2p2p.weights.forms import decode_block
from echo2p2p.weights.kernels import Found
from echo2p2p.weights.layout import DTYPES, Layout, Sequence, flat_bytes, segments_of
from echo2p2p.weights.policy import SMALLEST, FormPolicy

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
    work = DeltaApply(layout, payload, target, source=source, threads=threads)
    for _ in read_blocks(layout, payload, Content.DELTA, source=source):
        pass
    work.advance(len(memoryview(payload).cast("B")))


class DeltaApply:
    """An apply that goes along with the arrival of the payload.

    The payload's memory is there from the start and fills from the front, as an `Assembly`'s does;
    each block is applied as soon as it is whole. The result is proved by its digest only, so a
    payload whose end never comes leaves a target that must be built anew, as a wrong one does.

    Args:
        layout: Of the target.
        payload: All of its memory, however little of it has arrived.
        target: As for `apply_delta`.
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
        source: str = "local",
        threads: int = 1,
    ) -> None:
        self._layout = layout
        self._flat = flat_bytes(layout, target, writable=True)
        self._reader = BlockReader(layout, payload, Content.DELTA, source=source)
        self._source = source
        self._threads = threads

    @property
    def complete(self) -> bool:
        """Whether every block was applied."""
        return self._reader.complete

    def advance(self, ready_bytes: int) -> int:
        """Apply the further blocks in the payload's first ``ready_bytes``; return how many.

        Raises:
            IntegrityError: As `apply_delta`; the target must be built anew.
        """
        return sum(1 for _ in mapped(self._decode, self._reader.read(ready_bytes), self._threads))

    def _decode(self, block: Block) -> None:
        sequence = self._layout.sequences[block.sequence]
        segments = segments_of(self._flat, sequence, block.first, block.count)
        body, dtype = memoryview(block.body), DTYPES[sequence.dtype]
        decode_block(block.form, dtype, body, segments, source=self._source)
