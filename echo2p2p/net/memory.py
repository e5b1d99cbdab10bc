"""Flat states that child processes can map: plain files in a folder, memory-mapped.

The real form of the `SharedMemory` port. The folder is on a memory file system (``/dev/shm``) or
on disk; pages are shared between the network process and its children either way, so weights pass
without a copy through a pipe. All blocks are allocated up front: a full disk is an error here and
not a fatal signal at the first write. Files left by a crash are replaced by the next `allocate`
of their name.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Final

from echo2p2p.errors import LocalProtocolError, StoreError
from echo2p2p.net.disk_errors import disk_error

KEPT: Final = "kept-"
"""First part of the names of files that outlive the process."""


class MappedState:
    """A `SharedState` in a file."""

    def __init__(self, file: Path, size: int, *, fresh: bool = True) -> None:
        self._file = file
        self._map = _create(file, size) if fresh else _take_up(file, size)
        self._view = memoryview(self._map)
        self._open = self._named = True

    @property
    def path(self) -> str:
        """The file, for a child to map with `map_state`."""
        return str(self._file)

    @property
    def view(self) -> memoryview:
        """All of it, writable."""
        return self._view

    def unlink(self) -> None:
        """Take the file's name away; whoever maps it keeps it."""
        if self._named:
            self._named = False
            self._file.unlink(missing_ok=True)

    def rest(self) -> None:
        """Unmap its pages; the file keeps them, and the next look maps them again."""
        if self._open and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)  # of a shared mapping: nothing is lost

    def close(self) -> None:
        """Remove the file and unmap; idempotent.

        Arrays that still look into the view keep the pages until the last of them is gone.
        """
        if not self._open:
            return
        self._open = False
        self.unlink()
        with contextlib.suppress(BufferError):  # see above
            self._view.release()
            self._map.close()


class FileMemory:
    """A `SharedMemory` of files in ``folder``, which is made if need be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def allocate(self, name: str, size: int) -> MappedState:
        """Return a zeroed block of ``size`` bytes; an old one of this name is replaced.

        Whoever still maps the old one keeps it: the name moves to a new file.

        Raises:
            StoreError: No room, or the folder cannot be written.
        """
        if name in {"", ".", ".."} or "/" in name or size <= 0:
            raise LocalProtocolError(f"no block of {size} bytes can be called {name!r}")
        return self._mapped(name, size)

    def scratch(self, size: int) -> MappedState:
        """Return a zeroed block whose file has no name, and is gone with the last who looks.

        Raises:
            StoreError: No room, or the folder cannot be written.
        """
        state = self._mapped(".scratch", size)
        state.unlink()
        return state

    def keep(self, name: str, size: int) -> MappedState:
        """Return a block that outlives this process, until it is closed; see `SharedMemory`.

        Raises:
            StoreError: No room, or the folder cannot be written.
        """
        if not name or "/" in name or size <= 0:
            raise LocalProtocolError(f"no block of {size} bytes can be kept as {name!r}")
        file = self._folder / f"{KEPT}{name}"
        with contextlib.suppress(OSError):
            if file.stat().st_size == size:
                return self._mapped(file.name, size, fresh=False)
        return self._mapped(file.name, size)

    def kept(self) -> list[str]:
        """Return the names of all blocks that `keep` has made and nobody has closed, sorted."""
        with contextlib.suppress(OSError):
            names = [file.name for file in self._folder.glob(f"{KEPT}*")]
            return sorted(name.removeprefix(KEPT) for name in names)
        return []

    def drop(self, name: str) -> None:
        """Remove a kept block; no error if there is none."""
        with contextlib.suppress(OSError):
            (self._folder / f"{KEPT}{name}").unlink()

    def _mapped(self, name: str, size: int, *, fresh: bool = True) -> MappedState:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return MappedState(self._folder / name, size, fresh=fresh)
        except OSError as error:
            doing = f"keep {size / 1e6:.1f} MB of weights in {self._folder}"
            raise disk_error(doing, error) from error


def _create(file: Path, size: int) -> mmap.mmap:
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError:
        file.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _take_up(file: Path, size: int) -> mmap.mmap:
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, 0, size)  # it may have holes where the disk was full
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def map_state(path: str, size: int, *, writable: bool) -> mmap.mmap:
    """Map a block that the parent allocated; for child processes.

    Args:
        path: `SharedState.path`.
        size: Bytes, as the layout says.
        writable: Whether writes reach the file. Otherwise they go to private copies of the pages
            (torch wants buffers that it could write to).

    Raises:
        StoreError: No such file, or of another size.
    """
    try:
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            found = os.fstat(descriptor).st_size
            if found != size:
                raise StoreError(f"shared state of {found} bytes where {size} are needed")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
            return mmap.mmap(descriptor, size, access=access)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"cannot map the shared state: {error}") from error
