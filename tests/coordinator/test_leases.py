"""Leases: room, long polls, deadlines, and that nothing is ever stranded."""

from collections.abc import Sequence

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from coordinator.config import RolloutsSection
from coordinator.task_port import Failed, Opening, TaskInfo, TaskSetup
from echo2p2p.errors import ChildError
from echo2p2p.ids import LeaseId
from echo2p2p.limits import LEASES_PER_CALL_MAX
from echo2p2p.rollouts.ledger import Place
from echo2p2p.rollouts.trajectory import Reason
from echo2p2p.testing.disk import SimDisk
from echo2p2p.wire.messages import Lease
from scenarios.middle import ROLLOUTS, Bench, open_bench, right_answers
from scenarios.parts import InlineTaskWorker

ROOM = 4
"""Leases that version 0 can carry: two batches of two groups."""


@pytest.fixture
async def bench():
    async with open_bench(SimDisk()) as opened:
        yield opened


def seeds(bench: Bench, leases: list[Lease]) -> list[int]:
    """Return the items' seeds, which only the coordinator knows."""
    found = [bench.desk.find(LeaseId(lease.lease_id)) for lease in leases]
    return [held.seed for held in found if held is not None]


async def answered(bench: Bench, name: str, leases: list[Lease]) -> None:
    """Upload right answers to all."""
    member = bench.member(name)
    for lease in leases:
        reply = await bench.upload(member, right_answers(lease, member.incarnation))
        assert reply.outcome.accepted


async def trained(bench: Bench) -> None:
    """Score what waits and take one step."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.intake.run)
        while not await bench.train():
            await bench.state.changed.park()
        nursery.cancel_scope.cancel()


# --- what is granted --------------------------------------------------------------------------


async def test_a_lease_says_all_that_an_engine_needs(autojump_clock, bench: Bench) -> None:
    member = await bench.ready("p")
    leases = await bench.lease(member, count=2)
    assert len({lease.lease_id for lease in leases}) == 2
    for lease in leases:
        assert (lease.kind, lease.samples, lease.tokens_max, lease.version) == ("train", 2, 8, 0)
        assert lease.stop_ids == [2]
        assert lease.deadline_s == ROLLOUTS.lease_timeout_s
        assert len(set(lease.seeds)) == 2
        assert all(0 <= seed < 2**63 for seed in lease.seeds)
        opened = await bench.tasks.open(seeds(bench, [lease]))
        assert isinstance(opened[0], Opening)
        assert opened[0].prompt.tobytes() == lease.prompt.data
        held = bench.desk.find(LeaseId(lease.lease_id))
        assert held is not None
        assert (held.peer_id, held.incarnation, held.lease) == (member.peer_id, 1, lease)
    assert await bench.book.open_leases() == [
        bench.desk.find(LeaseId(lease.lease_id)) for lease in leases
    ]


async def test_no_more_is_granted_than_the_version_can_carry(autojump_clock, bench: Bench) -> None:
    member = await bench.ready("p")
    assert len(await bench.lease(member, count=1)) == 1
    assert len(await bench.lease(member)) == ROOM - 1
    assert await bench.lease(member) == []
    issued = bench.journal.named("leases.issued")
    assert [entry.fields["leases"] for entry in issued] == [1, ROOM - 1]
    assert bench.book.ledger.statistics().in_flight == 2 * ROOM


async def test_a_peer_that_does_not_wait_gets_what_there_is_at_once(
    autojump_clock, bench: Bench
) -> None:
    member = await bench.ready("p")
    began = trio.current_time()
    assert len(await bench.lease(member, wait_s=0.0)) == ROOM
    assert await bench.lease(member, wait_s=-3.0) == []
    assert trio.current_time() - began < 0.1


async def test_one_answer_holds_a_bounded_number_of_leases(autojump_clock) -> None:
    many = RolloutsSection(prompts_per_step=100, samples_per_prompt=2, lease_timeout_s=30.0)
    async with open_bench(SimDisk(), rollouts=many) as bench:
        member = await bench.ready("p")
        assert len(await bench.lease(member, count=2**40)) == LEASES_PER_CALL_MAX
        assert await bench.lease(member, count=0) == []
        assert await bench.lease(member, count=-1) == []


async def test_many_grants_at_once_never_exceed_the_room(autojump_clock) -> None:
    async with open_bench(SimDisk(), make_worker=lambda: InlineTaskWorker(call_s=0.1)) as bench:
        members = [await bench.ready(f"p{number}") for number in range(5)]
        granted: list[Lease] = []

        async def ask(member) -> None:
            granted.extend(await bench.lease(member, count=3, wait_s=1.0))
            assert bench.book.ledger.statistics().in_flight <= 2 * ROOM

        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(ask, member)
        assert len(granted) == ROOM
        assert len(set(seeds(bench, granted))) == ROOM


async def test_only_active_members_work_and_only_while_there_is_a_learner(
    autojump_clock, bench: Bench
) -> None:
    relay = await bench.ready("relay", engine="none")
    assert await bench.lease(relay) == []
    member = await bench.ready("p")
    bench.state.leasing = False
    assert await bench.lease(member) == []
    bench.state.leasing = True
    bench.beat(member, None)  # warming again
    assert await bench.lease(member) == []
    bench.beat(member, 0)
    assert len(await bench.lease(member)) == ROOM


@pytest.mark.parametrize("version", [1, 2**64 - 1])
async def test_a_version_that_does_not_live_carries_nothing(
    autojump_clock, bench: Bench, version: int
) -> None:
    member = await bench.ready("p")
    assert await bench.lease(member, version=version) == []


async def test_the_newest_version_that_a_peer_has_told_counts(autojump_clock, bench: Bench) -> None:
    member = await bench.ready("p", version=0)
    await bench.publish(1)
    bench.beat(member, 1)
    leases = await bench.lease(member, version=-1)
    assert [lease.version for lease in leases] == [1] * (ROOM + 2)


async def test_a_rolled_back_version_carries_nothing(autojump_clock, bench: Bench) -> None:
    member = await bench.ready("p")
    await bench.publish(3)
    await bench.roll_back(0)
    assert await bench.lease(member, version=1) == []
    assert len(await bench.lease(member, version=0)) == ROOM


# --- long polls -------------------------------------------------------------------------------


async def test_a_poll_that_finds_nothing_ends_when_it_said(autojump_clock, bench: Bench) -> None:
    member = await bench.ready("p")
    await bench.lease(member)
    began = trio.current_time()
    assert await bench.lease(member, wait_s=20.0) == []
    assert trio.current_time() - began == pytest.approx(20.0)


async def test_a_poll_is_woken_when_there_is_room_again(autojump_clock, bench: Bench) -> None:
    member = await bench.ready("p")
    other = await bench.ready("q")
    await bench.lease(other)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def leave() -> None:
            await trio.sleep(5.0)
            await bench.roster.leave(other.peer_id, other.incarnation, "bye")

        assert len(await bench.lease(member, wait_s=20.0)) == ROOM
    assert trio.current_time() - began == pytest.approx(5.0, abs=0.1)


@pytest.mark.parametrize("how", ["given back", "expired", "dropped"])
async def test_a_poll_is_woken_by_whatever_makes_room(
    autojump_clock, bench: Bench, how: str
) -> None:
    member = await bench.ready("p")
    (first, *_) = await bench.lease(member)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def make_room() -> None:
            await trio.sleep(5.0)
            if how == "given back":
                empty = msgspec.structs.replace(right_answers(first, 1), samples=[])
                await bench.upload(member, empty)
            elif how == "expired":
                pairs = [(LeaseId(first.lease_id), first.samples)]
                await bench.book.reject(pairs, Place.IN_FLIGHT, Reason.LEASE_EXPIRED)
                bench.desk.close(LeaseId(first.lease_id), give_back=True)
            else:
                await answered(bench, "p", [first])
                pairs = [(LeaseId(first.lease_id), first.samples)]
                await bench.book.reject(pairs, Place.QUEUED, Reason.TASK_FAILED)
                bench.desk.give_back(1)

        (again,) = await bench.lease(member, wait_s=20.0)
    assert again.lease_id != first.lease_id
    assert trio.current_time() - began == pytest.approx(5.0, abs=0.1)


async def test_a_poll_is_woken_by_the_heartbeat_that_tells_a_newer_version(
    autojump_clock, bench: Bench
) -> None:
    # With S = 0 all peers sit in such a poll whenever a version is published.
    member = await bench.ready("p")
    await answered(bench, "p", await bench.lease(member))
    await trained(bench)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def switch() -> None:
            await trio.sleep(3.0)
            await bench.publish(1)
            await trio.sleep(1.0)
            bench.beat(member, 1)

        leases = await bench.lease(member, version=0, wait_s=20.0)
    assert trio.current_time() - began == pytest.approx(4.0, abs=0.1)
    assert [lease.version for lease in leases] == [1, 1]


async def test_a_cancelled_poll_leaves_nothing_behind(autojump_clock, bench: Bench) -> None:
    member = await bench.ready("p")
    held = await bench.lease(member, count=3)
    with trio.move_on_after(1.0):
        await bench.lease(member, version=5, wait_s=20.0)
    assert bench.book.ledger.statistics().in_flight == 2 * len(held)
    assert len(await bench.lease(member)) == ROOM - 3


@pytest.mark.parametrize("after_s", [0.05, 0.101, 0.105])
async def test_a_poll_cancelled_in_the_middle_of_a_grant_strands_nothing(
    autojump_clock, after_s: float
) -> None:
    async with open_bench(
        SimDisk(sync_s=0.004), make_worker=lambda: InlineTaskWorker(call_s=0.1)
    ) as bench:
        member = await bench.ready("p")
        with trio.move_on_after(after_s) as scope:
            await bench.lease(member, wait_s=20.0)
        assert scope.cancelled_caught
        balance = bench.book.ledger.statistics()
        assert (balance.in_flight, balance.rejected) == (0, {"aborted": 2 * ROOM})
        lost = [
            seed
            for (seed,) in await bench.book._store.transact(
                lambda rows: rows.execute("SELECT seed FROM leases ORDER BY rowid").fetchall()
            )
        ]
        assert seeds(bench, await bench.lease(member)) == lost


async def test_the_end_of_the_run_waits_for_no_prompt_and_strands_none(autojump_clock) -> None:
    slow = InlineTaskWorker(call_s=100.0)
    async with open_bench(SimDisk(), make_worker=lambda: slow) as bench:
        member = await bench.ready("p")
        began = trio.current_time()
        with trio.move_on_after(5.0):
            async with trio.open_nursery() as run:
                run.start_soon(bench.desk.run)
                await bench.lease(member, wait_s=20.0)
        assert trio.current_time() - began < 6.0
        assert bench.book.ledger.statistics().in_flight == 0
        first = list(bench.desk._returned)
        assert len(first) == ROOM
        assert seeds(bench, await bench.lease(member)) == first


async def test_a_poll_whose_time_ends_in_the_middle_of_a_grant_still_gets_it(
    autojump_clock,
) -> None:
    async with open_bench(SimDisk(), make_worker=lambda: InlineTaskWorker(call_s=0.1)) as bench:
        member = await bench.ready("p")
        assert len(await bench.lease(member, wait_s=0.05)) == ROOM


# --- ends -------------------------------------------------------------------------------------


async def test_a_lease_ends_at_its_deadline_and_its_prompt_is_handed_out_first(
    autojump_clock,
    bench: Bench,
) -> None:
    member = await bench.ready("p")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.desk.run)
        early = await bench.lease(member, count=1)
        was = seeds(bench, early)
        await trio.sleep(20.0)
        late = await bench.lease(member, count=1)
        await trio.sleep(9.9)
        assert len(seeds(bench, early + late)) == 2
        await trio.sleep(0.2)  # 30.1 s after the first
        assert seeds(bench, early) == []
        assert len(seeds(bench, late)) == 1
        balance = bench.book.ledger.statistics()
        assert balance.rejected == {"lease_expired": 2}
        again = await bench.lease(await bench.ready("q"))
        assert seeds(bench, again)[:1] == was
        assert early[0].lease_id not in {lease.lease_id for lease in again}
        await trio.sleep(20.0)
        assert seeds(bench, late) == []
        nursery.cancel_scope.cancel()


async def test_a_lease_that_is_answered_has_no_deadline_any_more(
    autojump_clock, bench: Bench
) -> None:
    member = await bench.ready("p")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.desk.run)
        await answered(bench, "p", await bench.lease(member, count=1))
        await trio.sleep(100.0)
        assert bench.book.ledger.statistics().rejected == {}
        nursery.cancel_scope.cancel()


async def test_the_prompts_of_a_peer_that_is_gone_go_out_first_in_their_order(
    autojump_clock,
    bench: Bench,
) -> None:
    gone, stays = await bench.ready("gone"), await bench.ready("stays")
    lost = seeds(bench, await bench.lease(gone, count=2))
    kept = seeds(bench, await bench.lease(stays, count=1))
    assert await bench.desk.end_peer(gone.peer_id, gone.incarnation) == 2
    assert await bench.desk.end_peer(gone.peer_id, gone.incarnation) == 0
    again = seeds(bench, await bench.lease(stays))
    assert again[:2] == lost
    assert len(again) == 3
    assert again[2] not in lost + kept
    assert bench.book.ledger.statistics().rejected == {"peer_gone": 4}
    ended = bench.journal.named("leases.ended")
    assert [entry.fields["leases"] for entry in ended] == [2]


async def test_another_incarnations_leases_stay(autojump_clock, bench: Bench) -> None:
    old = await bench.ready("p")
    await bench.lease(old, count=1)
    await bench.roster.leave(old.peer_id, old.incarnation, "restart")
    new = await bench.ready("p")
    leases = await bench.lease(new, count=2)
    assert await bench.desk.end_peer(old.peer_id, old.incarnation) == 0
    assert len(seeds(bench, leases)) == 2


async def test_an_answered_prompt_is_not_handed_out_again_unless_its_group_is_dropped(
    autojump_clock, bench: Bench
) -> None:
    member = await bench.ready("p")
    leases = await bench.lease(member, count=2)
    was = seeds(bench, leases)
    await answered(bench, "p", leases)
    later = await bench.lease(member, count=1)
    assert seeds(bench, later)[0] not in was
    bench.desk.give_back(was[1])
    assert seeds(bench, await bench.lease(member, count=1)) == [was[1]]


async def test_a_peer_that_vanishes_while_a_grant_is_under_way_strands_nothing(
    autojump_clock,
) -> None:
    async with open_bench(SimDisk(), make_worker=lambda: InlineTaskWorker(call_s=1.0)) as bench:
        member, heir = await bench.ready("p"), await bench.ready("heir")
        got: list[Lease] = []

        async def ask() -> None:
            got.extend(await bench.lease(member, wait_s=0.0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.5)
            await bench.roster.leave(member.peer_id, member.incarnation, "bye")
            assert bench.book.ledger.statistics().issued == 0
        assert got == []
        balance = bench.book.ledger.statistics()
        assert (balance.in_flight, balance.rejected) == (0, {"peer_gone": 2 * ROOM})
        lost = await bench.book._store.transact(
            lambda rows: [row[0] for row in rows.execute("SELECT seed FROM leases").fetchall()]
        )
        assert seeds(bench, await bench.lease(heir)) == lost


async def test_at_the_end_a_grant_under_way_is_ended_like_the_others(autojump_clock) -> None:
    async with open_bench(SimDisk(), make_worker=lambda: InlineTaskWorker(call_s=1.0)) as bench:
        member = await bench.ready("p")
        await bench.lease(member, count=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.lease, member)
            await trio.sleep(0.5)
            bench.state.leasing = False
            assert await bench.desk.end_all(Reason.UNUSED) == ROOM
        balance = bench.book.ledger.statistics()
        assert (balance.in_flight, balance.rejected) == (0, {"unused": 2 * ROOM})
        assert await bench.book.recount() == balance


# --- our own restart --------------------------------------------------------------------------


async def test_after_a_restart_leases_are_held_on_and_no_item_comes_twice(
    autojump_clock,
) -> None:
    disk = SimDisk()
    async with open_bench(disk, seed=1) as bench:
        member = await bench.ready("p")
        old = await bench.lease(member, count=2)
        was = seeds(bench, old)
        disk.crash()
    async with open_bench(disk, seed=2) as bench:
        assert seeds(bench, old) == was
        (member,) = bench.state.members.live()
        member = bench.beat(member, 0)
        new = await bench.lease(member)
        assert len(new) == ROOM - 2
        assert not set(seeds(bench, new)) & set(was)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.desk.run)
            await trio.sleep(29.9)
            assert len(seeds(bench, old)) == 2
            await trio.sleep(0.2)
            assert seeds(bench, old) == []
            nursery.cancel_scope.cancel()


# --- tasks that fail --------------------------------------------------------------------------


class PickyWorker(InlineTaskWorker):
    """Its first item is broken."""

    broken = 1

    async def open(self, seeds: Sequence[int]) -> list[Opening | Failed]:
        """Fail once."""
        opened = await super().open(seeds)
        if self.broken:
            self.broken = 0
            opened[0] = Failed("ZeroDivisionError: in the task")
        return opened


async def test_an_item_that_cannot_be_opened_costs_itself_only(autojump_clock) -> None:
    async with open_bench(SimDisk(), make_worker=PickyWorker) as bench:
        member = await bench.ready("p")
        assert await bench.lease(member, count=1) == []
        assert bench.book.ledger.statistics().issued == 0
        (failed,) = bench.journal.named("item.failed")
        assert "ZeroDivisionError" in str(failed.fields["detail"])
        assert len(await bench.lease(member)) == ROOM


async def test_an_item_that_cannot_be_opened_does_not_take_others_with_it(autojump_clock) -> None:
    async with open_bench(SimDisk(), make_worker=PickyWorker) as bench:
        member = await bench.ready("p")
        assert len(await bench.lease(member)) == ROOM - 1
        assert len(await bench.lease(member)) == 1


class DeadWorker(InlineTaskWorker):
    """Comes up once, then never again."""

    lives = 0

    async def start(self, setup: TaskSetup) -> TaskInfo:
        """Start the first of all."""
        DeadWorker.lives += 1
        if DeadWorker.lives > 1:
            raise ChildError("task worker", "no such file")
        return await super().start(setup)


async def test_a_task_worker_that_never_comes_up_again_ends_the_desk_and_not_a_request(
    autojump_clock,
) -> None:
    DeadWorker.lives = 0
    async with open_bench(SimDisk(), make_worker=lambda: DeadWorker(die_at_call=1)) as bench:
        member = await bench.ready("p")
        with pytest.RaisesGroup(pytest.RaisesExc(ChildError, match="no such file")):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bench.desk.run)
                await wait_all_tasks_blocked()
                assert await bench.lease(member) == []
                await trio.sleep(1.0)
                pytest.fail("the desk goes on without a task worker")
        assert trio.current_time() < 10.0


async def test_who_lets_leases_expire_gets_one_at_a_time_until_it_delivers(
    autojump_clock, bench: Bench
) -> None:
    hoarder, honest = await bench.ready("hoarder"), await bench.ready("honest")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.desk.run)
        assert len(await bench.lease(hoarder)) == ROOM
        assert await bench.lease(honest, wait_s=0.0) == []
        await trio.sleep(ROLLOUTS.lease_timeout_s + 1.0)
        first = await bench.lease(hoarder)
        assert len(first) == 1
        assert await bench.lease(hoarder, wait_s=0.0) == []
        assert len(await bench.lease(honest, count=1)) == 1, "it did nothing wrong"
        await answered(bench, "hoarder", first)
        assert len(await bench.lease(hoarder)) == 2
        nursery.cancel_scope.cancel()
