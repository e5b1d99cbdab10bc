"""The list of what the last deltas have written: bounded, and right for whoever is behind."""

import numpy as np
import pytest

from echo2p2p.testing.system import SimSharedMemory
from peer.touched import SHARE, TouchLog

TOTAL = 100 * 8 * round(1 / SHARE)
"""Room for 100."""


def places(*numbers):
    return np.array(numbers, dtype=np.int64)


def since(log, base):
    touched = log.since(base)
    return None if touched is None else touched.places.tolist()


@pytest.fixture
def log():
    return TouchLog(SimSharedMemory(), TOTAL)


def test_whoever_is_behind_gets_all_deltas_since(log):
    log.add(3, 4, places(1, 2))
    log.add(4, 7, places())
    log.add(7, 8, places(9, 1))
    assert [since(log, base) for base in (3, 4, 7)] == [[1, 2, 9, 1], [9, 1], [9, 1]]
    assert [since(log, base) for base in (2, 5, 8)] == [None] * 3


def test_what_comes_another_way_starts_it_anew(log):
    log.add(3, 4, places(1))
    log.add(4, 5, None)
    assert since(log, 4) is None
    log.add(5, 6, places(2))
    assert (since(log, 5), since(log, 3)) == ([2], None)
    log.add(8, 9, places(3))
    assert (since(log, 8), since(log, 5)) == ([3], None)
    log.clear()
    assert since(log, 8) is None


def test_it_is_bounded_and_the_newest_delta_counts(log):
    log.add(0, 1, places(*range(60)))
    log.add(1, 2, places(*range(40)))
    assert len(since(log, 0)) == 100
    log.add(2, 3, places(7))
    assert (since(log, 2), since(log, 0)) == ([7], None)
    log.add(3, 4, places(*range(101)))
    assert since(log, 3) is None


def test_where_there_is_no_room_nothing_is_noted():
    log = TouchLog(SimSharedMemory(bytes_max=100), TOTAL)
    log.add(0, 1, places(1))
    assert since(log, 0) is None
