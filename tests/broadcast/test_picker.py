import random

import pytest

from echo2p2p.broadcast.chunk_sets import ChunkSet
from echo2p2p.broadcast.picker import Pick, Picker
from echo2p2p.broadcast.settings import SwarmSettings
from echo2p2p.ids import SOURCE, ManifestId, PeerId

ID = ManifestId(bytes(16))
OTHER = ManifestId(bytes(15) + b"x")
A, B, C = (PeerId(name) for name in "abc")
CHUNK = 1000
COUNT = 200


def picker(*links, count=COUNT, held=(0,), live=False, **changes):
    """Return a picker of the links that follows one payload, the index held already."""
    ours = Picker(random.Random(0), SwarmSettings(window_first_bytes=4 * CHUNK, **changes))
    for link in links:
        ours.link_opened(link, is_source=link == SOURCE, rtt_s=0.05)
    follow(ours, ID, count, held, live=live)
    return ours


def follow(ours, manifest_id, count=COUNT, held=(0,), *, live=False):
    missing = ChunkSet(count, (index for index in range(count) if index not in held))
    ours.follow(manifest_id, missing=missing, chunk_bytes=CHUNK, live=live)


def offer(ours, link, indices, now=0.0, grace_s=0.0, manifest_id=ID):
    ours.offered(link, manifest_id, indices, now, grace_s=grace_s)


def bring(ours, picks, now):
    for pick in picks:
        asked, cancels = ours.arrived(pick.link, pick.manifest_id, pick.index, CHUNK, now)
        assert asked
        assert not cancels
        ours.stored(pick.manifest_id, pick.index, now)


def test_each_chunk_is_asked_of_one_holder_within_its_window():
    ours = picker(A, B)
    offer(ours, A, range(COUNT))
    offer(ours, B, range(100))
    picks = ours.plan(0.0)
    assert [sum(pick.link == link for pick in picks) for link in (A, B)] == [4, 4]
    assert len({pick.index for pick in picks}) == 8
    assert all(pick.index < 100 for pick in picks if pick.link == B)
    assert ours.plan(0.0) == []


@pytest.mark.parametrize(("rtt_s", "asked_at_s"), [(0.05, 0.5), (1.2, 3.6)])
def test_a_push_from_far_away_is_waited_for_longer(rtt_s, asked_at_s):
    ours = Picker(random.Random(0), SwarmSettings())
    ours.link_opened(A, is_source=False, rtt_s=rtt_s)
    follow(ours, ID, held=(0,), live=True)
    offer(ours, A, [5], grace_s=0.5)
    assert ours.plan(asked_at_s - 0.01) == []
    assert ours.plan(asked_at_s) == [Pick(A, ID, 5)]


def test_the_rarest_goes_first():
    ours = picker(A, B, C)
    offer(ours, A, range(1, 50))
    offer(ours, B, range(1, 46))
    offer(ours, C, range(1, 48))
    assert {pick.index for pick in ours.plan(0.0, [A])} == {46, 47, 48, 49}


def test_the_index_is_asked_for_before_anything_and_nothing_else_until_it_came():
    ours = picker(A, B, held=())
    offer(ours, A, range(COUNT))
    offer(ours, B, range(COUNT))
    picks = ours.plan(0.0)
    assert [pick.index for pick in picks] == [0]
    bring(ours, picks, 0.1)
    assert len(ours.plan(0.1)) == 8


def test_live_deltas_go_before_anchors():
    ours = picker(A)
    follow(ours, OTHER, live=True)
    offer(ours, A, range(1, 100))
    offer(ours, A, [1, 2], manifest_id=OTHER)
    picks = ours.plan(0.0)
    assert [pick.manifest_id for pick in picks] == [OTHER, OTHER, ID, ID]


def test_a_window_grows_with_rate_and_round_trip():
    ours = picker(A, count=3000)
    offer(ours, A, range(3000))
    now, outstanding = 0.0, ours.plan(0.0)
    for _ in range(200):
        now += 0.01
        bring(ours, outstanding[:3], now)  # 300 kB/s
        outstanding = outstanding[3:] + ours.plan(now)
    assert len(outstanding) == pytest.approx(1.5 * 300_000 * 0.15 / CHUNK + 1, abs=12)


def test_nothing_is_asked_for_within_the_grace_and_a_push_makes_it_needless():
    ours = picker(A)
    offer(ours, A, [1, 2], now=10.0, grace_s=0.5)
    assert ours.plan(10.4) == []
    assert ours.next_deadline() == 10.5
    asked, _ = ours.arrived(A, ID, 1, CHUNK, 10.2)
    assert not asked
    ours.stored(ID, 1, 10.2)
    ours.on_time(10.5)
    assert [pick.index for pick in ours.plan(10.5)] == [2]


def test_the_grace_grows_with_the_time_that_pushes_take():
    ours = picker(A)
    for index in range(1, 60):
        offer(ours, A, [index], now=float(index), grace_s=0.5)
        ours.arrived(A, ID, index, CHUNK, index + 0.9)
        ours.stored(ID, index, index + 0.9)
    offer(ours, A, [100], now=100.0, grace_s=0.5)
    assert ours.plan(101.5) == []
    assert [pick.index for pick in ours.plan(101.9)] == [100]


def test_a_link_that_brings_nothing_loses_its_chunks_and_is_left_alone_after_two_misses():
    ours = picker(A, B)
    offer(ours, A, range(1, 50))
    first = ours.plan(0.0)
    assert {pick.link for pick in first} == {A}
    offer(ours, B, range(1, 50))
    ours.plan(0.0, [B])
    now, cancelled = 0.0, []
    while not cancelled:
        now = ours.next_deadline()
        cancelled += [pick for pick in ours.on_time(now).cancels if pick.link == A]
        bring(ours, [pick for pick in ours.plan(now) if pick.link == B], now)
    assert now == pytest.approx(1.0, abs=0.1)
    assert {pick.index for pick in cancelled} == {pick.index for pick in first}
    misses = 0
    while now < 30:
        now = max(ours.next_deadline(), now + 0.01)
        misses += bool(ours.on_time(now).cancels)
        if ours.plan(now, [A]):
            asked_again = now
            break
    assert asked_again >= 1.0


def test_a_link_that_only_misses_is_given_up_but_never_the_source():
    for link, hopeless in ((A, (A,)), (SOURCE, ())):
        ours = picker(link, misses_max=3)
        offer(ours, link, range(1, 50))
        now, given_up = 0.0, ()
        for _ in range(200):
            ours.plan(now)
            now = max(ours.next_deadline(), now + 0.01)
            given_up = given_up or ours.on_time(now).hopeless
        assert given_up == hopeless


def test_a_slow_link_that_goes_on_bringing_chunks_misses_nothing():
    ours = picker(A)
    offer(ours, A, range(1, 50))
    queue, now = ours.plan(0.0), 0.0
    for _ in range(8):
        now += 0.9
        assert ours.on_time(now).cancels == ()
        bring(ours, queue[:1], now)
        queue = queue[1:] + ours.plan(now)


def test_in_the_endgame_one_second_holder_is_asked_and_the_loser_cancelled():
    ours = picker(A, B, C, held=range(COUNT - 1))
    last = COUNT - 1
    offer(ours, A, [last])
    assert ours.plan(0.0) == [Pick(A, ID, last)]
    offer(ours, B, [last])
    offer(ours, C, [last])
    assert ours.plan(0.1) == []
    assert [pick.index for pick in ours.plan(0.5)] == [last]
    assert ours.plan(0.6) == [], "two requesters at most"
    _, cancels = ours.arrived(B, ID, last, CHUNK, 0.7)
    assert cancels == [Pick(A, ID, last)]


def test_there_is_no_endgame_while_a_chunk_is_left_that_nobody_was_asked_for():
    ours = picker(A, B, held=range(COUNT - 2))
    offer(ours, A, [COUNT - 1])
    ours.plan(0.0)
    offer(ours, B, [COUNT - 1])
    assert ours.plan(0.5) == []


def test_the_source_is_asked_last_but_at_once_for_what_only_it_holds():
    ours = picker(A, SOURCE)
    offer(ours, SOURCE, range(1, 20))
    offer(ours, A, range(1, 19))
    assert [pick.index for pick in ours.plan(0.0, [SOURCE])] == [19]
    assert ours.plan(0.9, [SOURCE]) == []
    assert len(ours.plan(1.0, [SOURCE])) == 3


@pytest.mark.parametrize("reason", ["busy", "not_held", "unknown"])
def test_a_reject_sends_the_request_to_another_at_once(reason):
    ours = picker(A, B)
    offer(ours, A, [1, 2])
    ours.plan(0.0)
    offer(ours, B, [1])
    ours.rejected(A, ID, 1, reason, 0.1)
    assert ours.plan(0.1, [B]) == [Pick(B, ID, 1)]
    ours.rejected(B, ID, 1, "not_held", 0.2)
    again = ours.plan(0.2)
    assert again == []
    again = ours.plan(1.2)
    assert again == ([Pick(A, ID, 1)] if reason == "busy" else [])


def test_who_does_not_know_the_payload_is_asked_for_nothing_of_it_any_more():
    ours = picker(A, B)
    offer(ours, A, range(1, 5))
    assert {pick.index for pick in ours.plan(0.0)} == {1, 2, 3, 4}
    ours.rejected(A, ID, 0, "unknown", 0.1)
    offer(ours, B, range(1, 5))
    assert {(pick.link, pick.index) for pick in ours.plan(0.1)} == {(B, i) for i in range(1, 5)}
    late = ours.on_time(100.0).cancels
    assert {pick.link for pick in late} == {B}, "the other has missed nothing"


def test_unasked_rejects_change_nothing_that_matters():
    ours = picker(A)
    ours.rejected(A, ID, 7, "not_held", 0.0)
    ours.rejected(A, OTHER, 7, "unknown", 0.0)
    offer(ours, A, [7])
    assert ours.plan(0.0) == [Pick(A, ID, 7)]


def test_a_closed_link_frees_what_was_asked_of_it():
    ours = picker(A, B)
    offer(ours, A, [1, 2, 3])
    ours.plan(0.0)
    offer(ours, B, [1, 2])
    ours.link_closed(A)
    assert {pick.index for pick in ours.plan(0.1)} == {1, 2}
    ours.link_closed(B)
    assert ours.plan(10.0) == []


def test_a_wrong_chunk_is_asked_for_again():
    ours = picker(A, B)
    offer(ours, A, [1])
    offer(ours, B, [1])
    (pick,) = ours.plan(0.0)
    ours.arrived(pick.link, ID, 1, CHUNK, 0.1)
    assert ours.plan(0.1) == [], "it may be right"
    ours.lost(ID, 1)
    assert len(ours.plan(0.1)) == 1


def test_a_dropped_payload_takes_its_requests_back():
    ours = picker(A)
    offer(ours, A, [1, 2])
    picks = ours.plan(0.0)
    assert sorted(ours.drop(ID, 0.1), key=lambda pick: pick.index) == sorted(
        picks, key=lambda pick: pick.index
    )
    assert ours.plan(5.0) == []
    assert ours.drop(ID, 0.2) == []
    assert ours.arrived(A, ID, 1, CHUNK, 0.3) == (False, [])


def test_nothing_is_seen_to_any_more_of_a_payload_that_is_whole():
    ours = picker(A, count=2, retry_s=5.0)
    offer(ours, A, [1])
    (pick,) = ours.plan(0.0)
    ours.rejected(A, ID, 1, "busy", 0.0)
    ours.arrived(A, ID, pick.index, CHUNK, 0.0)
    assert ours.stored(ID, 1, 0.0) == []
    ours.on_time(1.0)
    offer(ours, A, [0, 1], grace_s=1.0)
    assert ours.next_deadline() == float("inf")


@pytest.mark.parametrize(("others", "asked"), [(3, 2), (4, 1)])
def test_a_slow_link_of_many_is_asked_for_one_chunk_at_a_time(others, asked):
    ours = picker(A, B, C, *map(PeerId, "de"))
    offer(ours, A, range(100))
    bring(ours, [pick for pick in ours.plan(0.0) if pick.link == A], 2.0)
    bring(ours, [pick for pick in ours.plan(2.0) if pick.link == A], 4.0)
    for number in range(others):
        offer(ours, [B, C, PeerId("d"), PeerId("e")][number], range(150, 160), 4.0)
    assert sum(pick.link == A for pick in ours.plan(4.0)) == asked
