"""The port of a task worker: episodes opened, stepped and scored somewhere else.

The real one is a child process (`coordinator.task_client`), because a task is somebody's own
code: it may be slow, hang or crash. A worker keeps nothing between calls; an episode is its item's
seed and the answers so far, so whatever was scored by a worker that died is scored again by the
next one, with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from echo2p2p.tasks.base import Prompt, Verdict


class Tokenizer(Protocol):
    """Text to the model's tokens and back."""

    vocab_size: int
    """Of the model: ids below this may be sampled, known to the tokenizer or not."""
    stop_ids: tuple[int, ...]
    """Any of these ends an answer."""
    positions_max: int | None
    """Longest sequence of the model; ``None``: unknown."""

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, BOS included if the model wants one."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; unknown and special tokens must show in it."""
        ...


@dataclass(frozen=True)
class TaskSetup:
    """What a worker needs, sent once."""

    model_dir: Path
    """Hugging Face folder, for its tokenizer."""
    task: str
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskInfo:
    """What a started worker says of task and tokenizer."""

    vocab_size: int
    stop_ids: tuple[int, ...]
    turns_max: int
    positions_max: int | None
    """Prompt and answer together may have this many tokens; ``None``: unknown."""


@dataclass(frozen=True)
class Opening:
    """The first prompt of an item."""

    seed: int
    item_id: str
    prompt: NDArray[np.uint32]
    """``[n] uint32``."""
    player: int


@dataclass(frozen=True)
class Turn:
    """One answer of the model."""

    tokens: NDArray[np.uint32]
    """``[n] uint32``, the stop token included if there was one."""
    finish: Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class Next:
    """The episode goes on with this prompt."""

    prompt: NDArray[np.uint32]
    """``[n] uint32``: all that the model sees, not only what is new."""
    player: int


@dataclass(frozen=True)
class Done:
    """The episode is over."""

    verdict: Verdict


@dataclass(frozen=True)
class Failed:
    """The task's own code failed on this item; mask the episode, it says nothing of the model."""

    detail: str
    """One line for a person."""


class TaskWorker(Protocol):
    """Runs one task. Calls are made one at a time, except `close`."""

    async def start(self, setup: TaskSetup) -> TaskInfo:
        """Bring the worker up.

        Raises:
            ConfigError: No such task or option, or no usable tokenizer.
            ChildError: It did not come up.
        """
        ...

    async def open(self, seeds: Sequence[int]) -> list[Opening | Failed]:
        """Return the first prompt of each item, in the order of the seeds.

        Raises:
            ChildError: The worker is gone or hung: close it, start another, ask again.
        """
        ...

    async def score(
        self, episodes: Sequence[tuple[int, Sequence[Turn]]]
    ) -> list[Next | Done | Failed]:
        """Step each episode, given as its item's seed and all turns so far (at least one).

        Raises:
            ChildError: The worker is gone or hung: close it, start another, ask again, with the
                episodes one by one to find the culprit.
        """
        ...

    async def close(self) -> None:
        """End it, within seconds, whatever it is doing. Idempotent."""
        ...
