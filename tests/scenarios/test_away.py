"""Peers that fall behind, in whole runs: what they are sent, and that it is still there."""

import pytest

from coordinator.config import MembershipSection, Settings
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.journal import Entry
from echo2p2p.weights.chain import Link, plan_path
from scenarios.world import PeerSpec, World, WorldSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

FAST = (PeerSpec("ann", seconds_per_token=0.01), PeerSpec("bob", seconds_per_token=0.01))


def settings(steps: int, **weights) -> Settings:
    return Settings.model_validate(
        {
            "run": {"steps": steps, "seed": 5},
            "server": {"host": "coordinator"},
            "rollouts": {
                "prompts_per_step": 1,
                "samples_per_prompt": 2,
                "staleness_budget": 2,
                "publication_period": 1,
                "tokens_max": 8,
            },
            "learner": {"checkpoint_every_steps": 1000},
            "weights": {"chunk_bytes_min": 1024, **weights},
        }
    )


def play(spec: WorldSpec, nemesis=None) -> World:
    made: list[World] = []

    async def story() -> None:
        made.append(World(spec, seed=3))
        await made[0].run(nemesis)

    run_virtual(story, seed=3)
    (world,) = made
    assert world.breaches == []
    assert world.summary["outcome"] == "finished"
    assert world.trace.named("version.refused") == []
    return world


def published(world: World, until_s: float) -> list[Link]:
    """Return every payload that was ever made until then, by the events alone."""
    links = []
    for entry in world.trace.entries:
        if entry.at_s > until_s:
            break
        version = entry.fields.get("version")
        if entry.name == "version.published":
            for base, size in ((None, "anchor_bytes"), (version - 1, "delta_bytes")):
                if entry.fields[size] is not None:
                    links.append(Link(b"", version, base, entry.fields[size]))
        elif entry.name == "delta.merged":
            links.append(Link(b"", version, entry.fields["base"], entry.fields["bytes"]))
    return links


def applied_by(world: World, node: str) -> list[Entry]:
    return [e for e in world.trace.named("version.applied") if e.fields["node"] == node]


def cost(links: list[Link], have: int | None, target: int) -> float:
    path = plan_path(links, have, target)
    return float("inf") if path is None else sum(link.wire_bytes for link in path)


@pytest.mark.parametrize(("changed_share", "anchor"), [(0.001, False), (0.3, True)])
def test_a_peer_that_was_away_for_100_versions_comes_back_at_the_least_cost(changed_share, anchor):
    spec = WorldSpec(
        settings=settings(140),
        peers=FAST,
        learner_step_s=0.5,
        learner_changed_share=changed_share,
    )

    async def nemesis(world: World) -> None:
        await world.wait_event("version.applied", node="bob", version=20)
        world.machines["bob"].harm_begins()
        world.network.freeze("bob")
        await world.wait_event("version.published", version=123)
        world.journal.event("nemesis.rejoin", node="bob")
        world.network.thaw("bob")
        world.machines["bob"].harm_ends()

    world = play(spec, nemesis)
    (back,) = world.trace.named("nemesis.rejoin")
    mine = applied_by(world, "bob")
    held = max(entry.fields["version"] for entry in mine if entry.at_s <= back.at_s)
    after = [entry for entry in mine if entry.at_s > back.at_s]
    assert after[0].fields["version"] - held > 3
    # The path that it asked for ends where the versions begin to follow each other singly; until
    # then it has paid for no more than either way would have cost at that time.
    links = published(world, after[0].at_s)
    first = next(entry for entry in after if entry.fields["version"] >= 123)
    paid = sum(
        entry.fields["bytes"]
        for entry in after
        if entry.fields["version"] <= first.fields["version"]
    )
    target = first.fields["version"]
    merged = cost([link for link in links if link.base_version is not None], held, target)
    assert paid <= min(cost(links, None, target), merged)
    assert after[0].fields["anchor"] == anchor == (merged > cost(links, None, target))
    followed = [
        entry.fields["version"]
        for entry in world.trace.named("payload.followed")
        if entry.fields["node"] == "bob" and entry.at_s > back.at_s
    ]
    assert followed == [entry.fields["version"] for entry in after], "nothing was fetched in vain"
    assert mine[-1].fields["version"] == 140


def test_a_peer_that_was_killed_and_comes_back_after_100_versions_pays_no_more_than_a_joiner():
    spec = WorldSpec(settings=settings(110), peers=FAST, learner_step_s=0.5)

    async def nemesis(world: World) -> None:
        await world.wait_event("version.applied", node="bob", version=3)
        world.crash_peer("bob")
        await world.wait_event("version.published", version=103)
        world.restart_peer("bob")

    world = play(spec, nemesis)
    (back,) = world.trace.named("nemesis.restart")
    after = [e for e in applied_by(world, "bob") if e.at_s > back.at_s]
    first = next(e.fields["version"] for e in after if e.fields["version"] >= 103)
    links = published(world, after[0].at_s)
    paid = sum(e.fields["bytes"] for e in after if e.fields["version"] <= first)
    assert paid <= cost(links, None, first)
    assert after[-1].fields["version"] == 110


def test_a_peer_on_a_slow_link_keeps_what_it_has_got_of_an_anchor_that_is_old_by_then():
    # A heartbeat's answer stands behind ten seconds of chunks in such a line.
    patient = MembershipSection(term_s=60.0, heartbeat_s=2.0)
    given = settings(90, spare_bytes=0, skip_spans=[])
    spec = WorldSpec(
        settings=given.model_copy(update={"membership": patient}),
        peers=(
            PeerSpec("ann", seconds_per_token=0.01),
            PeerSpec("cem", seconds_per_token=0.01, down_bytes_per_s=4000.0),
        ),
        learner_step_s=0.7,
        learner_changed_share=0.01,
    )
    world = play(spec)
    followed = [e for e in world.trace.named("payload.followed") if e.fields["node"] == "cem"]
    applied = applied_by(world, "cem")
    newest = max(
        e.fields["version"]
        for e in world.trace.named("version.published")
        if e.fields["anchor_bytes"] is not None and e.at_s < applied[0].at_s
    )
    assert applied[0].fields["version"] < newest - 8, "it was slow enough for this test"
    assert applied[0].fields["version"] == followed[0].fields["version"]
