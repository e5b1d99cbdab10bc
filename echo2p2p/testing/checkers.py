"""Invariants watched during a run: each sees every event and complains at the first breach.

A checker is a value with `see`; it returns what is wrong, or ``None``. They know event names and
fields only, so they can watch a simulated run as well as the event log of a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from echo2p2p.rollouts.ledger import Balance


class Checker(Protocol):
    """One invariant."""

    name: str

    def see(self, event: str, fields: Mapping[str, object]) -> str | None:
        """Look at one event; return what is wrong, or ``None``."""
        ...


class LedgerBalances:
    """issued = trained + queued + in flight + rejected, at every event.

    Args:
        balance: Returns the ledger as it is now, or ``None`` while there is none.
    """

    name = "ledger balances"

    def __init__(self, balance: Callable[[], Balance | None]) -> None:
        self._balance = balance

    def see(self, event: str, fields: Mapping[str, object]) -> str | None:
        """Look at the ledger, whatever the event."""
        del fields
        now = self._balance()
        return None if now is None or now.balances else f"after {event}: {now}"


class NothingTooOld:
    """No batch holds anything older than the staleness budget.

    Args:
        staleness_budget: S, in steps.
    """

    name = "nothing older than S is trained"

    def __init__(self, staleness_budget: int) -> None:
        self._staleness_budget = staleness_budget

    def see(self, event: str, fields: Mapping[str, object]) -> str | None:
        """Look at each step."""
        age = fields.get("age_max")
        if event == "step.done" and isinstance(age, int) and age > self._staleness_budget:
            return f"step {fields.get('step')} trained on age {age}"
        return None


class VersionsNeverFork:
    """Publication numbers count up by one; a peer never applies one that was not published.

    A coordinator may die between serving a version and saying so. So a peer may apply the very
    next number too early, as long as that number stands for something afterwards.
    """

    name = "versions never fork"

    def __init__(self) -> None:
        self._latest = -1
        self._ahead = -1

    def see(self, event: str, fields: Mapping[str, object]) -> str | None:
        """Look at each publication, each application, and what a restart has found."""
        version = fields.get("version")
        if event == "version.published":
            if version != self._latest + 1:
                return f"version {version} published after {self._latest}"
            self._latest += 1
        elif event in {"versions.restored", "chain.lost"}:
            latest = fields.get("latest", version)
            if not isinstance(latest, int) or not self._latest <= latest <= self._latest + 1:
                return f"restored up to {latest}, published up to {self._latest}"
            if latest < self._ahead:
                return f"restored up to {latest}, applied up to {self._ahead}"
            self._latest = latest
        elif event == "version.applied" and isinstance(version, int):
            if version > self._latest + 1:
                return f"version {version} applied, {self._latest} is the newest"
            self._ahead = max(self._ahead, version)
        return None


class VersionsAreWhole:
    """What a peer applies, and what its engine proves, is bit for bit what was published."""

    name = "a version is whole or absent"

    def __init__(self) -> None:
        self._digests: dict[object, object] = {}

    def see(self, event: str, fields: Mapping[str, object]) -> str | None:
        """Look at each publication, application and load."""
        version, digest = fields.get("version"), fields.get("digest")
        if event == "version.published":
            self._digests[version] = digest
        elif event == "versions.restored":
            self._digests[fields.get("latest")] = digest
        elif event in {"version.applied", "version.loaded"}:
            known = self._digests.get(version)
            if known is not None and digest != known:
                return f"{event} of {version} has digest {digest}, published was {known}"
        return None


class StepsOnlyGoBackByRollback:
    """The learner's steps count up by one, except at a rollback."""

    name = "steps only go back by rollback"

    def __init__(self) -> None:
        self._step = 0

    def see(self, event: str, fields: Mapping[str, object]) -> str | None:
        """Look at each step and each rollback."""
        step = fields.get("step")
        if not isinstance(step, int):
            return None
        if event == "step.done":
            if step != self._step + 1:
                return f"step {step} after {self._step}"
            self._step = step
        elif event == "run.rolled_back":
            if step > self._step:
                return f"rolled back from {self._step} to {step}"
            self._step = step
        return None
