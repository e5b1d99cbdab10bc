"""What a piece on a relay link and an HTTP exchange cost where real processes make them.

A story's coordinator and peers run as processes on loopback and say what they use
(`scenarios.live_usage`): once with versions of a few pieces, once with ones of many. Two runs, two
equations: what main threads use is what all pieces and all exchanges cost, beside the learner's
steps; what other threads use, but for offloaded work, is the exchanges' (HTTP has a thread of its
own, SQLite another).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time  # noqa: TID251 - processes share no clock but the kernel's
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import trio

from coordinator.access import JOIN_FILE, Access, read_access
from echo2p2p.errors import ChildError
from scenarios.live_node import WITH_PARENT
from scenarios.live_usage import used_between
from scenarios.live_world import coordinator_part, peer_part
from scenarios.machines import WorldSpec

OPEN_S: Final = 60.0
WARM_S: Final = 8.0
"""Until all have joined, and code that is compiled has been loaded."""
MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the story's own folder in it
HERE: Final = {"host": "127.0.0.1", "port": 0, "relay_port": 0, "tls": "on"}


@dataclass(frozen=True)
class Used:
    """Of all processes of one run together."""

    main_s: float
    """CPU seconds of main threads, without those of the learner's steps."""
    other_s: float
    """CPU seconds of other threads, without offloaded work."""
    pieces: int
    exchanges: int


@dataclass(frozen=True)
class Each:
    """CPU seconds."""

    piece_s: float
    exchange_s: float
    """Both ends together."""


def solve(few: Used, many: Used) -> Each:
    """Return what a piece and an exchange cost, from a run with few pieces and one with many."""
    determinant = few.pieces * many.exchanges - many.pieces * few.exchanges
    piece_s = (few.main_s * many.exchanges - many.main_s * few.exchanges) / determinant
    exchanges = few.exchanges + many.exchanges
    main_s = few.main_s + many.main_s - piece_s * (few.pieces + many.pieces)
    return Each(piece_s, (main_s + few.other_s + many.other_s) / exchanges)


async def measure(spec: WorldSpec, *, step_s: float, seconds: float) -> Used:
    """Run a story's world on loopback, without faults; return what it used.

    Args:
        spec: Of the world.
        step_s: CPU seconds of one of the learner's steps.
        seconds: For how long it is looked at.

    Raises:
        ChildError: A process ended.
    """
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as root:
        async with _running(spec, Path(root)) as usages:
            await trio.sleep(WARM_S)
            began_s = time.monotonic()
            steps = -_steps(Path(root))
            await trio.sleep(seconds)
            steps += _steps(Path(root))
            ended_s = time.monotonic()
        used = [used_between(path, began_s, ended_s) for path in usages]
    return Used(
        main_s=sum(one.main_s for one in used) - steps * step_s,
        other_s=sum(one.all_s - one.main_s - one.jobs_s for one in used),
        pieces=sum(one.pieces for one in used),
        exchanges=sum(one.requests for one in used),
    )


def _steps(root: Path) -> int:
    return (root / "trained").read_bytes().count(b'"step"')


@asynccontextmanager
async def _running(spec: WorldSpec, root: Path) -> AsyncIterator[list[Path]]:
    """Have all processes up; yields the files of what they use."""
    settings = spec.settings.model_dump(mode="json")
    settings["server"] |= HERE
    settings["run"]["folder"] = str(root / "coordinator")
    settings["model"]["path"] = str(root / "model")
    part = coordinator_part(spec, settings, trained=root / "trained")
    part = msgspec.structs.replace(part, usage=f"{root}/usage")
    processes = [_spawn("coordinator", part, root)]
    try:
        access = await _access(processes[0], root)
        usages = [root / "usage"]
        for number, peer in enumerate(spec.peers):
            folder = root / peer.name
            folder.mkdir()
            usages.append(root / f"{peer.name}.usage")
            mine = {
                "url": access.url,
                "token": access.token,
                "name": peer.name,
                "folder": str(folder),
                "engine": {"leases_at_once": peer.leases_at_once},
            }
            one = peer_part(peer, mine, seed=number, can_lie=False, record=root / "record")
            one = msgspec.structs.replace(one, usage=str(usages[-1]))
            processes.append(_spawn("peer", one, root))
        await _made(usages, processes, root)
        yield usages
        _check(processes, root)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _spawn(what: str, part: object, root: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-P", "-m", "scenarios.live_node", what]
    with (root / "log").open("ab") as log:
        return subprocess.Popen(  # noqa: S603 - our own words
            [*words, msgspec.json.encode(part).decode(), WITH_PARENT],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=root,
        )


async def _access(process: subprocess.Popen[bytes], root: Path) -> Access:
    folder = root / "coordinator"
    await _made([folder / JOIN_FILE], [process], root)
    return read_access(folder)


async def _made(
    files: Sequence[Path], processes: Sequence[subprocess.Popen[bytes]], root: Path
) -> None:
    """Wait until processes have made their files.

    Raises:
        ChildError: One ended before, or it takes too long.
    """
    with trio.move_on_after(OPEN_S):
        while not all(file.exists() for file in files):
            _check(processes, root)
            await trio.sleep(0.05)
        return
    late = ", ".join(file.name for file in files if not file.exists())
    raise ChildError("a process of the story", f"not up after {OPEN_S:.0f} s ({late} is missing)")


def _check(processes: Sequence[subprocess.Popen[bytes]], root: Path) -> None:
    """Make sure that all live.

    Raises:
        ChildError: One does not.
    """
    if any(process.poll() is not None for process in processes):
        lines = (root / "log").read_text("utf-8", errors="replace").splitlines()
        raise ChildError("a process of the story", (lines or ["no words"])[-1])
