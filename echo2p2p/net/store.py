"""Rows on disk in SQLite: one writer thread, and one fsync for all that wait for one.

A commit with ``synchronous=FULL`` costs one fsync, 1-10 ms, whatever it holds. So the thread takes
every transaction that waits, runs one after the other, commits once, and only then hands the
results back: whatever `transact` returned is safe. If one raises, all are undone and run again,
now each inside a savepoint of its own, so that it undoes only itself.

Everything runs in the writer thread, reads too: nothing here reads much, and a reader can so never
see rows that are not durable. Constraints must be immediate, not deferred: a deferred one fails
the commit, and with it the others' work.

A second process on the same file is refused by a lock on a file beside it, which the kernel drops
when the process ends, however it ends. (SQLite's own exclusive mode would also keep out the
person who looks into a live database.)
"""

from __future__ import annotations

import errno
import fcntl
import functools
import queue
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, TypeVar, cast

import outcome
import trio

from echo2p2p.errors import ConfigError, LocalProtocolError, StoreError
from echo2p2p.net.disk_errors import disk_error
from echo2p2p.net.ports import Rows

T = TypeVar("T")

BATCH_MAX: Final = 64
"""Transactions that share one commit; bounds how long the first of them waits."""

PAGE_BYTES: Final = 16384
"""Of a new database. A row of 100 KB is 7 pages, and SQLite writes each with three calls of the
system; with its own 4 KiB those were half of what a commit cost."""
CHECKPOINT_PAGES: Final = (4 << 20) // PAGE_BYTES
"""After which the log file is copied into the database; as many bytes as SQLite chooses itself."""
WAL_BYTES_MAX: Final = 64 << 20
"""To which the log file is cut after it was copied into the database."""
BUSY_TIMEOUT_S: Final = 5.0
"""How long to wait for a person who looks into the database with another program."""

_MENDS: Final = {
    sqlite3.SQLITE_FULL: "the disk is full: free some space",
    sqlite3.SQLITE_READONLY: "it is read-only: give this user the right to write there",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: check the folder and its rights",
    sqlite3.SQLITE_BUSY: "another program holds it: close that program",
    sqlite3.SQLITE_LOCKED: "another program holds it: close that program",
    sqlite3.SQLITE_IOERR: "the disk failed: free some space, look at the system's log",
    sqlite3.SQLITE_CORRUPT: "it is damaged: put a copy of the whole folder in its place",
    sqlite3.SQLITE_NOTADB: "it is not a database, or damaged: put a copy of it in its place",
}


def as_store_error(error: sqlite3.Error, path: Path | None = None) -> StoreError | None:
    """Return the disk's fault as one line, or ``None`` if ``error`` is a fault of the SQL."""
    code = getattr(error, "sqlite_errorcode", None)
    mend = None if code is None else _MENDS.get(code & 0xFF)
    where = "the database" if path is None else f"the database {path}"
    return None if mend is None else StoreError(f"{where} refused: {mend}")


def check_pages(connection: sqlite3.Connection, path: Path) -> None:
    """Look whether every page is where the others say; takes about a second a gigabyte.

    A damaged page would otherwise be met in the middle of a run, or not at all.

    Raises:
        StoreError: One is damaged.
    """
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        detail = " ".join(str(found).replace("***", "").split())[:100]
        mend = "put a copy of the whole folder in its place, or begin a new run in another"
        raise StoreError(f"the database {path} is damaged ({detail}): {mend}")


def apply_migrations(connection: sqlite3.Connection, migrations: Sequence[str]) -> None:
    """Bring the schema up to date: script i is applied once, whole, and never changed again.

    Raises:
        ConfigError: A newer program has written this database.
    """
    (done,) = connection.execute("PRAGMA user_version").fetchone()
    if done > len(migrations):
        detail = f"written by a newer version (schema {done}, this one knows {len(migrations)})"
        raise ConfigError("store", f"{detail}: update this program")
    for number in range(done, len(migrations)):
        try:
            connection.executescript(
                f"BEGIN;\n{migrations[number]};\nPRAGMA user_version={number + 1};\nCOMMIT;"
            )
        except sqlite3.Error:
            if connection.in_transaction:
                connection.rollback()
            raise


def _captured(connection: sqlite3.Connection, work: Callable[[Rows], T]) -> outcome.Outcome[T]:
    """Run ``work`` in the open transaction.

    Raises:
        StoreError: The transaction itself is gone, and the changes of all before with it.
    """
    result = outcome.capture(work, cast("Rows", connection))
    if not connection.in_transaction:
        cause = result.error if isinstance(result, outcome.Error) else None
        known = as_store_error(cause) if isinstance(cause, sqlite3.Error) else None
        raise known or StoreError("the transaction ended too early") from cause
    return result


def in_savepoint(connection: sqlite3.Connection, work: Callable[[Rows], T]) -> outcome.Outcome[T]:
    """Run ``work`` in the open transaction so that its failure undoes only its own changes.

    Raises:
        StoreError: The transaction itself is gone, and the changes of all before with it.
    """
    connection.execute("SAVEPOINT work")
    result = _captured(connection, work)
    if isinstance(result, outcome.Error):
        connection.execute("ROLLBACK TO work")
        if isinstance(result.error, sqlite3.Error):
            known = as_store_error(result.error)
            if known is not None:
                known.__cause__ = result.error
                result = outcome.Error(known)
    connection.execute("RELEASE work")
    return result


class _Job:
    """One transaction on its way through the writer thread."""

    def __init__(self, work: Callable[[Rows], Any], task: trio.lowlevel.Task) -> None:
        self.work = work
        self.task = task
        self.result: outcome.Outcome[Any] | None = None
        self._claim = threading.Lock()

    def claim(self) -> bool:
        """Return whether the caller is first: the thread to run it, or the task to call it off."""
        return self._claim.acquire(blocking=False)


class SqliteStore:
    """`Store` on a file; made by `SqliteStore.open`."""

    def __init__(self, path: Path, migrations: Sequence[str]) -> None:
        self._path = path
        self._migrations = tuple(migrations)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._token = trio.lowlevel.current_trio_token()
        self._ready = trio.Event()
        self._ended = trio.Event()
        self._failure: Exception | None = None
        self.commits = 0
        """Commits so far of what had changed anything: fewer than transactions when they shared."""

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path, migrations: Sequence[str] = ()) -> AsyncIterator[SqliteStore]:
        """Open the database while the context is open; transactions begun are finished first.

        Args:
            path: The file; its folder must exist.
            migrations: SQL scripts, oldest first; ``user_version`` counts those applied.

        Raises:
            ConfigError: Another process holds it, or a newer program wrote it.
            StoreError: The disk refused, or this is not a database.
        """
        store = cls(path, migrations)
        lock = _lock(path.with_name(path.name + ".lock"))
        try:
            threading.Thread(target=store._run, name=f"store {path.name}", daemon=True).start()
            with trio.CancelScope(shield=True):
                await store._ready.wait()
            if store._failure is not None:
                raise store._failure
            try:
                yield store
            finally:
                store._closed = True
                store._jobs.put(None)
                with trio.CancelScope(shield=True):
                    await store._ended.wait()
        finally:
            lock.close()

    async def transact(self, work: Callable[[Rows], T]) -> T:
        """Run ``work`` in a transaction of its own; see `Store`.

        Cancelled before it began: it never runs. Cancelled later: its result is returned all the
        same, because it is on disk.

        Raises:
            StoreError: The disk refused; nothing of this call was kept.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise LocalProtocolError("the store is closed")
        job = _Job(work, trio.lowlevel.current_task())
        self._jobs.put(job)

        def abort(_: object) -> trio.lowlevel.Abort:
            return trio.lowlevel.Abort.SUCCEEDED if job.claim() else trio.lowlevel.Abort.FAILED

        return cast("T", await trio.lowlevel.wait_task_rescheduled(abort))

    def _run(self) -> None:
        """The writer thread."""
        try:
            connection = self._connect()
        except (sqlite3.Error, ConfigError, StoreError) as error:
            self._failure = error
            if isinstance(error, sqlite3.Error):
                known = as_store_error(error, self._path)
                self._failure = known or StoreError(f"cannot open {self._path}: {error}")
                self._failure.__cause__ = error
            self._tell(self._ready.set)
            return
        self._tell(self._ready.set)
        try:
            while (job := self._jobs.get()) is not None:
                batch, ending = self._gather(job)
                self._commit(connection, batch)
                self._tell(functools.partial(_deliver, batch))
                if ending:
                    break
        finally:
            with suppress(sqlite3.Error):
                connection.close()
            self._tell(self._ended.set)

    def _tell(self, call: Callable[[], object]) -> None:
        # Nobody waits any more if the trio run is over.
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(call)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute(f"PRAGMA journal_size_limit={WAL_BYTES_MAX}")
            check_pages(connection, self._path)
            apply_migrations(connection, self._migrations)
        except BaseException:
            connection.close()
            raise
        return connection

    def _gather(self, first: _Job) -> tuple[list[_Job], bool]:
        """Return what waits, up to `BATCH_MAX`, and whether the end of the queue was among it."""
        batch = [first]
        with suppress(queue.Empty):
            while len(batch) < BATCH_MAX:
                job = self._jobs.get_nowait()
                if job is None:
                    return [job for job in batch if job.claim()], True
                batch.append(job)
        return [job for job in batch if job.claim()], False

    def _commit(self, connection: sqlite3.Connection, batch: list[_Job]) -> None:
        changes = connection.total_changes
        try:
            connection.execute("BEGIN IMMEDIATE")
            if not _all_work(connection, batch):
                connection.rollback()
                connection.execute("BEGIN IMMEDIATE")
                for job in batch:
                    job.result = in_savepoint(connection, job.work)
            connection.execute("COMMIT")
            self.commits += connection.total_changes > changes
        except (sqlite3.Error, StoreError) as error:
            with suppress(sqlite3.Error):
                connection.rollback()
            if isinstance(error, sqlite3.Error):
                known = as_store_error(error, self._path) or StoreError(
                    f"the database {self._path} refused: {error}"
                )
                known.__cause__ = error
            else:
                known = error
            for job in batch:
                # A call that had failed by itself keeps its own exception.
                if not isinstance(job.result, outcome.Error):
                    job.result = outcome.Error(known)


def _all_work(connection: sqlite3.Connection, batch: list[_Job]) -> bool:
    """Run all, as if none could fail; if one does, return False: nothing must be kept of any.

    Hardly ever does one fail, and savepoints are half of all statements: each gives up the
    interpreter's lock, which on a busy process costs more than the statement.
    """
    for job in batch:
        result = _captured(connection, job.work)
        if isinstance(result, outcome.Error):
            return False
        job.result = result
    return True


def _deliver(batch: list[_Job]) -> None:
    for job in batch:
        assert job.result is not None
        trio.lowlevel.reschedule(job.task, job.result)


def _lock(path: Path) -> IO[bytes]:
    """Return the open, locked file; closing it, or the end of the process, frees the lock."""
    try:
        file = path.open("ab")
    except OSError as error:
        raise disk_error(f"open {path}", error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            detail = f"another process uses {path.with_suffix('')}: stop it, or use another folder"
            raise ConfigError("store", detail) from error
        raise disk_error(f"lock {path}", error) from error
    return file
