"""The little that all parts of a coordinator share: step, versions, members, and their signals.

It holds no decision. Whoever changes it says so; whoever waits parks and looks again. There is a
signal for each kind of waiter, because thousands may wait: an upload must not wake the long polls
of all peers, and a peer's heartbeat must wake no poll but its own.
"""

from __future__ import annotations

from typing import Final, Literal

import trio

from coordinator.membership import Membership
from echo2p2p.ids import Generation, PeerId, Step, Version
from echo2p2p.rollouts.trajectory import Expectation

VERSIONS_REMEMBERED: Final = 10_000
"""Newest publications whose step is known. A rollback goes back to a checkpoint, and its weights
are published anew, so nobody needs the number of an older one."""


class WorkPolls:
    """Long polls for work, by peer."""

    def __init__(self) -> None:
        self._lots: dict[PeerId, trio.lowlevel.ParkingLot] = {}

    def __len__(self) -> int:
        """Peers with a poll that waits."""
        return len(self._lots)

    async def park(self, peer_id: PeerId) -> None:
        """Wait until there may be work for this peer; endless."""
        lot = self._lots.setdefault(peer_id, trio.lowlevel.ParkingLot())
        try:
            await lot.park()
        finally:
            if not lot and self._lots.get(peer_id) is lot:
                del self._lots[peer_id]

    def wake(self, peer_id: PeerId) -> None:
        """Something about this peer has changed."""
        if (lot := self._lots.get(peer_id)) is not None:
            lot.unpark_all()

    def wake_all(self) -> None:
        """There may be work for anybody."""
        for lot in self._lots.values():
            lot.unpark_all()


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
        """Woken by everything, uploads too: for the few parts of the coordinator itself."""
        self.moved = trio.lowlevel.ParkingLot()
        """Woken when the step, a version or a member has changed."""
        self.published = trio.lowlevel.ParkingLot()
        """Woken by a publication; thousands may wait."""
        self.work = WorkPolls()
        self._steps: dict[Version, Step] = {}
        self._dead: frozenset[Version] = frozenset()

    def notify(self) -> None:
        """Wake everybody, except who waits for a publication."""
        self.notify_scored()
        self.moved.unpark_all()
        self.work.wake_all()

    def notify_scored(self) -> None:
        """Groups are ready for a batch: no news for any peer."""
        self.changed.unpark_all()

    def notify_member(self, peer_id: PeerId) -> None:
        """This member has another state or version: no news for other peers."""
        self.changed.unpark_all()
        self.moved.unpark_all()
        self.work.wake(peer_id)

    def add_version(self, version: Version, step: Step, *, dead: bool = False) -> None:
        """Note a publication."""
        if dead:
            self._dead |= {version}
        else:
            self._steps[version] = step
        self.latest = version
        self._forget_before(Version(version - VERSIONS_REMEMBERED + 1))
        self.published.unpark_all()
        self.notify()

    def _forget_before(self, oldest: Version) -> None:
        """Drop what only somebody from a long-gone past would name: it is unknown from now on."""
        while self._steps and (first := next(iter(self._steps))) < oldest:
            del self._steps[first]
        if self._dead and min(self._dead) < oldest:
            self._dead = frozenset(version for version in self._dead if version >= oldest)

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
        return Expectation(vocabulary=self.vocabulary, steps=self._steps, dead=self._dead)
