"""A version appears whole or not at all, in one block of memory."""

import msgspec
import pytest
import trio

from echo2p2p.errors import IntegrityError
from echo2p2p.ids import RunId, Step, Version
from echo2p2p.net.ports import SharedState
from echo2p2p.testing.states import trained_step
from echo2p2p.testing.system import InlineOffload, SimSharedMemory
from echo2p2p.weights.anchor import encode_anchor
from echo2p2p.weights.assembly import Assembly
from echo2p2p.weights.blocks import Content, read_blocks
from echo2p2p.weights.chunks import split
from echo2p2p.weights.delta import encode_delta
from echo2p2p.weights.forms import Form
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.manifest import build_header
from echo2p2p.weights.state import state_digest
from peer.apply import Apply
from peer.keeper import WeightState
from peer.state import Weights

COUNT = 1 << 19
LAYOUT = plan_layout([("w", "bf16", (COUNT // 2,), ()), ("v", "f16", (COUNT // 2,), ())])
"""Two dtypes, so two blocks."""
OLD, NEW = trained_step(COUNT, deviation=0.02, step=3e-6, seed=1)
CHUNK_BYTES = 1024


class Keeper:
    """What an `EngineKeeper` is to an apply: who reads the memory, and who is told of a version."""

    def __init__(self) -> None:
        self.offers: list[int] = []
        self.wanted: SharedState | None = None
        self.load_ends = trio.Event()
        self.load_ends.set()

    def offer(self, weights: WeightState) -> None:
        self.offers.append(weights.version)
        self.wanted = weights.state
        self.since = weights.since

    async def withdraw(self) -> None:
        await self.load_ends.wait()
        self.wanted = None


class Subject:
    """Weights, an engine's keeper, and payloads for them."""

    def __init__(self, *, holds: int | None = 0, work_s: float = 0.0) -> None:
        self.weights = Weights(LAYOUT, SimSharedMemory())
        self.keeper = Keeper()
        self.offload = InlineOffload(work_s)
        if holds is not None:
            self.weights.view[:] = OLD
            self.weights.switch(Version(holds), state_digest(LAYOUT, OLD))
            self.keeper.offer(WeightState(Version(holds), self.weights.digest, self.weights.state))

    def published(self, *, anchor: bool = False, version: int = 1, result: bytes = NEW):
        """Return header and chunks of a payload that leads to ``result``."""
        payload = encode_anchor(LAYOUT, result) if anchor else encode_delta(LAYOUT, OLD, result)
        chunked = split(payload, CHUNK_BYTES)
        header = build_header(
            content="model",
            run_id=RunId("run"),
            version=Version(version),
            chain_id="chain",
            step=Step(version),
            generation=0,
            base=None if anchor else (Version(0), state_digest(LAYOUT, OLD)),
            result_digest=state_digest(LAYOUT, result),
            layout=LAYOUT,
            chunked=chunked,
        )
        return header, chunked

    def apply(self, header, assembly) -> Apply:
        return Apply(
            header, assembly, weights=self.weights, keeper=self.keeper, offload=self.offload
        )

    def whole(self, **options) -> Apply:
        """Return the apply of a payload that is all there."""
        header, chunked = self.published(**options)
        return self.apply(header, Assembly.whole(header, chunked.payload, chunked.index))

    @property
    def bits(self) -> bytes:
        return bytes(self.weights.view)


@pytest.mark.parametrize("anchor", [False, True])
async def test_the_engine_is_told_what_a_delta_has_written(anchor) -> None:
    subject = Subject()
    few = bytearray(OLD)
    differ = [6, 4000, COUNT + 2, 2 * COUNT - 2]
    for place in differ:
        few[place] ^= 1
    await subject.whole(anchor=anchor, result=bytes(few)).finish()
    touched = subject.keeper.since(Version(0))
    if anchor:
        assert touched is None
    else:
        assert sorted(touched.places.tolist()) == differ
        assert touched.base == 0


@pytest.mark.parametrize("chunks_first", [1, 3])
async def test_a_delta_is_worked_on_as_it_comes_and_the_old_version_is_whole_until_the_end(
    autojump_clock, chunks_first
) -> None:
    subject = Subject()
    header, chunked = subject.published()
    assembly = Assembly(header)
    apply = subject.apply(header, assembly)
    worked = 0
    for index in range(chunked.count):
        assembly.add(index, chunked.chunk(index), source="p")
        if index >= chunks_first:
            worked += await apply.advance()
        assert subject.bits == OLD
        assert subject.keeper.wanted is subject.weights.state, "an engine may still read it"
        assert subject.weights.version == 0
    assert worked == chunked.count - chunks_first > 1
    assert not await apply.advance(), "nothing has come since"
    await apply.finish()
    assert subject.bits == NEW
    assert (subject.weights.version, subject.weights.digest) == (1, header.result_digest)
    assert subject.keeper.offers == [0, 1]


async def test_the_memory_is_not_written_before_the_engine_has_loaded_from_it(
    autojump_clock,
) -> None:
    subject = Subject()
    apply = subject.whole()
    subject.keeper.load_ends = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(apply.finish)
        await trio.sleep(100.0)
        assert subject.bits == OLD
        subject.keeper.load_ends.set()
    assert subject.bits == NEW


async def test_whoever_cancels_it_a_write_ends_and_is_known(autojump_clock) -> None:
    for after_s in (0.5, 1.5, 2.5):
        subject = Subject(work_s=1.0)
        with trio.move_on_after(after_s):
            await subject.whole().finish()
        bits, version = subject.bits, subject.weights.version
        assert (bits, version) in ((OLD, 0), (NEW, 1))
        assert state_digest(LAYOUT, bits) == subject.weights.digest
        assert subject.keeper.wanted is subject.weights.state
    assert version == 1


async def test_a_cancelled_wait_for_the_engine_leaves_everything_as_it_was(autojump_clock) -> None:
    subject = Subject()
    subject.keeper.load_ends = trio.Event()
    with trio.move_on_after(1.0):
        await subject.whole().finish()
    assert (subject.bits, subject.weights.version) == (OLD, 0)
    assert subject.keeper.wanted is subject.weights.state
    assert not subject.weights.lock.locked()


@pytest.mark.parametrize("anchor", [False, True])
async def test_a_wrong_result_is_of_no_version_and_offered_to_nobody(anchor) -> None:
    subject = Subject()
    header, chunked = subject.published(anchor=anchor)
    header = msgspec.structs.replace(header, result_digest=bytes(32))
    assembly = Assembly.whole(header, chunked.payload, chunked.index)
    with pytest.raises(IntegrityError, match="does not match its digest") as caught:
        await subject.apply(header, assembly).finish()
    assert caught.value.source == "local"
    assert subject.weights.version is subject.weights.digest is None
    assert subject.keeper.wanted is None
    assert subject.keeper.offers == [0]


async def test_a_bit_of_the_base_that_has_flipped_is_found_by_the_result() -> None:
    subject = Subject()
    subject.weights.view[6] ^= 1  # of a mantissa
    with pytest.raises(IntegrityError, match="does not match"):
        await subject.whole().finish()
    assert subject.weights.version is None
    subject = Subject()
    subject.weights.view[7] ^= 1  # of an exponent: the changes are sought in the wrong places
    with pytest.raises(IntegrityError):
        await subject.whole().finish()
    assert subject.keeper.offers == [0]


async def test_a_block_is_worked_out_while_the_next_one_is_under_way(autojump_clock) -> None:
    subject = Subject()
    header, chunked = subject.published()
    garbage = bytearray(chunked.payload)
    garbage[22:60] = bytes(38)
    spoilt = split(bytes(garbage), CHUNK_BYTES)
    header = msgspec.structs.replace(header, index_digest=spoilt.index_digest)
    assembly = Assembly(header)
    apply = subject.apply(header, assembly)
    found = ""
    for index in range(chunked.count):
        assembly.add(index, spoilt.chunk(index), source="p")
        try:
            await apply.advance()
        except IntegrityError as error:
            found = str(error)
            break
    assert "block" in found
    assert not assembly.complete, "the first block was found bad before the second was there"
    assert subject.bits == OLD


async def test_a_payload_that_does_not_decode_tears_nothing_that_was_whole() -> None:
    subject = Subject()
    header, chunked = subject.published()
    garbage = bytearray(chunked.payload)
    garbage[22:60] = bytes(38)  # inside of the first block
    spoilt = split(bytes(garbage), CHUNK_BYTES)
    header = msgspec.structs.replace(header, index_digest=spoilt.index_digest)
    apply = subject.apply(header, Assembly.whole(header, spoilt.payload, spoilt.index))
    with pytest.raises(IntegrityError, match="block"):
        await apply.finish()
    assert (subject.bits, subject.weights.version) == (OLD, 0)
    assert subject.keeper.wanted is subject.weights.state


async def test_a_delta_from_another_base_or_for_another_layout_is_refused() -> None:
    with pytest.raises(IntegrityError, match="delta from version 0, we hold 3"):
        Subject(holds=3).whole()
    with pytest.raises(IntegrityError, match="delta from version 0, we hold none"):
        Subject(holds=None).whole()
    subject = Subject()
    header, chunked = subject.published()
    header = msgspec.structs.replace(header, layout_digest=bytes(32))
    with pytest.raises(IntegrityError, match="layout"):
        subject.apply(header, Assembly.whole(header, chunked.payload, chunked.index))


async def test_a_base_that_is_forgotten_meanwhile_is_not_written_on() -> None:
    subject = Subject()
    apply = subject.whole()
    await apply.advance()
    subject.weights.forget()
    with pytest.raises(IntegrityError, match="we hold none"):
        await apply.finish()
    assert subject.bits == OLD


async def test_who_has_nothing_writes_an_anchor_as_it_comes(autojump_clock) -> None:
    subject = Subject(holds=None)
    header, chunked = subject.published(anchor=True)
    assembly = Assembly(header)
    apply = subject.apply(header, assembly)
    for index in range(chunked.count - 1):
        assembly.add(index, chunked.chunk(index), source="p")
        await apply.advance()
    assert subject.bits[: COUNT // 2] == NEW[: COUNT // 2]
    assert subject.weights.version is None
    assert subject.keeper.offers == []
    assembly.add(chunked.count - 1, chunked.chunk(chunked.count - 1), source="p")
    await apply.finish()
    assert (subject.bits, subject.weights.version) == (NEW, 1)
    assert subject.keeper.offers == [1]


async def test_who_has_a_version_keeps_it_until_the_last_chunk_of_an_anchor(
    autojump_clock,
) -> None:
    subject = Subject()
    header, chunked = subject.published(anchor=True, version=9)
    assembly = Assembly(header)
    apply = subject.apply(header, assembly)
    for index in range(chunked.count):
        assembly.add(index, chunked.chunk(index), source="p")
        await apply.advance()
        assert (subject.bits, subject.weights.version) == (OLD, 0)
    await apply.finish()
    assert (subject.bits, subject.weights.version) == (NEW, 9)


async def test_a_version_that_is_followed_at_once_need_not_be_offered() -> None:
    subject = Subject()
    await subject.whole().finish(offer=False)
    assert subject.weights.version == 1
    assert subject.keeper.offers == [0]


def test_the_payload_has_a_block_to_work_on_while_another_is_under_way() -> None:
    blocks = list(read_blocks(LAYOUT, encode_delta(LAYOUT, OLD, NEW), Content.DELTA))
    assert [block.form in (Form.TIGHT, Form.FAST) for block in blocks] == [True, True]
    assert min(block.coded_bytes for block in blocks) > 2 * CHUNK_BYTES
