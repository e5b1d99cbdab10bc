import contextlib

import pytest
import trio

from echo2p2p.errors import ConfigError, LinkError
from echo2p2p.net.ports import Endpoint
from echo2p2p.net.tcp import TcpStreams


async def echo(stream, host):
    assert host in {"127.0.0.1", "::1"}
    async for data in stream:
        await stream.send_all(data)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_bytes_go_there_and_back_on_a_port_of_the_systems_choice(host):
    streams = TcpStreams()
    async with streams.listen(Endpoint(host, 0), echo) as endpoint:
        assert endpoint.host == host
        assert endpoint.port > 0
        async with await streams.dial(endpoint, timeout_s=5) as stream:
            assert stream.socket.getsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY)
            await stream.send_all(b"hello")
            assert await stream.receive_some(5) == b"hello"


async def test_connections_end_with_the_context():
    streams = TcpStreams()
    async with streams.listen(Endpoint("127.0.0.1", 0), echo) as endpoint:
        stream = await streams.dial(endpoint, timeout_s=5)
    async with stream:
        with contextlib.suppress(trio.BrokenResourceError):
            assert await stream.receive_some(1) == b""
    with pytest.raises(
        LinkError, match=rf"connecting to 127.0.0.1:{endpoint.port}: connection ref"
    ):
        await streams.dial(endpoint, timeout_s=5)


async def test_a_port_in_use_is_a_setting_to_mend():
    streams = TcpStreams()
    async with streams.listen(Endpoint("127.0.0.1", 0), echo) as endpoint:
        with pytest.raises(ConfigError, match="already in use; choose another port") as caught:
            async with streams.listen(endpoint, echo):
                pass
    assert caught.value.path == "relay.listen"
    assert "\n" not in str(caught.value)


async def test_a_foreign_address_is_a_setting_to_mend():
    with pytest.raises(ConfigError, match=r"192.0.2.1:5: .*use an address of this machine"):
        async with TcpStreams().listen(Endpoint("192.0.2.1", 5), echo):
            pass


async def test_an_impossible_port_is_a_link_error():
    with pytest.raises(LinkError, match=r"connecting to 127.0.0.1:99999: "):
        await TcpStreams().dial(Endpoint("127.0.0.1", 99999), timeout_s=10)


async def dial_until_it_fails(endpoint, stack):
    while True:
        stream = await TcpStreams().dial(endpoint, timeout_s=0.2)
        await stack.enter_async_context(stream)


async def test_a_listener_that_does_not_answer_is_a_timeout():
    with trio.socket.socket() as full:
        await full.bind(("127.0.0.1", 0))
        full.listen(0)
        endpoint = Endpoint("127.0.0.1", full.getsockname()[1])
        async with contextlib.AsyncExitStack() as stack:
            with pytest.raises(LinkError, match="no answer in 0"):
                await dial_until_it_fails(endpoint, stack)
