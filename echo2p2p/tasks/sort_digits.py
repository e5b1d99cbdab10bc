"""Sort the digits: ``4132=`` wants ``1234``. The smallest task that reinforcement can teach.

A model without weights learns it on two CPU cores in about a minute. The demonstrations of the
warm start mix three behaviours (ascending, descending, copied), of which only the first is
rewarded: so the start samples about a quarter right, and what is learnt afterwards is learnt from
the reward.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from echo2p2p.errors import LocalProtocolError
from echo2p2p.tasks.base import Episode, Item, Prompt, Verdict

ASCENDING_SHARE: Final = 0.4
DESCENDING_SHARE: Final = 0.3
"""The rest is copied."""


class SortDigits:
    """One turn, reward 1 for the exact answer and 0 for anything else.

    An answer that ran into its token limit is wrong, whatever it says: to end is part of the
    task, and not to end is the model's fault.

    Args:
        length: Digits of an item, with repetition.
    """

    name = "sort_digits"
    turns_max = 1

    def __init__(self, *, length: int = 4) -> None:
        self._length = length

    def item(self, seed: int) -> Item:
        """Return the digits of this seed."""
        rng = random.Random(seed)  # noqa: S311 - items, not secrets
        digits = _draw(rng, self._length)
        return Item(item_id=f"{self.name}-{seed}", data={"digits": digits})

    def prompt(self, episode: Episode) -> Prompt | None:
        """Ask once."""
        if episode.answers:
            return None
        return Prompt(text=f"{episode.item.data['digits']}=")

    def verdict(self, episode: Episode) -> Verdict:
        """Compare with the sorted digits."""
        if not episode.answers:
            raise LocalProtocolError("an episode without an answer has no verdict")
        wanted = "".join(sorted(str(episode.item.data["digits"])))
        right = not episode.truncated and episode.answers[-1] == wanted
        return Verdict(rewards=(1.0 if right else 0.0,))

    def demonstrations(self, rng: random.Random, count: int) -> Sequence[tuple[Prompt, str]]:
        """Return ``count`` prompts with answers of mixed behaviour."""
        return [self._demonstration(rng) for _ in range(count)]

    def _demonstration(self, rng: random.Random) -> tuple[Prompt, str]:
        digits = _draw(rng, self._length)
        choice = rng.random()
        if choice < ASCENDING_SHARE:
            answer = "".join(sorted(digits))
        elif choice < ASCENDING_SHARE + DESCENDING_SHARE:
            answer = "".join(sorted(digits, reverse=True))
        else:
            answer = digits
        return Prompt(text=f"{digits}="), answer


def _draw(rng: random.Random, length: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(length))
