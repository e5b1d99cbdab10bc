"""Episodes stepped and scored, from seeds and tokens; keeps nothing between calls.

Sits inside a task worker between the task (text) and the run (token ids). Every call re-creates
the episode from its item's seed and the answers so far, so that a restart, a retry or another
worker gives the same result. The task is somebody's own code: its exceptions and its nonsense
(rewards that are not numbers, episodes that never end) become `Failed`, one episode at a time.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from coordinator.task_port import Done, Failed, Next, Opening, TaskInfo, Tokenizer, Turn
from echo2p2p.errors import LocalProtocolError
from echo2p2p.tasks.base import Episode, Prompt, Task, Verdict

T = TypeVar("T")


class TaskDesk:
    """One task and the model's tokenizer.

    Args:
        task: Its methods may raise anything.
        tokenizer: As the model wants it.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer) -> None:
        self._task = task
        self._tokenizer = tokenizer

    def info(self) -> TaskInfo:
        """Return what the run must know of task and tokenizer."""
        return TaskInfo(
            vocab_size=self._tokenizer.vocab_size,
            stop_ids=self._tokenizer.stop_ids,
            turns_max=self._task.turns_max,
            positions_max=self._tokenizer.positions_max,
        )

    def open(self, seeds: Sequence[int]) -> list[Opening | Failed]:
        """Return the first prompt of each item."""
        return [_guarded(partial(self._open, seed)) for seed in seeds]

    def _open(self, seed: int) -> Opening | Failed:
        item = self._task.item(seed)
        prompt = self._task.prompt(Episode(item=item))
        if prompt is None:
            return Failed(f"item {item.item_id} is over before its first turn")
        following = self._next(prompt)
        if isinstance(following, Failed):
            return following
        return Opening(
            seed=seed, item_id=item.item_id, prompt=following.prompt, player=following.player
        )

    def advance(self, seed: int, turns: Sequence[Turn]) -> Next | Done | Failed:
        """Step one episode.

        Args:
            seed: Of its item.
            turns: All answers so far, at least one.
        """
        if not turns:
            raise LocalProtocolError("an episode without a turn is opened, not advanced")
        return _guarded(partial(self._advance, seed, turns))

    def _advance(self, seed: int, turns: Sequence[Turn]) -> Next | Done | Failed:
        if any(turn.finish == "aborted" for turn in turns):
            return Failed("an answer was aborted by its engine")
        episode = Episode(
            item=self._task.item(seed),
            answers=tuple(self._text(turn) for turn in turns),
            truncated=turns[-1].finish == "length",
        )
        prompt = self._task.prompt(episode)
        if prompt is None:
            return _checked(self._task.verdict(episode), len(turns))
        if len(turns) >= self._task.turns_max:
            return Failed(f"the task asks on after its {self._task.turns_max} turns")
        return self._next(prompt)

    def _next(self, prompt: Prompt) -> Next | Failed:
        tokens = np.asarray(self._tokenizer.encode(prompt), dtype=np.uint32)
        limit = self._tokenizer.positions_max
        if tokens.size == 0:
            return Failed("the prompt is empty")
        if limit is not None and tokens.size >= limit:
            return Failed(f"a prompt of {tokens.size} tokens; the model takes {limit} in all")
        return Next(prompt=tokens, player=prompt.player)

    def _text(self, turn: Turn) -> str:
        tokens = [int(token) for token in turn.tokens]
        if turn.finish == "stop" and tokens and tokens[-1] in self._tokenizer.stop_ids:
            del tokens[-1]
        return self._tokenizer.decode(tokens)


def _checked(verdict: Verdict, turns: int) -> Done | Failed:
    """Return the verdict in plain floats, or what is wrong with it."""
    rewards = tuple(float(reward) for reward in verdict.rewards)
    if not rewards or not all(map(math.isfinite, rewards)):
        return Failed(f"rewards are {rewards}")
    credit = None
    if verdict.credit is not None:
        credit = tuple(float(weight) for weight in verdict.credit)
        if len(credit) != turns or not all(map(math.isfinite, credit)):
            return Failed(f"credit is {credit} for {turns} turns")
    return Done(Verdict(rewards=rewards, credit=credit, masked=bool(verdict.masked)))


def _guarded(work: Callable[[], T]) -> T | Failed:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - the task is the user's code
        traceback.print_exc(file=sys.stderr)
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        return Failed(detail[:300])
