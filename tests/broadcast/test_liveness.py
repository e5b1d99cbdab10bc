import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.broadcast.liveness import Dead, Liveness, SendPing


def test_an_idle_link_is_pinged_every_two_seconds_and_dead_after_six():
    link = Liveness(100.0)
    seen = []
    while not (seen and isinstance(seen[-1][1], Dead)):
        now = link.next_deadline()
        seen.append((now, link.on_time(now)))
    assert seen == [
        (102.0, SendPing(1)),
        (104.0, SendPing(2)),
        (106.0, Dead(6.0)),
    ]


def test_a_link_that_only_receives_tells_the_other_side_that_it_lives():
    link = Liveness(0.0)
    for tenth in range(1, 100):
        link.heard(tenth / 10)
        if link.next_deadline() <= tenth / 10:
            assert link.on_time(tenth / 10) == SendPing(1)
            break
    assert tenth == 20


def test_a_link_that_only_sends_pings_too_and_dies_of_silence():
    link = Liveness(0.0)
    events = []
    for tenth in range(1, 70):
        link.sent(tenth / 10)
        if link.next_deadline() <= tenth / 10:
            events.append(link.on_time(tenth / 10))
    assert events[:2] == [SendPing(1), SendPing(2)]
    assert isinstance(events[2], Dead)


def test_nothing_is_due_before_its_time():
    link = Liveness(0.0)
    assert link.on_time(1.99) is None


def test_a_ping_may_go_a_little_early_where_that_is_asked_for():
    link = Liveness(0.0, early_s=0.5)
    assert link.next_deadline() == 2.0
    assert link.on_time(1.4) is None
    assert link.on_time(1.5) == SendPing(1)
    assert link.next_deadline() == 3.5


def test_only_the_answer_to_the_last_ping_measures_the_round_trip():
    link = Liveness(0.0)
    assert link.pong(0, 1.0) is None
    link.on_time(2.0)
    assert link.pong(7, 2.5) is None
    assert link.pong(1, 2.5) == pytest.approx(0.5)


@given(st.lists(st.tuples(st.sampled_from(["heard", "sent"]), st.floats(0.01, 1.9)), max_size=50))
def test_a_link_that_is_heard_within_the_limit_never_dies(events):
    link, now, heard = Liveness(0.0), 0.0, 0.0
    for kind, wait in events:
        now += wait
        while link.next_deadline() <= now:
            due = link.next_deadline()
            result = link.on_time(due)
            if isinstance(result, Dead):
                assert due - heard >= 6.0 - 1e-9
                return
            assert isinstance(result, SendPing)
        getattr(link, kind)(now)
        heard = now if kind == "heard" else heard
