"""Uploads: what is acknowledged, what is refused, and what becomes of it after crashes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
import trio

from coordinator.intake import OUTCOMES_MAX
from coordinator.membership import Member
from coordinator.task_port import Done, Failed, Next, TaskInfo, TaskSetup, Turn
from echo2p2p.errors import ChildError, StoreError
from echo2p2p.ids import LeaseId, Step
from echo2p2p.rollouts.ledger import Place
from echo2p2p.rollouts.trajectory import Group, Reason, check_upload
from echo2p2p.tasks.base import Verdict
from echo2p2p.testing.disk import SimDisk
from echo2p2p.wire.arrays import to_tokens
from echo2p2p.wire.messages import Lease, Upload, UploadReply
from scenarios.middle import Bench, open_bench, right_answers, sample
from scenarios.parts import InlineTaskWorker


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
async def bench(disk: SimDisk):
    async with open_bench(disk) as opened:
        yield opened


@asynccontextmanager
async def scoring(bench: Bench) -> AsyncIterator[None]:
    """Score beside the body."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.intake.run)
        yield
        nursery.cancel_scope.cancel()


async def scored(bench: Bench) -> None:
    """Score all that has been accepted."""
    async with scoring(bench):
        await trio.sleep(60.0)


async def one_lease(bench: Bench, name: str = "p", version: int = 0) -> tuple[Member, Lease]:
    member = await bench.ready(name, version)
    (lease,) = await bench.lease(member, count=1, version=version)
    return member, lease


def seed_of(bench: Bench, lease: Lease) -> int:
    held = bench.desk.find(LeaseId(lease.lease_id))
    assert held is not None
    return held.seed


async def next_seed(bench: Bench, member: Member, version: int = 0) -> int:
    """Return the item that is handed out next."""
    (lease,) = await bench.lease(member, count=1, version=version)
    return seed_of(bench, lease)


async def balanced(bench: Bench) -> dict[str, int]:
    """Return the places with something in them, once memory and disk agree."""
    now = bench.book.ledger.statistics()
    assert now.balances
    assert await bench.book.recount() == now
    places = {"trained": now.trained, "queued": now.queued, "in_flight": now.in_flight}
    return {name: count for name, count in (places | now.rejected).items() if count}


def verdict_of(reply: UploadReply) -> str | None:
    """Return the reason of a refusal, ``None`` for an acceptance."""
    assert reply.outcome.accepted == (reply.outcome.reason is None)
    return reply.outcome.reason


# --- acknowledged means safe ------------------------------------------------------------------


async def test_an_accepted_upload_is_scored_and_waits_for_the_learner(
    autojump_clock, bench: Bench
) -> None:
    member, lease = await one_lease(bench)
    reply = await bench.upload(member, right_answers(lease, member.incarnation))
    assert (reply.outcome.lease_id, reply.outcome.accepted) == (lease.lease_id, True)
    assert not reply.duplicate
    assert await balanced(bench) == {"queued": 2}
    assert bench.desk.find(LeaseId(lease.lease_id)) is None
    (entry,) = bench.journal.named("upload.accepted")
    assert entry.fields["peer"] == member.peer_id
    await scored(bench)
    (group,) = bench.queue.take(Step(0), 1) or []
    assert group.group.lease_id == lease.lease_id
    assert group.rewards.tolist() == [0.0, 1.0]
    assert group.mask.tolist() == [True, True]


async def test_what_was_acknowledged_is_scored_by_the_next_life(
    autojump_clock, disk: SimDisk
) -> None:
    async with open_bench(disk, seed=1) as bench:
        member, lease = await one_lease(bench)
        upload = right_answers(lease, member.incarnation)
        assert verdict_of(await bench.upload(member, upload)) is None
        disk.crash()
    async with open_bench(disk, seed=2) as bench:
        assert await balanced(bench) == {"queued": 2}
        await scored(bench)
        (group,) = bench.queue.take(Step(0), 1) or []
        assert group.rewards.tolist() == [0.0, 1.0]
        again = bench.beat(bench.member("p"), 0)
        assert (await bench.upload(again, upload)).duplicate


@pytest.mark.parametrize("crash_at_s", [0.0, 0.002, 0.0039])
async def test_what_was_not_acknowledged_is_still_in_flight_in_the_next_life(
    autojump_clock, disk: SimDisk, crash_at_s: float
) -> None:
    async with open_bench(disk, seed=1) as bench:
        member, lease = await one_lease(bench)
        upload = right_answers(lease, member.incarnation)
        with pytest.RaisesGroup(StoreError):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.upload, member, upload)
                await trio.sleep(crash_at_s)
                disk.crash()
    async with open_bench(disk, seed=2) as bench:
        assert await balanced(bench) == {"in_flight": 2}
        again = bench.beat(bench.member("p"), 0)
        reply = await bench.upload(again, upload)
        assert verdict_of(reply) is None
        assert not reply.duplicate


async def test_an_upload_whose_sender_hangs_up_is_still_taken_and_scored(
    autojump_clock, bench: Bench
) -> None:
    member, lease = await one_lease(bench)
    with trio.move_on_after(0.001):
        await bench.upload(member, right_answers(lease, member.incarnation))
    assert await balanced(bench) == {"queued": 2}
    await scored(bench)
    assert len(bench.queue) == 1


# --- whose lease, and when --------------------------------------------------------------------


async def test_another_peers_lease_is_refused_and_stays_as_it_was(
    autojump_clock, bench: Bench
) -> None:
    owner, lease = await one_lease(bench, "owner")
    thief = await bench.ready("thief")
    stolen = right_answers(lease, thief.incarnation)
    assert verdict_of(await bench.upload(thief, stolen)) == "not_yours"
    assert await balanced(bench) == {"in_flight": 2}
    assert verdict_of(await bench.upload(owner, stolen)) is None
    assert verdict_of(await bench.upload(thief, stolen)) == "not_yours"
    assert await balanced(bench) == {"queued": 2}


async def test_the_lease_of_an_earlier_incarnation_is_not_ours(
    autojump_clock, bench: Bench
) -> None:
    old, lease = await one_lease(bench)
    bench.state.members.leave(old.peer_id, old.incarnation)  # its leases are about to be ended
    new = await bench.ready("p")
    assert verdict_of(await bench.upload(new, right_answers(lease, 2))) == "not_yours"
    assert await balanced(bench) == {"in_flight": 2}


async def test_a_lease_that_never_was_is_unknown(autojump_clock, bench: Bench) -> None:
    member, lease = await one_lease(bench)
    forged = msgspec.structs.replace(right_answers(lease, member.incarnation), lease_id="f" * 32)
    assert verdict_of(await bench.upload(member, forged)) == "unknown_lease"
    assert await balanced(bench) == {"in_flight": 2}


async def test_an_upload_sent_again_is_a_duplicate_whatever_has_become_of_it(
    autojump_clock, bench: Bench
) -> None:
    member = await bench.ready("p")
    leases = await bench.lease(member, count=2)
    uploads = [right_answers(lease, member.incarnation) for lease in leases]
    for upload in uploads:
        assert not (await bench.upload(member, upload)).duplicate
    again = await bench.upload(member, uploads[0])
    assert (again.duplicate, again.outcome.accepted) == (True, True)
    await scored(bench)
    assert await bench.train()
    again = await bench.upload(member, uploads[0])
    assert (again.duplicate, again.outcome.accepted) == (True, True)
    # Nor is the second one looked at: it may be anything.
    bad = msgspec.structs.replace(uploads[0], samples=[])
    assert (await bench.upload(member, bad)).duplicate
    assert await balanced(bench) == {"trained": 4}
    await scored(bench)
    assert len(bench.queue) == 0


async def test_the_same_upload_ten_times_at_once_is_one_group(autojump_clock, bench: Bench) -> None:
    member, lease = await one_lease(bench)
    replies: list[UploadReply] = []

    async def send() -> None:
        replies.append(await bench.upload(member, right_answers(lease, member.incarnation)))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(send)
    assert all(reply.outcome.accepted for reply in replies)
    assert sorted(reply.duplicate for reply in replies) == [False] + [True] * 9
    await scored(bench)
    assert len(bench.queue) == 1
    assert await balanced(bench) == {"queued": 2}


async def test_an_honest_and_a_damaged_upload_at_once_decide_the_lease_once(
    autojump_clock, bench: Bench
) -> None:
    member = await bench.ready("p")
    for order in (1, -1):
        (lease,) = await bench.lease(member, count=1)
        good = right_answers(lease, member.incarnation)
        replies: list[UploadReply] = []

        async def send(upload: Upload, replies: list[UploadReply] = replies) -> None:
            replies.append(await bench.upload(member, upload))

        async with trio.open_nursery() as nursery:
            for upload in [good, msgspec.structs.replace(good, samples=good.samples[:1])][::order]:
                nursery.start_soon(send, upload)
        assert len({verdict_of(reply) for reply in replies}) == 1
        assert bench.desk.find(LeaseId(lease.lease_id)) is None
    assert sum((await balanced(bench)).values()) == 4


async def test_an_upload_after_its_deadline_hears_that_it_is_late(
    autojump_clock, bench: Bench
) -> None:
    member, lease = await one_lease(bench)
    seed = seed_of(bench, lease)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.desk.run)
        await trio.sleep(31.0)
        late = await bench.upload(member, right_answers(lease, member.incarnation))
        nursery.cancel_scope.cancel()
    assert verdict_of(late) == "lease_expired"
    assert not late.duplicate
    assert await balanced(bench) == {"lease_expired": 2}
    assert await next_seed(bench, member) == seed


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "reason"),
    [([], "aborted"), ([sample([5, 2], 0)], "malformed"), ([sample([64, 2], 0)] * 2, None)],
)
async def test_a_refused_upload_closes_the_lease_and_frees_its_prompt(
    autojump_clock, bench: Bench, samples: list, reason: str | None
) -> None:
    reason = reason or "out_of_vocabulary"
    member, lease = await one_lease(bench)
    seed = seed_of(bench, lease)
    bad = msgspec.structs.replace(right_answers(lease, 1), samples=samples)
    assert verdict_of(await bench.upload(member, bad)) == reason
    assert await balanced(bench) == {reason: 2}
    (entry,) = bench.journal.named("upload.rejected")
    assert entry.fields["reason"] == reason
    again = await bench.upload(member, right_answers(lease, 1))
    assert (verdict_of(again), again.duplicate) == (reason, False)
    assert await next_seed(bench, member) == seed


async def test_what_arrives_too_late_to_be_young_is_stale(autojump_clock, bench: Bench) -> None:
    member = await bench.ready("p")
    first, second = await bench.lease(member, count=2)
    bench.state.step = Step(1)
    assert verdict_of(await bench.upload(member, right_answers(first, 1))) is None
    bench.state.step = Step(2)
    seed = seed_of(bench, second)
    assert verdict_of(await bench.upload(member, right_answers(second, 1))) == "stale"
    assert await balanced(bench) == {"queued": 2, "stale": 2}
    await bench.publish(2)
    assert await next_seed(bench, member, version=1) == seed


async def test_samples_of_a_version_that_was_rolled_back_are_refused(
    autojump_clock, bench: Bench
) -> None:
    await bench.publish(1)
    member, lease = await one_lease(bench, version=1)
    await bench.roll_back(0)
    assert verdict_of(await bench.upload(member, right_answers(lease, 1))) == "dead_generation"
    assert await balanced(bench) == {"dead_generation": 2}


# --- rollbacks --------------------------------------------------------------------------------


async def uploads_of_both_versions(bench: Bench) -> list[Upload]:
    """Return uploads of versions 0 (step 0) and 1 (step 1), the seeds unknown."""
    member = await bench.ready("p")
    (old,) = await bench.lease(member, count=1)
    await bench.publish(1)
    (new,) = await bench.lease(member, count=1, version=1)
    return [right_answers(old, member.incarnation), right_answers(new, member.incarnation)]


async def survivors(bench: Bench) -> list[str]:
    """Return what can be trained on, after all has been scored."""
    await scored(bench)
    groups = bench.queue.take(bench.state.step, len(bench.queue))
    assert groups is not None
    return [item.group.lease_id for item in groups]


async def assert_only_the_first_survives(bench: Bench, uploads: list[Upload]) -> None:
    first, second = uploads
    assert await survivors(bench) == [first.lease_id]
    assert await balanced(bench) == {"queued": 2, "dead_generation": 2}
    fate = await bench.book.fate(LeaseId(second.lease_id))
    assert fate is not None
    assert fate[:2] == (Place.REJECTED, Reason.DEAD_GENERATION)
    (outcome,) = bench.intake.take_outcomes(bench.member("p").peer_id)
    assert (outcome.lease_id, outcome.reason) == (second.lease_id, "dead_generation")


async def test_a_rollback_drops_what_waits_to_be_scored(autojump_clock, bench: Bench) -> None:
    uploads = await uploads_of_both_versions(bench)
    seed = seed_of(bench, (await bench.book.open_leases())[1].lease)
    for upload in uploads:
        await bench.upload(bench.member("p"), upload)
    await bench.roll_back(0)
    await assert_only_the_first_survives(bench, uploads)
    assert await next_seed(bench, bench.member("p")) == seed


async def test_a_rollback_drops_what_waits_for_the_learner(autojump_clock, bench: Bench) -> None:
    uploads = await uploads_of_both_versions(bench)
    for upload in uploads:
        await bench.upload(bench.member("p"), upload)
    await scored(bench)
    assert len(bench.queue) == 2
    await bench.roll_back(0)
    await assert_only_the_first_survives(bench, uploads)


@pytest.mark.parametrize("at_s", [0.2, 0.5, 0.9])
async def test_a_rollback_drops_what_is_being_scored(
    autojump_clock, disk: SimDisk, at_s: float
) -> None:
    async with open_bench(disk, make_worker=lambda: InlineTaskWorker(call_s=1.0)) as bench:
        uploads = await uploads_of_both_versions(bench)
        for upload in uploads:
            await bench.upload(bench.member("p"), upload)
        async with scoring(bench):
            await trio.sleep(at_s)
            await bench.roll_back(0)
            assert len(bench.queue) == 0
            await trio.sleep(5.0)
        await assert_only_the_first_survives(bench, uploads)


async def test_a_rollback_between_the_generations_number_and_its_end_drops_it_too(
    autojump_clock, disk: SimDisk
) -> None:
    # The trainer writes the new number first; scoring that begins then must not pass for new.
    async with open_bench(disk, make_worker=lambda: InlineTaskWorker(call_s=1.0)) as bench:
        uploads = await uploads_of_both_versions(bench)
        async with scoring(bench):
            await trio.sleep(0.1)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.roll_back, 0)
                for upload in uploads:
                    nursery.start_soon(bench.upload, bench.member("p"), upload)
            await trio.sleep(5.0)
        assert await survivors(bench) == [uploads[0].lease_id]
        assert await balanced(bench) == {"queued": 2, "dead_generation": 2}


async def test_a_rollback_drops_what_is_being_written(autojump_clock, bench: Bench) -> None:
    uploads = await uploads_of_both_versions(bench)
    async with trio.open_nursery() as nursery:
        for upload in uploads:
            nursery.start_soon(bench.upload, bench.member("p"), upload)
        await trio.sleep(0.002)  # half of an fsync
        bench.state.roll_back(Step(0))
        await bench.intake.roll_back()
    await assert_only_the_first_survives(bench, uploads)


async def test_what_a_new_generation_makes_at_later_steps_is_not_lost_again(
    autojump_clock, bench: Bench
) -> None:
    await bench.roll_back(0)
    await bench.publish(1)
    member, lease = await one_lease(bench, version=1)
    await bench.upload(member, right_answers(lease, 1))
    bench.state.step = Step(1)
    assert await survivors(bench) == [lease.lease_id]


async def test_after_a_crash_in_a_rollback_the_next_life_rejects_what_was_lost(
    autojump_clock, disk: SimDisk
) -> None:
    async with open_bench(disk, seed=1) as bench:
        uploads = await uploads_of_both_versions(bench)
        seed = seed_of(bench, (await bench.book.open_leases())[1].lease)
        for upload in uploads:
            await bench.upload(bench.member("p"), upload)
        await bench.book.roll_back(Step(0))
        disk.crash()
    async with open_bench(disk, seed=2) as bench:
        assert await balanced(bench) == {"queued": 2, "dead_generation": 2}
        assert await survivors(bench) == [uploads[0].lease_id]
        assert await next_seed(bench, bench.beat(bench.member("p"), 0)) == seed


# --- scoring ----------------------------------------------------------------------------------


class Judge(InlineTaskWorker):
    """Answers as it is told, in the order of the rollouts."""

    def __init__(self, *answers: Next | Done | Failed) -> None:
        super().__init__()
        self.answers = list(answers)

    async def score(
        self, episodes: Sequence[tuple[int, Sequence[Turn]]]
    ) -> list[Next | Done | Failed]:
        """Say what was told."""
        await super().score(episodes)
        return [self.answers.pop(0) for _ in episodes]


def done(reward: float, *, masked: bool = False) -> Done:
    return Done(Verdict(rewards=(reward,), masked=masked))


MORE = Next(prompt=np.ones(3, dtype=np.uint32), player=0)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Failed("it broke"), "it broke"),
        (MORE, "one turn was expected"),
        (done(9, masked=True), None),
    ],
)
async def test_a_rollout_whose_task_failed_is_masked_and_the_others_count(
    autojump_clock, disk: SimDisk, other: Next | Done | Failed, told: str | None
) -> None:
    async with open_bench(disk, make_worker=lambda: Judge(other, done(0.5))) as bench:
        member, lease = await one_lease(bench)
        await bench.upload(member, right_answers(lease, 1))
        await scored(bench)
        (group,) = bench.queue.take(Step(0), 1) or []
        assert (group.rewards.tolist(), group.mask.tolist()) == ([0.0, 0.5], [False, True])
        assert [told in str(e.fields["detail"]) for e in bench.journal.named("task.failed")] == (
            [] if told is None else [True]
        )


async def test_a_group_whose_task_failed_throughout_is_rejected_and_its_prompt_left_out(
    autojump_clock, disk: SimDisk
) -> None:
    async with open_bench(disk, make_worker=lambda: Judge(Failed("x"), Failed("y"))) as bench:
        member, lease = await one_lease(bench)
        seed = seed_of(bench, lease)
        assert verdict_of(await bench.upload(member, right_answers(lease, 1))) is None
        await scored(bench)
        assert len(bench.queue) == 0
        assert await balanced(bench) == {"task_failed": 2}
        (outcome,) = bench.intake.take_outcomes(member.peer_id)
        assert (outcome.accepted, outcome.reason) == (False, "task_failed")
        assert await next_seed(bench, member) != seed, "it would fail again"


async def test_an_upload_wakes_the_scorer_and_its_score_wakes_the_learner(
    autojump_clock, bench: Bench
) -> None:
    member = await bench.ready("p")
    leases = await bench.lease(member, count=2)
    async with scoring(bench):
        await trio.sleep(5.0)  # it waits for work
        for lease in leases:
            await bench.upload(member, right_answers(lease, 1))
        with trio.fail_after(1.0):
            while not await bench.train():
                await bench.state.changed.park()
    assert await balanced(bench) == {"trained": 4}


async def test_an_answer_that_ran_into_its_limit_is_told_to_the_task(
    autojump_clock, bench: Bench
) -> None:
    member, lease = await one_lease(bench)
    upload = right_answers(lease, 1)
    digits = to_tokens(upload.samples[1].tokens).tolist()[:-1]
    cut = msgspec.structs.replace(sample((digits * 2)[:8], 0), finish="length")
    await bench.upload(member, msgspec.structs.replace(upload, samples=[upload.samples[1], cut]))
    await scored(bench)
    (group,) = bench.queue.take(Step(0), 1) or []
    assert group.rewards.tolist() == [1.0, 0.0]
    assert [turn.truncated for turn in group.group.turns] == [False, True]


async def test_a_worker_that_dies_while_it_scores_is_asked_again(
    autojump_clock, disk: SimDisk
) -> None:
    lives: list[InlineTaskWorker] = []

    def make() -> InlineTaskWorker:
        lives.append(InlineTaskWorker(die_at_call=None if lives else 2))
        return lives[-1]

    async with open_bench(disk, make_worker=make) as bench:
        member, lease = await one_lease(bench)
        await bench.upload(member, right_answers(lease, 1))
        await scored(bench)
        (group,) = bench.queue.take(Step(0), 1) or []
        assert group.rewards.tolist() == [0.0, 1.0]
        assert len(lives) == 2


class OneLife(InlineTaskWorker):
    """Comes up once only."""

    lives = 0

    async def start(self, setup: TaskSetup) -> TaskInfo:
        """Start the first."""
        OneLife.lives += 1
        if OneLife.lives > 1:
            raise ChildError("task worker", "gone for good")
        return await super().start(setup)


async def test_without_a_task_worker_scoring_ends_and_says_why_and_nothing_is_lost(
    autojump_clock, disk: SimDisk
) -> None:
    OneLife.lives = 0
    async with open_bench(disk, seed=1, make_worker=lambda: OneLife(die_at_call=2)) as bench:
        member, lease = await one_lease(bench)
        await bench.upload(member, right_answers(lease, 1))
        with pytest.raises(ChildError, match="gone for good"):
            await bench.intake.run()
    async with open_bench(disk, seed=2) as bench:
        assert await survivors(bench) == [lease.lease_id]


# --- outcomes ---------------------------------------------------------------------------------


async def test_what_became_of_a_group_is_told_once_and_only_to_its_peer(
    autojump_clock, bench: Bench
) -> None:
    one, other = await bench.ready("one"), await bench.ready("other")
    leases = [(await bench.lease(member, count=1))[0] for member in (one, other)]
    for member, lease in zip((one, other), leases, strict=True):
        await bench.upload(member, right_answers(lease, member.incarnation))
    assert bench.intake.take_outcomes(one.peer_id) == []
    await scored(bench)
    assert await bench.train()
    told = bench.intake.take_outcomes(one.peer_id)
    assert [(item.lease_id, item.accepted) for item in told] == [(leases[0].lease_id, True)]
    assert bench.intake.take_outcomes(one.peer_id) == []
    assert len(bench.intake.take_outcomes(other.peer_id)) == 1


async def test_a_group_that_grew_too_old_in_the_queue_is_dropped_told_and_handed_out_again(
    autojump_clock, bench: Bench
) -> None:
    member, lease = await one_lease(bench)
    seed = seed_of(bench, lease)
    await bench.upload(member, right_answers(lease, 1))
    await scored(bench)
    bench.state.step = Step(2)
    assert not await bench.train()
    assert await balanced(bench) == {"stale": 2}
    (outcome,) = bench.intake.take_outcomes(member.peer_id)
    assert outcome.reason == "stale"
    (entry,) = bench.journal.named("group.dropped")
    assert (entry.fields["reason"], entry.fields["groups"]) == ("stale", 1)
    await bench.publish(2)
    assert await next_seed(bench, member, version=1) == seed


async def test_a_peer_that_never_asks_costs_bounded_memory(autojump_clock, bench: Bench) -> None:
    member, lease = await one_lease(bench)
    upload = right_answers(lease, 1)
    group = check_upload(upload, lease, 0, member.peer_id, bench.state.expectation())
    assert isinstance(group, Group)
    for _ in range(OUTCOMES_MAX + 50):
        bench.intake.decided(group, Reason.STALE)
    bench.intake.decided(group, None)
    told = bench.intake.take_outcomes(member.peer_id)
    assert len(told) == OUTCOMES_MAX
    assert told[-1].accepted
