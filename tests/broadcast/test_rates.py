import pytest

from echo2p2p.broadcast.rates import SAMPLE_BUSY_S, SAMPLES, BusyRate


def work(rate, start, seconds, bytes_per_s, step=0.05):
    """Do work from ``start`` on; return when it ends."""
    now = start
    rate.start(now)
    for _ in range(round(seconds / step)):
        now += step
        rate.add(round(bytes_per_s * step), now)
    return now


def test_a_rate_is_unknown_until_two_samples_are_in():
    rate = BusyRate()
    now = work(rate, 0.0, SAMPLE_BUSY_S, 1000)
    assert rate.bytes_per_s is None
    work(rate, now, SAMPLE_BUSY_S + 0.05, 1000)
    assert rate.bytes_per_s == pytest.approx(1000)


def test_idle_time_does_not_count_but_a_stall_in_the_middle_of_work_does():
    rate = BusyRate()
    now = work(rate, 0.0, 1.0, 1000)
    rate.stop(now)
    now = work(rate, now + 100.0, 1.0, 1000)
    assert rate.bytes_per_s == pytest.approx(1000)
    for _ in range(SAMPLES):
        now += SAMPLE_BUSY_S
        rate.tick(now)
    assert rate.bytes_per_s == pytest.approx(0.0, abs=200)


def test_a_trickle_does_not_lower_it_at_once_and_a_slow_down_does_in_the_end():
    rate = BusyRate()
    now = work(rate, 0.0, 1.0, 1000)
    now = work(rate, now, SAMPLE_BUSY_S, 100)
    assert rate.bytes_per_s == pytest.approx(1000)
    work(rate, now, SAMPLES * SAMPLE_BUSY_S, 100)
    assert rate.bytes_per_s == pytest.approx(100)


def test_a_penalty_halves_what_is_known_or_assumed():
    rate = BusyRate()
    work(rate, 0.0, 1.0, 1000)
    rate.penalise(assumed=1)
    assert rate.bytes_per_s == pytest.approx(500)
    unknown = BusyRate()
    unknown.penalise(assumed=100)
    assert unknown.bytes_per_s == pytest.approx(50)


def test_what_is_done_without_work_is_ignored():
    rate = BusyRate()
    rate.add(10**9, 5.0)
    work(rate, 6.0, 1.0, 1000)
    assert rate.bytes_per_s == pytest.approx(1000)


def test_who_did_some_work_quickly_is_not_held_to_a_penalty():
    rate = BusyRate()
    rate.at_least(10**9)
    assert rate.bytes_per_s is None, "too little is known"
    work(rate, 0.0, 1.0, 1000)
    for _ in range(5):
        rate.penalise(assumed=1)
    rate.at_least(400.0)
    assert rate.bytes_per_s == pytest.approx(400)
    rate.at_least(300.0)
    assert rate.bytes_per_s == pytest.approx(400), "it can do more"
