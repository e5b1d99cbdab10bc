"""What both stores promise, then what only SQLite on a real file can do or suffer."""

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest
import trio

from echo2p2p.errors import ConfigError, LocalProtocolError, StoreError
from echo2p2p.net import store as store_module
from echo2p2p.net.ports import Rows, Store
from echo2p2p.net.store import BATCH_MAX, SqliteStore
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.disk import SimDisk

SCHEMA = (
    "CREATE TABLE item (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
    "CREATE TABLE part (item TEXT NOT NULL REFERENCES item (name)); CREATE TABLE other (x)",
)

Open = Callable[[Sequence[str]], AbstractAsyncContextManager[Store]]
Story = Callable[[Open], Awaitable[None]]


@pytest.fixture(params=["sqlite", "simulated"])
def form(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    """Run a story with a function that opens the same store again and again."""

    def with_sqlite(story: Story) -> None:
        async def main() -> None:
            with trio.fail_after(20):
                await story(lambda scripts: SqliteStore.open(tmp_path / "state.db", scripts))

        trio.run(main)

    def with_simulation(story: Story) -> None:
        async def main() -> None:
            disk = SimDisk()
            with trio.fail_after(20):
                await story(lambda scripts: disk.open_store("state", scripts))

        run_virtual(main, seed=1)

    return with_sqlite if request.param == "sqlite" else with_simulation


def put(name: str, value: int) -> Callable[[Rows], int]:
    def work(rows: Rows) -> int:
        return rows.execute("INSERT INTO item VALUES (?, ?)", (name, value)).rowcount

    return work


def names(rows: Rows) -> list[object]:
    return [name for (name,) in rows.execute("SELECT name FROM item ORDER BY name").fetchall()]


def test_what_was_returned_is_there_and_survives_a_restart(form) -> None:
    async def story(open_store: Open) -> None:
        async with open_store(SCHEMA) as store:
            assert await store.transact(put("a", 1)) == 1
            assert await store.transact(names) == ["a"]
        async with open_store(SCHEMA) as store:
            assert await store.transact(names) == ["a"]

    form(story)


def test_a_call_that_raises_undoes_itself_and_nobody_else(form) -> None:
    async def story(open_store: Open) -> None:
        async with open_store(SCHEMA) as store:
            failures = []

            async def fail(number: int) -> None:
                def work(rows: Rows) -> None:
                    put(f"undone {number}", 0)(rows)
                    raise KeyError(number)

                with pytest.raises(KeyError) as caught:
                    await store.transact(work)
                failures.append(caught.value.args[0])

            async with trio.open_nursery() as nursery:
                for number in range(10):
                    nursery.start_soon(store.transact, put(f"kept {number}", number))
                    nursery.start_soon(fail, number)
            assert sorted(failures) == list(range(10))
            assert await store.transact(names) == [f"kept {number}" for number in range(10)]

    form(story)


def test_many_calls_at_once_each_take_effect_once(form) -> None:
    async def story(open_store: Open) -> None:
        async with open_store(SCHEMA) as store:
            order = []

            def noting(number: int) -> Callable[[Rows], None]:
                def work(rows: Rows) -> None:
                    order.append(number)
                    put(str(number), number)(rows)

                return work

            async with trio.open_nursery() as nursery:
                for number in range(200):
                    nursery.start_soon(store.transact, noting(number))
            assert sorted(order) == list(range(200))
            assert len(await store.transact(names)) == 200

    form(story)


def test_constraints_are_the_authors_own_errors(form) -> None:
    async def story(open_store: Open) -> None:
        async with open_store(SCHEMA) as store:
            await store.transact(put("a", 1))
            with pytest.raises(sqlite3.IntegrityError):
                await store.transact(put("a", 2))
            with pytest.raises(sqlite3.IntegrityError):
                await store.transact(
                    lambda rows: rows.execute("INSERT INTO part VALUES ('nobody')").rowcount
                )
            with pytest.raises(sqlite3.OperationalError, match="no such table"):
                await store.transact(lambda rows: rows.execute("SELECT * FROM t").fetchall())
            assert await store.transact(names) == ["a"]

    form(story)


def test_the_schema_grows_by_new_scripts_and_never_shrinks(form) -> None:
    async def story(open_store: Open) -> None:
        async with open_store(SCHEMA[:1]) as store:
            await store.transact(put("a", 1))
        async with open_store(SCHEMA) as store:
            await store.transact(
                lambda rows: rows.execute("INSERT INTO part VALUES ('a')").rowcount
            )
        with pytest.raises(ConfigError, match="newer version"):
            async with open_store(SCHEMA[:1]):
                raise AssertionError
        async with open_store(SCHEMA) as store:
            assert await store.transact(names) == ["a"]

    form(story)


def test_a_script_that_fails_leaves_nothing_behind(form) -> None:
    async def story(open_store: Open) -> None:
        broken = "CREATE TABLE extra (x); CREATE TABLE item (y)"
        async with open_store(SCHEMA):
            pass
        with pytest.raises((sqlite3.OperationalError, StoreError), match="already exists"):
            async with open_store((*SCHEMA, broken)):
                raise AssertionError
        async with open_store((*SCHEMA, "CREATE TABLE extra (x)")) as store:
            await store.transact(lambda rows: rows.execute("SELECT * FROM extra").fetchall())

    form(story)


def test_a_second_user_is_refused_until_the_first_has_gone(form) -> None:
    async def story(open_store: Open) -> None:
        async with open_store(SCHEMA):
            with pytest.raises(ConfigError, match="another process uses"):
                async with open_store(SCHEMA):
                    raise AssertionError
        async with open_store(SCHEMA):
            pass

    form(story)


def test_a_closed_store_is_not_used(form) -> None:
    async def story(open_store: Open) -> None:
        async with open_store(SCHEMA) as store:
            pass
        with pytest.raises(LocalProtocolError):
            await store.transact(names)

    form(story)


def test_what_had_begun_is_finished_before_the_store_closes(form) -> None:
    async def story(open_store: Open) -> None:
        async with trio.open_nursery() as nursery, open_store(SCHEMA) as store:
            nursery.start_soon(store.transact, put("late", 1))
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        async with open_store(SCHEMA) as store:
            assert await store.transact(names) == ["late"]

    form(story)


# --- SQLite alone -------------------------------------------------------------------------------


async def test_a_call_that_is_cancelled_while_it_waits_never_runs(tmp_path: Path) -> None:
    async with SqliteStore.open(tmp_path / "state.db", SCHEMA) as store:
        begun, release = trio.Event(), threading.Event()
        token = trio.lowlevel.current_trio_token()

        def slow(rows: Rows) -> None:
            token.run_sync_soon(begun.set)
            release.wait(10)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.transact, slow)
            await begun.wait()
            with trio.CancelScope() as scope:
                scope.cancel()
                await store.transact(put("never", 1))
            with trio.move_on_after(0.01) as scope:
                await store.transact(put("never", 2))
            assert scope.cancelled_caught
            release.set()
        assert await store.transact(names) == []


async def test_a_call_that_is_cancelled_while_it_runs_still_tells_its_result(
    tmp_path: Path,
) -> None:
    async with SqliteStore.open(tmp_path / "state.db", SCHEMA) as store:
        begun, release = trio.Event(), threading.Event()
        token = trio.lowlevel.current_trio_token()

        def slow(rows: Rows) -> int:
            token.run_sync_soon(begun.set)
            release.wait(10)
            return put("there", 1)(rows)

        got = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                got.append(await store.transact(slow))

            nursery.start_soon(ask)
            await begun.wait()
            nursery.cancel_scope.cancel()
            release.set()
        assert got == [1]
        assert await store.transact(names) == ["there"]


async def test_waiting_calls_take_one_commit(tmp_path: Path) -> None:
    async with SqliteStore.open(tmp_path / "state.db", SCHEMA) as store:
        begun, release = trio.Event(), threading.Event()
        token = trio.lowlevel.current_trio_token()

        def slow(rows: Rows) -> None:
            token.run_sync_soon(begun.set)
            release.wait(10)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.transact, slow)
            await begun.wait()
            for number in range(BATCH_MAX):
                nursery.start_soon(store.transact, put(str(number), number))
            await trio.testing.wait_all_tasks_blocked()
            release.set()
        assert store.commits == 1, "the first changed nothing"


async def test_those_that_share_a_commit_with_a_failing_one_take_effect_once(
    tmp_path: Path,
) -> None:
    async with SqliteStore.open(tmp_path / "state.db", SCHEMA) as store:
        begun, release = trio.Event(), threading.Event()
        token = trio.lowlevel.current_trio_token()
        await store.transact(put("sum", 0))
        runs = 0

        def slow(rows: Rows) -> None:
            token.run_sync_soon(begun.set)
            release.wait(10)

        def add(rows: Rows) -> None:
            nonlocal runs
            runs += 1
            rows.execute("UPDATE item SET value = value + 1")

        async def fail() -> None:
            with pytest.raises(ZeroDivisionError):
                await store.transact(lambda rows: (add(rows), 1 // 0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.transact, slow)
            await begun.wait()
            for call in (partial(store.transact, add), fail, partial(store.transact, add)):
                nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
            release.set()
        assert store.commits == 2
        assert runs > 3, "they ran again, without what had been undone"
        total = await store.transact(lambda rows: rows.execute("SELECT value FROM item").fetchone())
        assert total == (2,)


async def test_a_work_that_ends_the_transaction_fails_with_its_whole_group(tmp_path: Path) -> None:
    async with SqliteStore.open(tmp_path / "state.db", SCHEMA) as store:
        with pytest.raises(StoreError, match="ended too early"):
            await store.transact(lambda rows: rows.execute("ROLLBACK").rowcount)
        await store.transact(put("a", 1))
        assert await store.transact(names) == ["a"]


async def test_a_full_disk_is_a_store_error_and_passes(tmp_path: Path) -> None:
    async with SqliteStore.open(tmp_path / "state.db", SCHEMA) as store:

        def limit(pages: str) -> Callable[[Rows], object]:
            return lambda rows: rows.execute(f"PRAGMA max_page_count={pages}").fetchone()

        def fill(rows: Rows) -> None:
            rows.execute("INSERT INTO other VALUES (zeroblob(1000000))")

        await store.transact(put("before", 1))
        await store.transact(limit("8"))
        with pytest.raises(StoreError, match="disk is full: free some space"):
            await store.transact(fill)
        await store.transact(limit("100000"))
        await store.transact(fill)
        assert await store.transact(names) == ["before"]


async def test_a_file_that_is_no_database_is_a_store_error(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="not a database, or damaged: put a copy"):
        async with SqliteStore.open(path, SCHEMA):
            raise AssertionError
    assert path.read_bytes() == b"not a database at all" * 100


async def test_a_missing_folder_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such folder: make it"):
        async with SqliteStore.open(tmp_path / "nowhere" / "state.db", SCHEMA):
            raise AssertionError


CHILD = """
import sys, trio
from functools import partial
from pathlib import Path
from echo2p2p.errors import ConfigError
from echo2p2p.net.store import SqliteStore
async def main():
    try:
        async with SqliteStore.open(Path(sys.argv[1])) as store:
            await store.transact(lambda rows: rows.execute("INSERT INTO item VALUES ('child', 1)"
            ).rowcount)
            print("open", flush=True)
            sys.stdin.read()
    except ConfigError as error:
        print(error, flush=True)
trio.run(main)
"""


@pytest.mark.slow
async def test_another_process_is_refused_and_a_killed_one_leaves_its_commits_and_no_lock(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.db"
    command = [sys.executable, "-c", CHILD, str(path)]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async with SqliteStore.open(path, SCHEMA):
        with start() as child:
            assert "another process uses" in child.communicate()[0]
    # An older program may not open a newer schema, so the child gets an empty one.
    sqlite3.connect(path).execute("PRAGMA user_version=0").connection.close()
    with start() as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        child.kill()
    sqlite3.connect(path).execute("PRAGMA user_version=2").connection.close()
    async with SqliteStore.open(path, SCHEMA) as store:
        assert await store.transact(names) == ["child"]


async def test_the_log_file_shrinks_again_after_a_large_transaction(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "WAL_BYTES_MAX", 100_000)
    path = tmp_path / "run.sqlite"
    log = tmp_path / "run.sqlite-wal"
    async with SqliteStore.open(path, ("CREATE TABLE t (x BLOB);",)) as store:

        def put(size):
            return lambda rows: rows.execute("INSERT INTO t VALUES (zeroblob(?))", (size,))

        await store.transact(put(20_000_000))
        assert log.stat().st_size > 10_000_000
        for _ in range(3):
            await store.transact(put(10))
        assert log.stat().st_size <= 100_000
