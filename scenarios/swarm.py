"""Stories drawn from a seed: any machines, any settings, any faults; then healed, and converging.

A story by hand tests what somebody thought of. A swarm tests the rest: each seed draws how many
machines there are and what they are like, how the run is set, and a handful of faults of any kind.
Safety must hold throughout, and once nothing is broken on purpose the run must get going again.
Worlds are small (24 peers, 130 virtual seconds at most), so that a thousand of them are cheap.
"""

from __future__ import annotations

import random
from typing import Any, Final

from scenarios.false_uploads import UPLOAD_LIES
from scenarios.lies import RELAY_LIES
from scenarios.story import Story

NAME: Final = "swarm"
PEERS_MAX: Final = 24
HEAL_MIN_S: Final = 15.0
HEAL_MAX_S: Final = 60.0
CONVERGE_S: Final = 60.0
"""A learner may have to restart, and a peer to wait out a term, join, start its engine and fetch
an anchor over a thin line."""
AFTER_S: Final = 10.0
FAULTS_MAX: Final = 6
DELIVERIES_MAX: Final = 400
"""Of versions to peers; each costs 5 to 10 ms of real time."""

Drawn = dict[str, Any]


def draw_story(seed: int) -> Story:
    """Return the story of a seed."""
    return Story.model_validate(draw_tables(random.Random(f"swarm {seed}")))  # noqa: S311


def draw_tables(rng: random.Random) -> Drawn:
    """Return a story as its TOML file would have it."""
    heal_s = rng.uniform(HEAL_MIN_S, HEAL_MAX_S)
    groups = [_draw_group(rng, number) for number in range(rng.randint(1, 3))]
    while sum(group["count"] for group in groups) > PEERS_MAX:
        max(groups, key=lambda group: group["count"])["count"] -= 1
    staleness = rng.choice([0, 1, 2, 3, 4, 6])
    story: Drawn = {
        "about": "Drawn from the seed",
        "world": {
            "stop_s": heal_s + CONVERGE_S + AFTER_S,
            "heal_s": heal_s,
            "source_up": rng.choice([5e6, 1.25e7, 2.5e7, 1.25e8]),
            "source_latency_ms": rng.choice([0, 5, 50]),
            "learner_start_s": rng.uniform(0.5, 6.0),
            "learner_step_s": rng.uniform(0.3, 3.0),
            "learner_save_s": rng.uniform(0.0, 1.0),
        },
        "settings": {
            "rollouts": {
                "prompts_per_step": rng.choice([2, 4, 8]),
                "samples_per_prompt": rng.choice([2, 4]),
                "staleness_budget": staleness,
                "publication_period": rng.randint(1, staleness + 1),
                "lease_timeout_s": rng.choice([15.0, 30.0, 60.0]),
            },
            "learner": {"checkpoint_every_steps": rng.choice([3, 5, 10, 20])},
            "weights": {"chunk_bytes_min": rng.choice([1024, 4096, 16384])},
        },
        "peers": groups,
        "nemesis": [_draw_fault(rng, heal_s) for _ in range(rng.randint(2, FAULTS_MAX))],
        "checks": {"converge_s": CONVERGE_S},
    }
    # Last, so that a seed's story is otherwise what it was before there were models of other sizes.
    story["world"]["model_ballast"] = rng.choice([0, 0, 0, 300_000])
    story["world"]["learner_changed_share"] = rng.choice([0.001, 0.02, 0.02, 0.2])
    if story["world"]["model_ballast"]:
        # Dense versions of the larger model each second, to 20 peers: 20 s of numpy; and in the
        # smallest chunks it would be hundreds a version, when a world should take 10 s.
        changed = story["world"]["learner_changed_share"]
        story["world"]["learner_changed_share"] = min(changed, 0.02)
        story["settings"]["weights"]["chunk_bytes_min"] = 16_384
    _slow_down(story)
    if any(fault["fault"] == "depart" for fault in story["nemesis"]):
        # Departures are for good, and draws may add up to all: then nobody could go on.
        groups.append(_draw_group(rng, 0) | {"name": "late", "count": 1, "joins_s": heal_s})
        if sum(group["count"] for group in groups) > PEERS_MAX:
            max(groups, key=lambda group: group["count"])["count"] -= 1
    return story


def _slow_down(story: Drawn) -> None:
    """Let a learner that is fast for so many peers be slower, or the world takes half a minute."""
    world, rollouts = story["world"], story["settings"]["rollouts"]
    peers = sum(group["count"] for group in story["peers"])
    least_s = peers * world["stop_s"] / (rollouts["publication_period"] * DELIVERIES_MAX)
    world["learner_step_s"] = max(world["learner_step_s"], least_s)


def _draw_group(rng: random.Random, number: int) -> Drawn:
    up = rng.choice([1.25e5, 6.25e5, 2.5e6, 1.25e7])
    fast = rng.uniform(0.01, 0.05)
    short = rng.randint(0, 20)
    return {
        "name": "abc"[number],
        "count": rng.choice([1, 2, 2, 3, 3, 4, 6, 8, 16]),
        "up": [up, up * rng.uniform(1, 4)],
        "down": up * rng.choice([1, 2, 10]),
        "latency_ms": sorted([rng.choice([1, 10, 40, 150]), rng.choice([1, 10, 40, 300])]),
        "loss": rng.choice([0.0, 0.0, 0.0, 0.005, 0.02]),
        "nat_share": rng.choice([0.0, 0.0, 0.3, 1.0]) if number else rng.choice([0.0, 0.3]),
        "engine_start_s": [0.5, rng.uniform(0.5, 8.0)],
        "engine_load_s": rng.uniform(0.0, 0.5),
        "seconds_per_token": [fast, fast * rng.uniform(1, 4)],
        "leases_at_once": rng.choice([1, 2, 4, 8]),
        "tokens": [short, short + rng.randint(0, 60)],
        "tokens_tail": rng.random() < 0.3,
        "clock_ahead_s": rng.choice([0.0, 0.0, 3600.0, -3600.0]),
        "joins_s": [0.0, rng.choice([0.0, 5.0, 30.0])],
    }


def _draw_fault(rng: random.Random, heal_s: float) -> Drawn:
    kinds = PEER_FAULTS * 2 + WORLD_FAULTS
    kind = rng.choice(kinds)
    fault: Drawn = {"fault": kind}
    timing = rng.choice(["at_s", "every_s"] + (["per_minute"] if kind in PEER_FAULTS else []))
    if timing == "at_s":
        fault["at_s"] = rng.uniform(3.0, 0.8 * heal_s)
    elif timing == "every_s":
        pause = rng.uniform(5.0, 25.0)
        fault["every_s"] = [pause, 2 * pause]
    else:
        fault["per_minute"] = rng.uniform(0.1, 2.0)
    if kind != "depart":
        fault["for_s"] = [0.5, rng.uniform(1.0, 30.0)]
    if kind in PEER_FAULTS and timing != "per_minute":
        fault["share"] = rng.choice([0.1, 0.3, 0.6])
    return fault | _draw_force(rng, kind)


def _draw_force(rng: random.Random, kind: str) -> Drawn:
    match kind:
        case "crash":
            return {"with_disk": rng.random() < 0.7}
        case "slow-cpu":
            return {"factor": rng.uniform(2, 20)}
        case "slow-link":
            return {"up": rng.uniform(0.005, 0.5), "down": rng.uniform(0.02, 1.0)}
        case "lossy-link":
            return {"loss": rng.uniform(0.005, 0.2)}
        case "distant-link":
            return {"latency_ms": rng.uniform(50, 800)}
        case "isolate":
            return {"way": rng.choice(["both", "in", "out"])}
        case "lie":
            return {"lies": [*RELAY_LIES, *UPLOAD_LIES], "pick": rng.randint(1, 3)}
        case "wrong-clock":
            return {"ahead_s": rng.choice([3600.0, -3600.0])}
        case "partition":
            return {"share": rng.choice([0.2, 0.5, 0.8, 1.0])}
        case "coordinator-slow-link":
            return {"up": rng.uniform(0.02, 0.5)}
        case _:
            return {}


PEER_FAULTS: Final = [
    "crash",
    "depart",
    "freeze",
    "slow-cpu",
    "slow-link",
    "lossy-link",
    "distant-link",
    "flap",
    "isolate",
    "lie",
    "wrong-clock",
    "full-disk",
    "engine-crash",
    "engine-hang",
    "wrong-weights",
]
WORLD_FAULTS: Final = [
    "partition",
    "coordinator-crash",
    "coordinator-disk-full",
    "coordinator-slow-link",
    "learner-crash",
]
