"""Whole files under plain names: on disk under their name, or not there at all.

Written beside their place, forced to disk, renamed over it, and the folder forced to disk too; a
crash at any moment leaves the old content or the new. Remnants of a crash are swept at the next
start. A name is never a path: it comes from a small alphabet, and starts with a letter or digit.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import trio

from echo2p2p.errors import LocalProtocolError, StoreError
from echo2p2p.net.disk_errors import disk_error

T = TypeVar("T")

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UNFINISHED: Final = ".new-"
"""Starts the names of files that are being written; no blob's name starts with a dot."""


def checked_name(name: str) -> str:
    """Return ``name`` if a blob may have it.

    Raises:
        LocalProtocolError: It may not: our bug, because names never come from the wire.
    """
    if _NAME.fullmatch(name) is None:
        raise LocalProtocolError(f"not a blob name: {name[:40]!r}")
    return name


@dataclass(frozen=True)
class FileBytes:
    """`StoredBytes` of one file.

    Read, not mapped: a disk that fails under a mapping ends the process without a word (SIGBUS),
    or looks like a broken connection (EFAULT) when the system itself reads from it.
    """

    path: Path
    length: int

    def read(self, start: int, length: int) -> bytes:
        """Return a part; see `StoredBytes`."""
        try:
            with self.path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), length, start)
        except OSError as error:
            raise disk_error(f"read {self.path}", error) from error
        if len(data) != length:
            raise StoreError(f"cannot read {self.path}: it was cut short: start again")
        return data


class FileBlobs:
    """`Blobs` in one folder, which is made if need be.

    Raises:
        StoreError: The folder cannot be made or read.
    """

    def __init__(self, folder: Path, *, threads: int = 2) -> None:
        self._folder = folder
        self._limiter = trio.CapacityLimiter(threads)
        self._count = itertools.count()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if path.name.startswith(_UNFINISHED):
                    path.unlink()
        except OSError as error:
            raise disk_error(f"use the folder {folder}", error) from error

    async def put(self, name: str, data: bytes | bytearray | memoryview) -> None:
        """Write or replace. Cancelling waits for the write; ``data`` must not change meanwhile.

        Raises:
            StoreError: The disk refused; the old content, if any, is still there.
        """
        path = self._folder / checked_name(name)
        unfinished = self._folder / f"{_UNFINISHED}{next(self._count)}-{name}"
        await self._in_thread(f"write {path}", lambda: _write_whole(unfinished, path, data))

    async def get(self, name: str) -> bytes:
        """Return the whole content.

        Raises:
            StoreError: There is none, or the disk refused.
        """
        return await self._read(name, Path.read_bytes)

    async def find(self, name: str) -> FileBytes:
        """Return the content without loading it.

        Raises:
            StoreError: There is none, or the disk refused.
        """
        return await self._read(name, lambda path: FileBytes(path, path.stat().st_size))

    async def _read(self, name: str, read: Callable[[Path], T]) -> T:
        path = self._folder / checked_name(name)
        try:
            return await self._in_thread(f"read {path}", lambda: read(path))
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise StoreError(f"there is no blob {name}") from error
            raise

    async def names(self) -> list[str]:
        """Return all names, sorted."""
        found = await self._in_thread(
            f"list {self._folder}", lambda: [path.name for path in self._folder.iterdir()]
        )
        return sorted(name for name in found if _NAME.fullmatch(name))

    async def delete(self, name: str) -> None:
        """Forget it; no error if there is none."""
        path = self._folder / checked_name(name)

        def forget() -> None:
            path.unlink(missing_ok=True)
            _sync_folder(self._folder)

        await self._in_thread(f"delete {path}", forget)

    async def _in_thread(self, doing: str, work: Callable[[], T]) -> T:
        try:
            return await trio.to_thread.run_sync(work, limiter=self._limiter)
        except OSError as error:
            raise disk_error(doing, error) from error


def _write_whole(unfinished: Path, path: Path, data: bytes | bytearray | memoryview) -> None:
    try:
        with unfinished.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
