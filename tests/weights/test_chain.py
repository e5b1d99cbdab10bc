import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.errors import LocalProtocolError
from echo2p2p.weights.chain import Link, anchor_due, plan_path, retained


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
