"""A coordinator's memory has bounds; here each is reached."""

import pytest
import trio

from coordinator import intake as intake_module
from coordinator import membership as membership_module
from coordinator import publish as publish_module
from coordinator.config import Settings
from coordinator.leases import ABORTS_MAX
from coordinator.membership import Full, Joined, Membership
from coordinator.schema import PayloadRow, VersionRow
from coordinator.task_port import TaskInfo, TaskSetup
from echo2p2p.ids import Generation, LeaseId, Step, Version
from echo2p2p.rollouts.trajectory import Group, Reason, check_upload
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.disk import SimDisk
from echo2p2p.wire.messages import Signed, Upload
from scenarios import first_light
from scenarios.middle import ROLLOUTS, Bench, open_bench, right_answers
from scenarios.parts import InlineTaskWorker
from scenarios.world import World


@pytest.fixture
async def bench():
    async with open_bench(SimDisk()) as opened:
        yield opened


def seed_of(bench: Bench, lease_id: str) -> int:
    held = bench.desk.find(LeaseId(lease_id))
    assert held is not None
    return held.seed


# --- leases ---------------------------------------------------------------------------------------


def rollouts_with_room_for(groups: int, positions: int = 128):
    room = groups * (ROLLOUTS.group_bytes_max + 4 * positions)
    return ROLLOUTS.model_copy(update={"queue_bytes_max": room})


async def test_no_more_is_leased_than_fits_into_memory_if_all_answers_were_long(
    autojump_clock,
) -> None:
    async with open_bench(SimDisk(), rollouts=rollouts_with_room_for(3)) as bench:
        member = await bench.ready("p")
        leases = await bench.lease(member)
        assert len(leases) == 3, "staleness alone would allow four"
        for lease in leases[:2]:
            await bench.upload(member, right_answers(lease, 1))
        assert await bench.lease(member) == [], "what waits to be trained on needs its room too"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.intake.run)
            while not await bench.train():
                await bench.state.changed.park()
            nursery.cancel_scope.cancel()
        await bench.publish(1)
        bench.beat(bench.member("p"), 1)
        assert len(await bench.lease(member, version=1)) == 2


async def test_a_whole_batch_always_fits_or_nothing_would_ever_be_trained(autojump_clock) -> None:
    tiny = ROLLOUTS.model_copy(update={"queue_bytes_max": 1})
    async with open_bench(SimDisk(), rollouts=tiny) as bench:
        member = await bench.ready("p")
        assert len(await bench.lease(member)) == ROLLOUTS.prompts_per_step


def test_a_queue_that_holds_no_batch_is_a_wrong_setting() -> None:
    with pytest.raises(ValueError, match="queue_bytes_max 100000 holds no whole batch"):
        Settings.model_validate({"rollouts": {"queue_bytes_max": 100_000}})


def test_a_batch_that_no_message_to_the_learner_can_hold_is_a_wrong_setting() -> None:
    large = {"prompts_per_step": 4096, "samples_per_prompt": 16, "tokens_max": 16_384}
    large["queue_bytes_max"] = 1 << 40
    with pytest.raises(ValueError, match=r"batches of up to \d+ bytes; the learner takes"):
        Settings.model_validate({"rollouts": large})


class Short(InlineTaskWorker):
    """Of a model with few positions."""

    async def start(self, setup: TaskSetup) -> TaskInfo:
        """Say so."""
        info = await super().start(setup)
        return TaskInfo(info.vocab_size, info.stop_ids, info.turns_max, positions_max=10)


async def test_an_answer_may_be_no_longer_than_the_model_has_positions(autojump_clock) -> None:
    async with open_bench(SimDisk(), make_worker=Short) as bench:
        (lease,) = await bench.lease(await bench.ready("p"), count=1)
        assert lease.prompt.length == 6
        assert lease.tokens_max == 4


async def test_a_prompt_that_everybody_gives_back_is_left_out_in_the_end(
    autojump_clock, bench: Bench
) -> None:
    member = await bench.ready("p")
    seeds = []
    for _ in range(ABORTS_MAX + 1):
        (lease,) = await bench.lease(member, count=1)
        seeds.append(seed_of(bench, lease.lease_id))
        empty = Upload(incarnation=1, lease_id=lease.lease_id, samples=[], seconds=0.0)
        await bench.upload(member, empty)
    assert len(set(seeds[:ABORTS_MAX])) == 1
    assert seeds[ABORTS_MAX] != seeds[0]
    assert len(bench.journal.named("item.failed")) == 1


# --- uploads and outcomes -------------------------------------------------------------------------


async def test_long_groups_go_to_the_task_worker_a_few_at_a_time(
    autojump_clock, monkeypatch
) -> None:
    calls: list[int] = []

    class Counting(InlineTaskWorker):
        async def score(self, episodes):
            """Count."""
            calls.append(len(episodes))
            return await super().score(episodes)

    monkeypatch.setattr(intake_module, "SCORED_AT_ONCE_BYTES_MAX", 1)
    async with open_bench(SimDisk(), make_worker=Counting) as bench:
        member = await bench.ready("p")
        for lease in await bench.lease(member, count=3):
            await bench.upload(member, right_answers(lease, 1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.intake.run)
            await trio.sleep(10.0)
            nursery.cancel_scope.cancel()
    assert calls == [2, 2, 2], "two samples a group, one group a call"


async def test_outcomes_are_kept_for_members_only(autojump_clock, bench: Bench) -> None:
    groups = []
    for name in "abcdefgh":
        member = await bench.ready(name)
        (lease,) = await bench.lease(member, count=1) or (None,)
        if lease is None:  # no more room: the outcome is what matters, whoever's
            lease = groups[-1][0]
        group = check_upload(
            right_answers(lease, 1), lease, 0, member.peer_id, bench.state.expectation()
        )
        assert isinstance(group, Group)
        groups.append((lease, group))
        bench.intake.decided(group, Reason.STALE)
    for name in "abcdefg":
        member = bench.member(name)
        await bench.roster.leave(member.peer_id, member.incarnation, "test")
        bench.intake.decided(groups[0][1], Reason.STALE)
    bench.intake.decided(groups[-1][1], Reason.STALE)
    assert set(bench.intake._outcomes) == {bench.member("h").peer_id}


# --- members and versions -------------------------------------------------------------------------


async def test_a_run_takes_a_bounded_number_of_identities_and_those_it_knows_again(
    autojump_clock, bench: Bench, monkeypatch
) -> None:
    monkeypatch.setattr(membership_module, "IDENTITIES_MAX", 3)
    members = Membership(term_s=5.0)

    def join(name: str):
        return members.join(name, bench.request(name), name.encode(), 0.0)

    assert [type(join(name)) for name in "abcd"] == [Joined, Joined, Joined, Full]
    members.on_time(10.0)
    assert [type(join(name)) for name in "dab"] == [Full, Joined, Joined]


def test_an_anchor_is_made_after_a_bounded_number_of_deltas(monkeypatch) -> None:
    monkeypatch.setattr(publish_module.chain, "anchor_due", lambda *_: False)
    monkeypatch.setattr(publish_module, "CHAIN_DELTAS_MAX", 4)
    spec = first_light.make_world(2).spec
    world = World(spec, seed=2)
    run_virtual(world.run, seed=2)
    published = world.trace.named("version.published")
    anchors = [
        entry.fields["version"] for entry in published if entry.fields["anchor_bytes"] is not None
    ]
    assert anchors == list(range(0, len(published), 4))
    assert len(published) > 10
    assert world.breaches == []


async def test_of_a_payload_that_is_gone_only_its_size_is_kept(bench: Bench) -> None:
    signed = Signed(body=b"manifest" * 50, signature=bytes(64))
    rows = [
        PayloadRow(
            bytes([n]) * 16, Version(1), None if n == 0 else Version(0), signed, 100 * n + 50
        )
        for n in range(3)
    ]
    await bench.book.add_version(VersionRow(Version(1), Step(1), Generation(0), dead=False), rows)
    await bench.book.forget_payloads([row.manifest_id for row in rows[1:]])
    assert [row.manifest_id for row in await bench.book.payloads()] == [rows[0].manifest_id]
    count, total, inverses = await bench.book.delta_sizes()
    assert (count, total, inverses) == (2, 400, pytest.approx(1 / 150 + 1 / 250))
