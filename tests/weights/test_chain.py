import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.errors import LocalProtocolError
from echo2p2p.ids import ManifestId, Version, digest_of
from echo2p2p.weights.anchor import decode_anchor, encode_anchor
from echo2p2p.weights.chain import (
    SKIP_STATE_BYTES_MAX,
    Link,
    SkipBases,
    Tail,
    anchor_due,
    plan_path,
    retained,
    skip_bases,
    spans_for,
    tail_of,
)
from echo2p2p.weights.delta import apply_delta, encode_delta
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.state import state_digest


def anchor(version, wire_bytes=100):
    return Link(b"a%015d" % version, version, None, wire_bytes)


def delta(base, version, wire_bytes=10):
    return Link(b"d%07d%08d" % (base, version), version, base, wire_bytes)


CHAIN = [anchor(0), delta(0, 1), delta(1, 2), anchor(2), delta(2, 3), delta(3, 4)]


def test_a_joiner_gets_the_newest_anchor_and_its_tail():
    assert plan_path(CHAIN, None, 4) == (anchor(2), delta(2, 3), delta(3, 4))


def test_a_follower_gets_the_deltas_it_lacks():
    assert plan_path(reversed(CHAIN), 1, 3) == (delta(1, 2), delta(2, 3))


def test_who_is_there_gets_nothing():
    assert plan_path(CHAIN, 4, 4) == ()
    assert plan_path([], 4, 4) == ()


def test_an_anchor_is_used_when_it_is_cheaper_than_the_deltas():
    links = [delta(0, 1, 80), delta(1, 2, 80), anchor(1, 10)]
    assert plan_path(links, 0, 2) == (anchor(1, 10), delta(1, 2, 80))


def test_a_skip_delta_is_used_when_it_is_cheaper_and_on_equal_cost_as_it_is_one_link():
    singles = [delta(0, 1), delta(1, 2)]
    assert plan_path([*singles, delta(0, 2, 21)], 0, 2) == tuple(singles)
    assert plan_path([*singles, delta(0, 2, 20)], 0, 2) == (delta(0, 2, 20),)


def test_equal_links_are_chosen_by_name():
    first, second = Link(b"a", 1, None, 5), Link(b"b", 1, None, 5)
    assert plan_path([second, first], None, 1) == plan_path([first, second], None, 1) == (first,)


def test_there_may_be_no_way():
    assert plan_path([delta(0, 1), delta(2, 3)], 0, 3) is None
    assert plan_path([delta(0, 1)], None, 1) is None
    assert plan_path(CHAIN, 3, 9) is None


def test_a_newer_holder_can_only_go_back_by_an_anchor():
    assert plan_path(CHAIN, 4, 2) == (anchor(2),)
    assert plan_path(CHAIN, 4, 1) == (anchor(0), delta(0, 1))


@pytest.mark.parametrize("bad", [delta(2, 2), delta(3, 2), anchor(1, -1)])
def test_an_impossible_link_is_our_own_bug(bad):
    with pytest.raises(LocalProtocolError):
        plan_path([bad], None, 2)


def cheapest_by_brute_force(links, have, target):
    """Cost and number of links of the best of all sets of links that form a path."""
    if have == target:
        return (0, 0)
    best = None
    for count in range(1, len(links) + 1):
        for subset in itertools.combinations(sorted(links, key=lambda x: x.version), count):
            starts = subset[0].base_version in (None, have)
            joined = all(a.version == b.base_version for a, b in itertools.pairwise(subset))
            if starts and joined and subset[-1].version == target:
                cost = (sum(x.wire_bytes for x in subset), count)
                best = cost if best is None else min(best, cost)
    return best


@st.composite
def link_sets(draw):
    pairs = draw(
        st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 6)), max_size=9, unique=True)
    )
    return [
        Link(b"%d-%d" % pair, pair[1], None if pair[0] < 0 else pair[0], draw(st.integers(0, 6)))
        for pair in pairs
        if pair[0] < pair[1]
    ]


@settings(max_examples=300, deadline=None)
@given(link_sets(), st.none() | st.integers(0, 6), st.integers(0, 6), st.randoms())
def test_the_path_is_as_good_as_the_best_of_all(links, have, target, rng):
    path = plan_path(links, have, target)
    best = cheapest_by_brute_force(links, have, target)
    shuffled = links[:]
    rng.shuffle(shuffled)
    assert plan_path(shuffled, have, target) == path
    if path is None:
        assert best is None
        return
    assert (sum(x.wire_bytes for x in path), len(path)) == best
    at = have
    for link in path:
        assert link.base_version in (None, at)
        at = link.version
    assert at == target


def test_an_anchor_is_due_at_a_quarter():
    assert not anchor_due(24, 100)
    assert anchor_due(25, 100)


def test_the_newest_anchor_and_its_tail_are_kept_and_the_past_is_not():
    assert retained(CHAIN, set()) == (anchor(2), delta(2, 3), delta(3, 4))


def test_what_a_live_holder_needs_is_kept():
    assert retained(CHAIN, {1}) == (anchor(2), delta(1, 2), delta(2, 3), delta(3, 4))
    assert retained(CHAIN, {4, 99}) == retained(CHAIN, set())


def test_a_joiner_may_need_an_older_cheaper_anchor():
    links = [anchor(0, 10), delta(0, 1, 10), anchor(1, 500)]
    assert retained(links, set()) == (anchor(1, 500),)
    assert retained(links, {None}) == (anchor(0, 10), anchor(1, 500), delta(0, 1, 10))


def test_without_an_anchor_only_paths_are_kept():
    links = [delta(0, 1), delta(1, 2)]
    assert retained(links, set()) == ()
    assert retained(links, {1}) == (delta(1, 2),)
    assert retained([], {None}) == ()


@settings(deadline=None)
@given(link_sets(), st.sets(st.none() | st.integers(0, 6)))
def test_forgetting_costs_no_holder_a_byte(links, holders):
    if not links:
        return
    newest = max(link.version for link in links)
    kept = retained(links, holders)
    for have in holders:
        assert plan_path(kept, have, newest) == plan_path(links, have, newest)


def test_merged_deltas_start_at_multiples_of_their_span():
    assert [skip_bases(version) for version in (0, 3, 4, 8, 16, 20, 32)] == [
        (),
        (),
        (0,),
        (4,),
        (12, 0),
        (16,),
        (28, 16),
    ]


def test_skip_bases_holds_one_state_a_span_and_only_what_it_saw():
    bases = SkipBases()
    states = {version: bytearray([version]) for version in range(40)}
    for version in range(2, 40):  # a publisher that was restarted at 2
        wanted = [base for base in skip_bases(version) if base >= 2]
        assert [(base, bits) for base, _, bits in bases.due(version)] == [
            (base, states[base]) for base in wanted
        ]
        bases.published(version, bytes(32), states[version])


def test_what_somebody_is_fetching_is_kept_whatever_else_there_is():
    kept = retained(CHAIN, {4}, fetching={delta(0, 1).manifest_id})
    assert delta(0, 1) in kept
    assert delta(1, 2) not in kept


def test_spare_bytes_keep_the_newest_ways_back_but_no_anchor_that_would_help_nobody():
    assert retained(CHAIN, {4}, spare_bytes=9) == retained(CHAIN, {4})
    needed = set(retained(CHAIN, {4}))
    assert set(retained(CHAIN, {4}, spare_bytes=10)) == {delta(1, 2), *needed}
    assert set(retained(CHAIN, {4}, spare_bytes=1000)) == set(CHAIN) - {anchor(0)}


def test_spare_bytes_are_not_spent_on_ways_that_cost_as_much_as_an_anchor():
    links = [anchor(0), *(delta(n, n + 1, 30) for n in range(6)), anchor(6)]
    kept = retained(links, {6}, spare_bytes=1000)
    assert kept == (*(delta(n, n + 1, 30) for n in (2, 3, 4)), anchor(6), delta(5, 6, 30))
    assert retained([*links, delta(6, 7, 30)], {7}, spare_bytes=1000) == (*kept, delta(6, 7, 30))


def test_spare_bytes_go_to_merged_deltas_and_to_what_leads_to_them_but_not_to_what_they_join():
    singles = [delta(n, n + 1) for n in range(9)]
    merged = [delta(0, 4, 20), delta(4, 8, 20)]
    kept = retained([anchor(9), *singles, *merged], {9}, spare_bytes=1000)
    gone = {delta(0, 1), delta(4, 5)}
    assert set(kept) == {anchor(9), *singles, *merged} - gone


@settings(deadline=None)
@given(link_sets())
def test_with_room_for_it_nobody_who_comes_back_pays_for_what_was_forgotten(links):
    if not links:
        return
    newest = max(link.version for link in links)
    kept = retained(links, {None}, spare_bytes=1 << 30)
    for have in range(newest):
        before, after = plan_path(links, have, newest), plan_path(kept, have, newest)
        assert (before is None) == (after is None)
        if before is not None:
            assert sum(x.wire_bytes for x in after) == sum(x.wire_bytes for x in before)


def test_the_tail_is_the_newest_anchor_and_the_single_deltas_after_it():
    assert tail_of([]) == Tail(0, 0, 0)
    assert tail_of(CHAIN) == Tail(100, 2, 20)
    assert tail_of([*CHAIN, delta(0, 4, 30), delta(2, 4, 15)]) == tail_of(CHAIN)
    assert tail_of([delta(0, 1), delta(1, 2), delta(0, 2)]) == Tail(0, 2, 20)


def test_merged_deltas_are_made_unasked_only_where_their_bases_take_little_memory():
    assert spans_for(SKIP_STATE_BYTES_MAX) == (4, 16)
    assert spans_for(SKIP_STATE_BYTES_MAX + 1) == ()


class Publisher:
    """Publishes random-walk weights with merged deltas and anchors; remembers each payload."""

    def __init__(self, elements=3000):
        self.layout = plan_layout([("w", "bf16", (elements,), ())])
        self.masters = np.random.default_rng(1).normal(0, 0.02, elements).astype(np.float32)
        self.draws = np.random.default_rng(2)
        self.links, self.payloads, self.states = [], {}, []
        self.bases = SkipBases()
        self.since_anchor = self.anchor_bytes = 0

    def publish(self):
        version = Version(len(self.states))
        self.masters += self.draws.normal(0, 3e-6, self.masters.size).astype(np.float32)
        bits = bytearray((self.masters.view("<u4") >> 16).astype("<u2").tobytes())
        bases = [base for base in self.bases.due(version) if base[0] != version - 1]
        if version:
            bases.append((version - 1, b"", self.states[-1]))
        for base, _, old in bases:
            size = self.add(base, version, encode_delta(self.layout, old, bits))
        if not version or anchor_due(self.since_anchor + size, self.anchor_bytes):
            self.anchor_bytes = self.add(None, version, encode_anchor(self.layout, bits))
            self.since_anchor = 0
        else:
            self.since_anchor += size
        self.bases.published(version, state_digest(self.layout, bits), bits)
        self.states.append(bits)

    def add(self, base, version, payload):
        name = ManifestId(digest_of(payload + bytes([version]))[:16])
        self.payloads[name] = payload
        self.links.append(Link(name, version, base, len(payload)))
        return len(payload)

    def follow(self, path, state):
        for link in path:
            if link.base_version is None:
                decode_anchor(self.layout, self.payloads[link.manifest_id], state)
            else:
                apply_delta(self.layout, self.payloads[link.manifest_id], state)
        return state


@pytest.mark.parametrize("spare_bytes", [0, 1 << 30])
def test_a_peer_that_was_away_for_100_versions_comes_back_bit_exactly_at_the_least_cost(
    spare_bytes,
):
    publisher = Publisher()
    for _ in range(121):
        publisher.publish()
        publisher.links = list(
            retained(publisher.links, {None, len(publisher.states) - 1}, spare_bytes=spare_bytes)
        )
    links, away, newest = publisher.links, Version(20), Version(120)
    path = plan_path(links, away, newest)
    state = publisher.follow(path, bytearray(publisher.states[away]))
    assert state == publisher.states[newest]
    cost = sum(link.wire_bytes for link in path)
    joiners = plan_path(links, None, newest)
    assert publisher.follow(joiners, bytearray(len(state))) == publisher.states[newest]
    assert cost <= sum(link.wire_bytes for link in joiners)
    merged = plan_path([link for link in links if link.base_version is not None], away, newest)
    assert (merged is None) == (spare_bytes == 0)
    if merged is not None:
        assert cost <= sum(link.wire_bytes for link in merged)
        assert len(merged) < 15


def test_with_room_enough_whoever_comes_back_pays_as_if_nothing_had_ever_been_forgotten():
    publisher, everything = Publisher(), set()
    for newest in range(100):
        publisher.publish()
        everything.update(publisher.links)
        publisher.links = list(retained(publisher.links, {None, newest}, spare_bytes=1 << 30))
        if newest % 11 == 0:
            for have in range(0, newest, 3):
                ways = (plan_path(links, have, newest) for links in (everything, publisher.links))
                least, kept = (sum(link.wire_bytes for link in way) for way in ways)
                assert kept == least, have
    assert len(publisher.links) < len(everything)


def test_forgetting_never_takes_the_path_of_a_peer_that_comes_along_slowly():
    publisher, rng = Publisher(500), random.Random(3)
    holder, fetching = Version(0), None
    state = None
    for _ in range(60):
        publisher.publish()
        newest = Version(len(publisher.states) - 1)
        busy = {fetching.manifest_id} if fetching else set()
        publisher.links = list(retained(publisher.links, {holder, newest}, fetching=busy))
        names = {link.manifest_id for link in publisher.links}
        if fetching is not None:
            assert fetching.manifest_id in names
        if state is None:
            state = bytearray(publisher.states[0])
        if rng.random() < 0.4:
            if fetching is not None:
                state = publisher.follow([fetching], state)
                holder, fetching = fetching.version, None
                assert state == publisher.states[holder]
            elif holder != newest:
                fetching = plan_path(publisher.links, holder, newest)[0]
