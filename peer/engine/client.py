"""An engine in a child process: the real form of `peer.engine.base.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from echo2p2p.errors import LocalProtocolError
from echo2p2p.ids import Digest, Version
from echo2p2p.net.child import ChildProcess
from echo2p2p.net.ports import SharedState
from echo2p2p.wire.messages import Lease
from peer.engine.base import (
    GENERATE_TIMEOUT_S,
    Between,
    EngineInfo,
    EngineSetup,
    Generated,
    Grown,
    Heard,
    LoadReport,
    Selection,
)
from peer.engine.calls import BatchCall, BatchReply, LoadCall, PhaseReply, ProveCall, TouchedFile
from peer.touched import Touched


class EngineProcess:
    """See `peer.engine.base.Engine`.

    Args:
        kind: Which engine.
        start_silence_s: `start` has no deadline, but the process must work or read without a
            pause of this length.
        load_timeout_s: For one load.
        prove_timeout_s: For one proof.
        memory_max_bytes: See `ChildProcess`.
        command: Module and arguments of another child than the kind's own.
        log_file: What the engine prints is appended here.
        on_phase: Told what the start is at.
    """

    def __init__(
        self,
        kind: Literal["hf", "vllm"] = "hf",
        *,
        start_silence_s: float = 600.0,
        load_timeout_s: float = 300.0,
        prove_timeout_s: float = 300.0,
        memory_max_bytes: int | None = None,
        command: Sequence[str] | None = None,
        log_file: Path | None = None,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        module, *arguments = command or ("peer.engine.worker", "--kind", kind)
        self.child = ChildProcess(
            "engine",
            module,
            arguments,
            log_file=log_file,
            memory_max_bytes=memory_max_bytes,
        )
        self._generating = False
        self._on_phase = on_phase
        self._start_silence_s = start_silence_s
        self._load_timeout_s = load_timeout_s
        self._prove_timeout_s = prove_timeout_s

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Spawn and build; see the port."""
        await self.child.start()
        return await self.child.call(
            "start",
            setup,
            EngineInfo,
            timeout_s=None,
            silence_s=self._start_silence_s,
            progress=self._starting,
            progress_kind=PhaseReply,
        )

    async def load(
        self, version: Version, state: SharedState, touched: Touched | None = None
    ) -> LoadReport:
        """Read the shared state; see the port."""
        if not state.path:
            raise LocalProtocolError("an engine process needs a shared state in a file")
        call = LoadCall(version, state.path, TouchedFile.of(touched))
        return await self.child.call("load", call, LoadReport, timeout_s=self._load_timeout_s)

    async def prove(self, selection: Selection | None = None) -> Digest:
        """Read the live weights back; see the port."""
        call = ProveCall.of(selection)
        digest = await self.child.call("prove", call, bytes, timeout_s=self._prove_timeout_s)
        return Digest(digest)

    async def generate(
        self,
        leases: list[Lease],
        *,
        timeout_s: float = GENERATE_TIMEOUT_S,
        between: Between | None = None,
        heard: Heard | None = None,
    ) -> list[Generated]:
        """Answer leases; see the port. ``timeout_s`` is for each stretch without a stop."""
        call = BatchCall(leases, heard is not None)
        reply = await self._stretch("generate", call, timeout_s, heard)
        while reply.answers is None:
            if between is not None:
                await between()
            reply = await self._stretch("resume", None, timeout_s, heard)
        return reply.answers

    async def _stretch(
        self, method: str, call: BatchCall | None, timeout_s: float, heard: Heard | None
    ) -> BatchReply:
        self._generating = True
        try:
            return await self.child.call(
                method,
                call,
                BatchReply,
                timeout_s=timeout_s,
                progress=heard,
                progress_kind=list[Grown],
            )
        finally:
            self._generating = False

    def interrupt(self) -> None:
        """Nudge the batch under way; see the port."""
        if self._generating:
            self.child.nudge()

    async def close(self) -> None:
        """End it; see the port."""
        await self.child.close()

    def _starting(self, reply: PhaseReply) -> None:
        if self._on_phase is not None:
            self._on_phase(reply.phase)
