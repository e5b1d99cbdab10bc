import contextlib
import itertools
import random

import pytest
import trio
import trio.testing

from echo2p2p.broadcast.overlay import Member as OverlayMember
from echo2p2p.broadcast.overlay import plan_overlay
from echo2p2p.errors import IntegrityError, LocalProtocolError, RemoteProtocolError
from echo2p2p.ids import SOURCE
from echo2p2p.net.connections import ConnectionSettings
from echo2p2p.net.payloads import BAD_SOURCES_MAX, OTHERS, RelaySettings
from echo2p2p.net.ports import Endpoint
from echo2p2p.net.redial import RedialSettings
from echo2p2p.net.relay import RelayNode
from echo2p2p.net.tcp import TcpStreams
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.relays import RelayNet, RunKeys, wait_whole
from echo2p2p.testing.streams import PassingStream
from echo2p2p.testing.system import MemoryState
from echo2p2p.weights.assembly import Assembly

RATE = 1_000_000.0
LATENCY_S = 0.02
PUSHED_S = 5.0


@contextlib.asynccontextmanager
async def relay_net(*peers, up=None, down=RATE, seed=0, **options):
    """Yield a network and its relays: a source and peers, started but not linked."""
    network = SimNetwork()
    for name in ("source", *peers):
        rate = (up or {}).get(name, RATE)
        network.add_node(name, up_bytes_per_s=rate, down_bytes_per_s=down, latency_s=LATENCY_S)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run)
        yield network, RelayNet(nursery, network.streams, seed=seed, **options)
        nursery.cancel_scope.cancel()


async def start_all(relays, *peers):
    for name in ("source", *peers):
        if name not in relays.members:
            await relays.start(name)
    relays.link_up()
    await relays.wait_linked()


def fluid_bound(size, peers, up=None, down=RATE):
    rates = [(up or {}).get(name, RATE) for name in peers]
    source = (up or {}).get("source", RATE)
    return max(size / source, size / down, len(peers) * size / (source + sum(rates)))


def duplicates(relays):
    statistics = [member.node.statistics() for member in relays.peers]
    received = sum(each.received_bytes for each in statistics)
    return sum(each.duplicate_bytes for each in statistics) / received


def names(count):
    return [f"p{i}" for i in range(count)]


# --- the figures of merit -----------------------------------------------------------------------


@pytest.mark.parametrize(("count", "size"), [(1, 1_000_000), (3, 3_000_000), (8, 2_500_000)])
async def test_a_delta_leaves_the_source_once_and_reaches_all_near_the_fluid_bound(
    autojump_clock, count, size
):
    peers = names(count)
    async with relay_net(*peers) as (_, relays):
        await start_all(relays, *peers)
        payload = relays.keys.payload(1, size)
        seconds = await relays.broadcast(payload)
        assert relays.source.node.statistics().relayed_bytes <= 1.1 * payload.size
        assert duplicates(relays) <= 0.03
        assert seconds <= 1.6 * fluid_bound(payload.size, peers)
        if count > 1:
            relayed = [member.node.statistics().relayed_bytes for member in relays.peers]
            assert min(relayed) > 0.6 * max(relayed)


async def test_an_anchor_is_pulled_from_source_and_peers(autojump_clock):
    peers = names(4)
    async with relay_net(*peers) as (_, relays):
        await start_all(relays, *peers)
        payload = relays.keys.payload(1, 2_000_000, anchor=True)
        seconds = await relays.broadcast(payload, push=False)
        assert relays.source.node.statistics().relayed_bytes <= 1.1 * payload.size
        assert duplicates(relays) <= 0.03
        assert seconds <= 1.6 * fluid_bound(payload.size, peers)


async def test_a_slow_relay_holds_the_others_up_only_a_little(autojump_clock):
    peers = names(3)
    up = {"p2": 0.1 * RATE}
    async with relay_net(*peers, up=up, down=2 * RATE) as (_, relays):
        await start_all(relays, *peers)
        payload = relays.keys.payload(1, 4_000_000)
        seconds = await relays.broadcast(payload)
        assert seconds <= 1.6 * fluid_bound(payload.size, peers, up, 2 * RATE)
        shares = {m.name: m.node.statistics().relayed_bytes for m in relays.peers}
        assert shares["p2"] < 0.3 * shares["p0"]


async def test_a_fast_source_helps_slow_relays(autojump_clock):
    peers = names(4)
    up = {"source": 4 * RATE} | dict.fromkeys(peers, 0.25 * RATE)
    async with relay_net(*peers, up=up, down=4 * RATE) as (_, relays):
        await start_all(relays, *peers)
        payload = relays.keys.payload(1, 8_000_000, chunk_bytes=32 * 1024)
        seconds = await relays.broadcast(payload)
        without = fluid_bound(payload.size, peers, up | {"source": RATE}, 4 * RATE)
        assert seconds < without
        assert relays.source.node.statistics().relayed_bytes > 1.5 * payload.size


@pytest.mark.slow
def test_beyond_a_mesh_the_source_still_sends_about_once():
    async def run():
        peers = names(18)
        async with relay_net(*peers) as (_, relays):
            for name in ("source", *peers):
                await relays.start(name)
            overlay = plan_overlay(
                [OverlayMember(relays.peer_id(name), 1.0) for name in peers], rng=random.Random(0)
            )
            relays.link_up(overlay)
            await relays.wait_linked(sum(map(len, overlay.values())) // 2 + len(peers))
            payload = relays.keys.payload(1, 800_000)
            seconds = await relays.broadcast(payload)
            # So small a payload is mostly start and end; the source's share is what matters here.
            assert relays.source.node.statistics().relayed_bytes <= 1.3 * payload.size
            assert duplicates(relays) <= 0.05
            assert seconds <= 2.5 * fluid_bound(payload.size, peers)

    run_virtual(run, seed=1)


# --- failures -----------------------------------------------------------------------------------


async def test_the_others_complete_when_a_relay_crashes_in_the_middle(autojump_clock):
    peers = names(4)
    async with relay_net(*peers) as (network, relays):
        await start_all(relays, *peers)
        payload = relays.keys.payload(1, 3_000_000)

        async def crash():
            await trio.sleep(1.5)
            assert not relays.members["p1"].node.assembly(payload.manifest_id).complete
            network.crash("p1")
            relays.stop("p1")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(crash)
            seconds = await relays.broadcast(payload, names=["p0", "p2", "p3"])
        assert seconds <= 2 * fluid_bound(payload.size, peers)
        assert relays.source.node.statistics().relayed_bytes <= 1.4 * payload.size


class SilentNode(RelayNode):
    """Takes and announces everything, answers pings, and never sends a chunk."""

    def read_chunk(self, manifest_id, index):
        return None


async def test_the_others_complete_though_a_relay_sends_nothing(autojump_clock):
    peers = names(4)
    async with relay_net(*peers) as (_, relays):
        await relays.start("p1", kind=SilentNode)
        await start_all(relays, *peers)
        payload = relays.keys.payload(1, 3_000_000)
        seconds = await relays.broadcast(payload)
        assert seconds <= 2.5 * fluid_bound(payload.size, peers)
        assert relays.members["p1"].node.statistics().relayed_bytes == 0


class TamperingStreams:
    """A `Streams` port that turns over one bit in each long write."""

    def __init__(self, inner):
        self.inner = inner

    async def dial(self, endpoint, *, timeout_s):
        return TamperingStream(await self.inner.dial(endpoint, timeout_s=timeout_s))

    def listen(self, endpoint, accept):
        return self.inner.listen(
            endpoint, lambda stream, host: accept(TamperingStream(stream), host)
        )


class TamperingStream(PassingStream):
    async def send_all(self, data):
        data = bytearray(data)
        if len(data) > 10_000:
            data[len(data) // 2] ^= 0x40
        await self.inner.send_all(data)


async def test_a_relay_that_corrupts_chunks_is_cut_off_and_hurts_nobody(autojump_clock):
    peers = names(4)
    async with relay_net(*peers) as (network, relays):
        await relays.start("p1", streams=TamperingStreams(network.streams("p1")))
        await start_all(relays, *peers)
        liar = relays.peer_id("p1")
        payload = relays.keys.payload(1, 2_000_000)
        seconds = await relays.broadcast(payload, names=["p0", "p2", "p3"])
        assert seconds <= 3 * fluid_bound(payload.size, peers)
        victims = [relays.members[name] for name in ("p0", "p2", "p3")]
        caught = [member for member in victims if member.node.statistics().bad_chunks]
        assert caught
        for member in caught:
            assert set(member.node.statistics().bad_chunks) == {liar}
            assert liar not in {link.peer_id for link in member.node.statistics().links}
            # More than one where a second connection was being opened meanwhile.
            told = [
                (e.fields["peer"], e.fields["violation"])
                for e in member.journal.named("link.violated")
            ]
            assert set(told) == {(liar, "malformed")}
        await trio.sleep(60)
        for member in caught:
            links = {link.peer_id for link in member.node.statistics().links}
            assert liar not in links, "quarantined"
            assert SOURCE in links


async def test_who_closes_or_dies_in_the_middle_of_a_chunk_has_broken_nothing(autojump_clock):
    async with relay_net("p0", "p1") as (network, relays):
        await start_all(relays, "p0", "p1")
        payload = relays.keys.payload(1, 3_000_000)
        relays.source.node.publish(payload.signed, payload.assembly, push=True)
        await trio.sleep(0.5)
        link = relays.source.node._connections.link(relays.peer_id("p0"))
        assert link is not None
        link.close("replanned")
        await trio.sleep(0.5)
        network.crash("p1")
        await trio.sleep(1)
        for member in relays.members.values():
            assert member.journal.named("link.violated") == []
        told = [e.fields["detail"] for e in relays.members["p0"].journal.named("link.closed")]
        assert any("in the middle of a frame" in detail for detail in told)


async def test_liars_beyond_a_number_are_counted_together(autojump_clock):
    async with relay_net("p0") as (_, relays):
        node = (await relays.start("p0")).node
        key = relays.keys.payload(1, 1000).manifest_id
        for number in range(2 * BAD_SOURCES_MAX):
            node._blame(f"liar {number}", key, "wrong")
        counted = node.statistics().bad_chunks
        assert len(counted) == BAD_SOURCES_MAX + 1
        assert counted[OTHERS] == BAD_SOURCES_MAX


async def test_a_manifest_that_the_run_did_not_sign_costs_the_link(autojump_clock):
    async with relay_net("p0", "p1") as (_, relays):
        await start_all(relays, "p0", "p1")
        forged = RunKeys(seed=99).payload(1, 100_000)
        relays.members["p1"].node.publish(forged.signed, forged.assembly, push=True)
        await trio.sleep(1)
        victim = relays.members["p0"]
        assert victim.node.assembly(forged.manifest_id) is None
        (violated,) = victim.journal.named("link.violated")
        assert violated.fields == {
            "peer": relays.peer_id("p1"),
            "violation": "bad_signature",
        }
        links = {link.peer_id for link in victim.node.statistics().links}
        assert links == {SOURCE}


async def test_a_cut_link_comes_back_and_only_what_is_missing_is_sent(autojump_clock):
    async with relay_net("p0") as (network, relays):
        await start_all(relays, "p0")
        payload = relays.keys.payload(1, 2_000_000)

        async def cut():
            await trio.sleep(1)
            network.cut("source", "p0")
            network.cut("p0", "source")
            await trio.sleep(10)
            assert relays.source.node.statistics().links == ()
            network.heal("source", "p0")
            network.heal("p0", "source")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut)
            seconds = await relays.broadcast(payload)
        assert 11 < seconds < 30
        sent = relays.source.node.statistics().relayed_bytes
        assert sent <= payload.size + 400_000, "what was on its way, and no more"


async def test_a_restarted_peer_replaces_its_old_link(autojump_clock):
    async with relay_net("p0", "p1") as (network, relays):
        await start_all(relays, "p0", "p1")
        network.cut("p0", "source")
        network.cut("source", "p0")
        relays.stop("p0")
        network.heal("p0", "source")
        network.heal("source", "p0")
        payload = relays.keys.payload(1, 200_000)
        await relays.start("p0", incarnation=2)
        relays.link_up()
        await relays.wait_linked()
        assert await relays.broadcast(payload) < 5


# --- joining, following, forgetting -------------------------------------------------------------


async def test_a_late_joiner_gets_anchor_and_deltas_from_peers(autojump_clock):
    async with relay_net("p0", "p1", "late") as (_, relays):
        await start_all(relays, "p0", "p1")
        chain = [
            (relays.keys.payload(0, 1_000_000, anchor=True), False),
            (relays.keys.payload(1, 300_000), True),
            (relays.keys.payload(2, 300_000), True),
        ]
        for payload, push in chain:
            await relays.broadcast(payload, push=push)
        await trio.sleep(5)
        before = relays.source.node.statistics().relayed_bytes
        late = await relays.start("late", wants=lambda header: False)
        relays.link_up()
        await relays.wait_linked()
        start = trio.current_time()
        for payload, push in chain:
            late.node.follow(payload.signed, push=push)
        for payload, _ in chain:
            assembly = await wait_whole(late.node, payload.manifest_id)
            assert assembly.payload() == payload.assembly.payload()
        size = sum(payload.size for payload, _ in chain)
        assert trio.current_time() - start <= 2 * size / RATE
        assert relays.source.node.statistics().relayed_bytes - before <= 0.1 * size
        assert late.node.holds() == [payload.manifest_id for payload, _ in chain]


@pytest.mark.parametrize("count", [1, 3])
async def test_who_follows_a_delta_late_waits_for_no_push(autojump_clock, count):
    async with relay_net(*names(count), "late") as (_, relays):
        late = await relays.start("late", wants=lambda header: False)
        await start_all(relays, *names(count))
        payload = relays.keys.payload(1, 8000)
        await relays.broadcast(payload, names=names(count))
        await trio.sleep(PUSHED_S)
        before, start = relays.source.node.statistics().relayed_bytes, trio.current_time()
        late.node.follow(payload.signed, push=True)
        await wait_whole(late.node, payload.manifest_id)
        # announced, the grace of an overlay and up to a tick, chunk 0, chunk 1
        trips_s, grace_s = 3 * 4 * LATENCY_S, 0.05 + 0.0625
        assert trio.current_time() - start < trips_s + grace_s + 0.05
        assert relays.source.node.statistics().relayed_bytes == before, "peers have it too"


@pytest.mark.parametrize("count", [3, 8])
async def test_a_delta_of_one_chunk_is_pushed_to_all_and_nobody_asks_for_it(autojump_clock, count):
    async with relay_net(*names(count)) as (_, relays):
        await start_all(relays, *names(count))
        for version in range(1, 4):
            payload = relays.keys.payload(version, 8000)
            await relays.broadcast(payload)
        await trio.sleep(5)
        sent = relays.source.node.statistics().relayed_bytes
        assert sent == 3 * (8000 + count * payload.assembly.header.index_bytes)
        assert duplicates(relays) == 0
        asked = [peer.node._swarm.statistics().chunks_requested for peer in relays.peers]
        assert asked == [0] * count


async def test_peers_that_cannot_be_dialled_are_served_and_relay(autojump_clock):
    def listen(name):
        return None if name in ("nat0", "nat1") else Endpoint(name, 0)

    async with relay_net("nat0", "nat1", "open", listen=listen) as (_, relays):
        for name in ("source", "nat0", "nat1", "open"):
            await relays.start(name)
        relays.link_up()
        await relays.wait_linked(5)
        await trio.sleep(1)
        payload = relays.keys.payload(1, 1_000_000)
        seconds = await relays.broadcast(payload)
        assert seconds <= 1.7 * payload.size / RATE
        links = {link.peer_id for link in relays.members["nat0"].node.statistics().links}
        assert links == {SOURCE, relays.peer_id("open")}
        assert relays.members["nat0"].node.statistics().relayed_bytes > 0.1 * payload.size


async def test_what_is_not_wanted_is_neither_fetched_nor_passed_on(autojump_clock):
    async with relay_net("p0", "p1") as (_, relays):
        await relays.start("p1", wants=lambda header: header.version != 1)
        await start_all(relays, "p0", "p1")
        payload = relays.keys.payload(1, 300_000)
        await relays.broadcast(payload, names=["p0"])
        statistics = relays.members["p1"].node.statistics()
        assert (statistics.received_bytes, statistics.relayed_bytes) == (0, 0)
        assert relays.members["p1"].node.assembly(payload.manifest_id) is None
        await relays.broadcast(relays.keys.payload(2, 100_000))


async def test_who_leaves_out_a_delta_after_another_declines_it_and_takes_the_next(autojump_clock):
    async with relay_net("p0", "p1", "p2") as (_, relays):
        await relays.start("p1", wants=lambda header: header.version != 2)
        await start_all(relays, "p0", "p1", "p2")
        await relays.broadcast(relays.keys.payload(1, 300_000))
        second = relays.keys.payload(2, 900_000)
        took_s = await relays.broadcast(second, names=["p0", "p2"])
        statistics = relays.members["p1"].node.statistics()
        assert 0 < statistics.unknown_bytes < 0.25 * second.size, "what was under way, and no more"
        assert took_s < 2.5 * second.size / RATE, "what it was dealt went to others at once"
        await relays.broadcast(relays.keys.payload(3, 300_000))


async def test_a_forgotten_payload_is_gone_and_can_be_followed_again(autojump_clock):
    async with relay_net("p0", "p1") as (_, relays):
        await start_all(relays, "p0", "p1")
        payload = relays.keys.payload(1, 300_000)
        await relays.broadcast(payload)
        node = relays.members["p0"].node
        node.forget(payload.manifest_id)
        node.forget(payload.manifest_id)
        assert node.holds() == []
        with pytest.raises(LocalProtocolError):
            await wait_whole(node, payload.manifest_id)
        await trio.sleep(1)
        assert node.follow(payload.signed, push=True) == payload.manifest_id
        assert node.follow(payload.signed, push=True) == payload.manifest_id
        with trio.fail_after(10):
            await wait_whole(node, payload.manifest_id)


async def test_only_the_source_can_say_that_a_payload_is_gone(autojump_clock):
    async with relay_net("p0", "p1") as (_, relays):
        await start_all(relays, "p0", "p1")
        source, (one, other) = relays.source.node, (member.node for member in relays.peers)
        payload = relays.keys.payload(1, 3_000_000, anchor=True)
        source.publish(payload.signed, payload.assembly, push=False)
        for node in (one, other):
            node.follow(payload.signed, push=False)
        await trio.sleep(2)
        other.forget(payload.manifest_id)
        await trio.sleep(1)
        assert not one.refused(payload.manifest_id)
        source.forget(payload.manifest_id)
        await trio.sleep(1)
        assert one.refused(payload.manifest_id)
        assert not one.assembly(payload.manifest_id).complete
        assert not one.refused(relays.keys.payload(2, 1000).manifest_id), "it is not followed"


async def test_waiting_for_a_payload_that_is_forgotten_meanwhile_raises(autojump_clock):
    async with relay_net("p0") as (_, relays):
        await start_all(relays, "p0")
        node = relays.members["p0"].node
        key = node.follow(relays.keys.payload(7, 1000).signed, push=True)
        with pytest.RaisesGroup(LocalProtocolError):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_whole, node, key)
                await trio.sleep(1)
                node.forget(key)


async def test_chunks_may_come_by_another_way_and_are_verified_too(autojump_clock):
    async with relay_net("p0", "p1") as (_, relays):
        await start_all(relays, "p0", "p1")
        payload = relays.keys.payload(1, 50_000)
        node = relays.members["p0"].node
        key = node.follow(payload.signed, push=False)
        with pytest.raises(IntegrityError) as caught:
            node.accept_chunk(key, 0, b"wrong", "http")
        assert caught.value.source == "http"
        for index in range(payload.assembly.count):
            node.accept_chunk(key, index, payload.assembly.chunk(index), "http")
        assert node.holds() == [key]
        with trio.fail_after(10):
            other = relays.members["p1"].node
            other.follow(payload.signed, push=False)
            await wait_whole(other, key)
        assert relays.source.node.statistics().relayed_bytes == 0


async def test_a_peer_that_builds_a_payload_itself_serves_it(autojump_clock):
    async with relay_net("p0", "p1") as (_, relays):
        await start_all(relays, "p0", "p1")
        payload = relays.keys.payload(1, 200_000, anchor=True)
        ours, theirs = relays.members["p0"].node, relays.members["p1"].node
        ours.follow(payload.signed, push=False)
        theirs.follow(payload.signed, push=False)
        await trio.sleep(3)
        assert ours.holds() == []
        whole = Assembly.whole(
            payload.assembly.header, payload.assembly.payload(), payload.assembly.chunk(0)
        )
        ours.publish(payload.signed, whole, push=False)
        with trio.fail_after(10):
            await wait_whole(ours, payload.manifest_id)
            await wait_whole(theirs, payload.manifest_id)


async def test_a_manifest_of_another_run_cannot_be_followed(autojump_clock):
    async with relay_net("p0") as (_, relays):
        await relays.start("source")
        node = (await relays.start("p0")).node
        with pytest.raises(RemoteProtocolError):
            node.follow(RunKeys(seed=5).payload(1, 1000).signed, push=True)


async def test_a_changed_plan_closes_old_links_and_opens_new_ones(autojump_clock):
    async with relay_net("p0", "p1", "p2") as (_, relays):
        await start_all(relays, "p0", "p1", "p2")
        ids = {name: relays.peer_id(name) for name in names(3)}
        alone = {ids["p0"]: [ids["p1"]], ids["p1"]: [ids["p0"]], ids["p2"]: []}
        relays.link_up(alone)
        await trio.sleep(5)
        links = {
            name: {link.peer_id for link in relays.members[name].node.statistics().links}
            for name in names(3)
        }
        assert links == {"p0": {SOURCE, ids["p1"]}, "p1": {SOURCE, ids["p0"]}, "p2": {SOURCE}}
        relays.link_up()
        await relays.wait_linked()


async def test_a_neighbour_that_is_away_is_dialled_ever_more_rarely(autojump_clock):
    redial = RedialSettings(first_s=1.0, longest_s=16.0)
    settings = RelaySettings(connections=ConnectionSettings(redial=redial))
    async with relay_net("p0", settings=settings) as (network, relays):
        await start_all(relays, "p0")
        network.crash("source")
        relays.stop("source")
        await trio.sleep(200)
        failed = relays.members["p0"].journal.named("dial.retried")
        gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(failed)]
        assert 12 <= len(failed) <= 30
        assert all(8 <= gap <= 17 for gap in gaps[6:])


def test_two_runs_of_one_seed_are_the_same_run():
    async def run():
        async with relay_net("p0", "p1", "p2") as (_, relays):
            await start_all(relays, "p0", "p1", "p2")
            seconds = await relays.broadcast(relays.keys.payload(1, 500_000))
            return seconds, [member.journal.digest() for member in relays.peers]

    assert run_virtual(run, seed=3) == run_virtual(run, seed=3)


# --- real sockets -------------------------------------------------------------------------------


@pytest.mark.slow
async def test_three_nodes_on_real_sockets():
    streams = TcpStreams()
    async with trio.open_nursery() as nursery:
        relays = RelayNet(
            nursery, lambda name: streams, listen=lambda name: Endpoint("127.0.0.1", 0)
        )
        with trio.fail_after(60):
            await start_all(relays, "p0", "p1")
            payload = relays.keys.payload(1, 8_000_000, chunk_bytes=64 * 1024)
            await relays.broadcast(payload)
            anchor = relays.keys.payload(2, 8_000_000, chunk_bytes=1024 * 1024, anchor=True)
            await relays.broadcast(anchor, push=False)
        assert relays.source.node.statistics().relayed_bytes <= 1.2 * (payload.size + anchor.size)
        nursery.cancel_scope.cancel()


# --- memory, and what is wanted of us -----------------------------------------------------------


async def test_a_payload_lies_in_the_memory_that_is_made_for_it_until_it_is_forgotten(
    autojump_clock,
):
    blocks = {}

    def make(_, header):
        memory = blocks.setdefault(header.version, MemoryState(header.payload_bytes))
        return Assembly(header, memory.view), memory

    async with relay_net("p0") as (_, relays):
        member = await relays.start("p0", begin=make)
        await start_all(relays, "p0")
        payload = relays.keys.payload(1, 300_000)
        await relays.broadcast(payload)
        assert blocks[1].view == payload.assembly.payload()
        member.node.forget(payload.manifest_id)
        with pytest.raises(LocalProtocolError, match="closed"):
            blocks[1].view  # noqa: B018 - closed blocks say so
        assert member.node.assembly(payload.manifest_id) is None


async def test_who_waits_for_growth_is_woken_by_each_chunk_and_by_the_end(autojump_clock):
    async with relay_net("p0") as (_, relays):
        await start_all(relays, "p0")
        payload = relays.keys.payload(1, 300_000)
        node, grown = relays.peers[0].node, []
        node.follow(payload.signed, push=True)

        async def watch():
            assembly = node.assembly(payload.manifest_id)
            while not assembly.complete:
                await node.wait_grown(payload.manifest_id)
                grown.append(assembly.ready_bytes)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await relays.broadcast(payload)
        assert len(grown) == payload.assembly.count
        assert grown == sorted(grown)
        await node.wait_grown(payload.manifest_id)  # complete: at once
        node.follow(relays.keys.payload(2, 1000).signed, push=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.wait_grown, relays.keys.payload(2, 1000).manifest_id)
            await trio.testing.wait_all_tasks_blocked()
            node.forget(relays.keys.payload(2, 1000).manifest_id)


@pytest.mark.parametrize("relaying", [True, False])
async def test_an_anchor_that_was_let_pass_is_asked_for_by_peers_and_not_by_the_source(
    autojump_clock, relaying
):
    asked = []
    async with relay_net("p0", "p1", "p2") as (_, relays):
        member = await relays.start(
            "p0", wants=lambda _: False, asked=lambda *item: asked.append(item)
        )
        member.node.relaying = relaying
        await relays.start("p1", wants=lambda _: False)
        await start_all(relays, "p0", "p1")
        anchor, delta = relays.keys.payload(1, 50_000, anchor=True), relays.keys.payload(2, 50_000)
        for payload in (anchor, delta):
            relays.source.node.publish(payload.signed, payload.assembly, push=False)
        await trio.sleep(5.0)
        assert asked == [], "the source wants to know who has it, and p1 does not want it"
        await relays.start("p2")
        relays.link_up()
        await relays.wait_linked()
        await trio.sleep(5.0)
        assert asked == [(anchor.signed, anchor.assembly.header)] * relaying
