"""Admission against a brute-force simulation of the loop that it is a formula for."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.ids import Step
from echo2p2p.rollouts.admission import age, default_publication_period, room


@dataclass
class Loop:
    """Learner, publications and leases, consumed in the order in which they were admitted."""

    budget: int
    kappa: int
    batch: int
    step: int = 0
    published: int = 0
    """Step of the newest version."""
    waiting: deque[int] = field(default_factory=deque)
    """Step of the version of each admitted trajectory that is not consumed yet."""
    ages: list[int] = field(default_factory=list)

    def room(self, version_step: int, running: int) -> int:
        return room(
            learner_step=Step(self.step),
            queued=len(self.waiting) - running,
            running=running,
            version_step=Step(version_step),
            staleness_budget=self.budget,
            batch=self.batch,
        )

    def learn(self) -> bool:
        """Take a step if a batch waits; publish if it is due."""
        if len(self.waiting) < self.batch:
            return False
        for _ in range(self.batch):
            oldest = Step(self.waiting.popleft())
            self.ages.append(age(learner_step=Step(self.step), oldest_step=oldest))
        self.step += 1
        if self.step % self.kappa == 0:
            self.published = self.step
        return True


@settings(deadline=None)
@given(
    budget=st.integers(0, 5),
    batch=st.integers(1, 4),
    kappa=st.integers(1, 6),
    draw=st.data(),
)
def test_nothing_admitted_can_get_older_than_the_budget(
    budget: int, batch: int, kappa: int, draw: st.DataObject
) -> None:
    loop = Loop(budget, kappa, batch)
    for _ in range(40):
        if draw.draw(st.booleans()):
            # A peer may lag behind the newest publication; how the rest is split is no matter.
            lag = draw.draw(st.integers(0, 2)) * kappa
            running = draw.draw(st.integers(0, len(loop.waiting)))
            free = loop.room(max(0, loop.published - lag), running)
            count = draw.draw(st.integers(0, free))
            loop.waiting.extend([max(0, loop.published - lag)] * count)
        else:
            loop.learn()
    while loop.learn():
        pass
    assert max(loop.ages, default=0) <= budget


@pytest.mark.parametrize("budget", range(6))
@pytest.mark.parametrize("batch", [1, 3])
def test_the_budget_is_used_up_to_the_last_trajectory(budget: int, batch: int) -> None:
    loop = Loop(budget, kappa=1, batch=batch)
    free = loop.room(0, 0)
    assert free == (budget + 1) * batch
    loop.waiting.extend([0] * free)
    while loop.learn():
        pass
    assert max(loop.ages) == budget
    one_more = Loop(budget, kappa=1, batch=batch)
    one_more.waiting.extend([0] * (free + batch))
    while one_more.learn():
        pass
    assert max(one_more.ages) == budget + 1


def test_without_a_budget_each_version_feeds_exactly_one_batch() -> None:
    loop = Loop(budget=0, kappa=1, batch=4)
    for step in range(10):
        assert loop.room(loop.published, 0) == 4
        loop.waiting.extend([loop.published] * 4)
        assert loop.room(loop.published, 4) == 0
        assert loop.learn()
        assert loop.step == step + 1
    assert set(loop.ages) == {0}


@pytest.mark.parametrize("budget", range(6))
def test_the_loop_moves_for_ever_exactly_if_the_period_is_at_most_one_over_the_budget(
    budget: int,
) -> None:
    for kappa in range(1, budget + 4):
        loop = Loop(budget, kappa, batch=2)
        for _ in range(50):
            loop.waiting.extend([loop.published] * loop.room(loop.published, 0))
            loop.learn()
        assert (loop.step == 50) == (kappa <= budget + 1), (budget, kappa)


def test_what_is_dropped_makes_room_again() -> None:
    full = {"version_step": Step(0), "staleness_budget": 0, "batch": 4, "learner_step": Step(0)}
    assert room(queued=2, running=2, **full) == 0
    assert room(queued=1, running=1, **full) == 2


def test_room_is_never_negative_even_for_a_version_that_is_much_too_old() -> None:
    assert (
        room(
            learner_step=Step(100),
            queued=50,
            running=50,
            version_step=Step(0),
            staleness_budget=3,
            batch=8,
        )
        == 0
    )


@pytest.mark.parametrize(("budget", "kappa"), [(0, 1), (1, 1), (2, 1), (3, 2), (6, 5)])
def test_the_default_period_never_deadlocks(budget: int, kappa: int) -> None:
    assert default_publication_period(budget) == kappa
    assert kappa <= budget + 1
