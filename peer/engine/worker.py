"""The engine's child process: ``python -P -m peer.engine.worker --kind hf``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from echo2p2p.errors import EngineError
from echo2p2p.ids import Digest, Version
from echo2p2p.net import child_worker
from echo2p2p.net.child_worker import Method, Report
from echo2p2p.wire.messages import Lease
from peer.engine.base import EngineInfo, EngineSetup, Generated, LoadReport
from peer.engine.calls import LoadCall, PhaseReply

if TYPE_CHECKING:
    from peer.engine.hf import HfEngine


class Worker:
    """An `HfEngine` behind the calls of a child process."""

    def __init__(self) -> None:
        self._engine: HfEngine | None = None

    def start(self, setup: EngineSetup, report: Report) -> EngineInfo:
        """Build the engine; torch is imported only now, under the watchdog's eyes."""
        report(PhaseReply("importing"))
        from peer.engine.hf import HfEngine

        report(PhaseReply("building"))
        self._engine = HfEngine(setup)
        return self._engine.info()

    def load(self, call: LoadCall, _: Report) -> LoadReport:
        """See `HfEngine.load`."""
        return self._started().load(Version(call.version), call.path)

    def prove(self, _: None, __: Report) -> Digest:
        """See `HfEngine.prove`."""
        return self._started().prove()

    def generate(self, leases: list[Lease], _: Report) -> list[Generated]:
        """See `HfEngine.generate`."""
        return self._started().generate(leases)

    def _started(self) -> HfEngine:
        if self._engine is None:
            raise EngineError("the engine was not started")
        return self._engine


def main() -> None:
    """Serve until the peer closes the pipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["hf"], required=True)
    parser.parse_args()
    channel = child_worker.connect()
    worker = Worker()
    child_worker.serve(
        channel,
        {
            "start": Method(EngineSetup, worker.start, beats=True),
            "load": Method(LoadCall, worker.load),
            "prove": Method(type(None), worker.prove),
            "generate": Method(list[Lease], worker.generate),
        },
    )


if __name__ == "__main__":
    main()
