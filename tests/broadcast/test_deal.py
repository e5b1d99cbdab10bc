import pytest

from echo2p2p.broadcast.chunk_sets import ChunkSet
from echo2p2p.broadcast.deal import (
    DEALS_ALLOWED,
    GATHER_S,
    POLL_S,
    REDEAL_MIN_S,
    UNMEASURED_DEALS_MAX,
    WAIT_S,
    Dealer,
)
from echo2p2p.broadcast.relay_rates import RATE_ASSUMED_BYTES_PER_S, RelayRates
from echo2p2p.ids import PeerId

CHUNK = 10_000
RELAYS = [PeerId(name) for name in "abc"]


class Deals:
    """A dealer whose relays pass chunks on at given rates, one relay after the other's links."""

    def __init__(self, count=401, relays=RELAYS, push=True, linked=0):
        self.linked = linked
        self.rates = RelayRates()
        self.dealer = Dealer(count, CHUNK, self.rates, push=push, backlog_max_s=1.5)
        self.known = {relay: ChunkSet(count) for relay in relays}
        self.dealt = {relay: [] for relay in relays}
        self.queues = dict.fromkeys(relays, 0.0)
        self.arrivals = []
        for relay in relays:
            self.dealer.relay_joined(relay)

    def deal(self, now, fanout=None, candidates=None):
        """Deal and send one chunk; return the relay and the chunk."""
        peers = candidates or list(self.known)
        choice = self.dealer.deal(peers, self.known, fanout, now, linked=self.linked)
        if choice is not None:
            relay, index = choice
            self.known[relay].add(index)
            self.dealt[relay].append(index)
            self.dealer.sent(relay, index, now)
        return choice

    def run(self, seconds, deals_per_s, rates):
        """Deal steadily; each relay copies to the others at its rate, bytes per second."""
        step, now, due = 0.01, 0.0, 0.0
        while now < seconds:
            now += step
            for when, peer, index in [a for a in self.arrivals if a[0] <= now]:
                self.arrivals.remove((when, peer, index))
                self.dealer.announced(peer, index, now)
            self.dealer.on_time(now)
            due += deals_per_s * step
            while due >= 1:
                due -= 1
                choice = self.deal(now)
                if choice is None:
                    break
                relay, index = choice
                for peer in self.known:
                    if peer != relay and rates[relay]:
                        start = max(now, self.queues[relay])
                        self.queues[relay] = start + CHUNK / rates[relay]
                        self.arrivals.append((self.queues[relay] + 0.1, peer, index))
        return {relay: len(chunks) for relay, chunks in self.dealt.items()}


def test_each_chunk_but_the_index_is_dealt_once_and_evenly():
    deals = Deals(count=31)
    chosen = [deals.deal(0.0) for _ in range(31)]
    assert chosen[-1] is None
    assert sorted(index for _, index in chosen[:-1]) == list(range(1, 31))
    assert {len(chunks) for chunks in deals.dealt.values()} == {10}
    assert deals.dealer.finished


def test_a_relay_that_cannot_be_dialled_is_counted_on_for_those_that_it_has_links_to():
    """Two of four: each has two links beside the source, and the others serve its like."""
    relays = [PeerId(name) for name in "abcd"]
    deals = Deals(count=101, relays=relays)
    for relay in relays:
        deals.rates.of(relay).penalise(2_000_000.0)
    deals.rates.reach.undialable = frozenset(relays[:2])
    while deals.deal(0.0) is not None:
        pass
    shares = [len(deals.dealt[relay]) for relay in relays]
    assert min(shares[:2]) > 2 * max(shares[2:])
    a, b, c, d = relays
    index = deals.dealt[a][0]
    before = deals.dealer._relays[a].owed
    deals.dealer.announced(b, index, 0.1)
    assert deals.dealer._relays[a].owed == before, "it came from another"
    deals.dealer.announced(c, index, 0.1)
    deals.dealer.announced(d, index, 0.1)
    assert deals.dealer._relays[a].owed == before - 2


def test_a_relay_with_less_to_do_is_waited_for_while_its_link_takes_a_deal():
    deals = Deals()
    a, b, c = RELAYS
    for _ in range(8):
        deals.deal(0.0, candidates=[a])
    assert deals.dealer.deal([a, b], deals.known, None, 1.0)[0] == b  # its link is busy now
    assert deals.deal(1.0, candidates=[a]) is None
    assert deals.dealer.next_deadline() <= 1.0 + WAIT_S
    assert deals.deal(1.0, candidates=[a, c])[0] == c  # what is as good is not kept waiting
    assert deals.deal(1.0 + WAIT_S, candidates=[a])[0] == a  # whoever is stuck is not waited for


def test_a_relay_that_seemed_slow_is_tried_now_and_then_but_not_in_the_end():
    deals = Deals()
    slow, *others = RELAYS
    for relay in RELAYS:
        deals.rates.of(relay).penalise(2_000.0 if relay == slow else 2_000_000.0)
    chosen = []
    now = 0.0
    while (choice := deals.deal(now)) is not None:
        relay, index = choice
        chosen.append((now, relay, index))
        for peer in RELAYS:
            deals.dealer.announced(peer, index, now)
        now += 0.01
    tried = [(when, index) for when, relay, index in chosen if relay == slow]
    assert [when for when, _ in tried] == pytest.approx([0.02, 1.03, 2.04], abs=0.05)
    assert len(chosen) == 400
    assert all(index <= 301 for _, index in tried)
    assert {relay for _, relay, _ in chosen[-90:]} == set(others)


def test_no_relay_waits_for_one_that_is_as_good():
    deals = Deals()
    a, b, _ = RELAYS
    assert deals.dealer.deal([b], deals.known, None, 0.0)[0] == b
    assert deals.deal(0.0, candidates=[a])[0] == a


def test_shares_follow_measured_uplinks():
    rates = dict(zip(RELAYS, (400_000, 400_000, 100_000), strict=True))
    shares = Deals(count=4001).run(10.0, 40, rates)
    assert shares["a"] == pytest.approx(shares["b"], rel=0.2)
    assert shares["c"] < 0.45 * shares["a"]
    assert sum(shares.values()) > 350


def test_before_it_is_measured_a_relay_counts_for_no_more_than_it_is_allowed():
    deals = Deals(count=31)
    deals.rates.allowed = {RELAYS[2]: RATE_ASSUMED_BYTES_PER_S / 5}
    while deals.deal(0.0) is not None:
        pass
    first, second, limited = (len(deals.dealt[relay]) for relay in RELAYS)
    assert limited == pytest.approx(30 * 0.2 / 2.2, abs=1)
    assert abs(first - second) <= 1


def test_a_relay_that_passes_nothing_on_is_dealt_nothing_while_there_are_others():
    deals = Deals(count=41)
    deals.rates.allowed = {RELAYS[1]: 0.0}
    while deals.deal(0.0) is not None:
        pass
    dealt = {relay: len(chunks) for relay, chunks in deals.dealt.items()}
    assert dealt == {"a": UNMEASURED_DEALS_MAX, "b": 0, "c": UNMEASURED_DEALS_MAX}, (
        "others are full"
    )


def test_where_nobody_passes_anything_on_chunks_leave_the_source_all_the_same():
    deals = Deals(count=31)
    deals.rates.allowed = dict.fromkeys(RELAYS, 0.0)
    chosen = [deals.deal(0.0) for _ in range(31)]
    assert sorted(index for _, index in chosen[:-1]) == list(range(1, 31))
    assert deals.dealer.finished
    assert not deals.dealer.busy, "no copy is waited for"


def test_a_relay_that_slows_down_loses_share_at_once_and_a_silent_one_nearly_all():
    rates = dict(zip(RELAYS, (400_000, 400_000, 0), strict=True))
    deals = Deals(count=4001)
    shares = deals.run(10.0, 40, rates)
    assert shares["c"] < 0.15 * shares["a"]
    assert len([index for index in deals.dealt["c"] if index > 200]) < 6
    assert deals.dealer.redealt > 0
    # what the silent relay was dealt early on was given to another
    early = [index for index in deals.dealt["c"] if index < 40]
    others = set(deals.dealt["a"]) | set(deals.dealt["b"])
    assert early
    assert set(early) <= others


def test_a_chunk_without_a_second_holder_is_dealt_to_another():
    deals = Deals(count=2)
    first = deals.deal(0.0)
    assert deals.deal(0.1) is None
    deals.dealer.on_time(REDEAL_MIN_S - 0.1)
    assert deals.deal(0.9) is None
    deals.dealer.on_time(10.0)
    second = deals.deal(10.0)
    assert second[1] == first[1] == 1
    assert second[0] != first[0]
    assert deals.dealer.redealt == 1


def test_where_all_chunks_take_long_to_leave_none_is_stuck():
    deals = Deals(count=200)
    now = 0.0
    for _ in range(40):
        relay, index = deals.dealer.deal(list("abc"), deals.known, 0, now)
        deals.known[relay].add(index)
        now += 0.9
        deals.dealer.sent(relay, index, now)
    relay, index = deals.dealer.deal(list("abc"), deals.known, 0, now)
    deals.dealer.on_time(now + 3.0)
    assert deals.dealer.redealt == 0
    deals.dealer.on_time(now + 4.0)
    assert deals.dealer.redealt == 1


def test_a_chunk_with_a_second_holder_is_not_dealt_again():
    deals = Deals(count=2)
    relay, index = deals.deal(0.0)
    other = next(peer for peer in RELAYS if peer != relay)
    deals.dealer.announced(other, index, 0.5)
    deals.dealer.on_time(100.0)
    assert deals.deal(100.0) is None
    assert deals.dealer.redealt == 0


def test_the_share_of_a_relay_that_left_is_dealt_again():
    deals = Deals(count=10)
    while deals.deal(0.0):
        pass
    gone = set(deals.dealt["a"])
    spread = min(gone)
    deals.dealer.announced(PeerId("b"), spread, 0.1)
    del deals.known["a"]
    deals.dealer.relay_left(PeerId("a"), 0.2)
    again = []
    while (choice := deals.deal(0.3)) is not None:
        again.append(choice[1])
    assert set(again) == gone - {spread}


def test_a_lone_peer_is_dealt_everything_and_owes_nothing():
    deals = Deals(count=50, relays=RELAYS[:1])
    assert sum(deals.deal(0.0) is not None for _ in range(60)) == 49
    deals.dealer.on_time(100.0)
    assert deals.dealer.finished
    assert deals.dealer.redealt == 0


def test_an_unmeasured_relay_is_dealt_a_few_chunks_only():
    deals = Deals(count=1000)
    dealt = 0
    while deals.deal(0.0):
        dealt += 1
    assert dealt == 3 * 16


def test_the_source_helps_when_all_relays_are_behind_but_not_with_what_they_are_at():
    rates = dict.fromkeys(RELAYS, 50_000)
    deals = Deals(count=4001)
    deals.run(6.0, 200, rates)
    choice = deals.dealer.help(RELAYS, deals.known)
    assert choice is not None
    peer, index = choice
    relay = next(relay for relay in RELAYS if index in deals.dealt[relay])
    assert peer != relay
    assert index not in deals.known[peer]
    deals.dealer.helped(index, 6.0)
    idle = Deals(count=4001)
    idle.run(6.0, 5, dict.fromkeys(RELAYS, 400_000))
    assert idle.dealer.help(RELAYS, idle.known) is None


def test_four_chunks_are_never_too_many_however_long_a_relay_takes():
    deals = Deals(count=401)
    for relay in RELAYS:
        deals.rates.of(relay).penalise(2 * CHUNK)  # a copy takes a second
    dealt = [deals.deal(now) for now in range(20)]
    assert all(len(deals.dealt[relay]) > DEALS_ALLOWED for relay in RELAYS)
    assert None in dealt, "but then they are"
    assert deals.dealer.help(RELAYS, deals.known) is not None


def test_a_pull_only_payload_is_never_dealt():
    deals = Deals(push=False)
    assert deals.deal(0.0) is None
    assert deals.dealer.finished


def test_a_request_is_served_if_nobody_else_can_and_refused_if_somebody_can():
    dealer = Deals(push=False).dealer
    a, b, c = RELAYS
    assert dealer.may_serve(a, 5, 0.0), "nobody has it"
    assert not dealer.may_serve(b, 5, 0.1), "it is on its way to a"
    assert not dealer.may_serve(b, 5, 0.2), "and still is"
    dealer.sent(a, 5, 0.3)
    assert dealer.may_serve(b, 5, 10.0), "a should have announced it long ago"
    dealer.announced(a, 6, 10.0)
    assert dealer.may_serve(a, 6, 10.0), "its only holder lost it"
    assert not dealer.may_serve(c, 6, 20.0), "a has it"
    assert dealer.may_serve(c, 6, 21.0), "but c insists"


def test_a_request_for_a_dealt_chunk_is_refused_to_all_but_its_relay():
    deals = Deals(count=2)
    relay, index = deals.deal(0.0)
    other = next(peer for peer in RELAYS if peer != relay)
    assert not deals.dealer.may_serve(other, index, 0.1)
    assert deals.dealer.may_serve(relay, index, 0.1)


def test_a_pushed_chunk_that_never_left_is_dealt_again():
    deals = Deals(count=2)
    relay, index = deals.dealer.deal(RELAYS, deals.known, None, 0.1)
    deals.dealer.not_sent(relay, index)
    assert deals.deal(0.1)[1] == index


def test_what_a_link_does_not_take_is_dealt_to_another_unless_all_of_them_are_slow():
    for usual_s, dealt_again in ((0.05, True), (0.5, False)):
        deals = Deals(count=11)
        dealer, (a, b, c) = deals.dealer, RELAYS
        for relay, now in ((a, 0.0), (b, 1.0)):
            chosen, index = dealer.deal([relay], deals.known, None, now)
            deals.known[chosen].add(index)
            if relay == a:
                dealer.sent(a, index, usual_s)
                for peer in (b, c):
                    dealer.announced(peer, index, usual_s + 0.1)
        dealer.on_time(1.0 + 0.9 * REDEAL_MIN_S)
        assert dealer.redealt == 0
        dealer.on_time(1.0 + 1.5 * REDEAL_MIN_S)
        assert (dealer.redealt == 1) is dealt_again
        if dealt_again:
            relay, again = deals.deal(3.0)
            assert again == index
            assert relay != b, "it may yet come, but nobody waits for it"


def test_before_anything_has_left_nothing_is_late():
    deals = Deals(count=11)
    deals.dealer.deal(RELAYS, deals.known, None, 0.0)
    deals.dealer.on_time(20.0)
    assert deals.dealer.redealt == 0


def test_what_was_usual_for_one_payload_is_for_the_next():
    deals = Deals(count=3)
    relay, index = deals.dealer.deal(RELAYS, deals.known, None, 0.0)
    deals.dealer.sent(relay, index, 0.1)
    known = {relay: ChunkSet(3) for relay in RELAYS}
    following = Dealer(3, CHUNK // 2, deals.rates, push=True, backlog_max_s=1.5)
    for relay in RELAYS:
        following.relay_joined(relay)
    following.deal(RELAYS, known, None, 10.0)
    following.on_time(10.0 + 1.5 * REDEAL_MIN_S)
    assert following.redealt == 1
    assert deals.rates.leaving_s(CHUNK // 2) == pytest.approx(0.05)


def test_later_deals_buy_an_older_one_no_time():
    deals = Deals(count=401)
    a = RELAYS[0]
    deals.rates.of(a).penalise(200_000.0)
    _, oldest = deals.deal(0.0, candidates=[a])
    for _ in range(10):
        deals.deal(0.9, candidates=[a])
    deals.dealer.on_time(1.1 * REDEAL_MIN_S)
    assert deals.dealer.redealt == 1
    assert deals.deal(2.0)[1] == oldest


def test_a_relay_that_was_taken_for_slow_is_believed_when_it_is_quick():
    deals = Deals(count=401)
    a, b, c = RELAYS
    deals.rates.of(a).penalise(2_000.0)
    _, index = deals.deal(0.0, candidates=[a])
    for peer in (b, c):
        deals.dealer.announced(peer, index, 0.1)
    assert deals.rates.of(a).bytes_per_s == pytest.approx(2 * CHUNK / 0.1)


def test_where_all_chunks_take_long_to_spread_none_is_dealt_again_after_a_second():
    deals = Deals(count=401)
    a, b, c = RELAYS
    deals.rates.of(b).penalise(2_000_000.0)
    for step in range(10):
        _, index = deals.deal(step / 10, candidates=[a])
        for peer in (b, c):
            deals.arrivals.append((step / 10 + 0.9 * REDEAL_MIN_S, peer, index))
    for when, peer, index in deals.arrivals:
        deals.dealer.on_time(when)
        deals.dealer.announced(peer, index, when)
    _, last = deals.deal(4.0, candidates=[b])
    deals.dealer.on_time(4.0 + 2 * REDEAL_MIN_S)
    assert last in deals.dealer._deals
    deals.dealer.on_time(4.0 + 8 * REDEAL_MIN_S)
    assert last not in deals.dealer._deals


def test_a_relay_that_passes_nothing_on_is_tried_ever_less_also_over_many_small_payloads():
    rates, (a, b, c) = RelayRates(), RELAYS
    tried, now, quick = [], 0.0, {b, c}
    for relay in quick:
        rates.of(relay).penalise(2_000_000.0)
    for _ in range(200):
        dealer = Dealer(2, CHUNK, rates, push=True, backlog_max_s=1.5)
        known = {relay: ChunkSet(2) for relay in RELAYS}
        for relay in RELAYS:
            dealer.relay_joined(relay)
        for relay in quick:
            rates.of(relay).at_least(1_000_000.0)  # whatever so few bytes would tell
        relay, index = dealer.deal(RELAYS, known, None, now)
        dealer.sent(relay, index, now)
        if relay == a:
            tried.append(now)
            dealer.on_time(now + 1.9)
            assert dealer.redealt == 1
        else:
            for peer in quick - {relay}:
                dealer.announced(peer, index, now + 0.1)
        now += 2.0
    assert len(tried) <= 12, "not every third payload waits for it"
    assert rates.is_to_try(a, now), "but it is not given up"
    rates.passed_on(a)
    rates.dealt(a, now, is_try=True)
    assert rates.is_to_try(a, now + 1.0), "one that works is believed at once"


def test_all_wait_less_for_a_relay_whose_last_deal_was_in_vain():
    rates = RelayRates()

    def deal_to_a(now):
        dealer = Dealer(2, CHUNK, rates, push=True, backlog_max_s=1.5)
        for relay in RELAYS:
            dealer.relay_joined(relay)
        relay, index = dealer.deal([RELAYS[0]], {relay: ChunkSet(2) for relay in RELAYS}, None, now)
        dealer.sent(relay, index, now)
        return dealer

    for relay in RELAYS:
        rates.of(relay).at_least(1_000_000.0)
    rates.left(0.01, CHUNK)
    first = deal_to_a(0.0)
    first.on_time(0.9 * REDEAL_MIN_S)
    assert first.redealt == 0
    first.on_time(1.1 * REDEAL_MIN_S)
    assert first.redealt == 1
    again = deal_to_a(10.0)
    assert again.next_deadline() <= 10.0 + POLL_S
    again.on_time(10.0 + 1.1 * POLL_S)
    assert again.redealt == 1
    rates.passed_on(RELAYS[0])
    believed = deal_to_a(20.0)
    believed.on_time(20.0 + 0.9 * REDEAL_MIN_S)
    assert believed.redealt == 0


def test_a_relay_whose_last_deal_was_in_vain_gets_tries_and_nothing_else():
    deals = Deals()
    for relay in RELAYS:
        deals.rates.of(relay).at_least(1_000_000.0)
        deals.rates.dealt(relay, 0.0, is_try=False)
    deals.rates.in_vain("a", 0.0, 0.1)
    deals.rates.dealt("a", 0.1, is_try=True)
    assert {deals.deal(0.2)[0] for _ in range(20)} == {"b", "c"}
    assert deals.deal(0.3, candidates=["a"]) is None, "it is not the one to fill a gap either"
    assert deals.deal(3.0)[0] == "a"
    deals.rates.passed_on("a")
    assert {deals.deal(3.1)[0] for _ in range(20)} == set("abc")


def test_a_request_tells_that_a_relay_takes_longer_than_usual():
    deals = Deals(count=5)
    for relay in RELAYS:
        deals.rates.of(relay).at_least(1_000_000.0)
    dealt = dict(deals.deal(0.0, candidates=[relay]) for relay in RELAYS)
    for relay in "bc":
        deals.dealer.announced("b" if relay == "c" else "c", dealt[relay], 0.1)
    assert not deals.dealer.may_serve("b", dealt["a"], 0.2), (
        "a second is not over, nor what is usual"
    )
    assert deals.rates.has_failed("a") is False
    assert deals.dealer.may_serve("b", dealt["a"], 0.5)
    assert deals.rates.has_failed("a"), "it is not credited with what we send in its stead"
    assert deals.dealer.redealt == 1
    assert not deals.rates.has_failed("b")


def test_the_first_to_follow_are_dealt_one_chunk_until_all_do():
    deals = Deals(relays=RELAYS[:2], linked=3)
    assert {deals.deal(0.0)[0], deals.deal(0.0)[0]} == {"a", "b"}
    assert deals.deal(0.01) is None
    deals.dealer.relay_joined("c", now=0.02)
    deals.known["c"] = ChunkSet(401)
    deals.dealt["c"] = []
    assert deals.deal(0.02)[0] == "c"
    assert {deals.deal(0.02)[0] for _ in range(3)} == set("abc")


def test_who_never_follows_is_not_waited_for():
    deals = Deals(relays=RELAYS[:2], linked=3)
    assert {deals.deal(0.0)[0], deals.deal(0.0)[0]} == {"a", "b"}
    assert deals.deal(0.01) is None
    due_s = deals.dealer.next_deadline()
    assert due_s <= GATHER_S
    deals.dealer.on_time(due_s)
    assert deals.deal(due_s) is not None


def test_known_relays_do_not_wait_for_those_to_come():
    deals = Deals(relays=RELAYS[:2], linked=3)
    for relay in RELAYS[:2]:
        deals.rates.of(relay).penalise(2e6)
    assert all(deals.deal(0.0) for _ in range(8))


def test_of_many_relays_with_little_to_do_the_quick_are_dealt_most():
    relays = [PeerId(f"{number:02}") for number in range(50)]
    deals = Deals(count=401, relays=relays)
    quick, now = set(relays[::5]), 0.0
    for _ in range(400):
        relay, index = deals.deal(now, fanout=4)
        others = [other for other in relays if other != relay][:4]
        for other in others:
            deals.dealer.announced(other, index, now + (0.02 if relay in quick else 0.1))
        now += 0.11
    share = sum(len(deals.dealt[relay]) for relay in quick) / 400
    assert share > 0.7, "beside the first of each, and one try of eight"
