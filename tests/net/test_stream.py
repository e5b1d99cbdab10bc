import pytest
import trio
from trio.testing import lockstep_stream_pair, memory_stream_pair

from echo2p2p.errors import LinkError, RemoteProtocolError, Violation
from echo2p2p.ids import ManifestId
from echo2p2p.net.stream import SLICE_BYTES, FrameStream
from echo2p2p.wire.frames import ChunkPayload, Frame
from echo2p2p.wire.messages import Goodbye, Ping, Want

ID = ManifestId(bytes(16))


async def test_frames_and_chunks_arrive_whole_in_order_and_the_end_is_seen():
    left, right = map(FrameStream, memory_stream_pair())
    long = bytes(range(256)) * (3 * SLICE_BYTES // 256) + b"end"
    async with right:
        async with left:
            await left.send(Ping(nonce=1), Want(manifest_id=ID))
            await left.send_chunk(ID, 7, memoryview(long))
            await left.send_chunk(ID, 8, memoryview(b"x"))
            await left.send(Ping(nonce=2))
        assert [await right.receive() for _ in range(6)] == [
            Frame(Ping(nonce=1)),
            Frame(Want(manifest_id=ID)),
            ChunkPayload(ID, 7, memoryview(long)),
            ChunkPayload(ID, 8, memoryview(b"x")),
            Frame(Ping(nonce=2)),
            None,
        ]
        assert await right.receive() is None


async def test_a_remote_that_does_not_read_is_a_dead_link_after_the_timeout(autojump_clock):
    left, _right = lockstep_stream_pair()
    async with FrameStream(left, send_timeout_s=10) as stream:
        with pytest.raises(LinkError, match="took none of 19 bytes in 10 s"):
            await stream.send(Ping(nonce=1))
    assert trio.current_time() == 10


async def test_a_slow_reader_is_alive_as_long_as_it_takes_a_slice_in_time(autojump_clock):
    left, right = lockstep_stream_pair()
    async with FrameStream(left, send_timeout_s=10) as stream, trio.open_nursery() as nursery:
        start = trio.current_time()

        async def read_slowly():
            for _ in range(4):
                await trio.sleep(8)
                await right.receive_some(2 * SLICE_BYTES)

        nursery.start_soon(read_slowly)
        await stream.send_chunk(ID, 1, memoryview(bytes(4 * SLICE_BYTES)))
        assert trio.current_time() - start == 32
        assert stream.sent_s == trio.current_time()


async def test_a_broken_connection_is_a_link_error_either_way():
    left, right = memory_stream_pair()
    async with FrameStream(left) as stream:
        await right.aclose()
        with pytest.raises(LinkError, match="sending"):
            await stream.send(Ping(nonce=1))
    with pytest.raises(LinkError, match="receiving"):
        await stream.receive()


async def test_garbage_is_the_remotes_fault():
    left, right = memory_stream_pair()
    async with FrameStream(left) as stream:
        await right.send_all(b"\xff" * 9)
        with pytest.raises(RemoteProtocolError) as caught:
            await stream.receive()
        assert caught.value.violation is Violation.FRAME_TOO_LONG


async def test_a_frame_that_is_cut_off_is_nobodys_fault():
    left, right = memory_stream_pair()
    async with FrameStream(left) as stream:
        await right.send_all(b"\0")
        await right.aclose()
        with pytest.raises(LinkError, match="in the middle of a frame"):
            await stream.receive()


async def test_nothing_follows_a_write_that_was_cut_off(autojump_clock):
    left, right = lockstep_stream_pair()
    stream = FrameStream(left)
    with trio.move_on_after(1):
        await stream.send_chunk(ManifestId(bytes(16)), 1, memoryview(bytes(1000)))
    with pytest.raises(LinkError, match="cut off"):
        await stream.send(Goodbye(reason="replanned"))
    await trio.aclose_forcefully(right)


async def test_a_cancelled_receive_loses_nothing(autojump_clock):
    left, right = map(FrameStream, memory_stream_pair())
    async with left, right:
        with trio.move_on_after(1):
            await right.receive()
        await left.send(Ping(nonce=5))
        assert await right.receive() == Frame(Ping(nonce=5))
        assert right.heard_s == trio.current_time()
