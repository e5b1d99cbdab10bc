import pytest

from echo2p2p.weights.forms import Form
from echo2p2p.weights.policy import QUICKEST, SMALLEST, Experience, PolicyChooser, choose_policy

EXPERIENCE = {
    SMALLEST.name: Experience(raw_bytes=1000, coded_bytes=10, encode_s=1.0),
    QUICKEST.name: Experience(raw_bytes=1000, coded_bytes=20, encode_s=0.5),
}
"""The two are equal at 20 B/s: 1.5 s each."""


@pytest.mark.parametrize(
    ("bytes_per_s", "last", "chosen"),
    [
        (10, SMALLEST, SMALLEST),
        (10, QUICKEST, SMALLEST),
        (19, QUICKEST, QUICKEST),
        (21, SMALLEST, SMALLEST),
        (40, SMALLEST, QUICKEST),
        (40, QUICKEST, QUICKEST),
    ],
)
def test_the_policy_follows_the_link_and_stays_when_it_makes_no_difference(
    bytes_per_s, last, chosen
):
    assert choose_policy(1000, bytes_per_s, EXPERIENCE, last=last).policy is chosen


def test_the_reason_names_both_policies_seconds():
    why = choose_policy(2000, 10, EXPERIENCE).why
    assert why == (
        "smallest at 10 B/s: smallest 2 s encoding + 2 s sending, "
        "quickest 1 s encoding + 4 s sending"
    )


def test_without_a_measured_link_bytes_count():
    choice = choose_policy(1000, 0, EXPERIENCE, last=QUICKEST)
    assert choice.policy is SMALLEST
    assert "not known" in choice.why


def test_an_untried_policy_is_guessed_so_that_a_fast_link_tries_it():
    slow, fast = (choose_policy(8_000_000_000, rate, {}) for rate in (1e6, 1e10))
    assert (slow.policy, fast.policy) == (SMALLEST, QUICKEST)


def test_quickest_is_without_tight_only():
    assert frozenset(Form) - QUICKEST.forms == {Form.TIGHT}


def test_a_chooser_tries_the_quick_policy_on_a_fast_link_and_goes_back_if_it_is_slow():
    chooser = PolicyChooser()
    raw = 8_000_000_000
    assert chooser.choose(raw, None).policy is SMALLEST
    chooser.learn(raw_bytes=raw, coded_bytes=40_000_000, encode_s=7.0)
    assert chooser.choose(raw, 1e10).policy is QUICKEST
    chooser.learn(raw_bytes=raw, coded_bytes=60_000_000, encode_s=30.0)
    assert chooser.choose(raw, 1e10).policy is SMALLEST
    assert "smallest at 1e+10 B/s" in chooser.choice.why
