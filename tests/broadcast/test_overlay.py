import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.broadcast.overlay import (
    DEGREE,
    SOURCE_LINKS_MAX,
    Member,
    link_newcomer,
    plan_overlay,
    plan_source_links,
    unlink,
)
from echo2p2p.broadcast.settings import MESH_NODES_MAX
from echo2p2p.ids import PeerId


def members(count, undialable=0, capacity=lambda i: 1.0):
    return [Member(PeerId(f"{i:05}"), capacity(i), dialable=i >= undialable) for i in range(count)]


def parts(plan):
    left, count = set(plan), 0
    while left:
        count += 1
        front = [left.pop()]
        while front:
            for neighbour in plan[front.pop()]:
                if neighbour in left:
                    left.discard(neighbour)
                    front.append(neighbour)
    return count


def check(plan, nodes):
    undialable = {node.peer_id for node in nodes if not node.dialable}
    assert set(plan) == {node.peer_id for node in nodes}
    for peer_id, neighbours in plan.items():
        assert list(neighbours) == sorted(set(neighbours))
        assert peer_id not in neighbours
        for neighbour in neighbours:
            assert peer_id in plan[neighbour]
            assert not {peer_id, neighbour} <= undialable


@pytest.mark.parametrize("count", [0, 1, 2, 3, MESH_NODES_MAX])
def test_a_small_run_is_a_full_mesh(count):
    nodes = members(count)
    plan = plan_overlay(nodes, rng=random.Random(0))
    check(plan, nodes)
    assert all(len(neighbours) == count - 1 for neighbours in plan.values())


@pytest.mark.parametrize("count", [17, 18, 33, 100, 400])
@pytest.mark.parametrize("seed", range(3))
def test_a_large_run_is_connected_with_about_sixteen_links_each(count, seed):
    nodes = members(count, capacity=lambda i: 1.0 + i % 7)
    plan = plan_overlay(nodes, rng=random.Random(seed))
    check(plan, nodes)
    assert parts(plan) == 1
    degrees = sorted(map(len, plan.values()))
    assert degrees[0] >= min(DEGREE, count - 1)
    assert degrees[-1] <= 3 * DEGREE
    assert sum(degrees) / count < 1.6 * DEGREE


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 60), st.integers(0, 60), st.integers(2, 20), st.integers(0, 10**6))
def test_whatever_can_be_connected_is(count, undialable, degree, seed):
    undialable = min(undialable, count)
    nodes = members(count, undialable)
    plan = plan_overlay(nodes, degree=degree, rng=random.Random(seed))
    check(plan, nodes)
    assert parts(plan) == (1 if undialable < count else count)


def test_a_good_uplink_has_more_links():
    nodes = members(200, capacity=lambda i: 50.0 if i < 20 else 1.0)
    plan = plan_overlay(nodes, rng=random.Random(1))
    fast = sum(len(plan[node.peer_id]) for node in nodes[:20]) / 20
    slow = sum(len(plan[node.peer_id]) for node in nodes[20:]) / 180
    assert fast > 1.4 * slow


def test_old_links_are_kept_when_members_come_and_go():
    old = members(60)
    before = plan_overlay(old, rng=random.Random(1))
    keep = {peer_id: set(links) for peer_id, links in before.items()}
    now = [*old[5:], Member(PeerId("new"), 1.0)]
    after = plan_overlay(now, rng=random.Random(2), keep=keep)
    check(after, now)
    gone = {node.peer_id for node in old[:5]}
    lost = [
        (one, other)
        for one in keep
        for other in keep[one]
        if not {one, other} & gone and other not in after[one]
    ]
    assert not lost
    assert len(after[PeerId("new")]) >= DEGREE


def test_the_same_seed_gives_the_same_plan():
    nodes = members(50)
    assert plan_overlay(nodes, rng=random.Random(3)) == plan_overlay(nodes, rng=random.Random(3))
    assert plan_overlay(nodes, rng=random.Random(3)) != plan_overlay(nodes, rng=random.Random(4))


@pytest.mark.parametrize("degree", [4, 8])
def test_fewer_links_than_a_full_mesh_has_are_enough_for_many(degree):
    nodes = members(200, undialable=40)
    plan = plan_overlay(nodes, degree=degree, rng=random.Random(1))
    check(plan, nodes)
    assert parts(plan) == 1
    assert degree <= sum(map(len, plan.values())) / 200 < 2 * degree


def test_a_newcomer_is_linked_at_once_and_nobody_elses_links_change():
    nodes = members(60)
    before = plan_overlay(nodes, rng=random.Random(1))
    after = dict(before)
    others = [node.peer_id for node in nodes]
    link_newcomer(after, PeerId("new"), others, links=8, rng=random.Random(2))
    check(after, [*nodes, Member(PeerId("new"), 1.0)])
    assert len(after[PeerId("new")]) == 8
    unlink(after, PeerId("new"))
    assert after == before


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_newcomer_among_few_gets_what_there_is(count):
    nodes = members(count)
    plan = plan_overlay(nodes, rng=random.Random(1))
    others = [node.peer_id for node in nodes]
    link_newcomer(plan, PeerId("new"), others, links=8, rng=random.Random(2))
    assert list(plan[PeerId("new")]) == others


def test_newcomers_are_spread_over_those_who_have_few_links():
    nodes = members(40)
    plan = plan_overlay(nodes, rng=random.Random(1))
    for number in range(100):
        link_newcomer(plan, PeerId(f"n{number}"), list(plan), links=8, rng=random.Random(number))
    assert max(map(len, plan.values())) <= 3 * DEGREE


def test_the_source_is_linked_to_all_or_to_the_widest_uplinks():
    few, many = members(SOURCE_LINKS_MAX), members(1000, capacity=lambda i: i % 10)
    assert plan_source_links(few) == {one.peer_id for one in few}
    chosen = plan_source_links(many)
    assert len(chosen) == SOURCE_LINKS_MAX
    assert {one.capacity for one in many if one.peer_id in chosen} == {8, 9}


def test_who_is_linked_to_the_source_stays_until_another_is_much_better():
    nodes = members(10, capacity=lambda i: 10 + i)
    before = frozenset(one.peer_id for one in nodes[:3])
    assert plan_source_links(nodes, most=3, keep=before) == before
    best = Member(PeerId("best"), 30.0)
    after = plan_source_links([*nodes, best], most=3, keep=before)
    assert best.peer_id in after
    assert len(after & before) == 2
    assert plan_source_links(nodes[1:], most=3, keep=before) >= before - {nodes[0].peer_id}
