"""Uploads: checked, made durable, acknowledged, scored, queued for the learner.

An upload is acknowledged after its transaction, before it is scored: the reward needs only the
item's seed and the tokens, so that scoring can be done again after a crash.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import trio

from coordinator.book import Book
from coordinator.leases import LeaseDesk
from coordinator.membership import MEMBERS_MAX, Member
from coordinator.run_state import RunState
from coordinator.schema import DamagedRow
from coordinator.task_keeper import Answer, TaskKeeper
from coordinator.task_port import Done, Turn
from echo2p2p.ids import LeaseId, PeerId
from echo2p2p.limits import HTTP_BODY_BYTES_MAX, MIB, Fill
from echo2p2p.net.ports import Journal
from echo2p2p.rollouts.admission import age
from echo2p2p.rollouts.batch import Dropped, GroupQueue, ScoredGroup
from echo2p2p.rollouts.ledger import Place
from echo2p2p.rollouts.trajectory import Group, Reason, Refused, check_upload
from echo2p2p.rollouts.trajectory import Turn as Generated
from echo2p2p.wire.messages import Outcome, Upload, UploadReply

UPLOAD_ACCEPTED: Final = "upload.accepted"
UPLOAD_REJECTED: Final = "upload.rejected"
GROUP_DROPPED: Final = "group.dropped"
TASK_FAILED: Final = "task.failed"
OUTCOMES_MAX: Final = 256
"""Outcomes kept for a peer until its next heartbeat; older ones are dropped."""
SCORED_AT_ONCE_MAX: Final = 64
SCORED_AT_ONCE_BYTES_MAX: Final = 32 * MIB
"""Groups in one call of the task worker, and their bytes; one group always goes."""
BACKLOG_BYTES_MAX: Final = 256 * MIB
"""Tokens and log-probs of groups that are not scored yet; beyond it uploads are put off."""


@dataclass(eq=False)
class _Watch:
    """Groups on their way, and those of them that a rollback has lost meanwhile."""

    groups: list[Group]
    lost: set[LeaseId] = field(default_factory=set)


class Intake:
    """From an upload to a scored group in the queue."""

    def __init__(
        self,
        *,
        book: Book,
        state: RunState,
        desk: LeaseDesk,
        tasks: TaskKeeper,
        queue: GroupQueue,
        staleness_budget: int,
        journal: Journal,
        backlog_bytes_max: int = BACKLOG_BYTES_MAX,
    ) -> None:
        self._backlog_bytes_max = backlog_bytes_max
        self._backlog_bytes = 0
        self._book = book
        self._state = state
        self._desk = desk
        self._tasks = tasks
        self._queue = queue
        self._staleness_budget = staleness_budget
        self._journal = journal
        self._unscored: deque[Group] = deque()
        self._arrived = trio.lowlevel.ParkingLot()
        self._watches: list[_Watch] = []
        self._outcomes: dict[PeerId, deque[Outcome]] = {}

    @property
    def unscored(self) -> int:
        """Accepted groups that wait for the task worker."""
        return len(self._unscored)

    @property
    def full(self) -> bool:
        """Whether no upload should be read now. Other threads may ask too."""
        return self._backlog_bytes >= self._backlog_bytes_max

    def fills(self) -> Iterator[Fill]:
        """Yield how full everything is that has a bound; of many alike, the fullest."""
        # A body that began while there was room may still come in.
        limit = self._backlog_bytes_max + HTTP_BODY_BYTES_MAX
        yield Fill("bytes that wait to be scored", self._backlog_bytes, limit)
        longest = max((len(kept) for kept in self._outcomes.values()), default=0)
        yield Fill("outcomes kept for a peer", longest, OUTCOMES_MAX)
        yield Fill("peers that outcomes are kept for", len(self._outcomes), MEMBERS_MAX)

    async def load(self) -> None:
        """Take up the accepted uploads that no step has consumed."""
        expect = self._state.expectation()
        for row in await self._book.queued():
            if isinstance(row, DamagedRow):
                await self._desk.give_up(row, Place.QUEUED)
                continue
            group = check_upload(row.upload, row.lease, row.seed, row.peer_id, expect)
            if isinstance(group, Refused):
                # It was fit when it was accepted; only a rollback can have changed that.
                await self._book.reject(
                    [(LeaseId(row.lease.lease_id), row.lease.samples)],
                    Place.QUEUED,
                    group.reason,
                )
                self._desk.give_back(row.seed)
            else:
                self._unscored.append(group)
                self._backlog_bytes += _bytes_of(group)
        self._arrived.unpark_all()  # `run` waits already, and perhaps no upload will ever come

    # --- uploads ------------------------------------------------------------------------------

    async def upload(self, member: Member, upload: Upload, body: bytes) -> UploadReply:
        """Decide one upload; when it returns, the decision is on disk.

        Args:
            member: The authenticated uploader.
            upload: Decoded from ``body``.
            body: Kept as it came, until a durable checkpoint contains it.
        """
        lease_id = LeaseId(upload.lease_id)
        held = self._desk.find(lease_id)
        if held is None:
            return await self._answer_late(member, lease_id)
        if (held.peer_id, held.incarnation) != (member.peer_id, member.incarnation):
            return _reply(lease_id, Reason.NOT_YOURS)
        group = check_upload(
            upload, held.lease, held.seed, member.peer_id, self._state.expectation()
        )
        samples = held.lease.samples
        if isinstance(group, Group) and self._too_old(group):
            group = Refused(Reason.STALE, f"from step {group.oldest_step}")
        if isinstance(group, Refused):
            if not await self._book.reject([(lease_id, samples)], Place.IN_FLIGHT, group.reason):
                return await self._answer_late(member, lease_id)
            aborted = group.reason is Reason.ABORTED
            self._desk.close(lease_id, give_back=True, aborted=aborted)
            self._journal.event(
                UPLOAD_REJECTED, peer=member.peer_id, reason=group.reason, detail=group.detail
            )
            return _reply(lease_id, group.reason)
        # Shielded: once it is queued on disk it must be scored.
        with trio.CancelScope(shield=True), self._watch([group]) as lost:
            if not await self._book.accept(lease_id, samples, body):
                return await self._answer_late(member, lease_id)
            self._desk.close(lease_id, give_back=False)
            if lost:
                await self.drop([Dropped(group, Reason.DEAD_GENERATION)])
            else:
                self._unscored.append(group)
                self._backlog_bytes += _bytes_of(group)
                self._arrived.unpark_all()
        self._journal.event(
            UPLOAD_ACCEPTED, peer=member.peer_id, lease=lease_id[:8], tokens=group.tokens
        )
        return _reply(lease_id, None)

    async def _answer_late(self, member: Member, lease_id: LeaseId) -> UploadReply:
        """Say what became of a lease that is no longer in flight."""
        found = await self._book.fate(lease_id)
        if found is None:
            return _reply(lease_id, Reason.UNKNOWN_LEASE)
        fate, reason, owner = found
        if owner != member.peer_id:
            return _reply(lease_id, Reason.NOT_YOURS)
        if fate in {Place.QUEUED, Place.TRAINED}:
            return _reply(lease_id, None, duplicate=True)
        return _reply(lease_id, reason or Reason.UNKNOWN_LEASE)

    def _too_old(self, group: Group) -> bool:
        steps = age(learner_step=self._state.step, oldest_step=group.oldest_step)
        return steps > self._staleness_budget

    # --- outcomes -----------------------------------------------------------------------------

    def decided(self, group: Group, reason: Reason | None) -> None:
        """Note for the peer's next heartbeat what became of its group in the end."""
        members = self._state.members
        if not members.is_live(group.peer_id):
            return  # nobody will ask
        if len(self._outcomes) > len(members):
            self._outcomes = {p: told for p, told in self._outcomes.items() if members.is_live(p)}
        waiting = self._outcomes.setdefault(group.peer_id, deque(maxlen=OUTCOMES_MAX))
        waiting.append(Outcome(lease_id=group.lease_id, accepted=reason is None, reason=reason))

    def take_outcomes(self, peer_id: PeerId) -> list[Outcome]:
        """Return and forget what was decided since the last call."""
        return list(self._outcomes.pop(peer_id, ()))

    async def drop(self, dropped: list[Dropped]) -> None:
        """Reject groups that had been accepted; their prompts are handed out again.

        Not those that the task has failed on: it would fail again, and again.
        """
        for reason in sorted({item.reason for item in dropped}):
            groups = [item.group for item in dropped if item.reason is reason]
            await self._book.reject(
                [(group.lease_id, len(group.turns)) for group in groups], Place.QUEUED, reason
            )
            for group in groups:
                self.decided(group, reason)
                if reason is not Reason.TASK_FAILED:
                    self._desk.give_back(group.seed)
            self._journal.event(GROUP_DROPPED, reason=reason.value, groups=len(groups))

    # --- scoring ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Score what has been accepted; runs until cancelled.

        Raises:
            ChildError: The task worker is gone and could not be started again.
            ConfigError: Nor ever could be, with these settings.
        """
        while True:
            while not self._unscored:
                await self._arrived.park()
            groups = self._next_unscored()
            with self._watch(groups) as lost:
                flat = await self._tasks.score(
                    [(group.seed, [_turn(turn)]) for group in groups for turn in group.turns]
                )
                each = iter(flat)
                answers = [[next(each) for _ in group.turns] for group in groups]
                for group, verdicts in zip(groups, answers, strict=True):
                    if group.lease_id in lost:
                        await self.drop([Dropped(group, Reason.DEAD_GENERATION)])
                    else:
                        await self._scored(group, verdicts)
                    self._backlog_bytes -= _bytes_of(group)
            self._state.notify_scored()

    def _next_unscored(self) -> list[Group]:
        """Take what goes into one call of the task worker, at least one group."""
        groups, room = [self._unscored.popleft()], SCORED_AT_ONCE_BYTES_MAX
        room -= _bytes_of(groups[0])
        while self._unscored and len(groups) < SCORED_AT_ONCE_MAX:
            room -= _bytes_of(self._unscored[0])
            if room < 0:
                break
            groups.append(self._unscored.popleft())
        return groups

    async def _scored(self, group: Group, answers: list[Answer]) -> None:
        rewards = np.zeros(len(answers), dtype=np.float64)
        mask = np.zeros(len(answers), dtype=np.bool_)
        for index, answer in enumerate(answers):
            if isinstance(answer, Done) and not answer.verdict.masked:
                rewards[index], mask[index] = answer.verdict.rewards[0], True
            elif not isinstance(answer, Done):
                detail = getattr(answer, "detail", "the episode goes on; one turn was expected")
                self._journal.event(TASK_FAILED, lease=group.lease_id[:8], detail=detail)
        if not mask.any():
            await self.drop([Dropped(group, Reason.TASK_FAILED)])
        else:
            self._queue.add(ScoredGroup(group, rewards, mask))

    # --- rollbacks ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watch(self, groups: list[Group]) -> Iterator[set[LeaseId]]:
        """Give the ids of those groups that a rollback loses while they are elsewhere."""
        watch = _Watch(groups)
        self._watches.append(watch)
        try:
            yield watch.lost
        finally:
            self._watches.remove(watch)

    async def roll_back(self) -> None:
        """Drop what waits and was sampled from steps that no longer exist.

        Groups that are being written or scored right now are dropped as soon as that is over.
        """
        floor = self._state.rolled_back_to
        assert floor is not None
        for watch in self._watches:
            watch.lost |= {g.lease_id for g in watch.groups if g.newest_step > floor}
        lost = [group for group in self._unscored if group.newest_step > floor]
        self._unscored = deque(g for g in self._unscored if g.newest_step <= floor)
        self._backlog_bytes -= sum(_bytes_of(group) for group in lost)
        dropped = [Dropped(group, Reason.DEAD_GENERATION) for group in lost]
        await self.drop(dropped + self._queue.drop_lost(floor))


def _bytes_of(group: Group) -> int:
    return sum(turn.tokens.nbytes + turn.logprobs.nbytes for turn in group.turns)


def _turn(turn: Generated) -> Turn:
    return Turn(turn.tokens, "length" if turn.truncated else "stop")


def _reply(lease_id: LeaseId, reason: Reason | None, *, duplicate: bool = False) -> UploadReply:
    outcome = Outcome(lease_id=lease_id, accepted=reason is None, reason=reason)
    return UploadReply(outcome=outcome, duplicate=duplicate)
