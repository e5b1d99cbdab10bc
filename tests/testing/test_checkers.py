"""Each checker is silent on an honest history and speaks at the first breach."""

from collections.abc import Mapping

import pytest

from echo2p2p.rollouts.ledger import Balance
from echo2p2p.testing.checkers import (
    Checker,
    LedgerBalances,
    NothingTooOld,
    StepsOnlyGoBackByRollback,
    VersionsNeverFork,
)

Event = tuple[str, Mapping[str, object]]

FAIR = Balance(issued=3, trained=1, queued=1, in_flight=0, rejected={"stale": 1})
OFF = Balance(issued=4, trained=1, queued=1, in_flight=0, rejected={"stale": 1})


def first_breach(checker: Checker, events: list[Event]) -> tuple[int, str] | None:
    """Return the place of the first complaint and what it says."""
    for place, (name, fields) in enumerate(events):
        said = checker.see(name, fields)
        if said is not None:
            return place, said
    return None


def published(version: object) -> Event:
    return "version.published", {"version": version}


def applied(version: object) -> Event:
    return "version.applied", {"version": version}


def restored(latest: int) -> Event:
    return "versions.restored", {"latest": latest}


def lost(version: int) -> Event:
    return "chain.lost", {"version": version}


def step(number: int, age_max: object = 0) -> Event:
    return "step.done", {"step": number, "age_max": age_max}


def rolled_back(number: int) -> Event:
    return "run.rolled_back", {"step": number}


def test_the_ledger_is_looked_at_whatever_happens_and_not_before_there_is_one() -> None:
    now: Balance | None = None
    checker = LedgerBalances(lambda: now)
    assert checker.see("anything", {}) is None
    now = FAIR
    assert checker.see("anything", {}) is None
    now = OFF
    said = checker.see("upload.accepted", {})
    assert said is not None
    assert "upload.accepted" in said
    assert "issued=4" in said


def test_a_step_may_use_up_the_budget_and_not_more() -> None:
    events = [step(1, 0), step(2, 3), ("other", {"age_max": 9}), ("step.done", {}), step(3, 4)]
    found = first_breach(NothingTooOld(3), events)
    assert found is not None
    assert found[0] == 4
    assert "step 3" in found[1]
    assert "age 4" in found[1]


@pytest.mark.parametrize(
    ("events", "breach"),
    [
        ([published(0), applied(0), applied(0), published(1), applied(0), applied(1)], None),
        ([applied(1)], 0),
        ([published(1)], 0),
        ([published(0), published(0)], 1),
        ([published(0), published(2)], 1),
        ([published(0), published(1), published(0)], 2),
        ([published(0), applied(2)], 1),
        ([published(0), applied(1), published(1), applied(1)], None),
        ([published(0), applied(1), restored(1), published(2)], None),
        ([published(0), applied(1), restored(0)], 2),
        ([published(0), restored(2)], 1),
        ([published(0), published(1), restored(0)], 2),
        ([published(0), lost(1), published(2)], None),
        ([published(None)], 0),
        ([("version.loaded", {"version": 9}), applied(None)], None),
    ],
)
def test_versions_count_up_by_one_and_nobody_applies_what_was_not_published(
    events: list[Event], breach: int | None
) -> None:
    found = first_breach(VersionsNeverFork(), events)
    assert (None if found is None else found[0]) == breach


@pytest.mark.parametrize(
    ("events", "breach"),
    [
        ([step(1), step(2), rolled_back(1), step(2), step(3)], None),
        ([step(1), rolled_back(0), rolled_back(0), step(1)], None),
        ([rolled_back(0), step(1)], None),
        ([step(2)], 0),
        ([step(1), step(1)], 1),
        ([step(1), step(3)], 1),
        ([step(1), step(2), step(1)], 2),
        ([step(1), step(2), rolled_back(1), step(3)], 3),
        ([step(1), rolled_back(2)], 1),
        ([("checkpoint.saved", {"step": 7}), ("step.done", {}), step(1)], None),
    ],
)
def test_steps_count_up_by_one_and_go_back_by_a_rollback_only(
    events: list[Event], breach: int | None
) -> None:
    found = first_breach(StepsOnlyGoBackByRollback(), events)
    assert (None if found is None else found[0]) == breach


def test_checkers_have_names_for_people() -> None:
    checkers: list[Checker] = [
        LedgerBalances(lambda: None),
        NothingTooOld(1),
        VersionsNeverFork(),
        StepsOnlyGoBackByRollback(),
    ]
    assert len({checker.name for checker in checkers}) == 4
