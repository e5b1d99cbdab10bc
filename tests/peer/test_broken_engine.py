"""Engines that break, as real processes under the real keeper; and a peer that gives up."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from echo2p2p.errors import EngineError
from echo2p2p.ids import Version
from echo2p2p.net.memory import FileMemory
from echo2p2p.testing.clock import run_virtual
from echo2p2p.testing.journal import TraceJournal
from echo2p2p.testing.system import InlineOffload
from echo2p2p.weights.state import state_digest
from peer.engine.base import EngineSetup
from peer.engine.client import EngineProcess
from peer.keeper import EngineKeeper, WeightState
from scenarios import first_light
from scenarios import world as world_module
from scenarios.bad_engine import SLOW_S
from scenarios.fake_engine import EngineFaults, FakeEngine
from scenarios.middle import LAYOUT
from scenarios.middle import loose_lease as lease
from scenarios.world import World

SILENCE_S = 0.6 * SLOW_S


class Slot:
    """A keeper of real processes, which misbehave as ordered, one after the other."""

    def __init__(self, folder: Path, *how: str, restarts_max: int = 3) -> None:
        patience_s = 2.0 if "hang" in how else 60.0  # nobody else should feel a busy machine
        self.journal = TraceJournal()
        self._how = [*how]
        self._folder = folder
        self._memory = FileMemory(folder / "memory")
        self.lives = 0
        self.keeper = EngineKeeper(
            make_engine=self._make,
            setup=EngineSetup(layout=LAYOUT.table, model_config='{"vocab_size": 64}'),
            restarts_max=restarts_max,
            generate_timeout_s=patience_s,
            journal=self.journal,
            offload=InlineOffload(),
        )

    def _make(self) -> EngineProcess:
        self.lives += 1
        return EngineProcess(
            command=("scenarios.bad_engine", self._how.pop(0) if self._how else "good"),
            start_silence_s=SILENCE_S,
            memory_max_bytes=300_000_000,
            log_file=self._folder / "engine.log",
        )

    def lost(self) -> list[str]:
        return [str(entry.fields["detail"]) for entry in self.journal.named("engine.lost")]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EngineKeeper]:
        state = self._memory.allocate("weights", LAYOUT.total_bytes)
        state.view[:] = b"\x01" * LAYOUT.total_bytes
        digest = state_digest(LAYOUT, bytes(state.view))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.keeper.run)
            self.keeper.offer(WeightState(Version(0), digest, state))
            with trio.fail_after(60):
                yield self.keeper
            nursery.cancel_scope.cancel()
        state.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("hang", "engine: did not finish 'generate' within 2.0 s; its last words: hang with 1"),
        ("eat", "engine: was killed during 'generate': it used more than the 300 MB of memory"),
        ("rubbish", "answer to lease first is no good: not_finite, sample 0"),
        ("die", "engine: died during 'generate' with exit code 3; its last words: die with 1"),
    ],
)
async def test_a_broken_engine_is_named_in_a_line_and_the_next_one_works(tmp_path, how, says):
    slot = Slot(tmp_path, how)
    async with slot.running() as keeper:
        await keeper.wait_version()
        with pytest.raises(EngineError):
            await keeper.generate([lease("first")])
        await keeper.wait_version()
        (answer,) = await keeper.generate([lease("second")])
        assert len(answer.samples) == 2
    (line,) = slot.lost()
    assert says in line
    assert "\n" not in line
    assert slot.lives == 2
    assert f"{how} with 1 leases" in (tmp_path / "engine.log").read_text()


@pytest.mark.slow
async def test_an_engine_that_starts_slowly_and_silently_is_waited_for(tmp_path):
    slot = Slot(tmp_path, "slow")
    async with slot.running() as keeper:
        await keeper.wait_version()
        assert slot.lost() == []
        assert slot.lives == 1


@pytest.mark.slow
async def test_an_engine_that_says_that_it_is_of_no_use_is_not_started_again(tmp_path):
    slot = Slot(tmp_path, *["refuse"] * 5)
    with pytest.raises(EngineError, match="the layout is not this model's"), trio.fail_after(60):
        await slot.keeper.run()
    assert slot.lives == 1


def test_a_peer_whose_engine_cannot_be_kept_alive_says_so_to_the_coordinator_and_ends(
    monkeypatch,
) -> None:
    def dying(**options: float) -> FakeEngine:
        return FakeEngine(**options, faults=EngineFaults(die_at_generate=1))

    monkeypatch.setattr(world_module, "FakeEngine", dying)
    full = first_light.make_world(3).spec
    world = World(replace(full, peers=full.peers[:1]), seed=3)
    with pytest.RaisesGroup(
        pytest.RaisesExc(EngineError, match="engine: died of SIGKILL"), flatten_subgroups=True
    ):
        run_virtual(world.run, seed=3)
    (left,) = world.trace.named("peer.left")
    assert left.fields["reason"] == "its engine cannot be kept alive: engine: died of SIGKILL"
    lost = world.trace.named("engine.lost")
    assert [entry.fields["restarting"] for entry in lost] == [True] * 5 + [False]
    assert world.breaches == []
