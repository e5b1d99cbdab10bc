"""A disk that survives its node: the same SQL in memory, with fsyncs in virtual time and crashes.

A node's app opens its store and blobs on a `SimDisk`. `SimDisk.crash` is the machine losing power:
whoever still waits for a write learns nothing but a `StoreError`, and the next start opens what is
left. What was being forced to disk may be there or not, whole in either case: a real disk may be
through with it though nobody was told.
"""

from __future__ import annotations

import random
import sqlite3
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar, cast

import trio

from echo2p2p.errors import ConfigError, LocalProtocolError, StoreError
from echo2p2p.net.blobs import checked_name
from echo2p2p.net.ports import Rows
from echo2p2p.net.store import apply_migrations, as_store_error, in_savepoint

T = TypeVar("T")

THROUGH_SHARE: Final = 0.5
"""Of the writes that a crash interrupts, on disk all the same."""


class SimDisk:
    """All that one simulated machine keeps.

    Args:
        sync_s: Virtual time of one fsync.
        rng: Decides whether a write that a crash interrupts is on disk; ``None``: it never is.

    Attributes:
        sync_s: Virtual time of one fsync.
        full: While true, every write is refused.
        full_from: From this write on, counted from 1 over the disk's whole life, it is full.
        writes: Writes so far; every transaction counts, whether it changes rows or not.
        commits: Transactions committed, counting those that shared one fsync as one.
    """

    def __init__(self, *, sync_s: float = 0.004, rng: random.Random | None = None) -> None:
        self.sync_s = sync_s
        self._rng = rng
        self._interrupted: list[Callable[[], object]] = []
        """Changes of blobs that are under way."""
        self.full = False
        self.full_from: int | None = None
        self.writes = 0
        self.commits = 0
        self._stores: dict[str, _SimDatabase] = {}
        self._blobs: dict[str, bytes] = {}
        self._power_cuts = 0

    @property
    def power_cuts(self) -> int:
        """How often `crash` was called; handles opened before the last one are dead."""
        return self._power_cuts

    def refuses(self) -> bool:
        """Count a write; return whether there is no room for it."""
        self.writes += 1
        if self.full_from is not None and self.writes >= self.full_from:
            self.full = True
        return self.full

    def crash(self) -> None:
        """Lose what was not yet forced to disk, at this very moment."""
        self._power_cuts += 1
        for database in self._stores.values():
            database.lose_power()
        for change in self._interrupted:
            if not self.full and self.is_through():
                change()

    def is_through(self) -> bool:
        """Draw whether what a crash interrupts is on disk."""
        return self._rng is not None and self._rng.random() < THROUGH_SHARE

    @contextmanager
    def changing(self, change: Callable[[], object]) -> Iterator[None]:
        """Say what will be on disk when this is over, or may be if a crash interrupts it."""
        self._interrupted.append(change)
        try:
            yield
        finally:
            self._interrupted.remove(change)

    def look(self, name: str = "store") -> Rows:
        """Return the rows of a database as they are on disk, for an audit; nobody may have it open.

        Raises:
            StoreError: There is none.
        """
        database = self._stores.get(name)
        if database is None:
            raise StoreError(f"there is no database {name}")
        assert not database.open, f"{name} is in use"
        return cast("Rows", database.connection)

    def blobs(self) -> SimBlobs:
        """Return the machine's blobs, until the next crash."""
        return SimBlobs(self, self._blobs)

    @asynccontextmanager
    async def open_store(
        self, name: str = "store", migrations: Sequence[str] = ()
    ) -> AsyncIterator[SimStore]:
        """Open a database, as `SqliteStore.open` does.

        Raises:
            ConfigError: It is open already, or a newer program wrote it.
        """
        database = self._stores.setdefault(name, _SimDatabase(self))
        if database.open:
            detail = f"another process uses {name}: stop it, or use another folder"
            raise ConfigError("store", detail)
        await trio.lowlevel.checkpoint()
        apply_migrations(database.connection, migrations)
        store = SimStore(database)
        database.open = True
        try:
            yield store
        finally:
            await store.close()


class _Group:
    """Transactions that wait for the same fsync."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.failure: StoreError | None = None


class _SimDatabase:
    """One database file; outlives the nodes that open it."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        weakref.finalize(self, self.connection.close)  # Python 3.13 complains if nobody does
        self.connection.execute("PRAGMA foreign_keys=ON")
        self.group: _Group | None = None
        self.open = False

    def lose_power(self) -> None:
        """Undo what is not on disk, and let a new process in."""
        if self.group is not None and self.disk.is_through():
            self.connection.execute("COMMIT")
        self.abandon(StoreError("the machine lost power"))
        self.open = False

    def abandon(self, failure: StoreError) -> None:
        """Undo the open group, if any."""
        group, self.group = self.group, None
        if group is not None:
            if self.connection.in_transaction:
                self.connection.rollback()
            group.failure = failure
            group.done.set()

    def commit(self) -> None:
        """Make the open group durable."""
        group, self.group = self.group, None
        assert group is not None
        self.connection.execute("COMMIT")
        self.disk.commits += 1
        group.done.set()


class SimStore:
    """`Store` of one simulated process; made by `SimDisk.open_store`.

    The first call of a group begins it and commits it one fsync later; calls in between join. The
    real store's batches begin later, but are made of the same calls and mean the same.
    """

    def __init__(self, database: _SimDatabase) -> None:
        self._database = database
        self._power_cuts = database.disk.power_cuts
        self._closed = False

    async def close(self) -> None:
        """Let the next process in, once the group that was begun is on disk."""
        self._closed = True
        if self._power_cuts != self._database.disk.power_cuts:
            return
        if self._database.group is not None:
            with trio.CancelScope(shield=True):
                await self._database.group.done.wait()
        if self._power_cuts == self._database.disk.power_cuts:
            self._database.open = False

    async def transact(self, work: Callable[[Rows], T]) -> T:
        """Run ``work`` in a transaction of its own; see `SqliteStore.transact`.

        Raises:
            StoreError: The disk is full, or the machine crashed before the fsync was over.
        """
        await trio.lowlevel.checkpoint()
        database = self._database
        if self._power_cuts != database.disk.power_cuts:
            raise StoreError("the machine lost power")
        if self._closed:
            raise LocalProtocolError("the store is closed")
        if database.disk.refuses():
            raise StoreError("the database refused: the disk is full: free some space")
        leads = database.group is None
        if leads:
            database.group = _Group()
            database.connection.execute("BEGIN IMMEDIATE")
        group = database.group
        assert group is not None
        try:
            result = in_savepoint(database.connection, work)
        except (StoreError, sqlite3.Error) as error:
            failure = error if isinstance(error, StoreError) else as_store_error(error)
            database.abandon(failure or StoreError(f"the database refused: {error}"))
            raise
        with trio.CancelScope(shield=True):
            if leads:
                await trio.sleep(database.disk.sync_s)
                if database.group is group:
                    database.commit()
            else:
                await group.done.wait()
        if group.failure is not None:
            raise group.failure
        return result.unwrap()


@dataclass(frozen=True)
class SimBytes:
    """`StoredBytes` of one blob, as it is when it is read."""

    content: dict[str, bytes]
    name: str
    length: int

    def read(self, start: int, length: int) -> bytes:
        """Return a part; see `StoredBytes`."""
        data = self.content.get(self.name, b"")[start : start + length]
        if len(data) != length:
            raise StoreError(f"cannot read {self.name}: it was cut short: start again")
        return data


class SimBlobs:
    """`Blobs` of one simulated process; made by `SimDisk.blobs`."""

    def __init__(self, disk: SimDisk, content: dict[str, bytes]) -> None:
        self._disk = disk
        self._content = content
        self._power_cuts = disk.power_cuts

    async def put(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Write or replace, one fsync later.

        Raises:
            StoreError: The disk is full, or the machine crashed first.
        """
        checked_name(name)
        copy = bytes(data)
        with self._disk.changing(lambda: self._content.update({name: copy})):
            await self._sync()
        if self._disk.refuses():
            raise StoreError(f"cannot write {name}: the disk is full: free some space")
        self._content[name] = copy

    async def get(self, name: str) -> bytes:
        """Return the whole content.

        Raises:
            StoreError: There is none.
        """
        checked_name(name)
        await trio.lowlevel.checkpoint()
        self._check_power()
        if name not in self._content:
            raise StoreError(f"there is no blob {name}")
        return self._content[name]

    async def find(self, name: str) -> SimBytes:
        """Return the content without loading it.

        Raises:
            StoreError: There is none.
        """
        return SimBytes(self._content, name, len(await self.get(name)))

    async def names(self) -> list[str]:
        """Return all names, sorted."""
        await trio.lowlevel.checkpoint()
        self._check_power()
        return sorted(self._content)

    async def delete(self, name: str) -> None:
        """Forget it, one fsync later; no error if there is none."""
        checked_name(name)
        with self._disk.changing(lambda: self._content.pop(name, None)):
            await self._sync()
        self._content.pop(name, None)

    async def _sync(self) -> None:
        await trio.lowlevel.checkpoint()
        with trio.CancelScope(shield=True):
            await trio.sleep(self._disk.sync_s)
        self._check_power()

    def _check_power(self) -> None:
        if self._power_cuts != self._disk.power_cuts:
            raise StoreError("the machine lost power")
