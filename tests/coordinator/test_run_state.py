"""Versions, steps and the signals."""

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from coordinator import run_state
from coordinator.membership import Membership
from coordinator.run_state import RunState
from echo2p2p.ids import PeerId, Step, Version


@pytest.fixture
def state() -> RunState:
    return RunState(run_id="r", members=Membership(term_s=1.0), vocabulary=64)


def add(state: RunState, *steps: int) -> None:
    """Publish versions 0, 1, .. of these steps."""
    for version, step in enumerate(steps):
        state.add_version(Version(version), Step(step))


def test_a_new_run_is_at_its_beginning_and_leases_nothing(state: RunState) -> None:
    assert (state.run_id, state.members.live(), state.outcome) == ("r", [], "running")
    assert (state.step, state.generation, state.latest, state.rolled_back_to) == (0, 0, None, None)
    assert not state.leasing


def test_a_living_versions_step_is_known(state: RunState) -> None:
    add(state, 0, 2, 4)
    assert state.latest == 2
    assert [state.version_step(version) for version in (0, 1, 2, 3)] == [0, 2, 4, None]
    expect = state.expectation()
    assert (expect.vocabulary, dict(expect.steps), expect.dead) == (64, {0: 0, 1: 2, 2: 4}, set())


def test_a_rollback_kills_the_versions_of_later_steps_and_only_those(state: RunState) -> None:
    add(state, 0, 2, 4, 6)
    state.step = Step(7)
    state.roll_back(Step(4))
    assert (state.step, state.rolled_back_to) == (4, 4)
    assert [state.version_step(version) for version in range(4)] == [0, 2, 4, None]
    assert state.expectation().dead == {3}
    # Numbers are never reused, so the next publication of the same step is version 4.
    assert state.latest == 3
    state.add_version(Version(4), Step(4))
    assert state.version_step(4) == 4
    state.roll_back(Step(0))
    assert state.expectation().dead == {1, 2, 3, 4}


def test_a_dead_version_of_our_last_life_counts_as_the_latest_but_not_as_alive(
    state: RunState,
) -> None:
    add(state, 0)
    state.add_version(Version(1), Step(3), dead=True)
    assert state.latest == 1
    assert state.version_step(1) is None
    assert state.expectation().dead == {1}


async def test_whoever_waits_for_a_change_is_woken_by_each_kind(state: RunState) -> None:
    woken: list[str] = []

    async def wait(name: str) -> None:
        await state.changed.park()
        woken.append(name)

    changes = {
        "version": lambda: add(state, 0),
        "rollback": lambda: state.roll_back(Step(0)),
        "notify": state.notify,
    }
    async with trio.open_nursery() as nursery:
        for name, change in changes.items():
            nursery.start_soon(wait, name)
            nursery.start_soon(wait, name)
            await wait_all_tasks_blocked()
            change()
            await wait_all_tasks_blocked()
            assert woken == [name, name]
            woken.clear()


@pytest.mark.parametrize(
    ("news", "woken"),
    [
        ("version", {"changed", "moved", "published", "work of p", "work of q"}),
        ("rollback", {"changed", "moved", "work of p", "work of q"}),
        ("notify", {"changed", "moved", "work of p", "work of q"}),
        ("scored", {"changed"}),
        ("p moved", {"changed", "moved", "work of p"}),
        ("unknown moved", {"changed", "moved"}),
    ],
)
async def test_each_kind_of_news_wakes_only_whom_it_concerns(
    state: RunState, news: str, woken: set[str]
) -> None:
    heard: list[str] = []

    async def wait(name: str, park: Callable[[], Awaitable[None]]) -> None:
        await park()
        heard.append(name)

    async with trio.open_nursery() as nursery:
        for lot in ("changed", "moved", "published"):
            nursery.start_soon(wait, lot, getattr(state, lot).park)
        for peer in ("p", "p", "q"):
            nursery.start_soon(wait, f"work of {peer}", partial(state.work.park, PeerId(peer)))
        await wait_all_tasks_blocked()
        match news:
            case "version":
                add(state, 0)
            case "rollback":
                state.roll_back(Step(0))
            case "notify":
                state.notify()
            case "scored":
                state.notify_scored()
            case _:
                state.notify_member(PeerId(news.removesuffix(" moved")))
        await wait_all_tasks_blocked()
        assert set(heard) == woken
        assert heard.count("work of p") == (2 if "work of p" in woken else 0)
        nursery.cancel_scope.cancel()


async def test_a_poll_that_gives_up_is_forgotten_and_its_peer_can_wait_again(
    autojump_clock, state: RunState
) -> None:
    for _ in range(2):
        with trio.move_on_after(1.0):
            await state.work.park(PeerId("p"))
    assert len(state.work) == 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(state.work.park, PeerId("p"))
        await wait_all_tasks_blocked()
        assert len(state.work) == 1
        state.work.wake(PeerId("p"))
    assert len(state.work) == 0


def test_only_the_newest_versions_are_remembered(state: RunState, monkeypatch) -> None:
    monkeypatch.setattr(run_state, "VERSIONS_REMEMBERED", 5)
    for version in range(20):
        state.add_version(Version(version), Step(version), dead=version % 3 == 0)
    expect = state.expectation()
    assert sorted(expect.steps) == [16, 17, 19]
    assert sorted(expect.dead) == [15, 18]
    state.roll_back(Step(16))
    assert [state.version_step(version) for version in range(14, 20)] == [
        *(None, None, 16, None, None, None)
    ]
