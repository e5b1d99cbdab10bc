"""Strangers that open connections to a relay and say nothing."""

import contextlib

import pytest
import trio

from echo2p2p.net.ports import Endpoint
from echo2p2p.net.tls_streams import TlsStreams
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.relays import RelayNet, RunKeys

HANDSHAKES_MAX = 64
HANDSHAKE_S = 10.0


@contextlib.asynccontextmanager
async def source_and(*machines, tls=False):
    """Yield a network with a relay of the source; ``tls`` is for its members, not for others."""
    network = SimNetwork()
    for name in ("source", "p0", *machines):
        network.add_node(name, latency_s=0.05)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run)
        keys = RunKeys()

        def streams(name):
            plain = network.streams(name)
            return TlsStreams(plain, keys.leaf(name)) if tls else plain

        relays = RelayNet(nursery, streams)
        await relays.start("source")
        yield network, relays, nursery
        nursery.cancel_scope.cancel()


async def be_silent(network, machine, address, *, gone=None):
    """Open a connection, and read until the other side has had enough."""
    there = Endpoint(address.host, address.port)
    stream = await network.streams(machine).dial(there, timeout_s=5)
    async with stream:
        with contextlib.suppress(trio.BrokenResourceError):
            while await stream.receive_some():
                pass
    if gone is not None:
        gone.append(trio.current_time())


async def linked_in_s(relays):
    await relays.start("p0")
    began_s = trio.current_time()
    relays.link_up()
    with trio.move_on_after(60):
        await relays.wait_linked()
    return trio.current_time() - began_s


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("machines", [["x"], [f"x{i}" for i in range(HANDSHAKES_MAX)], ["p0"]])
async def test_they_keep_no_member_out_wherever_they_come_from(autojump_clock, machines, tls):
    others = [name for name in machines if name != "p0"]
    async with source_and(*others, tls=tls) as (network, relays, nursery):
        address, gone = relays.source.address, []
        for index in range(HANDSHAKES_MAX):
            machine = machines[index % len(machines)]
            nursery.start_soon(lambda m: be_silent(network, m, address, gone=gone), machine)
        await trio.sleep(1)
        assert not gone
        assert await linked_in_s(relays) < 1
        assert len(gone) == 1, "one place was needed"
        refused = relays.source.journal.named("link.refused")
        assert [entry.fields["detail"] for entry in refused] == ["gave way to newer connections"]
        await trio.sleep(HANDSHAKE_S)
        assert len(gone) == HANDSHAKES_MAX, "the rest ran out of time"


@pytest.mark.parametrize("tls", [False, True])
async def test_a_flood_from_one_address_takes_no_place_from_others(autojump_clock, tls):
    async with source_and("x", tls=tls) as (network, relays, nursery):
        address = relays.source.address

        async def flood():
            while True:  # 64 places would go round in 128 ms, and a handshake takes 200
                nursery.start_soon(be_silent, network, "x", address)
                await trio.sleep(0.002)

        nursery.start_soon(flood)
        await trio.sleep(0.2)
        assert await linked_in_s(relays) < 1
