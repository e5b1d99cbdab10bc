"""All that can be said of a run: its summary, and its status with what moves at the moment.

`Board.summary` is summary.json. `Board.status` adds what a person watches: the curve, the newest
versions on their way, queue and rates. The terminal view, the dashboard, ``/status``, ``/metrics``
and ``echo2-coordinator status`` all show this one mapping and compute nothing of their own.

Nothing here decides anything. A status is made at most once a second, and at most a twentieth of
the time goes into it, however many people watch; the counts come from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

import trio

from coordinator import report
from coordinator.arrivals import Arrivals
from coordinator.book import Book
from coordinator.config import Settings
from coordinator.intake import Intake
from coordinator.membership import Member
from coordinator.publish import WeightBytes
from coordinator.roster import Roster
from coordinator.run_state import RunState
from echo2p2p.limits import Fill
from echo2p2p.net.ports import WallClock
from echo2p2p.rollouts.batch import GroupQueue

STATUS_AGE_S: Final = 1.0
"""A status is told to others for so long before it is made anew."""
GONE_SHOWN_MAX: Final = 1000
"""Peers that are gone and still have a row of their own: those of whom most was accepted."""
STATUS_SHARE: Final = 0.05
"""Part of the time that may go into making statuses."""


class WeightFigures(Protocol):
    """The part of the publisher that is shown."""

    @property
    def source_bytes(self) -> tuple[int, int]:
        """Bytes sent by the coordinator's relay: in all, and of deltas."""
        ...

    def statistics(self) -> WeightBytes:
        """Return sizes so far."""
        ...


class Board:
    """What a run says of itself.

    Args:
        settings: Of the run.
        clock: For time stamps that people and charts read.
        book: Counts.
        state: Step, versions, members.
        roster: Bytes by peer.
        intake: Groups that wait to be scored.
        queue: Groups that wait for a step.
        publisher: Sizes.
        fills: How full everything is that has a bound.
        held_out: Scores of items that are never trained on.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        clock: WallClock,
        book: Book,
        state: RunState,
        roster: Roster,
        intake: Intake,
        queue: GroupQueue,
        publisher: WeightFigures,
        fills: Callable[[], Iterable[Fill]],
        held_out: Callable[[], Mapping[str, object] | None],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._book = book
        self._state = state
        self._roster = roster
        self._intake = intake
        self._queue = queue
        self._publisher = publisher
        self._fills = fills
        self._held_out = held_out
        self._arrivals = Arrivals()
        self._phase: dict[str, object] = {"name": "starting"}
        self._making = trio.Lock()
        self._made: dict[str, object] = {}
        self._good_until_s = float("-inf")
        self.progress = report.Progress(began_s=clock.time())

    # --- what happens -------------------------------------------------------------------------

    def starting(self, phase: str, figures: Mapping[str, float]) -> None:
        """Note how far a starting learner is."""
        self._phase = {"name": phase, **figures}

    async def watch(self) -> None:
        """Note when versions reach peers; runs until cancelled."""
        while True:
            latest = self._state.latest
            step = None if latest is None else self._state.version_step(latest)
            self._arrivals.look(
                latest,
                0 if step is None else step,
                {member.peer_id: member.version for member in self._state.members.live()},
                self._clock.time(),
            )
            await self._state.moved.park()

    # --- what is said -------------------------------------------------------------------------

    async def summary(self) -> dict[str, object]:
        """Return everything about the run so far; summary.json."""
        latest = self._state.latest
        return {
            "outcome": self._state.outcome,
            "run": self._state.run_id,
            **self.progress.summary(self._clock.time()),
            "held_out": self._held_out(),
            "step": self._state.step,
            "generation": self._state.generation,
            "versions_published": 0 if latest is None else latest + 1,
            "trajectories": report.trajectories(*await self._book.audit()),
            "weights": report.weights(
                self._publisher.statistics(),
                source_bytes=self._publisher.source_bytes,
                peer_bytes=await self._roster.relayed_bytes(),
            ),
            "peers": await self._peers(),
        }

    async def status(self) -> Mapping[str, object]:
        """Return the summary and what moves; not to be changed by the caller."""
        async with self._making:
            if trio.current_time() >= self._good_until_s:
                began_s = trio.current_time()
                self._made = await self._status()
                ended_s = trio.current_time()
                self._good_until_s = ended_s + max(STATUS_AGE_S, (ended_s - began_s) / STATUS_SHARE)
            return self._made

    async def _status(self) -> dict[str, object]:
        settings, live = self._settings, self._state.members.live()
        training = self._state.leasing or self._state.outcome != "running"
        return {
            **await self.summary(),
            "now_s": self._clock.time(),
            "phase": {"name": "training"} if training else self._phase,
            "steps_target": settings.run.steps,
            "staleness_budget": settings.rollouts.staleness_budget,
            "publication_period": settings.rollouts.kappa,
            "batch_groups": settings.rollouts.prompts_per_step,
            "reward_recent": self.progress.reward_recent(),
            "age_recent": self.progress.age_recent(),
            "steps_per_s": self.progress.steps_per_s(),
            "tokens_per_s": sum(member.measurements.engine_tokens_per_s for member in live),
            "queue": {"groups": len(self._queue), "unscored": self._intake.unscored},
            "bounds": [
                {"what": fill.what, "now": fill.now, "limit": fill.limit} for fill in self._fills()
            ],
            "curve": self.progress.curve(),
            "versions": [
                {
                    "version": row.version,
                    "step": row.step,
                    "published_s": row.published_s,
                    "peers": row.peers,
                    "last_after_s": row.last_after_s if row.peers else None,
                    "after_s": dict(row.after_s),
                }
                for row in self._arrivals.rows()
            ],
        }

    async def _peers(self) -> list[dict[str, object]]:
        live = {member.peer_id: member for member in self._state.members.live()}
        latest = self._state.latest
        rows: list[dict[str, object]] = []
        for standing in await self._book.standings(GONE_SHOWN_MAX):
            member, fate = live.get(standing.peer_id), standing.fates
            relayed_bytes = standing.relayed_bytes
            if member is not None:
                relayed_bytes += member.measurements.relayed_bytes
            rows.append(
                {
                    "peer": standing.peer_id,
                    "name": standing.name,
                    **_now(member, latest, self._roster.term_s),
                    "accepted": fate.get("trained", 0) + fate.get("queued", 0),
                    "trained": fate.get("trained", 0),
                    "in_flight": fate.get("in_flight", 0),
                    "rejected": fate.get("rejected", 0),
                    "rejected_by_reason": standing.reasons,
                    "relayed_bytes": relayed_bytes,
                }
            )
        return rows


def _now(member: Member | None, latest: int | None, term_s: float) -> dict[str, object]:
    """Return what a member's last heartbeat said; of one that is gone only that."""
    if member is None:
        return {"state": "gone", "version": None}
    behind = None if latest is None or member.version is None else latest - member.version
    said = member.measurements
    return {
        "state": member.state.value,
        "version": member.version,
        "behind": behind,
        "engine": member.engine,
        "incarnation": member.incarnation,
        "heard_s": max(0.0, trio.current_time() - (member.term_end_s - term_s)),
        "tokens_per_s": said.engine_tokens_per_s,
        "tokens_generated": said.tokens_generated,
        "queue_leases": said.queue_leases,
        "received_bytes": said.received_bytes,
        "dialable": member.relay is not None,
    }
