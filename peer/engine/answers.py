"""What an engine answered, compared with what it was asked, before anybody else sees it.

An engine is a big program on somebody's graphics card. When it goes wrong its answers are rubbish
(NaN, tokens that do not exist, a version that it does not have) long before it dies, and the
coordinator would count that against this peer. So the peer holds its own engine to the rules by
which the coordinator will judge (`check_upload`), and starts it again when it breaks one. What it
cannot see is a plausible lie.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from echo2p2p.errors import EngineError, RemoteProtocolError
from echo2p2p.ids import PeerId, Step, Version
from echo2p2p.rollouts.trajectory import LOGPROB_MAX, Expectation, Reason, Refused, check_upload
from echo2p2p.wire.arrays import to_logprobs, to_tokens
from echo2p2p.wire.messages import Lease, Upload
from peer.engine.base import Generated, Grown

UNKNOWN_VOCABULARY: Final = 1 << 32
"""Any token id fits."""
UNKNOWN_POSITIONS: Final = 1 << 62


def vocabulary_of(model_config: str) -> int:
    """Return how many token ids a model has, by its ``config.json``."""
    return _number(model_config, "vocab_size", UNKNOWN_VOCABULARY)


def positions_of(model_config: str) -> int:
    """Return how many tokens a model takes in all, by its ``config.json``."""
    return _number(model_config, "max_position_embeddings", UNKNOWN_POSITIONS)


def _number(model_config: str, key: str, unknown: int) -> int:
    try:
        plain = json.loads(model_config)
        return int({**plain, **plain.get("text_config", {})}[key])
    except (ValueError, TypeError, KeyError, AttributeError):
        return unknown


class Hearing:
    """What an engine tells of a batch that runs, as far as it could be a part of its answers.

    Of a sample of which once something was told that could not be, nothing more is believed; its
    answer will not pass `check_answers`.
    """

    def __init__(self, leases: Sequence[Lease], vocabulary: int) -> None:
        self._samples = [lease.samples for lease in leases]
        self._vocabulary = vocabulary
        self._unfit: set[tuple[int, int]] = set()

    def believed(self, grown: Sequence[Grown], versions: Collection[Version]) -> list[Grown]:
        """Return what fits; ``versions`` are those that the engine has proved since it began."""
        fit = []
        for each in grown:
            place = (each.lease, each.sample)
            if not self._exists(each) or place in self._unfit:
                continue
            if each.version in versions and self._fits(each):
                fit.append(each)
            else:
                self._unfit.add(place)
        return fit

    def _exists(self, grown: Grown) -> bool:
        known = 0 <= grown.lease < len(self._samples)
        return known and 0 <= grown.sample < self._samples[grown.lease]

    def _fits(self, grown: Grown) -> bool:
        return (
            1 <= len(grown.tokens) == len(grown.logprobs)
            and all(0 <= token < self._vocabulary for token in grown.tokens)
            and all(map(math.isfinite, grown.logprobs))
        )


def check_answers(
    leases: Sequence[Lease],
    answers: Sequence[Generated],
    versions: Collection[Version],
    vocabulary: int,
) -> None:
    """Check an engine's answers to ``leases``, of which none may be missing.

    Args:
        leases: As asked.
        answers: As answered.
        versions: What the engine has proved, one after the other, from when it was asked.
        vocabulary: Token ids are below this.

    Raises:
        EngineError: The engine is broken; says how.
    """
    if [answer.lease_id for answer in answers] != [lease.lease_id for lease in leases]:
        raise EngineError(f"the engine answered {len(answers)} of {len(leases)} leases, or others")
    expect = Expectation(
        vocabulary=vocabulary, steps=dict.fromkeys(versions, Step(0)), dead=frozenset()
    )
    for lease, answer in zip(leases, answers, strict=True):
        if answer.refused and not answer.samples:
            continue
        problem = _problem(lease, answer, expect)
        if problem:
            raise EngineError(
                f"the engine's answer to lease {lease.lease_id[:8]} is no good: {problem}"
            )


def _problem(lease: Lease, answer: Generated, expect: Expectation) -> str:
    if not answer.samples:
        return "no samples, and no reason"
    if not (np.isfinite(answer.seconds) and answer.seconds >= 0):
        return f"it took {answer.seconds} s"
    if lease.forced is not None:
        return _audit_problem(lease, answer)
    upload = Upload(
        incarnation=0,
        lease_id=lease.lease_id,
        samples=list(answer.samples),
        seconds=answer.seconds,
    )
    found = check_upload(upload, lease, 0, PeerId(""), expect)
    if isinstance(found, Refused) and found.reason is not Reason.ABORTED:
        return f"{found.reason}, {found.detail}"
    return ""


def _audit_problem(lease: Lease, answer: Generated) -> str:
    """Check scores of given tokens; a token that the settings exclude has log-prob -inf."""
    assert lease.forced is not None
    if len(answer.samples) != lease.samples:
        return f"{len(answer.samples)} samples for {lease.samples}"
    forced = to_tokens(lease.forced)
    for sample in answer.samples:
        try:
            tokens, logprobs = to_tokens(sample.tokens), to_logprobs(sample.logprobs)
        except RemoteProtocolError as error:
            return error.detail
        if not np.array_equal(tokens, forced) or logprobs.size != tokens.size:
            return "other tokens than were to be scored"
        if bool(np.isnan(logprobs).any()) or float(logprobs.max()) > LOGPROB_MAX:
            return "log-probs that cannot be"
    return ""
