"""What a disk refuses, as one line with cause and mend. Child processes use it: no trio here."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from echo2p2p.errors import ConfigError, StoreError

_MENDS: Final = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EFBIG: "a file may not grow so long: raise the limit (ulimit -f)",
    errno.EIO: "the disk failed: look at the system's log",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.EACCES: "not allowed: give this user the right to write there",
    errno.EPERM: "not allowed: give this user the right to write there",
    errno.ENOENT: "there is no such folder: make it, or choose another",
    errno.ENOTDIR: "a part of this path is a file: choose another folder",
    errno.EEXIST: "there is something of this name already: move it away",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
}


def disk_error(doing: str, error: OSError) -> StoreError:
    """Return ``error`` as one line with its cause and mend."""
    mend = _MENDS.get(error.errno or 0, error.strerror or type(error).__name__)
    return StoreError(f"cannot {doing}: {mend}")


@contextmanager
def guard_disk(doing: str) -> Iterator[None]:
    """Turn what a disk refuses inside this context into a `StoreError`."""
    try:
        yield
    except OSError as error:
        raise disk_error(doing, error) from error


def chosen_error(setting: str, doing: str, error: OSError) -> ConfigError | StoreError:
    """Return ``error`` at a path that a user has chosen: a wrong choice, or a disk without room."""
    known = disk_error(doing, error)
    full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EIO}
    return known if full else ConfigError(setting, str(known))


def make_folders(setting: str, *folders: Path) -> None:
    """Make folders that a user has chosen, if they are not there.

    Args:
        setting: Path of the setting that chose them.
        folders: All to be made.

    Raises:
        ConfigError: They cannot be there: choose others.
        StoreError: They could be if the disk had room.
    """
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _check_writable(folder)
        except OSError as error:
            raise chosen_error(setting, f"write {folder}", error) from error


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        raise OSError(errno.EROFS if read_only else errno.EACCES, "")
