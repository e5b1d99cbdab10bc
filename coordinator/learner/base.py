"""The port of a learner. The real one runs in a child process; the fake runs inline.

The learner owns fp32 master weights and the optimizer. The coordinator owns everything else: the
published bits, the batches until a durable checkpoint contains them, and the version numbers.
Calls are made one at a time, except `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from echo2p2p.ids import Step
from echo2p2p.net.ports import SharedState
from echo2p2p.wire.messages import LayoutTable

Progress = Callable[[str, Mapping[str, float]], None]
"""Called with a phase (``"warm_start"``) and its figures while a long call runs."""


def warmed_up(step: int, warmup_steps: int) -> float:
    """Return the share of the learning rate that a step, from 0, takes of a linear warm-up."""
    return min(1.0, (step + 1) / max(1, warmup_steps))


@dataclass(frozen=True)
class WarmStart:
    """Supervised steps on the task's demonstrations before version 0; 0 steps: none."""

    steps: int = 0
    batch: int = 256
    learning_rate: float = 2e-3
    warmup_steps: int = 20


@dataclass(frozen=True)
class LearnerSetup:
    """All that the learner process needs; plain values, sent once."""

    model_dir: Path
    """Hugging Face folder: config.json, tokenizer.json, perhaps weights."""
    task: str
    task_options: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0
    warm_start: WarmStart = WarmStart()
    learning_rate: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 10
    gradient_norm_max: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    correction: str = "tis"
    """Of staleness and engine mismatch: ``none`` or ``tis`` (truncated importance sampling)."""
    correction_cap: float = 2.0
    micro_batch: int = 256
    threads: int = 1
    parity_rows: int = 0
    """Of a batch, computed again with the weights that sampled them; 0: none."""
    parity_copies: int = 0
    """Publish copies that are kept for that."""
    checkpoint: Path | None = None
    """Folder to resume from; ``None`` starts from ``model_dir`` and does the warm start."""


@dataclass(frozen=True)
class LearnerReady:
    """The learner is up, at ``step``."""

    step: Step
    layout: LayoutTable
    """Of the bf16 publish copy."""
    parameters: int
    device: str


@dataclass(frozen=True)
class TrainSample:
    """One trajectory of a batch; token-aligned arrays.

    A sequence is ``prompt`` followed by ``tokens``; only ``tokens`` where ``mask`` is 1 enter the
    loss.
    """

    prompt: NDArray[np.uint32]
    """``[n_prompt] uint32``."""
    tokens: NDArray[np.uint32]
    """``[n] uint32``."""
    logprobs: NDArray[np.float32]
    """``[n] float32``: of the behaviour policy."""
    advantage: float
    step: Step | None = None
    """Of the weights that sampled it; ``None``: of several versions."""


@dataclass(frozen=True)
class TrainBatch:
    """What one optimizer step consumes."""

    step: Step
    """Steps before the update; the learner refuses another value than its own."""
    samples: tuple[TrainSample, ...]
    """With non-zero advantage; the others are dropped but counted in ``tokens_total``."""
    tokens_total: int
    """Denominator of the token-level mean: tokens of all rows, the dropped ones included."""


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    step: Step
    """Steps after the update."""
    seconds: float
    metrics: Mapping[str, float]
    """``loss``, ``gradient_norm``, ``ratio_mean``, ``clipped_share``, ``kl_behaviour``, ...;
    ``parity_mean``, ``parity_max`` and ``parity_kl`` only if it has weights that sampled some."""


@dataclass(frozen=True)
class Exported:
    """A publish copy was written."""

    step: Step
    """Of the copy."""
    found_bytes: int | None = None
    """Of the list of changes since this learner's last export; ``None``: there is none."""


class Learner(Protocol):
    """GRPO on one model."""

    async def start(self, setup: LearnerSetup, progress: Progress) -> LearnerReady:
        """Bring the learner up, warm start or resume included; may take minutes.

        Raises:
            ChildError: It did not come up; carries the end of its log.
            ConfigError: It cannot come up with these settings, however often it is tried.
        """
        ...

    async def train(self, batch: TrainBatch) -> StepReport:
        """Take one optimizer step.

        Raises:
            ChildError: The learner is gone; nothing is known of the step.
        """
        ...

    async def answer(
        self, prompts: Sequence[NDArray[np.uint32]], *, tokens_max: int, stop_ids: Sequence[int]
    ) -> list[NDArray[np.uint32]]:
        """Return the likeliest answer to each prompt, token by token, by the weights as they are.

        Args:
            prompts: ``[n] uint32`` each, not empty.
            tokens_max: Of an answer.
            stop_ids: Any of these ends an answer, and is its last token.

        Raises:
            ChildError: The learner is gone.
        """
        ...

    async def export(self, state: SharedState, found: SharedState | None) -> Exported:
        """Write the bf16 publish copy into ``state``, of the layout's size.

        Args:
            state: Where to.
            found: Of the size of `echo2p2p.weights.found.room_for`: where a learner that finds
                changes quicker than the encoder may list those since its last export.

        Raises:
            ChildError: The learner is gone; the state's content is undefined.
        """
        ...

    async def save(self, folder: Path) -> Step:
        """Write a checkpoint that `LearnerSetup.checkpoint` can resume; durable on return.

        A Hugging Face folder with safetensors, plus optimizer and position; written beside,
        synced, then renamed to ``folder``, which must not exist.

        Raises:
            ChildError: The learner is gone or the disk refused; ``folder`` does not exist.
        """
        ...

    async def close(self) -> None:
        """End it, within seconds, whatever it is doing. Idempotent."""
        ...
