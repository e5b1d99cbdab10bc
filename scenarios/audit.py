"""What a coordinator's store says, compared with what its clients were told and its learner did.

The store's rows, the clients' record and the learner's own history come from three places that no
fault reaches together. The history follows restarts: a start at a checkpoint takes back all later
steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from coordinator.ledger_rows import balance, recount
from echo2p2p.net.ports import Rows
from scenarios.record import Record

AFTER_ACCEPTANCE: Final = frozenset({"dead_generation", "stale", "unused"})
"""Why an acknowledged trajectory may be left out of training all the same."""


@dataclass
class Findings:
    """What is wrong, by kind; all empty in a sound run. Equal lines are one finding."""

    lost: list[str] = field(default_factory=list)
    """Acknowledged leases that the store does not have as accepted."""
    twice: list[str] = field(default_factory=list)
    """Samples, or leases, that the surviving history has trained on more than once."""
    unbalanced: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """All of them."""
        return [*self.lost, *self.twice, *self.unbalanced, *self.other]


@dataclass(frozen=True)
class Look:
    """What the store says."""

    findings: Findings
    steps: int
    trained: int
    queued: int


History = list[tuple[int, list[str]]]
"""The steps that no restart has taken back, each with the names of its samples."""


def audit_rows(rows: Rows, history: History, record: Record, *, groups_per_step: int) -> Look:
    """Compare the store of a coordinator that is not running.

    Args:
        rows: Its database.
        history: What the learner has consumed.
        record: What the clients know.
        groups_per_step: Of a batch.
    """
    findings = Findings()
    counted, recounted = balance(rows), recount(rows)
    if not counted.balances or counted != recounted:
        findings.unbalanced.append(f"by event {counted}, by row {recounted}")
    fates = _fates(rows)
    steps = [cast("int", row[0]) for row in rows.execute("SELECT step FROM steps").fetchall()]
    _check_acknowledged(fates, record, findings)
    _check_steps(fates, steps, groups_per_step, findings)
    _check_consumed(history, fates, max(steps, default=0), record, findings)
    return Look(findings, len(steps), counted.trained, counted.queued)


def surviving(entries: Sequence[tuple[str, int, list[str]]]) -> History:
    """Return what a learner's log leaves: ``("start", step, [])`` takes back all later steps."""
    history: History = []
    for what, step, samples in entries:
        if what == "start":
            history = [(earlier, names) for earlier, names in history if earlier <= step]
        else:
            history.append((step, samples))
    return history


Fates = dict[str, tuple[str, str | None, int | None]]
"""Fate, reason and step of each lease."""


def _fates(rows: Rows) -> Fates:
    found = rows.execute("SELECT lease_id, fate, reason, step FROM leases").fetchall()
    return {
        lease: (fate, reason, step)
        for lease, fate, reason, step in cast(
            "list[tuple[str, str, str | None, int | None]]", found
        )
    }


def _check_acknowledged(fates: Fates, record: Record, findings: Findings) -> None:
    for lease in record.acknowledged:
        fate, reason, _ = fates.get(lease, ("missing", None, None))
        if fate not in {"queued", "trained"} and reason not in AFTER_ACCEPTANCE:
            findings.lost.append(f"lease {lease[:8]} was acknowledged and is {reason or fate}")
    for lease, reason in record.refused.items():
        fate, _, _ = fates.get(lease, ("missing", None, None))
        if fate in {"queued", "trained"}:
            findings.other.append(f"lease {lease[:8]} was refused ({reason}) and is {fate}")


def _check_steps(fates: Fates, steps: list[int], groups_per_step: int, findings: Findings) -> None:
    """Every step of the history has consumed one whole batch of its own."""
    consumed = Counter(step for fate, _, step in fates.values() if fate == "trained")
    if sorted(steps) != list(range(1, len(steps) + 1)):
        findings.other.append(f"steps {sorted(steps)[:20]} have gaps")
    for step in sorted({*steps, *(step for step in consumed if step is not None)}):
        if consumed[step] != groups_per_step:
            findings.twice.append(f"step {step} has {consumed[step]} groups of its own")


def _check_consumed(
    history: History, fates: Fates, newest: int, record: Record, findings: Findings
) -> None:
    """What the learner really consumed is what the store says, once."""
    seen: Counter[str] = Counter()
    for step, samples in history:
        for sample in samples:
            seen[sample] += 1
            lease = record.samples.get(sample)
            if lease is None:
                findings.other.append(f"step {step} consumed a sample that nobody sent")
            elif step <= newest and fates.get(lease, ("", None, None))[0::2] != ("trained", step):
                fate = fates.get(lease)
                findings.other.append(f"step {step} consumed {lease[:8]}, which is {fate}")
    repeated = [(name, count) for name, count in seen.items() if count > 1]
    findings.twice += [f"sample {name} was trained on {count} times" for name, count in repeated]
