"""Hands out work: a lease is one generation call, promised to one peer until its deadline.

A peer asks with the version that it would generate with; admission (`echo2p2p.rollouts.admission`)
says how many trajectories that version can still carry to a batch in time. Peers wait in a long
poll until there is room. Prompts of leases that came to nothing are handed out again first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import trio
from blake3 import blake3
from numpy.typing import NDArray

from coordinator.book import Book
from coordinator.config import RolloutsSection
from coordinator.membership import Member, State
from coordinator.run_state import RunState
from coordinator.schema import DamagedRow, OpenLease
from coordinator.task_keeper import TaskKeeper
from coordinator.task_port import Failed, Opening, TaskInfo
from echo2p2p.errors import ChildError, ConfigError
from echo2p2p.ids import Incarnation, LeaseId, PeerId, Version
from echo2p2p.limits import LEASES_PER_CALL_MAX
from echo2p2p.net.ports import Entropy, Journal
from echo2p2p.rollouts.admission import room
from echo2p2p.rollouts.ledger import Place
from echo2p2p.rollouts.trajectory import Reason
from echo2p2p.wire.arrays import from_tokens
from echo2p2p.wire.messages import Lease, LeaseRequest, Sampling

LEASES_ISSUED: Final = "leases.issued"
LEASES_ENDED: Final = "leases.ended"
ITEM_FAILED: Final = "item.failed"
LEASE_DAMAGED: Final = "lease.damaged"
"""The disk gave back other bytes of it, or of its upload, than were written."""
RETURNED_MAX: Final = 100_000
"""Prompts waiting to be handed out again; the oldest are forgotten beyond that."""
PROMPT_BYTES_PER_TOKEN: Final = 4
ABORTS_MAX: Final = 5
"""Peers that may give a prompt back unanswered before it is left out: perhaps nobody can."""
EXPIRIES_REMEMBERED: Final = 10_000
"""Peers that let leases expire; the first are forgotten beyond that."""
ABORTS_REMEMBERED: Final = 10_000
"""Prompts of which that is counted; the oldest are forgotten beyond that."""


@dataclass(frozen=True)
class _Held:
    """A lease in flight and when it ends."""

    open: OpenLease
    deadline_s: float


class LeaseDesk:
    """All leases in flight."""

    def __init__(
        self,
        *,
        book: Book,
        state: RunState,
        tasks: TaskKeeper,
        info: TaskInfo,
        settings: RolloutsSection,
        item_secret: bytes,
        entropy: Entropy,
        journal: Journal,
    ) -> None:
        self._book = book
        self._state = state
        self._tasks = tasks
        self._info = info
        self._settings = settings
        self._item_secret = item_secret
        self._rng = entropy.rng("leases")
        self._journal = journal
        prompt_bytes = PROMPT_BYTES_PER_TOKEN * (info.positions_max or 0)
        self._groups_max = max(
            settings.prompts_per_step,  # a batch must fit, or nothing would ever be trained
            settings.queue_bytes_max // (settings.group_bytes_max + prompt_bytes),
        )
        self._held: dict[LeaseId, _Held] = {}
        self._returned: deque[int] = deque(maxlen=RETURNED_MAX)
        self._aborts: dict[int, int] = {}
        self._allowed: dict[PeerId, int] = {}
        """How many leases each may hold of those who let some expire."""
        self._next_item = 0
        self._granting = trio.Lock()
        self._opening = trio.CancelScope()
        """Around the question for prompts that is under way; entered once."""
        self._failed = trio.Event()
        self._failure: ChildError | ConfigError | None = None

    async def load(self) -> None:
        """Take up the leases that were in flight when we last stopped."""
        stored = await self._book.get("next_item")
        self._next_item = int(stored) if stored else 0
        deadline_s = trio.current_time() + self._settings.lease_timeout_s
        for lease in await self._book.open_leases():
            if isinstance(lease, DamagedRow):
                await self.give_up(lease, Place.IN_FLIGHT)
                continue
            self._held[LeaseId(lease.lease.lease_id)] = _Held(lease, deadline_s)

    async def give_up(self, row: DamagedRow, place: Place) -> None:
        """Reject what the disk has damaged; its prompt is handed out again."""
        await self._book.reject([(row.lease_id, row.samples)], place, Reason.DAMAGED)
        self._journal.event(LEASE_DAMAGED, peer=row.peer_id, lease=row.lease_id, was=place.value)
        self.give_back(row.seed)

    # --- granting -----------------------------------------------------------------------------

    async def request(self, member: Member, request: LeaseRequest) -> list[Lease]:
        """Wait until there is work for this peer, at most ``request.wait_s`` seconds.

        Returns an empty list when the time is over; what there is at once is given even to a peer
        that does not wait. Cancel-safe: what was issued meanwhile is taken back. (Leases whose
        answer is lost on its way end with their deadline.)
        """
        deadline_s = trio.current_time() + request.wait_s
        while True:
            leases = await self._grant(member, request)
            if leases or trio.current_time() >= deadline_s:
                return leases
            with trio.move_on_at(deadline_s):
                await self._state.work.park(member.peer_id)

    async def _grant(self, member: Member, request: LeaseRequest) -> list[Lease]:
        if self._count(member, request)[0] <= 0:  # most who are woken: they need not queue
            return []
        async with self._granting:
            leases = await self._grant_now(member, request)
        if leases:
            try:
                await trio.lowlevel.checkpoint_if_cancelled()
            except trio.Cancelled:
                with trio.CancelScope(shield=True):
                    await self._end(self._open(leases), Reason.ABORTED)
                raise
            self._journal.event(
                LEASES_ISSUED, peer=member.peer_id, leases=len(leases), version=request.version
            )
        return leases

    async def _grant_now(self, member: Member, request: LeaseRequest) -> list[Lease]:
        count, version = self._count(member, request)
        if count <= 0:
            return []
        seeds = self._draw(count)
        openings: list[Opening | Failed] = []
        # Who hangs up does not take the worker along; the end of the run does.
        with trio.CancelScope(shield=True) as self._opening:
            try:
                openings = await self._tasks.open(seeds)
            except (ChildError, ConfigError) as error:
                self._failure = error
                self._failed.set()
                return []
        if self._opening.cancelled_caught:
            self._returned.extendleft(reversed(seeds))
            return []
        whole = [opening for opening in openings if isinstance(opening, Opening)]
        for failed in (opening for opening in openings if not isinstance(opening, Opening)):
            self._journal.event(ITEM_FAILED, detail=failed.detail)
        if not whole:
            return []
        seeds = [opening.seed for opening in whole]
        leases = [self._lease(opening.prompt, version) for opening in whole]
        with trio.CancelScope(shield=True):  # a half-made grant would strand its prompts
            await self._book.put("next_item", str(self._next_item).encode())
            await self._book.issue(
                member.peer_id, member.incarnation, list(zip(leases, seeds, strict=True))
            )
            self._hold(member, leases, seeds)
            if self._state.members.find(member.peer_id, member.incarnation) is None:
                await self.end_peer(member.peer_id, member.incarnation)  # it went meanwhile
                return []
        return leases

    def _count(self, member: Member, request: LeaseRequest) -> tuple[int, Version]:
        """Return how many leases this request may get now (0 or less: none), of which version."""
        version = Version(request.version)
        current = self._state.members.find(member.peer_id, member.incarnation)
        if current is None or current.state is not State.ACTIVE or not self._state.leasing:
            return 0, version
        # A peer that waits here may have switched since it asked; its heartbeat says so.
        version = Version(max(version, current.version or 0))
        most = min(request.leases_max, LEASES_PER_CALL_MAX, self._room(version))
        allowed = self._allowed.get(member.peer_id)
        if allowed is not None:
            most = min(most, allowed - self._held_by(member.peer_id))
        return most, version

    def _room(self, version: Version) -> int:
        """Return how many whole groups may be leased for the peer's version."""
        step = self._state.version_step(version)
        if step is None:
            return 0
        balance = self._book.ledger.statistics()
        memory = self._groups_max - -(
            -(balance.queued + balance.in_flight) // self._settings.samples_per_prompt
        )
        trajectories = room(
            learner_step=self._state.step,
            queued=balance.queued,
            running=balance.in_flight,
            version_step=step,
            staleness_budget=self._settings.staleness_budget,
            batch=self._settings.batch,
        )
        return max(0, min(trajectories // self._settings.samples_per_prompt, memory))

    def _draw(self, count: int) -> list[int]:
        """Return item seeds: returned ones first, then new ones that no peer can guess.

        Tasks are public code, so whoever knew an item's seed would know its answer.
        """
        seeds: list[int] = []
        while len(seeds) < count:
            if self._returned:
                seeds.append(self._returned.popleft())
            else:
                number = self._next_item.to_bytes(8, "little")
                drawn = blake3(number, key=self._item_secret).digest(length=8)
                seeds.append(int.from_bytes(drawn, "little") >> 1)
                self._next_item += 1
        return seeds

    def _lease(self, prompt: NDArray[np.uint32], version: Version) -> Lease:
        settings, positions = self._settings, self._info.positions_max
        tokens_max = settings.tokens_max
        if positions is not None:  # an answer that its model cannot finish would be malformed
            tokens_max = min(tokens_max, positions - int(prompt.size))
        return Lease(
            lease_id=f"{self._rng.getrandbits(128):032x}",
            kind="train",
            prompt=from_tokens(prompt),
            samples=settings.samples_per_prompt,
            seeds=[self._rng.getrandbits(63) for _ in range(settings.samples_per_prompt)],
            sampling=Sampling(
                temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k
            ),
            tokens_max=tokens_max,
            stop_ids=list(self._info.stop_ids),
            forced=None,
            version=version,
            deadline_s=settings.lease_timeout_s,
            affinity=None,
        )

    def _hold(self, member: Member, leases: list[Lease], seeds: list[int]) -> None:
        deadline_s = trio.current_time() + self._settings.lease_timeout_s
        for lease, seed in zip(leases, seeds, strict=True):
            self._held[LeaseId(lease.lease_id)] = _Held(
                OpenLease(lease, member.peer_id, member.incarnation, seed), deadline_s
            )

    # --- ending -------------------------------------------------------------------------------

    def find(self, lease_id: LeaseId) -> OpenLease | None:
        """Return a lease in flight."""
        held = self._held.get(lease_id)
        return None if held is None else held.open

    def close(self, lease_id: LeaseId, *, give_back: bool, aborted: bool = False) -> None:
        """Forget a lease that the book has moved.

        Args:
            lease_id: Of any lease.
            give_back: Hand its prompt out again,
            aborted: though not for ever, if all that ask for it give it back.
        """
        held = self._held.pop(lease_id, None)
        if held is None:
            return
        if not give_back:
            self._delivered(held.open.peer_id)
            return
        seed = held.open.seed
        if aborted and self._aborted(seed) >= ABORTS_MAX:
            detail = f"{ABORTS_MAX} peers gave its prompt back unanswered; it is left out"
            self._journal.event(ITEM_FAILED, detail=detail)
        else:
            self.give_back(seed)

    def _delivered(self, peer_id: PeerId) -> None:
        """Let a peer that had let leases expire hold twice as many; at last as many as all."""
        allowed = 2 * self._allowed.pop(peer_id, LEASES_PER_CALL_MAX)
        if allowed < LEASES_PER_CALL_MAX:
            self._allowed[peer_id] = allowed

    def _expired(self, peers: Iterable[PeerId]) -> None:
        """Let each have fewer leases from now on, by two for each of its own among these.

        Or one that delivers nothing could hold all that there are, again and again.
        """
        for peer_id, expired in Counter(peers).items():
            self._allowed[peer_id] = max(1, self._held_by(peer_id) - 2 * expired)
            if len(self._allowed) > EXPIRIES_REMEMBERED:
                del self._allowed[next(iter(self._allowed))]

    def _held_by(self, peer_id: PeerId) -> int:
        return sum(held.open.peer_id == peer_id for held in self._held.values())

    def _aborted(self, seed: int) -> int:
        """Count one more; return how often in all."""
        count = self._aborts.pop(seed, 0) + 1
        self._aborts[seed] = count
        if len(self._aborts) > ABORTS_REMEMBERED:
            del self._aborts[next(iter(self._aborts))]
        return count

    def give_back(self, seed: int) -> None:
        """Hand out again the prompt of a group that was accepted and then dropped."""
        self._returned.append(seed)
        self._state.notify()

    async def end_peer(
        self, peer_id: PeerId, incarnation: Incarnation, reason: Reason = Reason.PEER_GONE
    ) -> int:
        """End all leases of a peer that is gone; returns how many."""
        mine = [
            (lease_id, held.open)
            for lease_id, held in self._held.items()
            if held.open.peer_id == peer_id and held.open.incarnation == incarnation
        ]
        return await self._end(mine, reason)

    def overdue(self, before_s: float) -> int:
        """Return how many leases should have ended before this moment, and have not."""
        return sum(held.deadline_s < before_s for held in self._held.values())

    async def end_all(self, reason: Reason) -> int:
        """End every lease in flight, at the end of the run; returns how many."""
        async with self._granting:  # a grant under way comes first
            return await self._end([(i, held.open) for i, held in self._held.items()], reason)

    async def run(self) -> None:
        """End leases whose deadline has passed; runs until cancelled.

        That is the end of the run: then nobody waits for prompts any more, as a task's worker may
        need minutes for them.

        Raises:
            ChildError: The task worker is gone and could not be started again.
            ConfigError: Nor ever could be, with these settings.
        """
        try:
            await self._keep_time()
        finally:
            self._opening.cancel()

    async def _keep_time(self) -> None:
        while True:
            now = trio.current_time()
            late = [(i, held.open) for i, held in self._held.items() if held.deadline_s <= now]
            self._expired(held.peer_id for _, held in late)
            await self._end(late, Reason.LEASE_EXPIRED)
            next_s = min((held.deadline_s for held in self._held.values()), default=None)
            pause_s = self._settings.lease_timeout_s if next_s is None else next_s - now
            with trio.move_on_after(max(0.05, pause_s)):
                await self._failed.wait()
            if self._failure is not None:
                raise self._failure

    def _open(self, leases: list[Lease]) -> list[tuple[LeaseId, OpenLease]]:
        """Return those of these leases that are still held."""
        ids = [LeaseId(lease.lease_id) for lease in leases]
        return [(i, self._held[i].open) for i in ids if i in self._held]

    async def _end(self, leases: list[tuple[LeaseId, OpenLease]], reason: Reason) -> int:
        if not leases:
            return 0
        ended = await self._book.reject(
            [(lease_id, held.lease.samples) for lease_id, held in leases],
            Place.IN_FLIGHT,
            reason,
        )
        for lease_id in ended:
            self.close(lease_id, give_back=True)
        if ended:
            self._journal.event(LEASES_ENDED, reason=reason.value, leases=len(ended))
        return len(ended)
