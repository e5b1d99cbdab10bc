"""What a run says of itself, over the coordinator's real middle on a simulated disk."""

from contextlib import asynccontextmanager

import msgspec
import trio

from coordinator.board import STATUS_AGE_S, Board
from coordinator.config import RunSection, Settings
from coordinator.publish import WeightBytes
from echo2p2p.limits import Fill
from echo2p2p.testing.clock import SimClock
from echo2p2p.testing.disk import SimDisk
from echo2p2p.wire.messages import Measurements
from scenarios.middle import ROLLOUTS, heartbeat, open_bench, right_answers

SUMMARY_KEYS = {
    *("outcome", "run", "reward_version0", "reward_first", "reward_last", "steps", "wall_s"),
    *("learner_idle_share", "age_steps", "step", "generation", "versions_published"),
    *("trajectories", "weights", "peers", "held_out", "parity"),
}


class Weights:
    source_bytes = (70, 20)

    def statistics(self):
        return WeightBytes(50, 2, 20, 0.2, state_bytes=100)


@asynccontextmanager
async def open_board():
    async with open_bench(SimDisk()) as bench:
        yield (
            bench,
            Board(
                settings=Settings(run=RunSection(steps=9), rollouts=ROLLOUTS),
                clock=SimClock(),
                book=bench.book,
                state=bench.state,
                roster=bench.roster,
                intake=bench.intake,
                queue=bench.queue,
                publisher=Weights(),
                fills=lambda: [Fill("members", 2, 9)],
                held_out=lambda: None,
            ),
        )


async def test_the_summary_has_its_keys_and_the_status_has_more(autojump_clock):
    async with open_board() as (_, board):
        summary = await board.summary()
        status = await board.status()
    assert set(summary) == SUMMARY_KEYS
    assert set(status) > SUMMARY_KEYS
    assert status["steps_target"] == 9
    assert status["bounds"] == [{"what": "members", "now": 2, "limit": 9}]
    assert status["weights"]["source_copies"] == 1.0
    assert msgspec.json.decode(msgspec.json.encode(status)) == msgspec.to_builtins(status)


async def test_a_peers_row_says_what_it_does_and_why_its_work_was_rejected(autojump_clock):
    async with open_board() as (bench, board):
        member = await bench.ready("ann")
        said = Measurements(
            relayed_bytes=7,
            received_bytes=9,
            duplicate_bytes=0,
            tokens_generated=40,
            engine_tokens_per_s=12.5,
            queue_leases=1,
        )
        bench.roster.heartbeat(
            member, heartbeat(member.incarnation, 0, measurements=said), trio.current_time()
        )
        first, second, third = await bench.lease(member, count=3)
        await bench.upload(member, right_answers(first, member.incarnation))
        await bench.upload(member, right_answers(second, member.incarnation, version=5))
        await trio.sleep(3.0)
        status = await board.status()
        await bench.join("bob")
        await bench.roster.leave(bench.member("bob").peer_id, 1, "bye")
        await trio.sleep(STATUS_AGE_S)
        later = await board.status()
    (ann,) = status["peers"]
    assert (ann["name"], ann["state"], ann["version"], ann["behind"]) == ("ann", "active", 0, 0)
    assert (ann["accepted"], ann["rejected"], ann["in_flight"]) == (2, 2, 2)
    assert ann["rejected_by_reason"] == {"unknown_version": 2}
    assert (ann["tokens_per_s"], ann["received_bytes"], ann["relayed_bytes"]) == (12.5, 9, 7)
    assert 2.9 < ann["heard_s"] < 3.1
    assert status["tokens_per_s"] == 12.5
    assert status["trajectories"]["balances"]
    assert status["trajectories"]["recount_agrees"]
    gone = {peer["name"]: peer for peer in later["peers"]}["bob"]
    assert (gone["state"], gone["version"]) == ("gone", None)
    assert third.samples == 2, "which are in flight"


async def test_the_ledger_of_a_status_is_of_one_moment_though_work_goes_on(autojump_clock):
    async with open_board() as (bench, board):
        member = await bench.ready("ann")
        good = []

        async def work():
            for _ in range(4):
                for lease in await bench.lease(member, count=1):
                    await bench.upload(member, right_answers(lease, member.incarnation))

        async def look():
            for _ in range(40):
                summary = await board.summary()
                good.append(summary["trajectories"])
                await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            nursery.start_soon(look)
    assert len({entry["issued"] for entry in good}) > 1, "work went on meanwhile"
    assert all(entry["balances"] and entry["recount_agrees"] for entry in good)


async def test_a_status_is_made_once_a_second_however_many_ask(autojump_clock):
    async with open_board() as (_, board):
        answers = []

        async def ask():
            answers.append(await board.status())

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
        assert all(answer is answers[0] for answer in answers)
        await trio.sleep(STATUS_AGE_S * 0.9)
        assert await board.status() is answers[0]
        await trio.sleep(STATUS_AGE_S * 0.2)
        assert await board.status() is not answers[0]


async def test_versions_on_their_way_are_watched(autojump_clock):
    async with open_board() as (bench, board), trio.open_nursery() as nursery:
        nursery.start_soon(board.watch)
        member = await bench.ready("ann")
        await trio.testing.wait_all_tasks_blocked()
        await bench.publish(1)
        await trio.sleep(2.0)
        bench.beat(member, 1)
        await trio.testing.wait_all_tasks_blocked()
        status = await board.status()
        nursery.cancel_scope.cancel()
    row = status["versions"][-1]
    assert (row["version"], row["step"], row["peers"]) == (1, 1, 1)
    assert abs(row["after_s"][member.peer_id] - 2.0) < 0.05
    assert row["last_after_s"] == row["after_s"][member.peer_id]


async def test_a_starting_learner_is_told_of_until_it_trains(autojump_clock):
    async with open_board() as (bench, board):
        bench.state.leasing = False
        board.starting("warm_start", {"step": 20.0, "loss": 1.5})
        assert (await board.status())["phase"] == {"name": "warm_start", "step": 20.0, "loss": 1.5}
        bench.state.leasing = True
        await trio.sleep(STATUS_AGE_S)
        assert (await board.status())["phase"] == {"name": "training"}
