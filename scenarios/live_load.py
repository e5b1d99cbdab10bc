"""Who had the cores while a live story was played: its processes, and whoever else.

A live story is as good as the machine was idle: a process that waits for a core looks like a slow
line. So its result says how many cores others had on average; `scenarios.agree` goes by it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Final

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
IDLE: Final = (3, 4)
"""Columns of ``/proc/stat``: idle, and idle while a disk works."""
COLUMNS: Final = 8
"""What comes after them is contained in them."""


class Load:
    """What has been used since it was made."""

    def __init__(self) -> None:
        self._began = _busy_s()
        self._ours_began = _own_s()
        self._now: dict[tuple[str, int], float] = {}

    def look(self, name: str, pid: int) -> None:
        """Note what a process has used so far; the last look at it counts."""
        with suppress(OSError, ValueError, IndexError):
            self._now[name, pid] = _cpu_s(Path(f"/proc/{pid}/stat").read_text("utf-8"))

    def figures(self, seconds: float) -> dict[str, object]:
        """Return CPU seconds by machine, and how many cores others had on average."""
        by_name: dict[str, float] = defaultdict(float)
        for (name, _), used_s in self._now.items():
            by_name[name] += used_s
        ours_s = sum(by_name.values()) + _own_s() - self._ours_began
        others_s = max(0.0, _busy_s() - self._began - ours_s)
        return {
            "cores": len(os.sched_getaffinity(0)),
            "cpu_s": {name: round(used_s, 2) for name, used_s in sorted(by_name.items())},
            "others_cores": round(others_s / seconds, 3) if seconds else 0.0,
        }


def _busy_s() -> float:
    first = Path("/proc/stat").read_text("utf-8").splitlines()[0].split()[1:]
    ticks = [int(word) for word in first[:COLUMNS]]
    return sum(ticks[at] for at in range(len(ticks)) if at not in IDLE) / TICKS_PER_S


def _own_s() -> float:
    """Return what this process has used."""
    times = os.times()
    return times.user + times.system


def _cpu_s(stat: str) -> float:
    """Return user and system time of one process; its name may hold anything."""
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
