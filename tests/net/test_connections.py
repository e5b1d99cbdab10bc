import contextlib

import trio

from echo2p2p.net.link import open_link
from echo2p2p.net.ports import Endpoint
from echo2p2p.net.tcp import TcpStreams
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.relays import RUN_ID, RelayNet
from echo2p2p.testing.streams import PassingStream
from echo2p2p.wire.frames import encode_frame
from echo2p2p.wire.handshake import NONCE_BYTES, Self
from echo2p2p.wire.messages import Neighbour, Want


class Gluing(PassingStream):
    """A stream whose sends from the second on, of the handshake's proof, come out at once."""

    def __init__(self, inner, behind):
        super().__init__(inner)
        self.behind = behind
        self.sent = 0

    async def send_all(self, data):
        self.sent += 1
        await self.inner.send_all(data + self.behind if self.sent == 2 else data)


async def a_moment():
    await trio.sleep(0.01)


async def test_what_comes_right_behind_a_refused_handshake_is_not_heard():
    """It is read in one piece with the proof, and was fed to a core that knew of no such link."""
    async with trio.open_nursery() as nursery:
        net = RelayNet(nursery, lambda _: TcpStreams(), listen=lambda _: Endpoint("127.0.0.1", 0))
        source = await net.start("source")
        payload = net.keys.payload(1, 100_000)
        source.node.publish(payload.signed, payload.assembly, push=True)
        peer_id, key = net.keys.identity("p0")
        me = Self(peer_id, RUN_ID, net.keys.run_public_key, net.keys.card("p0"), key.sign)
        want = encode_frame(Want(manifest_id=payload.manifest_id))

        async def connect(behind, links):
            where = Endpoint(source.address.host, source.address.port)
            stream = Gluing(await TcpStreams().dial(where, timeout_s=5), behind)
            link = await open_link(
                stream, me, nonce=bytes(NONCE_BYTES), expected=net.peer_id("source")
            )
            assert link.peer.peer_id == net.peer_id("source")
            with trio.move_on_after(5):
                while await stream.receive_some(65_536):
                    pass
            await stream.aclose()
            with trio.fail_after(5):
                while len(source.journal.named("link.closed")) < links:
                    await a_moment()

        await connect(b"\xff" * 64, 1)
        assert source.journal.named("link.violated")
        await connect(want, 2)
        closed = [event.fields["detail"] for event in source.journal.named("link.closed")]
        assert closed[-1] == "quarantined"
        assert source.node.statistics().links == ()
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def linked():
    """Yield three nodes in virtual time, all linked, and what plans one of them."""
    network = SimNetwork()
    for name in ("source", "p0", "p1"):
        network.add_node(name, up_bytes_per_s=1e6, down_bytes_per_s=1e6, latency_s=0.01)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run)
        net = RelayNet(nursery, network.streams)
        for name in ("source", "p0", "p1"):
            await net.start(name)
        net.link_up()
        await net.wait_linked()

        def plan(name, *others):
            known = [
                Neighbour(peer_id=net.peer_id(one), address=net.members[one].address)
                for one in others
            ]
            net.members[name].node.set_neighbours(known, net.source.address, peers=2)

        yield net, plan
        nursery.cancel_scope.cancel()


def links_of(net, name):
    return {link.peer_id for link in net.members[name].node.statistics().links}


def dialler_first(net):
    """Return both peers' names, the one that dials the other first."""
    return sorted(("p0", "p1"), key=net.peer_id)


async def test_who_left_or_was_evicted_is_refused_until_it_is_planned_again(autojump_clock):
    async with linked() as (net, plan):
        gone, other = dialler_first(net)
        assert net.peer_id(gone) in links_of(net, other)
        plan(other, "source")
        await trio.sleep(20)
        assert net.peer_id(gone) not in links_of(net, other), "it dials, with a good card"
        journal = net.members[other].journal
        told = [event.fields["detail"] for event in journal.named("link.closed")]
        assert told.count("no link is planned") > 3
        assert journal.named("link.violated") == []
        assert net.peer_id("source") in links_of(net, other)
        plan(other, "source", gone)
        await trio.sleep(40)
        assert net.peer_id(gone) in links_of(net, other)


async def test_the_source_too_refuses_who_is_no_member_any_more(autojump_clock):
    async with linked() as (net, _):
        members = [net.peer_id("p0"), net.peer_id("p1")]
        net.source.node.set_uplinks(dict.fromkeys(members, 1e6))
        await trio.sleep(5)
        assert links_of(net, "source") == set(members)
        net.source.node.set_uplinks({members[0]: 1e6})
        await trio.sleep(60)
        assert links_of(net, "source") == {members[0]}


async def test_another_life_of_who_was_evicted_is_welcome_before_the_plan_says_so(autojump_clock):
    async with linked() as (net, plan):
        gone, other = dialler_first(net)
        plan(other, "source")
        net.stop(gone)
        await trio.sleep(10)
        assert net.peer_id(gone) not in links_of(net, other)
        await net.start(gone, incarnation=2)
        plan(gone, "source", other)
        await trio.sleep(5)
        assert net.peer_id(gone) in links_of(net, other)
