"""An engine without torch, processes or real time: one of the parts of a fake world.

Its answers are a function of weights, prompt and seed, so a scenario can be replayed bit by bit. It
is no model: it sorts its prompt with a fixed probability, so that the sorting task's groups have
rewards that differ, and nothing is ever learnt. It holds to the port and the conformance tests of
the real ones. Durations are `trio.sleep`, virtual under a mock clock. Failures are ordered in
advance (`EngineFaults`) or happen at once (``kill``).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Literal

import numpy as np
import trio
from blake3 import blake3
from numpy.typing import NDArray

from echo2p2p.errors import EngineError
from echo2p2p.ids import Digest, Version
from echo2p2p.limits import MIB
from echo2p2p.net.ports import SharedState
from echo2p2p.weights.layout import Layout, elements_of, flat_bytes
from echo2p2p.weights.state import state_digest
from echo2p2p.weights.touched import Places, digest_selected, touched_parts
from echo2p2p.wire.arrays import from_logprobs, from_tokens, to_logprobs, to_tokens
from echo2p2p.wire.messages import Lease, Sample, Span
from peer.engine.answers import positions_of, vocabulary_of
from peer.engine.base import (
    Between,
    EngineInfo,
    EngineSetup,
    Generated,
    Grown,
    Heard,
    LoadReport,
    Selection,
)
from peer.engine.batches import Labels
from peer.engine.refusal import refusal_of
from peer.touched import Touched
from scenarios.parts import CHARACTERS, FIRST_CHARACTER, Life, Pace

GOLDEN: Final = 0.618033988749895
"""Spreads what follows each other."""
KEPT_BYTES: Final = 16 * MIB
"""A smaller model's bits are kept, so that only what changes need be loaded."""
TOLD_TOKENS: Final = 4
"""Of each sample, before somebody who wants to hear is told again."""
THOUGHT: Final = FIRST_CHARACTER + CHARACTERS.index(".")


@dataclass(frozen=True)
class EngineFaults:
    """What goes wrong, counted in calls from 1; ``None``: never."""

    die_at_generate: int | None = None
    hang_at_generate: int | None = None
    die_at_load: int | None = None
    wrong_weights_at_load: int | None = None
    """One bit differs from what was given: `FakeEngine.prove` tells."""
    wrong_weights_from_load: int | None = None
    """As before, at this load and all after it."""
    skipped_load: int | None = None
    """Nothing is loaded, and nothing said."""


@dataclass(frozen=True)
class Lengths:
    """How many tokens of thinking stand before an answer.

    Attributes:
        low: At least.
        high: At most.
        tail: Most are short and few are long: Pareto with exponent 2 from ``low`` (of which a root
            makes one, as every machine computes it alike); otherwise uniform.
    """

    low: int = 0
    high: int = 0
    tail: bool = False

    def draw(self, rng: random.Random) -> int:
        """Return one length."""
        if self.tail:
            return min(self.high, int(max(1, self.low) / math.sqrt(1.0 - rng.random())))
        return rng.randint(self.low, self.high)


class FakeEngine:
    """An `Engine` whose answers are a function of weights, prompt and seed.

    Args:
        start_s: Until it is up.
        load_s: For any load.
        seconds_per_token: Of a whole batch's longest sample, as batches run side by side.
        skill: Probability that an answer is the sorted prompt.
        timeout_s: When a hanging call is given up.
        faults: What goes wrong.
        lengths: Of the thinking before an answer, for `scenarios.thinking`.
        pace: Of its machine.
    """

    def __init__(
        self,
        *,
        start_s: float = 0.0,
        load_s: float = 0.0,
        seconds_per_token: float = 0.0,
        skill: float = 0.4,
        timeout_s: float = 600.0,
        faults: EngineFaults | None = None,
        lengths: Lengths | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._start_s = start_s
        self._load_s = load_s
        self._seconds_per_token = seconds_per_token
        self._skill = skill
        self._timeout_s = timeout_s
        self._faults = faults or EngineFaults()
        self._lengths = lengths or Lengths()
        self._life = Life("engine", pace)
        self._layout: Layout | None = None
        self._model_config = "{}"
        self._loaded: tuple[Version, Digest] | None = None
        self._bits = bytearray()
        self._stretching: trio.CancelScope | None = None
        self._loads = 0
        self._generates = 0

    def kill(self) -> None:
        """Die now, as by ``kill -9``."""
        self._life.end("died of SIGKILL")

    def hang(self) -> None:
        """Let the next batch never end."""
        self._faults = replace(self._faults, hang_at_generate=self._generates + 1)

    def spoil(self) -> None:
        """Let the next load end with one wrong bit."""
        self._faults = replace(self._faults, wrong_weights_at_load=self._loads + 1)

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """See `Engine`."""
        await self._life.spend(self._start_s)
        self._layout = Layout.from_table(setup.layout)
        self._model_config = setup.model_config
        return EngineInfo(
            kind="fake", device="none", dtype=setup.dtype, memory_bytes=setup.layout.total_bytes
        )

    async def load(
        self, version: Version, state: SharedState, touched: Touched | None = None
    ) -> LoadReport:
        """See `Engine`."""
        self._loads += 1
        before, self._loaded = self._loaded, None
        if self._loads == self._faults.die_at_load:
            self.kill()
        await self._life.spend(self._load_s)
        layout = self._started()
        if len(state.view) != layout.total_bytes:
            raise EngineError(f"a state of {len(state.view)} bytes for {layout.total_bytes}")
        sparse = bool(touched and before and self._bits and touched.base == before[0])
        bits = self._bits if sparse else bytearray(layout.total_bytes)
        if self._loads != self._faults.skipped_load:
            self._copy(bits, state.view, touched.places if sparse and touched else None)
        first_wrong = self._faults.wrong_weights_from_load
        wrong = first_wrong is not None and self._loads >= first_wrong
        if wrong or self._loads == self._faults.wrong_weights_at_load:
            bits[len(bits) // 2] ^= 1
        self._bits = bits if len(bits) <= KEPT_BYTES else bytearray()
        self._loaded = version, state_digest(layout, bits)
        return LoadReport(version=version, seconds=self._load_s, sparse=sparse)

    def _copy(self, bits: bytearray, state: memoryview, places: Places | None) -> None:
        if places is None:
            bits[:] = state
            return
        layout = self._started()
        old, new = flat_bytes(layout, bits, writable=True), flat_bytes(layout, state)
        for part in touched_parts(layout, places):
            tensor = layout.tensors[part.tensor]
            elements_of(old, tensor)[part.elements] = elements_of(new, tensor)[part.elements]

    async def prove(self, selection: Selection | None = None) -> Digest:
        """See `Engine`."""
        await self._life.spend(0)
        digest = self._label()[1]
        if selection is None:
            return digest
        places = selection.touched.places
        return digest_selected(self._started(), self._bits, places, selection.window)

    async def generate(
        self,
        leases: list[Lease],
        *,
        timeout_s: float = inf,
        between: Between | None = None,
        heard: Heard | None = None,
    ) -> list[Generated]:
        """See `Engine`."""
        self._generates += 1
        await self._life.spend(0)
        self._label()
        if self._generates == self._faults.hang_at_generate:
            await self._life.hang(min(timeout_s, self._timeout_s), "generate")
        refusals = [self._refusal(lease) for lease in leases]
        answers = [
            () if refusal else self._answer(lease)
            for lease, refusal in zip(leases, refusals, strict=True)
        ]
        done = 0
        seconds = _longest(answers) * self._seconds_per_token
        if self._generates == self._faults.die_at_generate:
            await self._life.spend(seconds / 2)
            self.kill()
        while done < _longest(answers):
            left = _longest(answers) - done
            tokens, stopped = await self._stretch(left if heard is None else min(TOLD_TOKENS, left))
            if heard is not None:
                heard(self._grown(leases, answers, done, done + tokens))
            done += tokens
            if stopped and done < _longest(answers) and between is not None:
                label = self._label()
                await between()
                if self._label() != label:
                    answers = self._go_on(leases, answers, done)
        seconds = _longest(answers) * self._seconds_per_token
        await self._life.spend(0)
        share = seconds / max(1, len(leases))
        return [
            Generated(lease.lease_id, answer, share, refusal)
            for lease, answer, refusal in zip(leases, answers, refusals, strict=True)
        ]

    def _grown(
        self, leases: list[Lease], answers: list[tuple[Sample, ...]], start: int, end: int
    ) -> list[Grown]:
        """Return these tokens of each sample that has them and was not to be scored."""
        return [
            Grown(
                lease=place,
                sample=number,
                version=self._label()[0],
                tokens=to_tokens(sample.tokens)[start:end].tolist(),
                logprobs=to_logprobs(sample.logprobs)[start:end].tolist(),
            )
            for place, answer in enumerate(answers)
            for number, sample in enumerate(answer)
            if leases[place].forced is None and sample.tokens.length > start
        ]

    async def _stretch(self, tokens: int) -> tuple[int, bool]:
        """Generate until interrupted; return how many tokens of each sample, and if it was."""
        with trio.CancelScope() as self._stretching:
            await self._life.spend(tokens * self._seconds_per_token)
        stopped, self._stretching = self._stretching.cancelled_caught, None
        if not stopped:
            return tokens, False
        left = self._life.left_s / max(1e-9, self._seconds_per_token)
        await self._life.spend(0)
        return min(tokens, int(tokens - left) + 1), True

    def interrupt(self) -> None:
        """See `Engine`."""
        if self._stretching is not None:
            self._stretching.cancel()

    def _go_on(
        self, leases: list[Lease], answers: list[tuple[Sample, ...]], done: int
    ) -> list[tuple[Sample, ...]]:
        """Let what comes after the first ``done`` tokens be of the version that is loaded now."""
        return [
            tuple(
                self._joined(lease, *each, done) for each in zip(lease.seeds, answer, strict=True)
            )
            if answer
            else ()
            for lease, answer in zip(leases, answers, strict=True)
        ]

    def _joined(self, lease: Lease, seed: int, old: Sample, done: int) -> Sample:
        """Go on with a sample after its first ``done`` tokens, of which it may have fewer."""
        if done >= old.tokens.length:
            return old
        version, digest = self._label()
        prompt = to_tokens(lease.prompt)
        new = self._sample(lease, prompt, seed, version, digest)
        after = to_tokens(new.tokens).tolist()
        # One that would have ended by now ends at once.
        tokens = [*to_tokens(old.tokens)[:done].tolist(), *(after[done:] or after[-1:])]
        logprobs = to_logprobs(old.logprobs)[:done].tolist()
        logprobs += _scores(_drawn(digest, prompt, seed), tokens)[done:]
        labels = Labels()
        for span in old.spans:
            if span.start < done:
                labels.note(Version(span.version), span.start)
        labels.note(version, done)
        return Sample(
            tokens=from_tokens(tokens),
            logprobs=from_logprobs(logprobs),
            spans=labels.spans(len(tokens)),
            finish=new.finish,
        )

    async def close(self) -> None:
        """See `Engine`."""
        await trio.lowlevel.checkpoint()
        self._life.end("it was closed")

    def _started(self) -> Layout:
        if self._layout is None:
            raise EngineError("the engine was not started")
        return self._layout

    def _label(self) -> tuple[Version, Digest]:
        if self._loaded is None:
            raise EngineError("the engine has no weights")
        return self._loaded

    def _refusal(self, lease: Lease) -> str:
        positions, vocabulary = positions_of(self._model_config), vocabulary_of(self._model_config)
        return refusal_of(lease, to_tokens(lease.prompt), positions, vocabulary)

    def _answer(self, lease: Lease) -> tuple[Sample, ...]:
        version, digest = self._label()
        prompt = to_tokens(lease.prompt)
        return tuple(self._sample(lease, prompt, seed, version, digest) for seed in lease.seeds)

    def _sample(
        self,
        lease: Lease,
        prompt: NDArray[np.uint32],
        seed: int,
        version: Version,
        digest: Digest,
    ) -> Sample:
        drawn = _drawn(digest, prompt, seed)
        rng = random.Random(drawn)  # noqa: S311 - to be replayed, not to be secret
        if lease.forced is not None:
            tokens = to_tokens(lease.forced).tolist()
        else:
            thoughts = [THOUGHT] * self._lengths.draw(rng) if self._lengths.high else []
            tokens = [*thoughts, *self._tokens(prompt[1:-1].tolist(), rng)]
            tokens = [*tokens, *lease.stop_ids[:1]][: lease.tokens_max]
            tokens = tokens or [int(prompt[0])]
        finish: Literal["stop", "length"] = "stop" if tokens[-1] in lease.stop_ids else "length"
        return Sample(
            tokens=from_tokens(tokens),
            logprobs=from_logprobs(_scores(drawn, tokens)),
            spans=[Span(version=version, start=0, end=len(tokens))],
            finish=finish,
        )

    def _tokens(self, body: list[int], rng: random.Random) -> list[int]:
        """Return the prompt's inside sorted, or else reversed, copied or cut short."""
        if rng.random() < self._skill:
            return sorted(body)
        return rng.choice([sorted(body, reverse=True), body, body[:-1]])


def _scores(drawn: bytes, tokens: list[int]) -> list[float]:
    """Return log-probs: of a token's place and number, whatever comes after it."""
    rng = random.Random(blake3(drawn + b"scores").digest())  # noqa: S311
    return [-2 * ((rng.random() + token * GOLDEN) % 1.0) - 0.01 for token in tokens]


def _longest(answers: list[tuple[Sample, ...]]) -> int:
    return max((sample.tokens.length for answer in answers for sample in answer), default=0)


def _drawn(digest: Digest, prompt: NDArray[np.uint32], seed: int) -> bytes:
    return blake3(digest + prompt.tobytes() + seed.to_bytes(8, "little")).digest()
