"""What the coordinator and the learner process say to each other: the port's values as messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from coordinator.learner.base import LearnerSetup, TrainBatch, TrainSample
from echo2p2p.ids import Step
from echo2p2p.wire.arrays import from_logprobs, from_tokens, to_logprobs, to_tokens
from echo2p2p.wire.messages import Array


class SampleCall(msgspec.Struct, frozen=True):
    """`TrainSample`."""

    prompt: Array
    tokens: Array
    logprobs: Array
    advantage: float
    step: int | None


class BatchCall(msgspec.Struct, frozen=True):
    """`TrainBatch`."""

    step: int
    samples: list[SampleCall]
    tokens_total: int


class AnswerCall(msgspec.Struct, frozen=True):
    """Arguments of `coordinator.learner.base.Learner.answer`; answered by a list of arrays."""

    prompts: list[Array]
    tokens_max: int
    stop_ids: list[int]


class ExportCall(msgspec.Struct, frozen=True):
    """Paths of the shared states that `coordinator.learner.base.Learner.export` is given."""

    path: str
    found_path: str
    """Empty: none."""


class ProgressReply(msgspec.Struct, frozen=True):
    """One call of `coordinator.learner.base.Progress`."""

    phase: str
    figures: dict[str, float]


def to_setup_call(setup: LearnerSetup) -> dict[str, Any]:
    """Return ``setup`` in plain values, paths as text."""
    plain: dict[str, Any] = msgspec.to_builtins(setup, enc_hook=str)
    return plain


def from_setup_call(plain: dict[str, Any]) -> LearnerSetup:
    """Undo `to_setup_call`."""
    return msgspec.convert(plain, LearnerSetup, dec_hook=_path)


def _path(kind: type, value: object) -> object:
    """Return a path for a path, and a task's option (any plain value) as it is."""
    return Path(str(value)) if kind is Path else value


def to_batch_call(batch: TrainBatch) -> BatchCall:
    """Return ``batch`` as a message."""
    return BatchCall(
        step=batch.step,
        samples=[
            SampleCall(
                from_tokens(sample.prompt),
                from_tokens(sample.tokens),
                from_logprobs(sample.logprobs),
                float(sample.advantage),
                sample.step,
            )
            for sample in batch.samples
        ],
        tokens_total=batch.tokens_total,
    )


def from_batch_call(call: BatchCall) -> TrainBatch:
    """Undo `to_batch_call`."""
    return TrainBatch(
        step=Step(call.step),
        samples=tuple(
            TrainSample(
                to_tokens(sample.prompt),
                to_tokens(sample.tokens),
                to_logprobs(sample.logprobs),
                sample.advantage,
                None if sample.step is None else Step(sample.step),
            )
            for sample in call.samples
        ),
        tokens_total=call.tokens_total,
    )
