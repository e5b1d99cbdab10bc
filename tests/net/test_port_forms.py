"""One suite for the real and the simulated form of the small ports: streams, memory, offload."""

from contextlib import asynccontextmanager

import pytest
import trio

from echo2p2p.errors import LinkError, LocalProtocolError
from echo2p2p.net.memory import FileMemory
from echo2p2p.net.ports import Endpoint
from echo2p2p.net.system import SystemEntropy, ThreadOffload
from echo2p2p.net.tcp import TcpStreams
from echo2p2p.net.tls_streams import TlsStreams
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.relays import RunKeys
from echo2p2p.testing.system import InlineOffload, SimEntropy, SimSharedMemory


@asynccontextmanager
async def tcp():
    yield TcpStreams(), TcpStreams(), "127.0.0.1"


@asynccontextmanager
async def tls():
    keys = RunKeys()
    server, client = (TlsStreams(TcpStreams(), keys.leaf(name)) for name in ("source", "p0"))
    yield server, client, "127.0.0.1"


@asynccontextmanager
async def simulated():
    network = SimNetwork()
    network.add_node("one", latency_s=0.001)
    network.add_node("two", latency_s=0.001)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run)
        yield network.streams("one"), network.streams("two"), "one"
        nursery.cancel_scope.cancel()


@pytest.fixture(params=[tcp, tls, simulated], ids=["tcp", "tls", "simulated"])
def forms(request):
    return request.param


async def read_all(stream) -> bytes:
    return b"".join([bytes(data) async for data in stream])


async def read(stream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await stream.receive_some(count - len(data))
        assert part, "not the end yet"
        data += part
    return data


async def test_bytes_pass_both_ways_and_the_end_is_seen(forms):
    ended = trio.Event()

    async def answer(stream, remote):
        assert remote in {"127.0.0.1", "two"}
        await stream.send_all((await read(stream, 300_000)).upper())
        assert await read_all(stream) == b""
        ended.set()

    async with forms() as (server, client, host), server.listen(Endpoint(host, 0), answer) as at:
        assert at.port > 0, "port 0 becomes a real one"
        with trio.fail_after(10):
            async with await client.dial(at, timeout_s=5) as stream:
                await stream.send_all(b"x" * 300_000)
                assert await read(stream, 300_000) == b"X" * 300_000
            await ended.wait()


@pytest.mark.parametrize("forms", [tcp, simulated])
async def test_what_is_no_tls_can_be_closed_by_halves(forms):
    async def answer(stream, _):
        await stream.send_all((await read_all(stream)).upper())

    async with forms() as (server, client, host), server.listen(Endpoint(host, 0), answer) as at:
        stream = await client.dial(at, timeout_s=5)
        async with stream:
            await stream.send_all(b"x" * 300_000)
            await stream.send_eof()
            assert await read_all(stream) == b"X" * 300_000


async def test_a_stream_is_closed_when_its_handler_returns(forms):
    async def leave(stream, _):
        await stream.send_all(b"bye")

    async with (
        forms() as (server, client, host),
        server.listen(Endpoint(host, 0), leave) as at,
        await client.dial(at, timeout_s=5) as stream,
    ):
        assert await read_all(stream) == b"bye"


async def test_nobody_there_is_a_link_error(forms):
    async def never(stream, _):
        raise AssertionError

    async with forms() as (server, client, host):
        async with server.listen(Endpoint(host, 0), never) as at:
            pass
        with pytest.raises(LinkError, match=str(at.port)):
            await client.dial(at, timeout_s=5)


async def test_closing_the_listener_ends_its_handlers(forms):
    ended = trio.Event()

    async def endless(stream, _):
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async with forms() as (server, client, host):
        async with server.listen(Endpoint(host, 0), endless) as at:
            stream = await client.dial(at, timeout_s=5)
            await trio.testing.wait_all_tasks_blocked(0.05)
        assert ended.is_set()
        await trio.aclose_forcefully(stream)


@pytest.fixture(params=["file", "simulated"])
def memory(request, tmp_path):
    return FileMemory(tmp_path) if request.param == "file" else SimSharedMemory(bytes_max=10_000)


def test_a_block_is_zeroed_writable_and_replaced_under_its_name(memory):
    first = memory.allocate("a", 100)
    assert bytes(first.view) == bytes(100)
    first.view[:3] = b"abc"
    assert bytes(first.view[:3]) == b"abc"
    second = memory.allocate("a", 50)
    assert bytes(second.view) == bytes(50)
    for block in (first, second):
        block.close()
        block.close()


def test_names_are_plain_and_blocks_not_empty(memory):
    for name, size in (("", 10), ("../a", 10), ("a", 0)):
        with pytest.raises(LocalProtocolError):
            memory.allocate(name, size)


def test_a_scratch_block_is_zeroed_writable_and_of_no_other_block(memory):
    first, second = memory.scratch(100), memory.scratch(200)
    first.view[:3] = b"abc"
    assert bytes(second.view) == bytes(200)
    kept = first.view[:3]
    first.rest()
    assert bytes(kept) == b"abc"
    for block in (first, second):
        block.close()
        block.close()
    assert bytes(kept) == b"abc", "whoever still looks in keeps it"


@pytest.mark.parametrize("offload", [ThreadOffload, InlineOffload])
async def test_offloaded_work_gives_its_value_or_its_exception(offload):
    port = offload()
    assert await port.run(lambda: 6 * 7) == 42
    with pytest.raises(ZeroDivisionError):
        await port.run(lambda: 1 // 0)


@pytest.mark.parametrize("make", [SystemEntropy, lambda: SimEntropy(1)])
def test_secrets_have_their_length_and_do_not_repeat(make):
    entropy = make()
    drawn = {entropy.secret(16) for _ in range(100)}
    assert len(drawn) == 100
    assert {len(secret) for secret in drawn} == {16}
    assert entropy.rng("a").random() != entropy.rng("b").random()


def test_a_kept_block_is_found_again_as_it_was_left_until_it_is_closed(memory):
    first = memory.keep("p1", 100)
    first.view[:3] = b"abc"
    assert memory.kept() == ["p1"]
    again = memory.keep("p1", 100)
    assert bytes(again.view[:4]) == b"abc\0"
    other = memory.keep("p1", 120)
    assert bytes(other.view) == bytes(120), "another size is another block"
    other.close()
    assert memory.kept() == []
    memory.keep("p2", 10)
    memory.drop("p2")
    memory.drop("p2")
    assert memory.kept() == []
    for name, size in (("", 10), ("../a", 10), ("a", 0)):
        with pytest.raises(LocalProtocolError):
            memory.keep(name, size)
