"""Held-out scores: measured twice, on different items, and compared with the run's beginning."""

from contextlib import asynccontextmanager

import numpy as np
import pytest

from coordinator.book import Book
from coordinator.config import HeldOutSection, RunSection, Settings
from coordinator.held_out import HeldOut
from coordinator.schema import MIGRATIONS
from coordinator.task_port import Done, Failed, Opening, TaskInfo
from echo2p2p.ids import Step
from echo2p2p.tasks.base import HELD_OUT_SEED, Verdict
from echo2p2p.testing.disk import SimDisk
from echo2p2p.testing.journal import TraceJournal

STOP = 2


class Tasks:
    """Items whose prompt is one of ``prompts`` numbers; right is what ends with a stop."""

    def __init__(self, prompts=1000, reward=1.0):
        self.prompts, self.reward = prompts, reward
        self.opened = []

    async def open(self, seeds):
        self.opened += seeds
        return [
            Failed("odd one")
            if seed % 10 == 3
            else Opening(seed, str(seed), np.array([1, seed % self.prompts], np.uint32), 0)
            for seed in seeds
        ]

    async def score(self, episodes):
        return [
            Done(Verdict((self.reward if turn.finish == "stop" else 0.0,)))
            for _, (turn,) in episodes
        ]


class Learner:
    """Right on prompts below its level; everything else runs on."""

    def __init__(self, level):
        self.level = level

    async def answer(self, prompts, *, tokens_max, stop_ids):
        assert stop_ids == (STOP,)
        return [
            np.array([9, STOP] if prompt[1] < self.level else [9] * tokens_max, np.uint32)
            for prompt in prompts
        ]


@asynccontextmanager
async def opened(tasks, disk, items=40, journal=None):
    async with disk.open_store("run", MIGRATIONS) as store:
        yield HeldOut(
            settings=Settings(run=RunSection(seed=4), held_out=HeldOutSection(items=items)),
            tasks=tasks,
            info=TaskInfo(vocab_size=2000, stop_ids=(STOP,), turns_max=1, positions_max=64),
            book=Book(store),
            journal=journal or TraceJournal(),
        )


async def test_before_and_after_are_of_the_same_held_out_items_and_survive_a_restart(
    autojump_clock,
):
    tasks, disk = Tasks(), SimDisk()
    async with opened(tasks, disk) as held_out:
        await held_out.before(Learner(300), Step(0))
        first = list(tasks.opened)
        assert all(HELD_OUT_SEED <= seed < 1 << 64 for seed in first)
    async with opened(tasks, disk) as held_out:
        await held_out.before(Learner(0), Step(20))  # of the first life; nothing is measured
        assert tasks.opened == first
        await held_out.after(Learner(800), Step(40))
        assert tasks.opened == 2 * first
        found = held_out.summary()
    assert (found["before"]["step"], found["after"]["step"]) == (0, 40)
    assert found["before"]["items"] == found["after"]["items"] == 40
    for side in ("before", "after"):
        one = found[side]
        assert one["low"] < one["score"] < one["high"]
        assert one["truncated"] == round(40 * (1 - one["score"]))
    assert found["gain"]["value"] == pytest.approx(
        found["after"]["score"] - found["before"]["score"]
    )
    assert found["gain"]["low"] > 0


async def test_no_prompt_counts_twice_however_few_there_are(autojump_clock):
    async with opened(Tasks(prompts=7), SimDisk()) as held_out:
        await held_out.before(Learner(7), Step(0))
        assert held_out.summary()["before"]["items"] == 7


async def test_scores_beyond_1_are_told_without_an_interval(autojump_clock):
    async with opened(Tasks(reward=3.0), SimDisk()) as held_out:
        await held_out.before(Learner(1000), Step(0))
        found = held_out.summary()
    assert (found["before"]["score"], found["before"]["low"], found["gain"]) == (3.0, None, None)


async def test_nothing_is_measured_that_was_not_asked_for(autojump_clock):
    tasks = Tasks()
    async with opened(tasks, SimDisk(), items=0) as held_out:
        await held_out.before(Learner(1), Step(0))
        await held_out.after(Learner(1), Step(9))
        assert (held_out.summary(), tasks.opened) == (None, [])
