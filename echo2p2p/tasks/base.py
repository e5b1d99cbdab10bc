"""What a task is: items from a seed, episodes of turns, a reward when one is over. Pure.

A task runs in task-worker processes at the coordinator, never on a peer: peers see prompts as
token ids and nothing else. Changing the task changes the coordinator's configuration only.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

HELD_OUT_SEED: Final = 1 << 63
"""Seeds from here to 2^64 are of held-out items, on which a run is measured and never trained."""


@dataclass(frozen=True)
class Message:
    """One message of a conversation, as chat templates know it."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Prompt:
    """What the model sees next.

    Either ``text``, tokenised as it is, or ``messages``, put through the model's chat template.
    """

    text: str | None = None
    messages: tuple[Message, ...] = ()
    player: int = 0
    """Which player's turn it is; baselines are keyed by (item, player)."""


@dataclass(frozen=True)
class Item:
    """One problem. ``data`` stays at the coordinator."""

    item_id: str
    data: Mapping[str, object]


@dataclass(frozen=True)
class Episode:
    """An item and the texts that the model has answered so far; a value, never mutated."""

    item: Item
    answers: tuple[str, ...] = ()
    truncated: bool = False
    """The last answer ran into its token limit."""


@dataclass(frozen=True)
class Verdict:
    """The reward of a finished episode, by player."""

    rewards: tuple[float, ...]
    credit: tuple[float, ...] | None = None
    """Weight of each turn in its player's reward; ``None``: all turns alike."""
    masked: bool = False
    """Do not train on this episode (it failed for reasons that are not the model's)."""


class Task(Protocol):
    """Items, episodes and rewards of one kind."""

    name: str
    turns_max: int
    """Longest episode, in model answers."""

    def item(self, seed: int) -> Item:
        """Return the item of this seed: same seed, same item, on any machine.

        Seeds have 64 bits. Those from `HELD_OUT_SEED` on are for measuring: a task with few
        different items should see to it that they are none of those below.
        """
        ...

    def prompt(self, episode: Episode) -> Prompt | None:
        """Return what the model is asked next, or ``None`` when the episode is over."""
        ...

    def verdict(self, episode: Episode) -> Verdict:
        """Return the rewards of an episode for which `prompt` returned ``None``."""
        ...

    def demonstrations(self, rng: random.Random, count: int) -> Sequence[tuple[Prompt, str]]:
        """Return ``count`` prompts with answers for a supervised warm start.

        An empty sequence means that the task has none.
        """
        ...
