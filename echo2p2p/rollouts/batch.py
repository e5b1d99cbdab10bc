"""Scored groups wait here, oldest weights first, until a whole batch of them is young enough.

Advantages are those of GRPO (Shao et al. 2024, eq. 3): reward minus the group's mean, divided by
its sample standard deviation plus 1e-4. A group whose rewards are all equal has advantage zero
everywhere: it teaches nothing, is left out of the forward pass, but fills its place in the batch
and its tokens stay in the loss's denominator (refilling it would bias the batch towards hard
prompts and, at S = 0, lock up).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.ids import Step
from echo2p2p.rollouts.admission import age
from echo2p2p.rollouts.trajectory import Group, Reason

STD_EPSILON: Final = 1e-4
"""Keeps a group of nearly equal rewards from dividing by zero; TRL uses the same."""


@dataclass(frozen=True)
class ScoredGroup:
    """A group and its rewards, aligned with its turns."""

    group: Group
    rewards: NDArray[np.float64]
    """``[n_rollouts] float64``, finite."""
    mask: NDArray[np.bool_]
    """``[n_rollouts]``; False: do not train on this rollout (its task failed, not the model)."""


@dataclass(frozen=True)
class Dropped:
    """A group that left the queue untrained."""

    group: Group
    reason: Reason


def advantages(rewards: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return ``[n] float64``: group-normalised rewards, 0 where masked or all alike."""
    result = np.zeros_like(rewards)
    kept = rewards[mask]
    if kept.size > 1 and bool((kept != kept[0]).any()):
        result[mask] = (kept - kept.mean()) / (kept.std(ddof=1) + STD_EPSILON)
    return result


class GroupQueue:
    """Accepted groups, ordered by (step of their oldest token, arrival).

    Bounded by admission: at most (S + κ) batches are ever admitted beyond the learner's step.
    """

    def __init__(self, *, staleness_budget: int) -> None:
        self._staleness_budget = staleness_budget
        self._waiting: list[tuple[Step, ScoredGroup]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, scored: ScoredGroup) -> None:
        """Add one group; it is taken in its turn."""
        # Equal steps stay in the order of their arrival: insort inserts to the right.
        bisect.insort(self._waiting, (scored.group.oldest_step, scored), key=lambda entry: entry[0])

    def drop_stale(self, learner_step: Step) -> list[Dropped]:
        """Remove what is older than S at ``learner_step``; call before `take`."""
        limit = learner_step - self._staleness_budget
        count = bisect.bisect_left(self._waiting, limit, key=lambda entry: entry[0])
        gone, self._waiting = self._waiting[:count], self._waiting[count:]
        return [Dropped(scored.group, Reason.STALE) for _, scored in gone]

    def drop_lost(self, surviving_step: Step) -> list[Dropped]:
        """Remove what was sampled from steps after ``surviving_step``: they no longer exist."""
        gone = [s.group for _, s in self._waiting if s.group.newest_step > surviving_step]
        self._waiting = [e for e in self._waiting if e[1].group.newest_step <= surviving_step]
        return [Dropped(group, Reason.DEAD_GENERATION) for group in gone]

    def take(self, learner_step: Step, groups: int) -> list[ScoredGroup] | None:
        """Return the ``groups`` oldest, or ``None`` while there are fewer.

        Precondition: `drop_stale` was called for this step.
        """
        if len(self._waiting) < groups:
            return None
        taken, self._waiting = self._waiting[:groups], self._waiting[groups:]
        for step, _ in taken:
            assert age(learner_step=learner_step, oldest_step=step) <= self._staleness_budget
        return [scored for _, scored in taken]
