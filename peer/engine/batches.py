"""Batches that can stand still between two tokens, for engines' processes.

A batch is a generator: each turn is a token of each sample that is not through, which it tells of
if somebody wants to hear, and its return value is all answers. Between two turns other weights may
be loaded; a `Labels` keeps which version each token was sampled with.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeAlias

from echo2p2p.ids import Version
from echo2p2p.wire.messages import Span
from peer.engine.base import Generated, Grown

Answering: TypeAlias = Generator[Sequence[Grown], None, list[Generated]]


def finish(batch: Answering) -> list[Generated]:
    """Return the answers of a batch that nobody interrupts."""
    while True:
        try:
            next(batch)
        except StopIteration as end:
            answers: list[Generated] = end.value
            return answers


class Labels:
    """With which version each token of a sample was sampled."""

    def __init__(self) -> None:
        self._starts: list[tuple[Version, int]] = []

    def note(self, version: Version, tokens: int) -> None:
        """The token after the first ``tokens`` is sampled with this version, and those after it."""
        if not self._starts or self._starts[-1][0] != version:
            self._starts.append((version, tokens))

    def spans(self, tokens: int) -> list[Span]:
        """Return the versions of all ``tokens``."""
        ends = [*(start for _, start in self._starts[1:]), tokens]
        return [
            Span(version=version, start=start, end=end)
            for (version, start), end in zip(self._starts, ends, strict=True)
        ]
