"""An engine's child process that misbehaves on order: ``python -P -m scenarios.bad_engine HOW``.

It is `scenarios.fake_engine.FakeEngine` behind the real calls, so everything around it is real: the
process, its pipes, its memory, its death. ``HOW`` says what it does when it is to generate
(``good``, ``hang``, ``eat``, ``rubbish``, ``die``), or in its start (``refuse``, ``slow``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, Final, NoReturn, TypeVar

import msgspec
import trio

from echo2p2p.errors import EngineError
from echo2p2p.ids import Digest, Version
from echo2p2p.net import child_worker
from echo2p2p.net.child_worker import Method, Report, Stopwatch
from echo2p2p.testing.system import MemoryState
from echo2p2p.wire.arrays import from_logprobs
from echo2p2p.wire.messages import Sample
from peer.engine.base import EngineInfo, EngineSetup, LoadReport
from peer.engine.calls import BatchCall, BatchReply, LoadCall, ProveCall
from scenarios.fake_engine import FakeEngine

T = TypeVar("T")
SLOW_S: Final = 4.0
"""Of work, without a word, in a slow start."""


class Worker:
    """A `FakeEngine` as a blocking worker."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._engine = FakeEngine()

    def start(self, setup: EngineSetup, _: Report) -> EngineInfo:
        """Start, refuse to, or take long."""
        if self._how == "refuse":
            raise EngineError("the layout is not this model's")
        if self._how == "slow":
            watch = Stopwatch()
            while watch.seconds() < SLOW_S:
                pass
        return _run(lambda: self._engine.start(setup))

    def load(self, call: LoadCall, _: Report) -> LoadReport:
        """Load what the file holds."""
        data = Path(call.path).read_bytes()
        state = MemoryState(len(data))
        state.view[:] = data
        return _run(lambda: self._engine.load(Version(call.version), state))

    def prove(self, _: ProveCall, __: Report) -> Digest:
        """Prove it."""
        return _run(self._engine.prove)

    def generate(self, call: BatchCall, _: Report) -> BatchReply:
        """Do as ordered."""
        leases = call.leases
        print(f"{self._how} with {len(leases)} leases", flush=True)
        if self._how == "hang":
            Event().wait()
        if self._how == "eat":
            _eat()
        if self._how == "die":
            os._exit(3)
        answers = _run(lambda: self._engine.generate(leases))
        if self._how == "rubbish":
            answers = [replace(a, samples=tuple(map(_spoilt, a.samples))) for a in answers]
        return BatchReply(answers)


def _run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return trio.run(work)


def _eat() -> NoReturn:
    eaten = []
    while True:
        eaten.append(b"\x01" * (8 << 20))
        Event().wait(0.01)


def _spoilt(sample: Sample) -> Sample:
    nothing = from_logprobs([float("nan")] * sample.tokens.length)
    return msgspec.structs.replace(sample, logprobs=nothing)


def main() -> None:
    """Serve until the peer closes the pipe."""
    channel = child_worker.connect()
    worker = Worker(sys.argv[1])
    child_worker.serve(
        channel,
        {
            "start": Method(EngineSetup, worker.start, beats=True),
            "load": Method(LoadCall, worker.load),
            "prove": Method(ProveCall, worker.prove),
            "generate": Method(BatchCall, worker.generate),
        },
        beat_s=0.2,
    )


if __name__ == "__main__":
    main()
