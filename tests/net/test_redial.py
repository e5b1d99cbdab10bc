import random

from echo2p2p.net.redial import Backoff, RedialSettings

SETTINGS = RedialSettings(first_s=1.0, longest_s=10.0, settled_s=60.0)


def test_pauses_double_up_to_the_longest_with_jitter():
    waits = [Backoff(SETTINGS, random.Random(seed)).wait_s(lived_s=None) for seed in range(200)]
    assert 0.5 <= min(waits) < 0.6
    assert 0.9 < max(waits) <= 1.0
    backoff = Backoff(SETTINGS, random.Random(0))
    for whole in (1, 2, 4, 8, 10, 10):
        assert whole / 2 <= backoff.wait_s(lived_s=None) <= whole


def test_a_line_that_breaks_every_few_seconds_is_not_waited_for_longer_and_longer():
    backoff = Backoff(RedialSettings(), random.Random(0))
    assert max(backoff.wait_s(lived_s=1.5) for _ in range(50)) <= 0.25
    assert max(backoff.wait_s(lived_s=0.6) for _ in range(50)) > 10


def test_only_a_link_that_lived_long_starts_afresh():
    backoff = Backoff(SETTINGS, random.Random(0))
    for _ in range(5):
        backoff.wait_s(lived_s=None)
    assert backoff.wait_s(lived_s=59.0) >= 5.0
    assert backoff.wait_s(lived_s=60.0) <= 1.0
