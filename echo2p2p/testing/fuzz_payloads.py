"""Hostile payloads by the hundred thousand: ``python -m echo2p2p.testing.fuzz_payloads``.

Each case takes something honest (a delta, an anchor, a block's body, a manifest's header, chunks)
and damages it, or makes something up, and hands it to whoever reads it. Only two outcomes are
allowed: it is taken, or it is refused with the error that names its source; within bounds of time
and memory, and without a byte written outside the target. Every case follows from the seed and its
number, which are printed if it fails.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time  # noqa: TID251 - what is measured here is real time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from echo2p2p.errors import IntegrityError, LocalProtocolError, RemoteProtocolError
from echo2p2p.ids import Generation, RunId, Step, Version
from echo2p2p.testing.states import changed_state, random_layout, random_state
from echo2p2p.weights import kernels
from echo2p2p.weights.anchor import decode_anchor, encode_anchor
from echo2p2p.weights.assembly import Assembly
from echo2p2p.weights.blocks import BLOCK_ELEMENTS_MAX, Block, Content, pack_blocks, read_blocks
from echo2p2p.weights.chunks import split
from echo2p2p.weights.delta import DeltaApply, apply_delta, encode_delta
from echo2p2p.weights.forms import Form
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.manifest import build_header
from echo2p2p.weights.policy import FormPolicy
from echo2p2p.weights.state import state_digest
from echo2p2p.weights.streams import StreamWriter
from echo2p2p.wire.messages import ManifestHeader

SECONDS_MAX: Final = 2.0
"""Of one case, states of a few kilobytes; thousands of times what it takes."""

GUARD: Final = b"\xa5" * 64


@dataclass
class Tally:
    """What became of the cases."""

    taken: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)


def fuzz(cases: int, seed: int) -> Tally:
    """Run ``cases`` cases.

    Raises:
        AssertionError: A case broke a rule; says which.
    """
    tally = Tally()
    for number in range(cases):
        rng = random.Random(seed << 32 | number)  # noqa: S311 - to be replayed, no secret
        attack = rng.choice(_ATTACKS)
        began = time.perf_counter()
        try:
            taken = attack(rng)
        except Exception as error:
            raise AssertionError(f"case {number} of seed {seed} ({attack.__name__})") from error
        seconds = time.perf_counter() - began
        assert seconds < SECONDS_MAX, f"case {number} of seed {seed} took {seconds:.1f} s"
        tally.taken += taken
        tally.refused += not taken
        tally.slowest_s = max(tally.slowest_s, seconds)
        tally.kinds[attack.__name__] = tally.kinds.get(attack.__name__, 0) + 1
    return tally


def _refused(work: Callable[[], object]) -> bool:
    """Whether ``work`` was refused, and properly so."""
    blamed = None
    try:
        work()
    except IntegrityError as error:
        blamed = error.source
    assert blamed in (None, "mallory"), blamed
    return blamed is not None


def _layout(rng: random.Random) -> Layout:
    while True:
        layout = random_layout(rng)
        if layout.sequences:
            return layout


def _policy(rng: random.Random) -> FormPolicy:
    return FormPolicy("fuzz", frozenset(rng.sample(list(Form), rng.randrange(1, 6))))


def _apply(layout: Layout, payload: bytes, base: bytes, content: Content) -> bool:
    """Apply into the middle of guarded memory; returns whether it was taken."""
    memory = bytearray(GUARD + base + GUARD)
    target = memoryview(memory)[len(GUARD) : len(GUARD) + len(base)]
    work = apply_delta if content is Content.DELTA else decode_anchor
    refused = _refused(lambda: work(layout, payload, target, source="mallory"))
    result = None if refused else bytes(target)
    target.release()
    assert memory[: len(GUARD)] == GUARD == memory[len(memory) - len(GUARD) :]
    if content is Content.DELTA:
        assert _worked_out(layout, payload, base) == result, "it matters how it is applied"
    return not refused


def _worked_out(layout: Layout, payload: bytes, base: bytes) -> bytes | None:
    """Return what comes of it if blocks are worked out as they arrive; ``None``: refused."""
    target = bytearray(base)
    work = DeltaApply(layout, payload, target, changes_bytes_max=8 * len(base), source="mallory")
    ready = (len(payload) // 3, len(payload))
    refused = any(_refused(partial(work.advance, each)) for each in ready)
    assert target == base, "written before all was there"
    return None if refused or _refused(work.write) else bytes(target)


def _damage(rng: random.Random, honest: bytes) -> bytes:
    """Flip, overwrite, cut out, double or cut off."""
    data = bytearray(honest)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        if not data:
            break
        at = rng.randrange(len(data))
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice((0, 1, 127, 128, 255))
            case 2:
                del data[at : at + rng.randrange(1, 9)]
            case 3:
                data[at:at] = data[at : at + rng.randrange(1, 40)]
            case 4:
                size = rng.randrange(1, 9)
                data[at : at + size] = rng.randbytes(size)
            case _:
                del data[at:]
    return bytes(data)


def _damaged_delta(rng: random.Random) -> bool:
    layout = _layout(rng)
    base = random_state(layout, rng)
    result = changed_state(layout, base, rng.choice((0.01, 0.2, 0.9)), rng)
    payload = encode_delta(layout, base, result, policy=_policy(rng))
    return _apply(layout, _damage(rng, payload), base, Content.DELTA)


def _damaged_body(rng: random.Random) -> bool:
    """Damage one body and keep the frame around it right."""
    layout = _layout(rng)
    base = random_state(layout, rng)
    result = changed_state(layout, base, rng.choice((0.01, 0.2, 0.9)), rng)
    blocks = list(
        read_blocks(layout, encode_delta(layout, base, result, policy=_policy(rng)), Content.DELTA)
    )
    if not blocks:
        return True
    at = rng.randrange(len(blocks))
    hit = blocks[at]
    form = hit.form if rng.random() < 0.8 else rng.choice(list(Form))
    body = _damage(rng, bytes(hit.body))
    blocks[at] = Block(hit.sequence, hit.first, hit.count, form, body)
    return _apply(layout, pack_blocks(Content.DELTA, blocks), base, Content.DELTA)


def _made_up_body(rng: random.Random) -> bool:
    """Numbers that lie, and streams of anything, in a frame that is right."""
    layout = _layout(rng)
    base = random_state(layout, rng)
    sequence = rng.randrange(len(layout.sequences))
    elements = layout.sequences[sequence].elements
    out = StreamWriter()
    for _ in range(rng.randrange(24)):
        low = rng.choice((2, 300, 1 << 16, 1 << 32, 1 << 62))
        out.number(rng.choice((0, 1, elements, elements + 1, rng.randrange(low))))
    body = out.body() + rng.randbytes(rng.randrange(60))
    first = rng.randrange(elements)
    block = Block(sequence, first, elements - first, rng.choice(list(Form)), body)
    return _apply(layout, pack_blocks(Content.DELTA, [block]), base, Content.DELTA)


def _lying_frame(rng: random.Random) -> bool:
    """Blocks out of range, doubled, overlapping, out of order."""
    layout = _layout(rng)
    blocks = []
    for _ in range(rng.randrange(1, 4)):
        sequence = rng.randrange(len(layout.sequences) + 1)
        first = rng.choice((0, rng.randrange(3000), (1 << 64) - 1))
        count = rng.choice((0, 1, rng.randrange(3000), BLOCK_ELEMENTS_MAX, (1 << 32) - 1))
        blocks.append(Block(sequence, first, count, Form.RAW, rng.randbytes(rng.randrange(9))))
    content = rng.choice(list(Content))
    return _apply(layout, pack_blocks(content, blocks), bytes(layout.total_bytes), content)


def _damaged_anchor(rng: random.Random) -> bool:
    layout = _layout(rng)
    payload = encode_anchor(layout, random_state(layout, rng))
    return _apply(layout, _damage(rng, payload), bytes(layout.total_bytes), Content.ANCHOR)


def _garbage(rng: random.Random) -> bool:
    layout = _layout(rng)
    content = rng.choice(list(Content))
    payload = rng.choice((b"", b"EWD\0", b"EWA\0")) + rng.randbytes(rng.randrange(200))
    return _apply(layout, payload, bytes(layout.total_bytes), content)


def _bad_chunks(rng: random.Random) -> bool:
    """An assembly among liars keeps what is right and nothing else."""
    layout = _layout(rng)
    payload = rng.randbytes(rng.randrange(1, 70_000))
    chunked = split(payload, 1 << 14)
    header = _header(layout, payload)
    assembly = Assembly(header)
    taken = False
    for _ in range(12):
        index = rng.randrange(-1, chunked.count + 2)
        honest = bytes(chunked.chunk(index)) if 0 <= index < chunked.count else b""
        sent = honest if rng.random() < 0.5 else _damage(rng, honest)
        taken |= not _refused(partial(assembly.add, index, sent, source="mallory"))
    for index in assembly.held():
        assert assembly.chunk(index) == chunked.chunk(index)
    return taken


def _bad_header(rng: random.Random) -> bool:
    """Change fields of a header to anything of their kind."""
    header = _header(_layout(rng), rng.randbytes(100))
    fields = rng.sample(header.__struct_fields__, rng.randrange(1, 4))
    values: dict[str, object] = {}
    for name in fields:
        old = getattr(header, name)
        if isinstance(old, bytes):
            values[name] = rng.randbytes(rng.choice((0, 31, 32, 33)))
        elif isinstance(old, str):
            values[name] = rng.choice(("", "model", "x" * 1000))
        else:
            values[name] = rng.choice((None, -1, 0, 1, 1 << 14, 1 << 40, 1 << 63, 1 << 64, 0.5))
    try:
        Assembly(msgspec.convert(msgspec.to_builtins(header) | values, ManifestHeader))
    except (RemoteProtocolError, msgspec.ValidationError):
        return False
    return True


def _header(layout: Layout, payload: bytes) -> ManifestHeader:
    return build_header(
        content="model",
        run_id=RunId("run"),
        version=Version(1),
        chain_id="chain",
        step=Step(1),
        generation=Generation(0),
        base=None,
        result_digest=state_digest(layout, bytes(layout.total_bytes)),
        layout=layout,
        chunked=split(payload, 1 << 14),
    )


_ATTACKS: Final = (
    _damaged_delta,
    _damaged_body,
    _made_up_body,
    _lying_frame,
    _damaged_anchor,
    _garbage,
    _bad_chunks,
    _bad_header,
)


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--numpy", action="store_true", help="use the loops that are not compiled")
    arguments = parser.parse_args()
    if not arguments.numpy:
        kernels.warm_up()
    try:
        tally = fuzz(arguments.cases, arguments.seed)
    except (AssertionError, LocalProtocolError) as error:
        sys.stderr.write(f"{error}: {error.__cause__!r}\n")
        return 1
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    sys.stdout.write(
        f"{arguments.cases} cases: {tally.taken} taken, {tally.refused} refused,"
        f" slowest {tally.slowest_s:.3f} s, peak memory {memory} MiB\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
