"""Where finished work waits, on disks that are slow, full, or forget."""

from __future__ import annotations

import pytest
import trio

from echo2p2p.ids import Incarnation
from echo2p2p.testing.disk import SimBlobs, SimDisk
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.wire.messages import Upload
from peer.outbox import LEASES_MAX, OVERHEAD_BYTES, Outbox
from scenarios.middle import sample

TOKENS = 8
SIZE = 2 * OVERHEAD_BYTES + 8 * TOKENS
"""What an upload of one such sample counts for."""


def upload(name: str, incarnation: int = 1) -> Upload:
    return Upload(
        incarnation=incarnation, lease_id=name, samples=[sample([5] * TOKENS, 0)], seconds=1.0
    )


class Table:
    """An outbox, its journal and its disk."""

    def __init__(self, disk: SimDisk | None = None, *, incarnation: int = 1, **bounds: int) -> None:
        self.disk = disk or SimDisk()
        self.blobs: SimBlobs = self.disk.blobs()
        self.journal = TraceJournal()
        self.outbox = Outbox(self.blobs, Incarnation(incarnation), self.journal, **bounds)

    def told(self, event: str) -> list[dict[str, object]]:
        return [dict(entry.fields) for entry in self.journal.named(event)]


async def test_what_is_taken_at_once_never_touches_the_disk(autojump_clock) -> None:
    table = Table()
    await table.outbox.open()
    for number in range(3):
        await table.outbox.put(upload(f"l{number}"))
        item = await table.outbox.take()
        assert await table.outbox.read(item) == upload(f"l{number}")
        await table.outbox.done(item)
    assert await table.blobs.names() == []
    assert (table.outbox.leases, table.outbox.bytes) == (0, 0)


async def test_once_the_coordinator_is_away_everything_is_on_disk_and_comes_back_in_order(
    autojump_clock,
) -> None:
    table = Table()
    for number in range(3):
        await table.outbox.put(upload(f"l{number}"))
    first = await table.outbox.take()
    await table.outbox.away()
    await table.outbox.put(upload("l3"))
    assert (table.outbox.memory_bytes, table.outbox.bytes) == (0, 4 * SIZE)
    assert await table.blobs.names() == [f"upload-1-{number}" for number in (1, 2, 3, 4)]
    sent = []
    while True:
        sent.append(await table.outbox.read(first))
        await table.outbox.done(first)
        if not table.outbox.leases:
            break
        first = await table.outbox.take()
    assert sent == [upload(f"l{number}") for number in range(4)]
    assert await table.blobs.names() == []
    await table.outbox.put(upload("l4"))
    assert table.outbox.memory_bytes == SIZE, "it answers again"


async def test_what_is_decided_while_it_is_being_written_leaves_nothing_on_disk(
    autojump_clock,
) -> None:
    table = Table()
    await table.outbox.put(upload("l0"))
    item = await table.outbox.take()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(table.outbox.away)
        await trio.sleep(table.disk.sync_s / 2)
        await table.outbox.done(item)
    assert await table.blobs.names() == []


async def test_memory_alone_holds_so_much_even_if_the_coordinator_answers(autojump_clock) -> None:
    table = Table(memory_bytes_max=2 * SIZE)
    for number in range(5):
        await table.outbox.put(upload(f"l{number}"))
    assert table.outbox.memory_bytes <= 2 * SIZE
    assert table.outbox.leases == 5


async def test_beyond_its_bound_the_oldest_is_dropped_and_counted(autojump_clock) -> None:
    table = Table(bytes_max=3 * SIZE)
    await table.outbox.away()
    for number in range(5):
        await table.outbox.put(upload(f"l{number}"))
    assert (table.outbox.leases, table.outbox.dropped) == (3, 2)
    assert [told["lease"] for told in table.told("work.dropped")] == ["l0", "l1"]
    assert len(await table.blobs.names()) == 3
    assert (await table.outbox.take()).lease_id == "l2"


async def test_what_is_being_sent_is_not_dropped(autojump_clock) -> None:
    table = Table(bytes_max=SIZE)
    await table.outbox.put(upload("l0"))
    item = await table.outbox.take()
    await table.outbox.put(upload("l1"))
    assert await table.outbox.read(item) == upload("l0")
    assert table.outbox.dropped == 1


@pytest.mark.parametrize("bound", ["leases", "bytes"])
async def test_no_new_work_is_taken_while_it_is_full(autojump_clock, bound: str) -> None:
    count = LEASES_MAX if bound == "leases" else 4
    table = Table(bytes_max=4 * SIZE) if bound == "bytes" else Table()
    for number in range(count):
        await table.outbox.wait_room()
        await table.outbox.put(upload(f"l{number}"))
    room = False

    async def wait() -> None:
        nonlocal room
        await table.outbox.wait_room()
        room = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(60.0)
        assert not room
        await table.outbox.done(await table.outbox.take())
    assert room


async def test_a_new_incarnation_deletes_and_counts_what_the_last_one_has_left(
    autojump_clock,
) -> None:
    before = Table()
    await before.outbox.away()
    for number in range(3):
        await before.outbox.put(upload(f"l{number}"))
    before.disk.crash()
    after = Table(before.disk, incarnation=2)
    await after.outbox.open()
    assert [told["leases"] for told in after.told("work.dropped")] == [3]
    assert await after.blobs.names() == []
    assert after.outbox.leases == 0
    again = Table(before.disk, incarnation=3)
    await again.outbox.open()
    assert again.told("work.dropped") == []


async def test_a_full_disk_is_told_once_and_work_waits_in_memory_within_a_smaller_bound(
    autojump_clock,
) -> None:
    table = Table(memory_bytes_max=2 * SIZE)
    await table.outbox.put(upload("l0"))
    await table.outbox.away()
    table.disk.full = True
    for number in range(1, 5):
        await table.outbox.put(upload(f"l{number}"))
    failed = table.told("outbox.failed")
    assert len(failed) == 1
    assert "the disk is full: free some space" in failed[0]["detail"]
    assert table.outbox.memory_bytes <= 2 * SIZE
    assert table.outbox.dropped == 3
    table.disk.full = False
    left = []
    while table.outbox.leases:
        item = await table.outbox.take()
        left.append(await table.outbox.read(item))
        await table.outbox.done(item)
    assert left == [upload("l3"), upload("l4")]


async def test_what_the_disk_has_lost_is_counted_and_not_sent(autojump_clock) -> None:
    table = Table()
    await table.outbox.away()
    await table.outbox.put(upload("l0"))
    await table.outbox.put(upload("l1"))
    await table.blobs.delete("upload-1-1")
    await table.blobs.put("upload-1-2", b"\x93garbage")
    for _ in range(2):
        item = await table.outbox.take()
        assert await table.outbox.read(item) is None
        await table.outbox.done(item)
    assert table.outbox.dropped == 2
    assert table.outbox.leases == 0


async def test_what_waits_at_the_end_of_a_membership_is_counted(autojump_clock) -> None:
    table = Table()
    table.outbox.close()
    assert table.told("work.dropped") == []
    await table.outbox.put(upload("l0"))
    await table.outbox.take()
    await table.outbox.put(upload("l1"))
    table.outbox.close()
    assert [told["leases"] for told in table.told("work.dropped")] == [2]
