"""The engine's child process: ``python -P -m peer.engine.worker --kind hf``, or ``vllm``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Protocol

from echo2p2p.errors import EngineError
from echo2p2p.ids import Digest, Version
from echo2p2p.net import child_worker
from echo2p2p.net.child_worker import Method, Report
from echo2p2p.wire.messages import Lease
from peer.engine.base import EngineInfo, EngineSetup, LoadReport
from peer.engine.batches import Answering
from peer.engine.calls import (
    EVERYTHING,
    BatchCall,
    BatchReply,
    LoadCall,
    PhaseReply,
    ProveCall,
    TouchedFile,
)

Phase = Callable[[str], None]


class BlockingEngine(Protocol):
    """`peer.engine.base.Engine` without waiting: what a worker calls."""

    def info(self) -> EngineInfo:
        """Return what the engine says of itself."""

    def load(self, version: Version, path: str, touched: TouchedFile | None = None) -> LoadReport:
        """Read the shared state in the file at ``path``."""

    def prove(self, call: ProveCall = EVERYTHING) -> Digest:
        """Return the digest of what the kernels use."""

    def begin(self, leases: Sequence[Lease], *, heard: bool = False) -> Answering:
        """Begin to answer leases; each turn of the result is a token of each sample.

        ``heard``: each turn's value is what has grown; else it is empty.
        """


def make_hf(setup: EngineSetup, phase: Phase) -> BlockingEngine:
    """Build the transformers engine; torch is imported only now, under the watchdog's eyes."""
    phase("importing torch and transformers")
    from peer.engine.hf import HfEngine

    phase("building the model")
    return HfEngine(setup)


def make_vllm(setup: EngineSetup, phase: Phase) -> BlockingEngine:
    """Build the vLLM engine."""
    phase("importing torch, transformers and vLLM")
    from peer.engine.vllm import VllmEngine

    return VllmEngine(setup, phase)


KINDS = {"hf": make_hf, "vllm": make_vllm}


class Worker:
    """An engine of some kind behind the calls of a child process.

    Args:
        kind: Which.
        nudged: Whether a batch is to stand still.
    """

    def __init__(self, kind: str, nudged: Callable[[], bool]) -> None:
        self._make = KINDS[kind]
        self._nudged = nudged
        self._engine: BlockingEngine | None = None
        self._batch: Answering | None = None

    def start(self, setup: EngineSetup, report: Report) -> EngineInfo:
        """Build the engine, and say how far it is."""
        self._engine = self._make(setup, lambda phase: report(PhaseReply(phase)))
        return self._engine.info()

    def load(self, call: LoadCall, _: Report) -> LoadReport:
        """See `Engine.load`."""
        return self._started().load(Version(call.version), call.path, call.touched)

    def prove(self, call: ProveCall, _: Report) -> Digest:
        """See `Engine.prove`."""
        return self._started().prove(call)

    def generate(self, call: BatchCall, report: Report) -> BatchReply:
        """See `Engine.generate`."""
        self._batch = self._started().begin(call.leases, heard=call.heard)
        return self.resume(None, report)

    def resume(self, _: None, report: Report) -> BatchReply:
        """Go on until the batch is through, or we are nudged.

        Raises:
            EngineError: There is no batch.
        """
        batch, self._batch = self._batch, None
        if batch is None:
            raise EngineError("no batch is under way")
        try:
            while True:
                if grown := next(batch):
                    report(grown)
                if self._nudged():
                    self._batch = batch
                    return BatchReply(None)
        except StopIteration as end:
            return BatchReply(end.value)

    def _started(self) -> BlockingEngine:
        if self._engine is None:
            raise EngineError("the engine was not started")
        return self._engine


def main() -> None:
    """Serve until the peer closes the pipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=sorted(KINDS), required=True)
    arguments = parser.parse_args()
    channel = child_worker.connect()
    worker = Worker(arguments.kind, channel.nudged)
    child_worker.serve(
        channel,
        {
            "start": Method(EngineSetup, worker.start, beats=True),
            "load": Method(LoadCall, worker.load),
            "prove": Method(ProveCall, worker.prove),
            "generate": Method(BatchCall, worker.generate),
            "resume": Method(type(None), worker.resume),
        },
    )


if __name__ == "__main__":
    main()
