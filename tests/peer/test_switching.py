"""How an engine comes to another version: in place, or whole; after a batch, or within it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import trio

from echo2p2p.errors import EngineError
from echo2p2p.ids import Version
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.system import InlineOffload, SimSharedMemory
from echo2p2p.weights.layout import plan_layout
from echo2p2p.weights.state import state_digest
from peer.engine.base import EngineSetup, Generated
from peer.keeper import EngineKeeper, WeightState, offer_of
from peer.state import Weights
from scenarios.fake_engine import EngineFaults, FakeEngine
from scenarios.middle import loose_lease as lease

LAYOUT = plan_layout([("w", "bf16", (4000,), ()), ("v", "f32", (10, 10), ())])
SETUP = EngineSetup(layout=LAYOUT.table, model_config="{}")


class Deltas:
    """A keeper of engines, and weights that move on by a few elements a version."""

    def __init__(self, *engines: FakeEngine, in_flight: bool = False) -> None:
        self._given = list(engines)
        self.engines: list[FakeEngine] = []
        self.journal = TraceJournal()
        self.keeper = EngineKeeper(
            make_engine=self._make,
            setup=replace(SETUP, in_flight=in_flight),
            restarts_max=3,
            journal=self.journal,
            offload=InlineOffload(),
        )
        self.weights = Weights(LAYOUT, SimSharedMemory())
        self.weights.switch(Version(0), state_digest(LAYOUT, self.weights.view))

    def _make(self) -> FakeEngine:
        self.engines.append(self._given.pop(0) if self._given else FakeEngine())
        return self.engines[-1]

    def move(self, version: int, *, noted: bool = True) -> WeightState:
        """Change the first element and another one; return what is to be offered."""
        places = np.array([0, 2 * version], dtype=np.int64)
        for place in places:
            self.weights.view[place] ^= 1 + version
        digest = state_digest(LAYOUT, self.weights.view)
        self.weights.switch(Version(version), digest, places if noted else None)
        return offer_of(self.weights)

    async def proved(self, version: int) -> None:
        """Wait until the engine has proved this version."""
        with trio.fail_after(600):
            while self.keeper.version != version:
                await self.keeper.changed.park()

    def sparse(self) -> list[bool]:
        """Return which loads were in place."""
        return [bool(entry.fields["sparse"]) for entry in self.journal.named("version.loaded")]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EngineKeeper]:
        """Keep an engine beside the body, with version 0 in place."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.keeper.run)
            self.keeper.offer(offer_of(self.weights))
            await self.proved(0)
            yield self.keeper
            nursery.cancel_scope.cancel()


async def test_a_delta_is_loaded_in_place_and_after_a_gap_everything(autojump_clock) -> None:
    deltas = Deltas()
    async with deltas.running() as keeper:
        keeper.offer(deltas.move(1))
        await deltas.proved(1)
        deltas.move(2)
        keeper.offer(deltas.move(3))
        await deltas.proved(3)
        keeper.offer(deltas.move(4, noted=False))
        await deltas.proved(4)
        keeper.offer(deltas.move(5))
        await deltas.proved(5)
        assert deltas.sparse() == [False, True, True, False, True]
        assert await deltas.engines[0].prove() == deltas.weights.digest


@pytest.mark.parametrize(
    "faults",
    [EngineFaults(skipped_load=2), EngineFaults(wrong_weights_at_load=2)],
    ids=["skipped", "wrong elsewhere"],
)
async def test_a_delta_that_is_not_in_place_is_refused_and_everything_loaded(
    autojump_clock, faults: EngineFaults
) -> None:
    deltas = Deltas(FakeEngine(faults=faults))
    async with deltas.running() as keeper:
        keeper.offer(deltas.move(1))
        await deltas.proved(1)
        assert len(deltas.engines) == 1
        assert deltas.sparse() == [False, False]
        assert await deltas.engines[0].prove() == deltas.weights.digest
        (refused,) = deltas.journal.named("version.unproved")
        assert refused.fields["version"] == 1
        assert "does not use the weights of version 1" in str(refused.fields["detail"])
        assert deltas.journal.named("engine.lost") == []
        keeper.offer(deltas.move(2))
        await deltas.proved(2)
        assert deltas.sparse()[-1]


async def test_an_engine_that_is_wrong_twice_is_replaced_and_the_new_one_loads_everything(
    autojump_clock,
) -> None:
    deltas = Deltas(FakeEngine(faults=EngineFaults(wrong_weights_from_load=2)))
    async with deltas.running() as keeper:
        keeper.offer(deltas.move(1))
        await deltas.proved(1)
        assert len(deltas.engines) == 2
        assert len(deltas.journal.named("version.unproved")) == 1
        assert len(deltas.journal.named("engine.lost")) == 1
        assert deltas.sparse() == [False, False]


# --- in flight --------------------------------------------------------------------------------


class Batch:
    """A batch under way beside the test's body."""

    def __init__(self, deltas: Deltas, nursery: trio.Nursery) -> None:
        self.answers: list[Generated] = []
        self.through = trio.Event()
        self.failed: EngineError | None = None
        nursery.start_soon(self._run, deltas.keeper)

    async def _run(self, keeper: EngineKeeper) -> None:
        try:
            self.answers = await keeper.generate([lease("a")])
        except EngineError as error:
            self.failed = error
        self.through.set()

    def labels(self) -> set[tuple[int, ...]]:
        """Return which versions each sample is of, in order."""
        return {
            tuple(span.version for span in sample.spans)
            for answer in self.answers
            for sample in answer.samples
        }


@pytest.mark.parametrize(
    ("in_flight", "labels", "loaded_at"), [(True, {(0, 1)}, 1.5), (False, {(0,)}, None)]
)
async def test_a_version_that_comes_while_a_batch_runs(
    autojump_clock, in_flight: bool, labels: set[tuple[int, ...]], loaded_at: float | None
) -> None:
    deltas = Deltas(FakeEngine(seconds_per_token=1.0), in_flight=in_flight)
    async with deltas.running() as keeper, trio.open_nursery() as nursery:
        batch = Batch(deltas, nursery)
        await trio.sleep(1.5)
        keeper.offer(deltas.move(1))
        await deltas.proved(1)
        at = trio.current_time()
        assert batch.through.is_set() != in_flight
        await batch.through.wait()
        assert batch.labels() == labels
        if loaded_at is not None:
            assert at == pytest.approx(loaded_at, abs=0.1)
        assert deltas.sparse() == [False, True]
        assert await deltas.engines[0].prove() == deltas.weights.digest


async def test_versions_that_follow_each_other_closely_are_all_labelled(autojump_clock) -> None:
    deltas = Deltas(FakeEngine(seconds_per_token=1.0, load_s=0.3), in_flight=True)
    async with deltas.running() as keeper, trio.open_nursery() as nursery:
        batch = Batch(deltas, nursery)
        await trio.sleep(0.5)
        keeper.offer(deltas.move(1))
        await trio.sleep(0.1)  # it is loading
        await keeper.withdraw()
        keeper.offer(deltas.move(2))
        await batch.through.wait()
        (versions,) = batch.labels()
        assert versions[0] == 0
        assert versions[-1] == 2
        assert keeper.version == 2
        assert deltas.journal.named("engine.lost") == []


async def test_an_offer_that_was_withdrawn_interrupts_and_nothing_else(autojump_clock) -> None:
    deltas = Deltas(FakeEngine(seconds_per_token=1.0), in_flight=True)
    async with deltas.running() as keeper, trio.open_nursery() as nursery:
        batch = Batch(deltas, nursery)
        await trio.sleep(1.5)
        keeper.offer(deltas.move(1))
        await keeper.withdraw()
        await batch.through.wait()
        assert batch.labels() <= {(0,), (0, 1)}
        keeper.offer(offer_of(deltas.weights))
        await deltas.proved(1)


async def test_a_refused_delta_in_flight_is_loaded_whole_before_another_token(
    autojump_clock,
) -> None:
    engine = FakeEngine(seconds_per_token=1.0, faults=EngineFaults(skipped_load=2))
    deltas = Deltas(engine, in_flight=True)
    async with deltas.running() as keeper, trio.open_nursery() as nursery:
        batch = Batch(deltas, nursery)
        await trio.sleep(1.5)
        keeper.offer(deltas.move(1))
        await batch.through.wait()
        assert batch.labels() == {(0, 1)}
        assert len(deltas.journal.named("version.unproved")) == 1
        assert deltas.sparse() == [False, False]


@pytest.mark.parametrize(
    "faults",
    [EngineFaults(wrong_weights_from_load=2), EngineFaults(die_at_load=2)],
    ids=["wrong", "dies"],
)
async def test_a_batch_is_lost_with_the_engine_that_cannot_switch(
    autojump_clock, faults: EngineFaults
) -> None:
    deltas = Deltas(FakeEngine(seconds_per_token=1.0, faults=faults), in_flight=True)
    async with deltas.running() as keeper, trio.open_nursery() as nursery:
        batch = Batch(deltas, nursery)
        await trio.sleep(1.5)
        keeper.offer(deltas.move(1))
        await batch.through.wait()
        assert batch.failed is not None
        assert batch.answers == []
        await deltas.proved(1)
        assert len(deltas.engines) == 2
