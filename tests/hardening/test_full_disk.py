"""A disk that is full: one line, exit 1, nothing acknowledged is lost, and with room it goes on."""

from __future__ import annotations

import random
from typing import cast

import pytest
import trio

from coordinator.config import Settings
from coordinator.ledger_rows import balance, recount
from coordinator.schema import MIGRATIONS
from echo2p2p.errors import StoreError
from echo2p2p.net.ports import Rows
from echo2p2p.testing.clock import run_virtual
from scenarios.world import COORDINATOR, PeerSpec, World, WorldSpec

STEPS = 4
SETTINGS = Settings.model_validate(
    {
        "run": {"steps": STEPS, "seed": 3},
        "server": {"host": COORDINATOR},
        "rollouts": {
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "staleness_budget": 1,
            "tokens_max": 8,
        },
        "learner": {"checkpoint_every_steps": 2},
        "weights": {"chunk_bytes_min": 1024},
    }
)
AFTER_ACCEPTANCE = {"dead_generation", "stale", "unused"}
"""What may still become of a trajectory that was acknowledged."""


class Trial:
    """One run whose disk is full from the k-th write on, until the coordinator has ended."""

    def __init__(self, full_from: int | None) -> None:
        peers = (PeerSpec("ann", seconds_per_token=0.02), PeerSpec("bob", seconds_per_token=0.02))
        spec = WorldSpec(settings=SETTINGS, peers=peers, learner_start_s=1.0, learner_step_s=0.5)
        self.world = World(spec, seed=11)
        self.world.disk.full_from = full_from
        self.failures: list[str] = []

    async def play(self) -> None:
        world = self.world
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.network.run)
            for name in ("ann", "bob"):
                nursery.start_soon(world.run_peer, name)
            with trio.fail_after(600.0):
                while world.summary is None:
                    await self.live()
            nursery.cancel_scope.cancel()

    async def live(self) -> None:
        """Run one life of the coordinator; if the disk has ended it, make room."""
        try:
            await self.world.run_coordinator()
        except BaseException as error:
            found = leaves(error)
            if not all(isinstance(leaf, StoreError) for leaf in found):
                raise
            self.failures.append(str(found[0]))
            self.world.disk.full_from, self.world.disk.full = None, False

    async def check(self) -> None:
        """Compare what was acknowledged with what the store has."""
        self.world.disk.full_from = None
        accepted = {entry.fields["lease"] for entry in self.world.trace.named("upload.accepted")}
        async with self.world.disk.open_store("run", MIGRATIONS) as store:
            fates = await store.transact(fates_of)
            assert await store.transact(balance) == await store.transact(recount)
        for lease in accepted:
            fate, reason = fates[cast("str", lease)]
            assert fate in {"queued", "trained"} or reason in AFTER_ACCEPTANCE, (lease, reason)


def fates_of(rows: Rows) -> dict[str, tuple[str, str | None]]:
    found = rows.execute("SELECT substr(lease_id, 1, 8), fate, reason FROM leases").fetchall()
    return {row[0]: (row[1], row[2]) for row in found}


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


def run(full_from: int | None) -> Trial:
    trials = []

    async def story() -> None:
        trials.append(Trial(full_from))
        await trials[0].play()
        await trials[0].check()

    run_virtual(story, seed=2)
    (trial,) = trials
    assert trial.world.breaches == []
    assert trial.world.summary["outcome"] == "finished"
    counts = trial.world.summary["trajectories"]
    assert (counts["balances"], counts["recount_agrees"]) == (True, True)
    assert counts["trained"] == STEPS * SETTINGS.rollouts.batch
    return trial


def test_without_a_full_disk_there_is_one_life():
    trial = run(None)
    assert trial.failures == []
    assert trial.world.disk.writes > 60


class FullShelf(dict[str, bytes]):
    """Checkpoints on a disk that is full from a step on."""

    full_from_step: int | None = 4

    def __setitem__(self, name: str, value: bytes) -> None:
        if self.full_from_step is not None and int(name[-6:]) >= self.full_from_step:
            raise StoreError(f"cannot write {name}: the disk is full: free some space")
        super().__setitem__(name, value)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_no_learner_is_tried_in_vain():
    async def story() -> None:
        trial = Trial(None)
        shelf = trial.world.checkpoints = FullShelf()
        trials.append(trial)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trial.world.network.run)
            for name in ("ann", "bob"):
                nursery.start_soon(trial.world.run_peer, name)
            with trio.fail_after(100.0):
                await trial.live()
                assert trial.world._learner_lives == 1
                assert trial.world.summary is None
                shelf.full_from_step = None
                await trial.live()
            nursery.cancel_scope.cancel()
        await trial.check()

    trials: list[Trial] = []
    run_virtual(story, seed=2)
    (trial,) = trials
    (failure,) = trial.failures
    assert failure == "cannot write checkpoints/step-000004: the disk is full: free some space"
    assert trial.world.summary["outcome"] == "finished"
    assert trial.world.breaches == []


KS = [1, 2, 5, 8, 25, 36, *sorted(random.Random(1).sample(range(9, 70), 5))]
"""At 36 there were two whole batches of unscored uploads, and nothing else would come."""


@pytest.mark.slow
@pytest.mark.parametrize("k", KS)
def test_a_disk_that_is_full_from_the_kth_write_on_ends_the_run_and_with_room_it_goes_on(k: int):
    trial = run(k)
    (failure,) = trial.failures
    assert "the disk is full: free some space" in failure
    assert "\n" not in failure
