import contextlib
from functools import partial

import pytest
import trio
import trio.lowlevel

from coordinator.config import WeightsSection
from echo2p2p.net.departure import FEW_BYTES, POLL_MAX_S, POLL_MIN_S, DepartingStream, Departures
from echo2p2p.net.ports import Endpoint
from echo2p2p.net.tcp import TcpStreams

HERE = Endpoint("127.0.0.1", 0)
RATE = 1_000_000


class SlowPath(DepartingStream):
    """A stream whose kernel has taken ``held`` bytes at time 0, and has them go at `RATE`."""

    def __init__(self, held, rtt_s=0.0, rate=RATE):
        self.held, self.rtt_s, self.rate = held, rtt_s, rate
        self.drains = RATE
        self.position = held

    def _unacknowledged(self):
        return max(0, int(self.held - self.drains * trio.current_time()))

    def _path(self):
        return self.rtt_s, float(self.rate)


@contextlib.asynccontextmanager
async def departing(*streams):
    """Run departures that note when all that is written to each stream now has left."""
    departures, left_s = Departures(), {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(departures.run)
        await trio.lowlevel.checkpoint()
        for stream in streams:
            departures.expect(stream, lambda s=stream: left_s.update({s: trio.current_time()}))
        yield departures, left_s
        nursery.cancel_scope.cancel()


async def departed_s(stream):
    async with departing(stream) as (_, left_s):
        await trio.sleep(5)
    return left_s[stream]


@pytest.mark.parametrize("rate", [RATE, 3 * RATE, RATE / 10, 0])
async def test_bytes_have_left_when_few_are_not_acknowledged(autojump_clock, rate):
    least_s = (200_000 - FEW_BYTES) / RATE
    assert least_s <= await departed_s(SlowPath(200_000, rate=rate)) <= least_s + POLL_MAX_S


async def test_a_small_deltas_chunk_has_not_left_a_slow_link_when_it_is_written(autojump_clock):
    stream = SlowPath(WeightsSection().chunk_bytes_min, rate=375_000)  # 3 Mbit/s
    stream.drains = stream.rate / 15  # as many links share it
    assert await departed_s(stream) > 0.5 * stream.held / stream.drains


async def test_a_long_path_may_be_full_of_them(autojump_clock):
    assert 0.1 <= await departed_s(SlowPath(200_000, rtt_s=0.1)) <= 0.1 + POLL_MAX_S


async def test_what_was_sent_later_is_not_waited_for(autojump_clock):
    stream = SlowPath(100_000)
    async with departing(stream) as (_, left_s):
        stream.held = stream.position = 200_000
        await trio.sleep(5)
    least_s = (100_000 - FEW_BYTES) / RATE
    assert least_s <= left_s[stream] <= least_s + POLL_MAX_S


async def test_what_leaves_at_once_is_told_at_once_and_in_order(autojump_clock):
    stream, told = SlowPath(FEW_BYTES), []
    departures = Departures()
    departures.expect(stream, partial(told.append, 1))
    assert told == [1]
    stream.held = stream.position = 100_000
    departures.expect(stream, partial(told.append, 2))
    stream.rtt_s = 10.0  # and yet not before the second
    departures.expect(stream, partial(told.append, 3))
    assert told == [1]
    with trio.move_on_after(1):
        await departures.run()
    assert told == [1, 2, 3]


async def test_a_fast_stream_is_not_asked_at_the_pace_of_a_slow_one(autojump_clock):
    slow, fast = SlowPath(10_000_000, rate=RATE / 10), SlowPath(FEW_BYTES + 6_000, rate=RATE)
    async with departing(slow) as (departures, left_s):
        departures.expect(fast, lambda: left_s.update({fast: trio.current_time()}))
        await trio.sleep(5)
    assert left_s.keys() == {fast}
    assert 0.006 <= left_s[fast] <= 0.006 + POLL_MIN_S


async def test_a_forgotten_stream_is_asked_nothing(autojump_clock):
    stream = SlowPath(200_000)
    async with departing(stream) as (departures, left_s):
        departures.forget(stream)
        await trio.sleep(5)
    assert not left_s


async def test_the_kernel_of_a_real_connection_is_asked():
    send, receive = trio.open_memory_channel(1)

    async def accept(stream, _host):
        await send.send(stream)
        await trio.sleep_forever()

    async with (
        TcpStreams().listen(HERE, accept) as endpoint,
        await TcpStreams().dial(endpoint, timeout_s=5) as ours,
    ):
        theirs = await receive.receive()
        assert isinstance(ours, DepartingStream)
        assert isinstance(theirs, DepartingStream)
        await ours.send_all(bytes(2 * FEW_BYTES))
        assert ours.position == 2 * FEW_BYTES
        got = 0
        while got < 2 * FEW_BYTES:
            got += len(await theirs.receive_some(65_536))
        with trio.fail_after(5):
            while wait_s := ours.departs_in_s(ours.position):  # noqa: ASYNC110 - the kernel's event
                await trio.sleep(wait_s)
        assert 0 <= ours._unacknowledged() <= 2 * FEW_BYTES
        rtt_s, bytes_per_s = ours._path()
        assert 0 < rtt_s < 1
        assert bytes_per_s > 10_000
        await ours.aclose()
        assert ours.departs_in_s(ours.position) == 0
