"""Whom uploads and heartbeats wake: with a thousand long polls open, hardly anybody."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from echo2p2p.testing.disk import SimDisk
from scenarios.middle import Bench, open_bench, right_answers


@pytest.fixture
async def bench():
    async with open_bench(SimDisk()) as opened:
        yield opened


async def test_an_accepted_upload_and_another_peers_heartbeat_wake_no_poll_for_work(
    autojump_clock, bench: Bench
) -> None:
    # A thousand polls may wait, and an upload comes every few milliseconds.
    member, other = await bench.ready("p"), await bench.ready("q")
    leases = await bench.lease(member)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.intake.run)
        nursery.start_soon(bench.state.work.park, other.peer_id)
        await wait_all_tasks_blocked()
        for lease in leases:
            assert (await bench.upload(member, right_answers(lease, 1))).outcome.accepted
        bench.beat(member, 1)
        await trio.sleep(1.0)
        assert len(bench.state.work) == 1
        bench.beat(other, 1)
        await trio.sleep(1.0)
        assert len(bench.state.work) == 0
        nursery.cancel_scope.cancel()
