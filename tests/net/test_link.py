import contextlib
import itertools
import math
from dataclasses import replace

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from trio.testing import memory_stream_pair

from echo2p2p.errors import LinkError, RemoteProtocolError, Violation
from echo2p2p.ids import SOURCE, ManifestId
from echo2p2p.net.departure import POLL_MAX_S, DepartingStream, Departures
from echo2p2p.net.link import WATCH_EVERY_S, LinkSettings, open_link, watch_links
from echo2p2p.net.stream import FrameStream
from echo2p2p.testing.relays import RUN_ID, RunKeys
from echo2p2p.wire.arrays import from_tokens
from echo2p2p.wire.frames import Frame
from echo2p2p.wire.handshake import Handshake, Self
from echo2p2p.wire.messages import Goodbye, Have, Hello, Ping, Pong, Request, Want

ID = ManifestId(bytes(16))
KEYS = RunKeys()


def me(name, **changes):
    if name == "source":
        mine = Self(SOURCE, RUN_ID, KEYS.run_public_key, None, KEYS.run_key.sign)
    else:
        peer_id, key = KEYS.identity(name)
        mine = Self(peer_id, RUN_ID, KEYS.run_public_key, KEYS.card(name), key.sign)
    return replace(mine, **changes)


class Recorder:
    """A handler that remembers, and holds some chunks."""

    def __init__(self, **chunks):
        self.seen, self.sent = [], []
        self.chunks = {int(key[1:]): value for key, value in chunks.items()}

    def frame(self, message):
        if isinstance(message, Want) and message.manifest_id == b"!" * 16:
            raise RemoteProtocolError(Violation.TOO_MUCH, "not that")
        self.seen.append(message)

    def chunk(self, payload):
        self.seen.append((payload.index, bytes(payload.data)))

    def read_chunk(self, manifest_id, index):
        data = self.chunks.get(index)
        return None if data is None else memoryview(data)

    def chunk_sent(self, manifest_id, index, *, sent):
        self.sent.append((index, sent))


async def open_pair(streams=None, settings=None, one=None, two=None):
    left, right = streams or memory_stream_pair()
    links = {}

    async def shake(name, stream, who, nonce):
        links[name] = await open_link(stream, who, nonce=nonce * 32, settings=settings)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shake, "left", left, one or me("one"), b"1")
        nursery.start_soon(shake, "right", right, two or me("two"), b"2")
    return links["left"], links["right"]


@contextlib.asynccontextmanager
async def running(*links_and_handlers):
    """Run links in the background; yield a dict of how each ended."""
    ends = {}

    departures = Departures()

    async def run(link, handler):
        try:
            ends[link] = await link.run(handler, departures)
        except (LinkError, RemoteProtocolError) as error:
            ends[link] = error

    live = {link for link, _ in links_and_handlers}
    async with trio.open_nursery() as watching:
        watching.start_soon(watch_links, lambda: live - ends.keys())
        watching.start_soon(departures.run)
        async with trio.open_nursery() as nursery:
            for link, handler in links_and_handlers:
                nursery.start_soon(run, link, handler)
            yield ends
        watching.cancel_scope.cancel()


async def raw_end(settings=None, handler=None):
    """Return a link, and the bare frames of its authenticated other end."""
    left, right = memory_stream_pair()
    frames = FrameStream(right)

    async def theirs():
        shake = Handshake(me("two"), nonce=b"2" * 32)
        await frames.send(shake.start())
        for _ in range(2):
            event = await frames.receive()
            step = shake.receive(event.message)
            if not hasattr(step, "peer_id"):
                await frames.send(step)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(theirs)
        link = await open_link(
            left, me("one"), nonce=b"1" * 32, settings=settings, expected=me("two").peer_id
        )
    return link, frames


async def test_two_members_open_a_link_and_exchange_frames_and_chunks(autojump_clock):
    left, right = await open_pair(two=me("source"))
    assert (left.peer.peer_id, right.peer.peer_id) == (SOURCE, me("one").peer_id)
    ours, theirs = Recorder(_1=b"one", _3=b"three"), Recorder()
    async with running((left, ours), (right, theirs)) as ends:
        left.send_chunk_nowait(ID, 1)
        left.send_chunk_nowait(ID, 2)
        left.send_chunk_nowait(ID, 3)
        left.send_nowait(Want(manifest_id=ID))
        await trio.sleep(1)
        assert theirs.seen == [Want(manifest_id=ID), (1, b"one"), (3, b"three")]
        assert ours.sent == [(1, True), (2, False), (3, True)]
        left.close("done")
    assert ends[left] == "done"
    assert "done" in str(ends[right])


class Held(DepartingStream):
    """A stream of which nothing has left before it is let go."""

    def __init__(self, inner):
        self._inner, self.position, self.let_go = inner, 0, False
        self.lacking = None

    def departs_in_s(self, position):
        return 0.0 if self.let_go else POLL_MAX_S


async def test_a_chunk_counts_as_sent_when_it_has_left_and_the_next_is_written_behind_it(
    autojump_clock,
):
    one, two = memory_stream_pair()
    held = Held(one)
    left, right = await open_pair((held, two))
    sender, receiver = Recorder(c1=b"first", c2=b"second"), Recorder()
    async with running((left, sender), (right, receiver)):
        for index in (1, 2, 3):
            left.send_chunk_nowait(ID, index)
        await trio.sleep(0.1)
        assert receiver.seen == [(1, b"first"), (2, b"second")]
        assert sender.sent == [(3, False)]  # skipped: there was nothing to wait for
        held.let_go = True
        await trio.sleep(0.1)
        assert sender.sent == [(3, False), (1, True), (2, True)]
        left.close("done")


async def test_an_idle_link_lives_on_pings(autojump_clock):
    left, right = await open_pair()
    async with running((left, Recorder()), (right, Recorder())) as ends:
        await trio.sleep(1000)
        assert not ends
        left.close("enough")


async def test_a_silent_remote_is_dead_after_six_seconds(autojump_clock):
    link, frames = await raw_end()
    start = trio.current_time()
    async with running((link, Recorder())) as ends:
        pass
    assert trio.current_time() - start == pytest.approx(6.0)
    assert isinstance(ends[link], LinkError)
    assert "silent" in str(ends[link])
    assert await frames.receive() == Frame(Ping(nonce=1))


class Sticky:
    """The sending half of a stream, where each write takes its time."""

    def __init__(self, inner):
        self.inner, self.takes_s = inner, 0.0

    async def send_all(self, data):
        await trio.sleep(self.takes_s)
        await self.inner.send_all(data)

    async def aclose(self):
        await self.inner.aclose()


async def test_each_write_has_all_of_the_timeout_and_one_that_has_not_is_the_links_end(
    autojump_clock,
):
    link, frames = await raw_end(LinkSettings(send_timeout_s=10.0))
    ours = link._frames._stream
    ours.send_stream = sticky = Sticky(ours.send_stream)

    async def talk():
        for nonce in itertools.count():
            await frames.send(Have(manifest_id=ID, indices=from_tokens([nonce]), ask=False))
            await trio.sleep(1)

    async with running((link, Recorder())) as ends, trio.open_nursery() as nursery:
        nursery.start_soon(talk)
        sticky.takes_s = 8.0
        for _ in range(4):
            link.send_nowait(Want(manifest_id=ID))
            await trio.sleep(8)
        assert not ends
        sticky.takes_s = 0.0
        await trio.sleep(100)
        sticky.takes_s = math.inf
        link.send_nowait(Want(manifest_id=ID))
        await trio.sleep(9.9)
        assert not ends
        await trio.sleep(0.1 + 2 * WATCH_EVERY_S)
        assert ends
        nursery.cancel_scope.cancel()
    assert "took none of" in str(ends[link])


async def test_the_pings_of_a_node_go_out_together(autojump_clock):
    pairs = []
    for _ in range(5):
        pairs.append(await raw_end())
        await trio.sleep(0.3)
    heard_s = []

    async def listen(frames):
        while (await frames.receive()) is not None:
            heard_s.append(trio.current_time())
            await frames.send(Pong(nonce=0))

    async with running(*((link, Recorder()) for link, _ in pairs)) as ends:
        async with trio.open_nursery() as nursery:
            for _, frames in pairs:
                nursery.start_soon(listen, frames)
            await trio.sleep(41)
            nursery.cancel_scope.cancel()
        assert not ends
        for link, _ in pairs:
            link.close("enough")
    assert len(heard_s) <= 5 * 21
    # Of 2 s, 0.5 s go together with the first: here 3 moments, and not 5, in each of 15 rounds.
    assert len({at for at in heard_s if at > 11}) <= 3 * 16


async def test_a_ping_is_answered(autojump_clock):
    link, frames = await raw_end()
    async with running((link, Recorder())):
        await frames.send(Ping(nonce=99))
        assert await frames.receive() == Frame(Pong(nonce=99))
        link.close("done")


@pytest.mark.parametrize(
    ("send", "violation"),
    [
        (lambda frames: frames.send(Want(manifest_id=b"!" * 16)), Violation.TOO_MUCH),
        (
            lambda frames: frames.send(Hello(protocol=0, run_id="", card=None, nonce=b"")),
            Violation.UNEXPECTED,
        ),
        (lambda frames: frames._stream.send_all(b"\xff" * 4), Violation.FRAME_TOO_LONG),
    ],
)
async def test_a_violation_is_told_and_ends_the_link(autojump_clock, send, violation):
    link, frames = await raw_end()
    async with running((link, Recorder())) as ends:
        await send(frames)
    assert ends[link].violation is violation
    assert await frames.receive() == Frame(Goodbye(reason=violation.value))
    assert await frames.receive() is None


async def test_a_remote_that_does_not_read_ends_the_link_not_the_memory(autojump_clock):
    link, _frames = await raw_end(LinkSettings(queue_frames_max=100))
    async with running((link, Recorder())) as ends:
        for _ in range(100):
            link.send_nowait(Request(manifest_id=ID, index=1))
        await trio.sleep(1)
        assert not ends, "they were written"
        for _ in range(101):
            link.send_nowait(Request(manifest_id=ID, index=1))
    assert "does not read" in str(ends[link])


async def test_a_connection_that_the_other_side_closes_ends_the_link(autojump_clock):
    link, frames = await raw_end()
    async with running((link, Recorder())) as ends:
        await trio.aclose_forcefully(frames._stream)
    assert ends[link] == "closed by the other side"


async def test_a_handshake_that_does_not_come_times_out_and_closes_the_stream(autojump_clock):
    left, _right = memory_stream_pair()
    with pytest.raises(LinkError, match="no handshake in 10 s"):
        await open_link(left, me("one"), nonce=b"1" * 32)
    assert trio.current_time() == 10
    with pytest.raises(trio.ClosedResourceError):
        await left.send_all(b"x")


async def test_whoever_is_refused_in_the_handshake_is_told(autojump_clock):
    left, right = memory_stream_pair()
    frames = FrameStream(right)
    stranger = Handshake(me("two", run_id="another run"), nonce=b"2" * 32)
    await frames.send(stranger.start())
    with pytest.raises(RemoteProtocolError) as caught:
        await open_link(left, me("one"), nonce=b"1" * 32)
    assert caught.value.violation is Violation.WRONG_RUN
    assert isinstance((await frames.receive()).message, Hello)
    assert await frames.receive() == Frame(Goodbye(reason="wrong_run"))
    assert await frames.receive() is None


async def test_being_refused_is_a_link_error_with_the_reason(autojump_clock):
    left, right = memory_stream_pair()
    await FrameStream(right).send(Goodbye(reason="wrong_run"))
    with pytest.raises(LinkError, match="refused by the other side: wrong_run"):
        await open_link(left, me("one"), nonce=b"1" * 32)


async def test_a_cancelled_handshake_closes_the_stream(autojump_clock):
    left, _right = memory_stream_pair()
    with trio.move_on_after(1):
        await open_link(left, me("one"), nonce=b"1" * 32)
    assert trio.current_time() == 1
    with pytest.raises(trio.ClosedResourceError):
        await left.send_all(b"x")


async def test_a_wrong_key_is_refused(autojump_clock):
    thief = me("two", sign=Ed25519PrivateKey.from_private_bytes(b"t" * 32).sign)
    with pytest.RaisesGroup(RemoteProtocolError, allow_unwrapped=False, flatten_subgroups=True):
        await open_pair(two=thief)


async def test_waiting_frames_are_bounded_in_bytes_too(autojump_clock):
    link, _frames = await raw_end(LinkSettings(queue_bytes_max=100_000))
    news = Have(manifest_id=ID, indices=from_tokens(list(range(10_000))), ask=False)
    async with running((link, Recorder())) as ends:
        link.send_nowait(Want(manifest_id=ID))
        link.send_nowait(news)
        link.send_nowait(news)
        link.send_nowait(news)
        await trio.sleep(1)
    assert "does not read" in str(ends[link])
