"""The seeded story in virtual time: the real code of coordinator and peers."""

import os
import subprocess
import sys

import pytest

from echo2p2p.testing.clock import run_virtual
from scenarios import first_light
from scenarios.world import World

SEEDS = (7, 8, 9)


def play(seed: int) -> World:
    made: list[World] = []

    async def story() -> None:
        made.append(first_light.make_world(seed))
        await made[0].run(first_light.nemesis)

    run_virtual(story, seed=seed)
    return made[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_run_ends_well_through_a_crash_and_a_lost_learner(seed):
    world = play(seed)
    assert world.breaches == []
    summary = world.summary
    assert summary["outcome"] == "finished"
    assert summary["steps"] == first_light.SETTINGS.run.steps
    assert summary["generation"] == 1, "the learner died once"
    counts = summary["trajectories"]
    assert counts["balances"]
    assert counts["recount_agrees"]
    assert counts["trained"] == summary["steps"] * first_light.SETTINGS.rollouts.batch
    assert counts["rejected"]["peer_gone"] > 0, "the crash took leases with it"
    assert counts["rejected"]["dead_generation"] > 0, "the rollback took steps with it"
    assert counts["in_flight"] == 0
    evicted = [entry.fields["peer"] for entry in world.trace.named("peer.evicted")]
    assert len(evicted) == 1
    assert {peer["name"]: peer["accepted"] > 0 for peer in summary["peers"]} == {
        "ann": True,
        "bob": True,
        "cem": True,
    }


def test_a_peer_that_was_evicted_comes_back_as_another_incarnation():
    world = play(SEEDS[0])
    joins = [e for e in world.trace.named("peer.joined") if e.fields.get("who") == "bob"]
    assert [entry.fields["incarnation"] for entry in joins] == [1, 2]


def test_the_same_seed_gives_the_same_trace_in_other_processes():
    command = [sys.executable, "-m", "scenarios", "run", "first-light", "--seed", "7", "--json"]
    results = []
    for hash_seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "TZ": f"UTC+{len(results)}"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(done.stdout)
    assert results[0] == results[1]


def test_another_seed_gives_another_trace():
    assert play(7).trace.digest() != play(8).trace.digest()
