"""Intervals of held-out scores: textbook values, and how often they are right."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.intervals import difference_interval, mean_interval


def test_wilson_s_interval_has_the_values_of_the_textbook():
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    found = mean_interval([1.0] * 81 + [0.0] * 182)
    assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    found = mean_interval([1.0] * 15 + [0.0] * 133)
    assert (found.low, found.high) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    found = mean_interval([0.0] * 20)
    assert (found.low, found.high) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_newcombe_s_difference_has_the_values_of_the_textbook():
    # Newcombe 1998, "Interval estimation for the difference", table II, method 10: 56/70, 48/80.
    before, after = mean_interval([1.0] * 48 + [0.0] * 32), mean_interval([1.0] * 56 + [0.0] * 14)
    found = difference_interval(before, after)
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_an_interval_holds_its_mean_and_stays_between_0_and_1(scores):
    found = mean_interval(scores)
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0
    assert found.low < found.high


def test_of_a_thousand_intervals_nearly_all_of_95_percent_hold_the_truth():
    rng = random.Random(1)
    for truth in (0.05, 0.3, 0.5):
        held = 0
        for _ in range(300):
            found = mean_interval([float(rng.random() < truth) for _ in range(60)])
            held += found.low <= truth <= found.high
        assert 0.90 < held / 300 < 1.0
