"""Advantages against numpy by hand, and the queue's order and drops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2p2p.ids import LeaseId, PeerId, Step
from echo2p2p.rollouts.batch import STD_EPSILON, GroupQueue, ScoredGroup, advantages
from echo2p2p.rollouts.trajectory import Group, Reason, Turn


def scored(name: str, oldest: int, newest: int | None = None) -> ScoredGroup:
    """Return a group of one turn from weights of these steps."""
    newest = oldest if newest is None else newest
    one = np.ones(1, dtype=np.uint32)
    turn = Turn(one, -np.ones(1, np.float32), Step(oldest), Step(newest), truncated=False)
    group = Group(LeaseId(name), PeerId("p"), 0, one, (turn,), Step(oldest), Step(newest))
    return ScoredGroup(group, np.ones(1), np.ones(1, dtype=np.bool_))


def names(groups: list[ScoredGroup] | None) -> str:
    assert groups is not None
    return "".join(item.group.lease_id for item in groups)


def all_of(count: int) -> np.ndarray:
    return np.ones(count, dtype=np.bool_)


# --- advantages -------------------------------------------------------------------------------


def test_advantages_are_rewards_normalised_within_the_group() -> None:
    # Mean 0.25, sample standard deviation sqrt((3 * 0.0625 + 0.5625) / 3) = 0.5.
    got = advantages(np.array([1.0, 0.0, 0.0, 0.0]), all_of(4))
    np.testing.assert_allclose(got, np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + STD_EPSILON))


def test_masked_rollouts_get_nothing_and_move_nobody() -> None:
    rewards = np.array([1.0, 500.0, 0.0, 0.5])
    mask = np.array([True, False, True, True])
    got = advantages(rewards, mask)
    assert got[1] == 0.0
    np.testing.assert_array_equal(got[mask], advantages(rewards[mask], all_of(3)))
    assert got[0] > 0.9


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_rewards_that_are_all_alike_teach_nothing(reward: float, count: int) -> None:
    # 0.1 seven times has a computed mean that is not 0.1: only an exact test gives zeros.
    assert not advantages(np.full(count, reward), all_of(count)).any()


def test_one_rollout_left_has_nothing_to_be_compared_with() -> None:
    assert not advantages(np.array([1.0, 0.0]), np.array([True, False])).any()
    assert not advantages(np.array([1.0, 0.0]), np.array([False, False])).any()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans()), min_size=1, max_size=12),
)
def test_advantages_are_finite_centred_and_in_the_order_of_rewards(
    drawn: list[tuple[float, bool]],
) -> None:
    rewards = np.array([reward for reward, _ in drawn])
    mask = np.array([keep for _, keep in drawn])
    got = advantages(rewards, mask)
    assert np.isfinite(got).all()
    assert not got[~mask].any()
    assert abs(got.sum()) < 1e-6 * max(1.0, np.abs(got).max()) * len(drawn)
    order = np.argsort(rewards[mask], kind="stable")
    assert (np.diff(got[mask][order]) >= 0).all()


# --- the queue --------------------------------------------------------------------------------


def test_groups_leave_by_the_age_of_their_weights_then_by_arrival() -> None:
    queue = GroupQueue(staleness_budget=9)
    for item in [scored("a", 3), scored("b", 1, 5), scored("c", 3), scored("d", 1), scored("e", 0)]:
        queue.add(item)
    assert names(queue.take(Step(3), 2)) == "eb"
    assert names(queue.take(Step(3), 3)) == "dac"
    assert len(queue) == 0


def test_a_batch_is_whole_or_not_at_all() -> None:
    queue = GroupQueue(staleness_budget=1)
    queue.add(scored("a", 0))
    assert queue.take(Step(0), 2) is None
    assert len(queue) == 1
    queue.add(scored("b", 0))
    assert names(queue.take(Step(0), 2)) == "ab"


def test_what_has_grown_too_old_is_dropped_and_told_what_is_just_young_enough_stays() -> None:
    queue = GroupQueue(staleness_budget=2)
    for item in [scored("a", 2), scored("b", 3), scored("c", 4), scored("d", 2, 9)]:
        queue.add(item)
    dropped = queue.drop_stale(Step(5))
    assert [(item.group.lease_id, item.reason) for item in dropped] == [
        ("a", Reason.STALE),
        ("d", Reason.STALE),
    ]
    assert queue.drop_stale(Step(5)) == []
    assert names(queue.take(Step(5), 2)) == "bc"


def test_taking_without_dropping_first_is_our_own_bug() -> None:
    queue = GroupQueue(staleness_budget=2)
    queue.add(scored("a", 0))
    with pytest.raises(AssertionError):
        queue.take(Step(3), 1)


def test_what_knows_lost_steps_is_dropped_though_its_oldest_token_survives() -> None:
    queue = GroupQueue(staleness_budget=9)
    for item in [scored("a", 4), scored("b", 5), scored("c", 3, 5), scored("d", 4, 4)]:
        queue.add(item)
    dropped = queue.drop_lost(Step(4))
    assert sorted((item.group.lease_id, item.reason) for item in dropped) == [
        ("b", Reason.DEAD_GENERATION),
        ("c", Reason.DEAD_GENERATION),
    ]
    assert names(queue.take(Step(4), 2)) == "ad"


def test_a_batch_put_back_is_taken_again_in_the_same_order() -> None:
    queue = GroupQueue(staleness_budget=9)
    for item in [scored("a", 1), scored("b", 2), scored("c", 3)]:
        queue.add(item)
    for item in queue.take(Step(3), 2) or []:
        queue.add(item)
    assert names(queue.take(Step(3), 3)) == "abc"
