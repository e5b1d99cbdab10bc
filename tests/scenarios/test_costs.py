"""What work costs in virtual time, if it is to cost anything."""

from dataclasses import replace
from functools import partial

import pytest
import trio

from echo2p2p.testing.clock import run_virtual
from echo2p2p.weights.anchor import encode_anchor
from echo2p2p.weights.delta import encode_delta
from peer.apply import Apply
from scenarios.costs import MEASURED, Cores, name_of
from scenarios.play import play
from scenarios.story import read_story

ONE = replace(MEASURED, cores=1, start_s=1.0)
STORY = """
[world]
stop_s = 20
heal_s = 6
learner_start_s = 0
[[peers]]
count = 3
[checks]
converge_s = 8
"""


def test_who_finds_no_core_waits():
    async def start_three(costs):
        cores = Cores(costs, 1.0)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(cores.start_process)
        return trio.current_time()

    assert run_virtual(start_three, ONE, seed=1) == 3.0
    assert run_virtual(start_three, replace(ONE, cores=3), seed=1) == 1.0
    assert run_virtual(start_three, None, seed=1) == 0.0


def test_what_takes_long_is_known_by_the_name_that_it_has_in_the_code():
    assert {name_of(partial(encode_delta, None)), name_of(encode_anchor)} < set(MEASURED.work)
    (write,) = set(MEASURED.work) - {"encode_delta", "encode_anchor"}
    owner, method, _, inner = write.split(".")
    code = getattr(Apply, method).__code__.co_consts
    assert owner == Apply.__name__
    assert write in {one.co_qualname for one in code if hasattr(one, "co_qualname")}
    assert inner == "write"
    assert name_of(object()) == ""


def test_a_larger_model_takes_longer():
    def encode(value):
        return value

    encode.__qualname__ = "encode_delta"

    async def work(state_mb):
        cores = Cores(ONE, state_mb)
        assert await cores.run(partial(encode, 7)) == 7
        return trio.current_time(), cores.step_s(0.5)

    (small_s, small_step_s), (large_s, large_step_s) = (
        run_virtual(work, mb, seed=1) for mb in (1.0, 100.0)
    )
    assert 0 < small_s < large_s
    assert 0.5 < small_step_s < large_step_s


def joined_s(costs):
    world = play("three", read_story(STORY, "three"), 7, costs=costs).world
    return [
        entry.at_s for entry in world.trace.named("peer.joined") if "engine" not in entry.fields
    ]


@pytest.mark.slow
def test_processes_of_a_story_come_up_one_after_another_on_few_cores():
    free, costly = joined_s(None), joined_s(MEASURED)
    # The coordinator and then three peers on two cores.
    assert 3 * MEASURED.start_s < max(costly) - max(free) < 3 * MEASURED.start_s + 0.5
