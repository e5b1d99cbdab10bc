"""A run's score on items that it is never trained on, before the first step and after the last.

The learner answers by itself, greedily (`coordinator.learner.answers`), and the task scores. Items
are the task's own, from seeds of their own half (`echo2p2p.tasks.base.HELD_OUT_SEED`); they follow
from ``run.seed``, so that two runs of one seed are measured on the same. What was found before the
first step is kept in the store: a run that goes on after a restart is compared with its beginning.

Refused: scores outside of 0 to 1, which the interval is not made for; they are told without one.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.book import Book
from coordinator.config import Settings
from coordinator.intervals import CONFIDENCE, Interval, difference_interval, mean_interval
from coordinator.learner.base import Learner
from coordinator.task_keeper import TaskKeeper
from coordinator.task_port import Done, Opening, TaskInfo, Turn
from echo2p2p.ids import Step
from echo2p2p.net.ports import Journal
from echo2p2p.tasks.base import HELD_OUT_SEED

MEASURED: Final = "held_out.measured"
BEFORE: Final = "held_out_before"
"""Key in the store."""
ROUNDS_MAX: Final = 8
"""So many times as many items are looked at to find different ones; then fewer must do."""


class Measured(msgspec.Struct, frozen=True):
    """Scores of the items, by weights of one step."""

    step: int
    scores: list[float]
    """Of those items that had a score."""
    truncated: int
    """Answers that ran into their token limit."""

    def interval(self) -> Interval | None:
        """Return mean and interval; ``None``: no scores, or such as have none."""
        good = self.scores and all(0.0 <= score <= 1.0 for score in self.scores)
        return mean_interval(self.scores) if good else None


class HeldOut:
    """The items and what was found.

    Args:
        settings: Of the run.
        tasks: Opens and scores.
        info: Of the task.
        book: Keeps what was found.
        journal: Told of each measurement.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        tasks: TaskKeeper,
        info: TaskInfo,
        book: Book,
        journal: Journal,
    ) -> None:
        self._settings = settings
        self._tasks = tasks
        self._info = info
        self._book = book
        self._journal = journal
        self._before: Measured | None = None
        self._after: Measured | None = None

    async def before(self, learner: Learner, step: Step) -> None:
        """Measure weights that were not trained yet, or take up what an earlier life found."""
        if not self._settings.held_out.items:
            return
        kept = await self._book.get(BEFORE)
        if kept is not None:
            self._before = msgspec.json.decode(kept, type=Measured)
        elif step == 0:
            self._before = await self._measure(learner, step)
            await self._book.put(BEFORE, msgspec.json.encode(self._before))

    async def after(self, learner: Learner, step: Step) -> None:
        """Measure the weights at the end of the run."""
        if self._settings.held_out.items:
            self._after = await self._measure(learner, step)

    def summary(self) -> dict[str, object] | None:
        """Return what was found, for the run's summary; ``None``: nothing was asked for."""
        if self._before is None and self._after is None:
            return None
        first = self._before and self._before.interval()
        last = self._after and self._after.interval()
        gain = difference_interval(first, last) if first and last else None
        return {
            "confidence": CONFIDENCE,
            "before": _told(self._before) or None,
            "after": _told(self._after) or None,
            "gain": gain and asdict(gain),
        }

    async def _measure(self, learner: Learner, step: Step) -> Measured:
        settings = self._settings
        opened = await self._items()
        room = self._info.positions_max
        longest = max((int(each.prompt.size) for each in opened), default=0)
        tokens_max = settings.rollouts.tokens_max
        if room is not None:
            tokens_max = max(1, min(tokens_max, room - longest))
        answers = await learner.answer(
            [each.prompt for each in opened],
            tokens_max=tokens_max,
            stop_ids=self._info.stop_ids,
        )
        turns = [self._turn(answer) for answer in answers]
        scored = await self._tasks.score(
            [(each.seed, [turn]) for each, turn in zip(opened, turns, strict=True)]
        )
        found = Measured(
            step=step,
            scores=[each.verdict.rewards[0] for each in scored if isinstance(each, Done)],
            truncated=sum(turn.finish == "length" for turn in turns),
        )
        self._journal.event(MEASURED, **{k: v for k, v in _told(found).items() if v is not None})
        return found

    async def _items(self) -> list[Opening]:
        """Return the items, always the same, no two with one prompt: such would count twice."""
        count = self._settings.held_out.items
        rng = random.Random(self._settings.run.seed)  # noqa: S311 - public: never trained on
        found: dict[bytes, Opening] = {}
        for _ in range(ROUNDS_MAX):
            seeds = [HELD_OUT_SEED + rng.getrandbits(63) for _ in range(count)]
            for each in await self._tasks.open(seeds):
                if isinstance(each, Opening):
                    found.setdefault(each.prompt.tobytes(), each)
            if len(found) >= count:
                break
        return list(found.values())[:count]

    def _turn(self, answer: NDArray[np.uint32]) -> Turn:
        stopped = bool(answer.size) and int(answer[-1]) in self._info.stop_ids
        return Turn(tokens=answer, finish="stop" if stopped else "length")


def _told(found: Measured | None) -> dict[str, object]:
    if found is None:
        return {}
    interval = found.interval()
    return {
        "step": found.step,
        "items": len(found.scores),
        "truncated": found.truncated,
        "score": sum(found.scores) / len(found.scores) if found.scores else None,
        "low": interval and interval.low,
        "high": interval and interval.high,
    }
