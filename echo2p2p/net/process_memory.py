"""How much memory a process and its children use, as Linux tells it; and a watch over a ceiling.

*Private* memory is what cannot be given back under pressure: heap and stacks. Pages of mapped
files (libraries, the shared weights) are not counted, as the system can drop them. A limit set
with ``RLIMIT_AS`` was rejected: CUDA reserves address space by the terabyte. One set with
``RLIMIT_DATA`` was, because whatever allocates then fails in its own way, mostly without a word.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")


@dataclass(frozen=True)
class Memory:
    """Of one process, or summed over some."""

    resident_bytes: int = 0
    """In RAM, shared pages included."""
    private_bytes: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.resident_bytes + other.resident_bytes, self.private_bytes + other.private_bytes
        )


def memory_of(pid: int) -> Memory | None:
    """Return what one process uses; ``None`` if it is gone, or the system does not tell."""
    try:
        words = (PROC / str(pid) / "statm").read_text(encoding="ascii").split()
    except OSError:
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    resident, shared = int(words[1]) * page, int(words[2]) * page
    return Memory(resident, resident - shared)


def tree_memory(pid: int) -> Memory:
    """Return what a process and all its descendants use; nothing for those that are gone."""
    total = Memory()
    for each in process_tree(pid):
        total += memory_of(each) or Memory()
    return total


def process_tree(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants, in whatever group or session they are."""
    yield pid
    # A task may end while we look; then its children are somebody else's.
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                for child in (task / "children").read_text(encoding="ascii").split():
                    yield from process_tree(int(child))
