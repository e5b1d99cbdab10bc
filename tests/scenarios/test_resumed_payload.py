"""A peer that is killed while it fetches an anchor goes on with what it has, whatever was torn."""

import pytest
import trio

from coordinator.config import Settings
from echo2p2p.testing.clock import run_virtual
from scenarios.first_light import SETTINGS
from scenarios.world import PeerSpec, World, WorldSpec

SEED = 6
DOWN = 40e3
"""Bytes a second: the anchor takes a minute."""


def play(*, with_disk: bool) -> World:
    settings = Settings.model_validate(
        {**SETTINGS.model_dump(), "run": {"steps": 30, "seed": 3}, "weights": {}}
    )
    spec = WorldSpec(
        settings=settings,
        peers=(
            PeerSpec("ann", seconds_per_token=0.05),
            PeerSpec("bob", down_bytes_per_s=DOWN, seconds_per_token=0.05),
        ),
        learner_step_s=8.0,
        learner_ballast=1_500_000,
        learner_changed_share=0.001,
    )
    worlds: list[World] = []

    async def nemesis(world: World) -> None:
        await trio.sleep_until(40)
        world.crash_peer("bob")
        await trio.sleep(15)
        world.journal.event("before", received=world.network.traffic("bob").received_bytes)
        world.restart_peer("bob", with_disk=with_disk)
        await world.wait_event("version.loaded", node="bob")
        world.journal.event("after", received=world.network.traffic("bob").received_bytes)

    async def story() -> None:
        worlds.append(World(spec, seed=SEED))
        await worlds[0].run(nemesis)

    run_virtual(story, seed=SEED)
    return worlds[0]


def received_again(world: World) -> int:
    (before,), (after,) = world.trace.named("before"), world.trace.named("after")
    return int(str(after.fields["received"])) - int(str(before.fields["received"]))


@pytest.mark.slow
def test_a_killed_peer_goes_on_with_the_chunks_that_survived():
    world = play(with_disk=True)
    assert world.breaches == []
    (taken,) = world.trace.named("payload.taken_up")
    chunks, of = int(str(taken.fields["chunks"])), int(str(taken.fields["of"]))
    assert 0.2 * of < chunks < 0.9 * of, "some had come, and some of these were torn"
    anew = play(with_disk=False)
    assert anew.breaches == []
    assert anew.trace.named("payload.taken_up") == []
    saved = received_again(anew) - received_again(world)
    anchor = anew.trace.named("payload.followed")[0].fields["payload_bytes"]
    assert saved >= 0.9 * int(str(anchor)) * chunks / of
    assert world.machines["bob"].files.keys() <= {
        entry.fields["manifest_id"] for entry in world.trace.named("payload.followed")
    }
