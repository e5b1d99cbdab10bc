"""A story by hand, for tests that need exact moments: three peers, a crash, a lost learner.

The claim: the run ends with every step taken, nobody's acknowledged work lost or trained twice,
nothing older than S trained, and publication numbers that only go up, by one.
"""

from __future__ import annotations

from typing import Final

import trio

from coordinator.config import Settings
from scenarios.fake_learner import LearnerFaults
from scenarios.world import PeerSpec, World, WorldSpec

CRASH_AT_S: Final = 10.0
RESTART_AT_S: Final = 28.0
SETTINGS: Final = Settings.model_validate(
    {
        "run": {"steps": 24, "seed": 3},
        "server": {"host": "coordinator"},
        "rollouts": {
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "staleness_budget": 3,
            "publication_period": 2,
            "tokens_max": 8,
            "lease_timeout_s": 30.0,
        },
        "learner": {"checkpoint_every_steps": 8},
        "weights": {"chunk_bytes_min": 1024},
    }
)


def make_world(seed: int) -> World:
    """Return the story's world."""
    return World(
        WorldSpec(
            settings=SETTINGS,
            peers=(
                PeerSpec("ann", up_bytes_per_s=1.25e6, seconds_per_token=0.08),
                PeerSpec("bob", up_bytes_per_s=2.5e6, seconds_per_token=0.1),
                PeerSpec("cem", up_bytes_per_s=5e6, seconds_per_token=0.15),
            ),
            learner_faults=(LearnerFaults(die_at_step=14),),
        ),
        seed=seed,
    )


async def nemesis(world: World) -> None:
    """One crash while it has work, one restart."""
    await trio.sleep_until(CRASH_AT_S)
    await world.wait_event("leases.issued", peer=world.peer_id("bob"))
    world.crash_peer("bob")
    await trio.sleep_until(RESTART_AT_S)
    world.restart_peer("bob")
