"""The little that all parts of a coordinator share: step, versions, members, and one signal.

It holds no decision. Whoever changes it calls `notify`; whoever waits for any change parks on
`changed` and looks again.
"""

from __future__ import annotations

from typing import Literal

import trio

from coordinator.membership import Membership
from echo2p2p.ids import Generation, Step, Version
from echo2p2p.rollouts.trajectory import Expectation


class RunState:
    """One run, now."""

    def __init__(self, *, run_id: str, members: Membership, vocabulary: int) -> None:
        self.run_id = run_id
        self.members = members
        self.vocabulary = vocabulary
        self.step = Step(0)
        """Optimizer steps in the surviving history."""
        self.generation = Generation(0)
        self.rolled_back_to: Step | None = None
        """Where the current generation started, if it is not the first."""
        self.latest: Version | None = None
        self.leasing = False
        """False while there is no learner to train what would be generated."""
        self.outcome: Literal["running", "finished", "failed"] = "running"
        self.changed = trio.lowlevel.ParkingLot()
        self._steps: dict[Version, Step] = {}
        self._dead: set[Version] = set()

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        self.changed.unpark_all()

    def add_version(self, version: Version, step: Step, *, dead: bool = False) -> None:
        """Note a publication."""
        if dead:
            self._dead.add(version)
        else:
            self._steps[version] = step
        self.latest = version
        self.notify()

    def roll_back(self, step: Step) -> None:
        """Versions of later steps die."""
        lost = {version for version, its in self._steps.items() if its > step}
        self._dead |= lost
        for version in lost:
            del self._steps[version]
        self.step = step
        self.rolled_back_to = step
        self.notify()

    def version_step(self, version: int) -> Step | None:
        """Return a living version's step."""
        return self._steps.get(Version(version))

    def expectation(self) -> Expectation:
        """Return what an upload must fit."""
        return Expectation(
            vocabulary=self.vocabulary, steps=self._steps, dead=frozenset(self._dead)
        )
