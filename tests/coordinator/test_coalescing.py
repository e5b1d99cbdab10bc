"""What comes up while the trainer waits for something else is not forgotten, nor trained late."""

import pytest
import trio

from coordinator.config import RolloutsSection, Settings
from coordinator.held_out import HeldOut
from coordinator.learner.base import LearnerSetup
from coordinator.training import Trainer
from echo2p2p.ids import Step, Version
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.system import SimSharedMemory
from echo2p2p.weights.layout import Layout
from scenarios.fake_learner import FakeLearner
from scenarios.middle import Bench, open_bench, right_answers
from scenarios.parts import MemoryShelf

STEPS = 12


class SlowPublisher:
    """Offers a version at once, and is busy with it for a long time after that."""

    def __init__(self, bench: Bench, busy_s: float) -> None:
        self._bench = bench
        self._busy_s = busy_s
        self.published: list[int] = []
        self.layout: Layout | None = None

    async def publish(self, bits, step, generation, find):
        version = Version(1 + len(self.published))
        self.published.append(step)
        self._bench.state.add_version(version, Step(step))
        await trio.sleep(self._busy_s)


async def generate(bench: Bench) -> None:
    """A peer that follows every version and answers whatever it is given."""
    member = await bench.ready("ann")
    while True:
        bench.beat(member, bench.state.latest)
        for lease in await bench.lease(member, version=bench.state.latest or 0, wait_s=0.5):
            await bench.upload(member, right_answers(lease, member.incarnation))


async def run(trainer: Trainer, bench: Bench, nursery: trio.Nursery) -> None:
    """Run to the end, with one peer; everything of the nursery ends then."""
    nursery.start_soon(bench.intake.run)
    nursery.start_soon(generate, bench)
    with trio.fail_after(5_000):
        await trainer.run()
    nursery.cancel_scope.cancel()


def make_trainer(bench, rollouts, publisher, saved, *, record=lambda record: None):
    settings = Settings.model_validate({"run": {"steps": STEPS}, "rollouts": rollouts})

    async def on_layout(table):
        publisher.layout = Layout.from_table(table)

    return Trainer(
        settings=settings,
        setup=LearnerSetup(model_dir="model", task="sort_digits"),
        make_learner=lambda: FakeLearner(saved, step_s=1.0),
        checkpoints=MemoryShelf(saved),
        memory=SimSharedMemory(),
        book=bench.book,
        state=bench.state,
        intake=bench.intake,
        queue=bench.queue,
        publisher=publisher,
        held_out=HeldOut(
            settings=settings, tasks=None, info=None, book=bench.book, journal=bench.journal
        ),
        journal=bench.journal,
        record=record,
        on_layout=on_layout,
        on_rolled_back=lambda step: None,
        on_start=lambda phase, figures: None,
    )


@pytest.mark.parametrize(("staleness_budget", "period"), [(0, 1), (1, 2), (3, 4)])
async def test_a_publisher_that_stays_busy_never_locks_the_run_up(
    autojump_clock, staleness_budget, period
):
    rollouts = RolloutsSection(
        prompts_per_step=2,
        samples_per_prompt=2,
        staleness_budget=staleness_budget,
        publication_period=period,
        tokens_max=8,
    )
    saved: dict[str, bytes] = {}
    async with open_bench(SimDisk(), rollouts=rollouts) as bench, trio.open_nursery() as nursery:
        publisher = SlowPublisher(bench, busy_s=100.0)
        trainer = make_trainer(bench, rollouts, publisher, saved)
        await run(trainer, bench, nursery)
    assert bench.state.step == STEPS
    assert publisher.published[-1] == STEPS, "the last weights are published in any case"
    assert publisher.published == sorted(set(publisher.published))


async def test_a_group_that_is_scored_while_stale_ones_are_dropped_is_not_trained(
    autojump_clock, monkeypatch
):
    rollouts = RolloutsSection(
        prompts_per_step=2,
        samples_per_prompt=2,
        staleness_budget=2,
        publication_period=2,
        tokens_max=8,
    )
    held = []
    async with open_bench(SimDisk(), rollouts=rollouts) as bench, trio.open_nursery() as nursery:
        add, drop = bench.queue.add, bench.intake.drop

        def hold_two(scored):
            (held.append if len(held) < 2 and bench.state.step == 0 else add)(scored)

        async def drop_slowly(dropped):
            await drop(dropped)
            if dropped and held:
                add(held.pop())

        def let_one_go(record):
            if record.step == 3:
                add(held.pop())

        monkeypatch.setattr(bench.queue, "add", hold_two)
        monkeypatch.setattr(bench.intake, "drop", drop_slowly)
        publisher = SlowPublisher(bench, busy_s=0.0)
        trainer = make_trainer(bench, rollouts, publisher, {}, record=let_one_go)
        await run(trainer, bench, nursery)
    assert bench.state.step == STEPS
    assert held == []
    dropped = bench.journal.named("group.dropped")
    assert [entry.fields["reason"] for entry in dropped] == ["stale", "stale"]
