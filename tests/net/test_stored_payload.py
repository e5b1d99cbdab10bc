"""A payload that is served from the disk, and a disk that fails meanwhile."""

import os

import pytest
import trio

from echo2p2p.errors import StoreError
from echo2p2p.net.blobs import FileBlobs
from echo2p2p.testing.network import SimNetwork
from echo2p2p.testing.relays import RelayNet, wait_whole
from echo2p2p.weights.assembly import Assembly

SIZE = 500_000


async def serve_from_disk(folder, *, meanwhile) -> None:
    """Let a source serve a payload to one peer from ``folder``."""
    network = SimNetwork()
    for name in ("source", "p0"):
        network.add_node(name, up_bytes_per_s=1e6, down_bytes_per_s=1e6)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.run)
        relays = RelayNet(nursery, network.streams)
        await relays.start("source")
        peer = await relays.start("p0")
        relays.link_up()
        await relays.wait_linked()
        payload = relays.keys.payload(1, SIZE)
        blobs = FileBlobs(folder)
        await blobs.put("payload", payload.assembly.payload())
        header, stored = payload.assembly.header, await blobs.find("payload")
        on_disk = Assembly.stored(header, stored)
        assert on_disk.payload() == payload.assembly.payload()
        assert [bytes(on_disk.chunk(i)) for i in range(on_disk.count)] == [
            bytes(payload.assembly.chunk(i)) for i in range(on_disk.count)
        ]
        relays.source.node.publish(payload.signed, on_disk, push=True)
        meanwhile(folder / "payload")
        peer.node.follow(payload.signed, push=True)
        whole = await wait_whole(peer.node, payload.manifest_id)
        assert whole.payload() == payload.assembly.payload()
        nursery.cancel_scope.cancel()


async def test_it_reaches_a_peer_whole(tmp_path):
    with trio.fail_after(10):
        await serve_from_disk(tmp_path, meanwhile=lambda _: None)


async def test_a_file_cut_under_us_ends_the_node_with_a_word(tmp_path):
    """Under a mapping this would be SIGBUS, which ends the process without any."""
    wanted = pytest.RaisesExc(StoreError, match="payload: it was cut short: start again")
    with trio.fail_after(10), pytest.RaisesGroup(wanted, flatten_subgroups=True):
        await serve_from_disk(tmp_path, meanwhile=lambda path: os.truncate(path, SIZE // 2))


async def test_a_file_that_is_gone_does_so_too(tmp_path):
    wanted = pytest.RaisesExc(StoreError, match="cannot read .*payload")
    with trio.fail_after(10), pytest.RaisesGroup(wanted, flatten_subgroups=True):
        await serve_from_disk(tmp_path, meanwhile=os.remove)
