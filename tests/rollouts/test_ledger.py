"""The ledger balances whatever happens, and refuses what cannot happen."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2p2p.rollouts.ledger import Balance, Ledger, Moved, Place
from echo2p2p.rollouts.trajectory import Reason

LEGAL = {
    (None, Place.IN_FLIGHT),
    (Place.IN_FLIGHT, Place.QUEUED),
    (Place.IN_FLIGHT, Place.REJECTED),
    (Place.QUEUED, Place.TRAINED),
    (Place.QUEUED, Place.REJECTED),
    (Place.TRAINED, Place.REJECTED),
}


def moved(count: int, source: Place | None, target: Place, reason: Reason = Reason.STALE) -> Moved:
    return Moved(count, source, target, reason if target is Place.REJECTED else None)


@given(st.data())
def test_any_legal_events_balance_at_every_moment(data: st.DataObject) -> None:
    ledger = Ledger()
    there: dict[Place | None, int] = dict.fromkeys(Place, 0)
    rejected: dict[str, int] = {}
    for _ in range(data.draw(st.integers(0, 25))):
        possible = sorted(
            (pair for pair in LEGAL if pair[0] is None or there[pair[0]]),
            key=lambda pair: str(pair),
        )
        source, target = data.draw(st.sampled_from(possible))
        count = data.draw(st.integers(1, there[source] if source else 20))
        reason = data.draw(st.sampled_from(list(Reason)))
        ledger.apply(moved(count, source, target, reason))
        if source:
            there[source] -= count
        there[target] += count
        if target is Place.REJECTED:
            rejected[reason.value] = rejected.get(reason.value, 0) + count
        now = ledger.statistics()
        assert now.balances
        assert now == Balance(
            issued=sum(there[place] for place in Place),
            trained=there[Place.TRAINED],
            queued=there[Place.QUEUED],
            in_flight=there[Place.IN_FLIGHT],
            rejected=rejected,
        )
        assert Ledger(now).statistics() == now


@pytest.mark.parametrize(
    ("source", "target"), list(itertools.product([None, *Place], Place)), ids=str
)
def test_only_legal_moves_can_be_written_down(source: Place | None, target: Place) -> None:
    if (source, target) in LEGAL:
        assert moved(1, source, target).count == 1
    else:
        with pytest.raises(AssertionError):
            moved(1, source, target)


def test_a_reason_belongs_to_a_rejection_and_to_nothing_else() -> None:
    with pytest.raises(AssertionError):
        Moved(1, Place.QUEUED, Place.REJECTED)
    with pytest.raises(AssertionError):
        Moved(1, Place.QUEUED, Place.TRAINED, Reason.STALE)


@pytest.mark.parametrize("count", [0, -1])
def test_an_event_moves_something(count: int) -> None:
    with pytest.raises(AssertionError):
        Moved(count, None, Place.IN_FLIGHT)


def test_nothing_is_taken_that_is_not_there() -> None:
    ledger = Ledger()
    ledger.apply(moved(3, None, Place.IN_FLIGHT))
    with pytest.raises(AssertionError, match="not there"):
        ledger.apply(moved(4, Place.IN_FLIGHT, Place.QUEUED))


@pytest.mark.parametrize("term", ["issued", "trained", "queued", "in_flight"])
def test_a_balance_that_is_off_by_one_says_so(term: str) -> None:
    fair = {"issued": 10, "trained": 4, "queued": 3, "in_flight": 1, "rejected": {"stale": 2}}
    assert Balance(**fair).balances
    assert not Balance(**{**fair, term: fair[term] + 1}).balances
    assert not Balance(**{**fair, "rejected": {"stale": 2, "aborted": 1}}).balances
