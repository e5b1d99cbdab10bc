"""An answer's text, as its tokens come. Pure.

A token may be a part of a character, and the first part of a text at which the answer is to stop.
So what is said lags behind what was heard: nothing is said that a later token could take back.
Answers that are given whole go through here as well, so both ways say the same (but for bytes that
are no text, which a tokenizer may show otherwise when it sees them together).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from echo2p2p.net.tokenizer import REPLACEMENT


@dataclass(frozen=True)
class Said:
    """A part of an answer, which follows what was said before."""

    text: str
    tokens: tuple[str, ...]
    """Each by itself; what is no whole character shows as U+FFFD."""
    logprobs: tuple[float, ...]
    """Of the distribution that was sampled from, aligned with ``tokens``."""
    offset: int = 0
    """Characters of all tokens before these, each by itself."""

    def __add__(self, other: Said) -> Said:
        """Return both; ``other`` follows."""
        return Said(
            self.text + other.text,
            self.tokens + other.tokens,
            self.logprobs + other.logprobs,
            self.offset,
        )


class Speech:
    """One answer.

    Args:
        decode: From tokens to text, as a whole.
        stops: Texts before which the answer ends.
        silent: Tokens that are no part of it: those that end it.
        by_token: Whether `Said` names tokens with their log-probs; that takes a look at each.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stops: Sequence[str],
        silent: Collection[int],
        by_token: bool,
    ) -> None:
        self._decode = decode
        self._stops = stops
        self._silent = silent
        self._by_token = by_token
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._starts: list[int] = []
        """Characters that were whole before each token came."""
        self._ends: list[int] = []
        """Characters once each token had become text."""
        self._text = ""
        self._window = 0
        """From here tokens are decoded anew, as text may depend on the token before it."""
        self._whole = 0
        """Tokens that have become text."""
        self._said = 0
        """Characters."""
        self._told = 0
        """Tokens."""
        self._offset = 0
        self.cut = False
        """A stop has come: nothing follows."""

    def hear(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Said:
        """Take what comes next; return what can be said."""
        kept = [place for place, token in enumerate(tokens) if token not in self._silent]
        steps = [[place] for place in kept] if self._by_token else [kept] if kept else []
        for step in steps:
            if not self.cut:
                self._take([tokens[place] for place in step], [logprobs[place] for place in step])
        return self._say(self._held())

    def close(self) -> Said:
        """Return all that is left, half characters too."""
        if not self.cut and self._whole < len(self._tokens):
            self._grow(*self._decoded())
        return self._say(0)

    def _take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self._tokens += tokens
        self._logprobs += logprobs
        self._starts += [len(self._text)] * len(tokens)
        before, now = self._decoded()
        if not now.endswith(REPLACEMENT):
            self._grow(before, now)

    def _decoded(self) -> tuple[str, str]:
        """Return the text from the window on: without the tokens that are no text yet, and with."""
        before = self._decode(self._tokens[self._window : self._whole])
        return before, self._decode(self._tokens[self._window :])

    def _grow(self, before: str, now: str) -> None:
        start = len(self._text)
        self._text += now[len(before) :]
        self._ends += [len(self._text)] * (len(self._tokens) - self._whole)
        self._window, self._whole = self._whole, len(self._tokens)
        cuts = [
            at
            for stop in self._stops
            if (at := self._text.find(stop, max(0, start - len(stop) + 1))) >= 0
        ]
        if cuts:
            self._text, self.cut = self._text[: min(cuts)], True

    def _held(self) -> int:
        """Return how many characters at the end could be the beginning of a stop."""
        if self.cut:
            return 0
        lengths = [
            length
            for stop in self._stops
            for length in range(1, min(len(stop), len(self._text) + 1))
            if self._text.endswith(stop[:length])
        ]
        return max(lengths, default=0)

    def _say(self, held: int) -> Said:
        end = len(self._text) - held
        text, self._said = self._text[self._said : end], max(end, self._said)
        start = self._told
        while self._by_token and self._told < self._whole and self._is_said(self._told, held):
            self._told += 1
        spelt = tuple(self._decode([token]) for token in self._tokens[start : self._told])
        offset, self._offset = self._offset, self._offset + sum(map(len, spelt))
        return Said(text, spelt, tuple(self._logprobs[start : self._told]), offset)

    def _is_said(self, place: int, held: int) -> bool:
        """Whether a token that has become text is said: of one that a stop cuts, a part is."""
        if self.cut:
            return self._starts[place] < len(self._text)
        return self._ends[place] <= len(self._text) - held
