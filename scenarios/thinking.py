"""Sort the digits, after some thinking: the tasks' smallest, with answers of any length.

The virtual world needs answers whose lengths follow a distribution, and rewards that differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from echo2p2p.tasks.base import Episode, Verdict
from echo2p2p.tasks.sort_digits import SortDigits

THOUGHT: Final = "."


class SortAfterThinking(SortDigits):
    """`SortDigits` that lets an answer begin with dots."""

    name = "sort_after_thinking"

    def verdict(self, episode: Episode) -> Verdict:
        """Look at what follows the dots."""
        answers = tuple(answer.lstrip(THOUGHT) for answer in episode.answers)
        return super().verdict(replace(episode, answers=answers))
