"""The shipped stories, with three seeds each: every checker holds, and a seed is one run."""

import os
import subprocess
import sys

import pytest

from scenarios.play import play
from scenarios.story import shipped
from scenarios.story_command import find_story

SEEDS = (7, 8, 9)
STORIES = sorted(shipped())
SWARM_SEEDS = {
    6: "a hung engine is told by its deadline, and the peer converges",
    8: "a peer that is killed twice within a second",
    20: "segments that overtake each other where the clock has ticks",
    27: "a coordinator dies between serving a version and saying so",
    36: "an engine hangs on a machine that is slow",
    206: "a batch that begins on a slow machine, which is slow no longer",
    231: "all twelve peers depart, one after the other",
    714: "the only peer departs",
}
"""Seeds that failed once, and of what."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", STORIES)
def test_every_checker_holds(name, seed):
    played = play(name, find_story(name, seed), seed)
    assert played.problems == []
    struck = played.result()["strikes"]
    ordered = {fault.fault for fault in find_story(name, seed).nemesis}
    missing = ordered - set(struck)
    assert not {fault for fault in missing if name != "churn"}, "a fault that never struck"


@pytest.mark.slow
@pytest.mark.parametrize("seed", SWARM_SEEDS, ids=str)
def test_a_swarm_that_failed_once_holds_now(seed):
    assert play("swarm", find_story("swarm", seed), seed).problems == []


def run(hash_seed: str, zone: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "TZ": zone, "LANG": "C"}
    command = [sys.executable, "-m", "scenarios", "run", "byzantine-third", "--seed", "7"]
    done = subprocess.run(
        [*command, "--until", "40", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trace_in_other_processes():
    first = run("0", "UTC")
    assert '"events": ' in first
    assert run("4711", "UTC+7") == first


def test_another_seed_draws_another_world_and_another_nemesis():
    first, second = (find_story("swarm", seed) for seed in (1, 2))
    assert first.peers != second.peers
    assert first.nemesis != second.nemesis
    assert find_story("swarm", 1) == first
