"""`check_upload`: the honest upload passes, and each lie is refused for its own reason."""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.errors import RemoteProtocolError
from echo2p2p.ids import PeerId, Step, Version
from echo2p2p.rollouts.trajectory import (
    LOGPROB_MAX,
    LOGPROB_MIN,
    Expectation,
    Group,
    Reason,
    Refused,
    check_upload,
)
from echo2p2p.wire import codec
from echo2p2p.wire.arrays import from_logprobs, from_tokens
from echo2p2p.wire.messages import Array, Lease, Sample, Sampling, Span, Upload

VOCABULARY = 64
STOP = 2
TOKENS_MAX = 5
PEER = PeerId("p" * 32)
EXPECT = Expectation(
    vocabulary=VOCABULARY,
    steps={Version(3): Step(30), Version(4): Step(40), Version(6): Step(35), Version(7): Step(45)},
    dead=frozenset({Version(5)}),
)
"""Version 5 was rolled back to step 35, which version 6 holds."""

LEASE = Lease(
    lease_id="l",
    kind="train",
    prompt=from_tokens([1, 10, 11]),
    samples=2,
    seeds=[7, 8],
    sampling=Sampling(temperature=1.0, top_p=1.0, top_k=0),
    tokens_max=TOKENS_MAX,
    stop_ids=[STOP, 3],
    forced=None,
    version=3,
    deadline_s=60.0,
    affinity=None,
)


def sample(
    tokens: list[int],
    *,
    logprobs: list[float] | None = None,
    spans: list[tuple[int, int, int]] | None = None,
    finish: str = "stop",
) -> Sample:
    """Return a sample; spans are (version, start, end)."""
    return Sample(
        tokens=from_tokens(tokens),
        logprobs=from_logprobs([-0.5] * len(tokens) if logprobs is None else logprobs),
        spans=[
            Span(version=version, start=start, end=end)
            for version, start, end in ([(3, 0, len(tokens))] if spans is None else spans)
        ],
        finish=finish,
    )


GOOD = sample([9, 8, STOP])
CUT = sample([9, 8, 7, 6, 5], finish="length")


def check(*samples: Sample, lease: Lease = LEASE, expect: Expectation = EXPECT) -> Group | Refused:
    upload = Upload(incarnation=1, lease_id="l", samples=list(samples), seconds=0.1)
    return check_upload(upload, lease, 99, PEER, expect)


def reason_of(bad: Sample) -> Reason | None:
    """Return why an upload is refused whose second sample is ``bad``; ``None``: it is not."""
    result = check(GOOD, bad)
    if isinstance(result, Group):
        return None
    assert result.detail.startswith("sample 1: ")
    return result.reason


def test_an_honest_upload_becomes_a_group_with_its_steps() -> None:
    two_versions = sample([9, 8, 7, 3], spans=[(3, 0, 1), (4, 1, 4)])
    group = check(two_versions, CUT)
    assert isinstance(group, Group)
    assert (group.lease_id, group.peer_id, group.seed) == ("l", PEER, 99)
    assert group.prompt.tolist() == [1, 10, 11]
    assert [turn.tokens.tolist() for turn in group.turns] == [[9, 8, 7, 3], [9, 8, 7, 6, 5]]
    assert [turn.truncated for turn in group.turns] == [False, True]
    assert [(turn.oldest_step, turn.newest_step) for turn in group.turns] == [(30, 40), (30, 30)]
    assert (group.oldest_step, group.newest_step) == (30, 40)
    assert group.tokens == 9
    assert group.turns[0].tokens.dtype == np.uint32
    assert group.turns[0].logprobs.dtype == np.float32


def test_the_oldest_step_is_not_always_the_first_spans() -> None:
    # Version 6 is newer than version 4, but was published after a rollback to an earlier step.
    group = check(GOOD, sample([9, STOP], spans=[(4, 0, 1), (6, 1, 2)]))
    assert isinstance(group, Group)
    assert (group.turns[1].oldest_step, group.turns[1].newest_step) == (35, 40)


def test_an_upload_without_samples_gives_the_lease_back() -> None:
    assert check() == Refused(Reason.ABORTED, "the peer gives the lease back")


@pytest.mark.parametrize("count", [1, 3])
def test_the_count_of_samples_must_be_the_leases(count: int) -> None:
    result = check(*[GOOD] * count)
    assert isinstance(result, Refused)
    assert result.reason is Reason.MALFORMED


def test_an_aborted_sample_is_no_lie_but_ends_the_lease() -> None:
    assert reason_of(sample([], finish="aborted")) is Reason.ABORTED


@pytest.mark.parametrize(
    "bad",
    [
        sample([]),
        sample([9, 9, 9, 9, 9, STOP]),
        sample([9, STOP], logprobs=[-1.0]),
        sample([9, STOP], logprobs=[-1.0, -1.0, -1.0]),
        msgspec.structs.replace(GOOD, tokens=from_logprobs([1.0, 2.0, 3.0])),
        msgspec.structs.replace(GOOD, logprobs=from_tokens([1, 2, 3])),
        msgspec.structs.replace(GOOD, tokens=Array(dtype="u4", length=3, data=bytes(11))),
        msgspec.structs.replace(GOOD, tokens=Array(dtype="u4", length=-1, data=b"")),
    ],
    ids=["empty", "too long", "few log-probs", "many log-probs", "floats", "ids", "torn", "-1"],
)
def test_lengths_and_dtypes_must_fit(bad: Sample) -> None:
    assert reason_of(bad) is Reason.MALFORMED


def test_ids_must_be_in_the_vocabulary() -> None:
    assert reason_of(sample([VOCABULARY - 1, STOP])) is None
    assert reason_of(sample([VOCABULARY, STOP])) is Reason.OUT_OF_VOCABULARY
    assert reason_of(sample([2**32 - 1, STOP])) is Reason.OUT_OF_VOCABULARY


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf, 0.01, 3.0])
def test_log_probs_must_be_finite_and_not_positive(lie: float) -> None:
    assert reason_of(sample([9, STOP], logprobs=[lie, -1.0])) is Reason.NOT_FINITE
    assert reason_of(sample([9, STOP], logprobs=[-1.0, lie])) is Reason.NOT_FINITE


def test_log_probs_may_be_positive_by_float_error_and_very_negative() -> None:
    assert reason_of(sample([9, STOP], logprobs=[LOGPROB_MAX / 2, LOGPROB_MIN])) is None


def test_nobody_samples_what_has_no_probability_in_single_precision() -> None:
    assert np.float32(math.exp(LOGPROB_MIN)) == 0.0
    lie = np.nextafter(np.float32(LOGPROB_MIN), np.float32(-math.inf))
    assert reason_of(sample([9, STOP], logprobs=[-1.0, float(lie)])) is Reason.NOT_FINITE


@pytest.mark.parametrize(
    "bad",
    [
        sample([9, 8], finish="stop"),
        sample([9, 8, 7, 6, STOP], finish="length"),
        sample([9, STOP, 8, STOP]),
        sample([9, 3, 8, 7, 6], finish="length"),
        sample([9, 8, 7], finish="length"),
    ],
    ids=["stop without one", "length with one", "two stops", "stop inside", "cut too early"],
)
def test_the_finish_must_fit_the_tokens(bad: Sample) -> None:
    assert reason_of(bad) is Reason.MALFORMED


@pytest.mark.parametrize(
    "bad",
    [sample([VOCABULARY, STOP]), sample([9, STOP], logprobs=[math.nan, -1.0]), sample([3, STOP])],
    ids=["vocabulary", "not finite", "stop inside"],
)
def test_a_refusal_names_the_sample_that_is_wrong(bad: Sample) -> None:
    for samples, where in (([bad, GOOD], "sample 0:"), ([CUT, bad], "sample 1:")):
        upload = Upload(incarnation=1, lease_id="l", samples=samples, seconds=1.0)
        refused = check_upload(upload, LEASE, 7, PEER, EXPECT)
        assert isinstance(refused, Refused)
        assert refused.detail.startswith(where)


def test_a_stop_at_the_very_limit_is_a_stop() -> None:
    assert reason_of(sample([9, 8, 7, 6, STOP])) is None


def test_without_stop_ids_only_the_limit_ends_a_sample() -> None:
    endless = msgspec.structs.replace(LEASE, stop_ids=[])
    assert isinstance(check(CUT, CUT, lease=endless), Group)
    stopped = check(CUT, GOOD, lease=endless)
    assert isinstance(stopped, Refused)
    assert stopped.reason is Reason.MALFORMED


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(3, 1, 3)],
        [(3, 0, 2)],
        [(3, 0, 4)],
        [(3, 0, 1), (4, 2, 3)],
        [(3, 0, 2), (4, 1, 3)],
        [(3, 0, 0), (3, 0, 3)],
        [(3, 0, 3), (3, 3, 2)],
        [(4, 0, 2), (3, 2, 3)],
        [(2, 0, 3)],
    ],
    ids=[
        "none",
        "late start",
        "early end",
        "too long",
        "gap",
        "overlap",
        "empty",
        "backwards",
        "version goes down",
        "older than the lease asks",
    ],
)
def test_spans_must_tile_the_sample_with_versions_that_never_go_down(
    spans: list[tuple[int, int, int]],
) -> None:
    assert reason_of(sample([9, 8, STOP], spans=spans)) is Reason.MALFORMED


@pytest.mark.parametrize(
    ("version", "reason"),
    [(5, Reason.DEAD_GENERATION), (8, Reason.UNKNOWN_VERSION), (2**64 - 1, Reason.UNKNOWN_VERSION)],
)
def test_versions_must_be_alive(version: int, reason: Reason) -> None:
    assert reason_of(sample([9, STOP], spans=[(version, 0, 2)])) is reason
    assert reason_of(sample([9, STOP], spans=[(3, 0, 1), (version, 1, 2)])) is reason


# --- any garbage ------------------------------------------------------------------------------

numbers = st.integers(-1, 8) | st.integers(-(2**63), 2**64 - 1)
arrays = st.builds(
    Array,
    dtype=st.sampled_from(["u4", "f4"]),
    length=st.integers(-1, 6),
    data=st.binary(max_size=24)
    | st.lists(st.sampled_from([2, 3, 9, 63, 64]), max_size=6).map(
        lambda tokens: from_tokens(tokens).data
    )
    | st.lists(st.floats(width=32), max_size=6).map(lambda values: from_logprobs(values).data),
)
samples = st.builds(
    Sample,
    tokens=arrays,
    logprobs=arrays,
    spans=st.lists(st.builds(Span, version=numbers, start=numbers, end=numbers), max_size=3),
    finish=st.sampled_from(["stop", "length", "aborted"]),
)


@settings(deadline=None)
@given(st.lists(samples, max_size=3))
def test_any_garbage_of_the_right_types_gives_a_group_or_a_refusal(garbage: list[Sample]) -> None:
    assert isinstance(check(*garbage), Group | Refused)


def mutations(good: bytes) -> st.SearchStrategy[bytes]:
    """Return bytes near a good message: a few replaced, some cut off."""
    edits = st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=4)

    def apply(drawn: tuple[list[tuple[int, int]], int]) -> bytes:
        changed = bytearray(good)
        for position, value in drawn[0]:
            changed[position] = value
        return bytes(changed[: len(changed) - drawn[1]])

    return st.tuples(edits, st.integers(0, 2)).map(apply)


WHOLE = codec.encode(Upload(incarnation=1, lease_id="l", samples=[GOOD, CUT], seconds=0.1))


def settled(read: Callable[[], Group | Refused]) -> bool:
    try:
        return isinstance(read(), Group | Refused)
    except RemoteProtocolError:
        return True


@settings(deadline=None)
@given(mutations(WHOLE))
def test_any_damaged_upload_gives_a_group_a_refusal_or_the_senders_error(data: bytes) -> None:
    assert settled(
        lambda: check_upload(codec.decode(data, Upload), LEASE, 99, PEER, EXPECT),
    )


@settings(deadline=None)
@given(st.lists(st.sampled_from([GOOD, CUT]) | samples, min_size=2, max_size=2))
def test_whatever_passes_has_what_the_lease_promised(uploaded: list[Sample]) -> None:
    group = check(*uploaded)
    if isinstance(group, Refused):
        return
    assert len(group.turns) == LEASE.samples
    for turn in group.turns:
        assert 0 < turn.tokens.size <= TOKENS_MAX
        assert turn.tokens.size == turn.logprobs.size
        assert int(turn.tokens.max()) < VOCABULARY
        assert np.isfinite(turn.logprobs).all()
        assert turn.truncated == (int(turn.tokens[-1]) not in LEASE.stop_ids)
        assert turn.oldest_step in EXPECT.steps.values()
        assert turn.oldest_step <= turn.newest_step
