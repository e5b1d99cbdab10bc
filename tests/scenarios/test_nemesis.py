"""Faults that overlap: each ends when its own time is over, and undoes only what it has done."""

import random

import pytest
import trio

from echo2p2p.testing.clock import run_virtual
from scenarios.nemesis import Nemesis
from scenarios.play import play
from scenarios.story import read_story
from scenarios.world import COORDINATOR, World

TWO = """
    [world]
    stop_s = 100
    heal_s = 60
    source_up = "8Mbit"
    [[peers]]
    name = "a"
    count = 2
"""


def looked_at(faults: str, look, moments) -> list:
    """Return what ``look`` sees of a world of two at these seconds, where only the nemesis runs."""
    story = read_story(TWO + faults, "two.toml")
    seen = []

    async def main() -> None:
        world = World(story.draw(random.Random(1)), seed=1)
        for machine in world.machines.values():
            machine.scope = trio.CancelScope()  # as if a peer ran on it
        rngs = [random.Random(number) for number in range(len(story.nemesis))]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.network.run)
            nursery.start_soon(Nemesis(story, rngs).run, world)
            for moment in moments:
                await trio.sleep_until(moment)
                seen.append(look(world))
            nursery.cancel_scope.cancel()

    run_virtual(main, seed=1)
    return seen


def is_reached(world: World) -> bool:
    """Return whether a byte gets through to the first machine now."""
    network, got = world.network, []
    network.travel(network.lane(COORDINATOR, "a-1"), 1, lambda: got.append(1))
    network.run_due(trio.current_time() + 0.5)
    return bool(got)


def test_a_partition_and_an_isolation_end_each_by_itself():
    faults = """
        [[nemesis]]
        fault = "isolate"
        on = "a"
        count = 2
        at_s = 5
        for_s = 30
        [[nemesis]]
        fault = "partition"
        share = 1.0
        at_s = 10
        for_s = 10
    """
    assert looked_at(faults, is_reached, [1, 7, 15, 25, 40]) == [True, False, False, False, True]


def test_two_squeezes_of_the_coordinators_line_end_each_by_itself():
    faults = "".join(
        f"""
        [[nemesis]]
        fault = "coordinator-slow-link"
        at_s = {at_s}
        for_s = {for_s}
        up = {up}
        """
        for at_s, for_s, up in [(5, 30, 0.25), (10, 10, 0.5), (15, 25, 0.125)]
    )

    def uplink(world: World) -> float:
        return world.network.node(COORDINATOR).up_bytes_per_s

    seen = looked_at(faults, uplink, [1, 7, 12, 17, 22, 37, 45])
    assert seen == [1e6, 250e3, 250e3, 125e3, 125e3, 125e3, 1e6]


DOWN_TWICE = """
    [world]
    stop_s = 80
    heal_s = 40
    [settings.rollouts]
    prompts_per_step = 2
    samples_per_prompt = 2
    [[peers]]
    count = 2
    seconds_per_token = 0.01
    [[nemesis]]
    fault = "coordinator-disk-full"
    at_s = 10
    for_s = {full_s}
    [[nemesis]]
    fault = "coordinator-crash"
    at_s = 10
    for_s = {down_s}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("full_s", "down_s"), [(20, 5), (5, 20)])
def test_a_coordinator_that_two_faults_keep_down_comes_up_after_the_last(full_s, down_s):
    text = DOWN_TWICE.format(full_s=full_s, down_s=down_s)
    played = play("two", read_story(text, "two.toml"), 7)
    assert played.problems == []
    restarts = [entry.at_s for entry in played.world.trace.named("nemesis.restart")]
    assert restarts == [pytest.approx(30, abs=0.01)]


@pytest.mark.slow
def test_a_coordinator_that_is_killed_and_started_at_the_same_moment_goes_on():
    text = """
        [world]
        stop_s = 60
        heal_s = 20
        [[peers]]
        count = 2
        seconds_per_token = 0.01
        [[nemesis]]
        fault = "coordinator-crash"
        at_s = 10
        for_s = 0
    """
    played = play("blink", read_story(text, "blink.toml"), 7)
    assert played.problems == []
    assert played.world.summary is not None


@pytest.mark.slow
def test_nothing_of_a_frozen_peer_happens_before_it_thaws_and_then_all_that_was_due():
    text = """
        [world]
        stop_s = 80
        heal_s = 45
        [[peers]]
        count = 3
        seconds_per_token = 0.01
        [[nemesis]]
        fault = "freeze"
        at_s = 15
        for_s = 20
    """
    played = play("frozen", read_story(text, "frozen.toml"), 7)
    assert played.problems == []
    (strike,) = played.world.trace.named("nemesis.strikes")
    of_it = [e for e in played.world.trace.entries if e.fields.get("node") == strike.fields["node"]]
    during = [e.name for e in of_it if 15.01 < e.at_s < 35]
    assert during == []
    after = [e.name for e in of_it if 35 <= e.at_s < 35.5]
    assert "link.closed" in after, "it has heard nobody for 20 s"
