"""One group of rollouts: what a peer uploaded for a lease, checked, and later scored.

Everything here came from a stranger. `check_upload` compares it with the lease, which only we
wrote; whatever passes has the right counts, lengths, ids, finite log-probs and known versions. It
can still be a lie about what was sampled: audits are another matter.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo2p2p.errors import RemoteProtocolError
from echo2p2p.ids import LeaseId, PeerId, Step, Version
from echo2p2p.wire.arrays import to_logprobs, to_tokens
from echo2p2p.wire.messages import Lease, Sample, Span, Upload

LOGPROB_MIN: Final = -104.0
"""Below it a probability is 0 in single precision (2 ** -149 at least): no sampler draws that."""

LOGPROB_MAX: Final = 1e-3
"""A probability above 1 by more than float error is a lie or a bug."""


class Reason(enum.StrEnum):
    """Why trajectories are not trained on: wire code, metric label and log field in one."""

    MALFORMED = "malformed"
    NOT_FINITE = "not_finite"
    OUT_OF_VOCABULARY = "out_of_vocabulary"
    UNKNOWN_VERSION = "unknown_version"
    UNKNOWN_LEASE = "unknown_lease"
    NOT_YOURS = "not_yours"
    LEASE_EXPIRED = "lease_expired"
    PEER_GONE = "peer_gone"
    STALE = "stale"
    DEAD_GENERATION = "dead_generation"
    TASK_FAILED = "task_failed"
    ABORTED = "aborted"
    DAMAGED = "damaged"
    """Our own disk gave back other bytes than were written."""
    UNUSED = "unused"
    """Accepted or promised, but the run ended first."""


@dataclass(frozen=True)
class Turn:
    """One answer of the model, checked."""

    tokens: NDArray[np.uint32]
    """``[n] uint32``, the stop token included."""
    logprobs: NDArray[np.float32]
    """``[n] float32``, finite, natural logarithm, of the behaviour policy."""
    oldest_step: Step
    """Step of the oldest version that generated any of it."""
    newest_step: Step
    truncated: bool
    """Ended by its token limit, not by a stop token."""


@dataclass(frozen=True)
class Group:
    """All rollouts of one prompt from one lease, checked but perhaps not scored yet."""

    lease_id: LeaseId
    peer_id: PeerId
    seed: int
    """The item's."""
    prompt: NDArray[np.uint32]
    """``[n_prompt] uint32``."""
    turns: tuple[Turn, ...]
    """One a rollout."""
    oldest_step: Step
    """Step of the oldest version that generated any token of the group."""
    newest_step: Step
    """Step of the newest one."""

    @property
    def tokens(self) -> int:
        """Generated tokens in all."""
        return sum(int(turn.tokens.size) for turn in self.turns)


@dataclass(frozen=True)
class Refused:
    """The upload is not trained on."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class Expectation:
    """What the coordinator knows about the model and its versions when an upload arrives."""

    vocabulary: int
    """Token ids are below this."""
    steps: Mapping[Version, Step]
    """Step of each version whose generation still lives."""
    dead: frozenset[Version]
    """Versions of lost steps: rolled back, no longer trained on."""


def check_upload(
    upload: Upload, lease: Lease, seed: int, peer_id: PeerId, expect: Expectation
) -> Group | Refused:
    """Compare an upload with its lease.

    Args:
        upload: As decoded; nothing in it is believed.
        lease: What we promised, from our own store.
        seed: Of the lease's item.
        peer_id: The authenticated uploader, who owns the lease.
        expect: Vocabulary and versions.

    Returns:
        The group, or why it is refused. A refusal closes the lease.
    """
    if not upload.samples:
        return Refused(Reason.ABORTED, "the peer gives the lease back")
    if len(upload.samples) != lease.samples:
        return Refused(
            Reason.MALFORMED, f"{len(upload.samples)} samples for a lease of {lease.samples}"
        )
    turns: list[Turn] = []
    for index, sample in enumerate(upload.samples):
        try:
            turn = _check_sample(sample, lease, expect)
        except RemoteProtocolError as error:
            turn = Refused(Reason.MALFORMED, error.detail)
        if isinstance(turn, Refused):
            return Refused(turn.reason, f"sample {index}: {turn.detail}")
        turns.append(turn)
    refused = _check_values(turns, lease, expect)
    if refused is not None:
        return refused
    return Group(
        lease_id=LeaseId(lease.lease_id),
        peer_id=peer_id,
        seed=seed,
        prompt=to_tokens(lease.prompt),
        turns=tuple(turns),
        oldest_step=min(turn.oldest_step for turn in turns),
        newest_step=max(turn.newest_step for turn in turns),
    )


def _check_values(turns: list[Turn], lease: Lease, expect: Expectation) -> Refused | None:
    """Look at all values at once, and one by one only to tell which sample is wrong.

    numpy gives up the interpreter's lock in each call on a long array; in a process whose other
    threads want it, that costs more than the look.
    """
    tokens = np.frombuffer(b"".join([turn.tokens.data for turn in turns]), dtype="<u4")
    logprobs = np.frombuffer(b"".join([turn.logprobs.data for turn in turns]), dtype="<f4")
    stopped = sum(not turn.truncated for turn in turns)
    if _check_arrays(tokens, logprobs, stopped, lease, expect) is None:
        return None
    for index, turn in enumerate(turns):
        refused = _check_arrays(turn.tokens, turn.logprobs, not turn.truncated, lease, expect)
        if refused is not None:
            return Refused(refused.reason, f"sample {index}: {refused.detail}")
    raise AssertionError("the whole is wrong and no part of it")


def _check_arrays(
    tokens: NDArray[np.uint32],
    logprobs: NDArray[np.float32],
    stopped: int,
    lease: Lease,
    expect: Expectation,
) -> Refused | None:
    """Check the values of one or several samples, ``stopped`` of which end with a stop token."""
    largest = int(np.maximum.reduce(tokens))
    if largest >= expect.vocabulary:
        return Refused(Reason.OUT_OF_VOCABULARY, f"id {largest} of {expect.vocabulary}")
    # Both are NaN if one value is, and nothing is true of NaN.
    lowest, highest = np.minimum.reduce(logprobs), np.maximum.reduce(logprobs)
    if not (lowest >= LOGPROB_MIN and highest <= LOGPROB_MAX):
        detail = f"log-probs must be finite, {LOGPROB_MIN:.0f} at least and 0 at most"
        return Refused(Reason.NOT_FINITE, detail)
    # One comparison a stop id: `np.isin` takes longer for less than ten of them.
    stops = sum(int(np.count_nonzero(tokens == stop)) for stop in set(lease.stop_ids))
    if stops != stopped:
        return Refused(Reason.MALFORMED, "a stop token before the end")
    return None


def _check_sample(sample: Sample, lease: Lease, expect: Expectation) -> Turn | Refused:
    """Check everything but the values of tokens and log-probs."""
    tokens, logprobs = to_tokens(sample.tokens), to_logprobs(sample.logprobs)
    if sample.finish == "aborted":
        return Refused(Reason.ABORTED, "the engine gave up")
    if not 0 < tokens.size <= lease.tokens_max or logprobs.size != tokens.size:
        return Refused(
            Reason.MALFORMED,
            f"{tokens.size} tokens and {logprobs.size} log-probs, {lease.tokens_max} at most",
        )
    if (sample.finish == "stop") != (int(tokens[-1]) in lease.stop_ids):
        return Refused(Reason.MALFORMED, f"finish {sample.finish!r} does not fit the tokens")
    if sample.finish == "length" and tokens.size != lease.tokens_max:
        return Refused(Reason.MALFORMED, f"cut at {tokens.size} of {lease.tokens_max} tokens")
    steps = _steps_of(sample.spans, int(tokens.size), lease, expect)
    if isinstance(steps, Refused):
        return steps
    return Turn(tokens, logprobs, min(steps), max(steps), truncated=sample.finish == "length")


def _steps_of(
    spans: list[Span], length: int, lease: Lease, expect: Expectation
) -> list[Step] | Refused:
    """Return the step of each span's version; the spans must tile ``[0, length)``."""
    end, last = 0, lease.version
    steps: list[Step] = []
    for span in spans:
        if span.start != end or not span.start < span.end or span.version < last:
            return Refused(Reason.MALFORMED, f"span {span.start}..{span.end} v{span.version}")
        version = Version(span.version)
        if version in expect.dead:
            return Refused(Reason.DEAD_GENERATION, f"version {version} was rolled back")
        if version not in expect.steps:
            return Refused(Reason.UNKNOWN_VERSION, f"there is no version {version}")
        steps.append(expect.steps[version])
        end, last = span.end, span.version
    if end != length:
        return Refused(Reason.MALFORMED, f"spans cover {end} of {length} tokens")
    return steps
