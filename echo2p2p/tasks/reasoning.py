"""Tasks of the package ``reasoning-gym``: its questions, in the model's chat template, its scorer.

``options.dataset`` names one of its datasets (``chain_sum``, ``gsm_symbolic``, ...); ``system`` is
the system message, ``answer`` says what of the model's text is scored; every other option goes to
the dataset's own configuration (``max_terms = 2``). The package is an extra and is imported when
the task is made, which is in the task worker: a second of CPU that the network process is spared.

Training and held-out items are apart twice: by seed (`echo2p2p.tasks.base.HELD_OUT_SEED`), and by
question, as a small dataset has few and a held-out score of questions that were trained on says
nothing. A question's digest decides on which side it is, and a seed whose question is on the other
side goes on to the next that is on its own.

Refused: partial scores. Some scorers give a part for an answer that only contains the right one,
and a model soon learns to say many things; so below `FULL` is 0, unless ``partial`` is set.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from blake3 import blake3

from echo2p2p.errors import ConfigError, LocalProtocolError
from echo2p2p.tasks.base import HELD_OUT_SEED, Episode, Item, Message, Prompt, Verdict

HELD_OUT_SHARE: Final = 8
"""One question of so many is held out."""
DRAWS_MAX: Final = 10_000
"""Seeds tried until a question is on the right side; a dataset that needs more has too few."""
FULL: Final = 1.0
SEED_BITS: Final = 64
PACKAGE: Final = "reasoning_gym"
OWN_OPTIONS: Final = ("dataset", "system", "answer", "partial")
ANSWERS: Final = ("whole", "tag", "number")
"""What is scored: all of the text, what ``<answer>...</answer>`` encloses, the last number."""
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class _Dataset(Protocol):
    """What is used of ``reasoning_gym.dataset.ProceduralDataset``."""

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


class ReasoningGym:
    """One turn; the reward is the dataset's score of the answer.

    An answer that ran into its token limit is scored as it is, and so is 0 where the end is
    missing that makes it right.

    Args:
        options: See the module.

    Raises:
        ConfigError: The package is not installed, or it does not take the options.
    """

    name = "reasoning_gym"
    turns_max = 1

    def __init__(self, options: Mapping[str, object]) -> None:
        check_options(options)
        try:
            self._package: Any = importlib.import_module(PACKAGE)
        except ImportError as error:
            raise ConfigError(
                "task.name",
                f"reasoning_gym cannot be imported ({error}): pip install 'echo2p2p[reasoning]'",
            ) from error
        self._dataset_name = str(options["dataset"])
        self._system = str(options.get("system", ""))
        self._answer = str(options.get("answer", ANSWERS[0]))
        self._partial = bool(options.get("partial", False))
        self._arguments = {k: v for k, v in options.items() if k not in OWN_OPTIONS}
        try:
            self._scorer = self._dataset(0)
            self._scorer[0]
        except Exception as error:  # the package raises whatever it stumbles on
            detail = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ConfigError(
                "task.options", f"reasoning_gym refuses {self._dataset_name!r} ({detail})"
            ) from error

    def _dataset(self, seed: int) -> _Dataset:
        dataset: _Dataset = self._package.create_dataset(
            self._dataset_name, seed=seed, size=1, **self._arguments
        )
        return dataset

    def item(self, seed: int) -> Item:
        """Return the first question from this seed on that is on the seed's side.

        Raises:
            ConfigError: The dataset has too few different questions to hold any out.
        """
        wanted = seed >= HELD_OUT_SEED
        rng = random.Random(seed)  # noqa: S311 - items, not secrets
        for _ in range(DRAWS_MAX):
            entry = self._dataset(rng.getrandbits(SEED_BITS))[0]
            if is_held_out(str(entry["question"])) == wanted:
                return Item(item_id=f"{self._dataset_name}-{seed}", data={"entry": entry})
        raise ConfigError(
            "task.options", f"{self._dataset_name} has too few different questions to hold any out"
        )

    def prompt(self, episode: Episode) -> Prompt | None:
        """Ask once."""
        if episode.answers:
            return None
        messages = [Message("user", str(_entry(episode)["question"]))]
        if self._system:
            messages.insert(0, Message("system", self._system))
        return Prompt(messages=tuple(messages))

    def verdict(self, episode: Episode) -> Verdict:
        """Return the dataset's own score."""
        if not episode.answers:
            raise LocalProtocolError("an episode without an answer has no verdict")
        text = self._answer_in(episode.answers[-1])
        score = float(self._scorer.score_answer(text, _entry(episode)))
        return Verdict(rewards=(score if self._partial or score >= FULL else 0.0,))

    def _answer_in(self, text: str) -> str | None:
        if self._answer == "tag":
            found: str | None = self._package.utils.extract_answer(text)
            return found
        if self._answer == "number":
            return next(reversed(_NUMBER.findall(text)), None)
        return text.strip()

    def demonstrations(self, rng: random.Random, count: int) -> Sequence[tuple[Prompt, str]]:
        """Return none: a model that speaks needs no warm start."""
        del rng, count
        return ()


def is_held_out(question: str) -> bool:
    """Return whether this question is never trained on."""
    return blake3(question.encode()).digest(length=1)[0] % HELD_OUT_SHARE == 0


def check_options(options: Mapping[str, object]) -> None:
    """Check what can be checked without importing the package.

    Raises:
        ConfigError: A dataset is not named, or one of our own options has the wrong kind.
    """
    if not isinstance(options.get("dataset"), str) or not options["dataset"]:
        raise ConfigError("task.options.dataset", "name a dataset of reasoning_gym, as chain_sum")
    if not isinstance(options.get("system", ""), str):
        raise ConfigError("task.options.system", "is no text")
    if options.get("answer", ANSWERS[0]) not in ANSWERS:
        raise ConfigError("task.options.answer", f"is none of {', '.join(ANSWERS)}")
    if not isinstance(options.get("partial", False), bool):
        raise ConfigError("task.options.partial", "is neither true nor false")


def _entry(episode: Episode) -> dict[str, Any]:
    entry = episode.item.data["entry"]
    assert isinstance(entry, dict)
    return entry
