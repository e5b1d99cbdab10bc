"""Versions, steps and the one signal."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from coordinator.membership import Membership
from coordinator.run_state import RunState
from echo2p2p.ids import Step, Version


@pytest.fixture
def state() -> RunState:
    return RunState(run_id="r", members=Membership(term_s=1.0), vocabulary=64)


def add(state: RunState, *steps: int) -> None:
    """Publish versions 0, 1, .. of these steps."""
    for version, step in enumerate(steps):
        state.add_version(Version(version), Step(step))


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
