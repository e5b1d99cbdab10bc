"""The orders of a live story that need no processes to be looked at."""

from types import SimpleNamespace

import pytest
import trio

from echo2p2p.errors import ChildError
from echo2p2p.testing.journal import TraceJournal
from scenarios import live_eyes, live_world
from scenarios.live_world import LiveWorld
from scenarios.watch import CheckedJournal

STOP_S = 5.0


class Nobody:
    """Checkers that see nothing."""

    def see(self, name, fields):
        pass


@pytest.fixture
def world():
    return SimpleNamespace(
        spec=SimpleNamespace(stop_s=STOP_S),
        journal=CheckedJournal(TraceJournal(), Nobody()),
        is_open=True,
        _address="its address",
        _coordinator_lives=1,
        _stops=False,
    )


@pytest.fixture
def told_s(monkeypatch, world):
    """Return the moments at which the coordinator was told to stop."""
    moments = []

    async def stop(address):
        await trio.lowlevel.checkpoint()
        assert address == world._address
        if not world.is_open:
            raise ConnectionRefusedError("refused")
        moments.append(trio.current_time())

    monkeypatch.setattr(live_eyes, "stop", stop)
    return moments


async def until(world, seconds):
    with trio.move_on_after(seconds):
        await LiveWorld._stop_in_time(world)


def opens(world, life):
    world.is_open, world._coordinator_lives = True, life
    world.journal.event("run.opened")


async def test_a_coordinator_that_is_up_is_told_once(world, told_s, autojump_clock):
    await until(world, 30)
    assert told_s == [STOP_S]


async def test_one_that_is_down_when_the_story_ends_is_waited_for(world, told_s, autojump_clock):
    world.is_open = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(until, world, 30)
        await trio.sleep(STOP_S + 4)
        assert told_s == []
        opens(world, 2)
    assert told_s == [STOP_S + 4]


async def test_one_that_is_killed_after_the_word_is_told_again(world, told_s, autojump_clock):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(until, world, 30)
        await trio.sleep(STOP_S + 1)
        world.is_open = False
        await trio.sleep(2)
        opens(world, 2)
    assert told_s == [STOP_S, STOP_S + 3]


async def test_one_that_does_not_listen_is_an_error(world, monkeypatch, autojump_clock):
    async def stop(address):
        await trio.lowlevel.checkpoint()
        raise TimeoutError("no answer")

    monkeypatch.setattr(live_eyes, "stop", stop)
    with pytest.raises(ChildError, match="cannot be stopped: no answer"):
        await LiveWorld._stop_in_time(world)
    tries_s = live_world.STOP_TRIES * live_world.STOP_AGAIN_S
    assert trio.current_time() == pytest.approx(STOP_S + tries_s, abs=1)


async def test_what_a_process_says_has_the_time_of_its_own_clock(world, autojump_clock):
    world.journal.heard(1.25, "peer.ready", {"node": "ann"})
    (entry,) = world.journal.trace.entries
    assert (entry.at_s, entry.name, entry.fields) == (1.25, "peer.ready", {"node": "ann"})
