"""A publication that falls due during the last one is made up for, so nobody waits for ever."""

import pytest

from coordinator.config import Settings
from echo2p2p.testing.clock import run_virtual
from scenarios.world import PeerSpec, World, WorldSpec


@pytest.mark.parametrize(("staleness_budget", "period"), [(0, 1), (1, 2), (3, 2), (3, 4)])
def test_a_disk_slower_than_the_learner_never_locks_the_run_up(staleness_budget, period):
    settings = Settings.model_validate(
        {
            "run": {"steps": 12},
            "server": {"host": "coordinator"},
            "rollouts": {
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "staleness_budget": staleness_budget,
                "publication_period": period,
                "tokens_max": 8,
            },
            "weights": {"chunk_bytes_min": 1024},
        }
    )
    made: list[World] = []

    async def story() -> None:
        world = World(
            WorldSpec(settings=settings, peers=(PeerSpec("ann"),), learner_step_s=0.1), seed=1
        )
        world.disk.sync_s = 1.5
        made.append(world)
        await world.run()

    run_virtual(story, seed=1)
    world = made[0]
    assert world.breaches == []
    assert world.summary["steps"] == 12
    steps = [entry.fields["step"] for entry in world.trace.named("version.published")]
    assert steps[-1] == 12, "the last weights are published whatever is under way"
    assert steps == sorted(set(steps))
