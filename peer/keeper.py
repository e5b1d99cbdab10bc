"""Keeps an engine alive and on the newest version; generates with it.

The engine is a child that may die, hang or refuse weights. The keeper closes it, starts another
with a growing pause, loads the newest version, and lets nobody generate before the engine has
proved by digest that its kernels use exactly these bits. After `restarts_max` failures without a
proved version in between it gives up: a peer without an engine must not look alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from echo2p2p.errors import EngineError
from echo2p2p.ids import Digest, Version
from echo2p2p.net.ports import Journal, SharedState
from echo2p2p.wire.messages import Lease
from peer.engine.base import Engine, EngineSetup, Generated

ENGINE_READY: Final = "engine.ready"
ENGINE_LOST: Final = "engine.lost"
VERSION_LOADED: Final = "version.loaded"
BACK_OFF_S: Final = (0.2, 1.0, 5.0, 15.0, 30.0)


@dataclass(frozen=True)
class WeightState:
    """A whole, verified version in shared memory."""

    version: Version
    digest: Digest
    state: SharedState


class EngineKeeper:
    """One engine slot.

    Args:
        make_engine: Called for each life.
        setup: Passed to `Engine.start`.
        restarts_max: Failures in a row that are borne.
    """

    def __init__(
        self,
        *,
        make_engine: Callable[[], Engine],
        setup: EngineSetup,
        restarts_max: int,
        journal: Journal,
    ) -> None:
        self._make_engine = make_engine
        self._setup = setup
        self._restarts_max = restarts_max
        self._journal = journal
        self._engine: Engine | None = None
        self._busy = trio.Lock()
        self._wanted: WeightState | None = None
        self._loading: WeightState | None = None
        self._lost: EngineError | None = None
        self._proofs = 0
        self.version: Version | None = None
        """Proved by the engine that is up now."""
        self.changed = trio.lowlevel.ParkingLot()
        """Unparked whenever `version`, the wanted state or the engine changes."""
        self.tokens_generated = 0
        self.tokens_per_s = 0.0

    # --- weights ------------------------------------------------------------------------------

    def offer(self, weights: WeightState) -> None:
        """Switch to this version as soon as the engine is free; the newest offer counts."""
        self._wanted = weights
        self.changed.unpark_all()

    def uses(self, state: SharedState) -> bool:
        """Whether the engine reads this memory now, or would after a restart."""
        return any(
            weights is not None and weights.state is state
            for weights in (self._loading, self._wanted)
        )

    async def wait_unused(self, state: SharedState) -> None:
        """Wait until `uses` is false. Cancel-safe."""
        while self.uses(state):
            await self.changed.park()

    # --- generating ---------------------------------------------------------------------------

    async def wait_version(self) -> Version:
        """Wait until a version is proved. Cancel-safe."""
        while self.version is None:
            await self.changed.park()
        return self.version

    async def generate(self, leases: list[Lease]) -> list[Generated]:
        """Answer leases as one batch, after whatever the engine does now.

        Raises:
            EngineError: The engine failed; it is being replaced, the leases are lost.
        """
        async with self._busy:
            engine = self._engine
            if engine is None or self.version is None or self._lost is not None:
                raise EngineError("the engine is being started again")
            began = trio.current_time()
            try:
                answers = await engine.generate(leases)
            except EngineError as error:
                self._fail(error)
                raise
        tokens = sum(s.tokens.length for answer in answers for s in answer.samples)
        self.tokens_generated += tokens
        rate = tokens / max(1e-6, trio.current_time() - began)
        self.tokens_per_s = rate if not self.tokens_per_s else 0.8 * self.tokens_per_s + 0.2 * rate
        return answers

    def _fail(self, error: EngineError) -> None:
        self._lost = error
        self.version = None
        self.changed.unpark_all()

    # --- the slot -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep an engine until cancelled.

        Raises:
            EngineError: It failed too often; the message is the last failure's.
        """
        failures = 0
        while True:
            engine = self._make_engine()
            proved_before = self._proofs
            try:
                await self._live(engine)
            except EngineError as error:
                self._fail(error)
                failures = 1 if self._proofs > proved_before else failures + 1
                again = failures <= self._restarts_max
                self._journal.event(ENGINE_LOST, detail=str(error), restarting=again)
                if not again:
                    raise
                await trio.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1])
            finally:
                self._engine = None
                with trio.CancelScope(shield=True):  # `close` is bounded by itself
                    await engine.close()

    async def _live(self, engine: Engine) -> None:
        """One life of an engine: start, then follow the newest offer."""
        info = await engine.start(self._setup)
        self._journal.event(
            ENGINE_READY,
            kind=info.kind,
            device=info.device,
            dtype=info.dtype,
            memory_bytes=info.memory_bytes,
        )
        self._lost = None
        self._engine = engine
        while True:
            while self._lost is None and not self._behind():
                await self.changed.park()
            if self._lost is not None:
                raise self._lost
            async with self._busy:
                await self._switch(engine)

    def _behind(self) -> bool:
        return self._wanted is not None and self._wanted.version != self.version

    async def _switch(self, engine: Engine) -> None:
        weights = self._wanted
        assert weights is not None
        self._loading = weights
        try:
            report = await engine.load(weights.version, weights.state)
            proof = await engine.prove()
        finally:
            self._loading = None
        if proof != weights.digest:
            raise EngineError(
                f"the engine does not use the weights of version {weights.version}: "
                f"digest {proof.hex()[:12]}, wanted {weights.digest.hex()[:12]}"
            )
        self._proofs += 1
        self.version = weights.version
        self._journal.event(
            VERSION_LOADED, version=weights.version, seconds=round(report.seconds, 4)
        )
        self.changed.unpark_all()
