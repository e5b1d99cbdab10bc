import contextlib

import pytest
import trio
from trio.testing import check_half_closeable_stream

from echo2p2p.errors import ConfigError, LinkError
from echo2p2p.net.ports import Endpoint
from echo2p2p.testing.network import SEGMENT_BYTES, WINDOW_BYTES, SimNetwork, Traffic


@contextlib.asynccontextmanager
async def two_nodes(**rates):
    network = SimNetwork()
    network.add_node("a", **rates)
    network.add_node("b", **rates)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run)
        yield network
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def connected(network, dialler="a", listener="b", port=1):
    """Yield both ends of one stream."""
    accepted = []
    there = trio.Event()

    async def accept(stream, _):
        accepted.append(stream)
        there.set()
        await trio.sleep_forever()

    async with network.streams(listener).listen(Endpoint("", port), accept) as endpoint:
        ours = await network.streams(dialler).dial(endpoint, timeout_s=10)
        await there.wait()
        yield ours, accepted[0]


async def read_exactly(stream, count):
    data = b""
    while len(data) < count:
        data += await stream.receive_some(count - len(data)) or pytest.fail("ended early")
    return data


async def test_a_stream_keeps_trios_contract(autojump_clock):
    async with two_nodes(latency_s=0.001) as network, contextlib.AsyncExitStack() as stack:
        ports = iter(range(1, 1000))

        async def make():
            return await stack.enter_async_context(connected(network, port=next(ports)))

        async def make_clogged():
            left, right = await make()
            for stream in (left, right):
                await stream.send_all(bytes(WINDOW_BYTES))
            return left, right

        await check_half_closeable_stream(make, make_clogged)


async def test_the_slower_of_uplink_and_downlink_sets_the_time(autojump_clock):
    network = SimNetwork()
    network.add_node("a", up_bytes_per_s=1000, latency_s=0.5)
    network.add_node("b", down_bytes_per_s=100, latency_s=0.25)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run)
        async with connected(network) as (ours, theirs):
            start = trio.current_time()
            await ours.send_all(bytes(1000))
            await read_exactly(theirs, 1000)
            assert trio.current_time() - start == pytest.approx(1.0 + 0.75 + 10.0)
        nursery.cancel_scope.cancel()
    assert (network.traffic("a"), network.traffic("b")) == (Traffic(1000, 0), Traffic(0, 1000))


async def test_two_streams_share_one_uplink(autojump_clock):
    async with (
        two_nodes(up_bytes_per_s=1000) as network,
        connected(network, port=1) as (one, one_end),
        connected(network, port=2) as (two, two_end),
    ):
        start = trio.current_time()
        await one.send_all(bytes(1000))
        await two.send_all(bytes(500))
        await read_exactly(one_end, 1000)
        assert trio.current_time() - start == pytest.approx(1.0)
        await read_exactly(two_end, 500)
        assert trio.current_time() - start == pytest.approx(1.5)


@pytest.mark.parametrize("full", ["up", "down"])
async def test_writers_on_a_full_line_go_on_in_turn_and_look_once_for_each_segment(
    autojump_clock, full
):
    writers, segments, segment_s = 40, 5, 0.1
    network = SimNetwork()
    rate = {f"{full}_bytes_per_s": SEGMENT_BYTES / segment_s}
    names = [f"w{number}" for number in range(writers)]
    for name in ("hub", *names):
        network.add_node(name, **(rate if name == "hub" else {}))
    looks, done_s, inner = [], {}, network.full_for

    def counted(lane):
        looks.append(lane)
        return inner(lane)

    network.full_for = counted

    async def write(name, stream):
        for number in range(segments):
            with trio.move_on_after(1.5 if (name, number) == ("w7", 2) else 1e9) as scope:
                await stream.send_all(bytes(SEGMENT_BYTES))
            if scope.cancelled_caught:
                return
        done_s[name] = trio.current_time()

    async def drain(stream, _):
        async for _ in stream:
            pass

    async with contextlib.AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(network.run)
        streams = []
        for port, name in enumerate(names, 1):
            sender, receiver = ("hub", name) if full == "up" else (name, "hub")
            listening = network.streams(receiver).listen(Endpoint("", port), drain)
            where = await stack.enter_async_context(listening)
            streams.append(await network.streams(sender).dial(where, timeout_s=10))
        start = trio.current_time()
        async with trio.open_nursery() as writing:
            for name, stream in zip(names, streams, strict=True):
                writing.start_soon(write, name, stream)
        nursery.cancel_scope.cancel()
    sent = network.traffic("hub").sent_bytes or network.traffic("hub").received_bytes
    assert "w7" not in done_s
    assert len(done_s) == writers - 1
    total_s = max(done_s.values()) - start
    # The line never stood idle, though one gave up while it waited for its turn.
    assert total_s <= sent / SEGMENT_BYTES * segment_s
    assert min(done_s.values()) - start > 0.6 * total_s, "in turn"
    assert len(looks) < 5 * writers * segments


async def test_a_reader_that_does_not_read_stops_the_writer(autojump_clock):
    async with two_nodes() as network, connected(network) as (ours, theirs):
        with trio.move_on_after(5) as scope:
            await ours.send_all(bytes(WINDOW_BYTES + 100_000))
        assert scope.cancelled_caught
        await theirs.receive_some(WINDOW_BYTES)


async def test_a_cut_is_one_way_and_what_it_held_arrives_in_order_when_healed(autojump_clock):
    async with two_nodes(latency_s=0.01) as network, connected(network) as (ours, theirs):
        network.cut("a", "b")
        await ours.send_all(b"one ")
        await ours.send_all(b"two")
        await theirs.send_all(b"back")
        assert await read_exactly(ours, 4) == b"back"
        with trio.move_on_after(60):
            pytest.fail(f"crossed the cut: {await theirs.receive_some()!r}")
        network.heal("a", "b")
        assert await read_exactly(theirs, 7) == b"one two"


async def test_a_crash_breaks_both_ends_and_closes_the_ports(autojump_clock):
    async with two_nodes() as network, connected(network) as (ours, theirs):
        await theirs.send_all(b"last words")
        network.crash("b")
        await trio.sleep(1)
        assert await ours.receive_some() == b"last words"
        assert await ours.receive_some() == b""
        with pytest.raises(trio.BrokenResourceError):
            await ours.send_all(b"x")
        with pytest.raises(trio.BrokenResourceError):
            await theirs.send_all(b"x")
        with pytest.raises(LinkError, match="b:1: refused"):
            await network.streams("a").dial(Endpoint("b", 1), timeout_s=1)


async def test_a_crash_with_unread_bytes_breaks_the_other_end_at_once(autojump_clock):
    async with two_nodes() as network, connected(network) as (ours, theirs):
        await ours.send_all(b"never read")
        await theirs.send_all(b"never to be read")
        await trio.sleep(1)
        network.crash("b")
        await trio.sleep(1)
        with pytest.raises(trio.BrokenResourceError):
            await ours.receive_some()


async def test_after_a_close_the_rest_is_read_and_sending_fails(autojump_clock):
    async with two_nodes() as network, connected(network) as (ours, theirs):
        await ours.send_all(b"last")
        await ours.aclose()
        await trio.sleep(1)
        with pytest.raises(trio.BrokenResourceError):
            await theirs.send_all(b"x")
        assert await theirs.receive_some() == b"last"
        assert await theirs.receive_some() == b""


async def test_dialling_is_refused_or_times_out(autojump_clock):
    async with two_nodes() as network, connected(network):
        node = network.streams("a")
        with pytest.raises(LinkError, match="refused"):
            await node.dial(Endpoint("b", 2), timeout_s=1)
        with pytest.raises(LinkError, match="refused"):
            await node.dial(Endpoint("nobody", 1), timeout_s=1)
        network.refuse("b")
        with pytest.raises(LinkError, match="refused"):
            await node.dial(Endpoint("b", 1), timeout_s=1)
        network.refuse("b", refuses=False)
        network.cut("b", "a")
        with pytest.raises(LinkError, match="timed out"):
            await node.dial(Endpoint("b", 1), timeout_s=2.5)


async def test_a_taken_port_is_a_wrong_setting_and_port_zero_is_never_taken(autojump_clock):
    async def accept(stream, _):
        pass

    async with two_nodes() as network, connected(network):
        node = network.streams("b")
        with pytest.raises(ConfigError, match="port 1 is taken"):
            async with node.listen(Endpoint("", 1), accept):
                pass
        anywhere = Endpoint("", 0)
        async with node.listen(anywhere, accept) as one, node.listen(anywhere, accept) as two:
            assert one.port != two.port


async def test_changed_rates_hold_from_now_on(autojump_clock):
    async with two_nodes(up_bytes_per_s=100) as network, connected(network) as (ours, theirs):
        start = trio.current_time()
        await ours.send_all(bytes(1000))
        network.set_rates("a", up_bytes_per_s=1000, down_bytes_per_s=1000)
        await ours.send_all(bytes(1000))
        await read_exactly(theirs, 2000)
        assert trio.current_time() - start == pytest.approx(10.0 + 1.0)


async def test_a_machine_that_was_restarted_listens_again(autojump_clock):
    async with two_nodes() as network:
        async with connected(network):
            network.crash("b")
        network.restart("b")
        async with connected(network) as (ours, theirs):
            await ours.send_all(b"again")
            assert await read_exactly(theirs, 5) == b"again"
