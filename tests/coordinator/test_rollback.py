"""Versions never fork: a learner that loses steps goes on under new numbers."""

import pytest

from coordinator.config import Settings
from echo2p2p.testing.clock import run_virtual
from echo2p2p.weights.found import FoundElsewhere
from scenarios.fake_learner import LearnerFaults
from scenarios.world import PeerSpec, World, WorldSpec

SETTINGS = Settings.model_validate(
    {
        "run": {"steps": 10, "seed": 5},
        "server": {"host": "coordinator"},
        "rollouts": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "staleness_budget": 3,
            "publication_period": 2,
            "tokens_max": 8,
        },
        "learner": {"checkpoint_every_steps": 100},
        "weights": {"chunk_bytes_min": 1024},
    }
)


def play(**changes) -> World:
    spec = WorldSpec(
        settings=SETTINGS,
        peers=tuple(PeerSpec(name) for name in ("ann", "bob", "cem")),
        **changes,
    )
    made: list[World] = []

    async def story() -> None:
        made.append(World(spec, seed=1))
        await made[0].run()

    run_virtual(story, seed=1)
    return made[0]


def test_after_three_publications_that_no_checkpoint_holds_peers_follow_without_an_anchor():
    world = play(learner_faults=(LearnerFaults(die_at_step=7),))
    assert world.breaches == []
    published = [
        (e.fields["version"], e.fields["step"], e.fields["generation"])
        for e in world.trace.named("version.published")
    ]
    assert published[:4] == [(0, 0, 0), (1, 2, 0), (2, 4, 0), (3, 6, 0)]
    assert published[4] == (4, 0, 1), "the checkpoint of step 0, under the next number"
    assert [version for version, _, _ in published] == list(range(len(published)))
    applied = {
        name: [
            (e.fields["version"], e.fields["anchor"])
            for e in world.trace.named("version.applied")
            if e.fields["node"] == name
        ]
        for name in ("ann", "bob", "cem")
    }
    for history in applied.values():
        assert [version for version, anchor in history if anchor] == [0]
        assert 4 in [version for version, _ in history]
    counts = world.summary["trajectories"]
    assert counts["trained"] == 10 * SETTINGS.rollouts.batch
    assert counts["rejected"]["dead_generation"] >= 7 * SETTINGS.rollouts.batch
    assert world.summary["generation"] == 1


@pytest.mark.slow
def test_what_a_learner_finds_itself_makes_the_same_versions_and_none_across_its_death(monkeypatch):
    used: list[int] = []

    def counted(layout, memory):
        used.append(memory.size)
        return FoundElsewhere(layout, memory)

    monkeypatch.setattr("coordinator.training.FoundElsewhere", counted)
    faults = (LearnerFaults(die_at_step=7),)
    worlds = [play(learner_faults=faults, learner_finds=finds) for finds in (False, True)]
    names = ("version", "step", "generation", "delta_bytes", "anchor_bytes")
    plain, found = (
        [[e.fields[name] for name in names] for e in world.trace.named("version.published")]
        for world in worlds
    )
    assert plain == found
    assert worlds[1].breaches == []
    assert worlds[1].trace.named("version.refused") == []
    assert len(used) == len(found) - 2, "all but the first of either life"


def test_a_learner_that_dies_while_it_saves_goes_on_from_the_checkpoint_before():
    world = play(learner_faults=(LearnerFaults(die_at_save=10),))
    assert world.breaches == []
    assert world.summary["outcome"] == "finished"
    assert world.summary["steps"] == 10
    assert world.summary["generation"] == 1


def test_a_run_that_is_told_to_stop_saves_what_it_has_learnt_and_goes_on_from_there():
    spec = WorldSpec(settings=SETTINGS, peers=(PeerSpec("ann"), PeerSpec("bob")))
    made: list[World] = []

    async def stop_at_5(world: World) -> None:
        await world.wait_event("step.done", step=5)
        assert world.app is not None
        world.app.stop()

    async def story() -> None:
        made.append(World(spec, seed=1))
        await made[0].run(stop_at_5)

    run_virtual(story, seed=1)
    world = made[0]
    assert world.breaches == []
    assert world.summary["outcome"] == "finished"
    saved = [entry.fields["step"] for entry in world.trace.named("checkpoint.saved")]
    assert saved[-1] == world.summary["step"]
    assert 5 <= world.summary["step"] < 10


def test_a_run_that_has_ended_and_is_started_again_leaves_its_last_checkpoint_alone():
    spec = WorldSpec(settings=SETTINGS, peers=(PeerSpec("ann"), PeerSpec("bob")))
    made: list[World] = []

    async def story() -> None:
        made.append(World(spec, seed=1))
        await made[0].run()
        made[0].network.restart("coordinator")
        await made[0].run_coordinator()

    run_virtual(story, seed=1)
    world = made[0]
    assert len(world.trace.named("learner.ready")) == 2
    saved = [entry.fields["step"] for entry in world.trace.named("checkpoint.saved")]
    assert saved == [0, 10], "to save it once more would first remove it"
