"""Engine, learner and task worker without torch, processes or real time: parts of a fake world.

They hold to the same ports and the same conformance tests as the real ones. What they do depends
only on their arguments: the engine's answers on weights, prompt and seed, the learner's weights on
seed and step, so that a scenario can be replayed bit by bit. Durations are `trio.sleep`, virtual
under a mock clock. Failures are ordered in advance (`EngineFaults`, `LearnerFaults`) or happen at
once (``kill``). They are no models: the engine sorts its prompt with a fixed probability, so that
the sorting task's groups have rewards that differ, and nothing is ever learnt.
"""

from __future__ import annotations

import random
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final, Literal, NoReturn

import numpy as np
import trio
from blake3 import blake3
from numpy.typing import NDArray

from coordinator.learner.base import (
    LearnerReady,
    LearnerSetup,
    Progress,
    StepReport,
    TrainBatch,
)
from coordinator.task_desk import TaskDesk
from coordinator.task_port import Done, Failed, Next, Opening, TaskInfo, TaskSetup, Turn
from echo2p2p.errors import ChildError, EngineError, StoreError
from echo2p2p.ids import Digest, Step, Version
from echo2p2p.net.ports import SharedState
from echo2p2p.tasks.base import Prompt
from echo2p2p.tasks.registry import make_task
from echo2p2p.weights.layout import Layout, plan_layout
from echo2p2p.weights.state import state_digest
from echo2p2p.wire.arrays import from_logprobs, from_tokens, to_tokens
from echo2p2p.wire.messages import Lease, Sample, Span
from peer.engine.base import EngineInfo, EngineSetup, Generated, LoadReport

CHARACTERS: Final = "0123456789+-*=?,.:;()[]<>|# abcdefghijklmnopqrstuvwxyz\n"
"""As the tiny model's tokenizer (`coordinator.model`) has them, from id 4."""

_FIRST_CHARACTER: Final = 4
_BOS: Final = 1
_EOS: Final = 2


class CharacterTokenizer:
    """The tiny model's tokenizer in a few lines of Python; messages are not supported."""

    vocab_size: int = 64
    stop_ids: tuple[int, ...] = (_EOS,)
    positions_max: int | None = 128

    def encode(self, prompt: Prompt) -> list[int]:
        """Return BOS and one token a character; unknown ones (found at -1) get the last special."""
        assert prompt.text is not None
        return [_BOS, *(CHARACTERS.find(c) + _FIRST_CHARACTER for c in prompt.text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; tokens that are no character show as U+FFFD."""
        shifted = [int(token) - _FIRST_CHARACTER for token in tokens]
        return "".join(CHARACTERS[i] if 0 <= i < len(CHARACTERS) else "\ufffd" for i in shifted)


class _Life:
    """Whether a part still runs; every duration passes through here."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.over = trio.Event()
        self.cause = ""

    def end(self, cause: str) -> None:
        """End now; a call under way raises."""
        if not self.over.is_set():
            self.cause = cause
            self.over.set()

    async def spend(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ChildError: The part ended before or meanwhile.
        """
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(seconds):
            await self.over.wait()
        if self.over.is_set():
            raise ChildError(self.name, self.cause)

    async def hang(self, timeout_s: float, call: str) -> None:
        """Do nothing until the caller's deadline, as its client would see it."""
        await self.spend(timeout_s)
        self.end(f"did not finish {call!r} within {timeout_s} s")
        raise ChildError(self.name, self.cause)


# --- the engine -------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineFaults:
    """What goes wrong, counted in calls from 1; ``None``: never."""

    die_at_generate: int | None = None
    hang_at_generate: int | None = None
    die_at_load: int | None = None
    wrong_weights_at_load: int | None = None
    """One bit differs from what was given: `FakeEngine.prove` tells."""


class FakeEngine:
    """An `Engine` whose answers are a function of weights, prompt and seed.

    Args:
        start_s: Until it is up.
        load_s: For any load.
        seconds_per_token: Of a whole batch's longest sample, as batches run side by side.
        skill: Probability that an answer is the sorted prompt.
        timeout_s: When a hanging call is given up.
        faults: What goes wrong.
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
    ) -> None:
        self._start_s = start_s
        self._load_s = load_s
        self._seconds_per_token = seconds_per_token
        self._skill = skill
        self._timeout_s = timeout_s
        self._faults = faults or EngineFaults()
        self._life = _Life("engine")
        self._layout: Layout | None = None
        self._loaded: tuple[Version, Digest] | None = None
        self._loads = 0
        self._generates = 0

    def kill(self) -> None:
        """Die now, as by ``kill -9``."""
        self._life.end("died of SIGKILL")

    async def start(self, setup: EngineSetup) -> EngineInfo:
        """See `Engine`."""
        await self._life.spend(self._start_s)
        self._layout = Layout.from_table(setup.layout)
        return EngineInfo(
            kind="fake", device="none", dtype=setup.dtype, memory_bytes=setup.layout.total_bytes
        )

    async def load(self, version: Version, state: SharedState) -> LoadReport:
        """See `Engine`."""
        self._loads += 1
        self._loaded = None
        if self._loads == self._faults.die_at_load:
            self.kill()
        await self._life.spend(self._load_s)
        layout = self._started()
        bits = bytearray(state.view)
        if len(bits) != layout.total_bytes:
            raise EngineError(f"a state of {len(bits)} bytes for {layout.total_bytes}")
        if self._loads == self._faults.wrong_weights_at_load:
            bits[len(bits) // 2] ^= 1
        self._loaded = version, state_digest(layout, bits)
        return LoadReport(version=version, seconds=self._load_s)

    async def prove(self) -> Digest:
        """See `Engine`."""
        await self._life.spend(0)
        return self._label()[1]

    async def generate(self, leases: list[Lease], *, timeout_s: float = inf) -> list[Generated]:
        """See `Engine`."""
        self._generates += 1
        await self._life.spend(0)
        version, digest = self._label()
        if self._generates == self._faults.hang_at_generate:
            await self._life.hang(min(timeout_s, self._timeout_s), "generate")
        answers = [self._answer(lease, version, digest) for lease in leases]
        longest = max((s.tokens.length for answer in answers for s in answer), default=0)
        seconds = longest * self._seconds_per_token
        if self._generates == self._faults.die_at_generate:
            await self._life.spend(seconds / 2)
            self.kill()
        await self._life.spend(seconds)
        share = seconds / max(1, len(leases))
        return [
            Generated(lease.lease_id, answer, share, "" if answer else "makes no sense")
            for lease, answer in zip(leases, answers, strict=True)
        ]

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

    def _answer(self, lease: Lease, version: Version, digest: Digest) -> tuple[Sample, ...]:
        prompt = to_tokens(lease.prompt)
        if lease.samples != len(lease.seeds) or lease.tokens_max < 1 or prompt.size == 0:
            return ()
        return tuple(self._sample(lease, prompt, seed, version, digest) for seed in lease.seeds)

    def _sample(
        self,
        lease: Lease,
        prompt: NDArray[np.uint32],
        seed: int,
        version: Version,
        digest: Digest,
    ) -> Sample:
        drawn = blake3(digest + prompt.tobytes() + seed.to_bytes(8, "little")).digest()
        rng = random.Random(drawn)  # noqa: S311 - to be replayed, not to be secret
        if lease.forced is not None:
            tokens = to_tokens(lease.forced).tolist()
        else:
            tokens = self._tokens(prompt[1:-1].tolist(), rng)
            tokens = [*tokens, *lease.stop_ids[:1]][: lease.tokens_max]
            tokens = tokens or [int(prompt[0])]
        finish: Literal["stop", "length"] = "stop" if tokens[-1] in lease.stop_ids else "length"
        return Sample(
            tokens=from_tokens(tokens),
            logprobs=from_logprobs([-2 * rng.random() - 0.01 for _ in tokens]),
            spans=[Span(version=version, start=0, end=len(tokens))],
            finish=finish,
        )

    def _tokens(self, body: list[int], rng: random.Random) -> list[int]:
        """Return the prompt's inside sorted, or else reversed, copied or cut short."""
        if rng.random() < self._skill:
            return sorted(body)
        return rng.choice([sorted(body, reverse=True), body, body[:-1]])


# --- the learner ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LearnerFaults:
    """What goes wrong, by the step before the update; ``None``: never."""

    die_at_step: int | None = None
    """In the middle of it: the step is lost."""
    hang_at_step: int | None = None
    die_at_save: int | None = None
    """While it saves at this step: no checkpoint."""
    hang_at_save: int | None = None


_STEP_BYTES: Final = 8


class FakeLearner:
    """A `Learner` whose weights are a function of seed and step.

    Args:
        checkpoints: Where `save` writes and `LearnerSetup.checkpoint` is looked up, by folder;
            outlives the learner as a disk would.
        start_s: Until it is up.
        step_s: For one optimizer step.
        export_s: For one export.
        save_s: For one checkpoint.
        changed_share: Part of the elements that a step changes.
        timeout_s: When a hanging call is given up.
        faults: What goes wrong.
    """

    def __init__(
        self,
        checkpoints: MutableMapping[str, bytes] | None = None,
        *,
        start_s: float = 0.0,
        step_s: float = 0.0,
        export_s: float = 0.0,
        save_s: float = 0.0,
        changed_share: float = 0.02,
        timeout_s: float = 3600.0,
        faults: LearnerFaults | None = None,
    ) -> None:
        self._checkpoints = {} if checkpoints is None else checkpoints
        self._start_s = start_s
        self._step_s = step_s
        self._export_s = export_s
        self._save_s = save_s
        self._changed_share = changed_share
        self._timeout_s = timeout_s
        self._faults = faults or LearnerFaults()
        self._life = _Life("learner")
        self._layout = plan_layout(
            [
                ("model.embed_tokens.weight", "bf16", (256, 64), ("lm_head.weight",)),
                ("model.layers.0.mlp.weight", "bf16", (384, 64), ()),
                ("model.layers.1.mlp.weight", "bf16", (128, 64), ()),
                ("model.norm.weight", "bf16", (64,), ()),
            ]
        )
        self._seed = 0
        self._step = 0
        self._bits = np.zeros(0, dtype="<u2")

    def kill(self) -> None:
        """Die now, as by ``kill -9``."""
        self._life.end("died of SIGKILL")

    async def start(self, setup: LearnerSetup, progress: Progress) -> LearnerReady:
        """See `Learner`."""
        await self._life.spend(self._start_s)
        self._seed = setup.seed
        if setup.checkpoint is not None:
            saved = self._checkpoints.get(str(setup.checkpoint))
            if saved is None:
                self._refuse(f"StoreError: no checkpoint {setup.checkpoint}")
            self._step = int.from_bytes(saved[:_STEP_BYTES], "little")
            self._bits = np.frombuffer(saved[_STEP_BYTES:], dtype="<u2").copy()
        else:
            if setup.warm_start.steps:
                progress("warm_start", {"step": float(setup.warm_start.steps), "loss": 0.0})
            rng = np.random.default_rng(self._seed)
            floats = rng.normal(0.0, 0.02, self._layout.total_bytes // 2).astype("<f4")
            self._bits = (floats.view("<u4") >> 16).astype("<u2")
        return LearnerReady(
            step=Step(self._step),
            layout=self._layout.table,
            parameters=self._bits.size,
            device="none",
        )

    async def train(self, batch: TrainBatch) -> StepReport:
        """See `Learner`."""
        await self._life.spend(0)
        if batch.step != self._step:
            self._refuse(f"LocalProtocolError: a batch for step {batch.step} at {self._step}")
        if self._step == self._faults.hang_at_step:
            await self._life.hang(self._timeout_s, "train")
        if self._step == self._faults.die_at_step:
            await self._life.spend(self._step_s / 2)
            self.kill()
        await self._life.spend(self._step_s)
        rng = np.random.default_rng([self._seed, self._step])
        chosen = rng.random(self._bits.size) < self._changed_share
        flips = rng.integers(1, 4, self._bits.size, dtype=np.uint16)
        self._bits[chosen] ^= flips[chosen]
        self._step += 1
        metrics = dict.fromkeys(("loss", "clipped_share", "kl_behaviour"), 0.0)
        metrics |= {"gradient_norm": 1.0, "ratio_mean": 1.0, "learning_rate": 0.0}
        return StepReport(step=Step(self._step), seconds=self._step_s, metrics=metrics)

    async def export(self, state: SharedState) -> Step:
        """See `Learner`."""
        await self._life.spend(self._export_s)
        if len(state.view) != self._layout.total_bytes:
            self._refuse(f"StoreError: shared state of {len(state.view)} bytes")
        state.view[:] = self._bits.tobytes()
        return Step(self._step)

    async def save(self, folder: Path) -> Step:
        """See `Learner`."""
        if self._step == self._faults.hang_at_save:
            await self._life.hang(self._timeout_s, "save")
        if self._step == self._faults.die_at_save:
            await self._life.spend(self._save_s / 2)
            self.kill()
        await self._life.spend(self._save_s)
        if str(folder) in self._checkpoints:
            self._refuse(f"StoreError: {folder} exists")
        step = self._step.to_bytes(_STEP_BYTES, "little")
        try:
            self._checkpoints[str(folder)] = step + self._bits.tobytes()
        except StoreError as error:
            kind = type(error).__name__
            raise ChildError("learner", f"{kind}: {error}", raised=kind) from error
        return Step(self._step)

    async def close(self) -> None:
        """See `Learner`."""
        await trio.lowlevel.checkpoint()
        self._life.end("it was closed")

    def _refuse(self, detail: str) -> NoReturn:
        raise ChildError("learner", detail)


# --- the task worker --------------------------------------------------------------------------


class InlineTaskWorker:
    """A `TaskWorker` in our own process, with `CharacterTokenizer`.

    Args:
        call_s: For any call.
        die_at_call: `open` and `score` calls counted together from 1; ``None``: never.
    """

    def __init__(self, *, call_s: float = 0.0, die_at_call: int | None = None) -> None:
        self._call_s = call_s
        self._die_at = inf if die_at_call is None else die_at_call
        self._calls = 0
        self._life = _Life("task worker")
        self._desk: TaskDesk | None = None

    def kill(self) -> None:
        """Die now, as by ``kill -9``."""
        self._life.end("died of SIGKILL")

    async def start(self, setup: TaskSetup) -> TaskInfo:
        """See `TaskWorker`."""
        await self._life.spend(self._call_s)
        self._desk = TaskDesk(make_task(setup.task, setup.options), CharacterTokenizer())
        return self._desk.info()

    async def open(self, seeds: Sequence[int]) -> list[Opening | Failed]:
        """See `TaskWorker`."""
        return (await self._called()).open(seeds)

    async def score(
        self, episodes: Sequence[tuple[int, Sequence[Turn]]]
    ) -> list[Next | Done | Failed]:
        """See `TaskWorker`."""
        desk = await self._called()
        return [desk.advance(seed, turns) for seed, turns in episodes]

    async def close(self) -> None:
        """See `TaskWorker`."""
        await trio.lowlevel.checkpoint()
        self._life.end("it was closed")

    async def _called(self) -> TaskDesk:
        self._calls += 1
        if self._calls >= self._die_at:
            self.kill()
        await self._life.spend(self._call_s)
        if self._desk is None:
            raise ChildError(self._life.name, "it was not started")
        return self._desk
