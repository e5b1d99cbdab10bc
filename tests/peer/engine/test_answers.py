"""An engine's answers are judged before they leave the peer, by the coordinator's own rules."""

import math
from dataclasses import replace

import msgspec
import pytest

from echo2p2p.errors import EngineError
from echo2p2p.ids import Version
from echo2p2p.wire.arrays import from_logprobs, from_tokens
from echo2p2p.wire.messages import Array, Lease, Sample, Sampling, Span
from peer.engine.answers import UNKNOWN_VOCABULARY, Hearing, check_answers, vocabulary_of
from peer.engine.base import Generated, Grown

LEASE = Lease(
    lease_id="lease",
    kind="train",
    prompt=from_tokens([1, 9, 7]),
    samples=2,
    seeds=[1, 2],
    sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0),
    tokens_max=4,
    stop_ids=[2],
    forced=None,
    version=3,
    deadline_s=60.0,
    affinity=None,
)
GOOD = Sample(
    tokens=from_tokens([5, 6, 2]),
    logprobs=from_logprobs([-0.5, -0.1, 0.0]),
    spans=[Span(version=3, start=0, end=3)],
    finish="stop",
)


def answer(*samples, lease=LEASE, **changes):
    fields = {"lease_id": lease.lease_id, "samples": samples, "seconds": 1.0, **changes}
    return Generated(**fields)


def check(*answers, leases=(LEASE,)):
    check_answers(leases, answers, [Version(3)], 64)


def test_good_answers_pass():
    cut = msgspec.structs.replace(
        GOOD,
        tokens=from_tokens([5, 6, 7, 8]),
        logprobs=from_logprobs([-1.0] * 4),
        spans=[Span(version=3, start=0, end=4)],
        finish="length",
    )
    aborted = msgspec.structs.replace(GOOD, finish="aborted")
    check(answer(GOOD, cut))
    check(answer(GOOD, aborted))
    check(answer(refused="asks too much"))
    check(leases=())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logprobs": from_logprobs([-0.5, math.nan, 0.0])}, "not_finite"),
        ({"logprobs": from_logprobs([-0.5, -math.inf, 0.0])}, "not_finite"),
        ({"logprobs": from_logprobs([-0.5, 0.1, 0.0])}, "not_finite"),
        ({"logprobs": from_logprobs([-0.5])}, "malformed"),
        ({"tokens": from_tokens([5, 64, 2])}, "out_of_vocabulary"),
        ({"tokens": Array(dtype="u4", length=3, data=bytes(11))}, "malformed"),
        ({"tokens": from_tokens([5, 6, 7])}, "malformed"),
        ({"tokens": from_tokens([])}, "malformed"),
        ({"finish": "length"}, "malformed"),
        ({"spans": []}, "malformed"),
        ({"spans": [Span(version=2, start=0, end=3)]}, "malformed"),
        ({"spans": [Span(version=4, start=0, end=3)]}, "unknown_version"),
    ],
)
def test_rubbish_is_named(changes, says):
    bad = msgspec.structs.replace(GOOD, **changes)
    with pytest.raises(EngineError, match=f"answer to lease lease is no good: {says}"):
        check(answer(GOOD, bad))


@pytest.mark.parametrize(
    "answers",
    [
        (),
        (answer(GOOD),),
        (answer(GOOD, GOOD, GOOD),),
        (answer(),),
        (answer(GOOD, GOOD, seconds=math.nan),),
        (answer(GOOD, GOOD, lease_id="other"),),
        (answer(GOOD, GOOD), answer(GOOD, GOOD)),
    ],
)
def test_answers_that_are_missing_or_too_many_are_rubbish(answers):
    with pytest.raises(EngineError):
        check(*answers)


def test_scores_of_given_tokens_must_be_of_those_tokens():
    audit = msgspec.structs.replace(LEASE, kind="audit", forced=from_tokens([5, 2, 6]))

    def scored(tokens, logprobs):
        return msgspec.structs.replace(
            GOOD, tokens=from_tokens(tokens), logprobs=from_logprobs(logprobs), finish="length"
        )

    good = scored([5, 2, 6], [-0.1, -math.inf, -3.0])
    check(answer(good, good), leases=(audit,))
    for bad in (
        scored([5, 2, 7], [-0.1, -0.1, -0.1]),
        scored([5, 2, 6], [-0.1]),
        scored([5, 2, 6], [-0.1, math.nan, -0.1]),
        scored([5, 2, 6], [-0.1, 1.0, -0.1]),
    ):
        with pytest.raises(EngineError):
            check(answer(good, bad), leases=(audit,))
    with pytest.raises(EngineError):
        check(answer(good), leases=(audit,))


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ('{"vocab_size": 64}', 64),
        ('{"text_config": {"vocab_size": 65}}', 65),
        ('{"vocab_size": 66, "text_config": {"vocab_size": 65}}', 65),
        ("{}", UNKNOWN_VOCABULARY),
        ("[]", UNKNOWN_VOCABULARY),
        ("{", UNKNOWN_VOCABULARY),
        ('{"vocab_size": null}', UNKNOWN_VOCABULARY),
    ],
)
def test_the_vocabulary_is_the_configurations(config, size):
    assert vocabulary_of(config) == size


PART = Grown(lease=0, sample=1, version=Version(3), tokens=[5, 6], logprobs=[-0.5, -0.1])


def test_what_is_told_of_a_batch_is_believed_as_far_as_it_could_be_an_answer():
    hearing = Hearing([LEASE], 64)
    told = [PART, replace(PART, sample=0), replace(PART, tokens=[2], logprobs=[0.0])]
    assert hearing.believed(told, [Version(3)]) == told


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 4},
        {"tokens": [5, 64]},
        {"tokens": [5, -1]},
        {"tokens": [5]},
        {"tokens": [], "logprobs": []},
        {"logprobs": [math.nan, 0.0]},
        {"logprobs": [-math.inf, 0.0]},
    ],
)
def test_of_a_sample_nothing_is_believed_after_rubbish(changes):
    """Else its text would have a hole."""
    hearing, other = Hearing([LEASE], 64), replace(PART, sample=0)
    assert hearing.believed([replace(PART, **changes), PART, other], [Version(3)]) == [other]
    assert hearing.believed([PART, other], [Version(3)]) == [other]


@pytest.mark.parametrize("changes", [{"lease": 1}, {"lease": -1}, {"sample": 2}, {"sample": -1}])
def test_what_is_told_of_nobody_is_passed_over(changes):
    hearing = Hearing([LEASE], 64)
    assert hearing.believed([replace(PART, **changes), PART], [Version(3)]) == [PART]
