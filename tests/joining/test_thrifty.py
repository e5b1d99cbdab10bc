"""Nodes that relay little or nothing, in a network of others: all get everything all the same."""

import contextlib
import math

import pytest
import trio

from echo2p2p.net.connections import ConnectionSettings
from echo2p2p.net.link import LinkSettings
from echo2p2p.net.payloads import RelaySettings
from echo2p2p.net.relay import RelayNode
from echo2p2p.net.shaping import Limits, NoTrafficLog, Shaper
from echo2p2p.testing.clock import SimClock
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.relays import RelayNet, wait_whole
from echo2p2p.wire.messages import Reject

RATE = 1_000_000.0
PEERS = ("p0", "p1", "p2", "p3")
SIZE = 800_000


def limited(limits: Limits) -> type[RelayNode]:
    """Return the class of nodes whose owner has set limits."""

    class Limited(RelayNode):
        def __init__(self, **options) -> None:
            shaper = Shaper(limits, clock=SimClock(), log=NoTrafficLog(), journal=TraceJournal())
            link = LinkSettings(shaper=shaper)
            options["settings"] = RelaySettings(connections=ConnectionSettings(link=link))
            super().__init__(**options)

    return Limited


@contextlib.asynccontextmanager
async def mesh(kind: type[RelayNode] = RelayNode, others: type[RelayNode] = RelayNode):
    """Yield a network of a source and four peers, all linked, the first of them of ``kind``."""
    network = SimNetwork()
    for name in ("source", *PEERS):
        network.add_node(name, up_bytes_per_s=RATE, down_bytes_per_s=2 * RATE, latency_s=0.02)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run)
        relays = RelayNet(nursery, network.streams)
        for name in ("source", *PEERS):
            await relays.start(name, kind=kind if name == "p0" else others)
        relays.link_up()
        await relays.wait_linked()
        yield network, relays
        nursery.cancel_scope.cancel()


def sent(relays: RelayNet, name: str) -> int:
    return relays.members[name].node.statistics().relayed_bytes


async def test_a_peer_that_relays_nothing_takes_what_it_needs_and_holds_nobody_up(autojump_clock):
    async with mesh() as (_, relays):
        whole_s = await relays.broadcast(relays.keys.payload(1, SIZE))
        assert sent(relays, "p0") > 0.1 * SIZE
        before = sent(relays, "p0")
        relays.members["p0"].node.relaying = False
        thrifty_s = await relays.broadcast(relays.keys.payload(2, SIZE))
        assert sent(relays, "p0") == before
        assert thrifty_s < whole_s + 4.0, "what it was dealt, the source deals again"
        assert all(len(relays.members[name].node.statistics().links) == 4 for name in PEERS)
        relays.members["p0"].node.relaying = True
        await relays.broadcast(relays.keys.payload(3, SIZE))
        assert sent(relays, "p0") > before + 0.05 * SIZE, "and relays again"


async def test_a_source_that_knows_it_deals_to_the_others_and_loses_no_time(autojump_clock):
    async with mesh() as (_, relays):
        whole_s = await relays.broadcast(relays.keys.payload(1, SIZE))
        relays.members["p0"].node.relaying = False
        uplinks = {relays.peer_id(name): math.inf for name in PEERS}
        relays.source.node.set_uplinks({**uplinks, relays.peer_id("p0"): 0.0})
        redealt = relays.source.node.statistics().chunks_redealt
        seconds = await relays.broadcast(relays.keys.payload(2, SIZE))
        assert relays.source.node.statistics().chunks_redealt == redealt
        assert seconds < 2.5 * whole_s, "over three times as long where it is not told"


async def test_where_nobody_relays_the_source_gives_each_its_own_copy(autojump_clock):
    async with mesh() as (_, relays):
        for member in relays.peers:
            member.node.relaying = False
        untold_s = await relays.broadcast(relays.keys.payload(1, SIZE))
        relays.source.node.set_uplinks({relays.peer_id(name): 0.0 for name in PEERS})
        before = sent(relays, "source")
        seconds = await relays.broadcast(relays.keys.payload(2, SIZE))
        assert seconds < 0.8 * untold_s, "nobody is sent to others that will not serve it"
        assert sent(relays, "source") - before < 1.2 * len(PEERS) * SIZE


async def test_anchors_are_not_relayed_either_and_who_asks_is_told_at_once(autojump_clock):
    told = []

    class Noting(RelayNode):
        def receive_frame(self, peer_id, message) -> None:
            if isinstance(message, Reject):
                told.append((peer_id, message.reason))
            super().receive_frame(peer_id, message)

    async with mesh(others=Noting) as (_, relays):
        p0 = relays.members["p0"].node
        p0.relaying = False
        payload = relays.keys.payload(1, SIZE, anchor=True)
        p0.publish(payload.signed, payload.assembly, push=False)
        for member in relays.peers[1:]:
            member.node.follow(payload.signed, push=False)
        await relays.broadcast(payload, push=False)
        assert sent(relays, "p0") == 0
        assert (relays.peer_id("p0"), "busy") in told


@pytest.mark.parametrize("limit", [50_000.0, 300_000.0])
async def test_a_limited_node_stays_within_its_limit_on_all_links_and_all_get_everything(
    autojump_clock, limit
):
    async with mesh(limited(Limits(upload_bytes_per_s=limit))) as (network, relays):
        began_s, began_bytes = trio.current_time(), network.traffic("p0").sent_bytes
        for version in range(1, 4):
            await relays.broadcast(relays.keys.payload(version, SIZE))
        passed_s = trio.current_time() - began_s
        used = network.traffic("p0").sent_bytes - began_bytes
        assert used <= 1.05 * limit * (passed_s + 0.2)
        assert used > 0.2 * limit * passed_s, "it does its part"
        assert all(len(relays.members[name].node.statistics().links) == 4 for name in PEERS)


async def test_a_limited_download_is_a_slower_peer_and_nothing_worse(autojump_clock):
    limit = 200_000.0
    async with mesh(limited(Limits(download_bytes_per_s=limit))) as (network, relays):
        payload = relays.keys.payload(1, SIZE)
        began_s = trio.current_time()
        await relays.broadcast(payload, names=PEERS[1:])
        others_s = trio.current_time() - began_s
        await wait_whole(relays.members["p0"].node, payload.manifest_id)
        limited_s = trio.current_time() - began_s
        assert others_s < 4.0
        assert limited_s >= 0.95 * SIZE / limit
        assert limited_s < 2.0 * SIZE / limit
        assert network.traffic("p0").received_bytes < 1.3 * SIZE
