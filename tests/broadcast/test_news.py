import math

import pytest

from echo2p2p.broadcast.news import NewsTimer
from echo2p2p.broadcast.settings import SwarmSettings

SETTINGS = SwarmSettings(have_batch_s=0.02, overlay_have_batch_s=0.05, have_mesh_s=0.01)


def test_in_a_mesh_there_is_a_time_for_some_and_a_later_one_for_all():
    timer = NewsTimer(SETTINGS)
    assert timer.next_deadline() == math.inf
    timer.stored(1.0, mesh=True, links=15)
    assert timer.next_deadline() == pytest.approx(1.02)
    assert not timer.take(1.02, mesh=True)
    assert timer.next_deadline() == pytest.approx(1.15)
    timer.stored(1.1, mesh=True, links=15)
    assert not timer.take(1.12, mesh=True)
    assert timer.next_deadline() == pytest.approx(1.15)
    assert timer.take(1.151, mesh=True)
    assert timer.next_deadline() == math.inf


def test_a_small_mesh_is_told_together():
    timer = NewsTimer(SETTINGS)
    timer.stored(1.0, mesh=True, links=1)
    assert timer.take(1.021, mesh=True)
    assert timer.next_deadline() == math.inf


def test_elsewhere_all_are_told_at_one_time():
    timer = NewsTimer(SETTINGS)
    timer.stored(1.0, mesh=False, links=100)
    assert timer.next_deadline() == pytest.approx(1.05)
    assert timer.take(1.05, mesh=False)
    assert timer.next_deadline() == math.inf
