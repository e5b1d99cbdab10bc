"""Crashes of the simulated disk: what was returned stays, what was not may not."""

import random
from collections.abc import Awaitable, Callable

import pytest
import trio

from echo2p2p.errors import StoreError
from echo2p2p.net.ports import Rows
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.disk import SimDisk

SCHEMA = ("CREATE TABLE item (name TEXT)",)


def put(name: str):
    return lambda rows: rows.execute("INSERT INTO item VALUES (?)", (name,)).rowcount


def names(rows: Rows) -> list[object]:
    return [name for (name,) in rows.execute("SELECT name FROM item ORDER BY name").fetchall()]


def test_a_transaction_takes_one_fsync_and_several_share_it() -> None:
    async def main() -> None:
        disk = SimDisk(sync_s=0.01)
        async with disk.open_store("s", SCHEMA) as store:
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(store.transact, put(str(number)))
            assert trio.current_time() == 0.01
            assert disk.commits == 1
            await store.transact(put("later"))
            assert trio.current_time() == 0.02
            assert disk.commits == 2

    run_virtual(main, seed=1)


@pytest.mark.parametrize("crash_at_s", [0.0, 0.004, 0.009])
def test_a_crash_before_the_fsync_is_over_loses_the_transaction_and_says_so(
    crash_at_s: float,
) -> None:
    async def main() -> None:
        disk = SimDisk(sync_s=0.01)
        failures = []

        async def ask(store, name: str) -> None:
            try:
                await store.transact(put(name))
            except StoreError as error:
                failures.append(str(error))

        async with trio.open_nursery() as nursery:
            async with disk.open_store("s", SCHEMA) as store:
                await store.transact(put("kept"))
                for name in ("lost", "lost too"):
                    nursery.start_soon(ask, store, name)
                await trio.sleep(crash_at_s)
                disk.crash()
                # The next process may open it while the old one is still being torn down.
                async with disk.open_store("s", SCHEMA) as again:
                    assert await again.transact(names) == ["kept"]
                    with pytest.raises(StoreError):
                        await store.transact(put("from the grave"))
            with pytest.raises(StoreError):
                await store.transact(put("from the grave"))
        assert failures == ["the machine lost power"] * 2
        async with disk.open_store("s", SCHEMA) as again:
            assert await again.transact(names) == ["kept"]

    run_virtual(main, seed=1)


def test_an_old_process_that_ends_late_does_not_unlock_the_new_one() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with disk.open_store("s", SCHEMA):
            disk.crash()
            new = disk.open_store("s", SCHEMA)
            await new.__aenter__()
        with pytest.raises(Exception, match="another process"):
            async with disk.open_store("s", SCHEMA):
                raise AssertionError
        await new.__aexit__(None, None, None)

    run_virtual(main, seed=1)


def test_a_cancelled_transaction_that_began_is_still_committed() -> None:
    async def main() -> None:
        disk = SimDisk(sync_s=0.01)
        async with disk.open_store("s", SCHEMA) as store:
            with trio.move_on_after(0.005):
                assert await store.transact(put("a")) == 1
            assert trio.current_time() == 0.01
            assert await store.transact(names) == ["a"]

    run_virtual(main, seed=1)


def test_a_crash_loses_the_blob_that_was_being_written_and_no_other() -> None:
    async def main() -> None:
        disk = SimDisk(sync_s=0.01)
        blobs = disk.blobs()
        await blobs.put("x", b"old")
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                with pytest.raises(StoreError, match="lost power"):
                    await blobs.put("x", b"new")

            nursery.start_soon(write)
            await trio.sleep(0.005)
            disk.crash()
        with pytest.raises(StoreError):
            await blobs.get("x")
        assert await disk.blobs().get("x") == b"old"

    run_virtual(main, seed=1)


def test_a_full_disk_refuses_writes_until_there_is_room() -> None:
    async def main() -> None:
        disk = SimDisk()
        async with disk.open_store("s", SCHEMA) as store:
            disk.full = True
            with pytest.raises(StoreError, match="free some space"):
                await store.transact(put("a"))
            with pytest.raises(StoreError, match="free some space"):
                await disk.blobs().put("x", b"")
            disk.full = False
            await store.transact(put("b"))
            assert await store.transact(names) == ["b"]

    run_virtual(main, seed=1)


def left_by_a_crash(seed: int) -> tuple[list[object], bytes, bool]:
    """Return the rows and blobs that a crash leaves of what was being written."""

    async def main() -> tuple[list[object], bytes, bool]:
        disk = SimDisk(sync_s=0.01, rng=random.Random(seed))
        blobs = disk.blobs()
        await blobs.put("x", b"old")
        await blobs.put("y", b"")

        async def told_nothing(write: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(StoreError, match="lost power"):
                await write()

        async with disk.open_store("s", SCHEMA) as store, trio.open_nursery() as nursery:
            await store.transact(put("kept"))
            nursery.start_soon(told_nothing, lambda: store.transact(put("a")))
            nursery.start_soon(told_nothing, lambda: store.transact(put("b")))
            nursery.start_soon(told_nothing, lambda: blobs.put("x", b"new"))
            nursery.start_soon(told_nothing, lambda: blobs.delete("y"))
            await trio.sleep(0.005)
            disk.crash()
        async with disk.open_store("s", SCHEMA) as again:
            rows = await again.transact(names)
        return rows, await disk.blobs().get("x"), "y" in await disk.blobs().names()

    return run_virtual(main, seed=1)


def test_what_a_crash_interrupts_may_be_on_disk_though_nobody_was_told_and_is_whole() -> None:
    left = [left_by_a_crash(seed) for seed in range(40)]
    rows, blobs, others = zip(*left, strict=True)
    assert {tuple(row) for row in rows} == {("kept",), ("a", "b", "kept")}, "of one fsync, all"
    assert set(blobs) == {b"old", b"new"}
    assert set(others) == {True, False}
    assert left_by_a_crash(3) == left[3]
