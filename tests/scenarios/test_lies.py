"""What liars send: each lie on the wire, honest bytes before and after, and what the run makes of
lies in uploads."""

import random

import pytest
import trio.testing

from echo2p2p.errors import RemoteProtocolError
from echo2p2p.ids import manifest_id_of
from echo2p2p.net.ports import Endpoint
from echo2p2p.net.stream import FrameStream
from echo2p2p.testing.relays import RunKeys
from echo2p2p.wire.arrays import from_tokens, to_tokens
from echo2p2p.wire.frames import ChunkPayload
from echo2p2p.wire.messages import Have, Offer, Ping, Request
from scenarios.false_uploads import (
    BAD_LOGPROBS,
    CONFLICTING_UPLOADS,
    DUPLICATE_UPLOADS,
    STALE_FLOOD,
    STOLEN_CREDENTIALS,
    STOLEN_LEASES,
)
from scenarios.lies import (
    CORRUPT,
    DUPLICATE,
    GARBAGE,
    LYING_HAVE,
    REORDER,
    REPLAY,
    SLOW_READ_S,
    SLOW_READER,
    WITHHOLD,
    Lies,
    WatchedStreams,
)
from scenarios.play import play
from scenarios.story import read_story

PAYLOAD = RunKeys().payload(1, 50_000, chunk_bytes=1024)
OFFER = Offer(manifest=PAYLOAD.signed)
ID = manifest_id_of(PAYLOAD.signed.body)
COUNT = PAYLOAD.assembly.count


def have(*indices):
    return Have(manifest_id=ID, indices=from_tokens(list(indices)), ask=False)


class Wire:
    """A liar's stream and what comes out at the other end."""

    def __init__(self, *told: str) -> None:
        self.lies = Lies(random.Random(3), set(told))
        self.seen = []
        ours, theirs = trio.testing.memory_stream_pair()
        streams = WatchedStreams(Dialled(ours), self.lies, self.seen.append)
        self._streams, self.far = streams, FrameStream(theirs)

    async def open(self) -> FrameStream:
        stream = await self._streams.dial(Endpoint("x", 1), timeout_s=1)
        self.stream = stream
        return FrameStream(stream)

    async def received(self, near: FrameStream) -> list:
        """Close, and return what has come: messages, and (index, bytes) of chunks."""
        await self.stream.aclose()
        out = []
        while (event := await self.far.receive()) is not None:
            chunk = isinstance(event, ChunkPayload)
            out.append((event.index, bytes(event.data)) if chunk else event.message)
        return out


class Dialled:
    def __init__(self, stream) -> None:
        self._stream = stream

    async def dial(self, endpoint, *, timeout_s):
        await trio.lowlevel.checkpoint()
        return self._stream


async def send_all(near: FrameStream) -> None:
    await near.send(OFFER)
    for index in range(1, 21):
        await near.send(have(index))
        await near.send_chunk(ID, index, PAYLOAD.assembly.chunk(index))


HONEST = [OFFER]
for number in range(1, 21):
    HONEST += [have(number), (number, bytes(PAYLOAD.assembly.chunk(number)))]


async def told(*lies: str) -> list:
    wire = Wire(*lies)
    near = await wire.open()
    await send_all(near)
    return await wire.received(near)


async def test_without_a_lie_all_is_as_it_was_and_seen():
    wire = Wire()
    near = await wire.open()
    await send_all(near)
    assert await wire.received(near) == HONEST
    assert len(wire.seen) == 21, "the offer and the chunks"


async def test_corrupt_changes_about_half_of_the_chunks_by_a_bit():
    got = await told(CORRUPT)
    wrong = [one for one, honest in zip(got, HONEST, strict=True) if one != honest]
    assert 5 <= len(wrong) <= 15
    for index, data in wrong:
        true = bytes(PAYLOAD.assembly.chunk(index))
        assert sum((a ^ b).bit_count() for a, b in zip(data, true, strict=True)) == 1


async def test_withhold_announces_everything_and_sends_no_chunk():
    got = await told(WITHHOLD)
    assert [to_tokens(one.indices).tolist() for one in got[1:]] == [list(range(COUNT))] * 20


async def test_a_lying_have_names_every_chunk():
    got = await told(LYING_HAVE)
    assert to_tokens(got[1].indices).tolist() == list(range(COUNT))
    assert got[2] == HONEST[2]


async def test_duplicates_come_twice_each_but_never_pings():
    assert await told(DUPLICATE) == [one for one in HONEST for _ in range(2)]
    wire = Wire(DUPLICATE)
    near = await wire.open()
    await near.send(Ping(nonce=1))
    assert await wire.received(near) == [Ping(nonce=1)]


async def test_reorder_swaps_neighbours_and_loses_nothing():
    pairs = zip(HONEST[1::2], HONEST[0::2], strict=False)
    assert await told(REORDER) == [one for pair in pairs for one in pair], "the last still waits"


async def test_replay_sends_what_was_sent_again():
    got = await told(REPLAY)
    assert len(got) > 1.8 * len(HONEST)
    assert all(one in HONEST for one in got)


async def test_garbage_breaks_the_protocol():
    wire = Wire(GARBAGE)
    near = await wire.open()
    for _ in range(10):
        await send_all(near)
    with pytest.raises(RemoteProtocolError):
        await wire.received(near)


async def test_a_lie_begins_and_ends_between_frames():
    wire = Wire()
    near = await wire.open()
    await near.send(OFFER)
    wire.lies.told.add(DUPLICATE)
    await near.send(have(1))
    wire.lies.told.clear()
    await near.send(have(2))
    assert await wire.received(near) == [OFFER, have(1), have(1), have(2)]


async def test_a_slow_reader_takes_its_time(autojump_clock):
    wire = Wire(SLOW_READER)
    near = await wire.open()
    await wire.far.send(Request(manifest_id=ID, index=3))
    began = trio.current_time()
    assert (await near.receive()).message == Request(manifest_id=ID, index=3)
    assert trio.current_time() - began >= SLOW_READ_S


STORY = """
[world]
stop_s = 32
heal_s = 12
[[peers]]
name = "good"
count = 2
seconds_per_token = 0.02
[[peers]]
name = "bad"
count = 2
seconds_per_token = 0.02
[[nemesis]]
fault = "lie"
on = "bad"
share = 1.0
at_s = 5
lies = ["{lie}"]
[checks]
converge_s = 12
"""
TOLD = {
    STALE_FLOOD: {"unknown_lease", "malformed"},
    BAD_LOGPROBS: {"not_finite"},
    STOLEN_LEASES: {"not_yours"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "lie",
    [
        STALE_FLOOD,
        BAD_LOGPROBS,
        DUPLICATE_UPLOADS,
        CONFLICTING_UPLOADS,
        STOLEN_LEASES,
        STOLEN_CREDENTIALS,
    ],
)
def test_false_uploads_are_told_and_the_run_bears_them(lie):
    played = play("liars", read_story(STORY.replace("{lie}", lie), "liars"), 3)
    assert played.problems == []
    record = played.world.record
    if lie in {DUPLICATE_UPLOADS, CONFLICTING_UPLOADS, STOLEN_CREDENTIALS}:
        assert record.duplicates >= 3
    else:
        assert record.reasons >= TOLD[lie], record.reasons
