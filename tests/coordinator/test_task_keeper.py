"""A task worker that dies: who asked gets answers, the culprit is found, and patience ends."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from coordinator.task_keeper import (
    BACK_OFF_S,
    FAILURES_MAX,
    LOSS_WEIGHT,
    PATIENCE_S,
    TaskKeeper,
)
from coordinator.task_port import Done, Failed, Next, Opening, TaskInfo, TaskSetup, Turn
from echo2p2p.errors import ChildError, ConfigError
from echo2p2p.testing.journal import TraceJournal
from scenarios.parts import InlineTaskWorker

SETUP = TaskSetup(Path("model"), "sort_digits")
POISON = 666


class Worker(InlineTaskWorker):
    """Dies of one item, and notes what happens to it."""

    def __init__(self, *, poison: int | None = POISON, refuses: Exception | None = None) -> None:
        super().__init__(call_s=0.01)
        self.poison = poison
        self.refuses = refuses
        self.closed = False
        self.asked: list[list[int]] = []

    async def start(self, setup: TaskSetup) -> TaskInfo:
        """Refuse to start, or start."""
        if self.refuses is not None:
            await trio.sleep(0.01)
            raise self.refuses
        return await super().start(setup)

    async def open(self, seeds: Sequence[int]) -> list[Opening | Failed]:
        """Die if the poison is among them."""
        self._look(list(seeds))
        return await super().open(seeds)

    async def score(
        self, episodes: Sequence[tuple[int, Sequence[Turn]]]
    ) -> list[Next | Done | Failed]:
        """Die if the poison is among them."""
        self._look([seed for seed, _ in episodes])
        return await super().score(episodes)

    def _look(self, seeds: list[int]) -> None:
        self.asked.append(seeds)
        if self.poison in seeds:
            self.kill()

    async def close(self) -> None:
        """Close in two steps, so that a cancelled close shows."""
        await super().close()
        self.closed = True


class Factory:
    """Makes workers and remembers them; the first ones as given, then good ones."""

    def __init__(self, *first: Worker) -> None:
        self.made: list[Worker] = []
        self._first = list(first)

    def __call__(self) -> Worker:
        self.made.append(self._first.pop(0) if self._first else Worker())
        return self.made[-1]


def keeper_of(factory: Factory, journal: TraceJournal | None = None) -> TaskKeeper:
    return TaskKeeper(make_worker=factory, setup=SETUP, journal=journal or TraceJournal())


async def answers(seeds: Sequence[int]) -> list[tuple[int, list[Turn]]]:
    """Return right answers to these items."""
    worker = InlineTaskWorker()
    await worker.start(SETUP)
    episodes = []
    for opening in await worker.open(seeds):
        assert isinstance(opening, Opening)
        tokens = opening.prompt[:-1].copy()
        tokens[:-1] = sorted(opening.prompt[1:-1])
        tokens[-1] = 2
        episodes.append((opening.seed, [Turn(tokens, "stop")]))
    return episodes


async def test_while_all_is_well_one_worker_answers_everything_in_order(autojump_clock) -> None:
    factory = Factory()
    keeper = keeper_of(factory)
    assert (await keeper.start()).vocab_size == 64
    opened = await keeper.open([3, 1, 2])
    assert [item.seed for item in opened] == [3, 1, 2]
    scored = await keeper.score(await answers([3, 1]))
    assert [item.verdict.rewards for item in scored] == [(1.0,), (1.0,)]
    assert len(factory.made) == 1
    await keeper.close()
    await keeper.close()
    assert factory.made[0].closed


async def test_the_item_that_kills_the_worker_fails_alone(autojump_clock) -> None:
    journal, factory = TraceJournal(), Factory()
    keeper = keeper_of(factory, journal)
    await keeper.start()
    opened = await keeper.open([1, POISON, 2])
    assert [type(item) for item in opened] == [Opening, Failed, Opening]
    assert [item.seed for item in opened if isinstance(item, Opening)] == [1, 2]
    # The whole batch killed the first, the item alone the second; the third is alive.
    assert [worker.asked for worker in factory.made] == [
        [[1, POISON, 2]],
        [[1], [POISON]],
        [[2]],
    ]
    assert [worker.closed for worker in factory.made] == [True, True, False]
    assert len(journal.named("task_worker.lost")) == 2
    await keeper.open([7])
    assert len(factory.made) == 3


async def test_the_episode_that_kills_the_worker_fails_alone(autojump_clock) -> None:
    factory = Factory()
    keeper = keeper_of(factory)
    await keeper.start()
    scored = await keeper.score(await answers([1, POISON, 2, 3]))
    assert [type(item) for item in scored] == [Done, Failed, Done, Done]
    assert "SIGKILL" in scored[1].detail
    assert len(factory.made) == 3


async def test_a_worker_that_was_killed_while_idle_costs_nobody_anything(autojump_clock) -> None:
    factory = Factory()
    keeper = keeper_of(factory)
    await keeper.start()
    factory.made[0].kill()
    opened = await keeper.open([1, 2])
    assert [type(item) for item in opened] == [Opening, Opening]


async def test_a_worker_that_comes_up_late_is_waited_for(autojump_clock) -> None:
    bad = [Worker(refuses=ChildError("task worker", "not yet")) for _ in BACK_OFF_S]
    factory = Factory(Worker(), *bad)
    keeper = keeper_of(factory)
    await keeper.start()
    factory.made[0].kill()
    began = trio.current_time()
    assert len(await keeper.open([1])) == 1
    assert trio.current_time() - began == pytest.approx(sum(BACK_OFF_S), abs=0.2)
    assert all(worker.closed for worker in factory.made[:-1])


async def test_patience_starts_afresh_after_each_success(autojump_clock) -> None:
    def bad() -> Worker:
        return Worker(refuses=ChildError("task worker", "not yet"))

    factory = Factory(Worker(), bad(), bad(), bad(), Worker(), bad(), bad(), bad(), Worker())
    keeper = keeper_of(factory)
    await keeper.start()
    for place in (0, 4):
        factory.made[place].kill()
        assert isinstance((await keeper.open([1]))[0], Opening)
    assert len(factory.made) == 9


async def test_a_worker_that_never_comes_up_is_given_up_after_bounded_tries(
    autojump_clock,
) -> None:
    bad = [Worker(refuses=ChildError("task worker", "no such file")) for _ in range(50)]
    factory = Factory(Worker(), *bad)
    keeper = keeper_of(factory)
    await keeper.start()
    factory.made[0].kill()
    with pytest.raises(ChildError, match="no such file"):
        await keeper.score(await answers([1]))
    assert len(factory.made) == 1 + len(BACK_OFF_S) + 1
    assert all(worker.closed for worker in factory.made)
    with pytest.raises(ChildError, match="no such file"):
        await keeper.open([1])


async def test_a_first_start_that_fails_says_so_at_once(autojump_clock) -> None:
    for error in (ConfigError("task.name", "no such task"), ChildError("task worker", "died")):
        factory = Factory(Worker(refuses=error))
        keeper = keeper_of(factory)
        with pytest.raises(type(error)):
            await keeper.start()
        await keeper.close()
        assert factory.made[0].closed


@pytest.mark.parametrize("end", ["cancelled", "refused"])
async def test_a_start_that_ends_in_another_way_leaves_no_worker_behind(
    autojump_clock, end: str
) -> None:
    refusal = ConfigError("model.path", "the folder is gone") if end == "refused" else None
    factory = Factory(Worker(), Worker(refuses=refusal))
    keeper = keeper_of(factory)
    await keeper.start()
    factory.made[0].kill()
    if refusal is not None:
        with pytest.raises(ConfigError):
            await keeper.open([1])
    else:
        with trio.move_on_after(0.005) as scope:
            await keeper.open([1])
        assert scope.cancelled_caught
    assert len(factory.made) == 2
    assert all(worker.closed for worker in factory.made)
    assert isinstance((await keeper.open([1]))[0], Opening)


async def test_a_keeper_that_never_started_can_be_closed(autojump_clock) -> None:
    factory = Factory()
    await keeper_of(factory).close()
    assert factory.made == []


async def test_calls_are_made_one_at_a_time(autojump_clock) -> None:
    factory = Factory()
    keeper = keeper_of(factory)
    await keeper.start()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for seed in range(5):
            nursery.start_soon(keeper.open, [seed])
    assert trio.current_time() - began == pytest.approx(0.05)
    assert sorted(factory.made[0].asked) == [[seed] for seed in range(5)]


# --- a task that is good for nothing --------------------------------------------------------------


class Failing(InlineTaskWorker):
    """Whose task raises on every item but the good ones."""

    def __init__(self, *good: int) -> None:
        super().__init__()
        self._good = good

    async def open(self, seeds: Sequence[int]) -> list[Opening | Failed]:
        """Fail, as the desk says it."""
        opened = await super().open(seeds)
        return [
            item if seed in self._good else Failed("ValueError: no such book")
            for seed, item in zip(seeds, opened, strict=True)
        ]


async def test_a_task_that_fails_on_every_item_is_given_up_after_a_while(autojump_clock) -> None:
    keeper = TaskKeeper(make_worker=Failing, setup=SETUP, journal=TraceJournal())
    await keeper.start()

    async def go_on() -> None:
        while trio.current_time() < 10 * PATIENCE_S:
            assert all(isinstance(item, Failed) for item in await keeper.open(range(8)))
            await trio.sleep(1.0)

    with pytest.raises(ChildError, match=r"no prompt for any item in 12\d s.*no such book"):
        await go_on()
    assert trio.current_time() == pytest.approx(PATIENCE_S, abs=2.0)


async def test_many_failures_at_once_or_a_few_over_a_long_time_are_borne(autojump_clock) -> None:
    keeper = TaskKeeper(make_worker=Failing, setup=SETUP, journal=TraceJournal())
    await keeper.start()
    await keeper.open(range(10 * FAILURES_MAX))
    few = TaskKeeper(make_worker=Failing, setup=SETUP, journal=TraceJournal())
    await few.start()
    for _ in range(FAILURES_MAX - 1):
        await few.open([1])
        await trio.sleep(PATIENCE_S)


async def test_one_good_item_in_between_makes_patience_with_the_task_start_afresh(
    autojump_clock,
) -> None:
    keeper = TaskKeeper(make_worker=lambda: Failing(7), setup=SETUP, journal=TraceJournal())
    await keeper.start()
    for _ in range(10):
        await keeper.open([*range(100, 100 + FAILURES_MAX), 7])
        await trio.sleep(PATIENCE_S / 2)


async def test_items_that_kill_their_worker_use_patience_up_sooner(autojump_clock) -> None:
    class Killing(Worker):
        def _look(self, seeds: list[int]) -> None:
            self.asked.append(seeds)
            self.kill()

    factory = Factory(*(Killing() for _ in range(200)))
    keeper = keeper_of(factory)
    await keeper.start()

    async def go_on() -> None:
        for _ in range(FAILURES_MAX // LOSS_WEIGHT + 1):
            await keeper.score(await answers([1]))
            await trio.sleep(PATIENCE_S / 4)

    with pytest.raises(ChildError, match=r"no reward for any answer.*SIGKILL"):
        await go_on()
