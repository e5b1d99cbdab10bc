"""An engine that dies, hangs, lies or never comes up: what its keeper does about it."""

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
import trio

from echo2p2p.errors import ChildError, ConfigError, EngineError
from echo2p2p.ids import Digest, Version
from echo2p2p.net.ports import SharedState
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.system import InlineOffload, MemoryState
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.arrays import to_tokens
from echo2p2p.wire.messages import Lease
from peer.engine.base import Between, EngineInfo, EngineSetup, Generated, Grown, Heard, LoadReport
from peer.keeper import (
    BACK_OFF_S,
    BATCH_S_MIN,
    HEALTHY_S,
    SLOWER,
    EngineKeeper,
    WeightState,
)
from peer.touched import Touched
from scenarios.fake_engine import EngineFaults, FakeEngine
from scenarios.middle import LAYOUT
from scenarios.middle import loose_lease as lease

SETUP = EngineSetup(layout=LAYOUT.table, model_config="{}")


def weights(version: int) -> WeightState:
    """Return a version in memory of its own."""
    state = MemoryState(LAYOUT.total_bytes)
    state.view[:] = bytes([version]) * LAYOUT.total_bytes
    return WeightState(Version(version), state_digest(LAYOUT, bytes(state.view)), state)


class Engine(FakeEngine):
    """Notes what is asked of it; its loads may take time, its start may fail."""

    def __init__(
        self, *, refuses: Exception | bool = False, lies: bool = False, **options: object
    ) -> None:
        super().__init__(**options)
        self.refuses = EngineError("no such device") if refuses is True else refuses
        self.lies = lies
        self.batches: list[int] = []
        self.loads: list[int] = []
        self.closed = False

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """Refuse, or start."""
        if self.refuses:
            raise self.refuses
        return await super().start(setup)

    async def generate(
        self,
        leases: list[Lease],
        *,
        timeout_s: float = 600.0,
        between: Between | None = None,
        heard: Heard | None = None,
    ) -> list[Generated]:
        """Note the size of the batch; leave half of the tokens out, if it is to lie."""
        self.batches.append(len(leases))
        answers = await super().generate(leases, timeout_s=timeout_s, between=between, heard=heard)
        return answers[1:] if self.lies else answers

    async def load(
        self, version: Version, state: SharedState, touched: Touched | None = None
    ) -> LoadReport:
        """Note the version."""
        self.loads.append(version)
        return await super().load(version, state, touched)

    async def close(self) -> None:
        """Note that it went all the way."""
        await super().close()
        self.closed = True


class Slot:
    """A keeper, its engines and its journal."""

    def __init__(self, *engines: Engine, restarts_max: int = 3, setup: EngineSetup = SETUP) -> None:
        self.engines: list[Engine] = []
        self.journal = TraceJournal()
        self._given = list(engines)
        self.keeper = EngineKeeper(
            make_engine=self.make,
            setup=SETUP,
            restarts_max=restarts_max,
            journal=self.journal,
            offload=InlineOffload(),
        )

    def make(self) -> Engine:
        """Return the next engine: those given, then good ones."""
        self.engines.append(self._given.pop(0) if self._given else Engine())
        return self.engines[-1]

    def lost(self) -> list[str]:
        """Return why engines were lost."""
        return [str(entry.fields["detail"]) for entry in self.journal.named("engine.lost")]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EngineKeeper]:
        """Keep an engine beside the body."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.keeper.run)
            yield self.keeper
            nursery.cancel_scope.cancel()


async def proved(keeper: EngineKeeper, version: int) -> None:
    """Wait until the engine has proved this version."""
    while keeper.version != version:
        await keeper.changed.park()


# --- versions ---------------------------------------------------------------------------------


async def test_a_version_is_named_only_after_the_engine_has_proved_it(autojump_clock) -> None:
    slot = Slot(Engine(load_s=5.0))
    async with slot.running() as keeper:
        await trio.sleep(1.0)
        assert keeper.version is None
        with pytest.raises(EngineError):
            await keeper.generate([lease()])
        keeper.offer(weights(3))
        await trio.sleep(4.9)
        assert keeper.version is None
        assert slot.journal.named("version.loaded") == []
        await trio.sleep(0.2)
        assert keeper.version == 3
        assert await keeper.wait_version() == 3
        (answer,) = await keeper.generate([lease()])
        assert {span.version for sample in answer.samples for span in sample.spans} == {3}
        assert [entry.fields["kind"] for entry in slot.journal.named("engine.ready")] == ["fake"]
        assert [entry.fields["version"] for entry in slot.journal.named("version.loaded")] == [3]


async def test_who_wants_to_hear_is_told_what_the_answer_comes_to_and_no_rubbish(
    autojump_clock,
) -> None:
    class Babbler(Engine):
        async def generate(self, leases, *, heard=None, **options):  # type: ignore[no-untyped-def,override]
            def babble(grown: Sequence[Grown]) -> None:
                odd = [replace(each, lease=7) for each in grown]
                heard([*odd, *grown, *(replace(each, version=9) for each in grown)])

            return await super().generate(leases, heard=heard and babble, **options)

    slot = Slot(Babbler(seconds_per_token=1.0))
    async with slot.running() as keeper:
        keeper.offer(weights(3))
        await proved(keeper, 3)
        told: list[Grown] = []
        (answer,) = await keeper.generate([lease()], told.extend)
        (silent,) = await keeper.generate([lease()])
    assert answer.samples == silent.samples
    assert {each.version for each in told} == {3}
    for number, sample in enumerate(answer.samples):
        heard = [token for each in told if each.sample == number for token in each.tokens]
        tokens = to_tokens(sample.tokens).tolist()
        assert heard == tokens[: len(heard)]
        assert heard, "at least until the rubbish"


async def test_who_waits_for_a_version_is_woken_by_its_proof(autojump_clock) -> None:
    async with Slot().running() as keeper, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def offer() -> None:
            await trio.sleep(2.0)
            keeper.offer(weights(0))

        assert await keeper.wait_version() == 0
        assert trio.current_time() >= 2.0


async def test_the_newest_offer_counts_and_those_between_are_skipped(autojump_clock) -> None:
    slot = Slot(Engine(load_s=1.0))
    async with slot.running() as keeper:
        for version in range(4):
            keeper.offer(weights(version))
            await trio.sleep(0.3)
        await trio.sleep(5.0)
        assert keeper.version == 3
        assert slot.engines[0].loads == [0, 3]


async def test_weights_wait_for_a_generation_under_way_and_the_next_one_uses_them(
    autojump_clock,
) -> None:
    slot = Slot(Engine(seconds_per_token=1.0))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        versions: list[set[int]] = []

        async def generate() -> None:
            (answer,) = await keeper.generate([lease()])
            versions.append({span.version for s in answer.samples for span in s.spans})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await trio.sleep(0.5)
            keeper.offer(weights(1))
            await trio.sleep(0.5)
            assert keeper.version == 0
            await proved(keeper, 1)
            nursery.start_soon(generate)
        assert versions == [{0}, {1}]


async def test_memory_is_let_go_when_a_load_is_over_and_not_read_again_before_an_offer(
    autojump_clock,
) -> None:
    slot = Slot(Engine(load_s=1.0))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await trio.sleep(0.5)
        with trio.fail_after(10.0):
            await keeper.withdraw()
        assert trio.current_time() >= 1.0, "the load under way was waited for"
        await proved(keeper, 0)
        await trio.sleep(5.0)
        assert slot.engines[0].loads == [0]
        keeper.offer(weights(1))
        await proved(keeper, 1)


async def test_an_engine_that_starts_while_the_offer_is_withdrawn_waits_for_the_next(
    autojump_clock,
) -> None:
    slot = Slot(Engine(faults=EngineFaults(die_at_generate=1)))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        await keeper.withdraw()
        with pytest.raises(EngineError):
            await keeper.generate([lease()])
        await trio.sleep(60.0)
        assert len(slot.engines) == 2
        assert slot.engines[1].loads == []
        assert keeper.version is None
        keeper.offer(weights(1))
        await proved(keeper, 1)


async def test_an_engine_goes_on_with_its_version_while_the_offer_is_withdrawn(
    autojump_clock,
) -> None:
    slot = Slot(Engine(seconds_per_token=1.0))
    async with slot.running() as keeper, trio.open_nursery() as nursery:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        nursery.start_soon(keeper.generate, [lease()])
        await trio.sleep(0.5)
        keeper.offer(weights(1))  # waits for the batch
        await trio.sleep(0.5)
        await keeper.withdraw()
        await trio.sleep(60.0)
        assert keeper.version == 0
        (answer,) = await keeper.generate([lease()])
        assert {span.version for sample in answer.samples for span in sample.spans} == {0}
        assert slot.engines[0].loads == [0]
        assert slot.lost() == []


async def test_a_withdrawal_that_is_cancelled_leaves_the_offer(autojump_clock) -> None:
    slot = Slot(Engine(load_s=5.0))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await trio.sleep(0.1)
        with trio.move_on_after(0.1) as scope:
            await keeper.withdraw()
        assert scope.cancelled_caught
        slot.engines[0].kill()
        with trio.fail_after(10.0):
            await proved(keeper, 0)
        assert len(slot.engines) == 2


async def test_memory_is_let_go_when_the_load_from_it_has_failed(autojump_clock) -> None:
    slot = Slot(Engine(load_s=1.0, faults=EngineFaults(die_at_load=1)))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await trio.sleep(0.5)
        with trio.fail_after(10.0):
            await keeper.withdraw()
        keeper.offer(weights(1))
        await proved(keeper, 1)


async def test_who_offered_what_an_engine_read_otherwise_is_told(autojump_clock) -> None:
    slot = Slot(Engine(faults=EngineFaults(wrong_weights_from_load=1)))
    async with slot.running() as keeper:
        offered = weights(0)
        keeper.offer(offered)
        with trio.fail_after(10.0):
            assert await keeper.wait_doubted() is offered
        await proved(keeper, 0)
        with trio.move_on_after(60.0) as scope:
            await keeper.wait_doubted()
        assert scope.cancelled_caught, "once a doubt"


# --- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        (EngineFaults(die_at_generate=1), "SIGKILL"),
        (EngineFaults(hang_at_generate=1), "did not finish"),
    ],
    ids=["dies", "hangs"],
)
async def test_an_engine_that_fails_to_generate_is_replaced_and_proves_the_version_anew(
    autojump_clock, faults: EngineFaults, why: str
) -> None:
    slot = Slot(Engine(faults=faults, timeout_s=50.0, seconds_per_token=1.0))
    async with slot.running() as keeper:
        keeper.offer(weights(2))
        await proved(keeper, 2)
        with pytest.raises(EngineError, match=why):
            await keeper.generate([lease()])
        assert keeper.version is None
        with pytest.raises(EngineError, match="started again"):
            await keeper.generate([lease()])
        began = trio.current_time()
        await proved(keeper, 2)
        assert trio.current_time() - began == pytest.approx(BACK_OFF_S[0], abs=0.05)
        assert len(await keeper.generate([lease()])) == 1
        assert len(slot.engines) == 2
        assert slot.engines[0].closed
        assert slot.engines[0].loads == [2]  # nobody asked the dead one again
        (reason,) = slot.lost()
        assert why in reason


async def test_who_waits_for_a_hung_engine_is_told_to_take_its_work_back(autojump_clock) -> None:
    slot = Slot(Engine(faults=EngineFaults(hang_at_generate=1), timeout_s=50.0))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        failed: list[str] = []

        async def generate(name: str) -> None:
            with pytest.raises(EngineError):
                await keeper.generate([lease(name)])
            failed.append(name)

        async with trio.open_nursery() as nursery:
            for name in "ab":
                nursery.start_soon(generate, name)
        assert sorted(failed) == ["a", "b"]


async def test_an_engine_that_dies_while_it_loads_is_replaced(autojump_clock) -> None:
    slot = Slot(Engine(load_s=1.0, faults=EngineFaults(die_at_load=2)))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        keeper.offer(weights(1))
        await proved(keeper, 1)
        assert [engine.loads for engine in slot.engines] == [[0, 1], [1]]


async def test_an_engine_that_does_not_use_the_bits_it_was_given_is_refused_and_replaced(
    autojump_clock,
) -> None:
    slot = Slot(Engine(faults=EngineFaults(wrong_weights_from_load=2)))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        keeper.offer(weights(1))
        while keeper.version is not None:
            assert keeper.version == 0  # never 1: that was not proved
            await keeper.changed.park()
        await proved(keeper, 1)
        (reason,) = slot.lost()
        assert "does not use the weights of version 1" in reason
        assert [engine.closed for engine in slot.engines] == [True, False]
        assert slot.engines[0].loads == [0, 1, 1], "loaded again once, then replaced"


async def test_a_digest_that_is_not_the_manifests_is_never_named(autojump_clock) -> None:
    wrong = WeightState(Version(0), Digest(bytes(32)), weights(0).state)
    slot = Slot(restarts_max=2)
    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match="does not use")):
        async with slot.running() as keeper:
            keeper.offer(wrong)
            while True:
                assert keeper.version is None
                await keeper.changed.park()
    assert len(slot.engines) == 3


async def test_after_too_many_failures_in_a_row_it_gives_up_with_the_last_cause(
    autojump_clock,
) -> None:
    slot = Slot(*(Engine(refuses=True) for _ in range(9)), restarts_max=3)
    with pytest.raises(EngineError, match="no such device"):
        await slot.keeper.run()
    assert len(slot.engines) == 4
    assert all(engine.closed for engine in slot.engines)
    assert trio.current_time() == pytest.approx(sum(BACK_OFF_S[:3]), abs=0.01)
    flags = [entry.fields["restarting"] for entry in slot.journal.named("engine.lost")]
    assert flags == [True, True, True, False]


async def test_pauses_grow_to_a_bound(autojump_clock) -> None:
    slot = Slot(*(Engine(refuses=True) for _ in range(9)), restarts_max=7)
    with pytest.raises(EngineError):
        await slot.keeper.run()
    times = [entry.at_s for entry in slot.journal.named("engine.lost")]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    wanted = [*BACK_OFF_S, BACK_OFF_S[-1], BACK_OFF_S[-1]]
    assert pauses == pytest.approx(wanted, abs=0.01)


async def test_work_done_in_between_makes_patience_start_afresh(autojump_clock) -> None:
    dying = [Engine(faults=EngineFaults(die_at_generate=2)) for _ in range(6)]
    slot = Slot(*dying, restarts_max=1)
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        for _ in dying:
            await proved(keeper, 0)
            await keeper.generate([lease()])
            with pytest.raises(EngineError):
                await keeper.generate([lease()])
        await proved(keeper, 0)
        assert len(slot.engines) == 7


async def test_an_engine_that_proves_its_weights_and_fails_at_all_work_is_given_up(
    autojump_clock,
) -> None:
    dying = [Engine(faults=EngineFaults(die_at_generate=1)) for _ in range(9)]
    slot = Slot(*dying, restarts_max=2)
    with pytest.RaisesGroup(pytest.RaisesExc(EngineError, match="SIGKILL")):
        async with slot.running() as keeper:
            keeper.offer(weights(0))
            while True:
                await proved(keeper, 0)
                with pytest.raises(EngineError):
                    await keeper.generate([lease()])
    assert len(slot.engines) == 3
    assert "SIGKILL" in str(slot.keeper.failure)


async def test_an_engine_that_had_no_work_but_a_long_life_is_no_failure(autojump_clock) -> None:
    slot = Slot(*(Engine() for _ in range(5)), restarts_max=1)
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        for life in range(5):
            await proved(keeper, 0)
            await trio.sleep(HEALTHY_S + 1.0)
            slot.engines[life].kill()
            with pytest.raises(EngineError):
                await keeper.generate([lease()])
        await proved(keeper, 0)


@pytest.mark.parametrize(
    "refusal",
    [
        ChildError("engine", "EngineError: the layout is not this model's", raised="EngineError"),
        ChildError("engine", "ModuleNotFoundError: transformers", raised="ModuleNotFoundError"),
        ConfigError("engine.dtype", "'int3' is none of float32, bfloat16"),
    ],
)
async def test_an_engine_that_will_never_come_up_is_not_tried_again(
    autojump_clock, refusal: Exception
) -> None:
    slot = Slot(Engine(refuses=refusal))
    with pytest.raises(type(refusal), match=str(refusal)):
        await slot.keeper.run()
    assert len(slot.engines) == 1
    assert slot.engines[0].closed
    assert trio.current_time() == 0.0


async def test_an_engine_that_raises_in_its_start_for_want_of_memory_is_tried_again(
    autojump_clock,
) -> None:
    error = ChildError("engine", "OutOfMemoryError: CUDA", raised="OutOfMemoryError")
    slot = Slot(Engine(refuses=error))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        assert len(slot.engines) == 2


async def test_an_engine_that_starts_for_an_hour_is_waited_for(autojump_clock) -> None:
    slot = Slot(Engine(start_s=3600.0))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        assert trio.current_time() == pytest.approx(3600.0)
        assert slot.lost() == []


async def test_rubbish_is_not_handed_on_and_the_engine_is_replaced(autojump_clock) -> None:
    slot = Slot(Engine(lies=True))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        with pytest.raises(EngineError, match="answered 1 of 2 leases"):
            await keeper.generate([lease("a"), lease("b")])
        await proved(keeper, 0)
        assert len(await keeper.generate([lease("a"), lease("b")])) == 2
        assert [engine.closed for engine in slot.engines] == [True, False]
        assert keeper.tokens_generated > 0


async def test_a_lease_that_the_engine_cannot_answer_is_refused_alone(autojump_clock) -> None:
    slot = Slot(Engine())
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        odd = msgspec.structs.replace(lease("odd"), seeds=[1])
        answers = await keeper.generate([odd, lease("fine")])
        assert [len(answer.samples) for answer in answers] == [0, 2]
        (refused,) = slot.journal.named("lease.refused")
        assert refused.fields == {"lease": "odd", "detail": "asks for nothing"}
        assert len(slot.engines) == 1


@pytest.mark.parametrize(
    ("names", "wanted_s"),
    [("a", BATCH_S_MIN + SLOWER * 0.5 * 8), ("abc", 300.0)],
    ids=["by the engine's own pace", "by the settings, as one lease tells nothing of three"],
)
async def test_a_hang_is_told_by_the_pace_of_such_batches(
    autojump_clock, names: str, wanted_s: float
) -> None:
    slot = Slot(Engine(seconds_per_token=0.5, faults=EngineFaults(hang_at_generate=3)))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        for _ in range(2):
            await keeper.generate([lease()])
        began = trio.current_time()
        with pytest.raises(EngineError, match="did not finish"):
            await keeper.generate([lease(name) for name in names])
        assert trio.current_time() - began == pytest.approx(wanted_s, abs=0.1)


async def test_an_engine_whose_batch_was_cut_off_is_not_called_proved(autojump_clock) -> None:
    slot = Slot(Engine(seconds_per_token=1.0), Engine())
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        with trio.move_on_after(2.0):  # as when the membership ends in the middle of a batch
            await keeper.generate([lease()])
        assert keeper.version is None
        await proved(keeper, 0)
        assert len(slot.engines) == 2
        assert len(await keeper.generate([lease()])) == 1


async def test_before_its_pace_is_known_an_engine_has_the_time_of_the_settings(
    autojump_clock,
) -> None:
    slot = Slot(Engine(faults=EngineFaults(hang_at_generate=1)))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        began = trio.current_time()
        with pytest.raises(EngineError):
            await keeper.generate([lease()])
        assert trio.current_time() - began == pytest.approx(300.0, abs=0.1)


async def test_batches_are_halved_after_a_failure_and_grow_again_with_success(
    autojump_clock,
) -> None:
    slot = Slot(Engine(faults=EngineFaults(die_at_generate=1)))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        assert keeper.leases_at_once(8) == 8
        with pytest.raises(EngineError):
            await keeper.generate([lease(str(n)) for n in range(8)])
        sizes = []
        await proved(keeper, 0)
        for _ in range(6):
            sizes.append(keeper.leases_at_once(64))
            await keeper.generate([lease()])
        assert sizes == [4, 8, 16, 32, 64, 64]


async def test_the_engine_is_closed_when_the_keeper_is_cancelled(autojump_clock) -> None:
    slot = Slot(Engine(start_s=60.0))
    async with slot.running():
        await trio.sleep(1.0)
    assert slot.engines[0].closed


async def test_tokens_and_their_rate_are_measured(autojump_clock) -> None:
    slot = Slot(Engine(seconds_per_token=0.5))
    async with slot.running() as keeper:
        keeper.offer(weights(0))
        await proved(keeper, 0)
        (answer,) = await keeper.generate([lease()])
        tokens = [sample.tokens.length for sample in answer.samples]
        assert keeper.tokens_generated == sum(tokens)
        first = sum(tokens) / (0.5 * max(tokens))
        assert keeper.tokens_per_s == pytest.approx(first, rel=0.01)
        await keeper.generate([lease("two"), lease("three")])
        assert keeper.tokens_generated > sum(tokens)
        assert keeper.tokens_per_s > first
