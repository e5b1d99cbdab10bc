import pytest
import trio

from echo2p2p.net.departure import FEW_BYTES, POLL_MAX_S, DepartingStream
from echo2p2p.net.ports import Endpoint
from echo2p2p.net.tcp import TcpStreams

HERE = Endpoint("127.0.0.1", 0)
RATE = 1_000_000


class SlowPath(DepartingStream):
    """A stream whose kernel has taken ``held`` bytes at time 0, and has them go at `RATE`."""

    def __init__(self, held, rtt_s=0.0, rate=RATE):
        self.held, self.rtt_s, self.rate = held, rtt_s, rate
        self.position = held

    def _unacknowledged(self):
        return max(0, int(self.held - RATE * trio.current_time()))

    def _path(self):
        return self.rtt_s, float(self.rate)


@pytest.mark.parametrize("rate", [RATE, 3 * RATE, RATE / 10, 0])
async def test_bytes_have_left_when_few_are_not_acknowledged(autojump_clock, rate):
    stream = SlowPath(200_000, rate=rate)
    await stream.wait_departed(200_000)
    least_s = (200_000 - FEW_BYTES) / RATE
    assert least_s <= trio.current_time() <= least_s + POLL_MAX_S


async def test_a_long_path_may_be_full_of_them(autojump_clock):
    stream = SlowPath(200_000, rtt_s=0.1)
    await stream.wait_departed(200_000)
    assert 0.1 <= trio.current_time() <= 0.1 + POLL_MAX_S


async def test_what_was_sent_later_is_not_waited_for(autojump_clock):
    stream = SlowPath(200_000)
    await stream.wait_departed(100_000)
    least_s = (100_000 - FEW_BYTES) / RATE
    assert least_s <= trio.current_time() <= least_s + POLL_MAX_S


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
            await ours.wait_departed(ours.position)
        assert 0 <= ours._unacknowledged() <= 2 * FEW_BYTES
        rtt_s, bytes_per_s = ours._path()
        assert 0 < rtt_s < 1
        assert bytes_per_s > 10_000
        await ours.aclose()
        with trio.fail_after(0.5):
            await ours.wait_departed(ours.position)
