"""How a command runs and ends: signals, exit codes, one line for an expected failure.

SIGINT and SIGTERM cancel everything; clean-up is bounded, and a second signal ends the process at
once. 0: done; 1: failed; 2: wrong usage or settings; 130: interrupted.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

import trio

from echo2p2p.errors import ConfigError, EchoError

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130


def collect_rarely() -> None:
    """Let Python look for cycles of garbage less often, and not among what is imported by now.

    That stays for good: a full collection, which stops everything, need not look at it each time
    (50 ms and more). And cycles are rare here; at Python's own pace collections are a twentieth of
    a coordinator's work.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def run_program(main: Callable[[], Awaitable[int]]) -> int:
    """Run ``main`` under trio and return the process's exit code.

    An `EchoError` becomes one line on standard error. Anything else is a bug and keeps its
    traceback.
    """
    if not __debug__:
        print("error: run Python without -O: assertions are part of this program", file=sys.stderr)  # noqa: T201
        return USAGE
    collect_rarely()
    code = FAILED

    async def supervised() -> None:
        work = trio.CancelScope()

        async def watch(signals: AsyncIterator[int]) -> None:
            nonlocal code
            async for _ in signals:
                if code == INTERRUPTED:
                    os._exit(INTERRUPTED)
                code = INTERRUPTED
                work.cancel()

        # Outside of what the first signal cancels, so that a second one is heard during clean-up.
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, signals)
                with work:
                    await body()
                nursery.cancel_scope.cancel()

    async def body() -> None:
        nonlocal code
        result = await main()
        if code != INTERRUPTED:
            code = result

    try:
        trio.run(supervised, strict_exception_groups=True)
    except BaseExceptionGroup as group:
        expected = [error for error in _leaves(group) if isinstance(error, EchoError)]
        if len(expected) != len(list(_leaves(group))):
            raise
        return _told(expected[0])
    except EchoError as error:
        return _told(error)
    return code


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _told(error: EchoError) -> int:
    print(f"error: {error}", file=sys.stderr)  # noqa: T201 the user reads this
    return USAGE if isinstance(error, ConfigError) else FAILED
