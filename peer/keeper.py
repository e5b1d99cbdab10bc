"""Keeps an engine alive and on the newest version; generates with it.

The engine is a child that may die, hang, eat memory, refuse weights or answer rubbish. The keeper
closes it, starts another with a growing pause, loads the newest version, and lets nobody generate
before the engine has proved by digest that its kernels use exactly these bits. Of a small delta an
engine that has the version before loads only what was touched, and proves that, and with each load
another 64th of the rest. What is not proved is refused and loaded whole, once. After `restarts_max`
failures without work done in between it gives up, and so does the peer: one without an engine must
not look alive. An engine that says that it will never come up is not tried again at all.

A hang is told by the engine's own pace: a batch may take several times what the slowest of the
last ones would have needed for as many tokens. After a failure batches are halved, and double again
with each success, as the commonest cause is a batch that is too large for the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from echo2p2p.errors import ChildError, ConfigError, EngineError
from echo2p2p.ids import Digest, Version
from echo2p2p.limits import LEASES_PER_CALL_MAX
from echo2p2p.net.ports import Journal, Offload, SharedState
from echo2p2p.weights.layout import Layout
from echo2p2p.weights.touched import digest_selected, next_window
from echo2p2p.wire.messages import Lease
from peer.engine.answers import Hearing, check_answers, vocabulary_of
from peer.engine.base import (
    Engine,
    EngineSetup,
    Generated,
    Grown,
    Heard,
    LoadReport,
    Selection,
)
from peer.state import Weights
from peer.touched import Touched

ENGINE_READY: Final = "engine.ready"
ENGINE_LOST: Final = "engine.lost"
VERSION_LOADED: Final = "version.loaded"
VERSION_UNPROVED: Final = "version.unproved"
LEASE_REFUSED: Final = "lease.refused"
BACK_OFF_S: Final = (0.2, 1.0, 5.0, 15.0, 30.0)
HEALTHY_S: Final = 600.0
"""An engine without work that has lived so long after its first proof is no failure."""
PACES: Final = 8
"""Batches whose pace is remembered."""
SLOWER: Final = 10.0
"""A batch may take so many times what the slowest of them would have."""
BATCH_S_MIN: Final = 30.0
"""And this beside: prompts to be read, a machine that does something else for a while."""
HOPELESS: Final = frozenset({"EngineError", "ImportError", "ModuleNotFoundError"})
"""Exceptions in an engine's start that the next start would raise too."""


@dataclass(frozen=True)
class WeightState:
    """A whole, verified version in shared memory, which is not written before `withdraw`."""

    version: Version
    digest: Digest
    state: SharedState
    since: Callable[[Version], Touched | None] = lambda _: None
    """Tells what differs from an earlier version, if that is known; good for as long as ``state``
    is not written."""


def offer_of(weights: Weights) -> WeightState:
    """Return what is offered to the engine of weights that are of a version."""
    assert weights.version is not None
    assert weights.digest is not None
    return WeightState(weights.version, weights.digest, weights.state, weights.touched.since)


class EngineKeeper:
    """One engine slot.

    Args:
        make_engine: Called for each life.
        setup: Passed to `Engine.start`.
        restarts_max: Failures in a row that are borne.
        offload: For digests of what a proof looks at.
        generate_timeout_s: For a batch while the engine's pace is unknown, and at most.
    """

    def __init__(
        self,
        *,
        make_engine: Callable[[], Engine],
        setup: EngineSetup,
        restarts_max: int,
        journal: Journal,
        offload: Offload,
        generate_timeout_s: float = 300.0,
    ) -> None:
        self._make_engine = make_engine
        self._setup = setup
        self._restarts_max = restarts_max
        self._generate_timeout_s = generate_timeout_s
        self._journal = journal
        self._offload = offload
        self._layout = Layout.from_table(setup.layout)
        self._sparse_loads = 0
        self._generating: Engine | None = None
        self._vocabulary = vocabulary_of(setup.model_config)
        self._engine: Engine | None = None
        self._busy = trio.Lock()
        self._wanted: WeightState | None = None
        self._loading: WeightState | None = None
        self._doubted: WeightState | None = None
        self._lost: EngineError | None = None
        self._first_proof_s: float | None = None
        self._worked = False
        self._paces: deque[tuple[int, float]] = deque(maxlen=PACES)
        self._leases_max: int | None = None
        self.version: Version | None = None
        """Proved by the engine that is up now."""
        self.digest: Digest | None = None
        """Of `version`'s weights; means nothing without one."""
        self.failure: EngineError | ConfigError | None = None
        """Why the keeper has given up."""
        self.changed = trio.lowlevel.ParkingLot()
        """Unparked whenever `version`, the wanted state or the engine changes."""
        self.tokens_generated = 0
        self.tokens_per_s = 0.0

    # --- weights ------------------------------------------------------------------------------

    def offer(self, weights: WeightState) -> None:
        """Switch to this version as soon as the engine is free; the newest offer counts.

        In flight, it need not be free.
        """
        self._wanted = weights
        self.changed.unpark_all()
        if self._setup.in_flight and self._generating is not None:
            self._generating.interrupt()

    async def withdraw(self) -> None:
        """Take the offer back: from here to the next one the memory may be written.

        The engine goes on with what it has loaded; one that is started meanwhile waits. A load
        under way is waited for. Cancel-safe: a cancelled call leaves the offer as it was.
        """
        while self._loading is not None:
            await self.changed.park()
        self._wanted = None

    async def wait_doubted(self) -> WeightState:
        """Wait until an engine has read other bits than it was offered, and return the offer."""
        while self._doubted is None:
            await self.changed.park()
        doubted, self._doubted = self._doubted, None
        return doubted

    # --- generating ---------------------------------------------------------------------------

    async def wait_version(self) -> Version:
        """Wait until a version is proved. Cancel-safe."""
        while self.version is None:
            await self.changed.park()
        return self.version

    def leases_at_once(self, wanted: int) -> int:
        """Return how many leases a batch should have now: fewer than ``wanted`` after a failure."""
        return wanted if self._leases_max is None else min(wanted, self._leases_max)

    async def generate(self, leases: list[Lease], heard: Heard | None = None) -> list[Generated]:
        """Answer leases as one batch, after whatever the engine does now.

        What the engine refuses for a good reason comes back without samples. ``heard`` is told of
        tokens as they are sampled, by a proved version; whether the whole answer is any good is
        known at its end only.

        Raises:
            EngineError: The engine failed; it is being replaced, the leases are lost.
        """
        async with self._busy:
            engine, version = self._engine, self.version
            if engine is None or version is None or self._lost is not None:
                raise EngineError("the engine is being started again")
            began, versions = trio.current_time(), [version]

            async def between() -> None:
                while self._behind():  # still: the offer may have been withdrawn
                    await self._switch(engine)
                    assert self.version is not None
                    versions.append(self.version)

            hearing = Hearing(leases, self._vocabulary)

            def hear(grown: Sequence[Grown]) -> None:
                if heard is not None and (fit := hearing.believed(grown, versions)):
                    heard(fit)

            try:
                self._generating = engine
                patience_s = self._patience_s(leases)
                answers = await engine.generate(
                    leases,
                    timeout_s=patience_s,
                    between=between,
                    heard=None if heard is None else hear,
                )
                check_answers(leases, answers, versions, self._vocabulary)
            except EngineError as error:
                self._leases_max = max(1, len(leases) // 2)
                self._fail(error)
                raise
            except trio.Cancelled:  # a call that was cut off leaves a process that is of no use
                self._fail(EngineError("its batch was cancelled"))
                raise
            finally:
                self._generating = None
        self._count(answers, trio.current_time() - began)
        return answers

    def _patience_s(self, leases: list[Lease]) -> float:
        """Return how long this batch may take before the engine counts as hung."""
        rows = sum(lease.samples for lease in leases)
        # A batch of few tells nothing of one of many.
        paces = [pace for many, pace in self._paces if 2 * many >= rows]
        if not paces:
            return self._generate_timeout_s
        longest = max((lease.tokens_max for lease in leases), default=0)
        likely_s = BATCH_S_MIN + SLOWER * max(paces) * longest
        return min(self._generate_timeout_s, likely_s)

    def _count(self, answers: list[Generated], seconds: float) -> None:
        self._worked = True
        if self._leases_max is not None:
            doubled = 2 * self._leases_max
            self._leases_max = doubled if doubled < LEASES_PER_CALL_MAX else None
        for answer in answers:
            if answer.refused:
                self._journal.event(LEASE_REFUSED, lease=answer.lease_id[:8], detail=answer.refused)
        lengths = [sample.tokens.length for answer in answers for sample in answer.samples]
        if not lengths:
            return
        self._paces.append((len(lengths), seconds / max(lengths)))
        tokens = sum(lengths)
        self.tokens_generated += tokens
        rate = tokens / max(1e-6, seconds)
        self.tokens_per_s = rate if not self.tokens_per_s else 0.8 * self.tokens_per_s + 0.2 * rate

    def _fail(self, error: EngineError) -> None:
        self._lost = error
        self.version = None
        self.changed.unpark_all()

    # --- the slot -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep an engine until cancelled.

        Raises:
            EngineError: It failed too often, or for good; the message is the last failure's.
            ConfigError: It cannot come up with this peer's settings.
        """
        failures = 0
        while True:
            engine = self._make_engine()
            self._first_proof_s, self._worked = None, False
            try:
                await self._live(engine)
            except ConfigError as error:
                self.failure = error
                raise
            except EngineError as error:
                self._fail(error)
                failures = 1 if self._was_healthy() else failures + 1
                again = failures <= self._restarts_max and not self._is_hopeless(error)
                self._journal.event(ENGINE_LOST, detail=str(error), restarting=again)
                if not again:
                    self.failure = error
                    raise
                await trio.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1])
            finally:
                self._engine = None
                with trio.CancelScope(shield=True):  # `close` is bounded by itself
                    await engine.close()

    def _was_healthy(self) -> bool:
        """Whether the life that has just ended was good for something."""
        proof_s = self._first_proof_s
        return self._worked or (proof_s is not None and trio.current_time() - proof_s >= HEALTHY_S)

    def _is_hopeless(self, error: EngineError) -> bool:
        """Whether the engine itself has said, in its start, that it will never come up."""
        started = self._engine is not None
        return not started and isinstance(error, ChildError) and error.raised in HOPELESS

    async def _live(self, engine: Engine) -> None:
        """One life of an engine: start, then follow the newest offer."""
        info = await engine.start(self._setup)
        self._journal.event(
            ENGINE_READY,
            kind=info.kind,
            device=info.device,
            model=info.model,
            dtype=info.dtype,
            memory_bytes=info.memory_bytes,
            tokens_per_s=round(info.tokens_per_s, 1),
        )
        self._lost = None
        self._engine = engine
        while True:
            while self._lost is None and not self._behind():
                await self.changed.park()
            if self._lost is not None:
                raise self._lost
            async with self._busy:
                if self._behind():  # still: the offer may have been withdrawn
                    await self._switch(engine)

    def _behind(self) -> bool:
        return self._wanted is not None and self._wanted.version != self.version

    async def _switch(self, engine: Engine) -> None:
        """Load the wanted version and have it proved; what is refused is loaded whole, once.

        Raises:
            EngineError: The engine is gone, or does not use what it was given twice.
        """
        weights = self._wanted
        assert weights is not None
        touched = None if self.version is None else weights.since(self.version)
        self._loading = weights
        try:
            problem = await self._load(engine, weights, touched)
            if problem:
                self._refuse(weights, problem)
                problem = await self._load(engine, weights, None)
        finally:
            self._loading = None
            self.changed.unpark_all()
        if problem:
            self._doubted = weights  # the engine's memory, or ours
            raise EngineError(problem)

    def _refuse(self, weights: WeightState, problem: str) -> None:
        self.version = None
        self._journal.event(VERSION_UNPROVED, version=weights.version, detail=problem)
        self.changed.unpark_all()

    async def _load(self, engine: Engine, weights: WeightState, touched: Touched | None) -> str:
        """Load and prove; return what is wrong, in a line.

        Raises:
            EngineError: The engine is gone.
        """
        try:
            report = await engine.load(weights.version, weights.state, touched)
            if report.sparse and touched is not None:
                proof, wanted = await self._proof_of(engine, weights, touched)
            else:
                proof, wanted = await engine.prove(), weights.digest
        except ChildError as error:
            if not error.raised:
                raise
            return str(error)  # it lives, and has said no
        if proof != wanted:
            return (
                f"the engine does not use the weights of version {weights.version}: "
                f"digest {proof.hex()[:12]}, wanted {wanted.hex()[:12]}"
            )
        self._note_proved(weights, report)
        return ""

    async def _proof_of(
        self, engine: Engine, weights: WeightState, touched: Touched
    ) -> tuple[Digest, Digest]:
        """Return the digests of what was touched and of the next window: the engine's, and ours."""
        window = next_window(self._layout, self._sparse_loads)
        self._sparse_loads += 1
        proof = await engine.prove(Selection(touched, window))
        view = weights.state.view[: self._layout.total_bytes]
        ours = partial(digest_selected, self._layout, view, touched.places, window)
        return proof, await self._offload.run(ours)

    def _note_proved(self, weights: WeightState, report: LoadReport) -> None:
        if self._first_proof_s is None:
            self._first_proof_s = trio.current_time()
        self.version, self.digest = weights.version, weights.digest
        self._journal.event(
            VERSION_LOADED,
            version=weights.version,
            digest=weights.digest.hex()[:16],
            seconds=round(report.seconds, 4),
            sparse=report.sparse,
        )
        self.changed.unpark_all()
