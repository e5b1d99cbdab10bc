"""Admission before generation: lease only what can still be young enough when it is consumed.

DESIGN §6. Groups are consumed oldest first, ``batch`` trajectories a step, so the k-th trajectory
admitted (0-based, counted from the start of the surviving history) is consumed at learner step
``k // batch``. Its age then is that step minus the step v of the version that it is generated
with. Requiring age <= S for all gives ``k < (S + v + 1) * batch``.

With S = 0 this admits exactly one batch per version, so the loop is synchronous and still moves:
v is the step of the version that the *peer will generate with*, never of one still on its way.
"""

from __future__ import annotations

from echo2p2p.ids import Step


def room(
    *,
    learner_step: Step,
    queued: int,
    running: int,
    version_step: Step,
    staleness_budget: int,
    batch: int,
) -> int:
    """Return how many more trajectories may be leased to a peer; 0 or more.

    Args:
        learner_step: Optimizer steps taken in the surviving history; each consumed ``batch``.
        queued: Trajectories accepted and not yet consumed.
        running: Trajectories leased and not yet uploaded.
        version_step: Step of the version that the peer will generate with.
        staleness_budget: S, in steps; 0 or more.
        batch: R, trajectories per step.
    """
    assert staleness_budget >= 0
    assert batch > 0
    admitted = learner_step * batch + queued + running
    return max(0, (staleness_budget + version_step + 1) * batch - admitted)


def age(*, learner_step: Step, oldest_step: Step) -> int:
    """Return the age, in steps, of what the update at ``learner_step`` would consume."""
    return learner_step - oldest_step


def default_publication_period(staleness_budget: int) -> int:
    """Return κ for a budget S (DESIGN §6): max(1, S - 1) steps between publications."""
    return max(1, staleness_budget - 1)
