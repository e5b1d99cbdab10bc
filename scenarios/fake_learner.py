"""A learner without torch, processes or real time: one of the parts of a fake world.

Its weights are a function of seed and step, so a scenario can be replayed bit by bit. It holds to
the port and the conformance tests of the real one. Durations are `trio.sleep`, virtual under a mock
clock. Failures are ordered in advance (`LearnerFaults`) or happen at once (``kill``).
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
import trio
from numpy.typing import NDArray

from coordinator.learner.base import (
    Exported,
    LearnerReady,
    LearnerSetup,
    Progress,
    StepReport,
    TrainBatch,
)
from echo2p2p.errors import ChildError, StoreError
from echo2p2p.ids import Step
from echo2p2p.net.ports import SharedState
from echo2p2p.weights import kernels
from echo2p2p.weights.found import write_found
from echo2p2p.weights.kernels import Found
from echo2p2p.weights.layout import DTYPES, plan_layout
from echo2p2p.weights.layout import Sequence as LayoutSequence
from scenarios.parts import Life
from scenarios.record import sample_name


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
PARAMETERS: Final = 256 * 64 + 384 * 64 + 128 * 64 + 64
"""Of its model, without ballast."""


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
        finds: Whether it lists what changed, as one on a GPU does.
        ballast: Further elements, for a model that takes time.
        timeout_s: When a hanging call is given up.
        faults: What goes wrong.
        history: Told of each start, with its step, and of each step, with its samples.
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
        finds: bool = False,
        ballast: int = 0,
        timeout_s: float = 3600.0,
        faults: LearnerFaults | None = None,
        history: Callable[[str, int, list[str]], None] = lambda _what, _step, _samples: None,
    ) -> None:
        self._checkpoints = {} if checkpoints is None else checkpoints
        self._start_s = start_s
        self._step_s = step_s
        self._export_s = export_s
        self._save_s = save_s
        self._changed_share = changed_share
        self._finds = finds
        self._timeout_s = timeout_s
        self._faults = faults or LearnerFaults()
        self._history = history
        self._life = Life("learner")
        self._layout = plan_layout(
            [
                ("model.embed_tokens.weight", "bf16", (256, 64), ("lm_head.weight",)),
                ("model.layers.0.mlp.weight", "bf16", (384, 64), ()),
                ("model.layers.1.mlp.weight", "bf16", (128, 64), ()),
                ("model.norm.weight", "bf16", (64,), ()),
                *([("model.ballast.weight", "bf16", (ballast,), ())] if ballast else []),
            ]
        )
        self._seed = 0
        self._step = 0
        self._bits = self._last = np.zeros(0, dtype="<u2")

    def kill(self) -> None:
        """Die now, as by ``kill -9``."""
        self._life.end("died of SIGKILL")

    def hang(self) -> None:
        """Let the next step never end."""
        self._faults = replace(self._faults, hang_at_step=self._step)

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
        self._history("start", self._step, [])
        return LearnerReady(
            step=Step(self._step),
            layout=self._layout.table,
            parameters=self._bits.size,
            device="cuda" if self._finds else "none",
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
        names = [sample_name(sample.logprobs.tobytes()) for sample in batch.samples]
        self._history("step", self._step, names)
        metrics = dict.fromkeys(("loss", "clipped_share", "kl_behaviour"), 0.0)
        metrics |= {"gradient_norm": 1.0, "ratio_mean": 1.0, "learning_rate": 0.0}
        return StepReport(step=Step(self._step), seconds=self._step_s, metrics=metrics)

    async def answer(
        self, prompts: Sequence[NDArray[np.uint32]], *, tokens_max: int, stop_ids: Sequence[int]
    ) -> list[NDArray[np.uint32]]:
        """See `Learner`: the prompt's own tokens, and an end if there is room for it."""
        await self._life.spend(self._step_s)
        whole = [np.append(prompt, np.uint32(stop_ids[0])) for prompt in prompts]
        return [answer[:tokens_max] for answer in whole]

    async def export(self, state: SharedState, found: SharedState | None) -> Exported:
        """See `Learner`."""
        await self._life.spend(self._export_s)
        if len(state.view) != self._layout.total_bytes:
            self._refuse(f"StoreError: shared state of {len(state.view)} bytes")
        state.view[:] = self._bits.tobytes()
        return Exported(Step(self._step), self._found(found))

    def _found(self, found: SharedState | None) -> int | None:
        last, self._last = self._last, self._bits.copy()
        if not self._finds or found is None or not last.size:
            return None

        def find(sequence: LayoutSequence, first: int, count: int) -> Found:
            assert sequence.dtype == "bf16"
            place = slice(first, first + count)
            return kernels.find(DTYPES["bf16"], last[place], self._last[place])

        return write_found(self._layout, find, np.frombuffer(found.view, np.uint8))

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
