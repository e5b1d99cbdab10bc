"""A run whose peers switch in flight: long answers of several versions, and all invariants."""

import pytest

from coordinator.config import Settings
from echo2p2p.testing.clock import run_virtual
from scenarios.fake_engine import Lengths
from scenarios.first_light import SETTINGS
from scenarios.world import PeerSpec, World, WorldSpec

SEED = 5


async def _nothing(world: World) -> None:
    """Nothing goes wrong."""


def play(switch: str) -> World:
    changes = {"run": {"steps": 12, "seed": 3}}
    settings = Settings.model_validate({**SETTINGS.model_dump(), **changes})
    peers = tuple(
        PeerSpec(name, seconds_per_token=0.4, lengths=Lengths(6, 12), switch=switch)
        for name in ("ann", "bob")
    )
    spec = WorldSpec(settings=settings, peers=peers, learner_step_s=1.0)
    worlds: list[World] = []

    async def story() -> None:
        worlds.append(World(spec, seed=SEED))
        await worlds[0].run(_nothing)

    run_virtual(story, seed=SEED)
    return worlds[0]


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["finish", "in-flight"])
def test_a_run_ends_well_under_either_policy(switch):
    world = play(switch)
    assert world.breaches == []
    assert world.summary["outcome"] == "finished"
    assert world.summary["trajectories"]["recount_agrees"]
    rejected = world.summary["trajectories"]["rejected"]
    assert not {"malformed", "unknown_version"} & set(rejected)
    applied, waits = {}, []
    for entry in world.trace.entries:
        key = (entry.fields.get("node"), entry.fields.get("version"))
        if entry.name == "version.applied":
            applied[key] = entry.at_s
        elif entry.name == "version.loaded" and entry.fields["version"] != 0:
            waits.append(entry.at_s - applied[key])
    assert len(waits) >= 10
    assert max(waits) > 2.0 if switch == "finish" else max(waits) < 1.0
