"""A child process that does as it is told, well or badly: for the tests of `echo2p2p.net.child`.

``python -P -m echo2p2p.testing.children`` is the child. With the argument ``parent`` it is a
process that owns such a child, prints the child's id, and is meant to be killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from math import inf
from threading import Event, Thread
from typing import Any

import trio

from echo2p2p.errors import ConfigError
from echo2p2p.net import child_worker
from echo2p2p.net.child import ChildProcess
from echo2p2p.net.child_worker import Method, Report, Stopwatch

MODULE = "echo2p2p.testing.children"
CHANNEL: child_worker.Channel | None = None
"""Of the process that is the child."""


def make_child(**options: Any) -> ChildProcess:  # noqa: ANN401 - passed on
    """Return one, not started; ``options`` are those of `ChildProcess`."""
    return ChildProcess("subject", MODULE, **options)


def _echo(argument: bytes, _: Report) -> bytes:
    return argument


def _fail(argument: str, _: Report) -> None:
    raise RuntimeError(argument)


def _die(code: int, _: Report) -> None:
    print("last words", flush=True)  # noqa: T201 - what the parent must find
    os._exit(code)


def _kill(number: int, _: Report) -> None:
    os.kill(os.getpid(), number)


def _burn(_: None, report: Report) -> None:
    """Never give the interpreter back on our own account."""
    report(os.getpid())
    while True:
        pass


def _fork_and_burn(_: None, report: Report) -> None:
    """As `_burn`, with a child of our own that only waits."""
    grandchild = os.fork()
    if grandchild == 0:
        while True:
            signal.pause()
    report(grandchild)
    while True:
        pass


def _fork_and_leave(code: int, report: Report) -> None:
    """Die, but leave a child of our own that holds on to everything that we had open."""
    grandchild = os.fork()
    if grandchild == 0:
        while True:
            signal.pause()
    report(grandchild)
    print("last words", flush=True)  # noqa: T201 - what the parent must find
    os._exit(code)


def _fork_away(_: None, __: Report) -> int:
    """Have a child of our own, in a session of its own, that floods our output while it is open."""
    grandchild = os.fork()
    if grandchild == 0:
        os.setsid()
        with contextlib.suppress(OSError):
            while True:
                os.write(1, b"flood " * 1000)
        while True:
            signal.pause()
    return grandchild


def _fork_away_and_burn(_: None, report: Report) -> None:
    report(_fork_away(None, report))
    while True:
        pass


def _answer_by_half(size: int, _: Report) -> None:
    """Announce a message of so many bytes, send half of it, and say no more."""
    for descriptor in range(256):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, child_worker.HEADER.pack(size) + bytes(size // 2))
    signal.pause()


def _flood(seconds: float, _: Report) -> int:
    """Print as fast as anybody reads; return how many bytes that were."""
    watch, count = Stopwatch(), 0
    while watch.seconds() < seconds:
        count += os.write(1, b"flood " * 1000)
    return count


def _flood_for_ever(_: None, __: Report) -> None:
    """Return at once, and let a thread print for ever."""
    Thread(target=_flood, args=(inf, None), daemon=True).start()


def _linger(_: None, __: Report) -> None:
    """Return at once, and let a thread keep the process from ever ending."""
    Thread(target=Event().wait).start()


def _hang(_: None, __: Report) -> None:
    signal.pause()


def _eat(_: None, __: Report) -> None:
    """Take memory for ever, 8 MiB at a time."""
    eaten = []
    while True:
        eaten.append(b"\x01" * (8 << 20))
        print(f"ate {8 * len(eaten)} MiB", flush=True)  # noqa: T201 - what the parent must find
        Event().wait(0.01)


def _fork_and_eat(_: None, report: Report) -> None:
    """As `_eat`, but a child of our own does it."""
    if os.fork() == 0:
        _eat(None, report)
    signal.pause()


def _misconfigured(path: str, _: Report) -> None:
    raise ConfigError(path, "of no use")


def _wait_beating(seconds: float, _: Report) -> None:
    Event().wait(seconds)


def _work_beating(seconds: float, _: Report) -> float:
    watch = Stopwatch()
    while watch.seconds() < seconds:
        pass
    return seconds


def _work_below(seconds: float, _: Report) -> float:
    """Wait for a process of our own, which works."""
    burn = f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)  # noqa: S603 - our own words
    return seconds


def _wait_below(seconds: float, _: Report) -> None:
    """Wait for a process of our own, which waits."""
    wait = f"import threading; threading.Event().wait({seconds})"
    subprocess.run([sys.executable, "-c", wait], check=True)  # noqa: S603 - our own words


def _count(limit: int, report: Report) -> int:
    for number in range(limit):
        report(number)
    return limit


def _wait_nudged(seconds: float, report: Report) -> bool:
    """Work until we are nudged, or the time is over; return which."""
    assert CHANNEL is not None
    watch = Stopwatch()
    report(0)
    while watch.seconds() < seconds:
        if CHANNEL.nudged():
            return True
        Event().wait(0.01)
    return False


def _write(count: int, _: Report) -> int:
    print("x" * count + " end", flush=True)  # noqa: T201 - what the parent must find
    return count


def _environment(name: str, _: Report) -> str:
    return os.environ.get(name, "")


def _modules(_: None, __: Report) -> list[str]:
    return sorted(sys.modules)


METHODS: dict[str, Method] = {
    "echo": Method(bytes, _echo),
    "fail": Method(str, _fail),
    "die": Method(int, _die),
    "kill": Method(int, _kill),
    "burn": Method(type(None), _burn),
    "fork_and_burn": Method(type(None), _fork_and_burn),
    "fork_and_leave": Method(int, _fork_and_leave),
    "fork_away": Method(type(None), _fork_away),
    "fork_away_and_burn": Method(type(None), _fork_away_and_burn),
    "answer_by_half": Method(int, _answer_by_half),
    "flood": Method(float, _flood),
    "flood_for_ever": Method(type(None), _flood_for_ever),
    "linger": Method(type(None), _linger),
    "hang": Method(type(None), _hang),
    "eat": Method(type(None), _eat),
    "fork_and_eat": Method(type(None), _fork_and_eat),
    "misconfigured": Method(str, _misconfigured),
    "wait_beating": Method(float, _wait_beating, beats=True),
    "work_beating": Method(float, _work_beating, beats=True),
    "work_below": Method(float, _work_below, beats=True),
    "wait_below": Method(float, _wait_below, beats=True),
    "count": Method(int, _count),
    "wait_nudged": Method(float, _wait_nudged),
    "write": Method(int, _write),
    "environment": Method(str, _environment),
    "modules": Method(type(None), _modules),
}


async def _own(method: str) -> None:
    child = make_child()
    await child.start()

    def show(pid: object) -> None:
        print(pid, child.pid, flush=True)  # noqa: T201 - read by the test

    show_progress: Callable[[Any], None] = show
    await child.call(
        method, None, type(None), timeout_s=None, progress=show_progress, progress_kind=int
    )


def main() -> None:
    """Be the child, or (``parent METHOD``) the parent of one."""
    if sys.argv[1:2] == ["parent"]:
        trio.run(_own, sys.argv[2])
    else:
        global CHANNEL  # noqa: PLW0603 - set once, before anything is served
        CHANNEL = child_worker.connect()
        child_worker.serve(CHANNEL, METHODS, beat_s=0.1)


if __name__ == "__main__":
    main()


async def wait_gone(pid: int) -> None:
    """Wait until no process has this id, or only a zombie."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with trio.fail_after(10):
            await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)
