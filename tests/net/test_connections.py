import trio

from echo2p2p.net.link import open_link
from echo2p2p.net.ports import Endpoint
from echo2p2p.net.tcp import TcpStreams
from echo2p2p.testing.relays import RUN_ID, RelayNet
from echo2p2p.wire.frames import encode_frame
from echo2p2p.wire.handshake import NONCE_BYTES, Self
from echo2p2p.wire.messages import Want


class Gluing:
    """A stream whose sends from the second on, of the handshake's proof, come out at once."""

    def __init__(self, inner, behind):
        self.inner = inner
        self.behind = behind
        self.sent = 0

    async def send_all(self, data):
        self.sent += 1
        await self.inner.send_all(data + self.behind if self.sent == 2 else data)

    async def wait_send_all_might_not_block(self):
        await self.inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes=None):
        return await self.inner.receive_some(max_bytes)

    async def aclose(self):
        await self.inner.aclose()


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
