import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.broadcast.chunk_sets import ChunkSet
from echo2p2p.broadcast.effects import (
    CloseLink,
    SendCancel,
    SendChunk,
    SendHave,
    SendOffer,
    SendReject,
    SendRequest,
    SendWant,
)
from echo2p2p.broadcast.settings import HAVE_INDICES_MAX, SwarmSettings
from echo2p2p.broadcast.swarm import Swarm
from echo2p2p.errors import RemoteProtocolError
from echo2p2p.ids import SOURCE, ManifestId, PeerId

ID = ManifestId(bytes(16))
CHUNK = 1000
MESH_S = SwarmSettings().have_mesh_s


class Wire:
    """Swarms on a perfect wire in virtual time; checks the rules of the protocol on the way."""

    def __init__(self, peers, *, count=41, push=True, latency_s=0.01, upload=1e6, seed=0):
        self.count, self.push, self.latency_s, self.upload = count, push, latency_s, upload
        self.now = 0.0
        self.events, self.order = [], itertools.count()
        self.swarms, self.held, self.free_s = {}, {}, {}
        self.links, self.era = set(), {}
        self.silent, self.lossy = set(), 0.0
        self.rng = random.Random(seed)
        self.sent, self.received, self.duplicates = {}, {}, 0
        self.log = []
        for name in [SOURCE, *peers]:
            self.add(name)

    def add(self, name):
        is_source = name == SOURCE
        self.swarms[name] = Swarm(is_source=is_source, rng=random.Random(f"{name}"))
        self.held[name] = set(range(self.count)) if is_source else set()
        self.free_s[name] = 0.0
        self.sent[name] = self.received[name] = 0

    def follow(self, name):
        held = sorted(self.held[name])
        swarm = self.swarms[name]
        self.perform(
            name,
            swarm.add_transfer(
                ID, count=self.count, chunk_bytes=CHUNK, held=held, push=self.push, now=self.now
            ),
        )

    def open(self, one, other):
        self.links.add(frozenset((one, other)))
        self.era[frozenset((one, other))] = next(self.order)
        for me, peer in ((one, other), (other, one)):
            self.perform(
                me,
                self.swarms[me].link_opened(
                    peer, is_source=peer == SOURCE, rtt_s=2 * self.latency_s, now=self.now
                ),
            )

    def close(self, one, other):
        self.links.discard(frozenset((one, other)))
        for me, peer in ((one, other), (other, one)):
            self.perform(me, self.swarms[me].link_closed(peer, self.now))

    def mesh(self, undialable=()):
        for swarm in self.swarms.values():
            swarm.reach.undialable = frozenset(undialable)
        for one, other in itertools.combinations(self.swarms, 2):
            if one not in undialable or other not in undialable:
                self.open(one, other)

    def start(self, undialable=()):
        self.mesh(undialable)
        for name in self.swarms:
            self.follow(name)

    def at(self, delay_s, action, *arguments):
        heapq.heappush(self.events, (self.now + delay_s, next(self.order), action, arguments))

    def perform(self, me, effects):
        for effect in effects:
            self.log.append((self.now, me, effect))
            if isinstance(effect, CloseLink):
                self.at(0, self.close, me, effect.link)
                self.at(1, self.open, me, effect.link)
                continue
            pair = frozenset((me, effect.link))
            assert pair in self.links, effect
            delay_s = 0.0
            if isinstance(effect, SendChunk):
                self.check_chunk(me, effect)
                self.free_s[me] = max(self.free_s[me], self.now) + CHUNK / self.upload
                delay_s = self.free_s[me] - self.now
                self.at(delay_s, self.chunk_left, me, effect, self.era[pair])
                self.sent[me] += 1
                if me in self.silent:
                    continue
            self.at(delay_s + self.latency_s, self.deliver, me, effect, self.era[pair])

    def check_chunk(self, me, effect):
        assert effect.index in self.held[me], "only what is verified"
        pair = {me, effect.link}
        frames = {(who, type(e)) for _, who, e in self.log if {who, e.link} == pair}
        assert SendOffer in {kind for _, kind in frames}, "an offer precedes the first chunk"
        assert (effect.link, SendWant) in frames, "nobody gets what they do not want"

    def alive(self, me, peer, era):
        return self.era.get(frozenset((me, peer))) == era and frozenset((me, peer)) in self.links

    def chunk_left(self, me, effect, era):
        if self.alive(me, effect.link, era):
            self.perform(me, self.swarms[me].chunk_sent(effect.link, ID, effect.index, self.now))

    def deliver(self, sender, effect, era):
        me, now = effect.link, self.now
        if not self.alive(me, sender, era):
            return
        swarm = self.swarms[me]
        match effect:
            case SendOffer():
                swarm.receive_offer(sender, ID)
            case SendWant():
                self.perform(me, swarm.receive_want(sender, ID, now))
            case SendHave(indices=indices, ask=ask):
                self.perform(me, swarm.receive_have(sender, ID, indices, now, ask=ask))
            case SendRequest(index=index):
                self.perform(me, swarm.receive_request(sender, ID, index, now))
            case SendReject(index=index, reason=reason):
                self.perform(me, swarm.receive_reject(sender, ID, index, reason, now))
            case SendCancel(index=index):
                swarm.receive_cancel(sender, ID, index)
            case SendChunk(index=index):
                self.received[me] += 1
                self.duplicates += index in self.held[me]
                self.perform(me, swarm.chunk_arrived(sender, ID, index, CHUNK, now))
                if index not in self.held[me] and self.rng.random() < self.lossy:
                    self.perform(me, swarm.chunk_lost(ID, index, now))
                elif index not in self.held[me]:
                    self.held[me].add(index)
                    self.perform(me, swarm.chunks_stored(ID, [index], now))

    def run(self, seconds, until=None):
        end = self.now + seconds
        while until is None or not until():
            due = min(swarm.next_deadline() for swarm in self.swarms.values())
            event = self.events[0][0] if self.events else float("inf")
            if min(due, event) > end:
                self.now = end
                return False
            if event <= due:
                self.now, _, action, arguments = heapq.heappop(self.events)
                action(*arguments)
                continue
            self.now = max(self.now, due)
            for name, swarm in self.swarms.items():
                if swarm.next_deadline() <= self.now:
                    self.perform(name, swarm.on_time(self.now))
        return True

    def complete(self, *names):
        wanted = names or self.swarms
        return lambda: all(len(self.held[name]) == self.count for name in wanted)


def names(count):
    return [PeerId(f"p{i}") for i in range(count)]


@pytest.mark.parametrize("peers", [1, 2, 3, 8])
def test_in_a_mesh_the_source_sends_each_chunk_once_and_the_peers_do_the_rest(peers):
    wire = Wire(names(peers))
    wire.start()
    assert wire.run(30, wire.complete())
    index_copies = peers - 1
    assert wire.sent[SOURCE] <= wire.count + index_copies
    assert wire.duplicates <= 0.03 * wire.count * peers
    if peers > 1:
        shares = [wire.sent[name] for name in names(peers)]
        assert min(shares) > 0.5 * max(shares)


@pytest.mark.parametrize("latency_s", [0.0, 0.075])
def test_near_and_far_hardly_a_byte_is_received_twice(latency_s):
    peers = 4
    wire = Wire(names(peers), count=121, upload=1e5, latency_s=latency_s)
    wire.start()
    assert wire.run(30, wire.complete())
    assert wire.duplicates <= 0.01 * wire.count * peers
    assert wire.sent[SOURCE] <= 1.05 * wire.count


@pytest.mark.slow
def test_half_of_the_peers_cannot_be_dialled_and_nobody_waits_for_what_nobody_pushes():
    peers, upload, count = 8, 1e5, 201
    wire = Wire(names(peers), count=count, upload=upload)
    wire.start(undialable=names(peers)[::2])
    assert wire.run(30, wire.complete())
    source_s = count * CHUNK / upload
    cut_s = source_s * (peers // 2) / (peers // 2 + 1)
    assert wire.now <= 1.3 * max(source_s, cut_s)
    assert wire.duplicates <= 0.03 * wire.count * peers
    assert wire.sent[SOURCE] <= 1.05 * wire.count + peers


def test_an_anchor_is_pulled_and_never_pushed():
    wire = Wire(names(3), push=False)
    wire.start()
    assert wire.run(30, wire.complete())
    assert all(swarm.statistics().chunks_pushed == 0 for swarm in wire.swarms.values())
    assert wire.sent[SOURCE] <= 1.1 * wire.count
    requests = [effect for _, _, effect in wire.log if isinstance(effect, SendRequest)]
    assert len(requests) >= 3 * wire.count


def test_nobody_gets_chunks_of_what_they_do_not_want():
    wire = Wire(names(3))
    wire.mesh()
    for name in (SOURCE, *names(2)):
        wire.follow(name)
    assert wire.run(30, wire.complete(*names(2)))
    assert wire.received["p2"] == 0
    assert wire.sent["p2"] == 0


@pytest.mark.parametrize("push", [True, False])
def test_the_source_knows_who_is_fetching_until_they_have_it_all_or_are_gone(push):
    wire = Wire(names(4), push=push)
    wire.mesh()
    fetching = wire.swarms[SOURCE].fetching
    for name in (SOURCE, *names(3)):
        wire.follow(name)
    assert fetching() == [], "nobody has said so yet"
    assert wire.run(30, lambda: any(len(wire.held[name]) > 3 for name in names(3)))
    assert sorted(fetching()) == [(name, ID) for name in names(3)]
    wire.close(SOURCE, "p2")
    assert sorted(fetching()) == [(name, ID) for name in names(2)]
    for held in range(4, wire.count):
        assert wire.run(30, lambda held=held: len(wire.held["p0"]) > held)
        on_their_way = 8  # have left us: what is on the wire needs us no longer
        lacking = {name for name in names(2) if len(wire.held[name]) < wire.count - on_their_way}
        assert lacking <= {name for name, _ in fetching()}
    wire.run(5)
    assert fetching() == []


def test_an_offer_crosses_each_link_about_once():
    wire = Wire(names(4))
    wire.mesh()
    wire.follow(SOURCE)
    wire.run(1)
    for name in names(4):
        wire.follow(name)
        wire.run(0.05)
    wire.run(10)
    offers = {}
    for _, me, effect in wire.log:
        if isinstance(effect, SendOffer):
            pair = frozenset((me, effect.link))
            offers[pair] = offers.get(pair, 0) + 1
    assert set(offers) == wire.links
    assert max(offers.values()) == 1


def test_the_share_of_a_relay_that_leaves_in_the_middle_reaches_everybody_else():
    wire = Wire(names(4), count=201, upload=1e5)
    wire.start()
    wire.run(1.0)
    assert 0 < len(wire.held["p1"]) < wire.count
    for other in (SOURCE, "p0", "p2", "p3"):
        wire.close("p1", PeerId(other))
    assert wire.run(30, wire.complete(SOURCE, "p0", "p2", "p3"))
    assert wire.sent[SOURCE] <= 1.3 * wire.count
    assert wire.swarms[SOURCE].statistics().chunks_redealt > 0


def test_a_silent_relay_holds_nobody_up_for_long():
    wire = Wire(names(4), count=201, upload=1e5)
    wire.silent.add("p1")
    wire.start()
    assert wire.run(20, wire.complete())
    assert wire.now < 3 * wire.count * CHUNK / 1e5 + 4
    assert wire.sent[SOURCE] <= 1.6 * wire.count


def test_a_late_joiner_gets_everything_from_peers():
    wire = Wire(names(3))
    wire.start()
    assert wire.run(30, wire.complete())
    wire.run(5)
    before = wire.sent[SOURCE]
    late = PeerId("late")
    wire.add(late)
    for name in (SOURCE, *names(3)):
        wire.open(late, name)
    wire.follow(late)
    assert wire.run(30, wire.complete())
    assert wire.sent[SOURCE] - before <= 0.1 * wire.count
    assert wire.received[late] <= 1.03 * wire.count


def test_a_source_that_comes_back_with_the_same_payload_completes_it():
    wire = Wire(names(2), count=101, upload=1e5)
    wire.start()
    wire.run(0.3)
    for name in names(2):
        wire.close(SOURCE, name)
    wire.run(3)
    assert not wire.complete()()
    wire.swarms[SOURCE] = Swarm(is_source=True, rng=random.Random(5))
    for name in names(2):
        wire.open(SOURCE, name)
    wire.follow(SOURCE)
    assert wire.run(20, wire.complete())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 4),
    st.integers(2, 30),
    st.booleans(),
    st.integers(0, 10**6),
    st.lists(st.tuples(st.floats(0, 2), st.integers(0, 9), st.floats(0, 1)), max_size=6),
)
def test_whatever_is_cut_and_lost_in_the_end_everybody_has_everything(
    peers, count, push, seed, cuts
):
    wire = Wire(names(peers), count=count, push=push, upload=2e4, seed=seed)
    wire.lossy = 0.1
    pairs = list(itertools.combinations(wire.swarms, 2))

    def cut(pair, back_s):
        if frozenset(pair) in wire.links:
            wire.close(*pair)
            wire.at(back_s, reopen, pair)

    def reopen(pair):
        if frozenset(pair) not in wire.links:
            wire.open(*pair)

    for when, which, back_s in cuts:
        wire.at(when, cut, pairs[which % len(pairs)], back_s)
    wire.start()
    assert wire.run(200, wire.complete())


def quiet(is_source=False, **options):
    return Swarm(is_source=is_source, rng=random.Random(0), settings=SwarmSettings(**options))


def opened(*links, is_source=False, held=(), count=10, push=True, **options):
    swarm = quiet(is_source, **options)
    for link in links:
        swarm.link_opened(PeerId(link), is_source=link == SOURCE, rtt_s=0.02, now=0.0)
    swarm.add_transfer(ID, count=count, chunk_bytes=CHUNK, held=held, push=push, now=0.0)
    return swarm


def test_requests_are_answered_with_the_chunk_or_a_reason():
    swarm = opened("a", held=[0, 1])
    assert swarm.receive_request("a", ID, 1, 1.0) == [SendChunk("a", ID, 1)]
    assert swarm.receive_request("a", ID, 1, 1.0) == [], "it is on its way"
    assert swarm.receive_request("a", ID, 2, 1.0) == [SendReject("a", ID, 2, "not_held")]
    strange = ManifestId(b"?" * 16)
    assert swarm.receive_request("a", strange, 2, 1.0) == [SendReject("a", strange, 2, "unknown")]


def test_a_request_that_crossed_the_chunk_is_not_answered_twice():
    swarm = opened("a", held=[0, 1])
    swarm.receive_request("a", ID, 1, 1.0)
    assert swarm.chunk_sent("a", ID, 1, 1.1) == []
    assert swarm.receive_request("a", ID, 1, 1.2) == []
    assert swarm.receive_request("a", ID, 1, 9.0) == [SendChunk("a", ID, 1)]


def test_the_queue_of_a_link_is_bounded_and_a_cancel_empties_it():
    swarm = opened("a", held=range(100), count=100, queue_chunks_max=5, send_window_chunks=1)
    answers = [swarm.receive_request("a", ID, index, 1.0) for index in range(10)]
    assert answers[0] == [SendChunk("a", ID, 0)]
    assert answers[1:6] == [[]] * 5
    assert answers[6:] == [[SendReject("a", ID, index, "busy")] for index in range(6, 10)]
    for index in range(1, 6):
        swarm.receive_cancel("a", ID, index)
    assert swarm.chunk_sent("a", ID, 0, 1.1) == []


def storing(swarm, chunks, *, wants="ab"):
    for link in wants:
        swarm.receive_want(link, ID, 0.0)
    for number, index in enumerate(chunks):
        swarm.chunk_arrived("a", ID, index, CHUNK, 1.0)
        swarm.chunks_stored(ID, [index], 1.0 + number / 1000)


def test_announcements_are_batched_and_tell_nobody_what_they_know():
    swarm = opened("a", "b", "c")
    storing(swarm, (0, 3, 2))
    assert swarm.next_deadline() == pytest.approx(1.02)
    assert swarm.on_time(1.021) == []  # nobody waits for it in a mesh
    assert swarm.next_deadline() == pytest.approx(1 + 3 * MESH_S)
    assert swarm.on_time(1.001 + 3 * MESH_S) == [SendHave("b", ID, (0, 2, 3))]
    assert swarm.next_deadline() > 2


def test_source_and_those_to_whom_nobody_pushes_are_told_first():
    swarm = opened(SOURCE, "a", "b", "c")
    swarm.reach.undialable = frozenset("c")
    storing(swarm, (3, 2), wants=[SOURCE, *"abc"])
    told = swarm.on_time(1.021)
    assert told == [SendHave(SOURCE, ID, (2, 3)), SendHave("c", ID, (2, 3))]
    assert swarm.on_time(1.001 + 4 * MESH_S) == [SendHave("b", ID, (2, 3))]


def test_who_has_all_says_so_at_once():
    swarm = opened("a", "b", "c", "d")
    storing(swarm, range(10))
    assert swarm.on_time(1.021) == [SendHave("b", ID, tuple(range(10)))]
    assert swarm.on_time(2.0) == []


def test_outside_a_mesh_everybody_is_told_soon():
    swarm = opened("a", "b", "c")
    swarm.reach.peers = 17
    storing(swarm, (3, 2))
    assert swarm.on_time(1.051) == [SendHave("b", ID, (2, 3))]
    assert swarm.next_deadline() > 2


def test_a_long_announcement_is_cut_into_parts():
    count = 2 * HAVE_INDICES_MAX + 1
    swarm = opened("a", held=range(count), count=count)
    parts = swarm.receive_want("a", ID, 0.0)
    assert [len(part.indices) for part in parts] == [HAVE_INDICES_MAX, HAVE_INDICES_MAX, 1]


@pytest.mark.parametrize("indices", [(1, 1), (2, 1), (10,), (0, 10)])
def test_an_announcement_that_makes_no_sense_is_refused(indices):
    with pytest.raises(RemoteProtocolError):
        opened("a").receive_have("a", ID, indices, 0.0)


def test_a_chunk_number_beyond_the_end_is_refused_everywhere():
    swarm = opened("a")
    for call in (
        lambda: swarm.receive_request("a", ID, 10, 0.0),
        lambda: swarm.receive_reject("a", ID, 10, "busy", 0.0),
        lambda: swarm.chunk_arrived("a", ID, 10, CHUNK, 0.0),
    ):
        with pytest.raises(RemoteProtocolError):
            call()


def test_chunks_of_a_dropped_payload_are_counted_and_nothing_else():
    swarm = opened("a")
    swarm.receive_have("a", ID, [0, 1], 0.0)
    swarm.drop_transfer(ID, 0.0)
    assert swarm.chunk_arrived("a", ID, 1, 77, 0.0) == []
    assert swarm.chunks_stored(ID, [1], 0.0) == []
    assert swarm.receive_have("a", ID, [1], 0.0) == []
    assert swarm.statistics().unknown_bytes == 77


def test_a_chunk_from_the_source_is_pushed_on_and_one_from_a_peer_is_not():
    for sender, pushed in ((SOURCE, {"a", "b"}), ("a", set())):
        swarm = opened(SOURCE, "a", "b", held=[0])
        for link in (SOURCE, "a", "b"):
            swarm.receive_want(link, ID, 0.0)
        swarm.chunk_arrived(sender, ID, 5, CHUNK, 1.0)
        effects = swarm.chunks_stored(ID, [5], 1.0)
        assert {e.link for e in effects if isinstance(e, SendChunk)} == pushed


@pytest.mark.parametrize("announced", [False, True])
def test_a_chunk_that_an_undialable_peer_pushed_to_us_is_for_its_like_to_ask_for(announced):
    swarm = opened(SOURCE, "open", "nat1", "nat2", held=[0])
    swarm.reach.undialable = frozenset({"nat1", "nat2"})
    for link in (SOURCE, "open", "nat1", "nat2"):
        swarm.receive_want(link, ID, 0.0)
    if announced:
        swarm.receive_have("nat1", ID, [5], 0.9)
    swarm.chunk_arrived("nat1", ID, 5, CHUNK, 1.0)
    swarm.chunks_stored(ID, [5], 1.0)
    swarm.chunk_arrived("open", ID, 6, CHUNK, 1.0)
    swarm.chunks_stored(ID, [6], 1.0)
    told = swarm.on_time(1.001 + 4 * MESH_S)
    told = [effect for effect in told if effect.link in ("open", "nat2")]
    assert told == [
        SendHave("open", ID, (5,)),
        SendHave("nat2", ID, (5,), ask=True),
        SendHave("nat2", ID, (6,)),
    ]


def test_what_we_are_told_to_ask_for_is_asked_for_at_once():
    swarm = opened("a", "b", held=[0])
    swarm.reach.peers = 16
    assert swarm.receive_have("a", ID, [5, 6], 1.0) == [], "it is being pushed"
    assert swarm.receive_have("b", ID, [5], 1.1, ask=True) == [SendRequest("b", ID, 5)]


def test_who_comes_a_moment_after_a_chunk_was_dealt_to_us_is_pushed_it_too():
    swarm = opened(SOURCE, "a", "b", "c")
    swarm.receive_want("a", ID, 0.0)
    swarm.chunk_arrived(SOURCE, ID, 0, CHUNK, 0.9)
    swarm.chunks_stored(ID, [0], 0.9)
    swarm.chunk_arrived(SOURCE, ID, 3, CHUNK, 1.0)
    assert SendChunk("a", ID, 3) in swarm.chunks_stored(ID, [3], 1.0)
    effects = swarm.receive_want("b", ID, 1.1)
    assert effects == [SendHave("b", ID, (0, 3)), SendChunk("b", ID, 3)]
    late = 1.0 + SwarmSettings().pull_grace_max_s
    assert swarm.receive_want("c", ID, late) == [SendHave("c", ID, (0, 3))], "it pulls"


@pytest.mark.parametrize(("peers", "times"), [(17, 2), (24, 2), (40, 4), (1000, 6)])
def test_outside_a_mesh_a_chunk_is_pushed_to_a_few_only(peers, times):
    neighbours = [f"p{i:02}" for i in range(16)]
    swarm = opened(SOURCE, *neighbours, held=[0])
    swarm.reach.peers = peers
    for link in neighbours:
        swarm.receive_want(link, ID, 0.0)
    swarm.chunk_arrived(SOURCE, ID, 5, CHUNK, 1.0)
    effects = swarm.chunks_stored(ID, [5], 1.0)
    assert sum(isinstance(effect, SendChunk) for effect in effects) == times


def test_outside_a_mesh_what_is_announced_is_asked_for_at_once():
    swarm = opened("a", "b", held=[0])
    swarm.reach.peers = 17
    assert swarm.receive_have("a", ID, [5], 1.0) == [SendRequest("a", ID, 5)]


@pytest.mark.parametrize("mesh", [True, False])
def test_outside_a_mesh_the_source_is_told_of_a_chunk_and_who_lacks_it(mesh):
    swarm = opened(SOURCE, "a", "b", "c", held=[0])
    swarm.reach.peers = 16 if mesh else 17
    for link in (SOURCE, "a", "b", "c"):
        swarm.receive_want(link, ID, 0.0)
    swarm.receive_have("a", ID, [5], 0.9)
    swarm.chunk_arrived("b", ID, 5, CHUNK, 1.0)
    swarm.chunks_stored(ID, [5], 1.0)
    told = swarm.on_time(1.001 + 4 * MESH_S)
    told = [effect.link for effect in told if isinstance(effect, SendHave)]
    assert told == ([SOURCE, "a", "c"] if mesh else [SOURCE, "c"])


def test_a_copy_made_in_a_relays_stead_is_not_pushed_on():
    swarm = opened(SOURCE, "a", "b", held=[0])
    for link in (SOURCE, "a", "b"):
        swarm.receive_want(link, ID, 0.0)
    for teller in ("a", SOURCE):
        swarm.receive_have(teller, ID, [5 if teller == "a" else 6], 0.9)
    for index in (5, 6):
        swarm.chunk_arrived(SOURCE, ID, index, CHUNK, 1.0)
        assert swarm.chunks_stored(ID, [index], 1.0) == []


def test_a_queued_push_is_dropped_when_the_other_side_announces_the_chunk():
    swarm = opened(SOURCE, "a", "b", "c", held=[0], uploads_max=1)
    for link in (SOURCE, "a", "b", "c"):
        swarm.receive_want(link, ID, 0.0)
    swarm.chunk_arrived(SOURCE, ID, 5, CHUNK, 1.0)
    (first,) = [e for e in swarm.chunks_stored(ID, [5], 1.0) if isinstance(e, SendChunk)]
    others = sorted({"a", "b", "c"} - {first.link})
    swarm.receive_have(others[0], ID, [5], 1.05)
    (second,) = swarm.chunk_sent(first.link, ID, 5, 1.1)
    assert second == SendChunk(others[1], ID, 5)


def test_chunks_that_waited_for_a_wrong_index_are_asked_for_again():
    swarm = opened("a", "b", push=False)
    for link in "ab":
        swarm.receive_have(link, ID, range(10), 0.0)
    swarm.chunk_arrived("a", ID, 4, CHUNK, 0.1)  # unasked, and wrong, as turns out
    before = swarm.chunk_arrived("b", ID, 0, CHUNK, 0.2)
    assert 4 not in {effect.index for effect in before}
    effects = swarm.chunks_stored(ID, [0], 0.2)
    assert 4 in {effect.index for effect in effects if isinstance(effect, SendRequest)}


def test_adding_a_payload_twice_changes_nothing():
    swarm = opened("a", held=[0])
    assert swarm.add_transfer(ID, count=10, chunk_bytes=1, held=(), push=False, now=1.0) == []
    assert swarm.receive_request("a", ID, 0, 1.0) == [SendChunk("a", ID, 0)]


def test_a_full_set_counts_as_held():
    held = ChunkSet.full(10)
    swarm = opened("a", held=list(held))
    assert [type(e) for e in swarm.receive_want("a", ID, 0.0)] == [SendHave]
