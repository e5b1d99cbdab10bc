"""Relay links in TLS over real sockets: who is let in, who is not, and what crosses the wire."""

import bisect
import contextlib
import itertools
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.errors import ConfigError, LinkError, RemoteProtocolError
from echo2p2p.ids import SOURCE
from echo2p2p.net import certificates
from echo2p2p.net.connections import ConnectionSettings
from echo2p2p.net.departure import WAKE_BYTES_MIN, DepartingStream, Departures
from echo2p2p.net.link import Link, LinkSettings, open_link
from echo2p2p.net.payloads import RelaySettings
from echo2p2p.net.ports import Endpoint, Streams, TlsServer
from echo2p2p.net.system import SystemClock
from echo2p2p.net.tcp import TcpStreams
from echo2p2p.net.tls_streams import RECORD_HEAD_BYTES, Records, TlsStreams
from echo2p2p.testing.journal import Entry
from echo2p2p.testing.relays import RUN_ID, RelayNet, RunKeys
from echo2p2p.wire.handshake import Self
from echo2p2p.wire.messages import Ping

KEYS, OTHERS = RunKeys(), RunKeys(1)
HERE = Endpoint("127.0.0.1", 0)
HANDSHAKE_S = 5.0
DAY_S = 24 * 3600


class Past(SystemClock):
    """As it was 400 days ago."""

    def time(self) -> float:
        return super().time() - 400 * DAY_S


class Tapped(TcpStreams):
    """What it dials remembers the bytes that crossed the wire, and may change one of each write."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = bytearray()
        self.flips = False

    async def dial(self, endpoint: Endpoint, *, timeout_s: float) -> trio.abc.Stream:
        stream = await super().dial(endpoint, timeout_s=timeout_s)
        assert isinstance(stream, DepartingStream)
        send_all, receive_some = stream.send_all, stream.receive_some

        async def send(data: bytes) -> None:
            self.seen += data
            await send_all(data[:-1] + bytes([data[-1] ^ self.flips]))

        async def receive(max_bytes: int | None = None) -> bytes | bytearray:
            data = await receive_some(max_bytes)
            self.seen += data
            return data

        stream.send_all, stream.receive_some = send, receive  # type: ignore[method-assign,assignment]
        return stream


def in_tls(material: TlsServer | None = None) -> TlsStreams:
    return TlsStreams(TcpStreams(), material)


def me(name: str) -> Self:
    if name == "source":
        return Self(SOURCE, RUN_ID, KEYS.run_public_key, None, KEYS.run_key.sign)
    peer_id, key = KEYS.identity(name)
    return Self(peer_id, RUN_ID, KEYS.run_public_key, KEYS.card(name), key.sign)


def shows(leaf: TlsServer) -> TlsServer:
    """Return a leaf to be shown by somebody who believes our run."""
    return replace(leaf, authority=KEYS.leaf("p0").authority)


def self_signed() -> TlsServer:
    key = KEYS.identity("p0")[1]
    shown = certificates.self_signed(key, KEYS.identity("p0")[0])
    return TlsServer(shown, shown, certificates.key_pem(key))


class Bare:
    """TLS without a certificate of one's own."""

    async def dial(self, endpoint: Endpoint, *, timeout_s: float) -> trio.abc.Stream:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        stream = await TcpStreams().dial(endpoint, timeout_s=timeout_s)
        return trio.SSLStream(stream, context, https_compatible=True)


@contextlib.asynccontextmanager
async def relays(
    streams: Callable[[str], Streams], *, handshake_s: float = HANDSHAKE_S
) -> AsyncIterator[RelayNet]:
    link = LinkSettings(handshake_timeout_s=handshake_s)
    settings = RelaySettings(connections=ConnectionSettings(link=link))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            yield RelayNet(nursery, streams, listen=lambda _: HERE, settings=settings)
            nursery.cancel_scope.cancel()


class Deaf:
    """A handler of a link that ends at once."""

    def frame(self, message: object) -> None: ...
    def chunk(self, payload: object) -> None: ...
    def read_chunk(self, manifest_id: object, index: int) -> None: ...
    def chunk_sent(self, manifest_id: object, index: int, *, sent: bool) -> None: ...


async def close(link: Link) -> None:
    link.close("the test is over")
    await link.run(Deaf(), Departures())


async def link_to_source(net: RelayNet, streams: Streams, mine: Self) -> None:
    """Open a link to the source, as anybody might, and close it."""
    address = net.source.address
    assert address is not None
    there = Endpoint(address.host, address.port)
    stream = await streams.dial(there, timeout_s=5)
    settings = LinkSettings(handshake_timeout_s=HANDSHAKE_S)
    link = await open_link(stream, mine, nonce=bytes(32), expected=SOURCE, settings=settings)
    assert link.peer.peer_id == SOURCE
    await close(link)


async def of_source(net: RelayNet, event: str) -> Entry:
    """Wait for an event of the source, and return the first of them."""
    journal = net.source.journal
    while not journal.named(event):  # noqa: ASYNC110 the node's tasks write it
        await trio.sleep(0.005)
    return journal.named(event)[0]


async def why_refused(net: RelayNet) -> str:
    return str((await of_source(net, "link.refused")).fields["detail"])


# --- members ------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_three_nodes_pass_payloads_on_and_nothing_of_them_can_be_read_on_the_wire() -> None:
    wires = {name: Tapped() for name in ("source", "p0", "p1")}
    async with relays(lambda name: TlsStreams(wires[name], KEYS.leaf(name))) as net:
        for name in wires:
            await net.start(name)
        net.link_up()
        await net.wait_linked()
        payload = net.keys.payload(1, 4_000_000, chunk_bytes=64 * 1024)
        await net.broadcast(payload)
        anchor = net.keys.payload(2, 4_000_000, chunk_bytes=1024 * 1024, anchor=True)
        await net.broadcast(anchor, push=False)
        for member in net.members.values():
            assert not member.journal.named("link.refused")
    seen = b"".join(bytes(wire.seen) for wire in wires.values())
    assert len(seen) > 2 * 8_000_000, "all links are tapped"
    assert RUN_ID.encode() not in seen
    text = payload.assembly.payload()
    assert not any(text[at : at + 16] in seen for at in range(0, len(text), 400_000))


async def test_a_member_is_linked_by_its_own_leaf_and_card() -> None:
    async with relays(lambda name: in_tls(KEYS.leaf(name))) as net:
        await net.start("source")
        await link_to_source(net, in_tls(KEYS.leaf("p0")), me("p0"))
        assert (await of_source(net, "link.opened")).fields["peer"] == KEYS.identity("p0")[0]


async def test_what_is_changed_on_its_way_ends_the_link() -> None:
    wire = Tapped()
    async with relays(lambda name: in_tls(KEYS.leaf(name))) as net:
        await net.start("source")
        address = net.source.address
        assert address is not None
        there = Endpoint(address.host, address.port)
        stream = await TlsStreams(wire, KEYS.leaf("p0")).dial(there, timeout_s=5)
        link = await open_link(stream, me("p0"), nonce=bytes(32), expected=SOURCE)
        await of_source(net, "link.opened")
        wire.flips = True
        link.send_nowait(Ping(nonce=1))
        with contextlib.suppress(LinkError):  # the source may reset the connection
            await link.run(Deaf(), Departures())
        closed = await of_source(net, "link.closed")
        assert closed.fields["detail"] == "the connection broke while receiving"


# --- strangers who dial -------------------------------------------------------------------------


STRANGERS: dict[str, tuple[Callable[[], Streams], str, str]] = {
    "no TLS": (TcpStreams, "p0", "no TLS handshake: "),
    "no certificate": (Bare, "p0", "no TLS handshake: peer did not return a certificate"),
    "a certificate of another run": (
        lambda: in_tls(shows(OTHERS.leaf("p0"))),
        "p0",
        "no TLS handshake: ",
    ),
    "a certificate that it signed itself": (
        lambda: in_tls(shows(self_signed())),
        "p0",
        "no TLS handshake: self-signed certificate",
    ),
    "a certificate that is over": (
        lambda: in_tls(KEYS.leaf("p0", clock=Past())),
        "p0",
        "no TLS handshake: certificate has expired",
    ),
    "the leaf of a server": (
        lambda: in_tls(KEYS.leaf("source")),
        "p0",
        "no TLS handshake: unsuitable certificate purpose",
    ),
    "key and card of another member": (
        lambda: in_tls(KEYS.leaf("thief")),
        "p0",
        "not_a_member: {p0} answers for {thief}",
    ),
    "the certificate of another member": (
        lambda: in_tls(KEYS.leaf("p0")),
        "thief",
        "not_a_member: {thief} answers for {p0}",
    ),
}


@pytest.mark.parametrize("who", STRANGERS)
async def test_a_stranger_is_refused_with_one_event_and_members_are_not_disturbed(who: str) -> None:
    streams, name, detail = STRANGERS[who]
    ids = {name: KEYS.identity(name)[0] for name in ("p0", "thief")}
    async with relays(lambda name: in_tls(KEYS.leaf(name))) as net:
        await net.start("source")
        with pytest.raises((LinkError, RemoteProtocolError)):
            await link_to_source(net, streams(), me(name))
        assert (await why_refused(net)).startswith(detail.format(**ids))
        assert not net.source.journal.named("link.opened")
        await link_to_source(net, in_tls(KEYS.leaf("p0")), me("p0"))
        await of_source(net, "link.opened")
        assert len(net.source.journal.named("link.refused")) == 1


async def test_peers_of_two_runs_do_not_believe_each_other() -> None:
    # TLS 1.3 has the server show its certificate first, so that who dialled gives up.
    async with relays(lambda name: in_tls(KEYS.leaf(name))) as net:
        await net.start("source")
        with pytest.raises(LinkError, match="no TLS handshake: self-signed certificate"):
            await link_to_source(net, in_tls(OTHERS.leaf("p0")), me("p0"))
        assert (await why_refused(net)).startswith("no TLS handshake: ")


@pytest.mark.parametrize("first_bytes", [b"", b"\x16\x03\x01\x02\x00\x01"])
async def test_a_handshake_that_is_not_gone_on_with_ends_in_time(first_bytes: bytes) -> None:
    async with relays(lambda name: in_tls(KEYS.leaf(name)), handshake_s=0.2) as net:
        await net.start("source")
        address = net.source.address
        assert address is not None
        stream = await TcpStreams().dial(Endpoint(address.host, address.port), timeout_s=5)
        async with stream:
            await stream.send_all(first_bytes)
            with contextlib.suppress(trio.BrokenResourceError):
                assert await stream.receive_some() == b""
        assert await why_refused(net) == "no handshake in 0.2 s"


# --- strangers who are dialled ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served_by", "mine", "detail"),
    [
        (TcpStreams, "source", "no TLS handshake: "),
        (lambda: in_tls(KEYS.leaf("thief")), "source", "not_a_member: {thief}'s certificate ans"),
        (lambda: in_tls(KEYS.leaf("thief")), "thief", "not_a_member: {thief}'s certificate ans"),
        (lambda: in_tls(OTHERS.leaf("source")), "source", "no TLS handshake: self-signed cert"),
        (in_tls, "source", "no TLS handshake: "),
    ],
    ids=["no TLS", "key of the source", "another member", "another run", "no leaf yet"],
)
async def test_who_is_not_the_peer_that_was_dialled_gets_no_hello(
    served_by: Callable[[], Streams], mine: str, detail: str
) -> None:
    outcomes = []

    async def accept(stream: trio.abc.Stream, _: str) -> None:
        try:
            settings = LinkSettings(handshake_timeout_s=HANDSHAKE_S)
            await open_link(stream, me(mine), nonce=bytes(32), settings=settings)
        except (LinkError, RemoteProtocolError) as error:
            outcomes.append(str(error))
        else:
            outcomes.append("linked")

    thief = KEYS.identity("thief")[0]
    with trio.fail_after(HANDSHAKE_S):
        async with served_by().listen(HERE, accept) as at:
            stream = await in_tls(KEYS.leaf("p0")).dial(at, timeout_s=5)
            with pytest.raises((LinkError, RemoteProtocolError)) as caught:
                await open_link(stream, me("p0"), nonce=bytes(32), expected=SOURCE)
        assert str(caught.value).startswith(detail.format(thief=thief))
        assert "linked" not in outcomes


# --- the leaf -----------------------------------------------------------------------------------


async def test_before_there_is_a_leaf_callers_are_sent_away_and_afterwards_served() -> None:
    served = []

    async def accept(stream: trio.abc.Stream, _: str) -> None:
        served.append(link := await open_link(stream, me("source"), nonce=bytes(32)))
        await link.run(Deaf(), Departures())

    streams, client = in_tls(), in_tls(KEYS.leaf("p0"))
    with trio.fail_after(10):
        async with streams.listen(HERE, accept) as at:
            early = await client.dial(at, timeout_s=5)
            with pytest.raises(LinkError):
                await open_link(early, me("p0"), nonce=bytes(32), expected=SOURCE)
            assert not served
            streams.show(KEYS.leaf("source"))
            late = await client.dial(at, timeout_s=5)
            link = await open_link(late, me("p0"), nonce=bytes(32), expected=SOURCE)
            assert link.peer.peer_id == SOURCE
            await close(link)
            assert len(served) == 1


def test_a_damaged_leaf_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="join again"):
        in_tls(replace(KEYS.leaf("p0"), private_key=KEYS.leaf("p1").private_key))


async def test_closing_waits_for_nobody() -> None:
    async def accept(stream: trio.abc.Stream, _: str) -> None:
        await trio.sleep_forever()

    with trio.fail_after(5):
        async with in_tls(KEYS.leaf("source")).listen(HERE, accept) as at:
            stream = await in_tls(KEYS.leaf("p0")).dial(at, timeout_s=5)
            await stream.aclose()


async def test_who_shows_a_card_that_is_not_its_certificates_is_told_so() -> None:
    async with relays(lambda name: in_tls(KEYS.leaf(name))) as net:
        await net.start("source")
        with pytest.raises(LinkError, match="refused by the other side: not_a_member"):
            await link_to_source(net, in_tls(KEYS.leaf("thief")), me("p0"))


# --- waking up ----------------------------------------------------------------------------------


@given(
    bodies=st.lists(st.integers(0, 70), max_size=8),
    cuts=st.lists(st.integers(1, 50), max_size=40),
)
def test_what_a_record_lacks_is_known_however_its_bytes_come(
    bodies: list[int], cuts: list[int]
) -> None:
    wire = b"".join(b"\x17\x03\x03" + size.to_bytes(2, "big") + bytes(size) for size in bodies)
    ends = list(itertools.accumulate(RECORD_HEAD_BYTES + size for size in bodies))
    records, at = Records(), 0
    for cut in cuts:
        lacking = records.lacking(wire[at : at + cut])
        at = min(at + cut, len(wire))
        place = bisect.bisect_right(ends, at)
        begun = at - (ends[place - 1] if place else 0)
        known = place < len(ends) and begun >= RECORD_HEAD_BYTES
        assert lacking == (ends[place] - at if known else 0)


async def test_a_record_wakes_its_reader_once_it_is_whole() -> None:
    size, piece = 12_000, 1000
    record = b"\x17\x03\x03" + size.to_bytes(2, "big") + bytes(size)
    sent, woken = trio.open_memory_channel[trio.abc.Stream](1)
    heard: list[int] = []
    ended = trio.Event()

    async def accept(stream: trio.abc.Stream, _host: str) -> None:
        await sent.send(stream)
        await trio.sleep_forever()

    async with (
        TcpStreams().listen(HERE, accept) as at,
        await TcpStreams().dial(at, timeout_s=5) as ours,
        trio.open_nursery() as nursery,
    ):
        theirs = await woken.receive()
        assert isinstance(theirs, DepartingStream)
        theirs.lacking = Records().lacking

        async def listen() -> None:
            while data := await theirs.receive_some(65_536):
                heard.append(len(data))
            ended.set()

        nursery.start_soon(listen)
        for _ in range(2):
            heard.clear()
            for start in range(0, len(record), piece):
                await ours.send_all(record[start : start + piece])
                await trio.sleep(0.02)
            assert sum(heard) == len(record)
            # Its first piece, all that is worth sleeping for, and the last pieces one by one.
            assert heard[0] == piece
            assert len(heard) <= 3 + WAKE_BYTES_MIN // piece
        await ours.send_all(record[:piece])
        await trio.sleep(0.02)
        with trio.fail_after(5):
            await ours.aclose()  # an end wakes the reader, whatever is lacking
            await ended.wait()


async def test_both_ends_of_a_link_in_tls_wake_for_whole_records() -> None:
    ends: list[trio.abc.Stream] = []
    there = trio.Event()

    async def accept(stream: trio.abc.Stream, _host: str) -> None:
        ends.append(stream)
        there.set()

    async with in_tls(KEYS.leaf("p0")).listen(HERE, accept) as at:
        ends.append(await in_tls(KEYS.leaf("p1")).dial(at, timeout_s=5))
        await there.wait()
    for end in ends:
        assert isinstance(end, trio.SSLStream)
        assert isinstance(end.transport_stream, DepartingStream)
        assert end.transport_stream.lacking is not None
        await trio.aclose_forcefully(end)
