import pytest

from echo2p2p.broadcast.relay_rates import (
    QUICK_MAX,
    TRIES_DOUBLED,
    TRY_AGAIN_S,
    TRY_EVERY,
    RelayRates,
)
from echo2p2p.ids import PeerId

RELAY = PeerId("a")


def pause_s(rates, now):
    """Try the relay; return after how long it is to be tried again."""
    rates.dealt(RELAY, now, is_try=True)
    low, high = 0.0, 1000.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if rates.is_to_try(RELAY, now + middle) else (middle, high)
    return round(high, 1)


def test_who_passes_nothing_on_is_tried_half_as_often_each_time():
    rates, now, pauses = RelayRates(), 0.0, []
    for _ in range(TRIES_DOUBLED + 2):
        pauses.append(pause_s(rates, now))
        rates.in_vain(RELAY, now, now + 1)
        now += pauses[-1] + 1
    assert pauses[:4] == [TRY_AGAIN_S * each for each in (1, 2, 4, 8)]
    assert pauses[-1] == pauses[-2] == TRY_AGAIN_S * 2**TRIES_DOUBLED
    rates.passed_on(RELAY)
    assert pause_s(rates, now) == TRY_AGAIN_S


def test_what_was_under_way_when_a_line_broke_down_is_one_failure():
    rates = RelayRates()
    for dealt_s in (0.0, 0.1, 0.2, 0.3):
        rates.in_vain(RELAY, dealt_s, 2.0 + dealt_s)
    assert pause_s(rates, 3.0) == 2 * TRY_AGAIN_S
    rates.in_vain(RELAY, 3.0, 4.0)
    assert pause_s(rates, 5.0) == 4 * TRY_AGAIN_S


def test_before_it_is_measured_a_relay_is_judged_by_its_first_copies():
    rates = RelayRates()
    usual = rates.estimate(PeerId("new"))
    for relay, took_s in (("a", 0.1), ("b", 0.2), ("c", 0.3), ("d", 100.0)):
        rates.copied(PeerId(relay), took_s, 100_000)
    a, b, c, d, new = (rates.estimate(PeerId(relay)) for relay in ("a", "b", "c", "d", "new"))
    assert a == pytest.approx(2 * b) == pytest.approx(3 * c)
    assert a > new > c > d
    assert (new, d) == (usual, usual / QUICK_MAX)
    rates.allowed = {PeerId("a"): usual / 3}
    assert rates.estimate(PeerId("a")) == usual / 3, "no more than its owner allows"
    rates.of(PeerId("d")).penalise(8e6)
    assert rates.estimate(PeerId("d")) == 4e6, "what is measured counts"
    rates.forget(PeerId("b"))
    assert rates.estimate(PeerId("b")) == 4e6, "the mean of the measured"


def test_one_deal_of_a_few_is_a_try():
    rates = RelayRates()
    tries = []
    for number in range(3 * TRY_EVERY):
        tries.append(rates.may_try)
        rates.dealt(RELAY, float(number), is_try=rates.may_try)
    assert [number for number, is_try in enumerate(tries) if is_try] == [7, 15, 23]
